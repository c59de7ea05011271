"""Builds users' models: determines the arguments of the user's function, and calls it.

The Snakefile imports this module: neither torch nor a user's code is imported before a model is built.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import util
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratbench.workload.data.dataset import get_sample_kind
from stratbench.workload.network.libraries import find_library_of_call
from stratbench.workload.users_code import (
    ERRORS,
    ModelError,
    Unsuitable,
    format_user_error,
    import_user_callable,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

#: Values that follow from the data set, by role. A model's argument with one of the listed names gets the
#: value.
ROLES = {
    "classes": ("num_classes", "classes", "n_classes"),
    "channels": ("in_channels", "in_chans", "channels"),
    "size": ("image_size", "img_size"),
    "vocabulary": ("vocab_size", "vocabulary"),
    "sequence": ("sequence", "block_size", "max_length", "seq_len"),
    "length": ("length",),
}
#: An argument with this name may mean something else. So it gets the value only if it has no default.
_DOUBTFUL = "channels"


@dataclass(frozen=True)
class OwnModel:
    """A user's specification of a model.

    `tensor_plan`, `num_heads` and `pipeline_modules` declare how the model can be divided, as those of a
    built-in family do (`workload/network/registry.py`). A text names the declaration in the user's code, as
    `module:NAME`.

    Attributes:
        name: Name of the model in the config.
        call: The user's class or function, as `module:name`.
        kwargs: Keyword arguments of the call.
        wrap_classes: Names of the module classes that are sharded as groups, or None for groups by size.
        tensor_plan: Division of the layers by module path, or None.
        num_heads: Number of attention heads, or None.
        pipeline_modules: Paths of the modules that forward calls one after the other, or None.
        vocabulary: Number of different tokens of labelled texts, whose `classes` are the labels; else None.
    """

    name: str
    call: str
    kwargs: dict[str, Any]
    wrap_classes: list[str] | None
    tensor_plan: dict[str, str] | str | None = None
    num_heads: int | None = None
    pipeline_modules: list[str] | str | None = None
    vocabulary: int | None = None

    def __str__(self) -> str:
        return f"model {self.name!r} ({self.call})"

    @property
    def torchvision_name(self) -> str | None:
        """Name of the torchvision classification model that is called, or None for any other call."""
        module, _, name = self.call.replace(":", ".").rpartition(".")
        return name if module == "torchvision.models" and name in list_torchvision_names() else None


@cache
def list_torchvision_names() -> frozenset[str]:
    """Return the names of torchvision's classification models, read from its files without an import."""
    spec = util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return frozenset()
    texts = (p.read_text(encoding="utf-8") for p in Path(spec.origin).parent.glob("models/*.py"))
    pattern = re.compile(r"^@register_model\(\)\n(?:@.*\n)*def (\w+)", re.M)
    return frozenset(name for text in texts for name in pattern.findall(text))


def collect_data_values(
    classes: int, shape: Sequence[int], vocabulary: int | None = None
) -> dict[str, Any]:
    """Return values of a data set by role. For example, the role `classes` has the number of classes.

    Args:
        classes: Number of classes, or of different tokens of texts without labels.
        shape: Shape of a sample: (channels, height, width), (channels, length) or (length,).
        vocabulary: Number of different tokens of texts with labels.
    """
    if len(shape) == 1:
        return {"classes": classes, "vocabulary": vocabulary or classes, "sequence": shape[0]}
    if len(shape) == 2:
        return {"classes": classes, "channels": shape[0], "length": shape[1]}
    channels, height, width = shape
    size = height if height == width else [height, width]
    return {"classes": classes, "channels": channels, "size": size}


def insert_data_values(argument: Any, data_values: Mapping[str, Any]) -> Any:
    """Return an argument with values of the data set.

    Each text `$ROLE` is replaced by the value of this role.

    Raises:
        ValueError: If the data set has no value for a role in the argument.
    """
    if isinstance(argument, dict):
        return {key: insert_data_values(inner, data_values) for key, inner in argument.items()}
    if isinstance(argument, list):
        return [insert_data_values(inner, data_values) for inner in argument]
    if isinstance(argument, str) and argument.startswith("$"):
        if argument[1:] not in data_values:
            known = ", ".join(f"${role}" for role in data_values)
            raise ValueError(
                f"{argument!r} stands for a value that the data set does not have; use one of {known}"
            )
        return data_values[argument[1:]]
    return argument


def collect_call_arguments(
    own_model: OwnModel, classes: int, shape: Sequence[int]
) -> dict[str, Any]:
    """Return the arguments of the call that builds a user's model.

    They are those of the config, and values of the data set for parameters with the names in ROLES. A
    function with `**kwargs` gets `num_classes`, and the arguments that its library adds.

    Args:
        own_model: The specification.
        classes: Number of classes or tokens.
        shape: Shape of the input.
    """
    function = _get_model_builder(own_model)
    facts = collect_data_values(classes, shape, own_model.vocabulary)
    kwargs = insert_data_values(own_model.kwargs, facts)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # functions written in C may have no signature
        return kwargs
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = {
        key
        for key, p in parameters.items()
        if p.kind in kinds and (key != _DOUBTFUL or p.default is inspect.Parameter.empty)
    }
    filled = {
        key: facts[role]
        for role in facts
        for key in ROLES[role]
        if key in takes and key not in kwargs
    }
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        if not takes.intersection(ROLES["classes"] + ROLES["vocabulary"]):
            filled.setdefault("num_classes", classes)
        filled |= find_library_of_call(own_model.call).collect_data_arguments(kwargs, facts)
    return filled | _collect_more_torchvision_arguments(own_model, shape) | kwargs


def _get_model_builder(own_model: OwnModel) -> Callable[..., Any]:
    """Return the function that builds a user's model, or a model of a library.

    Raises:
        ModelError: If the function cannot be imported, or if the library cannot build the model.
    """
    library = find_library_of_call(own_model.call)
    if fault := library.invalid_call_reason({"call": own_model.call, "kwargs": own_model.kwargs}):
        raise ModelError(f"{own_model}: {fault}")
    return library.find_builder(import_user_callable(own_model))


def _collect_more_torchvision_arguments(
    own_model: OwnModel, shape: Sequence[int]
) -> dict[str, Any]:
    """Return the additional arguments that some of torchvision's models need."""
    name = own_model.torchvision_name or ""
    if name.startswith("vit_"):
        return {"image_size": shape[1]}
    if name == "maxvit_t":
        return {"input_size": list(shape[1:])}
    if name in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": True}
    return {}


def build_own_model(own_model: OwnModel, classes: int, shape: Sequence[int]) -> nn.Module:
    """Build a model that a user specifies.

    Args:
        own_model: The specification.
        classes: Number of classes or tokens.
        shape: Shape of the input.

    Raises:
        ModelError: If the call fails, or does not return a model that can be trained.
    """
    import torch
    from torch import nn

    kwargs: dict[str, Any] = {}
    try:
        kwargs = collect_call_arguments(own_model, classes, shape)
        made = _get_model_builder(own_model)(**kwargs)
    # The user's code is not the cause of a lack of memory.
    except (MemoryError, torch.OutOfMemoryError, ModelError):
        raise
    except Unsuitable as e:
        raise ModelError(f"{own_model}: {e}") from e
    except ERRORS as e:
        called = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
        raise ModelError(
            f"{own_model}: called with ({called}), raised "
            f"{format_user_error(e)}{_describe_missing_data_values(shape, e)}"
        ) from e
    if not isinstance(made, nn.Module):
        raise ModelError(f"{own_model}: returned a {type(made).__name__}; return a torch.nn.Module")
    for name, p in made.named_parameters():
        if nn.parameter.is_lazy(p):
            raise ModelError(
                f"{own_model}: {name} belongs to a lazy layer and has no shape yet; use a layer that is not "
                "lazy"
            )
    if not any(p.requires_grad for p in made.parameters()):
        raise ModelError(
            f"{own_model}: has no parameter to train; set requires_grad of some parameters"
        )
    if both := _find_tensor_names_in_same_memory(made):
        raise ModelError(
            f"{own_model}: {both[0]} and {both[1]} are different tensors in the same memory, which "
            "strategies would separate; assign the parameter itself (again.weight = first.weight)"
        )
    return made


def _find_tensor_names_in_same_memory(model: nn.Module) -> tuple[str, str] | None:
    """Return the names of two different tensors of a model that share memory.

    The first is a parameter, and the other is a parameter or a buffer. The result is None without such a
    pair.
    """
    from stratbench.workload.torch_internals import get_storage_key

    tensors = [*model.named_parameters(), *model.named_buffers()]
    parameters = sum(1 for _ in model.parameters())
    by_storage: dict[int, list[tuple[str, Tensor, bool]]] = {}
    for i, (name, t) in enumerate(tensors):
        key = get_storage_key(t.untyped_storage())
        by_storage.setdefault(key, []).append((name, t, i < parameters))
    for each in by_storage.values():
        for (name, t, is_parameter), (other, u, _) in combinations(each, 2):
            if is_parameter and _do_tensors_overlap(t, u):
                return name, other
    return None


def _do_tensors_overlap(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors that have the same storage share any of its elements."""
    import torch

    from stratbench.workload.torch_internals import unset_fake_temporarily

    (first, last), (start, stop) = (
        (
            v.storage_offset() * v.itemsize,
            (
                v.storage_offset()
                + sum((n - 1) * k for n, k in zip(v.shape, v.stride(), strict=True))
            )
            * v.itemsize,
        )
        for v in (tensor, other)
    )
    if not (tensor.numel() and other.numel()) or last < start or stop < first:
        return False
    if tensor.itemsize != other.itemsize:
        return True
    # The ranges overlap, but strided tensors may interleave in them. So elements are compared one by one.
    with (
        unset_fake_temporarily(),
        torch.no_grad(),
    ):
        taken = torch.zeros(max(last, stop) // tensor.itemsize + 1, dtype=torch.bool)
        taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
        return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _describe_missing_data_values(shape: Sequence[int], e: BaseException) -> str:
    """Return a clause that names the required arguments that the data set cannot supply.

    It completes the message on a call that failed. It is empty if the call failed for another reason.

    Args:
        shape: Shape of a sample, which determines the arguments that the data set supplies.
        e: Error of the call.
    """
    wanted = [
        key
        for role in ROLES.keys() - collect_data_values(0, shape).keys()
        for key in ROLES[role]
        if f"'{key}'" in str(e)
    ]
    if not isinstance(e, TypeError) or not wanted:
        return ""
    return f"; the data set has {get_sample_kind(shape)}, which have no {' and no '.join(sorted(wanted))}"
