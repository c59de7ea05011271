"""config.yaml, validated: studies become cells, and cells get their resolved settings.

    python -m stratbench.config --table    every key of config.yaml, as Markdown

Imported on every parse of the Snakefile, so nothing heavy is imported here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from stratbench.cells import Cell, expand
from stratbench.strategies import REGISTRY, strategy_class
from stratbench.validation import (
    TYPE_NAMES,
    ConfigError,
    check_duplicate_keys,
    resolved,
    schema,
    validate,
)

__all__ = ["ConfigError", "Settings", "Study", "check_duplicate_keys", "load", "validate"]

#: Lines of docs/configuration.md that the generated tables stand between.
TABLE_BEGIN, TABLE_END = "<!-- begin: generated -->", "<!-- end: generated -->"


@dataclass(frozen=True)
class Settings:
    """Everything a cell is trained with, defaults resolved. Changing any of it retrains the cell.

    The cell's time limit is left out on purpose: raising it must not retrain what has finished.
    """

    strategy: str
    options: dict[str, Any]
    model: str
    dataset: str
    gpus: int
    seed: int
    epochs: int
    global_batch: int
    per_worker_batch: int
    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    precision: str
    augment: bool
    warmup_steps: int
    device: str
    threads: int | None
    slowdown: dict[str, Any] | None
    profile: bool = False

    def as_json(self) -> str:
        """Canonical JSON: equal settings give equal text."""
        return json.dumps(asdict(self), sort_keys=True)

    def as_parameter(self, key: str) -> str:
        """One setting as a text, `lr=0.1`: equal settings give equal text."""
        return f"{key}={json.dumps(getattr(self, key), sort_keys=True)}"

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Experiment:
    """One validated experiment: its cells and the settings of each."""

    name: str
    values: Mapping[str, Any]
    matrix: dict[str, Any]  # the arguments of cells.expand
    cells: tuple[Cell, ...]


class Study:
    """One validated study of the config."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.name = name
        self._study = config["studies"][name]
        self.description = self._study.get("description", "")
        self.seed: int = self._study["seed"]
        self.experiments = {}
        for key, values in self._study["experiments"].items():
            matrix = self._matrix(key, values)
            self.experiments[key] = Experiment(key, values, matrix, tuple(expand(**matrix)))

    @property
    def cells(self) -> list[Cell]:
        return [cell for e in self.experiments.values() for cell in e.cells]

    @property
    def datasets(self) -> list[str]:
        return sorted({e.values["dataset"] for e in self.experiments.values()})

    def base_strategy(self, name: str) -> tuple[str, dict[str, Any]]:
        """The strategy behind a name of the study, and the options given (not the defaults)."""
        if name in REGISTRY:
            return name, {}
        variant = dict(self._study["variants"][name])
        return variant.pop("strategy"), variant

    def strategy_kind(self, name: str) -> str:
        """`collective` or `server`."""
        return strategy_class(self.base_strategy(name)[0]).kind

    def settings(self, cell: Cell) -> Settings:
        """The resolved settings of a cell of this study."""
        values = self.experiments[cell.experiment].values
        base, given = self.base_strategy(cell.strategy)
        weak = values.get("per_worker_batch")
        return Settings(
            strategy=base,
            options=option_defaults(base) | given,
            model=cell.model,
            dataset=cell.dataset,
            gpus=cell.gpus,
            seed=cell_seed(self.seed, cell.model, cell.repeat),
            global_batch=weak * cell.gpus if weak else values["global_batch"],
            per_worker_batch=weak or values["global_batch"] // cell.gpus,
            **{
                key: values[key]
                for key in (
                    "epochs", "lr", "momentum", "weight_decay", "nesterov", "precision", "augment",
                    "warmup_steps", "device", "threads", "slowdown", "profile",
                )
            },
        )  # fmt: skip

    def time_limit_s(self, cell: Cell) -> float | None:
        return self.experiments[cell.experiment].values["time_limit_s"]

    def as_trained(self) -> dict[str, Any]:
        """A config of this study alone, without what no cell is trained with: `Study` reads it."""
        apart = ("time_limit_s", "target_accuracy")
        experiments = {
            name: {key: value for key, value in e.values.items() if key not in apart}
            for name, e in self.experiments.items()
        }
        study = {key: value for key, value in self._study.items() if key != "description"}
        return {"study": self.name, "studies": {self.name: study | {"experiments": experiments}}}

    def target_accuracies(self) -> dict[str, float]:
        """Experiments with a target accuracy, and the target; changing one retrains nothing."""
        targets = {e: x.values["target_accuracy"] for e, x in self.experiments.items()}
        return {e: target for e, target in targets.items() if target is not None}

    def _matrix(self, experiment: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "study": self.name,
            "experiment": experiment,
            "dataset": values["dataset"],
            "strategies": [
                (name, strategy_class(self.base_strategy(name)[0]).max_workers)
                for name in values["strategies"]
            ],
            "models": values["models"],
            "gpus": values["gpus"],
            "repeats": values.get("repeats", self._study["repeats"]),
        }


def cell_seed(study_seed: int, model: str, repeat: int) -> int:
    """The seed of a cell: the same for every strategy and worker count of a model and repeat."""
    digest = hashlib.sha256(f"{study_seed}/{model}/{repeat}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@cache
def _option_defaults(strategy: str) -> dict[str, Any]:
    return asdict(strategy_class(strategy).Options())


def option_defaults(strategy: str) -> dict[str, Any]:
    """The options of a strategy with their defaults."""
    return dict(_option_defaults(strategy))


def load(raw: Mapping[str, Any]) -> tuple[dict[str, Any], Study]:
    """Validate a config (as read from YAML) and build its chosen study."""
    config = validate(raw)
    return config, Study(config, config["study"])


def set_job_environment(config: Mapping[str, Any], package_root: str) -> None:
    """Give this process and its jobs what they need that is not part of a result.

    The package and this interpreter are found whichever way Snakemake was started (a conda environment
    that a rule activates comes before it), and data files where the config says: as a rule's parameter
    their folder would make everything again when it moves.
    """
    for variable, first in (
        ("PYTHONPATH", package_root),
        ("PATH", str(Path(sys.executable).parent)),
    ):
        rest = [p for p in os.environ.get(variable, "").split(os.pathsep) if p and p != first]
        os.environ[variable] = os.pathsep.join([first, *rest])
    # SLURM's plugin takes every SLURM_* variable from its jobs; with this one srun finds its cluster.
    if "SLURM_CONF" in os.environ:
        os.environ["STRATBENCH_SLURM_CONF"] = os.environ["SLURM_CONF"]
    data = config["data"]
    if data["root"]:
        os.environ["STRATBENCH_DATA"] = str(Path(data["root"]).expanduser().resolve())
    if not data["download"]:
        os.environ["STRATBENCH_NO_DOWNLOAD"] = "1"


# ---------------------------------------------------------------- the table of all keys


def key_tables() -> str:
    """Every key of config.yaml and every option of a strategy, as Markdown tables."""
    parts = []
    for title, properties, required in _blocks("", schema()):
        rows = [
            (f"`{key}`", _allowed(rule), _default(key, rule, required), rule["description"])
            for key, rule in properties.items()
        ]
        parts.append(f"### {title}\n\n" + _table(("key", "value", "default", "meaning"), rows))
    header = ("strategy", "option", "value", "default")
    parts.append("### Options of strategies\n\n" + _table(header, _option_rows()))
    return "\n".join(parts)


def _option_rows() -> Iterator[tuple[str, ...]]:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    names[type(None)] = "null"
    for strategy in REGISTRY:
        hints = get_type_hints(strategy_class(strategy).Options)
        for key, default in option_defaults(strategy).items():
            parts = get_args(hints[key]) or (hints[key],)  # a literal's or a union's
            value = " or ".join(names.get(part) or f"`{part}`" for part in parts)
            yield f"`{strategy}`", f"`{key}`", value, f"`{json.dumps(default)}`"


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
    if "items" in rule:
        return f"a list ({_allowed(rule['items'])})"
    types = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {rule[key]}" for key, sign in signs.items() if key in rule]
    return ", ".join([" or ".join(TYPE_NAMES[t] for t in types), *bounds])


def _default(key: str, rule: Mapping[str, Any], required: list[str]) -> str:
    if key in required:
        return "required"
    return f"`{json.dumps(rule['default'])}`" if "default" in rule else "none"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Print the tables, or put them between the marks of a page."""
    parser = argparse.ArgumentParser(prog="python -m stratbench.config", description=main.__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--table", action="store_true", help="print every key of config.yaml")
    action.add_argument("--write-table", type=Path, metavar="PAGE", help="put it into PAGE")
    args = parser.parse_args()
    if args.table:
        print(key_tables(), end="")
        return
    page = args.write_table.read_text(encoding="utf-8")
    before, begin, rest = page.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not begin or not end:
        parser.error(f"{args.write_table} has no lines {TABLE_BEGIN} and {TABLE_END}")
    args.write_table.write_text(f"{before}{begin}\n{key_tables()}{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
