"""Checks before any training that packages for single strategies, such as deepspeed, are installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stratbench.workload.users_code import ModelError

if TYPE_CHECKING:
    from stratbench.strategies.base import Strategy


class MissingPackage(ModelError):
    """Raised if a package that a strategy needs is not installed, or has another version."""


def check_installed(name: str, cls: type[Strategy], options: Mapping[str, Any]) -> None:
    """Raise MissingPackage if this Python environment lacks a package that a strategy needs.

    Args:
        name: Name of the strategy in the study.
        cls: Class of the strategy.
        options: All options of the strategy.
    """
    for reason in iter_missing_requirements([(name, cls, options)]):
        raise MissingPackage(reason)


def iter_missing_requirements(
    strategies: Iterable[tuple[str, type[Strategy], Mapping[str, Any]]],
) -> Iterator[str]:
    """Yield a sentence per missing package or other requirement of the strategies, with the remedy."""
    strategies = list(strategies)
    strategies_by_pin: dict[tuple[str, str], dict[str, None]] = {}
    for name, cls, options in strategies:
        for pin in cls.packages(options):
            distribution, version = pin.split("==")
            strategies_by_pin.setdefault((distribution, version), {})[name] = None
    yield from _iter_missing_packages(strategies_by_pin)
    lacks = (
        f"{name}: {reason}"
        for name, cls, o in strategies
        for reason in cls.iter_unmet_requirements(o)
    )
    yield from dict.fromkeys(lacks)


def _iter_missing_packages(
    strategies_by_pin: Mapping[tuple[str, str], Iterable[str]],
) -> Iterator[str]:
    if not strategies_by_pin:
        return
    # The import is here because it is slow, and few studies need it.
    from importlib import metadata

    for (distribution, version), strategy_names in strategies_by_pin.items():
        try:
            installed = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            installed = "none"
        if installed != version:
            yield (
                f"{', '.join(strategy_names)}: {distribution}=={version} is needed, but this Python has "
                f"{installed}; run pip install {distribution}=={version}, or with --sdm conda add it to "
                "envs/stratbench.yaml"
            )
