"""Finds equal blocks of a model, so that only few blocks need a trace.

A layer of a transformer has the same input and output shapes as the next. A model that calls such layers in
sequence needs equally more memory at each moment of a step for each further layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stratbench.telemetry.collective_count import iter_nested_tensors
from stratbench.workload.torch_internals import TorchDispatchMode, get_submodules, tree_leaves

#: Minimum number of equal blocks of which only few are traced.
MIN_BLOCKS = 8
#: Types of attributes whose values are compared between blocks.
PLAIN = (bool, int, float, str, type(None))


class Blocks(NamedTuple):
    """Equal modules that a model calls in turn: the path of their container, and their number."""

    path: str
    count: int


def find_largest_equal_blocks(model: nn.Module) -> Blocks | None:
    """Return the path and number of the model's largest series of equal modules, or None."""
    best, most = None, 0
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < MIN_BLOCKS:
            continue
        size = sum(p.numel() for p in module.parameters())
        if size > most and _are_blocks_equal(list(module)):
            best, most = Blocks(path, len(module)), size
    return best


def keep_first_blocks(model: nn.Module, path: str, num_blocks: int) -> None:
    """Remove all blocks from the model except for the first ones.

    Args:
        model: The model.
        path: Path of the blocks' container.
        num_blocks: Number of blocks to keep.
    """
    held = get_submodules(model.get_submodule(path))
    for name in list(held)[num_blocks:]:
        del held[name]


def are_blocks_called_alike(model: nn.Module, blocks: Blocks, x: Tensor) -> bool:
    """Return whether forward calls each block once, in order, with equal operations.

    Args:
        model: The model.
        blocks: Equal blocks of the model.
        x: Inputs.
    """
    log = _BlockOperations()
    handles = register_block_hooks(model, blocks.path, log.switch_logged_block)
    try:
        with torch.no_grad(), log:
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    each = [log.operations.get(i) for i in range(blocks.count)]
    in_turn = log.order == list(range(blocks.count))
    return in_turn and all(operations == each[0] for operations in each)


def register_block_hooks(
    model: nn.Module, path: str, mark: Callable[[str, int], None]
) -> list[RemovableHandle]:
    """Register hooks that call `mark` at the start and end of each block's passes.

    Args:
        model: The model.
        path: Path of the blocks' container.
        mark: Called with a label and the block's number: `before` and `after` its forward, and when its
            `backward` begins.
    """
    handles = []
    for i, block in enumerate(model.get_submodule(path)):
        handles.append(block.register_forward_pre_hook(partial(_mark_forward_start, mark, i)))
        handles.append(block.register_forward_hook(partial(_mark_forward_end, mark, i)))
    return handles


def _mark_forward_start(mark: Callable[[str, int], None], block: int, *_: Any) -> None:
    mark("before", block)


def _mark_forward_end(
    mark: Callable[[str, int], None], block: int, module: nn.Module, args: Any, out: Any
) -> None:
    mark("after", block)
    for t in tree_leaves(out):
        if torch.is_tensor(t) and t.requires_grad:
            t.register_hook(lambda _: mark("backward", block))
            return


class _BlockOperations(TorchDispatchMode):
    """Mode that logs the operations of each block, and the order of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[int, list[Any]] = {}
        self.order: list[int] = []
        self._inside: list[Any] | None = None

    def switch_logged_block(self, label: str, block: int) -> None:
        """Start to log a block's operations at the label `before`, and stop at others."""
        self._inside = None
        if label == "before":
            self.order.append(block)
            self._inside = self.operations.setdefault(block, [])

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if self._inside is not None:
            self._inside.append((op, [(t.shape, t.dtype) for t in iter_nested_tensors(out)]))
        return out


def _are_blocks_equal(blocks: list[nn.Module]) -> bool:
    """Return whether modules are equal except for a running number, and share no parameter."""
    all_parameters = sum(1 for block in blocks for _ in block.parameters())
    if all_parameters != len({p for block in blocks for p in block.parameters()}):
        return False
    each = [list(_iter_block_properties(block)) for block in blocks]
    if any(len(facts) != len(each[0]) for facts in each):
        return False
    for together in zip(*each, strict=True):
        keys, values = zip(*together, strict=True)
        if len(set(keys)) > 1:
            return False
        first = values[0]
        counts = type(first) is int and list(values) == list(range(first, first + len(values)))
        if not counts and any(value != first for value in values):
            return False
    return True


def _iter_block_properties(block: nn.Module) -> Iterator[tuple[Any, Any]]:
    for name, module in block.named_modules():
        yield (name, "class"), type(module)
        for key, value in sorted(vars(module).items()):
            if isinstance(value, PLAIN):
                yield (name, key), value
    for name, t in [*block.named_parameters(), *block.named_buffers()]:
        yield (name, "shape"), (t.shape, t.dtype, t.stride(), t.requires_grad)
