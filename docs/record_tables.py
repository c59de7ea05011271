"""Generates docs/reference/record.md: every field of a cell's record, from the record's schema.

    PYTHONPATH=workflow python docs/record_tables.py

A test keeps the page current.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from config_tables import DOCS, fill
from stratbench.cell.record import SCHEMA_PATH

PAGE = DOCS / "reference" / "record.md"


def field_tables() -> str:
    """Return a Markdown table per part of the record, and one of the fields outside of any part."""
    properties = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))["properties"]
    single = {name: rule for name, rule in properties.items() if not is_part(rule)}
    parts = [_section("Top level", "", _rows("", single))]
    for name, rule in properties.items():
        if is_part(rule):
            parts.append(_section(f"`{name}`", rule["description"], _rows("", _fields(rule))))
    return "\n".join(parts)


def is_part(rule: Mapping[str, Any]) -> bool:
    """Return whether a field of the record has fields of its own."""
    return bool(_fields(rule))


def _fields(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of an object, or of a list's entries."""
    return rule.get("properties") or rule.get("items", {}).get("properties") or {}


def _rows(prefix: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield path, type and meaning of fields and of those below them."""
    for name, rule in fields.items():
        path = f"{prefix}{name}"
        yield f"`{path}`", _type(rule), rule["description"].replace("|", "\\|")
        below = f"{path}[]." if "items" in rule else f"{path}."
        yield from _rows(below, _fields(rule))


def _type(rule: Mapping[str, Any]) -> str:
    """Return what a field holds, in words."""
    if "enum" in rule:
        return ", ".join(f"`{value}`" for value in rule["enum"])
    if "const" in rule:
        return f"`{rule['const']}`"
    types = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    return " or ".join(types)


def _section(title: str, description: str, rows: Iterator[tuple[str, str, str]]) -> str:
    table = "| field | type | meaning |\n| --- | --- | --- |\n"
    table += "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return "\n".join(filter(None, [f"## {title}\n", description and f"{description}\n", table]))


def main() -> None:
    """Write the page."""
    PAGE.write_text(fill(PAGE, field_tables()), encoding="utf-8")


if __name__ == "__main__":
    main()
