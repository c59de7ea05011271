"""Averages the workers' float buffers (BatchNorm's running statistics) on the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class BufferMean:
    """Averages the latest float buffers that all workers have pushed.

    Every worker has running statistics of its own batches and pushes them with each gradient. The server's
    buffers are the unweighted mean over the workers. A worker that has finished still counts. A lost worker
    does not, unless no other is left. Only the evaluation reads the mean. Before the first push the mean is
    the model's initial buffers. With one worker it equals that worker's buffers bit for bit.
    """

    def __init__(self, initial: Tensor) -> None:
        """Start from the model's initial buffers, shape [buffer_numel]."""
        self._initial = initial
        self._latest: dict[int, Tensor] = {}
        self._lost: set[int] = set()
        self._lock = threading.Lock()

    def store_worker_buffers(
        self, worker: int, buffers: Tensor, is_alive: Callable[[], bool]
    ) -> None:
        """Store a copy of a worker's latest buffers, which replaces the copy before.

        Args:
            worker: Number of the worker.
            buffers: Buffers of the worker, shape [buffer_numel].
            is_alive: Returns whether the worker is still part of the run. If not, nothing is stored.
        """
        with self._lock:
            if not is_alive():
                return
            self._lost.discard(worker)
            if worker not in self._latest:
                self._latest[worker] = torch.empty_like(self._initial)
            self._latest[worker].copy_(buffers)

    def forget_worker(self, worker: int) -> None:
        """Leave a lost worker out of the mean, because its statistics become outdated."""
        with self._lock:
            self._lost.add(worker)

    def state(self) -> dict[str, Any]:
        """Return a copy of the initial and the latest buffers, for `load`."""
        with self._lock:
            latest = {worker: tensor.clone() for worker, tensor in self._latest.items()}
            return {"initial": self._initial.clone(), "latest": latest}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`. All workers of that time then count as lost."""
        self._initial.copy_(state["initial"])
        self._latest, self._lost = state["latest"], set(state["latest"])

    def compute_mean(self) -> Tensor:
        """Return the workers' mean buffers as a new tensor, shape [buffer_numel]."""
        with self._lock:
            counted = sorted(self._latest.keys() - self._lost) or sorted(self._latest)
            if not counted:
                return self._initial.clone()
            total = self._latest[counted[0]].clone()
            for worker in counted[1:]:
                total.add_(self._latest[worker])
            return total.div_(len(counted)) if len(counted) > 1 else total
