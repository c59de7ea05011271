"""Reads `projection.csv`, which `plan/projection` writes, for decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from stratbench.extensions.projection.shown.crossings import Count, Lines, crossings

#: (experiment, model, strategy)
Line = tuple[str, str, str]


@dataclass(frozen=True)
class Projected:
    """Projected training of a strategy on a number of workers, or why there is none (`reason`).

    Times in s, low, middle and high of an interval of 80 %; `memory_bytes`: the upper end of a worker's peak,
    None if unknown.
    """

    reason: str
    train_s: tuple[float, float, float] | None = None
    step_s: tuple[float, float, float] | None = None
    efficiency: tuple[float, float, float] | None = None
    memory_bytes: float | None = None
    evidence: str = ""
    #: Until the score that the study asks for, with GPU-hours and, where GPUs have a price, cost.
    target_s: tuple[float, float, float] | None = None
    target_hours: float | None = None
    target_cost: float | None = None


#: The texts of the table.
TEXTS = ("experiment", "model", "strategy", "base", "scaling", "device", "kind", "why_no_target", "evidence",
         "rule", "reason")  # fmt: skip


def read_rows(path: Path) -> pd.DataFrame:
    """Return the table, whose empty texts are "". Raises ValueError for a file that is no such table."""
    try:
        rows = pd.read_csv(path, dtype=dict.fromkeys(TEXTS, str))
        rows[list(TEXTS)] = rows[list(TEXTS)].fillna("")
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{path}: is no projection.csv ({error!r}); run `project` again"
        ) from error
    return rows


def lines_of(rows: pd.DataFrame) -> Lines:
    """Return each strategy's measured or projected counts, from rows of one model."""
    return {
        str(strategy): [
            Count(int(r.workers), r.step_low_s, r.step_s, r.step_high_s, r.kind == "measured")
            for r in group.sort_values("workers").itertuples()
        ]
        for strategy, group in rows[rows["kind"] != "refused"].groupby("strategy", sort=False)
    }


def read_crossings(path: str) -> dict[tuple[str, str], list[str]]:
    """Return sentences on changes of the lead, by experiment and model."""
    if not path or not Path(path).exists():
        return {}
    return {
        key: [crossing.sentence(noun_of(rows)) for crossing in crossings(lines_of(rows))]
        for key, rows in read_rows(Path(path)).groupby(["experiment", "model"], sort=False)
    }


def noun_of(rows: pd.DataFrame) -> str:
    """Return the noun for workers in these rows."""
    return "CPU process" if (rows["device"] == "CPU").all() else "GPU"


def read_projection(path: str, max_workers: int | None) -> dict[Line, dict[int, Projected]]:
    """Return a projection.csv up to `max_workers` workers, by strategy and count.

    Return None without a path.
    """
    if not path or max_workers is None or not Path(path).exists():
        return {}
    table = read_rows(Path(path))
    rows = table[(table["workers"] <= max_workers) & (table["kind"] != "measured")]
    by_line: dict[Line, dict[int, Projected]] = {}
    for r in rows.to_dict("records"):
        line = (str(r["experiment"]), str(r["model"]), str(r["strategy"]))
        by_line.setdefault(line, {})[int(r["workers"])] = _projected(r)
    return by_line


def _projected(row: Mapping) -> Projected:
    if row["kind"] == "refused":
        return Projected(row["reason"])

    def three(name: str, unit: str = "") -> tuple[float, float, float]:
        return row[f"{name}_low{unit}"], row[f"{name}{unit}"], row[f"{name}_high{unit}"]

    memory_bytes = row["memory_high_bytes"]
    return Projected(
        "",
        three("train", "_s"),
        three("step", "_s"),
        three("efficiency"),
        None if pd.isna(memory_bytes) else memory_bytes,
        row["evidence"],
        None if pd.isna(row["target_s"]) else three("target", "_s"),
        None if pd.isna(row["target_gpu_hours"]) else row["target_gpu_hours"],
        None if pd.isna(row["target_cost"]) else row["target_cost"],
    )
