"""Assigns the evaluation of ended epochs to workers during the training, and stores the results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from stratbench.extensions.elastic.target import is_target_score_reached
from stratbench.extensions.servers.ps.tickets import TicketPlan
from stratbench.extensions.servers.wire.frames import ProtocolError

#: Names of the values in a SCORE message.
_FIGURES = ("test_loss", "score", "score_error")


def parse_score_message(message: Any) -> dict[str, float | None]:
    """Check the values of a SCORE message, and return them. None replaces values that are not finite.

    Raises:
        ProtocolError: If the message is malformed.
    """
    if not isinstance(message, dict) or set(message) != set(_FIGURES):
        raise ProtocolError(f"malformed SCORE message: {message!r:.100}")
    for value in message.values():
        if value is not None and (type(value) is not float or not math.isfinite(value)):
            raise ProtocolError(
                f"malformed SCORE message: {value!r:.100} is not a finite float or null"
            )
    return message


class Evaluations:
    """Assigns the evaluation of each ended epoch to the next worker without a batch.

    The class is not thread-safe; the server calls its methods under a lock.
    """

    def __init__(
        self,
        plan: TicketPlan,
        wanted: bool,
        target: float | None = None,
        higher_is_better: bool = True,
    ) -> None:
        """Prepare to assign evaluations of epochs to workers.

        Args:
            plan: Tickets of the training.
            wanted: Whether epochs are evaluated at all.
            target: Score of an epoch that ends the training, if any.
            higher_is_better: Whether a higher score is better.
        """
        # results of evaluated epochs, by epoch
        self.scores: dict[int, dict[str, float | None]] = {}
        self._ends = list(accumulate(map(plan.count_epoch_tickets, range(plan.epochs))))
        self._wanted, self._target, self._higher = wanted, target, higher_is_better
        self._ended_epochs = 0  # number of epochs that have ended
        self._checked_epochs = 0  # number of epochs whose results were compared with the target
        self._last: int | None = None  # epoch whose results end the training
        self._waiting: list[int] = []
        self._held: dict[int, int] = {}  # epoch that a worker evaluates, by worker number

    def restore_scores(self, scores: Mapping[int, Mapping[str, Any]], num_completed: int) -> None:
        """Restore the results of epochs that ended within the first `num_completed` tickets."""
        self.scores = {
            e: {name: s[name] for name in _FIGURES}
            for e, s in scores.items()
            if self._ends[e] <= num_completed
        }
        self.queue_ended_epochs(num_completed)

    def queue_ended_epochs(self, num_completed: int) -> None:
        """Queue for evaluation the epochs that ended within the first `num_completed` tickets."""
        while (
            self._wanted
            and self._ended_epochs < len(self._ends)
            and self._ends[self._ended_epochs] <= num_completed
        ):
            if self._ended_epochs not in self.scores:
                self._waiting.append(self._ended_epochs)
            self._ended_epochs += 1

    def count_tickets_until_epoch_end(self, epoch: int) -> int:
        """Return the number of tickets from the training's start to an epoch's end."""
        return self._ends[epoch]

    @property
    def has_epoch_to_evaluate(self) -> bool:
        """Whether an ended epoch waits for a worker that evaluates it."""
        return bool(self._waiting)

    @property
    def are_all_epochs_evaluated(self) -> bool:
        """Whether all epochs are evaluated. True for a cell without evaluation."""
        return not self._wanted or len(self.scores) == len(self._ends)

    def assign_epoch_to_evaluate(self, worker: int) -> int | None:
        """Assign the evaluation of a waiting epoch to a worker.

        Return the epoch, or None if no epoch waits.
        """
        if not self._waiting:
            return None
        epoch = self._held[worker] = self._waiting.pop(0)
        return epoch

    def store_results_and_return_epoch(self, worker: int, results: dict[str, float | None]) -> int:
        """Store the results of a worker's evaluation, and return the evaluated epoch."""
        epoch = self._held.pop(worker)
        self.scores[epoch] = results
        return epoch

    def requeue_epoch_of_lost_worker(self, worker: int) -> None:
        """Queue again the epoch that a lost worker was to evaluate, if any."""
        epoch = self._held.pop(worker, None)
        if epoch is not None:
            self._waiting = sorted([*self._waiting, epoch])

    @property
    def epoch_that_ends_training(self) -> int | None:
        """Number of the epoch whose results end the training early, or None so far.

        It is the first epoch that reaches the target score, or whose results are not finite. All earlier
        epochs have been evaluated.
        """
        while self._last is None and self._checked_epochs in self.scores:
            if self._is_final_result(self.scores[self._checked_epochs]):
                self._last = self._checked_epochs
            self._checked_epochs += 1
        return self._last

    def _is_final_result(self, results: Mapping[str, float | None]) -> bool:
        loss, score = results["test_loss"], results["score"]
        if loss is None or score is None:
            return True
        return is_target_score_reached(score, self._target, self._higher)
