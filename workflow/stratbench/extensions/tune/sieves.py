"""Three sieves: what `check` refuses, what cannot fit, and what cannot be among the fastest.

What ran out of memory in a block does not fit, whatever the plan says; what only it was faster than is then
measured in its place. What a budget cannot pay for comes later.
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
    beaten,
    public_margins,
)
from stratbench.extensions.tune.space import Combination
from stratbench.extensions.verdict.block_rules import (
    SEGMENT_START_S,
    STEP_NOISE,
    expected_cost,
    segment_s,
    segment_steps,
)
from stratbench.extensions.verdict.blocks import BlockError, block_files, read_block, trained_digest
from stratbench.strategies import strategy_class, traits_of
from stratbench.strategies.base import Traits
from stratbench.study.config.config import load_config
from stratbench.study.config.messages import ConfigError

#: A combination that needs more than so many times a device's memory is not tried. What lies between is:
#: a short run tells whether it fits.
MEMORY_FACTOR = 1.5
#: What becomes of a combination. The last two are in the study that is measured.
UNSUPPORTED, TOO_LARGE, TOO_SLOW, LATER = (
    "unsupported",
    "does not fit",
    "slower",
    "beyond the budget",
)
MEASURED, OUT_OF_MEMORY = "measured", "out of memory"


@dataclass(frozen=True)
class Sieved:
    """What became of a combination, and why.

    `time_s` and `memory_bytes` are planned, of a whole training and of a worker; None where nothing is known.
    `amounts`: what it has of each kind of difference, if public sweeps say anything of its device.
    `segment_s` and `cell_s`: planned GPU-seconds of a segment of a block and of a whole training.
    `device_bytes`: what a worker may hold.
    """

    combination: Combination
    fate: str
    reason: str = ""
    time_s: float | None = None
    memory_bytes: int | None = None
    amounts: Amounts | None = None
    segment_s: float = 0.0
    cell_s: float = 0.0
    device_bytes: float | None = None


def sieve(
    config: Mapping[str, Any],
    experiment: str,
    gpus: int,
    model: str,
    found: Sequence[Combination],
    baseline: str,
    out_of_memory: Set[tuple[str, str]] = frozenset(),
) -> list[Sieved]:
    """What becomes of each combination, in their order. The baseline is measured wherever it fits at all.

    Args:
        config: The raw config of the study, as read from YAML.
        experiment: Its experiment whose data, batch and settings hold.
        gpus: Number of workers.
        model: Name of the network.
        found: The combinations.
        baseline: Name of the combination that others are held against.
        out_of_memory: What ran out of memory in a block: its name, and a digest of its settings.
    """
    by_name = {
        c.name: Sieved(c, UNSUPPORTED, _refusal(config, experiment, gpus, model, c)) for c in found
    }
    left = [s.combination for s in by_name.values() if not s.reason]
    if left:
        whole, study = load_config(study_of(config, experiment, gpus, model, left))
        for planned in make_plan(whole, check_study(whole, study), {}).cells:
            name = planned.cell.strategy
            s = _planned(by_name[name].combination, planned, whole["cluster"]["memory_margin"])
            if (name, trained_digest(planned.subject.settings)) in out_of_memory:
                s = replace(s, fate=OUT_OF_MEMORY, reason="ran out of memory in a block")
            by_name[name] = s
        drop_slow(by_name, baseline, whole["tune"]["keep_within"], public_margins())
        put_off(by_name, baseline, whole["tune"]["budget_gpu_hours"])
    return list(by_name.values())


def drop_slow(
    by_name: dict[str, Sieved],
    baseline: str,
    keep_within: float | None,
    margins: Margins,
) -> None:
    """Change those in place that are planned to take too long; the baseline is kept.

    Args:
        by_name: The combinations, by name.
        baseline: The one that is kept whatever its time.
        keep_within: From which ratio to the fastest one a combination is dropped; None: that follows from
            what it differs in from a faster one.
        margins: Of planned ratios, by what combinations differ in.
    """
    left = (each for each in by_name.items() if each[1].fate == MEASURED)
    times = {name: s.time_s for name, s in left if s.time_s is not None}
    if keep_within is None:
        found = beaten_of(times, by_name, margins)
    else:
        fastest = min(times, key=times.__getitem__, default="")
        ratios = {name: time_s / times[fastest] for name, time_s in times.items()}
        found = {n: Beaten(fastest, r, keep_within) for n, r in ratios.items() if r > keep_within}
    for name, (faster, ratio, margin) in found.items():
        if name != baseline:
            reason = f"planned {ratio:.2f} times as long as {faster} (kept up to {margin:.2f})"
            by_name[name] = replace(by_name[name], fate=TOO_SLOW, reason=reason)


def put_off(by_name: dict[str, Sieved], baseline: str, budget_gpu_hours: float | None) -> None:
    """Change those in place for which the budget does not suffice: the planned slowest.

    The baseline, the planned fastest and what has no planned time are measured whatever the budget.
    """
    timed = [s for s in by_name.values() if s.fate == MEASURED and s.time_s is not None]
    if budget_gpu_hours is None or not timed:
        return
    timed.sort(key=lambda s: (s.combination.name != baseline, s.time_s or 0.0))
    paid = timed[:2]
    for s in timed[2:]:
        costs = [(p.segment_s, p.cell_s) for p in (*paid, s)]
        gpu_hours = sum(expected_cost(*map(list, zip(*costs, strict=True)))) / 3600
        if gpu_hours <= budget_gpu_hours:
            paid.append(s)
            continue
        reason = (
            f"with it {gpu_hours:.3g} GPU-hours are planned, of a budget of {budget_gpu_hours:g}; "
            "a larger one measures it, too"
        )
        by_name[s.combination.name] = replace(s, fate=LATER, reason=reason)


def out_of_memory_in(results: str, study: str) -> set[tuple[str, str]]:
    """Return what ran out of memory in a block of a study: its name, and a digest of its settings."""
    found = set()
    for path in block_files(results, study):
        try:
            block = read_block(path)
        except BlockError:
            continue  # it is measured again
        found |= {
            (s.strategy, block.trained[s.strategy]) for s in block.segments if s.status == "oom"
        }
    return found


def beaten_of(
    times: Mapping[str, float], by_name: Mapping[str, Sieved], margins: Margins
) -> dict[str, Beaten]:
    """Return what each combination is beaten by, among those with the same options of no known kind."""
    groups: dict[str, dict[str, Amounts]] = {}
    for name in times:
        each = by_name[name]
        if each.amounts is not None:
            groups.setdefault(_without_kind(each.combination), {})[name] = each.amounts
    found: dict[str, Beaten] = {}
    for group in groups.values():
        found |= beaten({name: times[name] for name in group}, group, margins)
    return found


def _without_kind(c: Combination) -> str:
    """Return the options whose difference is of no kind that is known, as a text."""
    kinds = {f.name: f.metadata.get("kind") for f in fields(strategy_class(c.strategy).Options)}
    return json.dumps({k: v for k, v in c.options.items() if kinds[k] is None}, sort_keys=True)


def amounts_of(s: Subject) -> dict[str, float]:
    """Return what a cell has of each kind of difference."""
    settings, mesh, options = s.settings, s.mesh, s.settings.options
    traits = traits_of(settings.strategy, options, s.cell.gpus)
    parts = settings.gradient_accumulation_steps * s.strategy.parts * mesh.tensor
    return {
        "micro-batch": s.samples_per_step / parts,
        "checkpointing": _share_of(settings.activation_checkpointing),
        "sharding": _stage_of(s, traits),
        "tensor": mesh.tensor,
        "pipeline": mesh.stages,
        "compile": int(settings.compile),
        "offload": int(traits.states_on_host),
    }


def _stage_of(s: Subject, traits: Traits) -> int:
    """How much is divided among replicas, counted as ZeRO's stages."""
    options = s.settings.options
    if s.mesh.members > 1:  # the network itself is divided, too
        return 3 if options.get("data_parallel") == "fsdp" else 0
    if not traits.shards_states:
        return int(traits.optimizer_parts != 1)
    return 2 if options.get("reshard_after_forward") == "never" else 3


def _share_of(checkpointing: bool | str) -> float:
    """Return the share of forward that is computed again."""
    if isinstance(checkpointing, bool):
        return float(checkpointing)
    every = checkpointing.removeprefix("every-")
    return 1 / int(every) if every.isdigit() else SELECTIVE_SHARE


def study_of(
    config: Mapping[str, Any],
    experiment: str,
    gpus: int,
    model: str,
    chosen: Iterable[Combination],
) -> dict[str, Any]:
    """The config with one study more, of the chosen combinations alone.

    It becomes the study to run.
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
        "study": tuned_name(name),
        "studies": {**config["studies"], tuned_name(name): tuned},
    }


def tuned_name(study: str) -> str:
    """Return the name of the study that measures what the sieves of `study` leave."""
    return f"{study}-tune"


def _refusal(
    config: Mapping[str, Any], experiment: str, gpus: int, model: str, combination: Combination
) -> str:
    """Why the config cannot have the combination; empty if it can."""
    try:
        load_config(study_of(config, experiment, gpus, model, [combination]))
    except ConfigError as error:
        return str(error).rpartition(f"experiments.{experiment}")[2].lstrip(": ") or str(error)
    return ""


def _planned(combination: Combination, planned: Planned, memory_margin: float) -> Sieved:
    if planned.state == "unsupported":
        return Sieved(combination, UNSUPPORTED, planned.reason)
    fit = planned.fit
    if fit is None:
        return Sieved(combination, MEASURED, f"not planned: {planned.reason}")
    memory_bytes = fit.room_bytes * (1 + memory_margin)  # what the reserve leaves
    fate, reason = MEASURED, fit.verdict
    if fit.needed_bytes > MEMORY_FACTOR * memory_bytes:
        fate = TOO_LARGE
        reason = f"needs {fit.needed_bytes / memory_bytes:.1f} times the memory of {fit.device}"
    # The sweeps are of GPUs.
    amounts = amounts_of(planned.subject) if planned.subject.request.on_cuda else None
    s = Sieved(combination, fate, reason, fit.usual_s, fit.needed_bytes, amounts)
    s = replace(s, device_bytes=memory_bytes)
    if fit.usual_s is None:
        return s
    segment, cell = _costs_of(planned, fit.usual_s)
    return replace(s, segment_s=segment, cell_s=cell)


def _costs_of(planned: Planned, usual_s: float) -> tuple[float, float]:
    """Return GPU-seconds of a segment of a block, and of a whole training."""
    gpus, device = planned.cell.gpus, "cuda" if planned.subject.request.on_cuda else "cpu"
    step_s, start_s = usual_s / planned.subject.steps, SEGMENT_START_S[device]
    steps = segment_steps(start_s, step_s, *STEP_NOISE[device])
    segment = gpus * segment_s(start_s, step_s, steps)
    return segment, gpus * (start_s + usual_s)
