"""Declarations of a model: how its layers and its forward can be divided.

The Snakefile imports this, so torch is imported inside functions only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratbench.cell.extensions import resolve
from stratbench.workload import users_code
from stratbench.workload.network.registry import FAMILIES, Model, facts_of

if TYPE_CHECKING:
    from torch import nn

    from stratbench.extensions.splitting.pieces import Piece


def _statement(network: str | Model, key: str, built: nn.Module) -> Any:
    """Return a model's declaration under `key`, or None.

    A user may name, as `module:NAME`, the declaration, or a function of the model that returns it.
    """
    model = facts_of(network)
    if model.own is None:
        path = getattr(FAMILIES[model.family], key)
        return path and resolve(path)
    declared = getattr(model.own, key)
    if isinstance(declared, str):
        declared = users_code.import_name(model.own, declared)
    return declared(built) if callable(declared) else declared


def _states(network: str | Model, key: str) -> bool:
    """Return whether it has a declaration; nothing is imported."""
    model = facts_of(network)
    return getattr(model.own or FAMILIES[model.family], key) is not None


def has_tensor_plan(network: str | Model) -> bool:
    """Return whether the model has a tensor plan."""
    return _states(network, "tensor_plan")


def tensor_plan(network: str | Model, model: nn.Module) -> dict[str, str]:
    """Return how workers divide the layers of `model`, by module path (`*`: any name).

    ValueError if it has no plan.
    """
    return _statement(network, "tensor_plan", model)


def heads_of(network: str | Model, built: nn.Module | None = None) -> int:
    """Return the number of attention heads, or 0 without any, which any number divides.

    A `built` model may declare it itself.
    """
    model = facts_of(network)
    declared = model.own.num_heads if model.own else model.num_heads
    return declared or getattr(built, "num_heads", 0)


def has_pieces(network: str | Model) -> bool:
    """Return whether the model declares its forward as a chain of pieces."""
    return _states(network, "pipeline_modules")


def pieces_of(network: str | Model, model: nn.Module) -> list[Piece]:
    """Return the model's forward as a chain of pieces. ValueError if it has no such piece."""
    from stratbench.extensions.splitting import pieces

    return pieces.pieces_of(model, _statement(network, "pipeline_modules", model))
