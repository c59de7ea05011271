"""The server's side of float buffers (BatchNorm running statistics): the mean over the workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class BufferMean:
    """Averages what the workers pushed last.

    Every worker has its own running statistics of its batches and pushes them with each gradient. The
    server's are the unweighted mean of each worker's latest. A worker that has finished still counts; one
    that was lost does not, unless no others are left. Workers never read the mean: only evaluation does.
    Before the first push it is the model's initial buffers. With one worker it is that worker's buffers, bit
    for bit.
    """

    def __init__(self, initial: Tensor) -> None:
        """`initial`: shape [buffer_numel]."""
        self._initial = initial
        self._latest: dict[int, Tensor] = {}
        self._lost: set[int] = set()
        self._lock = threading.Lock()

    def push(self, worker: int, buffers: Tensor, alive: Callable[[], bool]) -> None:
        """Copy `buffers` as `worker`'s latest.

        Args:
            worker: Number of the worker.
            buffers: Its buffers, shape [buffer_numel].
            alive: Whether the worker is still part of the run.
        """
        with self._lock:
            if not alive():
                return
            self._lost.discard(worker)
            if worker not in self._latest:
                self._latest[worker] = torch.empty_like(self._initial)
            self._latest[worker].copy_(buffers)

    def lose(self, worker: int) -> None:
        """`worker` was lost: its statistics belong to older and older weights."""
        with self._lock:
            self._lost.add(worker)

    def state(self) -> dict[str, Any]:
        """Return all that it knows, copied, for `load`."""
        with self._lock:
            latest = {worker: tensor.clone() for worker, tensor in self._latest.items()}
            return {"initial": self._initial.clone(), "latest": latest}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a `state`, without any worker."""
        self._initial.copy_(state["initial"])
        self._latest, self._lost = state["latest"], set(state["latest"])

    def mean(self) -> Tensor:
        """Return the server's buffers, shape [buffer_numel]; a new tensor."""
        with self._lock:
            counted = sorted(self._latest.keys() - self._lost) or sorted(self._latest)
            if not counted:
                return self._initial.clone()
            total = self._latest[counted[0]].clone()
            for worker in counted[1:]:
                total.add_(self._latest[worker])
            return total.div_(len(counted)) if len(counted) > 1 else total
