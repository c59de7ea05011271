"""Generates the reference of config.yaml, a page per block, and the tables of the strategies' options.

    PYTHONPATH=workflow python docs/config_tables.py

A block's page begins with its part of docs/config_examples.yaml. Tests keep pages and example current.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from stratbench.cell.options import describe_type, iter_limit_texts
from stratbench.extensions.servers.policies.policies import POLICIES, get_policy_class
from stratbench.strategies import REGISTRY, get_strategy_class
from stratbench.study.config.schema import TYPE_NAMES, build_config_schema, resolve_schema_reference

DOCS = Path(__file__).parent
#: A config that sets every key, from which the pages take their examples.
EXAMPLES = DOCS / "config_examples.yaml"
#: Lines of a page that generated tables stand between.
TABLE_BEGIN, TABLE_END = "<!-- begin: generated -->", "<!-- end: generated -->"
#: Strategies by the page of docs/reference/strategies that has their options.
FAMILIES = {
    "data-parallel": ("single", "ddp", "zero1", "zero1-torch"),
    "sharded": ("fsdp", "deepspeed"),
    "split": ("tensor", "pipeline"),
    "local": ("local-sgd", "diloco", "gossip"),
    "command": ("command",),
    "servers": tuple(name for name in REGISTRY if get_strategy_class(name).kind == "server"),
}
HEADER = ("key", "value", "default", "meaning")


def generated_pages() -> dict[Path, str]:
    """Return the text of every page that is generated, by its path."""
    pages = {DOCS / "configuration.md": fill(DOCS / "configuration.md", top_level_table())}
    for block, rule in block_rules().items():
        pages[DOCS / "reference" / "config" / f"{block}.md"] = block_page(block, rule)
    for family in FAMILIES:
        path = DOCS / "reference" / "strategies" / f"{family}.md"
        pages[path] = fill(path, strategy_tables(family))
    return pages


def block_rules() -> dict[str, Mapping[str, Any]]:
    """Return the rules of the top level's keys that have keys of their own."""
    rules = {
        key: resolve_schema_reference(rule)
        for key, rule in build_config_schema()["properties"].items()
    }
    return {key: rule for key, rule in rules.items() if _has_keys(rule)}


def _has_keys(rule: Mapping[str, Any]) -> bool:
    return "properties" in rule or "properties" in resolve_schema_reference(
        rule.get("additionalProperties") or {}
    )


def top_level_table() -> str:
    """Return the table of the top level's keys, each with a link to its page if it has one."""
    blocks = block_rules()
    rows = []
    for key, rule in build_config_schema()["properties"].items():
        name = f"[`{key}`](reference/config/{key}.md)" if key in blocks else f"`{key}`"
        rule = resolve_schema_reference(rule)
        required = build_config_schema().get("required", [])
        rows.append((name, _allowed(rule), _default(key, rule, required), rule["description"]))
    return _table(HEADER, rows)


def block_page(block: str, rule: Mapping[str, Any]) -> str:
    """Return the page of a block of config.yaml: an example with every key, then its tables."""
    parts = [
        f"# Configuration: `{block}`\n",
        f"This reference lists the keys of the block `{block}` in [config.yaml](../../configuration.md).\n",
        f"{rule['description']}\n",
        f"```yaml\n{example_of(block)}```\n",
    ]
    for title, properties, required in iter_blocks("", {"properties": {block: rule}}):
        if title != "Top level":
            rows = [
                (f"`{key}`", _allowed(inner), _default(key, inner, required), inner["description"])
                for key, inner in properties.items()
            ]
            parts.append(f"## {title}\n\n" + _table(HEADER, rows))
    return "\n".join(parts)


def example_of(block: str) -> str:
    """Return a block's lines of the example."""
    text = EXAMPLES.read_text(encoding="utf-8")
    match = re.search(rf"^{block}:.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    if match is None:
        raise SystemExit(f"{EXAMPLES} has no block {block}: give it a line per key")
    return match[0]


def strategy_tables(family: str) -> str:
    """Return the rules of a family's strategies and the table of their options."""
    rules = []
    for name in FAMILIES[family]:
        strategy = get_strategy_class(name)
        summary = (strategy.__doc__ or "").strip().partition("\n")[0]
        rule = strategy.rule.replace("|", "\\|")
        rules.append((f"`{name}`", summary, rule))
    parts = [_table(("strategy", "what it is", "rule"), rules)]
    if options := list(_option_rows(FAMILIES[family])):
        parts.append(_table(("strategy", "option", "value", "default", "meaning"), options))
    if family == "servers":
        parts.append("\n".join(_refused_optimizers()))
    return "\n".join(parts)


def _refused_optimizers() -> Iterator[str]:
    """A sentence for each optimizer that some servers refuse."""
    for optimizer in build_config_schema()["$defs"]["experiment"]["properties"]["optimizer"][
        "enum"
    ]:
        names = [f"`{n}`" for n in POLICIES if get_policy_class(n).Options.refusal(optimizer)]
        yield f"Servers that refuse `optimizer: {optimizer}`: {', '.join(names)}.\n"


def _option_rows(strategies: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield a row per option, with all strategies for which the rest of the row is the same."""
    owners: dict[tuple[str, ...], list[str]] = {}
    for strategy in strategies:
        options_class = get_strategy_class(strategy).Options
        types = get_type_hints(options_class)
        for spec in fields(options_class):
            value = _type(types[spec.name], list(iter_limit_texts(spec)))
            row = (f"`{spec.name}`", value, json.dumps(spec.default), spec.metadata["help"])
            owners.setdefault(row, []).append(strategy)
    for (name, value, default, meaning), names in owners.items():
        of = (
            "every `ps-*`"
            if names == list(FAMILIES["servers"])
            else ", ".join(f"`{s}`" for s in names)
        )
        yield of, name, value, f"`{default}`", meaning


def _type(hint: Any, bounds: Iterable[str]) -> str:
    """What an option takes: its literal values, or a type in words with the bounds of numbers."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if get_args(hint) and get_origin(hint) is not list:  # a union
        return "; or ".join(_type(part, bounds) for part in get_args(hint))
    return ", ".join([describe_type(hint), *bounds])


def iter_blocks(
    path: str, rule: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], list[str]]]:
    """Title, keys and required keys of each mapping of the config, from the top down."""
    properties = {key: resolve_schema_reference(inner) for key, inner in rule["properties"].items()}
    yield (f"`{path}`" if path else "Top level"), properties, rule.get("required", [])
    for key, inner in properties.items():
        named = resolve_schema_reference(inner.get("additionalProperties") or {})
        below = f"{path}.{key}".lstrip(".")
        if "properties" in named:
            yield from iter_blocks(f"{below}.<name>", named)
        elif "properties" in inner:
            yield from iter_blocks(below, inner)


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


def fill(path: Path, text: str) -> str:
    """Return a page with `text` between the lines `TABLE_BEGIN` and `TABLE_END`.

    Raises:
        SystemExit: The page lacks one of the lines.
    """
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not begin or not end:
        raise SystemExit(f"{path} has no lines {TABLE_BEGIN} and {TABLE_END}")
    return f"{before}{begin}\n{text}{end}{after}"


def main() -> None:
    """Write the generated pages."""
    for path, text in generated_pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
