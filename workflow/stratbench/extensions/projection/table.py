"""Writes projection.csv, with a row per strategy and measured or projected worker count.

Intervals of projected rows have 80 % coverage. Measured rows have the range of their repeats instead.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_text_atomically
from stratbench.extensions.projection.evidence import ProjectionInputs, compute_step_times_s
from stratbench.extensions.projection.memory import ProjectedPeak
from stratbench.extensions.projection.naive import scale_step_time_perfectly
from stratbench.extensions.projection.project import Projection, describe_projection_basis


@dataclass(frozen=True)
class Row:
    """A row of projection.csv: a strategy on a number of workers.

    Columns with `low` and `high` are the ends of an interval. None and "" mean unknown.

    Attributes:
        experiment: Name of the experiment.
        model: Name of the model.
        strategy: Name of the strategy.
        base: Name of the strategy that a variant is based on.
        scaling: weak or strong.
        device: Name of the GPU, or CPU.
        workers: Number of workers.
        nodes: Number of nodes.
        kind: measured, projected or refused.
        step_s: Seconds per global batch.
        efficiency: Time with perfect scaling from the smallest measured count, divided by the time.
        train_s: Seconds of the whole training of the study.
        target_s: Seconds of the training until the target score.
        gpu_hours: GPU-hours of the training, without servers, start and evaluation.
        cost: Cost of these GPU-hours, if GPUs have a price.
        target_gpu_hours: GPU-hours until the target score.
        target_cost: Cost of these GPU-hours, if GPUs have a price.
        memory_bytes: Peak memory of a worker.
        why_no_target: Why the time until the target score is unknown, if the config has a target.
        evidence: Measurements on which the projection rests.
        rule: Name of the rule that projects.
        skill: Skill on the measured counts: 1 without error, 0 as good as the best naive rule.
        reason: Why nothing is projected.
        perfect_s: Step time if the throughput grew in proportion to the number of workers.
        same_loss_s: Step time if each doubling loses as much as the last measured one.
        a_plus_b_s: Step time by a fit of a + b/N.
        host_s: Seconds in which the host issues a step, if that is the limit.
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
class TrainingFacts:
    """Properties of a strategy's trainings, from which training times and costs follow.

    Attributes:
        training_steps_by_worker_count: Number of steps of a training, by worker count.
        time_share_to_target_range: Minimum and maximum share of the training time until the target score;
            None if unknown.
        no_target_reason: Reason for an unknown share, if the config has a target.
        price_per_gpu_hour: Price of a GPU per hour; None if unknown or without GPUs.
    """

    training_steps_by_worker_count: Mapping[int, int]
    time_share_to_target_range: tuple[float, float] | None
    no_target_reason: str = ""
    price_per_gpu_hour: float | None = None


def make_projection_rows(
    evidence: ProjectionInputs,
    base_strategy: str,
    projections: Sequence[Projection],
    peaks: Mapping[int, ProjectedPeak | None],
    facts: TrainingFacts,
) -> list[Row]:
    """Return the rows of one strategy: measured worker counts, then projected ones.

    Args:
        evidence: Measurements of the strategy.
        base_strategy: Name of the strategy that a variant is based on.
        projections: Projections of the strategy.
        peaks: Peak memory of a worker, by worker count.
        facts: Properties of the strategy's trainings.
    """
    common = {
        "experiment": evidence.experiment, "model": evidence.model, "strategy": evidence.strategy,
        "base": base_strategy, "scaling": evidence.scaling, "device": evidence.gpu_name or "CPU",
        "why_no_target": facts.no_target_reason,
    }  # fmt: skip
    rows = []
    for point, records in zip(
        evidence.measured_steps, evidence.records_per_worker_count, strict=True
    ):
        times = compute_step_times_s(records)
        used = sorted(r["memory"]["peak_bytes"] for r in records if r["memory"]["peak_bytes"])
        memory = (
            (used[0], used[len(used) // 2], used[-1]) if used and not evidence.is_on_cpu else None
        )
        rows.append(
            Row(
                **common, workers=point.workers, nodes=point.nodes, kind="measured",
                **_make_time_columns(evidence, facts, point.workers, min(times), point.step_s, max(times)),
                **_make_interval_columns("memory", "_bytes", memory),
            )
        )  # fmt: skip
    for p in projections:
        i, peak, naive_s = p.interval, peaks.get(p.workers), p.step_s_by_naive_rule
        times = (
            _make_time_columns(evidence, facts, p.workers, i.low_s, i.middle_s, i.high_s)
            if i
            else {}
        )
        memory = (peak.low_bytes, peak.middle_bytes, peak.high_bytes) if peak and i else None
        rows.append(
            Row(
                **common, workers=p.workers, nodes=p.nodes,
                kind="refused" if p.refusal_reason else "projected", **times,
                **_make_interval_columns("memory", "_bytes", memory),
                evidence=describe_projection_basis(p, evidence.measured_steps) if i else "",
                rule=p.rule if i else "",
                skill=p.skill.relative_error_reduction, reason=p.refusal_reason or "",
                perfect_s=naive_s["perfect"], same_loss_s=naive_s["same loss per doubling"],
                a_plus_b_s=naive_s["a + b/N"],
                host_s=p.host_issue_s or None,
            )
        )  # fmt: skip
    return rows


def _make_time_columns(
    evidence: ProjectionInputs, facts: TrainingFacts, workers: int, *step_interval_s: float
) -> dict[str, float | None]:
    """Return the columns on step time, efficiency, training time, time to the target, and cost.

    They follow from `step_interval_s`: the low, middle and high step time.
    """
    ideal_s = scale_step_time_perfectly(evidence.measured_steps[0], evidence.scaling, workers)
    trained = [t * facts.training_steps_by_worker_count[workers] for t in step_interval_s]
    # Reversed, because the highest step time gives the lowest efficiency.
    efficiencies = [ideal_s / t for t in reversed(step_interval_s)]
    target = None
    if facts.time_share_to_target_range is not None:
        low, high = facts.time_share_to_target_range
        target = (trained[0] * low, trained[1] * (low + high) / 2, trained[2] * high)
    return (
        _make_interval_columns("step", "_s", step_interval_s)
        | _make_interval_columns("efficiency", "", efficiencies)
        | _make_interval_columns("train", "_s", trained)
        | _make_interval_columns("target", "_s", target)
        | _make_cost_columns("", trained, workers, facts.price_per_gpu_hour)
        | _make_cost_columns("target_", target, workers, facts.price_per_gpu_hour)
    )


def _make_cost_columns(
    prefix: str,
    times_s: Sequence[float] | None,
    workers: int,
    price_per_gpu_hour: float | None,
) -> dict[str, float | None]:
    """Return the columns on GPU-hours and cost, from low, middle and high training times.

    Args:
        prefix: Prefix of the columns' names.
        times_s: Low, middle and high seconds, or None if unknown.
        workers: Number of workers.
        price_per_gpu_hour: Price of a GPU per hour, or None.
    """
    hours = times_s and [t * workers / 3600 for t in times_s]
    cost = None
    if price_per_gpu_hour is not None and hours is not None:
        cost = [h * price_per_gpu_hour for h in hours]
    return _make_interval_columns(f"{prefix}gpu_hours", "", hours) | _make_interval_columns(
        f"{prefix}cost", "", cost
    )


def _make_interval_columns(
    name: str, unit: str, values: Sequence[float] | None
) -> dict[str, float | None]:
    keys = (f"{name}_low{unit}", f"{name}{unit}", f"{name}_high{unit}")
    return dict(zip(keys, values or (None, None, None), strict=True))


def make_refused_rows(
    evidence: ProjectionInputs, base_strategy: str, counts: Sequence[int]
) -> list[Row]:
    """Return a row of kind `refused` per worker count, for a strategy without projections.

    Args:
        evidence: Measurements of the strategy.
        base_strategy: Name of the strategy that a variant is based on.
        counts: Worker counts.
    """
    return [
        Row(
            evidence.experiment, evidence.model, evidence.strategy, base_strategy, "",
            evidence.gpu_name or "CPU", workers, None, "refused", reason=evidence.cannot_project_reason,
        )
        for workers in counts
    ]  # fmt: skip


def write_projection_csv(path: Path, rows: Sequence[Row]) -> None:
    text = io.StringIO()
    names = [f.name for f in fields(Row)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_format_csv_field(getattr(row, name)) for name in names] for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, text.getvalue())


def _format_csv_field(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
