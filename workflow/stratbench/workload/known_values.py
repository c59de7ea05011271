"""Computes the values of fake tensors that do not depend on data, such as masks and positions.

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
    compute_grouped_product_shape,
    get_storage_key,
    has_mutable_argument,
    iter_written_tensors,
)

#: Largest number of elements of all tensors that a recipe computes. It suffices for a mask of 4096 positions.
MAX_NUMBERS = 1 << 26
#: Maximum length of a chain of operations in a recipe.
MAX_STEPS = 100
#: Exceptions that PyTorch raises if an operation on fake tensors needs values. On the meta device it raises
#: an error with the text ON_META instead.
ASKS_FOR_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
ON_META = "cannot be called on meta tensors"
aten = torch.ops.aten
#: Operators that use only the shape and the format of their first operand.
SHAPED = frozenset(
    {aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full}
)


class KnownValueFakeMode(FakeTensorMode):
    """A `FakeTensorMode` in which values can be read of tensors that do not depend on data."""

    def __init__(self) -> None:
        # The user's code may use real tensors that it has created before, such as those in a closure.
        super().__init__(allow_non_fake_inputs=True)
        #: Number of in-place writes to each storage with known values, by the storage's key.
        self._written: dict[int, int] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(func) is OpOverload and func.overloadpacket is GROUPED_PRODUCT:
            return self._make_fake_grouped_product(types, *args, **kwargs)
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
            self._store_recomputation_recipe(func, args, kwargs, out)
        return out

    def _make_fake_grouped_product(
        self, types: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **_named: Any
    ) -> Tensor:
        """Return a fake tensor like a grouped matrix product, which PyTorch supports for bfloat16 only."""
        size = [compute_grouped_product_shape(a, b, offs)]
        return super().dispatch(
            aten.empty.memory_format, types, size, {"dtype": a.dtype, "device": a.device}
        )

    def _compute_real_result(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the real result of an operator on fake tensors.

        The result is None if the values of its operands are unknown, or if they are too large.
        """
        recipe = self._build_recomputation_recipe(operator, args, kwargs, 1)
        if (
            recipe is None
            or sum(r.num_elements for r in _collect_recipe_and_operand_recipes(recipe, set()))
            > MAX_NUMBERS
        ):
            return None
        return _compute_real_operand(recipe, {})

    def _store_recomputation_recipe(
        self, operator: Any, args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        """Attach a recipe to an operator's result, unless the result's values depend on data."""
        recipe = None
        if isinstance(result, Tensor) and result.layout is torch.strided:
            recipe = self._build_recomputation_recipe(operator, args, kwargs, result.numel())
        if has_mutable_argument(operator):
            for tensor in iter_written_tensors(operator, args, kwargs):
                # An in-place write changes all views of a storage. Counting it invalidates their recipes.
                if (
                    tensor.layout is torch.strided
                    and (key := _get_tensor_storage_key(tensor)) in self._written
                ):
                    self._written[key] += 1
            if recipe is not None and result is not args[0]:
                return
        if recipe is not None:
            result.recipe = recipe, self._written.setdefault(_get_tensor_storage_key(result), 0)

    def _build_recomputation_recipe(
        self, operator: Any, args: Any, kwargs: dict[str, Any], num_elements: int
    ) -> Recipe | None:
        first = []
        if operator.overloadpacket in SHAPED:
            like, *args = args
            shaped = {"dtype": like.dtype}
            first = [Recipe(aten.empty.memory_format, [list(like.shape)], shaped, num_elements, 1)]
        try:
            operands = first + [self._get_operand_recipe(value) for value in args]
            named = {key: self._get_operand_recipe(value) for key, value in kwargs.items()}
        except _Unknown:
            return None
        if torch.Tag.nondeterministic_seeded in operator.tags or "empty" in operator.__name__:
            return None
        steps = 1 + max(
            (r.num_operations for r in _iter_operand_recipes([operands, list(named.values())])),
            default=0,
        )
        return (
            Recipe(operator, operands, named, num_elements, steps) if steps <= MAX_STEPS else None
        )

    def _get_operand_recipe(self, operand: Any) -> Any:
        """Return an operand with tensors replaced by their recipes. Raise _Unknown without a recipe."""
        if isinstance(operand, Tensor):
            recipe, written = getattr(operand, "recipe", (None, 0))
            # A weight has no recipe: its initial values may be known, but training changes them.
            if (
                recipe is None
                or operand.requires_grad
                or self._written[_get_tensor_storage_key(operand)] != written
            ):
                raise _Unknown
            return recipe
        if isinstance(operand, list | tuple):
            return [self._get_operand_recipe(v) for v in operand]
        return operand


@dataclass(frozen=True, eq=False)
class Recipe:
    """A recorded operation that created a tensor, from which its values can be computed.

    Attributes:
        operator: Operator.
        positional_operands: Positional operands, in which recipes stand for tensors.
        keyword_operands: Keyword operands, in which recipes stand for tensors.
        num_elements: Number of elements of the tensor.
        num_operations: Number of operations that follow one another, including those of the operands.
    """

    operator: Any
    positional_operands: list[Any]
    keyword_operands: dict[str, Any]
    num_elements: int
    num_operations: int


class _Unknown(Exception):
    """The values of an operand are unknown, so that an operation on it has no recipe."""


def _get_tensor_storage_key(tensor: Tensor) -> int:
    return get_storage_key(tensor.untyped_storage())


def _iter_operand_recipes(operands: list[Any]) -> Iterator[Recipe]:
    for operand in operands:
        if isinstance(operand, Recipe):
            yield operand
        elif isinstance(operand, list):
            yield from _iter_operand_recipes(operand)


def _collect_recipe_and_operand_recipes(recipe: Recipe, collected: set[Recipe]) -> set[Recipe]:
    """Return a recipe, and recursively the recipes of its operands."""
    if recipe not in collected:
        collected.add(recipe)
        for part in _iter_operand_recipes(
            [recipe.positional_operands, list(recipe.keyword_operands.values())]
        ):
            _collect_recipe_and_operand_recipes(part, collected)
    return collected


def _compute_real_operand(operand: Any, computed_tensors: dict[Recipe, Any]) -> Any:
    """Return an operand with real tensors instead of recipes.

    Each recipe is replaced by the tensor that it computes.
    """
    if isinstance(operand, list):
        return [_compute_real_operand(each, computed_tensors) for each in operand]
    if not isinstance(operand, Recipe):
        return operand
    if operand not in computed_tensors:
        args = _compute_real_operand(operand.positional_operands, computed_tensors)
        # If the operator writes to its operand, it gets a copy. Other recipes need the old values.
        if has_mutable_argument(operand.operator):
            args[0] = args[0].clone()
        kwargs = {
            key: _compute_real_operand(value, computed_tensors)
            for key, value in operand.keyword_operands.items()
        }
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        computed_tensors[operand] = operand.operator(*args, **kwargs)
    return computed_tensors[operand]
