"""Loss scaling for fp16 that counts the steps it skips and can share its verdict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from stratbench.workload.torch_internals import ObservableScaler


class SharedScaler(ObservableScaler):
    """GradScaler whose overflow flag is, if `shared`, the maximum over all workers.

    With sharded gradients an overflow shows up in one worker's shard only. Without the reduction that worker
    alone would skip the step (torch's ShardedGradScaler reduces it for the same reason). Gradients that are
    all-reduced overflow on every worker or on none, so DDP needs no reduction. Skipped steps are counted on
    the device.
    """

    def __init__(self, device: torch.device, shared: bool) -> None:
        super().__init__(device.type)
        self._shared = shared
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)

    def observe(self, flags: Iterable[torch.Tensor]) -> None:
        for flag in flags:
            if self._shared:
                dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            self._skipped += (flag > 0).squeeze()

    def counts(self) -> dict[str, Any]:
        """Return its scale and its counts (synchronises), as JSON-able values."""
        return self.state_dict() | {"skipped": self.skipped_steps()}

    def go_on(self, counts: dict[str, Any]) -> None:
        """Go on from what `counts` gave."""
        self.load_state_dict({key: value for key, value in counts.items() if key != "skipped"})
        self._skipped.fill_(counts["skipped"])

    def skipped_steps(self) -> int:
        """Return steps without an update because a gradient overflowed (synchronises)."""
        return int(self._skipped)
