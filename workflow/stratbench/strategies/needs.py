"""What some strategies need beyond stratbench's own packages: looked for before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from stratbench.workload.users_code import ModelError

if TYPE_CHECKING:
    from stratbench.strategies.base import Strategy


class Missing(ModelError):
    """A distribution that a strategy needs is not installed, or in another version."""


def distributions(cls: type[Strategy]) -> dict[str, str]:
    """Of each distribution that the strategy needs, the version."""
    return dict(pin.split("==") for pin in cls.needs)


def check_installed(name: str, cls: type[Strategy]) -> None:
    """Missing where this Python lacks what the strategy `cls`, which the study calls `name`, needs."""
    for why in faults([(name, cls)]):
        raise Missing(why)


def faults(strategies: Iterable[tuple[str, type[Strategy]]]) -> Iterator[str]:
    """A sentence for each distribution that strategies lack, with the command that installs it.

    `strategies`: what the study calls each, and its class.
    """
    wanted: dict[tuple[str, str], list[str]] = {}
    for name, cls in dict.fromkeys(strategies):
        for pin in distributions(cls).items():
            wanted.setdefault(pin, []).append(name)
    if not wanted:
        return
    from importlib import metadata  # here: few studies need it, and every command would wait for it

    for (distribution, version), names in wanted.items():
        try:
            found = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found = "none"
        if found != version:
            yield (
                f"{', '.join(names)}: {distribution}=={version} is needed, and this Python has {found}: "
                f"pip install -r envs/requirements-{distribution}.txt"
            )
