"""Converts each record to a run of an experiment tracker, with parameters, metrics, tags and times."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pandas as pd

from stratbench.analysis.records.columns import CELL_COLUMNS, COORDINATES, EPOCH_BY_NAME, Column
from stratbench.cell.coordinates import Cell
from stratbench.extensions.sets.reading import ResultSet

ParameterValue = str | int | float | bool
#: Columns of cells.csv whose texts are tags of a run.
TAGS = (
    *("status", "reason", "device_kind", "device_name", "host", "cpu_model", "torch", "driver"),
    *("revision", "task", "score_name", "score_unit", "initial_weights_sha256", "data_sha256"),
)


@dataclass(frozen=True)
class ExportedEpoch:
    """An epoch of a run: its number, the training time at its end, and its metrics."""

    epoch_number: int
    end_train_time_s: float
    metrics_by_name: dict[str, float]


@dataclass(frozen=True)
class ExportedRun:
    """A run of an experiment tracker with the values of one record."""

    cell: Cell
    #: Coordinates and settings of the cell. An option of the strategy has the name `options.NAME`.
    parameters_by_name: dict[str, ParameterValue]
    tags_by_name: dict[str, str]
    #: Measured values of the whole cell, with the names and units of cells.csv.
    metrics_by_name: dict[str, float]
    epochs: list[ExportedEpoch]
    #: Start of the cell in seconds since 1970.
    started_unix_s: float
    #: End of the cell in seconds since 1970.
    finished_unix_s: float

    @property
    def has_ok_status(self) -> bool:
        """Whether the cell of the run has the status `ok`."""
        return self.tags_by_name["status"] == "ok"


def iter_exported_runs(result_set: ResultSet) -> Iterator[ExportedRun]:
    """Yield a run for each record of a set, and print the progress."""
    records = {Cell(**record["cell"]): record for record in result_set.records}
    epochs = dict(list(result_set.epochs.groupby(list(COORDINATES), sort=False)))
    measured = [
        column.name
        for column in CELL_COLUMNS
        if column.value_kind == "number"
        and column.name not in COORDINATES
        and not _is_setting_column(column)
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
            parameters_by_name=cell.as_dict() | dict(_flatten_settings(record["settings"])),
            tags_by_name={name: str(row[name]) for name in TAGS if pd.notna(row[name])},
            metrics_by_name={name: float(row[name]) for name in measured if pd.notna(row[name])},
            epochs=[
                ExportedEpoch(
                    int(epoch["epoch"]),
                    float(epoch["train_time_s"]),
                    {n: float(epoch[n]) for n in metrics_of_epoch if pd.notna(epoch[n])},
                )
                for epoch in rows.to_dict("records")
            ],
            started_unix_s=_parse_time_unix_s(record, "started"),
            finished_unix_s=_parse_time_unix_s(record, "finished"),
        )


def _is_setting_column(column: Column) -> bool:
    return isinstance(column.source, str) and column.source.startswith("settings.")


def _flatten_settings(
    settings: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, ParameterValue]]:
    """Yield the name and value of each setting. Nested settings have dotted names; nulls are left out."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _flatten_settings(value, f"{prefix}{key}.")
        elif isinstance(value, str | int | float | bool):
            yield f"{prefix}{key}", value
        elif value is not None:
            yield f"{prefix}{key}", str(value)


def _parse_time_unix_s(record: dict[str, Any], time_field: str) -> float:
    """Return a time in a record's provenance in seconds since 1970, or 0 without it.

    Args:
        record: The record.
        time_field: Field of the provenance: `started` or `finished`.
    """
    text = record["provenance"].get(time_field)
    return datetime.fromisoformat(text).timestamp() if text else 0.0
