"""The simulated queue as evidence of a decision: an answer of its own, for `decide.queue`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.evidence import Evidence
from stratbench.analysis.records.reading import Reading
from stratbench.extensions.queue.answer import answer
from stratbench.extensions.queue.request import QueueRequest
from stratbench.extensions.queue.section import make_queue_sections
from stratbench.study.config.messages import ConfigError


class QueueEvidence(Evidence):
    """The way of a training through a queue."""

    def __init__(self, constraints: Constraints) -> None:
        """`constraints`: those of the decision, with `decide.queue`."""
        self.constraints = constraints

    def answer(self) -> Mapping[str, Any] | None:
        """Return the simulation's answer, with progress on stderr.

        Raises:
            ConfigError: The history does not do.
        """
        block = self.constraints.more.get("queue")
        if block is None:
            return None
        request = QueueRequest(**block["queue"])
        margin = self.constraints.equivalence_margin
        try:
            return answer(request, block["gpus_per_node"], margin, show_progress)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def show_progress(done: int, of: int) -> None:
    """Print each quarter of the moments that are simulated."""
    if done * 4 // of > (done - 1) * 4 // of:
        print(f"queue: {done} of {of} moments simulated", file=sys.stderr, flush=True)


READING = Reading(
    sections=make_queue_sections, evidence=lambda path, constraints: QueueEvidence(constraints)
)
