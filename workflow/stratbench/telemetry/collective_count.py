"""Detects which collective a PyTorch operator starts, and counts the collectives that some code starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from stratbench.telemetry.collectives import CollectiveCall
from stratbench.workload.torch_internals import (
    TorchDispatchMode,
    name_arguments,
    resolve_process_group,
    tree_leaves,
)

#: Name of the collective that an operator starts, by the operator's name without outer underscores. Empty:
#: the operator sends nothing.
_KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "",
    "wait_tensor": "",
    "wrap_tensor_autograd": "",
    "barrier": "",
}
#: Namespace of PyTorch's collective operators that return a new tensor instead of writing to an argument.
_FUNCTIONAL = "_c10d_functional"


def detect_collective(
    operator: Any, operator_args: Any, operator_kwargs: Any
) -> CollectiveCall | None:
    """Return the collective that an operator starts, or None for an operator that starts none.

    Args:
        operator: The operator.
        operator_args: Positional arguments of the operator.
        operator_kwargs: Keyword arguments of the operator.

    Raises:
        NotImplementedError: If the operator is an unknown collective.
    """
    if operator.namespace not in ("c10d", _FUNCTIONAL):
        return None
    name = operator.__name__.partition(".")[0].strip("_")
    kind = _KINDS.get(name)
    if kind is None:
        raise NotImplementedError(
            f"PyTorch's collective {operator.name()!r} is unknown here, so its traffic cannot be counted"
        )
    if kind == "":
        return None
    each = [
        t.numel() * t.element_size() for t in iter_nested_tensors((operator_args, operator_kwargs))
    ]
    group = find_process_group((operator_args, operator_kwargs))
    ranks = group and group.size()
    # Gather and scatter have two tensors: the larger one is whole, the other one a rank's share of it.
    n_bytes = max(each) if "gather" in kind or "scatter" in kind else sum(each)
    if operator.namespace == _FUNCTIONAL and kind == "all_gather":
        n_bytes *= ranks
    waiter = _get_collective_waiter(operator, operator_args, operator_kwargs)
    is_all = ranks in (None, torch.distributed.get_world_size())
    if is_all:
        return CollectiveCall(kind, n_bytes, waiter=waiter)
    first, second, *_ = *torch.distributed.get_process_group_ranks(group), 0, 0
    return CollectiveCall(kind, n_bytes, ranks, rank_stride=max(1, second - first), waiter=waiter)


def _get_collective_waiter(
    operator: Any, operator_args: Any, operator_kwargs: Any
) -> Literal["user", "stream", "none"]:
    """Return what waits for a collective that an operator starts, as in `CollectiveCall.waiter`."""
    if operator.namespace == _FUNCTIONAL:
        return "user"
    arguments = name_arguments(operator, operator_args, operator_kwargs)
    return "none" if arguments.get("async_op", True) else "stream"


def find_process_group(arguments: Any) -> torch.distributed.ProcessGroup | None:
    """Return the process group in the arguments of a collective operator. None without a group."""
    groups = map(resolve_process_group, tree_leaves(arguments))
    return next((group for group in groups if group is not None), None)


def iter_nested_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor that is contained in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iter_nested_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from iter_nested_tensors(item)


class CollectiveCount(TorchDispatchMode):
    """Context that collects in `calls` each collective that PyTorch's operators start.

    An unknown collective does not end the training, but then the traffic of all is unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[CollectiveCall] = []
        self._is_whole = True

    def count_sent_bytes(self, world_size: int) -> float:
        """Return the bytes that a rank has sent, if the collectives used ring algorithms.

        The result is NaN after an unknown collective.
        """
        return (
            sum(c.compute_ring_sent_bytes(world_size) for c in self.calls)
            if self._is_whole
            else math.nan
        )

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            # DTensor then dispatches the operators on its local tensors, which are counted.
            return NotImplemented
        try:
            call = detect_collective(op, args, kwargs or {})
        except NotImplementedError:
            self._is_whole, call = False, None
        if call is not None:
            self.calls.append(call)
        return op(*args, **(kwargs or {}))
