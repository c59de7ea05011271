"""Checks config.yaml against its JSON Schema: types read from text, structure, ranges, defaults."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from stratbench.cell.extensions import iter_extension_keys, list_config_blocks
from stratbench.cell.installation import SCHEMAS
from stratbench.cell.options import build_dataclass_schema
from stratbench.cell.settings import OF_A_VARIANT, build_experiment_schema
from stratbench.cell.text.words import format_wrong_value
from stratbench.study.config.messages import (
    ConfigError,
    format_config_path,
    format_wrong_value_message,
    join_messages,
    suggest_closest_name,
)
from stratbench.study.config.removed_keys import explain_removed_key

SCHEMA_PATH = SCHEMAS / "config.schema.json"
TYPE_NAMES = {
    "object": "a mapping",
    "array": "a list",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}


@cache
def build_config_schema() -> dict[str, Any]:
    """Return the JSON Schema of config.yaml, with all settings and the keys of extensions."""
    whole = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    experiment, settings = whole["$defs"]["experiment"], build_experiment_schema()
    experiment["required"] += settings["required"]
    experiment["properties"] |= settings["properties"]
    variant = whole["$defs"]["study"]["properties"]["variants"]["additionalProperties"][
        "properties"
    ]
    variant["settings"]["properties"] = {
        # Variants have no defaults: a setting that a variant lacks has the experiment's value.
        key: {
            name: value for name, value in settings["properties"][key].items() if name != "default"
        }
        for key in OF_A_VARIANT
    }
    for place in list_config_blocks():
        for _, keys in iter_extension_keys(place) if place != "experiment" else ():
            new = {"type": "object", "additionalProperties": False, "properties": {}}
            new["description"] = keys.__doc__
            block = whole if place == "top" else whole["properties"].setdefault(place, new)
            block["properties"] |= build_dataclass_schema(keys)["properties"]
    return whole


def resolve_schema_reference(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rule of the schema that `rule` refers to, or `rule` itself."""
    return (
        build_config_schema()["$defs"][rule["$ref"].rpartition("/")[2]] if "$ref" in rule else rule
    )


def parse_texts_by_schema(value: Any, rule: Mapping[str, Any]) -> Any:
    """Return `value` with texts parsed to the types that the schema requires.

    The types are numbers, truth values and null. Snakemake passes values nested in --config as text, and YAML
    reads 1e-3 as text. Any other text stays as it is, and is rejected later.
    """
    rule = resolve_schema_reference(rule)
    if isinstance(value, Mapping):
        inner = rule.get("properties", {})
        others = rule.get("additionalProperties") or {}
        return {key: parse_texts_by_schema(v, inner.get(key, others)) for key, v in value.items()}
    if isinstance(value, list):
        return [parse_texts_by_schema(v, rule.get("items", {})) for v in value]
    if isinstance(value, str) and "enum" in rule:
        return next((allowed for allowed in rule["enum"] if str(allowed) == value), value)
    if isinstance(value, str) and "type" in rule:
        types = [rule["type"]] if isinstance(rule["type"], str) else rule["type"]
        return parse_text_as_json_type(value, types)
    return value


def parse_text_as_json_type(text: str, types: Iterable[str]) -> Any:
    """Parse a text as one of the JSON types `types`. Return it unchanged if that fails."""
    if "null" in types and text in ("null", "~"):
        return None
    if "boolean" in types and text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    if "string" in types:
        return text
    if {"integer", "number"} & set(types) and re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        return int(text)
    if "number" in types and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, _FLAGS):
        return float(text)
    return text


_FLAGS = re.ASCII | re.IGNORECASE
#: The truth values of YAML 1.1.
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@cache
def _make_config_validator():
    import jsonschema

    # JSON Schema counts 2.0 as an integer. Here an integer must have the type int.
    base = jsonschema.Draft202012Validator
    checker = base.TYPE_CHECKER.redefine("integer", lambda _, v: type(v) is int)
    return jsonschema.validators.extend(base, type_checker=checker)(build_config_schema())


def check_config_structure(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for all values that the schema does not allow, sorted by nesting depth."""
    _raise_for_schema_errors(_make_config_validator().iter_errors(config))


def _raise_for_schema_errors(faults: Iterable[Any]) -> None:
    """Raise ConfigError with a line for each unknown or missing key and each wrong value."""
    lines: dict[Any, str] = {}
    for fault in sorted(faults, key=lambda e: (len(e.path), str(e.path))):
        for key in _list_wrong_keys(fault):
            # The first of several errors on one value is enough.
            lines.setdefault((*fault.absolute_path, key), _explain_schema_error(fault, key))
    if lines:
        raise ConfigError(join_messages(lines.values()))


def fill_schema_defaults(config: dict[str, Any]) -> None:
    """Fill in the schema's defaults of missing keys, in place."""

    def fill_block_defaults(block: dict[str, Any], properties: Mapping[str, Any]) -> None:
        for key, rule in properties.items():
            if "default" in rule:
                block.setdefault(key, rule["default"])

    top = build_config_schema()["properties"]
    fill_block_defaults(config, top)
    for key in ("datasets", "models"):
        config.setdefault(key, {})
    for key in (key for key, rule in top.items() if "properties" in rule):
        fill_block_defaults(config.setdefault(key, {}), top[key]["properties"])
    for key in ("datasets", "models"):
        for spec in config[key].values():
            fill_block_defaults(spec, top[key]["additionalProperties"]["properties"])
    for study in config["studies"].values():
        fill_block_defaults(study, build_config_schema()["$defs"]["study"]["properties"])
        study.setdefault("variants", {})
        for experiment in study["experiments"].values():
            fill_block_defaults(
                experiment, build_config_schema()["$defs"]["experiment"]["properties"]
            )


def collect_extension_values(
    block_name: str, block: Mapping[str, Any], whole: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the extensions' values in a config block that differ from defaults, by extension.

    Args:
        block_name: Where the block is: `experiment`, or the name of a block of the top level.
        block: Values of the block.
        whole: The block itself for an experiment; else the config.
    """
    more = {}
    for name, keys in iter_extension_keys(block_name):
        default = {f.name: f.default for f in fields(keys) if f.metadata["given"]}
        own = {k: block[k] for k in default if block.get(k, default[k]) != default[k]}
        if values := keys.complete_values(own, whole):
            more[name] = values
    return more


def collect_constraints(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constraints of a decision, from `decide` and from other blocks of the config.

    The constraints are the keys of `decide`, and keys of other blocks that extensions declare as constraints.
    """
    decide = config["decide"]
    added = {field.name for _, keys in iter_extension_keys("decide") for field in fields(keys)}
    constraints = {key: value for key, value in decide.items() if key not in added}
    # A decision adds the same safety margin to a measured peak as the plan to a predicted one.
    constraints["memory_margin"] = config["cluster"]["memory_margin"]
    return constraints | {"more": collect_extension_values("decide", decide, config)}


def check_extension_keys(
    block_name: str, block: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Raise ConfigError if a block contradicts the keys of extensions.

    Args:
        block_name: Name of the block, or `top`.
        block: The block.
        config: The whole config.
    """
    where = "" if block_name == "top" else block_name
    faults = [
        f"config: {where}{f}"
        for _, keys in iter_extension_keys(block_name)
        for f in keys.iter_contradictions(block, config)
    ]
    if faults:
        raise ConfigError(join_messages(faults))


def check_config_block(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return one block of a config (such as `decide`), checked and with its defaults.

    Raises:
        ConfigError: If the block has a mistake.
    """
    alone = parse_texts_by_schema({name: block}, build_config_schema())
    faults = [
        e
        for e in _make_config_validator().iter_errors(alone)
        if list(e.absolute_path)[:1] == [name]
    ]
    _raise_for_schema_errors(faults)
    properties = build_config_schema()["properties"][name].get("properties", {})
    defaults = {key: rule["default"] for key, rule in properties.items() if "default" in rule}
    return defaults | alone[name]


_BOUNDS = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "greater than",
    "exclusiveMaximum": "less than",
}


def _list_wrong_keys(fault: Any) -> list[str | None]:
    """Return the unknown or missing keys of a schema error.

    The list is `[None]` for a wrong value.
    """
    value, rule = fault.instance, fault.validator_value
    match fault.validator:
        case "additionalProperties":
            return [key for key in value if key not in fault.schema["properties"]]
        case "required":
            return [key for key in rule if key not in value]
    return [None]


def _explain_schema_error(fault: Any, key: str | None) -> str:
    """Return a sentence for the user that explains an error from the schema's validation.

    `key` is the unknown or missing key, if that is the error.
    """
    where = format_config_path(fault.absolute_path)
    at = f"config: {where}" if where else "config"
    value, rule = fault.instance, fault.validator_value
    setting = f"{at} = {format_wrong_value(value)}"
    about = fault.schema.get("description", "")
    match fault.validator:
        case "additionalProperties":
            allowed = list(fault.schema["properties"])
            place = f"{where}.{key}".lstrip(".")
            if reason := explain_removed_key(tuple(fault.absolute_path), key):
                return f"config: {place} = {format_wrong_value(value[key])}: was removed; {reason}"
            return (
                f"config: {place} = {format_wrong_value(value[key])}: unknown key {key!r}."
                f"{suggest_closest_name(key, allowed)} Allowed: {', '.join(allowed)}."
            )
        case "required":
            about = fault.schema.get("properties", {}).get(key, {}).get("description", "")
            message = f"{at}: the key {key!r} is missing. {about}"
        case "type":
            wanted = " or ".join(TYPE_NAMES[t] for t in ([rule] if isinstance(rule, str) else rule))
            one = "array" in rule and isinstance(value, (str, int, float))
            message = f"{setting}: must be {wanted}{f'; write [{value}]' if one else ''}. {about}"
        case "enum" | "const" as kind:
            allowed = map(str, rule if kind == "enum" else [rule])
            return format_wrong_value_message(where, value, "is not allowed", allowed)
        case "uniqueItems":
            twice = next(v for i, v in enumerate(value) if v in value[:i])
            message = f"{setting}: {twice!r} is given twice; keep one."
        case bound if bound in _BOUNDS:
            message = f"{setting}: must be {_BOUNDS[bound]} {rule}. {about}"
        case "maxLength":
            message = (
                f"{setting}: has {len(value):,} characters; must have at most {rule:,}. {about}"
            )
        case "minItems" | "maxItems" if rule > 1:
            bound = "at least" if fault.validator == "minItems" else "at most"
            message = f"{setting}: must have {bound} {rule} entries. {about}"
        case "minItems" | "minProperties" | "minLength":
            message = f"{at}: must not be empty. {about}"
        # Patterns without `type: string` list the words that a key allows; patterns with it are for names.
        case "pattern" if fault.schema["type"] != "string":
            message = f"{setting}: is not allowed. {about}"
        case "pattern":
            message = (
                f"{at}: the name {value!r} is part of paths: it may have only letters, digits, '.', '_' and "
                "'-', and must begin with a letter or digit."
            )
        case _:
            message = f"{setting}: {fault.message}"
    return message.rstrip()
