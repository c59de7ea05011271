"""Activation checkpointing: backward recomputes a block's activations, which are not stored.

Chen et al., "Training deep nets with sublinear memory cost", 2016. Importing this file imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from stratbench.workload.network.sharding import Groups
from stratbench.workload.torch_internals import KEPT_BY_SELECTIVE, BatchNorm, get_arguments

aten = torch.ops.aten
#: Products of `selective`, of which every second one is computed again, as in torchtitan.
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.linear.default, aten.convolution.default}
#: How many blocks this process is computing again; one may be inside another.
_under_way = 0


def is_recomputing() -> bool:
    """Return whether a checkpointed block is being computed again."""
    return _under_way > 0


def blocks_of(groups: Groups) -> list[nn.Module]:
    """Return the modules of the model's sharding groups that hold others.

    A single layer keeps nothing but its input, which checkpointing keeps, too.
    """
    return [m for _, modules in groups for m in modules if any(m.children())]


def checkpointed(blocks: list[nn.Module], mode: bool | str) -> list[nn.Module]:
    """Return those of `blocks` that `activation_checkpointing: mode` checkpoints: all, or each N-th."""
    every = str(mode).partition("every-")[2]
    return blocks[int(every) - 1 :: int(every)] if every else blocks


def checkpoint_blocks(groups: Groups, mode: bool | str = True) -> int:
    """Enable recomputation of activations in blocks of `groups`; return their number.

    The blocks' own forwards are replaced: the names of parameters and the hooks of modules, such as FSDP's,
    stay the same. Random numbers are drawn equally again.

    Args:
        groups: The model's sharding groups.
        mode: The setting `activation_checkpointing`, other than false.
    """
    blocks = checkpointed(blocks_of(groups), mode)
    for block in blocks:
        norms = [m for m in block.modules() if isinstance(m, BatchNorm)]
        block.forward = partial(_forward, block.forward, norms, mode == "selective")
    return len(blocks)


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, with activations that backward recomputes."""
    contexts = partial(_contexts, [], False)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


def _forward(
    forward: Callable[..., Any],
    norms: list[BatchNorm],
    selective: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts = partial(_contexts, norms, selective)
    if torch.compiler.is_compiling():
        # A compiler computes only values again, and no changes of buffers; it takes no other contexts.
        if not selective:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        contexts = _selective_contexts
    elif selective:
        # A weight that another block has cast would be cast here only when the block is computed again.
        torch.clear_autocast_cache()
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(
    norms: list[BatchNorm], selective: bool
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of a block's forward, and of its recomputation."""
    first, again = _selective_contexts() if selective else (nullcontext(), nullcontext())
    return first, _Recomputing(again, norms)


def _selective_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    return create_selective_checkpoint_contexts(_keep_by_count())


def _keep_by_count() -> Callable[..., CheckpointPolicy]:
    """Return the policy of one call of a block: attention and every second product are stored."""
    products = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = op in KEPT_BY_SELECTIVE and not _draws(op, args, kwargs)
        if op in PRODUCTS:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Return whether attention has dropout: storing its result would leave the generator behind."""
    names = [argument.name for argument in get_arguments(op)]
    return bool((dict(zip(names, args, strict=False)) | kwargs).get("dropout_p"))


class _Recomputing:
    """Context of a block's recomputation, which is entered twice if backward has two parts.

    Args:
        selected: Context with the stored results.
        norms: Layers whose running statistics have seen the batch.
    """

    def __init__(self, selected: AbstractContextManager, norms: list[BatchNorm]) -> None:
        self._selected, self._norms = selected, norms
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        global _under_way
        with ExitStack() as stack:
            stack.enter_context(_without_statistics(self._norms))
            stack.enter_context(self._selected)
            self._entered.append(stack.pop_all())
        _under_way += 1

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        global _under_way
        _under_way -= 1
        self._entered.pop().__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and "has been mutated" in str(error):
            raise RuntimeError(
                "a checkpointed block changes in place what activation_checkpointing: selective keeps (an "
                "activation with inplace=True behind a linear layer); set inplace to False, or "
                "activation_checkpointing to true"
            ) from error


@contextmanager
def _without_statistics(norms: list[BatchNorm]) -> Iterator[None]:
    """The layers' running statistics do not change in the block: they have seen this batch.

    With a momentum of 0 they become 1 x old + 0 x new, which is bit for bit the old.
    """
    statistics = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, statistics, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
