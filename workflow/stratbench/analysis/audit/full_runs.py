"""Rules on full runs where a verdict's blocks timed the same strategy: both must tell the same time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from stratbench.analysis.audit.rule import Evidence, Found, coordinates_of_cell, rule
from stratbench.cell.blocks import trained_with
from stratbench.cell.record import Record
from stratbench.cell.segments import MOST_OFF, value_of_segments


@rule(
    "full-run-against-steps",
    "doubtful",
    "time",
    "A full run should take as long as its steps do in the blocks of the verdict. A difference of more "
    "than 3 % means that one of them is no measure of the other: a device that heats up or slows down "
    "over minutes, input that runs dry, other load, or segments that are too short.",
)
def full_run_against_steps(evidence: Evidence) -> Iterator[Found]:
    for record in evidence.records:
        if record["status"] != "ok" or not record["time"]["train_time_s"]:
            continue
        logs = [log for block in evidence.blocks if (log := log_step_s(block, record)) is not None]
        steps = steps_of(record)
        if not logs or not steps:
            continue
        by_steps_s = steps * math.exp(statistics.fmean(logs))
        off = math.log(record["time"]["train_time_s"] / by_steps_s)
        if abs(off) > MOST_OFF:
            yield Found(
                coordinates_of_cell(record["cell"]),
                f"{record['time']['train_time_s']:.4g} s; {steps} steps of "
                f"{1e3 * by_steps_s / steps:.4g} ms in {len(logs)} blocks make {by_steps_s:.4g} s: "
                f"{math.expm1(off):+.1%}",
            )


def steps_of(record: Record) -> int:
    """The steps that a cell trained."""
    given = record["settings"].get("steps")
    return given or record["batch"]["steps_per_epoch"] * len(record["time"]["epoch_times_s"])


def log_step_s(block: dict[str, Any], record: Record) -> float | None:
    """What a block says of a record's cell, if it timed the same strategy with the same settings."""
    cell = record["cell"]
    strategy = cell["strategy"]
    if any(block[key] != cell[key] for key in ("experiment", "model", "gpus")):
        return None
    trained = block["trained"].get(strategy)
    if trained is None or trained_with(trained) != trained_with(record["settings"]):
        return None
    counted = [s for s in block["segments"] if s["strategy"] == strategy and s["pass"] != "burn-in"]
    if len(counted) < 2 or any(s["status"] != "ok" for s in counted):
        return None
    return value_of_segments([math.log(s["mean_step_s"]) for s in counted])
