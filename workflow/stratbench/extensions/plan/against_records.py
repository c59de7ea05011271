"""Compares predictions with the records of finished cells: memory, bytes sent and time.

python -m stratbench.extensions.plan.against_records --config JSON --out prediction.csv
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.text.words import MIB
from stratbench.extensions.plan.check import check_study
from stratbench.extensions.plan.footprint.footprint import Footprint, MemoryPeak
from stratbench.extensions.plan.needs import (
    CellToPlan,
    compute_mean_wire_bytes_per_step,
    compute_sent_bytes_per_batch,
)
from stratbench.extensions.plan.pages.table import write_csv_rows
from stratbench.extensions.plan.schedule import Plan, PlannedCell, make_plan, read_records_by_cell
from stratbench.study.config import config as configuration

#: Values of a record's `memory.method` for peaks that were measured on a CPU.
CPU_METHODS = ("vmhwm", "vmhwm-since-process-start", "maxrss-since-process-start")


def make_prediction_row(c: PlannedCell, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of prediction.csv of one finished cell.

    An error is (predicted / measured - 1) in percent. The measured peak is that of the rank that used most
    (`get_measured_peak_bytes`). The predicted time follows from the device alone, without records.
    """
    s, footprint, predicted = c.subject, c.footprint, c.fit.peak
    base_bytes = compute_bytes_before_first_step(footprint, predicted)
    span = c.fit.device_rate_span
    train_s = record["time"]["train_time_s"]
    memory = record["memory"]
    row: dict[str, Any] = s.cell.as_dict() | {
        "status": record["status"],
        "precision": s.settings.precision,
        "per_worker_batch": s.settings.per_worker_batch,
        "method": memory["method"],
        "resident_mib_measured": _convert_to_mib(memory["peak_bytes"]),
    }
    pairs = {
        "peak_mib": (predicted.n_bytes, get_measured_peak_bytes(memory, base_bytes)),
        "over_base_mib": (predicted.n_bytes - base_bytes, get_measured_step_growth_bytes(memory)),
        "base_mib": (base_bytes, get_measured_bytes_between_steps(record)),
        "states_bytes": (
            max(sum(f.model_states_bytes.values()) for f in footprint.footprints_of_stages),
            _sum_bytes_or_none(memory["model_states"]),
        ),
        "sent_bytes": (
            predict_recorded_sent_bytes_per_step(s, footprint),
            (record.get("communication") or {}).get("sent_bytes_per_step"),
        ),
    }
    for name, pair in pairs.items():
        what, _, unit = name.rpartition("_")
        ours, theirs = map(_convert_to_mib, pair) if unit == "mib" else pair
        row |= {f"{name}_predicted": ours, f"{name}_measured": theirs}
        row[f"{what}_error_percent"] = _compute_relative_error(ours, theirs)
    return row | {
        "device": c.fit.device,
        "train_s_predicted_low": span.low_s if span else None,
        "train_s_predicted_high": span.high_s if span else None,
        "train_s_measured": train_s,
        "train_s_in_range": span.low_s <= train_s <= span.high_s if span and train_s else None,
    }


def make_prediction_rows(
    plan: Plan, records: Mapping[Cell, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row of prediction.csv for every cell with a prediction and a measured peak.

    The peak is that of the cell's record.
    """
    return [
        make_prediction_row(c, records[c.cell])
        for c in plan.cells
        if c.cell in records and c.footprint and records[c.cell]["memory"]["peak_bytes"]
    ]


def compute_bytes_before_first_step(footprint: Footprint, predicted_peak: MemoryPeak) -> int:
    """Return the predicted bytes on a worker before the first step, data set included.

    Records measure the growth of memory from there.
    """
    between_bytes = (
        sum(footprint.between_steps_bytes.values()) - footprint.bytes_created_by_first_step
    )
    # The warm-up already makes the receive buffers of a pipeline stage, whose size follows from the batch.
    return (
        between_bytes
        + predicted_peak.parts_bytes["data"]
        + predicted_peak.parts_bytes.get("received", 0)
    )


def get_measured_peak_bytes(memory_record: Mapping[str, Any], base_bytes: int) -> int | None:
    """Return the peak memory of training in bytes, from one rank's memory record.

    On a GPU it is the memory requested from the allocator, without cuBLAS's workspaces. Allocators that do
    not count requests only have the allocated memory. On a CPU a process also contains its libraries, which
    grow over time. There the peak is `base_bytes` (model states and data set, known exactly) plus the growth
    of resident memory in a step.
    """
    if memory_record["method"] not in CPU_METHODS:
        peak_bytes = memory_record.get("requested_peak_bytes", memory_record["peak_bytes"])
        return None if peak_bytes is None else peak_bytes - memory_record.get("cublas_bytes", 0)
    added_bytes = memory_record["peak_over_base_bytes"]
    return None if added_bytes is None else base_bytes + added_bytes


def get_measured_step_growth_bytes(memory_record: Mapping[str, Any]) -> int | None:
    """Return the measured growth of memory in a step in bytes, without cuBLAS's workspaces.

    The result is None if the record lacks the growth.
    """
    added_bytes = memory_record["peak_over_base_bytes"]
    return None if added_bytes is None else added_bytes - memory_record.get("cublas_bytes", 0)


def get_measured_bytes_between_steps(record: Mapping[str, Any]) -> int | None:
    """Return a worker's measured bytes between two steps, minus those before the model existed.

    The largest value of all workers counts. The result is None if the record lacks these bytes.
    """
    bases = [
        w["memory"]["base_bytes"] - w["memory"].get("idle_bytes", 0)
        for w in record["workers"]
        if w["memory"] and "base_bytes" in w["memory"]
    ]
    return max(bases, default=None)


def predict_recorded_sent_bytes_per_step(s: CellToPlan, footprint: Footprint) -> float:
    """Return the predicted bytes that a worker sends per step, counted as records count.

    Records count by the ring algorithms, whatever the backend. For a worker of a server, a step is one
    push. The loss scaler's flag is left out, unless the collectives of a step were counted one by one.
    """
    if s.served:
        return compute_sent_bytes_per_batch(s, footprint) / s.steps_per_batch
    least = 0 if s.strategy.divides_network else _FLAG_BYTES
    return fmean(
        compute_mean_wire_bytes_per_step(
            s, f, [c for c in f.collectives if c[1] > least or any(c[3:4])], on_gloo=False
        )
        for f in footprint.footprints_of_stages
    )


#: Bytes of the loss scaler's flag for overflows, which is one float.
_FLAG_BYTES = 4


def _convert_to_mib(n_bytes: float | None) -> float | None:
    return None if n_bytes is None else round(n_bytes / MIB, 2)


def _sum_bytes_or_none(bytes_by_part: Mapping[str, int] | None) -> int | None:
    return None if bytes_by_part is None else sum(bytes_by_part.values())


def _compute_relative_error(predicted: float | None, measured: float | None) -> float | None:
    if predicted is None or measured is None:
        return None
    if not measured:
        return 0.0 if not predicted else None
    return round(100 * (predicted / measured - 1), 2)


def main() -> None:
    """Run the command line that compares predictions with records.

    Missing footprints are made, as in `snakemake plan`.
    """
    parser = argparse.ArgumentParser(
        prog="stratbench.extensions.plan.against_records", description=__doc__
    )
    parser.add_argument("--config", required=True, help="the whole config as JSON text")
    parser.add_argument(
        "--out", type=Path, required=True, help="CSV file to write, with one row per finished cell"
    )
    args = parser.parse_args()
    config, study = configuration.load_config(json.loads(args.config))
    records = read_records_by_cell(study, config["results"])
    plan = make_plan(config, check_study(config, study), records)
    rows = make_prediction_rows(plan, records)
    write_csv_rows(rows, args.out, [f.name for f in fields(Cell)])
    print(f"{len(rows)} of {len(records)} records compared with their prediction")


if __name__ == "__main__":
    main()
