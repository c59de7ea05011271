"""Filters combinations: drops those that are unsupported, do not fit in memory or are too slow.

A combination that ran out of memory in a block does not fit, even if the plan predicts that it does. It then
drops no slower combinations. The budget is applied last.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

from stratbench.extensions.plan.check import check_study
from stratbench.extensions.plan.needs import CellToPlan
from stratbench.extensions.plan.schedule import PlannedCell, make_plan
from stratbench.extensions.tune.differences import (
    SELECTIVE_SHARE,
    Amounts,
    DropReason,
    Margins,
    find_configurations_to_drop,
    fit_public_margins,
)
from stratbench.extensions.tune.space import Combination
from stratbench.extensions.verdict.block_rules import (
    SEGMENT_START_S,
    STEP_NOISE,
    choose_segment_steps,
    estimate_block_and_full_cell_costs,
    estimate_segment_seconds,
)
from stratbench.extensions.verdict.blocks import (
    BlockError,
    hash_trained_settings,
    list_block_files,
    read_block,
)
from stratbench.strategies import get_strategy_class, get_traits
from stratbench.strategies.base import Traits
from stratbench.study.config.config import load_config
from stratbench.study.config.messages import ConfigError, remove_strategy_remedy

#: Largest planned memory of a combination to measure, as a multiple of the device's memory. It is above 1,
#: because the plan may predict too much memory.
MEMORY_FACTOR = 1.5
#: Outcomes of the filters. Only combinations with the outcome MEASURED or OUT_OF_MEMORY are in the study that
#: `tune` runs.
UNSUPPORTED, TOO_LARGE, TOO_SLOW, LATER = (
    "unsupported",
    "does not fit",
    "slower",
    "beyond the budget",
)
MEASURED, OUT_OF_MEMORY = "measured", "out of memory"


@dataclass(frozen=True)
class FilterResult:
    """Outcome of the filters for one combination, with the reason and the planned values.

    Attributes:
        outcome: One of the constants UNSUPPORTED to OUT_OF_MEMORY.
        planned_time_s: Planned time of a whole training; None if unknown.
        memory_bytes: Planned memory of a worker; None if unknown.
        amounts_by_difference_kind: Amount of each kind of difference. None on CPUs, which no public sweep
            covers.
        planned_segment_gpu_s: Planned GPU-seconds of one segment of a block.
        planned_training_gpu_s: Planned GPU-seconds of a whole training.
        device_memory_bytes: Memory that a worker has; None if unknown.
    """

    combination: Combination
    outcome: str
    reason: str = ""
    planned_time_s: float | None = None
    planned_memory_bytes: int | None = None
    amounts_by_difference_kind: Amounts | None = None
    planned_segment_gpu_s: float = 0.0
    planned_training_gpu_s: float = 0.0
    device_memory_bytes: float | None = None


def filter_combinations(
    config: Mapping[str, Any],
    experiment: str,
    gpus: int,
    model: str,
    combinations: Sequence[Combination],
    baseline: str,
    out_of_memory: Set[tuple[str, str]] = frozenset(),
) -> list[FilterResult]:
    """Return the outcome of the filters for each combination, in the given order.

    The time filter never drops the baseline.

    Args:
        config: The config as read from YAML.
        experiment: Name of the experiment whose data, batch and settings apply.
        gpus: Number of workers.
        model: Name of the model.
        combinations: The combinations to filter.
        baseline: Strategy that the user trains with today.
        out_of_memory: Combinations that ran out of memory in a block, as name and hash of the settings.
    """
    by_name = {
        c.name: FilterResult(
            c, UNSUPPORTED, _find_unsupported_reason(config, experiment, gpus, model, c)
        )
        for c in combinations
    }
    left = [s.combination for s in by_name.values() if not s.reason]
    if left:
        whole, study = load_config(add_tuning_study(config, experiment, gpus, model, left))
        for planned in make_plan(whole, check_study(whole, study), {}).cells:
            name = planned.cell.strategy
            s = _filter_combination_by_plan(
                by_name[name].combination, planned, whole["cluster"]["memory_margin"]
            )
            if (name, hash_trained_settings(planned.subject.settings)) in out_of_memory:
                s = replace(s, outcome=OUT_OF_MEMORY, reason="ran out of memory in a block")
            by_name[name] = s
        drop_slow_combinations(
            by_name, baseline, whole["tune"]["keep_within"], fit_public_margins()
        )
        postpone_combinations_beyond_budget(by_name, baseline, whole["tune"]["budget_gpu_hours"])
    return list(by_name.values())


def drop_slow_combinations(
    results_by_name: dict[str, FilterResult],
    baseline: str,
    keep_within: float | None,
    margins: Margins,
) -> None:
    """Set the outcome of combinations whose planned times are too long to TOO_SLOW, in place.

    Args:
        results_by_name: Outcome of each combination, by its name.
        baseline: Name of the combination that is never dropped.
        keep_within: Largest ratio of a planned time to the shortest one. None: the largest ratio follows
            from the difference between two combinations.
        margins: Margins by kind of difference.
    """
    left = (each for each in results_by_name.items() if each[1].outcome == MEASURED)
    times = {name: s.planned_time_s for name, s in left if s.planned_time_s is not None}
    if keep_within is None:
        by_combination = find_combinations_to_drop(times, results_by_name, margins)
    else:
        fastest = min(times, key=times.__getitem__, default="")
        ratios = {name: time_s / times[fastest] for name, time_s in times.items()}
        by_combination = {
            n: DropReason(fastest, r, keep_within) for n, r in ratios.items() if r > keep_within
        }
    for name, (faster, ratio, margin) in by_combination.items():
        if name != baseline:
            reason = f"planned {ratio:.2f} times as long as {faster} (kept up to {margin:.2f})"
            results_by_name[name] = replace(results_by_name[name], outcome=TOO_SLOW, reason=reason)


def postpone_combinations_beyond_budget(
    results_by_name: dict[str, FilterResult], baseline: str, budget_gpu_hours: float | None
) -> None:
    """Set the outcome of combinations that the budget does not cover to LATER, in place.

    They are those with the longest planned times. The baseline, the combination with the shortest planned
    time and those without a planned time are measured with any budget.

    Args:
        results_by_name: Outcome of each combination, by its name.
        baseline: Name of the baseline.
        budget_gpu_hours: Limit of GPU-hours, or None without limit.
    """
    timed = [
        s
        for s in results_by_name.values()
        if s.outcome == MEASURED and s.planned_time_s is not None
    ]
    if budget_gpu_hours is None or not timed:
        return
    timed.sort(key=lambda s: (s.combination.name != baseline, s.planned_time_s or 0.0))
    paid = timed[:2]
    for s in timed[2:]:
        costs = [(p.planned_segment_gpu_s, p.planned_training_gpu_s) for p in (*paid, s)]
        gpu_hours = (
            sum(estimate_block_and_full_cell_costs(*map(list, zip(*costs, strict=True)))) / 3600
        )
        if gpu_hours <= budget_gpu_hours:
            paid.append(s)
            continue
        reason = (
            f"it would raise the planned cost to {gpu_hours:.3g} GPU-hours, above the budget of "
            f"{budget_gpu_hours:g}; a larger budget measures it"
        )
        results_by_name[s.combination.name] = replace(s, outcome=LATER, reason=reason)


def read_out_of_memory_combinations(results: str, study: str) -> set[tuple[str, str]]:
    """Return the name and the hash of settings of combinations that ran out of memory.

    Args:
        results: The folder of results.
        study: Name of the study that measures the combinations.
    """
    names = set()
    for path in list_block_files(results, study):
        try:
            block = read_block(path)
        except BlockError:
            continue  # A block that cannot be read is measured again.
        names |= {
            (s.strategy, block.settings_hashes[s.strategy])
            for s in block.segments
            if s.status == "oom"
        }
    return names


def find_combinations_to_drop(
    planned_times_s: Mapping[str, float],
    results_by_name: Mapping[str, FilterResult],
    margins: Margins,
) -> dict[str, DropReason]:
    """Return each combination whose planned time is too long relative to another, with the reason.

    Two combinations are compared only if they have the same values of all options without a kind of
    difference.

    Args:
        planned_times_s: Planned times in seconds, by name of the combination.
        results_by_name: Outcome of each combination, by its name.
        margins: Margins by kind of difference.
    """
    groups: dict[str, dict[str, Amounts]] = {}
    for name in planned_times_s:
        each = results_by_name[name]
        if each.amounts_by_difference_kind is not None:
            groups.setdefault(_format_options_without_difference_kind(each.combination), {})[
                name
            ] = each.amounts_by_difference_kind
    by_combination: dict[str, DropReason] = {}
    for group in groups.values():
        by_combination |= find_configurations_to_drop(
            {name: planned_times_s[name] for name in group}, group, margins
        )
    return by_combination


def _format_options_without_difference_kind(combination: Combination) -> str:
    """Return a combination's options that have no kind of difference, as JSON text."""
    kinds = {
        f.name: f.metadata.get("kind")
        for f in fields(get_strategy_class(combination.strategy).Options)
    }
    return json.dumps(
        {k: v for k, v in combination.options.items() if kinds[k] is None}, sort_keys=True
    )


def compute_difference_amounts(subject: CellToPlan) -> dict[str, float]:
    """Return a cell's amount of each kind of difference, such as its pipeline stages."""
    settings, mesh, options = subject.settings, subject.mesh, subject.settings.options
    traits = get_traits(settings.strategy, options, subject.cell.gpus)
    parts = settings.gradient_accumulation_steps * subject.strategy.num_batch_parts * mesh.tensor
    return {
        "micro-batch": subject.samples_per_step / parts,
        "checkpointing": _get_recomputed_forward_share(settings.activation_checkpointing),
        "sharding": _find_zero_stage(subject, traits),
        "tensor": mesh.tensor,
        "pipeline": mesh.stages,
        "compile": int(settings.compile),
        "offload": int(traits.states_on_host),
    }


def _find_zero_stage(subject: CellToPlan, traits: Traits) -> int:
    """Return the ZeRO stage (0 to 3) equivalent to the sharding by a cell's strategy."""
    options = subject.settings.options
    # Strategies that also divide the network among workers have an option for their data parallelism.
    if subject.mesh.workers_per_replica > 1:
        return 3 if options.get("data_parallel") == "fsdp" else 0
    if not traits.shards_states:
        return int(traits.optimizer_parts != 1)
    return 2 if options.get("reshard_after_forward") == "never" else 3


def _get_recomputed_forward_share(checkpointing: bool | str) -> float:
    """Return the share of the forward pass that a value of `activation_checkpointing` computes again."""
    if isinstance(checkpointing, bool):
        return float(checkpointing)
    every = checkpointing.removeprefix("every-")
    return 1 / int(every) if every.isdigit() else SELECTIVE_SHARE


def add_tuning_study(
    config: Mapping[str, Any],
    experiment: str,
    gpus: int,
    model: str,
    combinations: Iterable[Combination],
) -> dict[str, Any]:
    """Return the config with an additional, selected study that trains the given combinations.

    Args:
        config: The config as read from YAML.
        experiment: Name of the experiment to tune.
        gpus: Number of workers.
        model: Name of the model.
        combinations: Combinations that the study trains.
    """
    name, combinations = config["study"], list(combinations)
    study = config["studies"][name]
    block = dict(study["experiments"][experiment])
    block |= {"strategies": [c.name for c in combinations], "gpus": [gpus], "models": [model]}
    variants = {c.name: c.variant_entry for c in combinations if c.variant_entry is not None}
    tuned = {key: value for key, value in study.items() if key not in ("experiments", "variants")}
    tuned |= {"variants": variants, "experiments": {experiment: block}}
    return {
        **config,
        "study": make_tuning_study_name(name),
        "studies": {**config["studies"], make_tuning_study_name(name): tuned},
    }


def make_tuning_study_name(study: str) -> str:
    """Return the name of the study that measures the remaining combinations of `study`."""
    return f"{study}-tune"


def _find_unsupported_reason(
    config: Mapping[str, Any], experiment: str, gpus: int, model: str, combination: Combination
) -> str:
    """Return the reason why a combination is not supported, or an empty text."""
    try:
        load_config(add_tuning_study(config, experiment, gpus, model, [combination]))
    except ConfigError as error:
        message = remove_strategy_remedy(str(error))
        return message.rpartition(f"experiments.{experiment}")[2].lstrip(".: ") or message
    return ""


def _filter_combination_by_plan(
    combination: Combination, planned: PlannedCell, memory_margin: float
) -> FilterResult:
    if planned.state == "unsupported":
        return FilterResult(combination, UNSUPPORTED, planned.reason)
    fit = planned.fit
    if fit is None:
        return FilterResult(combination, MEASURED, f"not planned: {planned.reason}")
    # The plan reserves a part of the device's memory. Here the whole memory counts.
    memory_bytes = fit.room_bytes * (1 + memory_margin)
    fate, reason = MEASURED, fit.memory_verdict
    if fit.needed_bytes > MEMORY_FACTOR * memory_bytes:
        fate = TOO_LARGE
        reason = f"needs {fit.needed_bytes / memory_bytes:.1f} times the memory of {fit.device}"
    # Public sweeps cover GPUs only, so combinations on CPUs are not compared by their planned times.
    amounts = (
        compute_difference_amounts(planned.subject) if planned.subject.request.is_on_cuda else None
    )
    s = FilterResult(
        combination,
        fate,
        reason,
        fit.usual_s,
        fit.needed_bytes,
        amounts,
        device_memory_bytes=memory_bytes,
    )
    if fit.usual_s is None:
        return s
    segment, cell = _estimate_segment_and_training_gpu_s(planned, fit.usual_s)
    return replace(s, planned_segment_gpu_s=segment, planned_training_gpu_s=cell)


def _estimate_segment_and_training_gpu_s(
    planned: PlannedCell, planned_time_s: float
) -> tuple[float, float]:
    """Return the planned GPU-seconds of one segment of a block, and of a whole training.

    Args:
        planned: Plan of the cell.
        planned_time_s: Planned seconds of a whole training.
    """
    gpus, device = planned.cell.gpus, "cuda" if planned.subject.request.is_on_cuda else "cpu"
    step_s, start_s = planned_time_s / planned.subject.steps, SEGMENT_START_S[device]
    steps = choose_segment_steps(start_s, step_s, *STEP_NOISE[device])
    segment = gpus * estimate_segment_seconds(start_s, step_s, steps)
    return segment, gpus * (start_s + planned_time_s)
