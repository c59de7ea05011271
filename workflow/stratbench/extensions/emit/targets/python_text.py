"""Formats values and calls as Python code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class CodeLines(NamedTuple):
    """Lines of Python code, and the import lines that they need."""

    lines: list[str]
    imports: list[str]


class UnquotedCode(str):
    """Text that is written to a file as code, not as a quoted string."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def format_python_call(function_name: str, arguments: Mapping[str, Any]) -> str:
    """Return the code of a call, with one argument per line."""
    lines = "".join(f"    {key}={value!r},\n" for key, value in arguments.items())
    return f"{function_name}(\n{lines})\n"


def wrap_long_call_line(line: str) -> str:
    """Split a code line of over 100 characters into one line per call argument. Keep other lines."""
    head, bracket, rest = line.partition("(")
    if len(line) <= 100 or not bracket or not rest.endswith(")"):
        return line
    indent, arguments, depth = " " * (len(line) - len(line.lstrip())), [""], 0
    for letter in rest[:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:  # code follows the call; the line stays as it is
            return line
        if letter == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += letter
    keywords = "".join(f"{indent}    {argument.strip()},\n" for argument in arguments)
    return f"{head}(\n{keywords}{indent})"
