"""The base of strategies of which only a step tells what they send, since activations are exchanged."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Any

from stratbench.strategies import base

if TYPE_CHECKING:
    from torch import Tensor

    from stratbench.strategies.saved import SavedState


class CountedTraffic(base.Collective):
    """Counts what its operators exchange in the first step after a `save`, which is not timed."""

    #: What that step sent, in bytes; None: not looked at yet.
    _sent_bytes: float | None = None

    def save(self) -> SavedState:
        self._sent_bytes = None
        return super().save()

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        if self._sent_bytes is not None:
            return super().step(x, y)
        from stratbench.telemetry.collective_count import CollectiveCount

        with CollectiveCount() as count:
            loss = super().step(x, y)
        self._sent_bytes = count.wire_bytes(self.worker.world_size)
        return loss

    def communication(self) -> dict[str, Any] | None:
        return None if isnan(self._sent_bytes) else base.ring_traffic(self._sent_bytes)
