"""Defines loss scaling for fp16 that counts skipped steps and can be shared by workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from stratbench.workload.torch_internals import ObservableScaler


class SharedScaler(ObservableScaler):
    """Loss scaler that counts skipped steps. If `shared`, all workers skip a step when one overflows.

    With sharded gradients an overflow may be in one worker's shard only, and this worker alone would skip the
    step. Torch's ShardedGradScaler reduces its flags for the same reason. All-reduced gradients overflow on
    every worker or on none, so DDP needs no reduction. Skipped steps are counted on the device.
    """

    def __init__(self, device: torch.device, shared: bool) -> None:
        super().__init__(device.type)
        self._shared = shared
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)

    def process_overflow_flags(self, flags: Iterable[torch.Tensor]) -> None:
        for flag in flags:
            if self._shared:
                dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            self._skipped += (flag > 0).squeeze()

    def export_step_counts(self) -> dict[str, Any]:
        """Wait for the device, and return the loss scale and step counts for JSON."""
        return self.state_dict() | {"skipped": self.count_skipped_steps()}

    def load_step_counts(self, counts: dict[str, Any]) -> None:
        """Restore the loss scale and the step counts that `export_step_counts` returned."""
        self.load_state_dict({key: value for key, value in counts.items() if key != "skipped"})
        self._skipped.fill_(counts["skipped"])

    def count_skipped_steps(self) -> int:
        """Return how many steps were skipped because of an overflow, after waiting for the device."""
        return int(self._skipped)
