"""Replaces torch's DistributedDataParallel while a strategy runs on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stratbench.workload.torch_internals import assign_parameters_to_buckets, replace_attribute


class Replica(nn.Module):
    """Substitute for DistributedDataParallel, with its allocations and sends after first steps.

    DDP's C++ part does not support fake tensors. The interface is the same. Gradients are copied into flat
    buckets in the order in which backward completes them. A full bucket is all-reduced, or passed to the
    hook. With `gradient_as_bucket_view` gradients are then views of the bucket; otherwise both exist.
    Buffers are broadcast in one tensor before each forward, except after a backward in `no_sync`.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[Any] | None = None,
        *,
        bucket_cap_mb: int = 25,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        super().__init__()
        self.module, self.as_view = module, gradient_as_bucket_view
        self._hook: Callable[[GradBucket], Any] | None = None
        self._under_way: list[tuple[torch.futures.Future, Tensor]] = []
        self.synchronises, self._sends_buffers = True, True
        # Backward completes gradients in about the reverse order of the model's parameters.
        parameters = [p for p in module.parameters() if p.requires_grad][::-1]
        self._hooked: list[GradBucket] = []
        groups = assign_parameters_to_buckets(parameters, bucket_cap_mb << 20)
        self.buckets = [
            parameters[group[0]].new_empty(sum(parameters[i].numel() for i in group))
            for group in groups
        ]
        for bucket, group in zip(self.buckets, groups, strict=True):
            waiting = [len(group), len(group)]
            sizes = [parameters[i].numel() for i in group]
            views = [
                v.view(parameters[i].shape) for i, v in zip(group, bucket.split(sizes), strict=True)
            ]
            index = len(self._hooked)
            self._hooked.append(GradBucket(index, bucket, views, index == len(groups) - 1))
            for i, view in zip(group, views, strict=True):
                taken = partial(self._add_gradient_to_bucket, index, view, waiting)
                parameters[i].register_post_accumulate_grad_hook(taken)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, GradBucket], Any]) -> None:
        """Use a communication hook in place of the all-reduce of gradients.

        Only a hook with `holds_backward` is known to leave a bucket in progress. Other hooks may wait for
        it, and here nothing else would complete it.
        """
        self._hook = partial(hook, state)
        self._waits = getattr(getattr(hook, "__self__", None), "holds_backward", True)

    def _set_ddp_runtime_logging_sample_rate(self, every: int) -> None:
        """Do nothing, since no time is measured."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return no times of DDP, as an empty dict."""
        return {}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which gradients are not exchanged with other workers."""
        self.synchronises = False
        try:
            yield
        finally:
            self.synchronises = True

    def forward(self, x: Tensor) -> Tensor:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.module.buffers() if self._sends_buffers else ():
            by_dtype.setdefault(buffer.dtype, []).append(buffer.flatten())
        for buffers in by_dtype.values():
            dist.broadcast(torch.cat(buffers), src=0)
        self._sends_buffers = self.synchronises
        return self.module(x)

    def _add_gradient_to_bucket(
        self,
        bucket_index: int,
        gradient_view: Tensor,
        remaining_and_total: list[int],
        parameter: Tensor,
    ) -> None:
        if not self.synchronises:
            return
        fresh = parameter.grad  # keeps the gradient until the hook returns, as in DDP
        gradient_view.copy_(fresh)
        if self.as_view:
            parameter.grad = gradient_view
        remaining_and_total[0] -= 1
        if remaining_and_total[0] == 0:
            remaining_and_total[0] = remaining_and_total[1]
            self._reduce_bucket(bucket_index)

    def _reduce_bucket(self, bucket_index: int) -> None:
        if self._hook is None:
            dist.all_reduce(self.buckets[bucket_index], async_op=True)
            return
        self._complete_pending_bucket()
        under_way = None if self._waits else self._under_way
        with replace_attribute(dist, "all_reduce", partial(_start_hook_all_reduce, under_way)):
            self._hook(self._hooked[bucket_index])
        if self._hooked[bucket_index].comes_last:
            self._complete_pending_bucket()

    def _complete_pending_bucket(self) -> None:
        """Complete the all-reduce of the bucket in progress, of which there is at most one."""
        for future, tensor in self._under_way:
            future.set_result([tensor])
        self._under_way.clear()

    def reduce_all_buckets(self) -> None:
        """All-reduce every gradient bucket, as a step does."""
        for index in range(len(self.buckets)):
            self._reduce_bucket(index)


all_reduce = dist.all_reduce


def _start_hook_all_reduce(
    pending_reductions: list[tuple[torch.futures.Future, Tensor]] | None,
    tensor: Tensor,
    *args: Any,
    **kwargs: Any,
) -> SimpleNamespace:
    """Start an all-reduce for a communication hook, and return a substitute for its result.

    The hook gets a future from this substitute by `get_future`. The future is completed at once if
    `pending_reductions` is None.
    """
    all_reduce(tensor, group=kwargs.get("group"), async_op=True)
    future = torch.futures.Future()
    if pending_reductions is None:
        future.set_result([tensor])
    else:
        pending_reductions.append((future, tensor))
    return SimpleNamespace(get_future=lambda: future)


class GradBucket(NamedTuple):
    """Substitute for DDP's GradBucket, with the methods that communication hooks use."""

    number: int
    flat: Tensor
    views: list[Tensor]
    comes_last: bool

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return self.views

    def is_last(self) -> bool:
        return self.comes_last
