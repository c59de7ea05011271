"""Loss scaling for fp16 in which every worker takes or skips a step together."""

from __future__ import annotations

import torch
import torch.distributed as dist


class SharedScaler(torch.amp.GradScaler):
    """GradScaler whose overflow flag is the maximum over all workers.

    With sharded gradients an overflow shows up in one worker's shard only; without the reduction
    that worker alone would skip the step. Skipped steps are counted on the device.
    """

    def __init__(self, device: torch.device, shared: bool) -> None:
        super().__init__(device.type)
        self._shared = shared
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)

    def _unscale_grads_(self, *args, **kwargs):
        found = super()._unscale_grads_(*args, **kwargs)
        for flag in found.values():
            if self._shared:
                dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            self._skipped += (flag > 0).squeeze()
        return found

    def skipped_steps(self) -> int:
        """Steps without an update because a gradient overflowed (synchronises)."""
        return int(self._skipped)
