"""Adds the verdict to the evidence of decisions, and a section on it to the report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stratbench.analysis.records.reading import Reading, ReportInput, Section, render_section
from stratbench.extensions.verdict.paired_results import read_blocks_as_evidence, read_verdict

TEMPLATE = Path(__file__).parent / "templates" / "verdict.html.j2"


def make_verdict_sections(inputs: ReportInput) -> Iterator[Section]:
    """Make the report's section on the verdict, if verdict.json is valid."""
    verdict = read_verdict(inputs.evidence.get("verdict", ""))
    if verdict is not None:
        # The section imports matplotlib, which takes 0.5 s.
        from stratbench.extensions.verdict.section import collect_verdict_section_values

        html = render_section(
            TEMPLATE, verdict=collect_verdict_section_values(verdict, inputs.cells)
        )
        yield Section("verdict", html, "Verdict", is_beside_answers=True)


READING = Reading(list_sections=make_verdict_sections, read_evidence=read_blocks_as_evidence)
