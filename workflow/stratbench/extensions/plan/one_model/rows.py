"""Makes the variants of strategies that split one model over several GPUs.

The options of a strategy declare the size of such groups, and the values to try (`tried`). Nothing here
names a strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import product
from typing import Any

from stratbench.strategies import (
    REGISTRY,
    get_mesh,
    get_option_defaults,
    get_strategy_class,
    get_traits,
)

#: Number of micro-batches per pipeline stage in a step. It keeps the bubble below a fifth of the step.
MICROBATCHES_A_STAGE = 4
#: Name of the option that sets a pipeline's number of micro-batches.
MICROBATCHES = "microbatches"


def list_model_split_variants(gpus_per_node: int) -> dict[str, dict[str, Any]]:
    """Return the variants of strategies that split a model over several GPUs, by name.

    Tensor parallelism has a variant for each group size that divides a node evenly. Each has another one for
    each option that its strategy declares to try as true. Pipelines take longest to plan, since each stage is
    traced with several micro-batches; their group size is the whole node.

    Args:
        gpus_per_node: GPUs of a node.
    """
    sizes = [n for n in range(2, gpus_per_node + 1) if gpus_per_node % n == 0]
    variants = {}
    for strategy in REGISTRY:
        if (option := find_group_size_option(strategy, gpus_per_node)) is None:
            continue
        switches = [key for key, tried in iter_option_values_to_try(strategy) if tried is True]
        is_pipeline = MICROBATCHES in get_option_defaults(strategy)
        for size, switch in product(sizes[-1:] if is_pipeline else sizes, (None, *switches)):
            variant: dict[str, Any] = {"strategy": strategy, option: size}
            if is_pipeline:
                variant[MICROBATCHES] = MICROBATCHES_A_STAGE * size
            name = f"{strategy}-{size}"
            if switch is not None:
                variant[switch] = True
                name += f"-{switch.partition('_')[0]}"
            variants[name] = variant
    return variants


def find_group_size_option(strategy: str, gpus_per_node: int) -> str | None:
    """Return the option that sets how many GPUs share one copy of the model.

    The result is None if there is no such option.

    Args:
        strategy: Name of the strategy.
        gpus_per_node: GPUs of a node.
    """
    if gpus_per_node == 1:
        return None
    defaults = get_option_defaults(strategy)
    for key in defaults:
        # Sizes of groups that only shard states do not count, since each of their GPUs computes the whole
        # model.
        if key.endswith("_size"):
            one, all_ = (
                get_mesh(strategy, defaults | {key: n}, gpus_per_node).workers_per_replica
                for n in (1, gpus_per_node)
            )
            if (one, all_) == (1, gpus_per_node):
                return key
    return None


def iter_option_values_to_try(strategy: str) -> Iterator[tuple[str, Any]]:
    """Yield pairs of an option and a value that the strategy declares worth trying."""
    for option in fields(get_strategy_class(strategy).Options):
        for value in option.metadata.get("tried", ()):
            yield option.name, value


def describe_unplanned_variants(
    gpus: int, gpus_per_node: int, planned_rows: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return a text on the variants that are not planned: how many, and which.

    The variants are of strategies with DDP's updates.

    Args:
        gpus: Number of GPUs.
        gpus_per_node: GPUs of a node.
        planned_rows: Options of each planned row other than the defaults, and its strategy.
    """
    rest = "selective checkpointing, accumulated gradients"
    if gpus == 1:
        return rest
    planned = {row["strategy"] for row in planned_rows.values()}
    similar = [name for name in REGISTRY if has_same_updates_as_ddp(name, gpus)]
    others = [name for name in similar if name not in planned]
    values = [
        (name, key, value)
        for name in similar
        if name in planned
        for key, value in iter_option_values_to_try(name)
        if key != find_group_size_option(name, gpus_per_node) or gpus_per_node % value == 0
    ]
    missing = [
        f"{name} {key}={value}"
        for name, key, value in values
        if not any(
            row["strategy"] == name and row.get(key) == value for row in planned_rows.values()
        )
    ]
    return (
        f"{len(others)} of {len(similar)} strategies with DDP's updates{_format_names_in_brackets(others)}; "
        f"{len(missing)} of {len(values)} values to try that options of the others declare"
        f"{_format_names_in_brackets(missing)}; groups over several nodes, tensor and pipeline parallelism "
        f"at once, {rest}"
    )


def has_same_updates_as_ddp(strategy: str, gpus: int) -> bool:
    """Return whether a strategy runs on `gpus` workers and makes the same updates as DDP."""
    cls = get_strategy_class(strategy)
    if cls.kind == "own" or (cls.max_workers or gpus) < gpus:
        return False
    try:
        return get_traits(strategy, get_option_defaults(strategy), gpus).equals_ddp
    except ValueError:  # the strategy cannot divide this number of workers
        return False


def _format_names_in_brackets(names: list[str]) -> str:
    return f" ({', '.join(names)})" if names else ""
