"""Defines the base of strategies whose communication is counted, for lack of a formula."""

from __future__ import annotations

from math import isnan, nan
from typing import TYPE_CHECKING, Any

from stratbench.strategies import collective

if TYPE_CHECKING:
    from torch import Tensor

    from stratbench.strategies.saved import SavedState


class Counted(collective.Collective):
    """Base of strategies whose communicated bytes are counted during the first warm-up step.

    A strategy that `warms_up` does other work in its first steps. Its last warm-up step is counted instead.
    """

    #: Whether the next step counts the bytes that it sends. `save`, which begins the warm-up, sets this.
    _counts_step = True
    #: Number of bytes that the last counted step sent. NaN: no step was counted, or the bytes are unknown.
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
        self._sent_bytes = count.count_sent_bytes(self.worker.world_size)
        self._counts_step = self.warms_up
        return loss

    def communication(self) -> dict[str, Any] | None:
        return (
            None if isnan(self._sent_bytes) else collective.describe_ring_traffic(self._sent_bytes)
        )
