"""Writes values and calls as text of a Python file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Code(str):
    """Text that is code in a file, not a quoted string."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the code of a call with one argument per line."""
    lines = "".join(f"    {key}={value!r},\n" for key, value in arguments.items())
    return f"{name}(\n{lines})\n"


def fold_call(line: str) -> str:
    """Return a code line, with one argument per line if it is long.

    A line of more than 100 characters is long.
    """
    head, bracket, rest = line.partition("(")
    if len(line) <= 100 or not bracket or not rest.endswith(")"):
        return line
    indent, arguments, depth = " " * (len(line) - len(line.lstrip())), [""], 0
    for letter in rest[:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:  # the call ends before the line does
            return line
        if letter == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += letter
    keywords = "".join(f"{indent}    {argument.strip()},\n" for argument in arguments)
    return f"{head}(\n{keywords}{indent})"
