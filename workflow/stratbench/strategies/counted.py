"""Base of strategies without a formula for their traffic, which is counted in an untimed step."""

from __future__ import annotations

from math import isnan, nan
from typing import TYPE_CHECKING, Any

from stratbench.strategies import collective

if TYPE_CHECKING:
    from torch import Tensor

    from stratbench.strategies.saved import SavedState


class Counted(collective.Collective):
    """Counts the communication of the first warm-up step, or of the last if the strategy `warms_up`.

    The first steps of a strategy that `warms_up` do other work than most steps.
    """

    #: Whether the communication of the next step is counted, as it is after a `save`.
    _counts_step = True
    #: Bytes that the last counted step sent, or NaN if no step was counted or they are unknown.
    _sent_bytes = nan

    def save(self) -> SavedState:
        self._counts_step = True
        return super().save()

    def restore(self, saved: SavedState) -> None:
        super().restore(saved)
        self._counts_step = False

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        if not self._counts_step:
            return super().step(x, y)
        from stratbench.telemetry.collective_count import CollectiveCount

        with CollectiveCount() as count:
            loss = super().step(x, y)
        self._sent_bytes = count.count_wire_bytes(self.worker.world_size)
        self._counts_step = self.warms_up
        return loss

    def communication(self) -> dict[str, Any] | None:
        return (
            None if isnan(self._sent_bytes) else collective.describe_ring_traffic(self._sent_bytes)
        )
