"""Reads projection.csv, which `stratbench project` writes, for decisions and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from stratbench.extensions.projection.shown.crossings import (
    CountStepTime,
    StepTimesByStrategy,
    find_crossings,
)

#: Experiment, model and strategy of a row of projection.csv.
StrategyKey = tuple[str, str, str]
#: Lower end, middle and upper end of an interval of 80 %.
LowMiddleHigh = tuple[float, float, float]


@dataclass(frozen=True)
class Projected:
    """Projected training of a strategy on a number of workers, or why there is none.

    Attributes:
        missing_reason: Why nothing is projected, or "".
        train_range_s: Seconds of the whole training.
        step_range_s: Seconds of a step.
        efficiency_range: Step time by perfect scaling, divided by the step time.
        memory_high_bytes: Upper end of a worker's peak memory; None if unknown.
        evidence_text: Measurements on which the projection rests.
        target_range_s: Seconds until the target score of the study.
        target_gpu_hours: GPU-hours until the target score.
        target_cost: Cost until the target score, if GPUs have a price.
    """

    missing_reason: str
    train_range_s: LowMiddleHigh | None = None
    step_range_s: LowMiddleHigh | None = None
    efficiency_range: LowMiddleHigh | None = None
    memory_high_bytes: float | None = None
    evidence_text: str = ""
    target_range_s: LowMiddleHigh | None = None
    target_gpu_hours: float | None = None
    target_cost: float | None = None


#: Columns of projection.csv that contain text.
TEXTS = ("experiment", "model", "strategy", "base", "scaling", "device", "kind", "why_no_target", "evidence",
         "rule", "reason")  # fmt: skip


def read_projection_rows(path: Path) -> pd.DataFrame:
    """Return the rows of a projection.csv, in which empty texts are "".

    Raises:
        ValueError: If the file has another format.
    """
    try:
        rows = pd.read_csv(path, dtype=dict.fromkeys(TEXTS, str))
        rows[list(TEXTS)] = rows[list(TEXTS)].fillna("")
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{path}: is not a valid projection.csv ({error!r}); run `project` again"
        ) from error
    return rows


def group_step_times_by_strategy(rows: pd.DataFrame) -> StepTimesByStrategy:
    """Return the measured and projected step times in the rows of one model, by strategy."""
    return {
        str(strategy): [
            CountStepTime(
                int(r.workers), r.step_low_s, r.step_s, r.step_high_s, r.kind == "measured"
            )
            for r in group.sort_values("workers").itertuples()
        ]
        for strategy, group in rows[rows["kind"] != "refused"].groupby("strategy", sort=False)
    }


def read_crossing_sentences(path: str) -> dict[tuple[str, str], list[str]]:
    """Return sentences on where the fastest strategy changes, by experiment and model."""
    if not Path(path).exists():
        return {}
    return {
        key: [
            crossing.describe_crossing(choose_worker_noun(rows))
            for crossing in find_crossings(group_step_times_by_strategy(rows))
        ]
        for key, rows in read_projection_rows(Path(path)).groupby(
            ["experiment", "model"], sort=False
        )
    }


def choose_worker_noun(rows: pd.DataFrame) -> str:
    """Return the noun for a worker: "CPU process" for rows of CPUs, else "GPU"."""
    return "CPU process" if (rows["device"] == "CPU").all() else "GPU"


def read_projections_by_strategy(
    path: str, max_workers: int | None
) -> dict[StrategyKey, dict[int, Projected]]:
    """Return the projected trainings in a projection.csv, by strategy and number of workers.

    Only numbers up to `max_workers` are returned. The result is empty without the file or without this limit.
    """
    if max_workers is None or not Path(path).exists():
        return {}
    table = read_projection_rows(Path(path))
    rows = table[(table["workers"] <= max_workers) & (table["kind"] != "measured")]
    by_line: dict[StrategyKey, dict[int, Projected]] = {}
    for r in rows.to_dict("records"):
        line = (str(r["experiment"]), str(r["model"]), str(r["strategy"]))
        by_line.setdefault(line, {})[int(r["workers"])] = _parse_projected_row(r)
    return by_line


def _parse_projected_row(row: Mapping) -> Projected:
    if row["kind"] == "refused":
        return Projected(row["reason"])

    def read_interval_columns(name: str, unit: str = "") -> LowMiddleHigh:
        return row[f"{name}_low{unit}"], row[f"{name}{unit}"], row[f"{name}_high{unit}"]

    memory_bytes = row["memory_high_bytes"]
    return Projected(
        "",
        read_interval_columns("train", "_s"),
        read_interval_columns("step", "_s"),
        read_interval_columns("efficiency"),
        None if pd.isna(memory_bytes) else memory_bytes,
        row["evidence"],
        None if pd.isna(row["target_s"]) else read_interval_columns("target", "_s"),
        None if pd.isna(row["target_gpu_hours"]) else row["target_gpu_hours"],
        None if pd.isna(row["target_cost"]) else row["target_cost"],
    )
