"""Makes the report's section on a training's time including its wait in the queue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stratbench.analysis.records.reading import ReportInput, Section, render_section

TEMPLATE = Path(__file__).parent / "templates" / "queue.html.j2"


def make_queue_sections(inputs: ReportInput) -> Iterator[Section]:
    """Yield the report's section on the queue, if the config has `decide.queue`."""
    if queue := inputs.answers_json["further"].get("queue"):
        yield Section("queue", render_section(TEMPLATE, queue=queue), is_beside_answers=True)
