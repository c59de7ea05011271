"""The plan as a table: plan.csv has a row for each cell, and plan.json what the workflow reads."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_atomic
from stratbench.cell.text.words import MIB
from stratbench.plan.duration import Span
from stratbench.plan.footprint.traffic import PARTS
from stratbench.plan.schedule import Plan, Planned, longest_time_s
from stratbench.study import plan_file

#: The columns of plan.csv after a cell's coordinates, and where in a planned cell they are from. In a column
#: with `_mib` in its name bytes are written in MiB, and a range is two columns, `*_low` and `*_high`.
COLUMNS = {
    "state": "state",
    "why": "why",
    "precision": "subject.settings.precision",
    "global_batch": "subject.settings.global_batch",
    "per_worker_batch": "subject.settings.per_worker_batch",
    "device": "fit.device",
    "fits": "fit.fits",
    "needed_mib": "fit.needed_bytes",
    "peak_mib": "fit.peak.n_bytes",
    "peak_phase": "fit.peak.phase",
    **{f"{part}_mib": f"fit.peak.parts_bytes.{part}" for part in PARTS},
    "state_parameters_bytes": "footprint.model_states_bytes.parameters_bytes",
    "state_gradients_bytes": "footprint.model_states_bytes.gradients_bytes",
    "state_optimizer_bytes": "footprint.model_states_bytes.optimizer_bytes",
    "state_buffers_bytes": "footprint.model_states_bytes.buffers_bytes",
    "largest_per_worker_batch": "fit.largest_batch",
    "wire_bytes_per_step": "needs.wire_bytes",
    "collectives_per_step": "needs.collectives",
    "busiest_link_bytes_per_batch": "needs.link_bytes",
    "server_mib": "needs.server_bytes",
    "snapshots_mib": "needs.snapshot_bytes",
    "wire_s_per_step": "fit.link_s",
    "train_time_s": "fit.train",
    "time_source": "fit.train.source",
    "cell_time_s": "fit.total",
    "gpu_hours": "fit.gpu_hours",
    "cost": "fit.cost",
    "cut_off": "fit.cut_off",
}
#: Those after the columns of other devices.
REQUEST_COLUMNS = {
    "host_mem_mib_needed": "needs.host_bytes",
    **{
        f"slurm_{key}": f"asked.{key}"
        for key in ("nodes", "gres", "cpus", "mem_mib", "runtime_min", "workers")
    },
    "sbatch": "asked.sbatch",
}
#: Columns of ranges, which are two.
RANGES = ("wire_s_per_step", "train_time_s", "cell_time_s", "gpu_hours", "cost")


def row_of(c: Planned, others: Iterable[str]) -> dict[str, Any]:
    """A cell's row, also of what it is on `others`; a field is empty where nothing is known."""
    paths = {name: path.split(".") for name, path in COLUMNS.items()}
    for device in others:
        paths[f"fits {device}"] = ["fits_on", device, "fits"]
        paths[f"train_time_s {device}"] = ["fits_on", device, "train"]
    paths |= {name: path.split(".") for name, path in REQUEST_COLUMNS.items()}
    row = c.cell.as_dict()
    for name, path in paths.items():
        value = _at(c, path)
        if name.split()[0] in RANGES:
            low, high = (
                (value.low_s, value.high_s) if isinstance(value, Span) else value or ("", "")
            )
            row |= {
                f"{name}_{end}": x if x == "" else f"{x:.6g}"
                for end, x in (("low", low), ("high", high))
            }
        elif value is None:
            row[name] = ""
        elif "_mib" in name and path[-1] != "mem_mib":
            row[name] = round(value / MIB, 2)
        else:
            row[name] = round(value) if isinstance(value, float) else value
    return row


def _at(value: Any, path: Iterable[str]) -> Any:
    """What lies at the end of a path of attributes and keys; None where it breaks off."""
    for name in path:
        if value is None:
            return None
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    return value


def write_csv(plan: Plan, path: Path) -> None:
    """Write plan.csv."""
    write_rows([row_of(c, plan.others) for c in plan.cells], path)


def write_rows(rows: list[dict[str, Any]], path: Path, header: Iterable[str] = ()) -> None:
    """Write rows of the same columns as CSV; `header`: the columns where there is no row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0] if rows else header), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue())


def write_json(plan: Plan, path: Path) -> None:
    """Write plan.json: what the workflow reads of each cell, by the cell's path."""
    cells = {
        c.cell.path: {
            "settings": plan_file.digest_of_settings(c.subject.settings.as_json()),
            "infeasible": None if c.state != "infeasible" else c.why,
            "host_mem_mib": -(-c.needs.host_bytes // MIB),
            "cell_time_high_s": longest_time_s(c.fit),
        }
        for c in plan.cells
        if c.needs is not None
    }
    whole = {"gpu": plan.gpu, "memory_margin": plan.cluster["memory_margin"], "cells": cells}
    write_atomic(path, json.dumps(whole, indent=1) + "\n")
