"""What a verdict adds: its blocks to decisions, and its section to the report."""

from __future__ import annotations

from collections.abc import Iterator

from stratbench.analysis.decision.paired_results import read_blocks, read_verdict
from stratbench.analysis.records.reading import Reading, ReportInput, Section, render_section


def make_verdict_sections(given: ReportInput) -> Iterator[Section]:
    """Make the report's section where a verdict counts."""
    verdict = read_verdict(given.verdict_path)
    if verdict is not None:
        # It draws, and matplotlib takes 0.5 s to import.
        from stratbench.analysis.report.verdict_section import verdict_section

        html = render_section("verdict.html.j2", verdict=verdict_section(verdict, given.cells))
        yield Section("verdict", html, "Verdict", answers=True)


READING = Reading(sections=make_verdict_sections, evidence=read_blocks)
