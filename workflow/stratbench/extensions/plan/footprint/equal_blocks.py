"""Equal blocks of a network, which is followed with few of them and drawn out to all.

A layer of a transformer takes and gives what the next one does. A network that calls such layers one
after the other needs, with one layer more, as much more at each moment of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stratbench.telemetry.collective_count import tensors_in
from stratbench.workload.torch_internals import TorchDispatchMode, get_children, tree_leaves

#: Fewer blocks are all followed.
MIN_BLOCKS = 8
#: Attributes that are compared between blocks.
PLAIN = (bool, int, float, str, type(None))


class Blocks(NamedTuple):
    """Equal modules that a network calls in turn: the path of what holds them, and how many there are."""

    path: str
    count: int


def find_blocks(model: nn.Module) -> Blocks | None:
    """Return the blocks of equal modules that hold most of the parameters.

    Return None if there are none.
    """
    best, most = None, 0
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < MIN_BLOCKS:
            continue
        size = sum(p.numel() for p in module.parameters())
        if size > most and _are_equal(list(module)):
            best, most = Blocks(path, len(module)), size
    return best


def keep_blocks(model: nn.Module, path: str, count: int) -> None:
    """Leave the model the first blocks alone."""
    held = get_children(model.get_submodule(path))
    for name in list(held)[count:]:
        del held[name]


def are_called_alike(model: nn.Module, blocks: Blocks, x: Tensor) -> bool:
    """Return whether a forward of `x` calls the blocks once each, in turn, with the same operations."""
    log = _BlockOperations()
    handles = list(_set_hooks(model, blocks.path, log.pass_mark))
    try:
        with torch.no_grad(), log:
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    each = [log.operations.get(i) for i in range(blocks.count)]
    in_turn = log.order == list(range(blocks.count))
    return in_turn and all(operations == each[0] for operations in each)


def mark_blocks(model: nn.Module, path: str, mark: Callable[[str, int], None]) -> None:
    """Have `mark` called before and after each block's forward, and where its backward begins."""
    list(_set_hooks(model, path, mark))


def _set_hooks(model: nn.Module, path: str, mark: Callable[[str, int], None]) -> Iterator[Any]:
    for i, block in enumerate(model.get_submodule(path)):
        yield block.register_forward_pre_hook(partial(_before, mark, i))
        yield block.register_forward_hook(partial(_after, mark, i))


def _before(mark: Callable[[str, int], None], i: int, *_: Any) -> None:
    mark("before", i)


def _after(
    mark: Callable[[str, int], None], i: int, module: nn.Module, args: Any, out: Any
) -> None:
    mark("after", i)
    for t in tree_leaves(out):
        if torch.is_tensor(t) and t.requires_grad:
            t.register_hook(lambda _: mark("backward", i))
            return


class _BlockOperations(TorchDispatchMode):
    """Logs the operations of each block, and the order in which the blocks are called."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[int, list[Any]] = {}
        self.order: list[int] = []
        self._inside: list[Any] | None = None

    def pass_mark(self, where: str, i: int) -> None:
        """Begin or end a block."""
        self._inside = None
        if where == "before":
            self.order.append(i)
            self._inside = self.operations.setdefault(i, [])

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if self._inside is not None:
            self._inside.append((op, [(t.shape, t.dtype) for t in tensors_in(out)]))
        return out


def _are_equal(blocks: list[nn.Module]) -> bool:
    """Whether modules have equal parts, but for a number that counts them, and no parameter in common."""
    all_parameters = sum(1 for block in blocks for _ in block.parameters())
    if all_parameters != len({p for block in blocks for p in block.parameters()}):
        return False
    each = [list(_facts_of(block)) for block in blocks]
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


def _facts_of(block: nn.Module) -> Iterator[tuple[Any, Any]]:
    for name, module in block.named_modules():
        yield (name, "class"), type(module)
        for key, value in sorted(vars(module).items()):
            if isinstance(value, PLAIN):
                yield (name, key), value
    for name, t in [*block.named_parameters(), *block.named_buffers()]:
        yield (name, "shape"), (t.shape, t.dtype, t.stride(), t.requires_grad)
