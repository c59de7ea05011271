"""Three filters drop combinations: unsupported ones, those that cannot fit, and too slow ones.

A combination that ran out of memory in a block counts as not fitting, even if the plan predicts that it
fits. Combinations that only it beat are then measured. The budget is applied last.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

from stratbench.extensions.plan.check import check_study
from stratbench.extensions.plan.needs import Subject
from stratbench.extensions.plan.schedule import Planned, make_plan
from stratbench.extensions.tune.differences import (
    SELECTIVE_SHARE,
    Amounts,
    Beaten,
    Margins,
    find_beaten_configurations,
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
from stratbench.study.config.messages import ConfigError

#: A combination whose planned memory exceeds this multiple of the device's memory is not tried. Between 1
#: and this factor the plan is unsure, so that a short run decides.
MEMORY_FACTOR = 1.5
#: Outcomes of the filters. Combinations with the last two are in the study that is measured.
UNSUPPORTED, TOO_LARGE, TOO_SLOW, LATER = (
    "unsupported",
    "does not fit",
    "slower",
    "beyond the budget",
)
MEASURED, OUT_OF_MEMORY = "measured", "out of memory"


@dataclass(frozen=True)
class Sieved:
    """Outcome of the filters for one combination, with the reason and the planned values.

    Attributes:
        outcome: Outcome, one of the constants above.
        time_s: Planned time of a whole training; None if unknown.
        memory_bytes: Planned memory of a worker; None if unknown.
        amounts: Amount of each kind of difference, if public sweeps cover the cell's device.
        segment_gpu_s: Planned GPU-seconds of one segment of a block.
        training_gpu_s: Planned GPU-seconds of a whole training.
        device_memory_bytes: Memory available to a worker.
    """

    combination: Combination
    outcome: str
    reason: str = ""
    time_s: float | None = None
    memory_bytes: int | None = None
    amounts: Amounts | None = None
    segment_gpu_s: float = 0.0
    training_gpu_s: float = 0.0
    device_memory_bytes: float | None = None


def filter_combinations(
    config: Mapping[str, Any],
    experiment: str,
    gpus: int,
    model: str,
    combinations: Sequence[Combination],
    baseline: str,
    out_of_memory: Set[tuple[str, str]] = frozenset(),
) -> list[Sieved]:
    """Filter the combinations, and return the outcome of each in the given order.

    The baseline is measured if it fits.

    Args:
        config: The raw config of the study, as read from YAML.
        experiment: Name of the experiment whose data, batch and settings apply.
        gpus: Number of workers.
        model: Name of the model.
        combinations: The combinations to filter.
        baseline: Name of the combination to compare with.
        out_of_memory: Combinations that ran out of memory in a block, as pairs of name and digest of
            settings.
    """
    by_name = {
        c.name: Sieved(c, UNSUPPORTED, _unsupported_reason(config, experiment, gpus, model, c))
        for c in combinations
    }
    left = [s.combination for s in by_name.values() if not s.reason]
    if left:
        whole, study = load_config(add_tuning_study(config, experiment, gpus, model, left))
        for planned in make_plan(whole, check_study(whole, study), {}).cells:
            name = planned.cell.strategy
            s = _filter_by_plan(
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
    by_name: dict[str, Sieved],
    baseline: str,
    keep_within: float | None,
    margins: Margins,
) -> None:
    """Drop combinations whose planned time is too long, in place, except for the baseline.

    Args:
        by_name: The combinations, by name.
        baseline: Name of the combination that stays for any planned time.
        keep_within: Maximum ratio of a planned time to the fastest one. None: the ratio follows from
            the differences between two combinations.
        margins: Margins of planned ratios, by kind of difference.
    """
    left = (each for each in by_name.items() if each[1].outcome == MEASURED)
    times = {name: s.time_s for name, s in left if s.time_s is not None}
    if keep_within is None:
        by_combination = find_beaten_combinations(times, by_name, margins)
    else:
        fastest = min(times, key=times.__getitem__, default="")
        ratios = {name: time_s / times[fastest] for name, time_s in times.items()}
        by_combination = {
            n: Beaten(fastest, r, keep_within) for n, r in ratios.items() if r > keep_within
        }
    for name, (faster, ratio, margin) in by_combination.items():
        if name != baseline:
            reason = f"planned {ratio:.2f} times as long as {faster} (kept up to {margin:.2f})"
            by_name[name] = replace(by_name[name], outcome=TOO_SLOW, reason=reason)


def postpone_combinations_beyond_budget(
    by_name: dict[str, Sieved], baseline: str, budget_gpu_hours: float | None
) -> None:
    """Postpone the combinations with the longest planned times, in place.

    Combinations are postponed only if the budget is too small. The baseline, the planned fastest and those
    without a planned time are measured whatever the budget.

    Args:
        by_name: The combinations, by name.
        baseline: Name of the baseline.
        budget_gpu_hours: Limit of GPU-hours, or None without limit.
    """
    timed = [s for s in by_name.values() if s.outcome == MEASURED and s.time_s is not None]
    if budget_gpu_hours is None or not timed:
        return
    timed.sort(key=lambda s: (s.combination.name != baseline, s.time_s or 0.0))
    paid = timed[:2]
    for s in timed[2:]:
        costs = [(p.segment_gpu_s, p.training_gpu_s) for p in (*paid, s)]
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
        by_name[s.combination.name] = replace(s, outcome=LATER, reason=reason)


def read_out_of_memory_combinations(results: str, study: str) -> set[tuple[str, str]]:
    """Return the combinations that ran out of memory in a block of a study.

    Each is a pair of a name and a digest of settings.
    """
    names = set()
    for path in list_block_files(results, study):
        try:
            block = read_block(path)
        except BlockError:
            continue  # an unreadable block is measured again
        names |= {
            (s.strategy, block.settings_hashes[s.strategy])
            for s in block.segments
            if s.status == "oom"
        }
    return names


def find_beaten_combinations(
    times: Mapping[str, float], by_name: Mapping[str, Sieved], margins: Margins
) -> dict[str, Beaten]:
    """Return a reason to drop each combination that another one beats by the margin.

    Combinations are compared if options whose kind of difference is unknown are equal.

    Args:
        times: Planned times in seconds, by name.
        by_name: The combinations, by name.
        margins: Margins of planned ratios, by kind of difference.
    """
    groups: dict[str, dict[str, Amounts]] = {}
    for name in times:
        each = by_name[name]
        if each.amounts is not None:
            groups.setdefault(_format_options_of_unknown_kind(each.combination), {})[name] = (
                each.amounts
            )
    by_combination: dict[str, Beaten] = {}
    for group in groups.values():
        by_combination |= find_beaten_configurations(
            {name: times[name] for name in group}, group, margins
        )
    return by_combination


def _format_options_of_unknown_kind(c: Combination) -> str:
    """Return the options whose kind of difference is unknown, as JSON text."""
    kinds = {f.name: f.metadata.get("kind") for f in fields(get_strategy_class(c.strategy).Options)}
    return json.dumps({k: v for k, v in c.options.items() if kinds[k] is None}, sort_keys=True)


def measure_difference_amounts(s: Subject) -> dict[str, float]:
    """Return a cell's amounts of the properties in which configurations differ, by kind.

    An example is its number of stages.
    """
    settings, mesh, options = s.settings, s.mesh, s.settings.options
    traits = get_traits(settings.strategy, options, s.cell.gpus)
    parts = settings.gradient_accumulation_steps * s.strategy.num_batch_parts * mesh.tensor
    return {
        "micro-batch": s.samples_per_step / parts,
        "checkpointing": _get_recomputed_share(settings.activation_checkpointing),
        "sharding": _find_zero_stage(s, traits),
        "tensor": mesh.tensor,
        "pipeline": mesh.stages,
        "compile": int(settings.compile),
        "offload": int(traits.states_on_host),
    }


def _find_zero_stage(s: Subject, traits: Traits) -> int:
    """Return the ZeRO stage (0 to 3) that corresponds to the sharding among replicas."""
    options = s.settings.options
    if s.mesh.workers_per_replica > 1:  # the network itself is divided as well
        return 3 if options.get("data_parallel") == "fsdp" else 0
    if not traits.shards_states:
        return int(traits.optimizer_parts != 1)
    return 2 if options.get("reshard_after_forward") == "never" else 3


def _get_recomputed_share(checkpointing: bool | str) -> float:
    """Return the share of the forward pass that checkpointing computes again."""
    if isinstance(checkpointing, bool):
        return float(checkpointing)
    every = checkpointing.removeprefix("every-")
    return 1 / int(every) if every.isdigit() else SELECTIVE_SHARE


def add_tuning_study(
    config: Mapping[str, Any],
    experiment: str,
    gpus: int,
    model: str,
    chosen: Iterable[Combination],
) -> dict[str, Any]:
    """Return the config with an additional study of the chosen combinations, and select it.

    Args:
        config: The raw config.
        experiment: Name of the experiment to tune.
        gpus: Number of workers.
        model: Name of the model.
        chosen: The combinations.
    """
    name, chosen = config["study"], list(chosen)
    study = config["studies"][name]
    block = dict(study["experiments"][experiment])
    block |= {"strategies": [c.name for c in chosen], "gpus": [gpus], "models": [model]}
    variants = {c.name: c.variant for c in chosen if c.variant is not None}
    tuned = {key: value for key, value in study.items() if key not in ("experiments", "variants")}
    tuned |= {"variants": variants, "experiments": {experiment: block}}
    return {
        **config,
        "study": make_tuning_study_name(name),
        "studies": {**config["studies"], make_tuning_study_name(name): tuned},
    }


def make_tuning_study_name(study: str) -> str:
    """Return the name of the study that measures the combinations left by the filters."""
    return f"{study}-tune"


def _unsupported_reason(
    config: Mapping[str, Any], experiment: str, gpus: int, model: str, combination: Combination
) -> str:
    """Return the reason why the config does not support the combination, or an empty text."""
    try:
        load_config(add_tuning_study(config, experiment, gpus, model, [combination]))
    except ConfigError as error:
        return str(error).rpartition(f"experiments.{experiment}")[2].lstrip(": ") or str(error)
    return ""


def _filter_by_plan(combination: Combination, planned: Planned, memory_margin: float) -> Sieved:
    if planned.state == "unsupported":
        return Sieved(combination, UNSUPPORTED, planned.reason)
    fit = planned.fit
    if fit is None:
        return Sieved(combination, MEASURED, f"not planned: {planned.reason}")
    # The whole memory of the device is compared, because the plan's room excludes a reserve.
    memory_bytes = fit.room_bytes * (1 + memory_margin)
    fate, reason = MEASURED, fit.memory_verdict
    if fit.needed_bytes > MEMORY_FACTOR * memory_bytes:
        fate = TOO_LARGE
        reason = f"needs {fit.needed_bytes / memory_bytes:.1f} times the memory of {fit.device}"
    # No combination on CPUs is dropped by its time, because public sweeps cover GPUs only.
    amounts = (
        measure_difference_amounts(planned.subject) if planned.subject.request.is_on_cuda else None
    )
    s = Sieved(combination, fate, reason, fit.usual_s, fit.needed_bytes, amounts)
    s = replace(s, device_memory_bytes=memory_bytes)
    if fit.usual_s is None:
        return s
    segment, cell = _plan_gpu_seconds(planned, fit.usual_s)
    return replace(s, segment_gpu_s=segment, training_gpu_s=cell)


def _plan_gpu_seconds(planned: Planned, usual_s: float) -> tuple[float, float]:
    """Return the planned GPU-seconds of one segment of a block, and of a full training."""
    gpus, device = planned.cell.gpus, "cuda" if planned.subject.request.is_on_cuda else "cpu"
    step_s, start_s = usual_s / planned.subject.steps, SEGMENT_START_S[device]
    steps = choose_segment_steps(start_s, step_s, *STEP_NOISE[device])
    segment = gpus * estimate_segment_seconds(start_s, step_s, steps)
    return segment, gpus * (start_s + usual_s)
