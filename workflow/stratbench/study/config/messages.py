"""Messages about mistakes in config.yaml: one line with the place, the value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

_LONGEST_SHOWN = 80  # characters of a wrong value in a message


class ConfigError(ValueError):
    """A mistake in config.yaml, with one message that a person can act on."""


def wrong_value_message(where: str, value: Any, what: str, allowed: Iterable[str]) -> str:
    """The message for a value that is not one of `allowed`."""
    allowed = list(allowed)
    listed = f"Allowed: {', '.join(allowed) or 'none'}."
    return f"config: {where} = {repr_of(value)}: {what}.{did_you_mean(value, allowed)} {listed}"


def place_of(path: Iterable[str | int]) -> str:
    """A path through the config as a person writes it: `studies.demo.experiments.digits.gpus[1]`."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")


def repr_of(value: Any) -> str:
    """A wrong value as a message shows it, cut if it is long."""
    names = {None: "null", True: "true", False: "false"}  # what YAML calls them
    text = next((name for known, name in names.items() if value is known), repr(value))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def did_you_mean(given: Any, allowed: Iterable[str]) -> str:
    """The closest of `allowed`, as a question after a blank; empty if none is close.

    One that begins with what was given, the shortest such, is closer than any other.
    """
    text, allowed = str(given), list(allowed)
    longer = sorted((name for name in allowed if len(text) > 2 and name.startswith(text)), key=len)
    close = longer or difflib.get_close_matches(text, allowed, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
