"""The columns of cells.csv: which field of a record, or what of several, each of them holds."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from stratbench.cell.record import Record, RecordError
from stratbench.strategies.base import Traits

Row = dict[str, Any]
COORDINATES = ("study", "experiment", "strategy", "model", "dataset", "gpus", "repeat")
#: Columns of cells.csv that are single fields of a record: the column and the field's path.
FIELDS = {
    "status": "status",
    "reason": "reason",
    "strategy_base": "strategy.name",
    "strategy_kind": "strategy.kind",
    **{trait.name: f"strategy.traits.{trait.name}" for trait in fields(Traits)},
    "train_time_s": "time.train_time_s",
    "throughput_samples_per_s": "time.throughput_samples_per_s",
    "accuracy_final": "accuracy.final",
    "accuracy_best": "accuracy.best",
    "evaluated_on": "accuracy.evaluated_on",
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
    "samples_applied": "batch.samples_applied",
    "updates_applied": "batch.updates_applied",
    "global_batch": "batch.global_batch",
    "per_worker_batch": "batch.per_worker_batch",
    "steps_per_epoch": "batch.steps_per_epoch",
    "epochs": "settings.epochs",
    "precision": "settings.precision",
    "compute_dtype": "strategy.details.compute_dtype",
    "model_parameters": "model.parameters",
    "classes": "model.classes",
    "batchnorm": "model.batchnorm",
    "initial_weights_sha256": "model.initial_weights_sha256",
    "data_sha256": "data.sha256",
    "synthetic_data": "data.synthetic",
    "test_samples": "data.test_samples",
}
STATE_COLUMNS = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "buffers_bytes")
#: Columns worked out from several fields, in `derived`.
DERIVED = (
    "peak_memory_bytes",
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
    "start_skew_ms",
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
#: Columns that hold text; all others hold numbers, or true and false.
TEXT = (
    *("study", "experiment", "strategy", "model", "dataset", "status", "reason", "strategy_base"),
    *("strategy_kind", "evaluated_on", "memory_method", "precision", "compute_dtype"),
    *("initial_weights_sha256", "data_sha256", "device_kind", "device_name", "host", "cpu_model"),
    *("torch", "driver", "revision", "slowdown", "breakdown_ms", "staleness", "profile_trace"),
    *("record_path", "log_path"),
)
#: Of columns that hold JSON, which must not be cut.
AS_JSON = ("breakdown_ms", "staleness")
#: The longest text of any other column, in characters.
LONGEST = 1000
#: Throttle reasons of a timeline that mean a GPU too hot or short of power, not a normal limit.
SLOWED = ("hw_slowdown", "thermal_slowdown", "power_brake")


def measured(rec: Record, timeline: Path) -> Row:
    """What a record and its timeline say, by column; those of the cell and the config are not here.

    RecordError where a column of numbers would not hold a finite one.
    """
    row: Row = {column: field(rec, where) for column, where in FIELDS.items()} | derived(rec)
    row |= timeline_facts(timeline, row["device_kind"])
    for column, value in row.items():
        if column in TEXT:
            if column not in AS_JSON and value is not None:
                row[column] = shown(str(value))
        elif value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise RecordError(f"{timeline.parent}/record.json: {column} is {str(value)[:80]!r}")
    return row


def shown(text: str) -> str:
    """`text` on one line, as a table prints it: no control characters, and no more than LONGEST."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def field(value: Any, path: str) -> Any:
    """The value at a dotted path of nested dicts, or None where any part of it is absent."""
    for key in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def of_workers(rec: Record, path: str) -> list[str]:
    """The distinct values of a provenance field over all workers."""
    values = (field(worker["provenance"], path) for worker in rec["workers"])
    return sorted({str(value) for value in values if value is not None})


def usable_cores(rec: Record) -> float | None:
    """CPU cores that the workers may use together: of each host, its affinity within its quota."""
    hosts: dict[str, tuple[set[int], float]] = {}
    for worker in rec["workers"]:
        name = field(worker["provenance"], "host.name")
        affinity = set(field(worker["provenance"], "host.affinity") or ())
        quota = field(worker["provenance"], "host.cpu_quota_cores") or math.inf
        hosts[name] = (hosts.get(name, (set(), 0.0))[0] | affinity, quota)
    total = sum(min(len(cores), quota) for cores, quota in hosts.values())
    return round(total, 1) or None


def derived(rec: Record) -> Row:
    """Columns worked out from several fields of a record."""
    states = [field(rec, f"memory.model_states.{column}") for column in STATE_COLUMNS]
    kinds = {device.partition(":")[0] for device in of_workers(rec, "device")}
    kinds = kinds or {field(rec, "provenance.device") or ""}  # no worker lived to tell
    cpu_models = of_workers(rec, "host.cpu_model")
    nodes = (field(rec, "provenance.busy_at_start") or {}).values()
    busy = [node["other_cpu_cores"] for node in nodes if "other_cpu_cores" in node]
    return {
        "peak_memory_bytes": peak_memory_bytes(rec, "cpu" in kinds),
        "model_states_bytes": sum(s or 0 for s in states) if any(states) else None,
        "device_kind": "; ".join(sorted(kinds)),
        "device_name": "; ".join(of_workers(rec, "gpu.name") or cpu_models),
        "host": "; ".join(of_workers(rec, "host.name")),
        "cpu_model": "; ".join(cpu_models),
        "cpu_cores": usable_cores(rec),
        "torch": "; ".join(of_workers(rec, "software.torch")),
        "driver": "; ".join(of_workers(rec, "driver.driver_version")),
        "revision": revision(rec),
        "other_cpu_cores": max(busy, default=None),
        "start_skew_ms": max(field(rec, "time.start_skew_ms") or (), default=None),
        "slowdown": slowdown(field(rec, "settings.slowdown")),
        "breakdown_ms": as_json(field(rec, "time.breakdown_ms")),
        "staleness": as_json(staleness(rec)),
    } | server_facts(rec)


def peak_memory_bytes(rec: Record, on_cpu: bool) -> int | None:
    """Peak of the rank that used most: the one figure that tables, figures and rules go by.

    On a GPU what the allocator had at its peak, model states included. On a CPU what the resident
    set grew by over its base: the base holds libraries, weights and momentum, which are not in it.
    """
    return field(rec, f"memory.{'peak_over_base_bytes' if on_cpu else 'peak_bytes'}")


def as_json(value: Any) -> str | None:
    """What a column cannot hold as a number; None where there is nothing."""
    return json.dumps(value) if value else None


def server_facts(rec: Record) -> Row:
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


def staleness(rec: Record) -> list[int]:
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
    if setting.get("workers") and setting.get("factor"):
        ranks = ", ".join(str(rank) for rank in setting["workers"])
        parts.append(f"rank {ranks} {setting['factor']:g} times slower")
    if setting.get("sigma"):
        parts.append(f"random delays (sigma {setting['sigma']:g})")
    return "; ".join(parts) or None


def revision(rec: Record) -> str | None:
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
        if not timeline.is_file():
            return {}
        with open(timeline, newline="", encoding="utf-8") as f:
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
    return facts | (
        {"utilisation_pct": busy_pct / busy} if math.isfinite(busy_pct) and busy else {}
    )
