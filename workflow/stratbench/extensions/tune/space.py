"""The search space of `tune`, from the declarations of strategies and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from stratbench.cell.settings import OF_A_VARIANT
from stratbench.strategies import REGISTRY, option_defaults, strategy_class, traits_of
from stratbench.strategies.needs import faults

#: Values of the settings that a variant may have otherwise; `gradient_accumulation_steps` follows from the
#: batch.
VALUES = {"activation_checkpointing": (False, "selective", True)}
#: The most parts of a batch.
MAX_PARTS = 8


@dataclass(frozen=True)
class Combination:
    """A strategy with options and settings that differ from the experiment's.

    `name` is that of its variant, or of the strategy itself if nothing differs.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A name for paths and tables, such as `fsdp_never_accumulate2`."""
        parts = [self.strategy]
        parts += [
            _word(key, value) for key, value in [*self.options.items(), *self.settings.items()]
        ]
        return "_".join(parts)

    @property
    def variant(self) -> dict[str, Any] | None:
        """Its entry of `variants`, or None for a plain strategy."""
        if not self.options and not self.settings:
            return None
        settings = {"settings": dict(self.settings)} if self.settings else {}
        return {"strategy": self.strategy, **self.options, **settings}


#: Shorter words for keys, in names.
_SHORT = {
    "activation_checkpointing": "checkpointing",
    "gradient_accumulation_steps": "accumulate",
    "reshard_after_forward": "reshard",
}


def _word(key: str, value: Any) -> str:
    short = _SHORT.get(key, key).replace("_", "-")
    return short if value is True else f"{short}-{value}"


def combinations_of(
    experiment: Mapping[str, Any], gpus: int, tune: Mapping[str, Any]
) -> list[Combination]:
    """Return all combinations for an experiment on `gpus` workers, strategy by strategy.

    Args:
        experiment: The values of an experiment of config.yaml.
        gpus: Number of workers.
        tune: The block `tune` of config.yaml, with its defaults.
    """
    settings = list(_settings_of(experiment, gpus, tune))
    return [
        Combination(name, options, own)
        for name in strategies_of(gpus, tune)
        for options in _options_of(name, gpus)
        for own in settings
    ]


def strategies_of(gpus: int, tune: Mapping[str, Any]) -> list[str]:
    """Return the strategies whose updates are DDP's on `gpus` workers, and that are installed here.

    `include` names those alone that are looked at, `exclude` those that are not.
    """
    wanted = tune["include"] or [name for name in REGISTRY if _equals_ddp(name, gpus)]
    return [
        name
        for name in wanted
        if name not in tune["exclude"] and not list(faults([(name, strategy_class(name), {})]))
    ]


def _equals_ddp(name: str, gpus: int) -> bool:
    strategy = strategy_class(name)
    if strategy.kind == "own" or (strategy.max_workers or gpus) < gpus:
        return False
    try:
        return traits_of(name, option_defaults(name), gpus).equals_ddp
    except ValueError:  # so many workers cannot be divided
        return False


def _options_of(name: str, gpus: int) -> Iterator[dict[str, Any]]:
    """Yield the default, and each value that an option lists as worth trying, one at a time."""
    yield {}
    for option in fields(strategy_class(name).Options):
        for value in option.metadata.get("tried", ()):
            if type(value) is int and option.name.endswith("_workers") and value >= gpus:
                continue  # as `all`, which is the default
            yield {option.name: value}


def _settings_of(
    experiment: Mapping[str, Any], gpus: int, tune: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield settings that are not the experiment's own: parts of the batch, checkpointing, compile."""
    batch = experiment.get("per_worker_batch") or experiment["global_batch"] // gpus
    values: dict[str, tuple[Any, ...]] = dict(VALUES)
    values["gradient_accumulation_steps"] = tuple(n for n in (1, 2, 4, MAX_PARTS) if batch % n == 0)
    if tune["compile"]:
        values["compile"] = (False, True)
    keys = [key for key in OF_A_VARIANT if key in values]
    for chosen in product(*(values[key] for key in keys)):
        own = dict(zip(keys, chosen, strict=True))
        yield {key: value for key, value in own.items() if value != experiment[key]}
