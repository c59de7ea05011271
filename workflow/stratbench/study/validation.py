"""Finds the mistakes in config.yaml, and tells the first in one line: place, value, what is allowed.

Structure, types and ranges come from the JSON Schema; what one key means for another is checked here.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

from stratbench.strategies import REGISTRY, strategy_class
from stratbench.workload import models
from stratbench.workload.datasets import DATASETS, Dataset, describe

SCHEMA_PATH = Path(__file__).parents[2] / "schemas" / "config.schema.json"
TYPE_NAMES = {
    "object": "a mapping",
    "array": "a list",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}
_LONGEST_SHOWN = 80  # characters of a wrong value in a message


class ConfigError(ValueError):
    """A mistake in config.yaml, told in one message a person can act on."""


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of config.yaml."""
    return json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))


def validate(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config with defaults filled in; ConfigError on the first mistake."""
    raw = _typed(raw, schema())
    _check_plain(raw, ())
    faults = sorted(_validator().iter_errors(raw), key=lambda e: (len(e.path), str(e.path)))
    if faults:
        raise ConfigError(_explain(faults[0]))
    config = _with_defaults(json.loads(json.dumps(raw)))
    config["results"] = _folder("results", config["results"])
    if config["study"] not in config["studies"]:
        raise ConfigError(wrong("study", config["study"], "is not a study", config["studies"]))
    if config["cluster"]["skip_infeasible"] and config["cluster"]["gpu"] is None:
        raise ConfigError(
            "config: cluster.skip_infeasible = true: needs cluster.gpu, the GPU that cells shall fit"
        )
    for name in config["datasets"]:
        if name in DATASETS:
            raise ConfigError(f"config: datasets.{name}: {name!r} is built in; choose another name")
    for study, values in config["studies"].items():
        if study == "data":
            raise ConfigError(
                "config: studies.data: 'data' is where data sets lie; rename the study"
            )
        _check_variants(study, values)
        for experiment, block in values["experiments"].items():
            _check_experiment(f"studies.{study}.experiments.{experiment}", block, values, config)
    return config


def _typed(value: Any, rule: Mapping[str, Any]) -> Any:
    """`value` with text read as the number, truth value or null that its rule of the schema asks for.

    Snakemake hands over as text what is nested in --config, and YAML reads 1e-3 as text. What is
    no such text stays as it is, and is refused later.
    """
    rule = resolved(rule)
    if isinstance(value, Mapping):
        inner = rule.get("properties", {})
        others = rule.get("additionalProperties") or {}
        return {key: _typed(v, inner.get(key, others)) for key, v in value.items()}
    if isinstance(value, list):
        return [_typed(v, rule.get("items", {})) for v in value]
    if isinstance(value, str) and "type" in rule:
        types = [rule["type"]] if isinstance(rule["type"], str) else rule["type"]
        return _read_as(value, types)
    return value


def _read_as(text: str, types: Iterable[str]) -> Any:
    """`text` as a value of one of the JSON types; itself where it is none, or text is wanted."""
    if "null" in types and text in ("null", "~"):
        return None
    if "string" in types:
        return text
    if "boolean" in types and text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    if {"integer", "number"} & set(types) and re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        return int(text)
    if "number" in types and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, _FLAGS):
        return float(text)
    return text


_FLAGS = re.ASCII | re.IGNORECASE
#: What YAML 1.1 takes for truth values.
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def resolved(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    """A rule of the schema, or the one that it refers to."""
    return schema()["$defs"][rule["$ref"].rpartition("/")[2]] if "$ref" in rule else rule


def _folder(key: str, path: str) -> str:
    """A folder as all rules write it: without `~`, `./`, `//` and a slash at its end.

    ConfigError for one that Snakemake or a command line would take for something else.
    """
    found = os.path.normpath(os.path.expanduser(path))
    found = "/" + found.lstrip("/") if found.startswith("/") else found
    what = None
    if found in (".", "/"):
        what = "must be a folder of its own, since studies become folders in it; write results"
    elif found.startswith(("-", "~")):
        what = f"begins with {found[0]!r}, which commands read as an option or a home; rename it"
    elif bad := next((c for c in found if c in "{}" or not c.isprintable()), None):
        what = f"holds {bad!r}, which Snakemake or a shell cannot take in a path; rename it"
    if what:
        raise ConfigError(f"config: {key} = {_shown(path)}: {what}")
    return found


def check_duplicate_keys(path: str | Path) -> None:
    """ConfigError when a YAML file gives a key twice (YAML readers silently keep the last)."""
    import yaml

    def walk(node: yaml.Node, where: str) -> None:
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                place = f"{where}.{key.value}".lstrip(".")
                line = key.start_mark.line + 1
                if str(key.value) in seen and key.value != "<<":
                    raise ConfigError(
                        f"{path}: {place} is given twice, in lines {seen[str(key.value)]} and "
                        f"{line}; keep one"
                    )
                seen[str(key.value)] = line
                walk(value, place)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                walk(item, where)

    root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    if root is not None:
        walk(root, "")


def wrong(where: str, value: Any, what: str, allowed: Iterable[str]) -> str:
    """The message for a value that is not one of `allowed`."""
    allowed = list(allowed)
    listed = f"Allowed: {', '.join(allowed) or 'none'}."
    return f"config: {where} = {_shown(value)}: {what}.{_did_you_mean(value, allowed)} {listed}"


# ---------------------------------------------------------------- structure, types, ranges


@cache
def _validator():
    import jsonschema

    # The standard takes 2.0 for an integer and infinity for a number.
    base = jsonschema.Draft202012Validator
    checker = base.TYPE_CHECKER.redefine("integer", lambda _, v: type(v) is int)
    return jsonschema.validators.extend(base, type_checker=checker)(schema())


def _check_plain(value: Any, path: tuple[str | int, ...]) -> None:
    """Refuse what YAML can say and the schema does not see: keys that are no text, NaN, dates."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                at = f"config: {_place(path)}" if path else "config"
                raise ConfigError(
                    f"{at}: the key {_shown(key)} is not text; write it in quotes: '{key}'"
                )
            _check_characters(key, path)
            _check_plain(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _check_plain(inner, (*path, i))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"config: {_place(path)} = {value}: must be a finite number")
    elif isinstance(value, str):
        _check_characters(value, path)
    elif not isinstance(value, int | float | None):
        kind = type(value).__name__
        raise ConfigError(f"config: {_place(path)} = {value}: is a {kind}; write it in quotes")


def _check_characters(text: str, path: tuple[str | int, ...]) -> None:
    """Refuse what no command line and no page can hold: control characters, half characters."""
    for character in text:
        kind = unicodedata.category(character)
        if kind == "Cs" or (kind == "Cc" and character not in "\n\t\r"):
            at = f"config: {_place(path)}" if path else "config"
            raise ConfigError(
                f"{at} = {_shown(text)}: holds {character!r}, which is no printable character; "
                "take it out"
            )


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    def fill(block: dict[str, Any], properties: Mapping[str, Any]) -> None:
        for key, rule in properties.items():
            if "default" in rule:
                block.setdefault(key, rule["default"])

    top = schema()["properties"]
    fill(config, top)
    for key in ("data", "cluster", "datasets", "decide"):
        config.setdefault(key, {})
    fill(config["data"], top["data"]["properties"])
    fill(config["cluster"], top["cluster"]["properties"])
    fill(config["decide"], top["decide"]["properties"])
    for spec in config["datasets"].values():
        fill(spec, top["datasets"]["additionalProperties"]["properties"])
    for study in config["studies"].values():
        fill(study, schema()["$defs"]["study"]["properties"])
        study.setdefault("variants", {})
        for experiment in study["experiments"].values():
            fill(experiment, schema()["$defs"]["experiment"]["properties"])
    return config


def _explain(fault: Any) -> str:
    """One sentence for a fault of the JSON Schema."""
    where = _place(fault.absolute_path)
    at = f"config: {where}" if where else "config"
    value, rule = fault.instance, fault.validator_value
    given = f"{at} = {_shown(value)}"
    about = fault.schema.get("description", "")
    match fault.validator:
        case "additionalProperties":
            allowed = list(fault.schema["properties"])
            unknown = next(k for k in value if k not in allowed)
            place = f"{where}.{unknown}".lstrip(".")
            return (
                f"config: {place} = {_shown(value[unknown])}: unknown key {unknown!r}."
                f"{_did_you_mean(unknown, allowed)} Allowed: {', '.join(allowed)}."
            )
        case "required":
            missing = next(k for k in rule if k not in value)
            about = fault.schema.get("properties", {}).get(missing, {}).get("description", "")
            message = f"{at}: the key {missing!r} is missing. {about}"
        case "type":
            wanted = " or ".join(TYPE_NAMES[t] for t in ([rule] if isinstance(rule, str) else rule))
            message = f"{given}: must be {wanted}. {about}"
        case "enum":
            return wrong(where, value, "is not allowed", [str(r) for r in rule])
        case "const":
            return wrong(where, value, "is not allowed", [str(rule)])
        case "uniqueItems":
            twice = next(v for i, v in enumerate(value) if v in value[:i])
            message = f"{given}: {twice!r} is given twice; keep one."
        case "minimum":
            message = f"{given}: must be at least {rule}. {about}"
        case "maximum":
            message = f"{given}: must be at most {rule}. {about}"
        case "exclusiveMinimum":
            message = f"{given}: must be greater than {rule}. {about}"
        case "exclusiveMaximum":
            message = f"{given}: must be less than {rule}. {about}"
        case "maxLength":
            message = f"{given}: has {len(value):,} characters; must have at most {rule:,}. {about}"
        case "minItems" | "minProperties" | "minLength":
            message = f"{at}: must not be empty. {about}"
        case "pattern":
            message = (
                f"{at}: the name {value!r} stands in paths and may hold only letters, digits, "
                "'.', '_' and '-', and starts with a letter or digit."
            )
        case _:
            message = f"{given}: {fault.message}"
    return message.rstrip()


def _place(path: Iterable[str | int]) -> str:
    """`studies.demo.experiments.digits.gpus[1]`"""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _did_you_mean(given: Any, allowed: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(given), list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


# ---------------------------------------------------------------- what the schema cannot say


_JSON_TYPES = {int: ["integer"], float: ["number"], bool: ["boolean"]}


def _check_variants(study: str, values: Mapping[str, Any]) -> None:
    for name, variant in values["variants"].items():
        where = f"studies.{study}.variants.{name}"
        if name in REGISTRY:
            raise ConfigError(f"config: {where}: {name!r} is a strategy; choose another name")
        base = variant["strategy"]
        if base not in REGISTRY:
            raise ConfigError(wrong(f"{where}.strategy", base, "is not a strategy", REGISTRY))
        options = strategy_class(base).Options
        allowed = [field.name for field in fields(options)]
        kinds = get_type_hints(options)
        for key in variant.keys() & set(allowed):
            if isinstance(variant[key], str):
                variant[key] = _read_as(variant[key], _JSON_TYPES.get(kinds[key], ["string"]))
        given = {k: v for k, v in variant.items() if k != "strategy"}
        for key in given:
            if key not in allowed:
                raise ConfigError(
                    f"config: {where}.{key} = {_shown(given[key])}: {key!r} is not an option of "
                    f"{base}.{_did_you_mean(key, allowed)} Allowed: {', '.join(allowed) or 'none'}."
                )
        try:
            options(**given)
        except ValueError as e:
            raise ConfigError(f"config: {where}.{e}") from e


def _check_experiment(
    where: str, block: Mapping[str, Any], study: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    dataset_names = [*DATASETS, *config["datasets"]]
    for key, what, known in (
        ("dataset", "data set", dataset_names),
        ("strategies", "strategy or variant", [*REGISTRY, *study["variants"]]),
        ("models", "model", list(models.MODELS)),
    ):
        for value in block[key] if isinstance(block[key], list) else [block[key]]:
            if value not in known:
                raise ConfigError(wrong(f"{where}.{key}", value, f"is not a {what}", known))
    dataset = describe(block["dataset"], config["datasets"].get(block["dataset"]))
    faults = chain(  # lazy: each may rely on those before it having found nothing
        _batch_faults(block, dataset),
        _strategy_faults(block, study),
        _model_faults(block, dataset),
        _slowdown_faults(block),
    )
    for fault in faults:
        raise ConfigError(f"config: {where}{fault}")


def _batch_faults(block: Mapping[str, Any], dataset: Dataset) -> Iterator[str]:
    batch, weak = block.get("global_batch"), block.get("per_worker_batch")
    if (batch is None) == (weak is None):
        yield (
            ": give either global_batch (split over the workers) or per_worker_batch, and not both; "
            f"given: global_batch = {batch}, per_worker_batch = {weak}"
        )
        return
    key, value = ("global_batch", batch) if batch else ("per_worker_batch", weak)
    for n in block["gpus"]:
        if batch and batch % n:
            yield (
                f".global_batch = {batch}: cannot be split evenly over {n} workers "
                f"(gpus = {block['gpus']}); use a multiple of every worker count"
            )
        together = batch or weak * n
        if together > dataset.train_samples:
            yield (
                f".{key} = {value}: a step of {n} workers would take {together} samples, but "
                f"{block['dataset']} has {dataset.train_samples} to train on; use a smaller batch"
            )
        normalising = [m for m in block["models"] if models.MODELS[m].batchnorm]
        if together == n and normalising:
            yield (
                f".{key} = {value}: a batch of one sample on each of {n} workers, but "
                f"{normalising[0]} normalises over the batch; use a larger batch or fewer workers"
            )


def _strategy_faults(block: Mapping[str, Any], study: Mapping[str, Any]) -> Iterator[str]:
    for name in block["strategies"]:
        given = {"strategy": name} if name in REGISTRY else dict(study["variants"][name])
        base = given.pop("strategy")
        strategy = strategy_class(base)
        most = strategy.max_workers
        if most is not None and min(block["gpus"]) > most:
            yield (
                f".gpus = {block['gpus']}: {name} uses at most {most}, so it would train nothing; "
                f"add {most}, or remove {name} from strategies"
            )
        options = asdict(strategy.Options(**given))
        for n in block["gpus"]:
            if most is None or n <= most:
                batch = block.get("per_worker_batch") or block["global_batch"] // n
                try:
                    strategy.check(base, options, n, batch)
                except ValueError as e:
                    yield f".strategies = {name!r}: {e}"


def _model_faults(block: Mapping[str, Any], dataset: Dataset) -> Iterator[str]:
    for name in block["models"]:
        try:
            models.input_shape(name, dataset.shape)
        except ValueError as e:
            yield f".dataset = {block['dataset']!r}: {e}"
    if block["nesterov"] and not block["momentum"]:
        yield ".nesterov = true: needs momentum > 0"
    if block["augment"] and not (dataset.crop_padding or dataset.flip):
        yield f".augment = true: the data set {block['dataset']!r} has no augmentation; remove the key"


def _slowdown_faults(block: Mapping[str, Any]) -> Iterator[str]:
    slowdown = block["slowdown"]
    if slowdown is None:
        return
    if ("workers" in slowdown) != ("factor" in slowdown):
        yield f".slowdown = {slowdown}: workers and factor belong together"
    elif not slowdown or slowdown.get("workers") == []:
        yield f".slowdown = {slowdown}: slows nobody; give workers and factor, or sigma"
    for rank in slowdown.get("workers", []):
        if rank >= max(block["gpus"]):
            yield (
                f".slowdown.workers = {slowdown['workers']}: no cell has a rank {rank} "
                f"(gpus = {block['gpus']}); ranks count from 0"
            )
