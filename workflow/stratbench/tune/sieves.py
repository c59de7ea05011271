"""Three sieves: what `check` refuses, what cannot fit, and what cannot be among the fastest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stratbench.plan.check import check_study
from stratbench.plan.schedule import Planned, make_plan
from stratbench.study.config.config import load_config
from stratbench.study.config.messages import ConfigError
from stratbench.tune.space import Combination

#: A combination that needs more than so many times a device's memory is not tried. What lies between is:
#: a short run tells whether it fits.
MEMORY_FACTOR = 1.5
#: What becomes of a combination.
REFUSED, TOO_LARGE, TOO_SLOW, MEASURED = "refused", "does not fit", "slower", "measured"


@dataclass(frozen=True)
class Sieved:
    """What became of a combination, and why.

    `time_s` and `memory_bytes` are planned, of a whole training and of a worker; None where nothing is known.
    """

    combination: Combination
    fate: str
    why: str = ""
    time_s: float | None = None
    memory_bytes: int | None = None


def sieve(
    config: Mapping[str, Any],
    experiment: str,
    gpus: int,
    model: str,
    found: Sequence[Combination],
    baseline: str,
) -> list[Sieved]:
    """What becomes of each combination, in their order. The baseline is measured wherever it fits at all.

    Args:
        config: The raw config of the study, as read from YAML.
        experiment: Its experiment whose data, batch and settings hold.
        gpus: Number of workers.
        model: Name of the network.
        found: The combinations.
        baseline: Name of the combination that others are held against.
    """
    by_name = {
        c.name: Sieved(c, REFUSED, _refusal(config, experiment, gpus, model, c)) for c in found
    }
    left = [s.combination for s in by_name.values() if not s.why]
    if left:
        whole, study = load_config(study_of(config, experiment, gpus, model, left))
        for planned in make_plan(whole, check_study(whole, study), {}).cells:
            name = planned.cell.strategy
            by_name[name] = _planned(
                by_name[name].combination, planned, whole["cluster"]["memory_margin"]
            )
        drop_slow(by_name, baseline, whole["tune"]["keep_within"])
    return list(by_name.values())


def drop_slow(by_name: dict[str, Sieved], baseline: str, keep_within: float) -> None:
    """Change those in place that are planned to take more than `keep_within` times the fastest."""
    left = {name: each for name, each in by_name.items() if each.fate == MEASURED}
    times_s = {name: each.time_s for name, each in left.items() if each.time_s is not None}
    for name, time_s in times_s.items():
        ratio = time_s / min(times_s.values())
        if name != baseline and ratio > keep_within:
            why = f"planned {ratio:.2f} times as long as the fastest (kept up to {keep_within:g})"
            by_name[name] = replace(left[name], fate=TOO_SLOW, why=why)


def study_of(
    config: Mapping[str, Any],
    experiment: str,
    gpus: int,
    model: str,
    chosen: Iterable[Combination],
) -> dict[str, Any]:
    """The config with one study more, of the chosen combinations alone; it becomes the study to run."""
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
    """The name of the study that measures what the sieves of `study` leave."""
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
    if planned.state == "refused":
        return Sieved(combination, REFUSED, planned.why)
    fit = planned.fit
    if fit is None:
        return Sieved(combination, MEASURED, f"not planned: {planned.why}")
    memory_bytes = fit.room_bytes * (1 + memory_margin)  # what the reserve leaves
    fate, why = MEASURED, fit.verdict
    if fit.needed_bytes > MEMORY_FACTOR * memory_bytes:
        fate = TOO_LARGE
        why = f"needs {fit.needed_bytes / memory_bytes:.1f} times the memory of {fit.device}"
    return Sieved(combination, fate, why, fit.usual_s, fit.needed_bytes)
