"""Generates the tables of docs/configuration.md: every key of config.yaml, every option of a strategy.

    PYTHONPATH=workflow python docs/config_tables.py docs/configuration.md

A test keeps the page current.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from stratbench.cell.options import limits, spell
from stratbench.ps.policies.policies import POLICIES, policy_class
from stratbench.strategies import REGISTRY, strategy_class
from stratbench.study.config.schema import TYPE_NAMES, resolved, schema

#: Lines of docs/configuration.md that the generated tables stand between.
TABLE_BEGIN, TABLE_END = "<!-- begin: generated -->", "<!-- end: generated -->"


def key_tables() -> str:
    """Every key of config.yaml and every option of a strategy, as Markdown tables."""
    parts = []
    for title, properties, required in _blocks("", schema()):
        rows = [
            (f"`{key}`", _allowed(rule), _default(key, rule, required), rule["description"])
            for key, rule in properties.items()
        ]
        parts.append(f"### {title}\n\n" + _table(("key", "value", "default", "meaning"), rows))
    header = ("strategy", "option", "value", "default", "meaning")
    parts.append("### Options of strategies\n\n" + _table(header, _option_rows()))
    parts.append("\n".join(_refused_optimizers()))
    return "\n".join(parts)


def _refused_optimizers() -> Iterator[str]:
    """A sentence for each optimizer that some servers refuse."""
    for optimizer in schema()["$defs"]["experiment"]["properties"]["optimizer"]["enum"]:
        names = [f"`{n}`" for n in POLICIES if policy_class(n).Options.refusal(optimizer)]
        yield f"Servers that refuse `optimizer: {optimizer}`: {', '.join(names)}.\n"


def _option_rows() -> Iterator[tuple[str, ...]]:
    """A row for each option, with all strategies for which the rest of the row is the same."""
    owners: dict[tuple[str, ...], list[str]] = {}
    for strategy in REGISTRY:
        options_class = strategy_class(strategy).Options
        types = get_type_hints(options_class)
        for spec in fields(options_class):
            value = _type(types[spec.name], list(limits(spec)))
            row = (f"`{spec.name}`", value, json.dumps(spec.default), spec.metadata["help"])
            owners.setdefault(row, []).append(strategy)
    servers = [name for name in REGISTRY if strategy_class(name).kind == "server"]
    for (name, value, default, meaning), strategies in owners.items():
        of = "every `ps-*`" if strategies == servers else ", ".join(f"`{s}`" for s in strategies)
        yield of, name, value, f"`{default}`", meaning


def _type(hint: Any, bounds: Iterable[str]) -> str:
    """What an option takes: its literal values, or a type in words with the bounds of numbers."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if get_args(hint) and get_origin(hint) is not list:  # a union
        return "; or ".join(_type(part, bounds) for part in get_args(hint))
    return ", ".join([spell(hint), *bounds])


def _blocks(
    path: str, rule: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], list[str]]]:
    """Title, keys and required keys of each mapping of the config, from the top down."""
    properties = {key: resolved(inner) for key, inner in rule["properties"].items()}
    yield (f"`{path}`" if path else "Top level"), properties, rule.get("required", [])
    for key, inner in properties.items():
        named = resolved(inner.get("additionalProperties") or {})
        below = f"{path}.{key}".lstrip(".")
        if "properties" in named:
            yield from _blocks(f"{below}.<name>", named)
        elif "properties" in inner:
            yield from _blocks(below, inner)


def _allowed(rule: Mapping[str, Any]) -> str:
    if "enum" in rule:
        return ", ".join(f"`{value}`" for value in rule["enum"])
    if "const" in rule:
        return f"`{rule['const']}`"
    types = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    names = TYPE_NAMES | {"array": f"a list ({_allowed(rule['items'])})" if "items" in rule else ""}
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {rule[key]}" for key, sign in signs.items() if key in rule]
    return ", ".join([" or ".join(names[t] for t in types), *bounds])


def _default(key: str, rule: Mapping[str, Any], required: list[str]) -> str:
    if key in required:
        return "required"
    return f"`{json.dumps(rule['default'])}`" if "default" in rule else "none"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def put_between_marks(path: Path, text: str) -> None:
    """Put generated text into a page, between the lines `TABLE_BEGIN` and `TABLE_END`.

    Raises:
        SystemExit: The page lacks one of the lines.
    """
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not begin or not end:
        raise SystemExit(f"{path} has no lines {TABLE_BEGIN} and {TABLE_END}")
    path.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")


def main() -> None:
    """Make the tables of a page again, between its marks."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("page", type=Path, help="docs/configuration.md")
    put_between_marks(parser.parse_args().page, key_tables())


if __name__ == "__main__":
    main()
