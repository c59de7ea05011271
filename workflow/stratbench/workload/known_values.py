"""Computes values of fake tensors that do not depend on data: masks and positions that forward creates.

A model may read such values, as torch's own transformer checks whether its mask is causal. The operations
that created such a tensor (its recipe) are recorded, and computed with real numbers when its values are read.
Tensors that depend on the batch, on weights or on random numbers have no known values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stratbench.workload.torch_internals import (
    GROUPED_PRODUCT,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    OpOverload,
    compute_grouped_shape,
    get_arguments,
    get_storage_key,
    has_mutable_argument,
)

#: Largest total number of elements of the tensors of a recipe; it allows a mask of 4096 positions.
MAX_NUMBERS = 1 << 26
#: Largest number of consecutive operations of a recipe.
MAX_STEPS = 100
#: Exceptions of a fake tensor whose values are read, or whose shape depends on values. On the meta device it
#: is a plain error with the text ON_META.
ASKS_FOR_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
ON_META = "cannot be called on meta tensors"
aten = torch.ops.aten
#: Operators that only use the shape and format of their first operand.
SHAPED = frozenset(
    {aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full}
)


class KnownFakes(FakeTensorMode):
    """`FakeTensorMode` that can read the values of tensors that do not depend on data."""

    def __init__(self) -> None:
        # Real tensors of the user's code, such as those in a closure, become fake when they are used.
        super().__init__(allow_non_fake_inputs=True)
        #: Number of writes to each storage with known values, by the storage's address.
        self._written: dict[int, int] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(func) is OpOverload and func.overloadpacket is GROUPED_PRODUCT:
            return self._make_grouped_product(types, *args, **kwargs)
        try:
            out = super().dispatch(func, types, args, kwargs)
        except RuntimeError as error:
            if not isinstance(error, ASKS_FOR_VALUES) and ON_META not in str(error):
                raise
            out = self._compute_real_result(func, args, kwargs)
            if out is None and ON_META in str(error):
                raise DataDependentOutputException(func) from error
            if out is None:
                raise
            if not isinstance(out, Tensor):
                return out
            out = self.from_tensor(out)
        if type(func) is OpOverload:
            self._store_recipe(func, args, kwargs, out)
        return out

    def _make_grouped_product(
        self, types: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **_named: Any
    ) -> Tensor:
        """Return the fake result of a grouped matrix product. PyTorch's own rule supports bfloat16 only."""
        size = [compute_grouped_shape(a, b, offs)]
        return super().dispatch(
            aten.empty.memory_format, types, size, {"dtype": a.dtype, "device": a.device}
        )

    def _compute_real_result(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return an operator's result with real numbers instead of fake tensors.

        The result is None if operands are unknown or too large.
        """
        recipe = self._build_recipe(op, args, kwargs, 1)
        if (
            recipe is None
            or sum(r.num_elements for r in _collect_recipes(recipe, set())) > MAX_NUMBERS
        ):
            return None
        return _compute_operand(recipe, {})

    def _store_recipe(self, op: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Store the recipe of an operator's result, if the values of the result are known."""
        recipe = None
        if isinstance(out, Tensor) and out.layout is torch.strided:
            recipe = self._build_recipe(op, args, kwargs, out.numel())
        if has_mutable_argument(op):
            for tensor in _iter_written_operands(op, args, kwargs):
                # A write also changes the values of views, so all recipes of this storage become invalid.
                if (
                    tensor.layout is torch.strided
                    and (key := _get_storage_key(tensor)) in self._written
                ):
                    self._written[key] += 1
            if recipe is not None and out is not args[0]:
                return
        if recipe is not None:
            out.recipe = recipe, self._written.setdefault(_get_storage_key(out), 0)

    def _build_recipe(
        self, op: Any, args: Any, kwargs: dict[str, Any], numbers: int
    ) -> Recipe | None:
        first = []
        if op.overloadpacket in SHAPED:
            like, *args = args
            shaped = {"dtype": like.dtype}
            first = [Recipe(aten.empty.memory_format, [list(like.shape)], shaped, numbers, 1)]
        try:
            operands = first + [self._get_operand_recipe(value) for value in args]
            named = {key: self._get_operand_recipe(value) for key, value in kwargs.items()}
        except _Unknown:
            return None
        if torch.Tag.nondeterministic_seeded in op.tags or "empty" in op.__name__:
            return None
        steps = 1 + max(
            (r.num_operations for r in _iter_recipes([operands, list(named.values())])), default=0
        )
        return Recipe(op, operands, named, numbers, steps) if steps <= MAX_STEPS else None

    def _get_operand_recipe(self, value: Any) -> Any:
        """Return the recipe of a known tensor; raise _Unknown for an unknown one."""
        if isinstance(value, Tensor):
            recipe, written = getattr(value, "recipe", (None, 0))
            # A weight's initial values are known, but decisions that depend on them change with the training.
            if (
                recipe is None
                or value.requires_grad
                or self._written[_get_storage_key(value)] != written
            ):
                raise _Unknown
            return recipe
        if isinstance(value, list | tuple):
            return [self._get_operand_recipe(v) for v in value]
        return value


@dataclass(frozen=True, eq=False)
class Recipe:
    """The recorded operation that created a tensor.

    Attributes:
        op: Operator.
        args: Positional operands, in which recipes stand for tensors.
        kwargs: Keyword operands, in which recipes stand for tensors.
        num_elements: Number of elements of the tensor.
        num_operations: Number of consecutive operations, including those of the operands.
    """

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]
    num_elements: int
    num_operations: int


class _Unknown(Exception):
    """An operand of an operation has unknown values."""


def _get_storage_key(tensor: Tensor) -> int:
    return get_storage_key(tensor.untyped_storage())


def _iter_written_operands(op: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the operands to which an operator writes."""
    for i, argument in enumerate(get_arguments(op)):
        if argument.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            each = value if isinstance(value, list | tuple) else [value]
            yield from (t for t in each if t is not None)


def _iter_recipes(operands: list[Any]) -> Iterator[Recipe]:
    for operand in operands:
        if isinstance(operand, Recipe):
            yield operand
        elif isinstance(operand, list):
            yield from _iter_recipes(operand)


def _collect_recipes(recipe: Recipe, seen: set[Recipe]) -> set[Recipe]:
    """Return a recipe together with all recipes of its operands, recursively."""
    if recipe not in seen:
        seen.add(recipe)
        for part in _iter_recipes([recipe.args, list(recipe.kwargs.values())]):
            _collect_recipes(part, seen)
    return seen


def _compute_operand(operand: Any, made: dict[Recipe, Any]) -> Any:
    """Return an operand with recipes replaced by real tensors, which `made` caches."""
    if isinstance(operand, list):
        return [_compute_operand(each, made) for each in operand]
    if not isinstance(operand, Recipe):
        return operand
    if operand not in made:
        args = _compute_operand(operand.args, made)
        if has_mutable_argument(operand.op):  # other recipes need the value before the write
            args[0] = args[0].clone()
        kwargs = {key: _compute_operand(value, made) for key, value in operand.kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        made[operand] = operand.op(*args, **kwargs)
    return made[operand]
