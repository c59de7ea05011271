"""Training strategies: one file a family, one line each in this registry.

Strategy modules import torch inside functions only, so that the workflow can read a strategy's name
and options in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratbench.strategies.base import Strategy, Traits

REGISTRY: dict[str, str] = {
    "single": "stratbench.strategies.single:Single",
    "ddp": "stratbench.strategies.ddp:DDP",
    "fsdp": "stratbench.strategies.fsdp:FSDP",
    "ps-sync": "stratbench.strategies.ps:Sync",
    "ps-async": "stratbench.strategies.ps:Async",
    "ps-async-modified": "stratbench.strategies.ps:AsyncModified",
    "ps-ssp": "stratbench.strategies.ps:Ssp",
    "ps-backup": "stratbench.strategies.ps:Backup",
    "ps-kbatch": "stratbench.strategies.ps:KBatch",
    "ps-dcasgd": "stratbench.strategies.ps:DcAsgd",
    "ps-gap-aware": "stratbench.strategies.ps:GapAware",
    "ps-staleness-lr": "stratbench.strategies.ps:StalenessLr",
    "ps-dana": "stratbench.strategies.ps:Dana",
}


def strategy_class(name: str) -> type[Strategy]:
    """The class registered as `name`; KeyError when there is none."""
    module, _, attribute = REGISTRY[name].partition(":")
    return getattr(import_module(module), attribute)


@cache
def _option_defaults(name: str) -> dict[str, Any]:
    return asdict(strategy_class(name).Options())


def option_defaults(name: str) -> dict[str, Any]:
    """The options of the strategy registered as `name`, with their defaults."""
    return dict(_option_defaults(name))


def traits_of(name: str, options: Mapping[str, Any], gpus: int) -> Traits:
    """What is true of the strategy registered as `name`, with these options, on `gpus` workers."""
    cls = strategy_class(name)
    return cls(cls.Options(**options)).traits(gpus)
