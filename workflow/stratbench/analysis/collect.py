"""Gathers the records of a study into two flat files: a row for each cell, a row for each epoch.

Every expected cell gets its row, in the order of the config: a cell without a record is `missing`,
or `error` where a failure left its evidence, and is never left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as field_of
from pathlib import Path
from typing import Any

from stratbench import record
from stratbench.cells import Cell
from stratbench.config import Settings, Study

#: Statuses that records do not have: no record yet, or a failure or an unreadable record in its
#: place.
WITHOUT_RECORD = ("missing", "error")
COORDINATES = ("study", "experiment", "strategy", "model", "dataset", "gpus", "repeat")
#: Columns of cells.csv that are single fields of a record: the column and the field's path.
FIELDS = {
    "status": "status",
    "reason": "reason",
    "strategy_base": "strategy.name",
    "strategy_kind": "strategy.kind",
    "train_time_s": "time.train_time_s",
    "throughput_samples_per_s": "time.throughput_samples_per_s",
    "accuracy_final": "accuracy.final",
    "accuracy_best": "accuracy.best",
    "evaluated_on": "accuracy.evaluated_on",
    "peak_memory_bytes": "memory.peak_bytes",
    "peak_over_base_bytes": "memory.peak_over_base_bytes",
    "memory_method": "memory.method",
    "parameters_bytes": "memory.model_states.parameters_bytes",
    "gradients_bytes": "memory.model_states.gradients_bytes",
    "optimizer_bytes": "memory.model_states.optimizer_bytes",
    "buffers_bytes": "memory.model_states.buffers_bytes",
    "step_p50_ms": "time.step_ms.p50",
    "step_p90_ms": "time.step_ms.p90",
    "step_p99_ms": "time.step_ms.p99",
    "step_mean_ms": "time.step_ms.mean",
    "data_ms": "time.breakdown_ms.data",
    "setup_s": "time.setup_s",
    "data_s": "time.data_s",
    "warmup_s": "time.warmup_s",
    "eval_s": "time.eval_s",
    "total_s": "time.total_s",
    "time_limit_s": "time.time_limit_s",
    "achieved_flops_per_s": "compute.achieved_flops_per_s",
    "mfu": "compute.mfu",
    "sent_bytes_per_step": "communication.sent_bytes_per_step",
    "received_bytes_per_step": "communication.received_bytes_per_step",
    "exposed_communication_ms": "communication.exposed_ms",
    "implied_bytes_per_s": "communication.implied_bytes_per_s",
    "busiest_server_bytes_per_s": "communication.busiest_server_bytes_per_s",
    "train_joules": "energy.train_joules",
    "joules_per_sample": "energy.joules_per_sample",
    "profile_trace": "profile.trace",
    "samples_seen": "batch.samples_seen",
    "updates_applied": "batch.updates_applied",
    "global_batch": "batch.global_batch",
    "per_worker_batch": "batch.per_worker_batch",
    "steps_per_epoch": "batch.steps_per_epoch",
    "epochs": "settings.epochs",
    "precision": "settings.precision",
    "compute_dtype": "strategy.details.compute_dtype",
    "model_parameters": "model.parameters",
    "initial_weights_sha256": "model.initial_weights_sha256",
    "data_sha256": "data.sha256",
    "synthetic_data": "data.synthetic",
    "test_samples": "data.test_samples",
}
STATE_COLUMNS = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "buffers_bytes")
#: Columns worked out from several fields, in `derived`.
DERIVED = (
    "model_states_bytes",
    "target_accuracy",
    "time_to_target_s",
    "device_kind",
    "device_name",
    "host",
    "cpu_model",
    "cpu_cores",
    "torch",
    "driver",
    "revision",
    "other_cpu_cores",
    "slowdown",
    "throttled_share",
    "utilisation_pct",
    "breakdown_ms",
    "staleness",
    "servers",
    "server_bytes",
    "server_wait_s",
    "server_lost",
    "record_path",
    "log_path",
)
COLUMNS = (*COORDINATES, *FIELDS, *DERIVED)
EPOCH_FIELDS = ("epoch", "train_time_s", "train_loss", "test_loss", "accuracy")
EPOCH_COLUMNS = (*COORDINATES, *EPOCH_FIELDS)
#: What the launcher leaves in a cell's log folder when the cell failed.
FAILURE_FILE = "failure.json"
#: Throttle reasons of a timeline that mean a GPU too hot or short of power, not a normal limit.
SLOWED = ("hw_slowdown", "thermal_slowdown", "power_brake")

Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What the config says beside the cells.

    Why some are skipped (by path), accuracies to reach (by experiment), and the study, by whose
    settings every record must have been trained; None: they are not looked at.
    """

    skipped: Mapping[str, str] = field_of(default_factory=dict)
    targets: Mapping[str, float] = field_of(default_factory=dict)
    study: Study | None = None


def field(value: Any, path: str) -> Any:
    """The value at a dotted path of nested dicts, or None where any part of it is absent."""
    for key in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def of_workers(rec: record.Record, path: str) -> list[str]:
    """The distinct values of a provenance field over all workers."""
    values = (field(worker["provenance"], path) for worker in rec["workers"])
    return sorted({str(value) for value in values if value is not None})


def usable_cores(rec: record.Record) -> float | None:
    """CPU cores that the workers may use together: of each host, its affinity within its quota."""
    hosts: dict[str, tuple[set[int], float]] = {}
    for worker in rec["workers"]:
        name = field(worker["provenance"], "host.name")
        affinity = set(field(worker["provenance"], "host.affinity") or ())
        quota = field(worker["provenance"], "host.cpu_quota_cores") or math.inf
        hosts[name] = (hosts.get(name, (set(), 0.0))[0] | affinity, quota)
    total = sum(min(len(cores), quota) for cores, quota in hosts.values())
    return round(total, 1) or None


def derived(rec: record.Record) -> Row:
    """Columns worked out from several fields of a record."""
    states = [field(rec, f"memory.model_states.{column}") for column in STATE_COLUMNS]
    kinds = {device.partition(":")[0] for device in of_workers(rec, "device")}
    kinds = kinds or {field(rec, "provenance.device") or ""}  # no worker lived to tell
    cpu_models = of_workers(rec, "host.cpu_model")
    nodes = (field(rec, "provenance.busy_at_start") or {}).values()
    busy = [node["other_cpu_cores"] for node in nodes if "other_cpu_cores" in node]
    return {
        "model_states_bytes": sum(s or 0 for s in states) if any(states) else None,
        "device_kind": "; ".join(sorted(kinds)),
        "device_name": "; ".join(of_workers(rec, "gpu.name") or cpu_models),
        "host": "; ".join(of_workers(rec, "host.name")),
        "cpu_model": "; ".join(cpu_models),
        "cpu_cores": usable_cores(rec),
        "torch": "; ".join(of_workers(rec, "software.torch")),
        "driver": "; ".join(of_workers(rec, "driver")),
        "revision": revision(rec),
        "other_cpu_cores": max(busy, default=None),
        "slowdown": slowdown(field(rec, "settings.slowdown")),
        "breakdown_ms": as_json(field(rec, "time.breakdown_ms")),
        "staleness": as_json(staleness(rec)),
    } | server_facts(rec)


def as_json(value: Any) -> str | None:
    """What a column cannot hold as a number; None where there is nothing."""
    return json.dumps(value) if value else None


def server_facts(rec: record.Record) -> Row:
    """How many servers, what they moved together, how long they held workers back, whom they lost."""
    servers = field(rec, "server.servers")
    if not servers:
        return {}
    links = [link for server in servers for link in server.get("workers") or ()]
    lost = {str(worker) for server in servers for worker in server.get("lost") or ()}
    return {
        "servers": len(servers),
        "server_bytes": sum(link["bytes_in"] + link["bytes_out"] for link in links),
        "server_wait_s": sum(link.get("wait_s") or 0.0 for link in links),
        "server_lost": len(lost),
    }


def staleness(rec: record.Record) -> list[int]:
    """Pushes by staleness (the index: updates between a push and what it was computed from)."""
    total: list[int] = []
    for server in field(rec, "server.servers") or ():
        counts = server.get("staleness_all_shards") or []
        total += [0] * (len(counts) - len(total))
        for i, count in enumerate(counts):
            total[i] += count
    return total


def slowdown(setting: Mapping[str, Any] | None) -> str | None:
    """How workers were slowed down on purpose, in words."""
    if not setting:
        return None
    parts = []
    if setting.get("workers"):
        ranks = ", ".join(str(rank) for rank in setting["workers"])
        parts.append(f"rank {ranks} {setting['factor']:g} times slower")
    if setting.get("sigma"):
        parts.append(f"random delays (sigma {setting['sigma']:g})")
    return "; ".join(parts) or None


def revision(rec: record.Record) -> str | None:
    """The revision of the code that trained the cell, marked where it was changed locally."""
    git = field(rec, "provenance.git") or {}
    known = git.get("revision")
    return known and known[:12] + ("+changes" if git.get("dirty") else "")


def timeline_facts(timeline: Path, device_kind: str) -> Row:
    """`throttled_share` and `utilisation_pct` from a cell's timeline; none where it has no samples.

    Throttled: the share of the GPU samples in which heat or power brakes slowed a GPU. Utilisation:
    the mean over the samples during training of the GPUs', or of the worker processes' on CPUs (of
    one core each).
    """
    kind, column = ("gpu", "gpu_util_pct") if device_kind == "cuda" else ("process", "cpu_pct")
    samples = slowed = busy = 0
    busy_pct = 0.0
    try:
        with open(timeline, newline="") as f:
            rows = csv.reader(f)
            names = {name: i for i, name in enumerate(next(rows, ()))}
            kind_at, id_at = names.get("kind"), names.get("id")
            throttle_at, phase_at, used_at = map(names.get, ("throttle", "phase", column))
            if kind_at is None:
                return {}
            for row in rows:
                if len(row) < len(names) or row[kind_at] != kind:
                    continue
                if kind == "gpu" and throttle_at is not None:
                    samples += 1
                    slowed += any(name in row[throttle_at] for name in SLOWED)
                elif kind == "process" and (id_at is None or not row[id_at].startswith("rank")):
                    continue
                in_training = phase_at is not None and row[phase_at] == "train"
                if in_training and used_at is not None and row[used_at]:
                    busy, busy_pct = busy + 1, busy_pct + float(row[used_at])
    except (OSError, ValueError, csv.Error):
        return {}
    facts: Row = {"throttled_share": slowed / samples} if samples else {}
    return facts | ({"utilisation_pct": busy_pct / busy} if busy else {})


def time_to_accuracy_s(per_epoch: list[Row], target: float | None) -> float | None:
    """Training time at the end of the first epoch that reached `target`; None if none did."""
    if target is None:
        return None
    return next((e["train_time_s"] for e in per_epoch if e["accuracy"] >= target), None)


def other_settings(rec: record.Record, settings: Settings) -> str | None:
    """In words, how a record's settings differ from those that the config gives its cell."""
    wanted = json.loads(settings.as_json())
    differing = [key for key in wanted if rec["settings"].get(key) != wanted[key]]
    if not differing:
        return None
    told = (f"{key} {rec['settings'].get(key)} (config: {wanted[key]})" for key in differing)
    return f"was trained with {', '.join(told)}; delete it to train its cell again"


def failure(log_dir: Path) -> Row:
    """Status and reason of a cell without a record: `error` where a failure left evidence."""
    try:
        reason = json.loads((log_dir / FAILURE_FILE).read_text()).get("reason")
    except FileNotFoundError:
        return {"status": "missing", "reason": "no record yet"}
    except (OSError, ValueError, AttributeError) as e:
        return {"status": "error", "reason": f"unreadable {FAILURE_FILE}: {e}"}
    return {"status": "error", "reason": reason or "failed; see its log"}


def read_cell(cell: Cell, study_dir: Path, asked: Asked) -> tuple[Row, list[Row]]:
    """The row of a cell and its epochs' rows; faults of the record become status `error`.

    A skipped cell without a record is `infeasible`.
    """
    path = study_dir / "cells" / cell.path / "record.json"
    log_dir = study_dir / "logs" / cell.path
    log = log_dir.with_name(log_dir.name + ".log")
    coordinates = cell.as_dict()
    row: Row = dict.fromkeys(COLUMNS) | coordinates
    row["log_path"] = str(log.relative_to(study_dir))
    if not path.exists():
        why = asked.skipped.get(cell.path)
        return row | ({"status": "infeasible", "reason": why} if why else failure(log_dir)), []
    row["record_path"] = str(path.relative_to(study_dir))
    try:
        rec = record.read(path)
    except (record.RecordError, OSError) as e:
        return row | {"status": "error", "reason": str(e)}, []
    if rec["cell"] != coordinates:
        reason = f"{path} holds the record of another cell: {record.cell_of(rec)}"
        return row | {"status": "error", "reason": reason}, []
    if asked.study is not None and (reason := other_settings(rec, asked.study.settings(cell))):
        return row | {"status": "error", "reason": f"{path} {reason}"}, []
    row |= {column: field(rec, where) for column, where in FIELDS.items()} | derived(rec)
    row |= timeline_facts(path.with_name("timeline.csv"), row["device_kind"])
    row["target_accuracy"] = target = asked.targets.get(cell.experiment)
    row["time_to_target_s"] = time_to_accuracy_s(rec["accuracy"]["per_epoch"], target)
    epochs = [coordinates | epoch for epoch in rec["accuracy"]["per_epoch"]]
    return row, epochs


def read_cells(
    cells: Sequence[Cell], study_dir: Path, asked: Asked
) -> Iterator[tuple[Row, list[Row]]]:
    """`read_cell` of each, with a progress line every few seconds."""
    next_line_s = time.monotonic() + 3
    for done, cell in enumerate(cells):
        if time.monotonic() > next_line_s:
            print(f"read {done} of {len(cells)} records", file=sys.stderr, flush=True)
            next_line_s += 3
        yield read_cell(cell, study_dir, asked)


def read_expected(path: Path) -> list[Cell]:
    """The cells that the study's config asks for, from a JSON list of their coordinates."""
    cells = [Cell(**coordinates) for coordinates in json.loads(path.read_text())]
    if not cells:
        raise ValueError(f"{path} names no cells")
    return cells


def collect(
    cells: Sequence[Cell],
    study_dir: Path,
    out: Path,
    epochs_out: Path,
    asked: Asked | None = None,
) -> list[Row]:
    """Write both files; returns the rows of cells that should have a usable record and have none."""
    without: list[Row] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "w", newline="") as cells_file, open(epochs_out, "w", newline="") as epochs_file:
        cells_csv = csv.DictWriter(cells_file, COLUMNS)
        epochs_csv = csv.DictWriter(epochs_file, EPOCH_COLUMNS)
        cells_csv.writeheader()
        epochs_csv.writeheader()
        for row, epochs in read_cells(cells, study_dir, asked or Asked()):
            cells_csv.writerow(row)
            epochs_csv.writerows(epochs)
            if row["status"] in WITHOUT_RECORD:
                without.append(row)
    return without


def listed(without: Sequence[Row], total: int) -> str:
    """A message that names every cell without a usable record."""
    lines = [f"{len(without)} of {total} cells have no usable record:"]
    for row in without:
        cell = Cell(**{key: row[key] for key in COORDINATES})
        lines.append(f"  {row['status']}: {cell} ({row['reason']})")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 when a record is missing or unusable and `--partial` is not given."""
    parser = argparse.ArgumentParser(prog="stratbench.analysis.collect", description=__doc__)
    parser.add_argument("--expected", type=Path, required=True, help="JSON list of all cells")
    parser.add_argument("--records-root", type=Path, required=True, help="results/<study>/cells")
    parser.add_argument("--out", type=Path, required=True, help="one row a cell (CSV)")
    parser.add_argument("--epochs-out", type=Path, required=True, help="one row an epoch (CSV)")
    parser.add_argument(
        "--partial", action="store_true", help="accept missing records, and list them"
    )
    parser.add_argument("--skipped", default="{}", help="JSON: cells not trained, and why")
    parser.add_argument("--study", default="null", help="JSON: the config of the study alone")
    parser.add_argument("--targets", default="{}", help="JSON: accuracy to reach, by experiment")
    args = parser.parse_args(argv)
    cells = read_expected(args.expected)
    config = json.loads(args.study)
    study = Study(config, config["study"]) if config else None
    asked = Asked(json.loads(args.skipped), json.loads(args.targets), study)
    without = collect(cells, args.records_root.parent, args.out, args.epochs_out, asked)
    if without:
        print(listed(without, len(cells)), file=sys.stdout if args.partial else sys.stderr)
    else:
        print(f"{len(cells)} records")
    return 1 if without and not args.partial else 0


if __name__ == "__main__":
    sys.exit(main())
