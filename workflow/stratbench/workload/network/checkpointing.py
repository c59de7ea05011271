"""Activation checkpointing: backward recomputes a block's activations instead of storing them.

See Chen et al., "Training deep nets with sublinear memory cost", 2016.
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

from stratbench.workload.network.sharding import ShardGroups
from stratbench.workload.torch_internals import KEPT_BY_SELECTIVE, BatchNorm, name_arguments

aten = torch.ops.aten
#: Matrix products. The mode `selective` stores the result of every second one, as torchtitan does.
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.linear.default, aten.convolution.default}
#: Number of nested blocks that this process is recomputing at the moment.
_under_way = 0


def is_recomputing_block() -> bool:
    """Return whether backward is recomputing a checkpointed block at the moment."""
    return _under_way > 0


def list_checkpointable_blocks(shard_groups: ShardGroups) -> list[nn.Module]:
    """Return the modules of a model's shard groups whose activations can be checkpointed.

    These modules have submodules. A single layer stores only its input, which checkpointing stores, too.
    """
    return [m for _, modules in shard_groups for m in modules if any(m.children())]


def select_checkpointed_blocks(
    blocks: list[nn.Module], checkpointing_mode: bool | str
) -> list[nn.Module]:
    """Return the blocks that the setting `activation_checkpointing` selects: all, or each N-th."""
    every = str(checkpointing_mode).partition("every-")[2]
    return blocks[int(every) - 1 :: int(every)] if every else blocks


def checkpoint_and_count_blocks(
    shard_groups: ShardGroups, checkpointing_mode: bool | str = True
) -> int:
    """Enable activation checkpointing in blocks of a model, and return the number of these blocks.

    The `forward` of each block is replaced, so that names of parameters and hooks of modules, such as FSDP's,
    stay the same. The recomputation draws the same random numbers.

    Args:
        shard_groups: The model's sharding groups.
        checkpointing_mode: The setting `activation_checkpointing`, other than false.
    """
    blocks = select_checkpointed_blocks(
        list_checkpointable_blocks(shard_groups), checkpointing_mode
    )
    for block in blocks:
        norms = [m for m in block.modules() if isinstance(m, BatchNorm)]
        block.forward = partial(
            _call_forward_checkpointed, block.forward, norms, checkpointing_mode == "selective"
        )
    return len(blocks)


def call_with_recomputation(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function such that backward recomputes its activations instead of storing them."""
    contexts = partial(_make_forward_and_recompute_contexts, [], False)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


def _call_forward_checkpointed(
    forward: Callable[..., Any],
    norms: list[BatchNorm],
    is_selective: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts = partial(_make_forward_and_recompute_contexts, norms, is_selective)
    if torch.compiler.is_compiling():
        # Compiled code does not update buffers in the recomputation, and does not support `_Recomputing`. So
        # contexts are only needed in the selective mode.
        if not is_selective:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        contexts = _make_selective_contexts
    elif is_selective:
        # The recomputation must repeat the operators of forward, including casts of weights. Autocast's cache
        # would save casts in forward only, so it is cleared.
        torch.clear_autocast_cache()
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _make_forward_and_recompute_contexts(
    norms: list[BatchNorm], is_selective: bool
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the context managers for a checkpointed block's forward and for its recomputation."""
    first, again = _make_selective_contexts() if is_selective else (nullcontext(), nullcontext())
    return first, _Recomputing(again, norms)


def _make_selective_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    return create_selective_checkpoint_contexts(_make_selective_policy())


def _make_selective_policy() -> Callable[..., CheckpointPolicy]:
    """Return a function that decides which operator results of a block are stored.

    Results of attention and of every second matrix product are stored.
    """
    products = {False: 0, True: 0}

    def choose_checkpoint_policy(
        context: Any, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        keeps = operator in KEPT_BY_SELECTIVE and not _is_attention_with_dropout(
            operator, args, kwargs
        )
        if operator in PRODUCTS:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return choose_checkpoint_policy


def _is_attention_with_dropout(operator: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator is attention with dropout.

    Its result must not be stored, since the recomputation would then draw other random numbers.
    """
    return bool(name_arguments(operator, args, kwargs).get("dropout_p"))


class _Recomputing:
    """Context manager for the recomputation of a block. It may be entered twice.

    That happens if backward computes the gradients of activations and of weights separately.

    Args:
        selected: Context manager that returns stored results.
        norms: BatchNorm layers, whose running statistics must not change again.
    """

    def __init__(self, selected: AbstractContextManager, norms: list[BatchNorm]) -> None:
        self._selected, self._norms = selected, norms
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        global _under_way
        with ExitStack() as stack:
            stack.enter_context(_freeze_running_statistics(self._norms))
            stack.enter_context(self._selected)
            self._entered.append(stack.pop_all())
        _under_way += 1

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        global _under_way
        _under_way -= 1
        self._entered.pop().__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and "has been mutated" in str(error):
            raise RuntimeError(
                "a checkpointed block changes a tensor in place that activation_checkpointing: selective "
                "stores (an activation with inplace=True after a linear layer); set inplace to False, or "
                "activation_checkpointing to true"
            ) from error


@contextmanager
def _freeze_running_statistics(norms: list[BatchNorm]) -> Iterator[None]:
    """Keep BatchNorm's running statistics unchanged, since forward has already updated them.

    With a momentum of 0 a statistic becomes 1 x old + 0 x new, which is bit for bit the old one.
    """
    statistics = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, statistics, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
