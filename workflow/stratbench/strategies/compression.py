"""Defines gradient compression for `ddp`: communication hooks that replace DDP's all-reduce."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class SixteenBits:
    """Communication hook of DDP that sends gradients in 16 bits, divided by the workers' number.

    The sum then overflows only where the mean does. torch's own hook for bfloat16 does not support gloo.
    """

    #: Whether backward waits after each bucket until the workers have exchanged it.
    holds_backward = False

    def __init__(self, dtype: torch.dtype, workers: int) -> None:
        self._dtype, self._workers = dtype, workers

    def average_bucket(self, state, bucket):
        """Start to average a bucket of gradients over the workers; return the mean's future."""
        import torch.distributed as dist

        buffer = bucket.buffer()
        sent = buffer.to(self._dtype).div_(self._workers)
        future = dist.all_reduce(sent, async_op=True).get_future()
        return future.then(lambda done: buffer.copy_(sent))

    def reset(self) -> None:
        """Do nothing: compression to 16 bits has no state between steps."""

    def list_persistent_tensors(self) -> list[Tensor]:
        return []

    def compute_mean_bytes_per_step(self, parameters: Iterable[Tensor], steps: int) -> float:
        """Return the mean number of bytes all-reduced per step over the first `steps` steps."""
        return sum(2.0 * p.numel() for p in parameters)


class PowerSGD:
    """Communication hook of DDP that compresses gradients by PowerSGD (Vogels et al., NeurIPS 2019).

    It uses torch's hook, with error feedback and warm start. From step `start` on, a matrix of n x m is sent
    as two of n x r and m x r (r: rank), if these are less than half as large. The error is added to the next
    step's gradient. Vectors are sent uncompressed. Buckets are compressed one after the other, and backward
    waits for each.
    """

    #: Factor by which compression must at least shrink a matrix; otherwise the matrix is sent as it is
    #: (torch's default).
    MIN_RATE = 2
    holds_backward = True

    def __init__(self, rank: int, start: int) -> None:
        self._rank, self._start = rank, start
        self._state = self._make_powersgd_state()

    def _make_powersgd_state(self):
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        return PowerSGDState(
            None,
            matrix_approximation_rank=self._rank,
            start_powerSGD_iter=self._start,
            min_compression_rate=self.MIN_RATE,
        )

    def average_bucket(self, state, bucket):
        """Start to average a bucket of gradients over the workers; return the mean's future."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        compresses = self._state.iter >= self._start
        mean = powerSGD_hook(self._state, bucket)
        if compresses:
            # Only one bucket is compressed at a time. The hook starts collectives in callbacks, which gloo
            # runs in any order, so workers could otherwise mix up buckets.
            mean.wait()
        return mean

    def reset(self) -> None:
        """Reset the compression error and the step count. The next steps are not compressed."""
        self._state = self._make_powersgd_state()

    def begin_compression(self) -> None:
        """Make the communication hook compress gradients from the next step on."""
        self._state.iter = self._start

    def list_persistent_tensors(self) -> list[Tensor]:
        """Return the stored compression errors and matrix factors, which the next step uses."""
        s = self._state
        return [
            t for state in (s.error_dict, s.p_memory_dict, s.q_memory_dict) for t in state.values()
        ]

    def compute_mean_bytes_per_step(self, parameters: Iterable[Tensor], steps: int) -> float:
        """Return the mean number of bytes all-reduced per step over the first `steps` steps."""
        whole = sent = 0
        for p in parameters:
            n, m = p.shape[0] if p.dim() else 1, p[0].numel() if p.dim() else 1
            r = min(n, m, self._rank)
            factors = r * (n + m)
            whole += p.nbytes
            fewer = factors * self.MIN_RATE < n * m
            sent += (factors if fewer else p.numel()) * p.element_size()
        compressed = max(0, steps - self._start)
        return (compressed * sent + (steps - compressed) * whole) / steps if steps else sent
