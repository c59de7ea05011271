"""Lists the search space of `tune`, from the declarations of strategies and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from stratbench.cell.settings import OF_A_VARIANT
from stratbench.strategies import REGISTRY, get_option_defaults, get_strategy_class, get_traits
from stratbench.strategies.needs import iter_missing_requirements

#: Values to try of settings that a variant may change. Those of `gradient_accumulation_steps` follow from
#: the batch.
VALUES = {"activation_checkpointing": (False, "selective", True)}
#: Maximum number of micro-batches into which `tune` divides a batch.
MAX_PARTS = 8


@dataclass(frozen=True)
class Combination:
    """A strategy with the options and settings in which it differs from the experiment."""

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name for paths and tables, such as `fsdp_never_accumulate2`.

        Without differences it is the strategy's name.
        """
        parts = [self.strategy]
        parts += [
            _format_name_part(key, value)
            for key, value in [*self.options.items(), *self.settings.items()]
        ]
        return "_".join(parts)

    @property
    def variant(self) -> dict[str, Any] | None:
        """Entry of the combination in `variants` of config.yaml, or None for a plain strategy."""
        if not self.options and not self.settings:
            return None
        settings = {"settings": dict(self.settings)} if self.settings else {}
        return {"strategy": self.strategy, **self.options, **settings}


#: Shorter words for settings and options in names of combinations.
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
    """Return all combinations to try for an experiment, strategy by strategy.

    Args:
        experiment: The values of an experiment of config.yaml.
        gpus: Number of workers.
        tune: The block `tune` of config.yaml, with its defaults.
    """
    settings = list(_iter_settings(experiment, gpus, tune))
    return [
        Combination(name, options, own)
        for name in list_strategies(gpus, tune)
        for options in _iter_options(name, gpus)
        for own in settings
    ]


def list_strategies(gpus: int, tune: Mapping[str, Any]) -> list[str]:
    """Return the names of the strategies to try on `gpus` workers.

    The strategies are those that `include` names, or all whose updates equal DDP's. Those that `exclude`
    names, or whose packages are missing, are left out.
    """
    wanted = tune["include"] or [name for name in REGISTRY if _has_ddp_updates(name, gpus)]
    return [
        name
        for name in wanted
        if name not in tune["exclude"]
        and not list(iter_missing_requirements([(name, get_strategy_class(name), {})]))
    ]


def _has_ddp_updates(name: str, gpus: int) -> bool:
    strategy = get_strategy_class(name)
    if strategy.kind == "own" or (strategy.max_workers or gpus) < gpus:
        return False
    try:
        return get_traits(name, get_option_defaults(name), gpus).equals_ddp
    except ValueError:  # the strategy cannot divide this number of workers
        return False


def _iter_options(name: str, gpus: int) -> Iterator[dict[str, Any]]:
    """Yield option sets to try: the defaults, then each alternative value of one option."""
    yield {}
    for option in fields(get_strategy_class(name).Options):
        for value in option.metadata.get("tried", ()):
            if type(value) is int and option.name.endswith("_workers") and value >= gpus:
                continue  # this value is the same as the default, `all`
            yield {option.name: value}


def _iter_settings(
    experiment: Mapping[str, Any], gpus: int, tune: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield alternative settings to try: micro-batches, checkpointing and compilation."""
    batch = experiment.get("per_worker_batch") or experiment["global_batch"] // gpus
    values: dict[str, tuple[Any, ...]] = dict(VALUES)
    values["gradient_accumulation_steps"] = tuple(n for n in (1, 2, 4, MAX_PARTS) if batch % n == 0)
    if tune["compile"]:
        values["compile"] = (False, True)
    keys = [key for key in OF_A_VARIANT if key in values]
    for chosen in product(*(values[key] for key in keys)):
        own = dict(zip(keys, chosen, strict=True))
        yield {key: value for key, value in own.items() if value != experiment[key]}
