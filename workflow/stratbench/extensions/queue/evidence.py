"""Adds to a decision the simulated time of a training in a cluster's queue (`decide.queue`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.evidence import Evidence
from stratbench.analysis.records.reading import Reading
from stratbench.extensions.queue.answer import simulate_queue_and_answer
from stratbench.extensions.queue.request import QueueRequest
from stratbench.extensions.queue.section import make_queue_sections
from stratbench.study.config.messages import ConfigError


class QueueEvidence(Evidence):
    """Evidence for a decision from a simulation of the queue."""

    def __init__(self, constraints: Constraints) -> None:
        """Store the decision's constraints, which include `decide.queue`."""
        self.constraints = constraints

    def build_separate_answer(self) -> Mapping[str, Any] | None:
        """Simulate the queue, and return the answer. None without `decide.queue`.

        The progress is printed to stderr.

        Raises:
            ConfigError: If the history is insufficient.
        """
        block = self.constraints.more.get("queue")
        if block is None:
            return None
        request = QueueRequest(**block["queue"])
        margin = self.constraints.equivalence_margin
        try:
            return simulate_queue_and_answer(
                request, block["gpus_per_node"], margin, print_simulation_progress
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error


def print_simulation_progress(num_simulated: int, total: int) -> None:
    """Print the progress of the simulation after each quarter of all submission times."""
    if num_simulated * 4 // total > (num_simulated - 1) * 4 // total:
        print(
            f"queue: simulated {num_simulated} of {total} submission times",
            file=sys.stderr,
            flush=True,
        )


READING = Reading(
    list_sections=make_queue_sections,
    read_evidence=lambda path, constraints: QueueEvidence(constraints),
)
