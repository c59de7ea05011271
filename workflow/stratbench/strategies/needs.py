"""What some strategies need beyond stratbench's own packages: looked for before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from stratbench.workload.own import ModelError

if TYPE_CHECKING:
    from stratbench.strategies.base import Strategy


class Missing(ModelError):
    """A distribution that a strategy needs is not installed, or in another version."""


def distributions(cls: type[Strategy]) -> dict[str, str]:
    """Of each distribution that the strategy needs, the version."""
    return dict(pin.split("==") for pin in cls.needs)


def check_installed(name: str, cls: type[Strategy]) -> None:
    """Missing where this Python lacks what the strategy registered as `name` needs."""
    for why in faults(name, cls):
        raise Missing(why)


def all_faults(strategies: Iterable[tuple[str, type[Strategy]]]) -> list[str]:
    """Why some of these strategies, given with their names, cannot run on this Python; each once."""
    return list(dict.fromkeys(why for name, cls in strategies for why in faults(name, cls)))


def faults(name: str, cls: type[Strategy]) -> Iterator[str]:
    """A sentence for each distribution that is missing, with the command that installs it."""
    for distribution, version in distributions(cls).items():
        try:
            found = f"this Python has {metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            found = "this Python has none"
        if not found.endswith(f" {version}"):
            yield (
                f"{name} needs {distribution}=={version}, and {found}: "
                f"pip install -r envs/requirements-{distribution}.txt"
            )
