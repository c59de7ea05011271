"""Which cells are trained: every registered strategy in every precision, on every count, with every option.

A strategy has one cell for each precision. What else is to be met once (counts, options, settings) is dealt
over these cells, as far as the validation of a study's config takes it: what it refuses, no study has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import product
from typing import Any, Literal, get_args, get_origin, get_type_hints

from stratbench.cell.coordinates import Cell
from stratbench.cell.settings import Settings
from stratbench.strategies import REGISTRY, get_strategy_class
from stratbench.strategies.needs import iter_missing_requirements
from stratbench.study.config.config import load_config
from stratbench.study.config.messages import ConfigError
from stratbench.study.config.schema import build_config_schema
from stratbench.workload.network.models import MODELS

#: The strategies that this Python can run.
INSTALLED = [
    name
    for name in REGISTRY
    if (cls := get_strategy_class(name)).kind != "own"
    and not any(iter_missing_requirements([(name, cls, {})]))
]
COUNTS = (1, 2, 4, 8)
DATASETS = {
    "images": {
        "source": "synthetic", "train_samples": 256, "test_samples": 64, "classes": 3,
        "channels": 3, "size": 16,
    },
    "text": {
        "source": "markov-text", "train_samples": 256, "test_samples": 64, "vocabulary": 16,
        "sequence": 32,
    },
}  # fmt: skip
#: Settings of a cell on these images.
IMAGES = {"dataset": "images", "data_spec": DATASETS["images"] | {"seed": 0}}
#: Settings of a study of which each strategy meets each once, where it can.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"gradient_accumulation_steps": 2},
    {"activation_checkpointing": True},
    {"max_grad_norm": 1.0},
    {"data_placement": "host"},
    {"optimizer": "adamw", "momentum": None},
    {"nesterov": True},
    {"schedule": "cosine", "lr_warmup_steps": 2},
    {"slowdown": {"workers": [0], "factor": 1.5}},
    {"augment": True, "dataset": "digits"},
    {"profile": True},
)
#: Of a cell: what is done every so many steps must come about in it.
STEPS = 8


@cache
def precisions() -> tuple[str, ...]:
    """All that a config takes."""
    return tuple(build_config_schema()["$defs"]["experiment"]["properties"]["precision"]["enum"])


@cache
def networks() -> tuple[str, ...]:
    """The compact networks, which are made for quick cells."""
    return tuple(name for name in MODELS if name.endswith("-compact"))


@dataclass(frozen=True)
class Planned:
    """A cell to train. `keys`: of its experiment, beyond what all have."""

    strategy: str
    precision: str
    gpus: int
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.strategy}-{self.precision}-{self.gpus}"

    def config(self) -> dict[str, Any]:
        """The config of a study of this cell alone."""
        experiment = {
            "dataset": "text" if MODELS[self.model].reads_text else "images",
            "strategies": ["variant"],
            "models": [self.model],
            "gpus": [self.gpus],
            "epochs": 1,
            "global_batch": 32,
            "lr": 0.05,
            "momentum": 0.9,
            "weight_decay": 1e-4,
            "precision": self.precision,
            "warmup_steps": 2,
            "device": "cuda",
            "threads": 1,
        }
        cls = get_strategy_class(self.strategy)
        if cls.policy and cls.Options().refusal("sgd"):
            experiment |= {"optimizer": "adamw", "lr": 0.01, "momentum": None}
        experiment |= self.keys
        study = {
            "variants": {"variant": {"strategy": self.strategy} | self.options},
            "experiments": {
                "cell": {key: v for key, v in experiment.items() if v is not None},
            },
        }
        datasets = deepcopy(DATASETS)  # what is left out is filled in
        return {"study": "planned", "datasets": datasets, "studies": {"planned": study}}

    def cell_and_settings(self) -> tuple[Cell, Settings]:
        """Its coordinates and resolved settings, as a study has them."""
        _, study = load_config(self.config())
        (cell,) = study.cells
        return cell, study.settings(cell)

    def refusal(self) -> str | None:
        """Why no study can have it; None if one can."""
        try:
            self.cell_and_settings()
        except ConfigError as e:
            return str(e)
        return None


@dataclass(frozen=True)
class Wish:
    """Something that a strategy shall meet once: an option's value, or settings."""

    option: str | None
    value: Any

    def __str__(self) -> str:
        return f"{self.option} = {self.value!r}" if self.option else json.dumps(self.value)

    def granted(self, cell: Planned) -> Planned | None:
        """The cell with it; None if no study can have that, or the cell has another value already."""
        if self.option is not None:
            if self.option in cell.options:
                return None
            wanted = replace(cell, options=cell.options | {self.option: self.value})
        else:
            if self.value.keys() & cell.keys.keys():
                return None
            wanted = replace(cell, keys=cell.keys | self.value)
        return None if wanted.refusal() else wanted


def values_of(hint: Any, default: Any) -> Iterator[Any]:
    """Values of an option to meet, the most important first: all of a choice, or the default and another."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif get_args(hint):
        for part in get_args(hint):
            yield from (value for value in values_of(part, default) if value is not None)
    elif hint is bool:
        yield from (True, False)
    elif hint is int:
        if isinstance(default, int):
            yield default
        yield 2 if default != 2 else 3
    elif hint is float:
        yield default
        yield 0.5
    else:
        raise TypeError(f"{hint} is a kind of option that this design does not know")


@cache
def wishes_of(strategy: str) -> tuple[Wish, ...]:
    """What the strategy shall meet: each value of each of its options, and all of SETTINGS."""
    options = get_strategy_class(strategy).Options
    hints = get_type_hints(options)
    found = [
        Wish(spec.name, value)
        for spec in fields(options)
        for value in values_of(hints[spec.name], spec.default)
        if value != spec.default
    ]
    return (*found, *(Wish(None, keys) for keys in SETTINGS))


def base_options(strategy: str) -> dict[str, Any]:
    """Options of all its cells: what is done every so many steps is done every second one."""
    options = get_strategy_class(strategy).Options
    return {
        spec.name: 2
        for spec in fields(options)
        if type(spec.default) is int and spec.default >= STEPS
    }


def cells_of(strategy: str, number: int) -> tuple[list[Planned], list[Wish]]:
    """The cells of a strategy, the `number`-th one, and those of its wishes that none of them can have."""
    plain = base_options(strategy)

    def alone(precision: str, gpus: int) -> Planned | None:
        for network, options in product(networks(), (plain, {})):
            cell = Planned(strategy, precision, gpus, network, options)
            if cell.refusal() is None:
                return cell
        return None

    taken = [p for p in precisions() if any(alone(p, n) for n in COUNTS)]
    counts = [n for n in COUNTS if all(alone(p, n) for p in taken)]
    cells = []
    for k, precision in enumerate(taken):
        gpus = counts[(number + k) % len(counts)]
        cell = alone(precision, gpus)
        network = networks()[(number + k) % len(networks())]
        other = replace(cell, model=network)
        cells.append(cell if other.refusal() else other)
    left = [wish for wish in wishes_of(strategy) if wish.value != plain.get(wish.option)]
    for wishes in (tuple(left), tuple(left)):  # again: one may build on another
        for k, wish in enumerate(
            wishes
        ):  # to the first that takes it, beginning elsewhere each time
            for at in ((k + number + i) % len(cells) for i in range(len(cells))):
                if wish in left and (granted := wish.granted(cells[at])):
                    cells[at] = granted
                    left.remove(wish)
    return cells, left


@cache
def design() -> tuple[Planned, ...]:
    """All cells."""
    return tuple(cell for n, name in enumerate(INSTALLED) for cell in cells_of(name, n)[0])
