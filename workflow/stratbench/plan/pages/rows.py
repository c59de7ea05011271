"""Writes the plan as files: plan.csv with a row for each cell, and plan.json for the workflow."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_atomic
from stratbench.cell.text.words import MIB
from stratbench.plan.footprint.traffic import PARTS
from stratbench.plan.schedule import Plan, Planned, longest_time_s
from stratbench.study import plan_file

#: Of a request, what has a column.
ASKED = ("nodes", "gres", "cpus", "mem_mib", "runtime_min")


def plan_row(plan: Plan, c: Planned) -> dict[str, Any]:
    """One cell's row of plan.csv; a field is empty where nothing is known."""
    s = c.subject.settings
    main = c.fit
    fields: dict[str, Any] = c.cell.as_dict() | {
        "state": c.state,
        "why": c.why,
        "precision": s.precision,
        "global_batch": s.global_batch,
        "per_worker_batch": s.per_worker_batch,
        "device": main.device if main else "",
        "fits": main.fits if main else "",
        "needed_mib": _mib(c.needed_bytes) if c.footprint else "",
        "peak_mib": _mib(c.peak.n_bytes) if c.peak else "",
        "peak_phase": c.peak.phase if c.peak else "",
    }
    for part in PARTS:
        fields[f"{part}_mib"] = _mib(c.peak.parts_bytes.get(part, 0)) if c.peak else ""
    states = c.footprint.model_states_bytes if c.footprint else {}
    for key in ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "buffers_bytes"):
        fields[f"state_{key}"] = states.get(key, "")
    fields |= {
        "largest_per_worker_batch": main.largest_batch if main else "",
        "wire_bytes_per_step": round(c.wire_bytes) if c.footprint else "",
        "collectives_per_step": c.collectives if c.footprint else "",
        "busiest_link_bytes_per_batch": round(c.link_bytes) if c.link_bytes else "",
        "server_mib": _mib(c.server_bytes) if c.server_bytes else "",
        "snapshots_mib": _mib(c.snapshot_bytes) if c.snapshot_bytes else "",
    }
    link = main.link_s if main else None
    fields |= _span("wire_s_per_step", link)
    fields |= _span(
        "train_time_s", (main.train.low_s, main.train.high_s) if main and main.train else None
    )
    fields["time_source"] = main.train.source if main and main.train else ""
    total = (main.total.low_s, main.total.high_s) if main and main.total else None
    fields |= _span("cell_time_s", total)
    gpu_hours = tuple(t * c.cell.gpus / 3600 for t in total) if total else None
    fields |= _span("gpu_hours", gpu_hours)
    price = plan.cluster["price_per_gpu_hour"]
    costs = tuple(h * price for h in gpu_hours) if gpu_hours and price is not None else None
    fields |= _span("cost", costs)
    fields["cut_off"] = main.cut_off if main else ""
    for name in plan.others:
        fit = c.fits_on.get(name)
        fields[f"fits {name}"] = fit.fits if fit else ""
        fields |= _span(
            f"train_time_s {name}",
            (fit.train.low_s, fit.train.high_s) if fit and fit.train else None,
        )
    return fields | {
        "host_mem_mib_needed": _mib(c.host_bytes) if c.footprint else "",
        **{f"slurm_{key}": getattr(c.asked, key) for key in ASKED},
        "sbatch": c.asked.sbatch,
    }


def _mib(n_bytes: float) -> float:
    return round(n_bytes / MIB, 2)


def _span(name: str, span: tuple[float, float] | None) -> dict[str, Any]:
    low, high = (f"{x:.6g}" for x in span) if span else ("", "")
    return {f"{name}_low": low, f"{name}_high": high}


def write_csv(plan: Plan, path: Path) -> list[dict[str, Any]]:
    """Write plan.csv, and return its rows."""
    rows = [plan_row(plan, c) for c in plan.cells]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue())
    return rows


def write_json(plan: Plan, path: Path) -> None:
    """Write plan.json: what the workflow reads of each cell, by the cell's path."""
    cells = {
        c.cell.path: {
            "settings": plan_file.digest_of_settings(c.subject.settings.as_json()),
            "infeasible": None if c.state != "infeasible" else c.why,
            "host_mem_mib": -(-c.host_bytes // MIB),
            "cell_time_high_s": longest_time_s(c.fit),
        }
        for c in plan.cells
        if c.footprint is not None
    }
    whole = {"gpu": plan.gpu, "memory_margin": plan.cluster["memory_margin"], "cells": cells}
    write_atomic(path, json.dumps(whole, indent=1) + "\n")
