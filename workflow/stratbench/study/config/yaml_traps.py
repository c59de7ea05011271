"""Rejects config errors that JSON Schema cannot see: duplicate keys, dates, NaN, control characters."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratbench.cell.text.words import format_wrong_value
from stratbench.study.config.messages import ConfigError, format_config_path


def check_yaml_syntax(path: str | Path) -> None:
    """Raise ConfigError with the line of the first YAML syntax error of a file.

    A missing file is no error here.
    """
    import yaml

    try:
        yaml.compose(Path(path).read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except FileNotFoundError:
        return
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        yaml_problem = getattr(e, "problem", None) or e
        raise ConfigError(
            f"{path}{line}: the YAML is invalid: {yaml_problem}; indent with spaces instead of tabs, close "
            "brackets and quotes, and quote texts that contain `: ` or begin with a special character"
        ) from e


def check_duplicate_yaml_keys(path: str | Path) -> None:
    """Raise ConfigError if a YAML file has a key twice. YAML readers silently use the last one."""
    import yaml

    def check_duplicate_keys_in_node(node: yaml.Node, where: str) -> None:
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                key_path = f"{where}.{key.value}".lstrip(".")
                line = key.start_mark.line + 1
                first_line = seen.get(str(key.value))
                if first_line is not None and key.value != "<<":
                    raise ConfigError(
                        f"{path}: {key_path} is given twice, in lines {first_line} and {line}; keep one"
                    )
                seen[str(key.value)] = line
                check_duplicate_keys_in_node(value, key_path)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                check_duplicate_keys_in_node(item, where)

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times as fast
    root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=loader)
    if root is not None:
        check_duplicate_keys_in_node(root, "")


def check_value_types(value: Any, path: tuple[str | int, ...]) -> None:
    """Raise ConfigError for values that JSON Schema cannot reject, such as NaN and dates.

    Such values are NaN, dates, and keys that are not text.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                location = f"config: {format_config_path(path)}" if path else "config"
                shown_key = format_wrong_value(key)
                raise ConfigError(
                    f"{location}: the key {shown_key} is not text; write it in quotes: '{shown_key}'"
                )
            _check_characters(key, path)
            check_value_types(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            check_value_types(inner, (*path, i))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"config: {format_config_path(path)} = {value}: must be a finite number")
    elif isinstance(value, str):
        _check_characters(value, path)
    elif not isinstance(value, int | float | None):
        type_name = type(value).__name__
        raise ConfigError(
            f"config: {format_config_path(path)} = {value}: is a {type_name}; write it in quotes"
        )


def _check_characters(text: str, path: tuple[str | int, ...]) -> None:
    """Raise ConfigError if a text has control characters or surrogates.

    Neither a command line nor a page can hold them.
    """
    for character in text:
        kind = unicodedata.category(character)
        if kind == "Cs" or (kind == "Cc" and character not in "\n\t\r"):
            location = f"config: {format_config_path(path)}" if path else "config"
            raise ConfigError(
                f"{location} = {format_wrong_value(text)}: has {character!r}, which is not a printable "
                "character; remove it"
            )
