"""Writes plan.csv with a row per cell, and plan.json with the values that the workflow reads."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stratbench.cell.files import write_text_atomically
from stratbench.cell.text.words import MIB, format_bytes, format_seconds
from stratbench.extensions.plan.footprint.traffic import PARTS
from stratbench.extensions.plan.quantities import format_time_range, sort_by_compared_time
from stratbench.extensions.plan.schedule import Plan, PlannedCell, get_max_cell_time_s
from stratbench.study import plan_file


class Unit(NamedTuple):
    """How plan.csv and texts show one kind of quantity.

    Attributes:
        csv: Returns the number for plan.csv.
        text: Returns the value as text.
        ends: Suffixes of the column names, one for each end of a range.
    """

    csv: Callable[[Any], Any] = lambda value: value
    text: Callable[[Any], str] = str
    ends: tuple[str, ...] = ("",)


PLAIN = Unit()
BYTES = Unit(round, format_bytes)
EACH_IN_MIB = Unit(
    lambda each: " ".join(f"{n_bytes / MIB:.2f}" for n_bytes in each),
    lambda each: ", ".join(map(format_bytes, each)),
)
IN_MIB = Unit(lambda n_bytes: round(n_bytes / MIB, 2), format_bytes)
SECONDS = Unit(lambda value: f"{value:.6g}", format_seconds)
RANGE = Unit(lambda end: f"{end:.6g}", format_time_range, ("_low", "_high"))


class PlanColumn(NamedTuple):
    """A column of plan.csv: the attribute path of its value in the plan, and its format."""

    path: str
    unit: Unit = PLAIN
    device: str | None = None

    def get_value(self, c: PlannedCell) -> Any:
        """Return the value of a cell, or None if it is unknown."""
        value: Any = c if self.device is None else c.fits_on.get(self.device)
        for name in self.path.split("."):
            if value is None:
                return None
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
        return value

    def format_value(self, c: PlannedCell) -> str:
        """Return the value of a cell as text, or "" if it is unknown."""
        value = self.get_value(c)
        return "" if value is None else self.unit.text(value)


#: Columns of plan.csv after the cell's coordinates. The text and the page show the same quantities.
COLUMNS = {
    "state": PlanColumn("state"),
    "reason": PlanColumn("reason"),
    "precision": PlanColumn("subject.settings.precision"),
    "global_batch": PlanColumn("subject.settings.global_batch"),
    "per_worker_batch": PlanColumn("subject.settings.per_worker_batch"),
    "device": PlanColumn("fit.device"),
    "fits": PlanColumn("fit.memory_verdict"),
    "needed_mib": PlanColumn("fit.needed_bytes", IN_MIB),
    "peak_mib": PlanColumn("fit.peak.n_bytes", IN_MIB),
    "peak_phase": PlanColumn("fit.peak.phase"),
    "stage_peaks_mib": PlanColumn("fit.stage_peaks_bytes", EACH_IN_MIB),
    **{f"{part}_mib": PlanColumn(f"fit.peak.parts_bytes.{part}", IN_MIB) for part in PARTS},
    **{
        f"state_{state}_bytes": PlanColumn(f"footprint.model_states_bytes.{state}_bytes", BYTES)
        for state in ("parameters", "gradients", "optimizer", "buffers")
    },
    "largest_per_worker_batch": PlanColumn("fit.largest_batch"),
    "wire_bytes_per_step": PlanColumn("needs.wire_bytes", BYTES),
    "collectives_per_step": PlanColumn("needs.collectives"),
    "busiest_link_bytes_per_batch": PlanColumn("needs.link_bytes", BYTES),
    "server_mib": PlanColumn("needs.server_bytes", IN_MIB),
    "snapshots_mib": PlanColumn("needs.snapshot_bytes", IN_MIB),
    "wire_s_per_step": PlanColumn("fit.sending_s", RANGE),
    "compared_time_s": PlanColumn("fit.usual_s", SECONDS),
    "train_time_s": PlanColumn("fit.train_span", RANGE),
    "time_source": PlanColumn("fit.train_span.source"),
    "cell_time_s": PlanColumn("fit.total_span", RANGE),
    "gpu_hours": PlanColumn("fit.gpu_hours", RANGE),
    "cost": PlanColumn("fit.cost", RANGE),
    "cut_off": PlanColumn("fit.time_limit_verdict"),
}
#: Last columns of plan.csv: what the cell's job requests from SLURM.
REQUEST_COLUMNS = {
    "host_mem_mib_needed": PlanColumn("needs.host_bytes", IN_MIB),
    **{
        f"slurm_{key}": PlanColumn(f"job_request.{key}")
        for key in ("nodes", "gres", "cpus", "mem_mib", "runtime_min", "workers")
    },
    "sbatch": PlanColumn("job_request.sbatch_command"),
}


def make_plan_row(c: PlannedCell, other_devices: Iterable[str]) -> dict[str, Any]:
    """Return a cell's row of plan.csv, with its fit and time also on other devices.

    Unknown values are empty.
    """
    columns = dict(COLUMNS)
    for device in other_devices:
        columns[f"fits {device}"] = PlanColumn("memory_verdict", PLAIN, device)
        columns[f"train_time_s {device}"] = PlanColumn("train_span", RANGE, device)
    row = c.cell.as_dict()
    for name, column in (columns | REQUEST_COLUMNS).items():
        value, unit = column.get_value(c), column.unit
        is_pair = len(unit.ends) > 1 and value is not None
        values = value if is_pair else [value] * len(unit.ends)
        for end, number in zip(unit.ends, values, strict=True):
            row[name + end] = "" if number is None else unit.csv(number)
    return row


def write_plan_csv(plan: Plan, path: Path) -> None:
    """Write plan.csv, with a row per cell."""
    write_csv_rows(
        [make_plan_row(c, plan.compared_devices) for c in sort_by_compared_time(plan.cells)], path
    )


def write_csv_rows(rows: list[dict[str, Any]], path: Path, header: Iterable[str] = ()) -> None:
    """Write rows with equal columns as CSV, or the `header` alone without rows."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0] if rows else header), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text_atomically(path, text.getvalue())


def write_plan_json(plan: Plan, path: Path) -> None:
    """Write plan.json: the values that the workflow reads, by the path of each cell."""
    cells = {
        c.cell.path: {
            "settings": plan_file.compute_settings_digest(c.subject.settings),
            "infeasible": None if c.state != "infeasible" else c.reason,
            "host_mem_mib": c.needs.host_mib,
            "servers_mem_mib": c.needs.servers_host_mib,
            "cell_time_high_s": get_max_cell_time_s(c.fit),
        }
        for c in plan.cells
        if c.needs is not None
    }
    whole = {"gpu": plan.gpu, "cells": cells}
    write_text_atomically(path, json.dumps(whole, indent=1) + "\n")
