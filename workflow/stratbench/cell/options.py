"""Options of a strategy or policy: values with defaults, checked against types and limits.

Options from a study's config, of a strategy's class and sent to a server are all checked here. The last
functions determine which class attributes a strategy or policy does not inherit from another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from stratbench.cell.text.words import format_wrong_value


def option(
    default: Any,
    help: str,
    least: float | None = None,
    below: float | None = None,
    tried: Sequence[Any] = (),
    kind: str | None = None,
) -> Any:
    """Return a dataclass field for `Options`, with its meaning and its limits.

    Args:
        default: Default value.
        help: Meaning.
        least: Minimum of a number.
        below: Exclusive maximum of a number.
        tried: Values that `tune` tries besides the default. They change only speed or memory.
        kind: Kind of difference between `tried` values (extensions/tune/differences.py), or None if unknown.
    """
    metadata = {
        "help": help,
        "least": least,
        "below": below,
        "tried": tuple(tried),
        "kind": kind,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """Base class of all options: frozen dataclasses whose fields have defaults.

    Types are int, float, bool, str, Literal, lists of one of these, and unions. An invalid value raises
    ValueError, which names the field, the value and the allowed values.
    """

    def __post_init__(self) -> None:
        types = _types(type(self))
        for spec in fields(self):
            value = getattr(self, spec.name)
            if not matches_type(value, types[spec.name]):
                allowed = describe_type(types[spec.name])
                raise ValueError(f"{spec.name} = {format_wrong_value(value)}: must be {allowed}")
            if not is_within_limits(value, spec):
                limits = " and ".join(iter_limit_texts(spec))
                raise ValueError(f"{spec.name} = {format_wrong_value(value)}: must be {limits}")


_types = cache(get_type_hints)


def matches_type(value: Any, hint: Any) -> bool:
    """Return whether a value has a type. An int also counts as a float."""
    if get_origin(hint) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(matches_type(v, get_args(hint)[0]) for v in value)
    if get_args(hint):  # the hint is a union such as `int | None`
        return any(matches_type(value, part) for part in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def describe_type(hint: Any) -> str:
    """Return the allowed values of a type in words: `a number or null`."""
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is list:
        return f"a list ({describe_type(*get_args(hint))})"
    if get_args(hint):
        return " or ".join(map(describe_type, get_args(hint)))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return (names | {type(None): "null"}).get(hint, str(hint))


#: JSON Schema's name of each Python type.
_JSON_TYPES = {
    **{int: "integer", float: "number", bool: "boolean", str: "string"},
    **{list: "array", dict: "object", NoneType: "null"},
}


def list_json_types(hint: Any) -> list[str]:
    """Return the JSON types of a type hint: `integer` and `null` for `int | None`."""
    if get_origin(hint) is Literal:
        return list(dict.fromkeys(_JSON_TYPES[type(value)] for value in get_args(hint)))
    if get_origin(hint) in _JSON_TYPES:  # the hint is a generic type such as `list[float]`
        return [_JSON_TYPES[get_origin(hint)]]
    return [name for part in get_args(hint) for name in list_json_types(part)] or [
        _JSON_TYPES[hint]
    ]


def build_json_schema_of_type(hint: Any) -> dict[str, Any]:
    """Return the JSON Schema of a type hint: `enum` for a Literal, else `type`."""
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    types = list_json_types(hint)
    return {"type": types if len(types) > 1 else types[0]}


def build_json_schemas_of_fields(cls: type) -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of each field of a dataclass, by the field's name."""
    hints = get_type_hints(cls)
    return {
        spec.name: build_json_schema_of_type(hints[spec.name]) | spec.metadata["rule"]
        for spec in fields(cls)
    }


def build_dataclass_schema(cls: type, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the JSON Schema of an object with a dataclass's fields, including their defaults.

    Args:
        cls: The dataclass. Its fields without a default are required.
        names: Fields to include; all if None.
    """
    rules = build_json_schemas_of_fields(cls)
    known: dict[str, dict[str, Any]] = {}
    for f in fields(cls):
        if f.default is not MISSING:
            known[f.name] = {"default": f.default}
        elif f.default_factory is not MISSING:
            known[f.name] = {"default": f.default_factory()}
    names = list(rules if names is None else names)
    return {
        "required": [name for name in names if name not in known],
        "properties": {name: rules[name] | known.get(name, {}) for name in names},
    }


def is_within_limits(value: Any, spec: Field) -> bool:
    """Return whether a value is within the limits of its option."""
    least, below = spec.metadata.get("least"), spec.metadata.get("below")
    # Limits apply only to numbers, but some options may also be texts.
    if isinstance(value, str):
        return True
    return (least is None or value >= least) and (below is None or value < below)


def iter_limit_texts(spec: Field) -> Iterator[str]:
    """Yield the limits of a numeric option as texts, such as `at least 0`."""
    least, below = spec.metadata.get("least"), spec.metadata.get("below")
    if least is not None:
        yield f"at least {least:g}"
    if below is not None:
        yield f"below {below:g}"


def reset_inherited_attributes(cls: type, attribute_names: tuple[str, ...]) -> None:
    """Undo the inheritance of class attributes from another complete strategy or policy.

    A class with a `summary` is a complete strategy or policy. It keeps the attributes that it declares
    itself, and those of bases without a `summary`. So each complete class must declare its own properties.
    """
    if not has_own_summary(cls) or not any(map(has_own_summary, cls.__mro__[1:])):
        return
    for name in attribute_names:
        if name not in vars(cls):
            declared = (
                vars(c)[name] for c in cls.__mro__ if name in vars(c) and not has_own_summary(c)
            )
            setattr(cls, name, next(declared))


def has_own_summary(cls: type) -> bool:
    """Return whether a class declares its own `summary`, as each registered strategy or policy does."""
    return "summary" in vars(cls)
