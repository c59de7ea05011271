"""What `projection.csv`, which `plan/projection` writes, says of the workers that a decision asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

#: (experiment, model, strategy)
Line = tuple[str, str, str]


@dataclass(frozen=True)
class Projected:
    """The training of a strategy on a number of workers, or why nothing is said (`why`).

    Times in s, low, middle and high of an interval of 80 %; `memory_bytes`: the upper end of a worker's
    peak, None where it is not known.
    """

    why: str
    train_s: tuple[float, float, float] | None = None
    step_s: tuple[float, float, float] | None = None
    efficiency: tuple[float, float, float] | None = None
    memory_bytes: float | None = None
    evidence: str = ""


def read_projection(path: str, workers: int | None) -> dict[Line, Projected]:
    """The rows of a projection.csv for so many workers, by strategy; none where `path` is empty."""
    if not path or workers is None or not Path(path).exists():
        return {}
    table = pd.read_csv(path, converters={"why": str, "evidence": str})
    rows = table[(table["workers"] == workers) & (table["kind"] != "measured")]
    return {
        (str(r["experiment"]), str(r["model"]), str(r["strategy"])): _projected(r)
        for r in rows.to_dict("records")
    }


def _projected(row: Mapping) -> Projected:
    if row["kind"] == "refused":
        return Projected(row["why"])

    def three(name: str, unit: str = "") -> tuple[float, float, float]:
        return row[f"{name}_low{unit}"], row[f"{name}{unit}"], row[f"{name}_high{unit}"]

    most = row["memory_high_bytes"]
    return Projected(
        "",
        three("train", "_s"),
        three("step", "_s"),
        three("efficiency"),
        None if pd.isna(most) else most,
        row["evidence"],
    )
