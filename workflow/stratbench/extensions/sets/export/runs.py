"""The records of a set as runs of experiment trackers: parameters, metrics, tags, times."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pandas as pd

from stratbench.analysis.records.columns import CELL_COLUMNS, COORDINATES, EPOCH_BY_NAME
from stratbench.cell.coordinates import Cell
from stratbench.extensions.sets.reading import ResultSet

Value = str | int | float | bool
#: Text columns that say how and where a cell ended: tags of its run.
TAGS = (
    *("status", "reason", "device_kind", "device_name", "host", "cpu_model", "torch", "driver"),
    *("revision", "task", "score_name", "score_unit", "initial_weights_sha256", "data_sha256"),
)


@dataclass(frozen=True)
class Epoch:
    """An epoch: its number from 1, end in seconds of training time, and metrics."""

    number: int
    end_s: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class ExportedRun:
    """A record as a run."""

    cell: Cell
    #: Coordinates and settings; options as `options.name`.
    parameters: dict[str, Value]
    tags: dict[str, str]
    #: Measured values, with the names and units of cells.csv.
    metrics: dict[str, float]
    epochs: list[Epoch]
    #: Seconds since 1970.
    started_s: float
    finished_s: float

    @property
    def is_ok(self) -> bool:
        return self.tags["status"] == "ok"


def runs_of(result_set: ResultSet) -> Iterator[ExportedRun]:
    """Yield a run for each record of a set in the order of its cells. Print progress."""
    records = {Cell(**record["cell"]): record for record in result_set.records}
    epochs = dict(list(result_set.epochs.groupby(list(COORDINATES), sort=False)))
    measured = [
        column.name
        for column in CELL_COLUMNS
        if column.kind == "number" and column.name not in COORDINATES and not _is_setting(column)
    ]
    metrics_of_epoch = [
        name
        for name, column in EPOCH_BY_NAME.items()
        if name not in (*COORDINATES, "epoch", "train_time_s")
    ]
    done, next_line_s = 0, time.monotonic() + 3
    for row in result_set.cells.to_dict("records"):
        if time.monotonic() > next_line_s:
            print(f"wrote {done} of {len(records)} runs", file=sys.stderr, flush=True)
            next_line_s += 3
        cell = Cell(**{name: row[name] for name in COORDINATES})
        if cell not in records:
            continue
        done += 1
        record = records[cell]
        rows = epochs.get(tuple(vars(cell).values()), pd.DataFrame())
        yield ExportedRun(
            cell=cell,
            parameters=cell.as_dict() | dict(_flat(record["settings"])),
            tags={name: str(row[name]) for name in TAGS if pd.notna(row[name])},
            metrics={name: float(row[name]) for name in measured if pd.notna(row[name])},
            epochs=[
                Epoch(
                    int(epoch["epoch"]),
                    float(epoch["train_time_s"]),
                    {n: float(epoch[n]) for n in metrics_of_epoch if pd.notna(epoch[n])},
                )
                for epoch in rows.to_dict("records")
            ],
            started_s=_seconds(record, "started"),
            finished_s=_seconds(record, "finished"),
        )


def _is_setting(column: Any) -> bool:
    return isinstance(column.source, str) and column.source.startswith("settings.")


def _flat(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Value]]:
    """Nested settings with dotted names; null values are left out."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        elif isinstance(value, str | int | float | bool):
            yield f"{above}{key}", value
        elif value is not None:
            yield f"{above}{key}", str(value)


def _seconds(record: dict[str, Any], name: str) -> float:
    """Return a time in a record's provenance, or 0 if it is missing."""
    text = record["provenance"].get(name)
    return datetime.fromisoformat(text).timestamp() if text else 0.0
