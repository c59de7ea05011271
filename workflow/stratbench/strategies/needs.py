"""Checks, before any training, that the packages which only some strategies need are installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stratbench.workload.users_code import ModelError

if TYPE_CHECKING:
    from stratbench.strategies.base import Strategy


class Missing(ModelError):
    """A package that a strategy needs is not installed, or has another version."""


#: Name of a strategy in the study, its class, and its options.
Used = tuple[str, "type[Strategy]", Mapping[str, Any]]


def check_installed(name: str, cls: type[Strategy], options: Mapping[str, Any]) -> None:
    """Raise Missing if this Python environment lacks a package that a strategy needs.

    Args:
        name: Name of the strategy in the study.
        cls: Class of the strategy.
        options: All options of the strategy.
    """
    for reason in iter_missing_requirements([(name, cls, options)]):
        raise Missing(reason)


def iter_missing_requirements(strategies: Iterable[Used]) -> Iterator[str]:
    """Yield a sentence per missing package, with the command that installs it."""
    strategies = list(strategies)
    wanted: dict[tuple[str, str], dict[str, None]] = {}
    for name, cls, options in strategies:
        for pin in cls.packages(options):
            distribution, version = pin.split("==")
            wanted.setdefault((distribution, version), {})[name] = None
    yield from _iter_missing_packages(wanted)
    lacks = (
        f"{name}: {reason}"
        for name, cls, o in strategies
        for reason in cls.iter_unmet_requirements(o)
    )
    yield from dict.fromkeys(lacks)


def _iter_missing_packages(wanted: Mapping[tuple[str, str], Iterable[str]]) -> Iterator[str]:
    if not wanted:
        return
    from importlib import metadata  # imported here, since few studies need this slow import

    for (distribution, version), names in wanted.items():
        try:
            installed = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            installed = "none"
        if installed != version:
            yield (
                f"{', '.join(names)}: {distribution}=={version} is needed, but this Python has {installed}; "
                f"run pip install {distribution}=={version}, or with --sdm conda add it to "
                "envs/stratbench.yaml"
            )
