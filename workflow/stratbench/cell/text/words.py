"""Formats counts with nouns (`4 CPU processes`), memory, times, untrusted texts and invalid config values."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

MIB = 1 << 20
GIB = 1 << 30
_UNITS = (("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10))
_MAX_SHOWN = 80  # maximum number of characters of a wrong value in a message
#: Noun for a worker, by the kind of its device.
WORKER_NOUNS = {"cuda": "GPU", "cpu": "CPU process"}


def choose_byte_unit_name_and_size(n_bytes: float) -> tuple[str, int]:
    """Return the largest byte unit that an amount reaches: its name and size."""
    return next((unit for unit in _UNITS if abs(n_bytes) >= unit[1]), _UNITS[-1])


def format_bytes(n_bytes: float) -> str:
    """Return bytes as text: GiB with three digits, MiB or KiB without decimals."""
    name, unit = choose_byte_unit_name_and_size(n_bytes)
    # Without `float`, the sum of two comparisons below would be a boolean of NumPy.
    value = float(n_bytes) / unit
    decimals = (abs(value) < 99.95) + (abs(value) < 9.995) if unit == GIB else 0
    return f"{value:,.{decimals}f} {name}" if n_bytes else "0"


def format_hours(hours: float) -> str:
    """Return hours as text with two significant digits, from 10 hours on as an integer."""
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


def format_seconds(seconds: float) -> str:
    """Return a time as text in s, min or h. Less than a second becomes `1 s`."""
    if seconds < 1:
        return "1 s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def format_short_time(seconds: float) -> str:
    """Return a time as text in s, ms or µs with three significant digits."""
    unit, name = next(((u, n) for u, n in ((1, "s"), (1e-3, "ms")) if seconds >= u), (1e-6, "µs"))
    value = seconds / unit
    return f"{value:,.0f} {name}" if value >= 100 else f"{value:.3g} {name}"


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun in singular or plural: `4 CPU processes`."""
    return f"{count} {noun if count == 1 else pluralize(noun)}"


def pluralize(noun: str) -> str:
    """Return the plural of a noun: `GPUs`, `CPU processes`, `strategies`."""
    if noun.endswith("gy"):
        return f"{noun[:-1]}ies"
    return noun + ("es" if noun.endswith("s") else "s")


def format_names(names: Sequence[str], max_names: int = 4) -> str:
    """Return at most `max_names` names for a sentence: `a, b, c, d and 2 more`."""
    shown = ", ".join(names[:max_names])
    return shown if len(names) <= max_names else f"{shown} and {len(names) - max_names} more"


def join_with_and(values: Iterable[object]) -> str:
    """Return values as a list for a sentence: `1, 2 and 4`."""
    *texts, last = map(str, values)
    return f"{', '.join(texts)} and {last}" if texts else last


def choose_noun_for_workers(device_kinds: Iterable[object]) -> str:
    """Return the noun for workers on these kinds of device, or `worker` if kinds differ."""
    nouns = [WORKER_NOUNS[kind] for kind in WORKER_NOUNS.keys() & set(device_kinds)]
    return nouns[0] if len(nouns) == 1 else "worker"


#: Maximum number of characters in a line for a terminal.
COLUMNS = 100


def wrap_lines(lines: Iterable[str]) -> str:
    """Return lines as a text, wrapped at COLUMNS with a hanging indent."""
    wrapped: list[str] = []
    for line in "\n".join(lines).split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        wrapped += textwrap.wrap(
            line.strip(),
            COLUMNS,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(wrapped)


def replace_control_characters(text: str) -> str:
    """Return a text with `?` in place of characters that could control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def shorten_for_table(text: str) -> str:
    """Return a text without control characters, cut to 80 characters for a table."""
    text = replace_control_characters(text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def format_wrong_value(value: Any) -> str:
    """Return a wrong value for a message, in YAML's notation and cut if long."""
    names = {None: "null", True: "true", False: "false"}
    text = next((name for known, name in names.items() if value is known), repr(value))
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
