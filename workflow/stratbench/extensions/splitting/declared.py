"""Reads what a model declares on how workers can divide its layers and its forward.

The Snakefile imports this module, so torch is imported inside functions only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratbench.cell.extensions import import_attribute
from stratbench.workload import users_code
from stratbench.workload.network.registry import FAMILIES, Model, get_model_metadata

if TYPE_CHECKING:
    from torch import nn

    from stratbench.extensions.splitting.pieces import Piece


def _get_splitting_declaration(network: str | Model, key: str, built_model: nn.Module) -> Any:
    """Return the value that a model declares under a key, such as `tensor_plan`. None without a declaration.

    A user may declare it as `module:NAME`: the name of the value, or of a function of the model that returns
    it.
    """
    model = get_model_metadata(network)
    if model.own_model is None:
        path = getattr(FAMILIES[model.family], key)
        return path and import_attribute(path)
    declared = getattr(model.own_model, key)
    if isinstance(declared, str):
        declared = users_code.import_user_object(model.own_model, declared)
    return declared(built_model) if callable(declared) else declared


def _has_splitting_declaration(network: str | Model, key: str) -> bool:
    """Return whether a model declares how it can be split, without importing the declaration.

    Args:
        network: Name or description of the model.
        key: Name of the declaration: `tensor_plan` or `pipeline_modules`.
    """
    model = get_model_metadata(network)
    return getattr(model.own_model or FAMILIES[model.family], key) is not None


def has_tensor_plan(network: str | Model) -> bool:
    """Return whether the model declares how workers divide its layers (a tensor plan)."""
    return _has_splitting_declaration(network, "tensor_plan")


def get_tensor_plan(network: str | Model, model: nn.Module) -> dict[str, str]:
    """Return how workers divide each module of a model, by module path (its tensor plan).

    A `*` in a path matches any name.

    Raises:
        ValueError: If the model has no such plan.
    """
    return _get_splitting_declaration(network, "tensor_plan", model)


def get_number_of_attention_heads(
    network: str | Model, built_model: nn.Module | None = None
) -> int:
    """Return the number of a model's attention heads that workers divide. 0 without attention.

    Args:
        network: Name or description of the model.
        built_model: The built model, which may have an attribute `num_heads`, or None if it is not built.
    """
    model = get_model_metadata(network)
    declared = model.own_model.num_heads if model.own_model else model.num_heads
    return declared or getattr(built_model, "num_heads", 0)


def has_pipeline_pieces(network: str | Model) -> bool:
    """Return whether a model declares its forward as a chain of pieces, for pipeline stages."""
    return _has_splitting_declaration(network, "pipeline_modules")


def make_declared_pieces(network: str | Model, model: nn.Module) -> list[Piece]:
    """Return the chain of pieces of a model's forward, as the model declares it.

    Raises:
        ValueError: If the model has no module with a declared path.
    """
    from stratbench.extensions.splitting import pieces

    return pieces.make_pieces_from_plan(
        model, _get_splitting_declaration(network, "pipeline_modules", model)
    )
