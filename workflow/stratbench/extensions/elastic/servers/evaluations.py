"""Evaluation during the training: the epochs' states that wait for a worker, and the results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from stratbench.extensions.servers.ps.tickets import TicketPlan
from stratbench.extensions.servers.wire.frames import ProtocolError

#: Values in a SCORE, besides the number of the epoch.
_FIGURES = ("test_loss", "score", "score_error")


def parse_score(values: Any) -> dict[str, float | None]:
    """Return the values of a SCORE, None for those that are not finite.

    Raises:
        ProtocolError: If they are invalid.
    """
    if not isinstance(values, dict) or set(values) != set(_FIGURES):
        raise ProtocolError(f"malformed SCORE: {values!r:.100}")
    for value in values.values():
        if value is not None and (type(value) is not float or not math.isfinite(value)):
            raise ProtocolError(f"malformed SCORE: {value!r:.100} is no figure")
    return values


class Evaluations:
    """Evaluates each epoch's state once, in order, on the next worker that asks for work.

    Not thread-safe: the server calls it under its lock.
    """

    def __init__(
        self,
        plan: TicketPlan,
        wanted: bool,
        target: float | None = None,
        higher_is_better: bool = True,
    ) -> None:
        """`wanted`: whether anything is evaluated. `target`: the score that ends the run."""
        self.scores: dict[int, dict[str, float | None]] = {}  # by epoch
        self._ends = list(accumulate(map(plan.tickets_of, range(plan.epochs))))
        self._wanted, self._target, self._higher = wanted, target, higher_is_better
        self._seen = 0  # epochs that have ended
        self._judged = 0  # epochs of which is known whether they end the run
        self._last: int | None = None  # the one that does
        self._waiting: list[int] = []
        self._held: dict[int, int] = {}  # worker -> epoch

    def resume(self, scores: Mapping[int, Mapping[str, Any]], settled: int) -> None:
        """Go on with the scores of those epochs that end within the first `settled` tickets."""
        self.scores = {
            e: {name: s[name] for name in _FIGURES}
            for e, s in scores.items()
            if self._ends[e] <= settled
        }
        self.note(settled)

    def note(self, settled: int) -> None:
        """Add the epochs that end with `settled` completed tickets to those that wait for evaluation."""
        while self._wanted and self._seen < len(self._ends) and self._ends[self._seen] <= settled:
            if self._seen not in self.scores:
                self._waiting.append(self._seen)
            self._seen += 1

    def tickets_until(self, epoch: int) -> int:
        """Return the number of tickets of an epoch and those before it."""
        return self._ends[epoch]

    @property
    def waiting(self) -> bool:
        """Whether an epoch waits for evaluation."""
        return bool(self._waiting)

    @property
    def all_done(self) -> bool:
        """Whether all epochs of the plan have been evaluated, or none has to be."""
        return not self._wanted or len(self.scores) == len(self._ends)

    def take(self, worker: int) -> int | None:
        """Return the epoch that `worker` has to evaluate now, or None."""
        if not self._waiting:
            return None
        epoch = self._held[worker] = self._waiting.pop(0)
        return epoch

    def settle(self, worker: int, figures: dict[str, float | None]) -> int:
        """Store the results of the worker's evaluation; return the epoch."""
        epoch = self._held.pop(worker)
        self.scores[epoch] = figures
        return epoch

    def give_back(self, worker: int) -> None:
        """Release the epoch of a lost worker, if it had any, for another one."""
        epoch = self._held.pop(worker, None)
        if epoch is not None:
            self._waiting = sorted([*self._waiting, epoch])

    @property
    def last_epoch(self) -> int | None:
        """The epoch that ends the run before its last ticket, or None as far as is known.

        It is the first that reaches the target, or whose results are not finite. All before it are evaluated.
        """
        while self._last is None and self._judged in self.scores:
            if self._ends_run(self.scores[self._judged]):
                self._last = self._judged
            self._judged += 1
        return self._last

    def _ends_run(self, figures: Mapping[str, float | None]) -> bool:
        loss, score = figures["test_loss"], figures["score"]
        if loss is None or score is None:
            return True
        if self._target is None:
            return False
        return score >= self._target if self._higher else score <= self._target
