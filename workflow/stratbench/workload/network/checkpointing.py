"""Activation checkpointing: a block's activations are computed again in backward, and not kept.

Chen et al., "Training deep nets with sublinear memory cost", 2016. Importing this file imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stratbench.workload.network.sharding import Groups
from stratbench.workload.torch_internals import BatchNorm


def blocks_of(groups: Groups) -> list[nn.Module]:
    """The modules of the model's sharding groups that hold others.

    A single layer keeps nothing but its input, which checkpointing keeps, too.
    """
    return [m for _, modules in groups for m in modules if any(m.children())]


def checkpoint_blocks(groups: Groups) -> int:
    """Let every block of `groups` compute its activations again in backward; returns how many.

    The blocks' own forwards are replaced: the names of parameters and the hooks of modules, such as
    FSDP's, stay what they are. What is drawn at random is drawn again alike.
    """
    blocks = blocks_of(groups)
    for block in blocks:
        norms = [m for m in block.modules() if isinstance(m, BatchNorm)]
        block.forward = partial(_forward, block.forward, norms)
    return len(blocks)


def _forward(forward: Callable[..., Any], norms: list[BatchNorm], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling() or not norms:
        # A compiler computes only values again, and no changes of buffers; it takes no contexts.
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    contexts = partial(_contexts, norms)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(norms: list[BatchNorm]) -> tuple[AbstractContextManager, AbstractContextManager]:
    return nullcontext(), _without_statistics(norms)


@contextmanager
def _without_statistics(norms: list[BatchNorm]) -> Iterator[None]:
    """The layers' running statistics do not change in the block: they have seen this batch.

    With a momentum of 0 they become 1 x old + 0 x new, which is bit for bit the old.
    """
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
