"""Manages evaluations during the training: epochs that wait for a worker, and results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from stratbench.extensions.servers.ps.tickets import TicketPlan
from stratbench.extensions.servers.wire.frames import ProtocolError

#: Values in a SCORE message.
_FIGURES = ("test_loss", "score", "score_error")


def parse_score(values: Any) -> dict[str, float | None]:
    """Check and return the values of a SCORE message. A value that was not finite is None.

    Raises:
        ProtocolError: If the message is malformed.
    """
    if not isinstance(values, dict) or set(values) != set(_FIGURES):
        raise ProtocolError(f"malformed SCORE: {values!r:.100}")
    for value in values.values():
        if value is not None and (type(value) is not float or not math.isfinite(value)):
            raise ProtocolError(f"malformed SCORE: {value!r:.100} is not a finite float or null")
    return values


class Evaluations:
    """Assigns each ended epoch's evaluation to the next worker that asks for work.

    The class is not thread-safe; the server calls its methods under a lock.
    """

    def __init__(
        self,
        plan: TicketPlan,
        wanted: bool,
        target: float | None = None,
        higher_is_better: bool = True,
    ) -> None:
        """Prepare to hand out evaluations of epochs.

        Args:
            plan: Tickets of the run.
            wanted: Whether epochs are evaluated at all.
            target: Score that ends the run, if any.
            higher_is_better: Whether a higher score is better.
        """
        self.scores: dict[int, dict[str, float | None]] = {}  # results of evaluations, by epoch
        self._ends = list(accumulate(map(plan.count_epoch_tickets, range(plan.epochs))))
        self._wanted, self._target, self._higher = wanted, target, higher_is_better
        self._ended_epochs = 0  # number of epochs that have ended
        self._checked_epochs = 0  # number of epochs for which is known whether they end the run
        self._last: int | None = None  # the epoch that ends the run
        self._waiting: list[int] = []
        self._held: dict[int, int] = {}  # epoch that each worker evaluates, by worker

    def restore_scores(self, scores: Mapping[int, Mapping[str, Any]], settled: int) -> None:
        """Restore the scores of epochs that ended within the first `settled` completed tickets."""
        self.scores = {
            e: {name: s[name] for name in _FIGURES}
            for e, s in scores.items()
            if self._ends[e] <= settled
        }
        self.add_ended_epochs(settled)

    def add_ended_epochs(self, settled: int) -> None:
        """Queue the epochs that ended within the first `settled` completed tickets for evaluation."""
        while (
            self._wanted
            and self._ended_epochs < len(self._ends)
            and self._ends[self._ended_epochs] <= settled
        ):
            if self._ended_epochs not in self.scores:
                self._waiting.append(self._ended_epochs)
            self._ended_epochs += 1

    def count_tickets_until(self, epoch: int) -> int:
        """Return the number of tickets from the run's start to an epoch's end."""
        return self._ends[epoch]

    @property
    def has_waiting_epoch(self) -> bool:
        """Whether an epoch waits for evaluation."""
        return bool(self._waiting)

    @property
    def are_all_evaluated(self) -> bool:
        """Whether all epochs are evaluated. True as well if the cell has no evaluation."""
        return not self._wanted or len(self.scores) == len(self._ends)

    def take_epoch(self, worker: int) -> int | None:
        """Assign a waiting epoch to a worker, and return the epoch.

        The result is None if no epoch waits.
        """
        if not self._waiting:
            return None
        epoch = self._held[worker] = self._waiting.pop(0)
        return epoch

    def store_result(self, worker: int, results: dict[str, float | None]) -> int:
        """Store the results of a worker's evaluation, and return the evaluated epoch."""
        epoch = self._held.pop(worker)
        self.scores[epoch] = results
        return epoch

    def release_epoch(self, worker: int) -> None:
        """Queue the epoch that a lost worker was evaluating, if any, for another worker."""
        epoch = self._held.pop(worker, None)
        if epoch is not None:
            self._waiting = sorted([*self._waiting, epoch])

    @property
    def final_epoch(self) -> int | None:
        """The epoch that ends the run before its last ticket, if any.

        The epoch is the first that reaches the target or has results that are not finite. All earlier epochs
        have been evaluated. It is None if no result so far ends the run.
        """
        while self._last is None and self._checked_epochs in self.scores:
            if self._ends_run(self.scores[self._checked_epochs]):
                self._last = self._checked_epochs
            self._checked_epochs += 1
        return self._last

    def _ends_run(self, results: Mapping[str, float | None]) -> bool:
        loss, score = results["test_loss"], results["score"]
        if loss is None or score is None:
            return True
        if self._target is None:
            return False
        return score >= self._target if self._higher else score <= self._target
