"""projection.csv: a row for each measured and each projected count of a strategy.

Intervals hold 80 of 100 cases. Measured rows have the range of their repeats.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_atomic
from stratbench.extensions.projection.evidence import ProjectionInputs, step_times
from stratbench.extensions.projection.memory import Peak
from stratbench.extensions.projection.naive import ideal
from stratbench.extensions.projection.project import Projection, basis_of


@dataclass(frozen=True)
class Row:
    """A count of a strategy. `kind`: measured, projected or refused (`reason`); empty texts are not known.

    `step`: seconds of a global batch; `train`: of the study's whole training; `target`: of the training
    until the score that the config asks for. `gpu_hours` and, where GPUs have a price, `cost`: of the
    training, or as `target_...` until that score; without servers, start and evaluation. `memory`: a
    worker's peak, in bytes. Each low, middle, high.
    `evidence`: from what it is projected. `skill`: on the measured counts, 1 no error, 0 the best naive
    rule's. `host_s`: in which the host issues a step, where that is the limit.
    """

    experiment: str
    model: str
    strategy: str
    base: str
    scaling: str
    device: str
    workers: int
    nodes: int | None
    kind: str
    step_low_s: float | None = None
    step_s: float | None = None
    step_high_s: float | None = None
    efficiency_low: float | None = None
    efficiency: float | None = None
    efficiency_high: float | None = None
    train_low_s: float | None = None
    train_s: float | None = None
    train_high_s: float | None = None
    target_low_s: float | None = None
    target_s: float | None = None
    target_high_s: float | None = None
    gpu_hours_low: float | None = None
    gpu_hours: float | None = None
    gpu_hours_high: float | None = None
    cost_low: float | None = None
    cost: float | None = None
    cost_high: float | None = None
    target_gpu_hours_low: float | None = None
    target_gpu_hours: float | None = None
    target_gpu_hours_high: float | None = None
    target_cost_low: float | None = None
    target_cost: float | None = None
    target_cost_high: float | None = None
    memory_low_bytes: float | None = None
    memory_bytes: float | None = None
    memory_high_bytes: float | None = None
    #: Why there is no time to the target, if the config has one.
    why_no_target: str = ""
    evidence: str = ""
    rule: str = ""
    skill: float | None = None
    reason: str = ""
    perfect_s: float | None = None
    same_loss_s: float | None = None
    a_plus_b_s: float | None = None
    host_s: float | None = None


@dataclass(frozen=True)
class Whole:
    """Properties of a strategy's trainings: the batches of one by count, and the fraction to the target.

    `to_target`: (low, high) of the training time, None where it is not known; then `why_no_target`, if
    one was asked for. `price`: of a GPU for an hour; None: not known, or no GPU.
    """

    steps: Mapping[int, int]
    to_target: tuple[float, float] | None
    why_no_target: str = ""
    price: float | None = None


def rows_of(
    evidence: ProjectionInputs,
    base: str,
    projections: Sequence[Projection],
    peaks: Mapping[int, Peak | None],
    whole: Whole,
) -> list[Row]:
    """Return the rows of one strategy: measured counts, then the others.

    Args:
        evidence: Measurements of the strategy.
        base: Its strategy, if a variant.
        projections: Its projections.
        peaks: Peak memory by count.
        whole: Its trainings.
    """
    common = {
        "experiment": evidence.experiment, "model": evidence.model, "strategy": evidence.strategy,
        "base": base, "scaling": evidence.scaling, "device": evidence.gpu or "CPU",
        "why_no_target": whole.why_no_target,
    }  # fmt: skip
    rows = []
    for point, records in zip(evidence.points, evidence.records, strict=True):
        times = step_times(records)
        used = sorted(r["memory"]["peak_bytes"] for r in records if r["memory"]["peak_bytes"])
        memory = (used[0], used[len(used) // 2], used[-1]) if used and not evidence.on_cpu else None
        rows.append(
            Row(
                **common, workers=point.workers, nodes=point.nodes, kind="measured",
                **_times(evidence, whole, point.workers, min(times), point.step_s, max(times)),
                **_three("memory", "_bytes", memory),
            )
        )  # fmt: skip
    for p in projections:
        i, peak = p.interval, peaks.get(p.workers)
        times = _times(evidence, whole, p.workers, i.low_s, i.middle_s, i.high_s) if i else {}
        memory = (peak.low, peak.middle, peak.high) if peak and i else None
        rows.append(
            Row(
                **common, workers=p.workers, nodes=p.nodes, kind="refused" if p.refused else "projected",
                **times, **_three("memory", "_bytes", memory),
                evidence=basis_of(p, evidence.points) if i else "", rule=p.rule if i else "",
                skill=p.skill.value, reason=p.refused or "", perfect_s=p.naive_s["perfect"],
                same_loss_s=p.naive_s["same loss per doubling"], a_plus_b_s=p.naive_s["a + b/N"],
                host_s=p.host_s or None,
            )
        )  # fmt: skip
    return rows


def _times(
    evidence: ProjectionInputs, whole: Whole, workers: int, *step_s: float
) -> dict[str, float | None]:
    """Return step, efficiency, time and cost of the training and to the target.

    They follow from the step's low, middle and high time.
    """
    ideal_s = ideal(evidence.points[0], evidence.scaling, workers)
    trained = [t * whole.steps[workers] for t in step_s]
    # A long step is a low efficiency.
    efficiencies = [ideal_s / t for t in reversed(step_s)]
    target = None
    if whole.to_target is not None:
        low, high = whole.to_target
        target = (trained[0] * low, trained[1] * (low + high) / 2, trained[2] * high)
    return (
        _three("step", "_s", step_s)
        | _three("efficiency", "", efficiencies)
        | _three("train", "_s", trained)
        | _three("target", "_s", target)
        | _paid("", trained, workers, whole.price)
        | _paid("target_", target, workers, whole.price)
    )


def _paid(
    of: str, times_s: Sequence[float] | None, workers: int, price: float | None
) -> dict[str, float | None]:
    """GPU-hours of times on so many workers, and what they cost."""
    hours = times_s and [t * workers / 3600 for t in times_s]
    cost = None if price is None or hours is None else [h * price for h in hours]
    return _three(f"{of}gpu_hours", "", hours) | _three(f"{of}cost", "", cost)


def _three(name: str, unit: str, values: Sequence[float] | None) -> dict[str, float | None]:
    keys = (f"{name}_low{unit}", f"{name}{unit}", f"{name}_high{unit}")
    return dict(zip(keys, values or (None, None, None), strict=True))


def unfit_rows(evidence: ProjectionInputs, base: str, counts: Sequence[int]) -> list[Row]:
    """Return an unsupported row per count, for a strategy that cannot be projected.

    Args:
        evidence: Measurements of the strategy.
        base: Its strategy, if a variant.
        counts: Worker counts.
    """
    return [
        Row(
            evidence.experiment, evidence.model, evidence.strategy, base, "", evidence.gpu or "CPU",
            workers, None, "refused", reason=evidence.unfit,
        )
        for workers in counts
    ]  # fmt: skip


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    text = io.StringIO()
    names = [f.name for f in fields(Row)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_text(getattr(row, name)) for name in names] for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.getvalue())


def _text(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
