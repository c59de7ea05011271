"""Lists the combinations that `tune` tries, from the declarations of strategies and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from stratbench.cell.settings import OF_A_VARIANT
from stratbench.extensions.plan.one_model.rows import has_same_updates_as_ddp
from stratbench.strategies import REGISTRY, get_strategy_class
from stratbench.strategies.needs import iter_missing_requirements

#: Values to try of each setting. The values of `gradient_accumulation_steps` depend on the batch, and those
#: of `compile` on the config.
VALUES_TO_TRY = {"activation_checkpointing": (False, "selective", True)}
#: Largest number of micro-batches into which `tune` divides a worker's batch.
MAX_MICRO_BATCHES = 8


@dataclass(frozen=True)
class Combination:
    """A strategy with options and settings to try."""

    strategy: str
    #: Options of the strategy whose values differ from the defaults.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Settings whose values differ from those of the experiment.
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the combination as a variant, such as `ddp_accumulate-2`.

        Without options and settings, it is the name of the strategy.
        """
        parts = [self.strategy]
        parts += [
            _format_name_part(key, value)
            for key, value in [*self.options.items(), *self.settings.items()]
        ]
        return "_".join(parts)

    @property
    def variant_entry(self) -> dict[str, Any] | None:
        """Entry of the combination in `variants` of config.yaml; None without options and settings."""
        if not self.options and not self.settings:
            return None
        settings = {"settings": dict(self.settings)} if self.settings else {}
        return {"strategy": self.strategy, **self.options, **settings}


#: Words for some settings and options in the names of combinations, shorter than their keys.
_SHORT_KEYS = {
    "activation_checkpointing": "checkpointing",
    "gradient_accumulation_steps": "accumulate",
    "reshard_after_forward": "reshard",
}


def _format_name_part(key: str, value: Any) -> str:
    short = _SHORT_KEYS.get(key, key).replace("_", "-")
    return short if value is True else f"{short}-{value}"


def list_combinations(
    experiment: Mapping[str, Any], gpus: int, tune: Mapping[str, Any]
) -> list[Combination]:
    """Return all combinations to try for an experiment, ordered by strategy.

    Args:
        experiment: The values of an experiment of config.yaml.
        gpus: Number of workers.
        tune: The block `tune` of config.yaml, with its defaults.
    """
    settings = list(_iter_settings_to_try(experiment, gpus, tune))
    return [
        Combination(name, options, own)
        for name in list_strategies_to_try(gpus, tune)
        for options in _iter_options_to_try(name, gpus)
        for own in settings
    ]


def list_strategies_to_try(gpus: int, tune: Mapping[str, Any]) -> list[str]:
    """Return the names of the strategies to try on `gpus` workers.

    They are those that `include` names, or by default all strategies whose updates equal those of DDP. A
    strategy is left out if `exclude` names it, or if a package that it needs is missing.

    Args:
        gpus: Number of workers.
        tune: The block `tune` of config.yaml, with its defaults.
    """
    wanted = tune["include"] or [name for name in REGISTRY if has_same_updates_as_ddp(name, gpus)]
    return [
        name
        for name in wanted
        if name not in tune["exclude"]
        and not list(iter_missing_requirements([(name, get_strategy_class(name), {})]))
    ]


def _iter_options_to_try(strategy_name: str, gpus: int) -> Iterator[dict[str, Any]]:
    """Yield the options to try: the defaults, then each other value of one option."""
    yield {}
    for option in fields(get_strategy_class(strategy_name).Options):
        for value in option.metadata.get("tried", ()):
            if type(value) is int and option.name.endswith("_workers") and value >= gpus:
                continue  # With so few workers, this value has the same effect as the default `all`.
            yield {option.name: value}


def _iter_settings_to_try(
    experiment: Mapping[str, Any], gpus: int, tune: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the settings to try as dicts of those that differ from the experiment's.

    The settings are the number of micro-batches, activation checkpointing and torch.compile.

    Args:
        experiment: The values of an experiment of config.yaml.
        gpus: Number of workers.
        tune: The block `tune` of config.yaml, with its defaults.
    """
    batch = experiment.get("per_worker_batch") or experiment["global_batch"] // gpus
    values: dict[str, tuple[Any, ...]] = dict(VALUES_TO_TRY)
    values["gradient_accumulation_steps"] = tuple(
        n for n in (1, 2, 4, MAX_MICRO_BATCHES) if batch % n == 0
    )
    if tune["compile"]:
        values["compile"] = (False, True)
    keys = [key for key in OF_A_VARIANT if key in values]
    for chosen in product(*(values[key] for key in keys)):
        own = dict(zip(keys, chosen, strict=True))
        yield {key: value for key, value in own.items() if value != experiment[key]}
