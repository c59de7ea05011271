"""Constructed records for tests of the analysis: synthetic numbers from a simple cost model.

They are valid against the schema.

Nothing here was measured. Every record says so (`provenance.constructed`, and the device's name),
so that no figure made from one can pass for a result. `python tests/core/fixture_records.py FOLDER`
writes a whole study to look at.
"""

from __future__ import annotations

import argparse
import copy
import csv
import hashlib
import io
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from stratbench.cell import coordinates
from stratbench.cell.coordinates import Cell
from stratbench.cell.settings import Settings
from stratbench.strategies import get_option_defaults, get_strategy_class, get_traits
from stratbench.strategies.base import Traits
from stratbench.telemetry.timeline import SAMPLE_COLUMNS

MIB = 2**20
GPU_NAME = "Constructed GPU (not measured)"
#: Parameters (millions), seconds of one epoch on one worker, MiB of activations at one worker.
MODELS = {
    "vgg16": (134.3, 30.0, 900.0),
    "efficientnet_v2_l": (117.2, 64.0, 1700.0),
    "convnext_large": (196.2, 80.0, 1500.0),
    "resnet50": (23.5, 16.0, 800.0),
    "densenet121": (7.0, 14.0, 900.0),
}
#: Time on one worker relative to `single`, share of it that does not scale, accuracy after
#: training.
STRATEGIES = {
    "single": (1.00, 0.0, 0.982),
    "ddp": (1.01, 0.04, 0.981),
    "fsdp": (1.06, 0.08, 0.980),
    "fsdp-zero2": (1.04, 0.06, 0.981),
    "ps-sync": (1.12, 0.22, 0.980),
    "ps-async": (1.11, 0.12, 0.962),
    "ps-async-modified": (1.30, 0.45, 0.974),
    "ps-dana": (1.13, 0.13, 0.979),
}
BASES = {
    "fsdp-zero2": ("fsdp", {"reshard_after_forward": "never"}),
    "fsdp-policy": ("fsdp", {"mixed_precision": "policy"}),
    "async-scaled": ("ps-async", {"lr_scale": "1/N"}),
}
TIME_LIMIT_S = 3000.0
EPOCHS = 6
TEST_SAMPLES = 10_000


def random_of(*key: object) -> random.Random:
    """A generator that depends on the key alone."""
    return random.Random(repr(key))


def sha(*key: object) -> str:
    """A hash that depends on the key alone."""
    return hashlib.sha256(repr(key).encode()).hexdigest()


def provenance_of_worker(cell: Cell, rank: int, device: str) -> dict[str, Any]:
    """What a worker says of itself, with the keys of `telemetry.provenance.collect_worker_provenance`."""
    cores = 2 if device == "cpu" else 32
    facts: dict[str, Any] = {
        "device": f"cuda:{rank}" if device == "cuda" else "cpu",
        "host": {
            "name": "constructed-host",
            "os": "Constructed OS",
            "cpu_model": "Constructed CPU (not measured)",
            "cores_logical": 64,
            "affinity": list(range(cores)),
            "threads": 1,
            "memory_bytes": 256 * 1024 * MIB,
        },
        "load_1m": 0.1,
        "software": {"python": "3.0.0", "torch": "0.0.0+constructed", "numpy": "0.0.0"},
        "flags": {
            "cudnn_benchmark": True,
            "float32_matmul_precision": "highest",
            "matmul_tf32": False,
            "cudnn_tf32": False,
            "default_dtype": "torch.float32",
        },
        "environment": {"OMP_NUM_THREADS": "1"},
    }
    if device == "cuda":
        gpu = {
            "name": GPU_NAME,
            "index": rank,
            "uuid": f"GPU-constructed-{rank}",
            "pci_bus_id": f"00000000:0{rank}:00.0",
            "memory_bytes": 80 * 1024 * MIB,
            "capability": "0.0",
            "power_limit_w": 400.0,
            "max_sm_clock_mhz": 1980,
            "application_sm_clock_mhz": 1980,
        }
        facts["software"] |= {"cuda": "0.0", "cudnn": 0, "nccl": "0.0.0"}
        facts |= {"gpu": gpu, "driver": {"driver_version": "000.00", "cuda_driver_version": "0.0"}}
    return facts


def server_statistics(
    cell: Cell, traits: Traits, own: Pushes, epoch_times_s: Sequence[float], moved_bytes: int
) -> dict[str, Any]:
    """What one server says, with the keys of `ServerRun.statistics`; as stale as there are workers."""
    ends = [sum(epoch_times_s[: e + 1]) for e in range(len(epoch_times_s))]
    spread = 1 if traits.equals_ddp else cell.gpus
    counts = [own.pushes // spread] * spread
    counts[0] += own.pushes - sum(counts)
    share, rest = divmod(own.pushes, cell.gpus)
    links = [
        {
            "worker": rank,
            "tickets": share + (rank < rest),
            "skips": 0,
            "bytes_in": (share + (rank < rest)) * moved_bytes,
            "bytes_out": (share + (rank < rest) + 1) * moved_bytes,
            "wait_s": 1.0,
        }
        for rank in range(cell.gpus)
    ]
    return {
        "servers": [
            {
                "status": "ok",
                "error": None,
                "policy": BASES.get(cell.strategy, (cell.strategy,))[0],
                "server": 0,
                "n_servers": 1,
                "train_time_s": ends[-1],
                "epochs": [{"epoch": e, "end_s": end} for e, end in enumerate(ends)],
                "tickets_settled": own.pushes,
                "workers": links,
                "lost": [],
                "reassigned": [],
                "shard_numel": moved_bytes // 4,
                "updates": [own.updates],
                "staleness": [counts],
                "staleness_all_shards": counts,
                "dropped": [0],
                "apply_s": 0.1 * ends[-1],
            }
        ]
    }


@dataclass(frozen=True)
class Pushes:
    """How many a server took, and what it made of them."""

    pushes: int
    updates: int


def communication(
    traits: Traits, record: dict[str, Any], parameter_bytes: int, step_ms: float
) -> dict[str, Any]:
    """What a worker sends and receives in a step."""
    workers, train_time_s = record["cell"]["gpus"], record["time"]["train_time_s"]
    server = record["server"]
    sent = float(parameter_bytes)
    if not server:
        buffers = record["memory"]["model_states"]["buffers_bytes"]
        sent = (workers - 1) / workers * ((traits.ring_copies or 0) * parameter_bytes + buffers)
    steps = sum(worker["steps"] for worker in record["workers"]) / workers
    found = {
        "method": "measured" if server else "ring",
        "sent_bytes_per_step": sent,
        "received_bytes_per_step": sent,
        "implied_bytes_per_s": sent * steps / train_time_s,
    }
    if server:
        links = server["servers"][0]["workers"]
        moved = sum(link["bytes_in"] + link["bytes_out"] for link in links)
        found["busiest_server_bytes_per_s"] = moved / train_time_s
        found |= {"local_bytes_per_step": 2 * sent, "busiest_link_bytes_per_batch": 0.0}
        found["server_wait_ms"] = 0.1 * step_ms
    elif record["strategy"]["name"] == "ddp":
        found |= {"total_ms": 0.15 * step_ms, "overlapped_ms": 0.1 * step_ms}
        found["exposed_ms"] = found["total_ms"] - found["overlapped_ms"]
        found["timed_steps"] = steps
    return found


def phases_of(record: dict[str, Any]) -> list[tuple[float, str]]:
    """When each phase of a constructed cell begins: a server's workers evaluate once, others each epoch."""
    times, spans = record["time"], record["time"]["epoch_times_s"]
    trained_s = record["workers"][0]["train_time_s"]
    eval_s = times["eval_s"] or 0.0
    begun_s = times["total_s"] - trained_s - eval_s - 0.1
    found = [(0.1 * begun_s, "rendezvous"), (0.5 * begun_s, "build"), (0.8 * begun_s, "warmup")]
    for span_s in [trained_s] if record["server"] else spans:
        found += [(begun_s, "train"), (begun_s + span_s, "eval")]
        begun_s += span_s + (eval_s if record["server"] else eval_s / len(spans))
    return [*found, (begun_s, "end")]


def timeline_of(
    record: dict[str, Any], period_s: float = 0.5, busy: float = 0.9
) -> list[dict[str, Any]]:
    """Constructed samples of a record's hosts, processes and GPUs, as `telemetry.timeline` merges them.

    The GPUs are `busy` while they train, at the power that the record's energy needs and with the memory of
    its peaks; power follows the work by a second and wanders, as the driver's does.
    """
    noise = random_of("timeline", *record["cell"].values())
    workers, total_s, phases = record["workers"], record["time"]["total_s"], phases_of(record)
    by_host: dict[str, list[dict[str, Any]]] = {}
    for worker in workers:
        by_host.setdefault(worker["provenance"]["host"]["name"], []).append(worker)
    joules = (record["energy"] or {}).get("train_joules")
    mean_w = joules / sum(w["train_time_s"] for w in workers) if joules else 300.0
    has_gpus = record["provenance"]["device"] == "cuda"
    watts, wandering, rows = dict.fromkeys(range(len(workers)), 60.0), 0.0, []
    times_s = [i * period_s + noise.uniform(0.05, 0.06) for i in range(int(total_s / period_s))]
    for t_s in [*times_s, total_s - 0.03]:
        phase = next((name for begun_s, name in reversed(phases) if t_s >= begun_s), "")
        training, begun = phase == "train", phase not in ("", "rendezvous")
        wandering = 0.7 * wandering + noise.gauss(0, 0.03)
        for host, here in by_host.items():
            common = {"t_s": round(t_s, 3), "node": host, "phase": phase}
            place = here[0]["provenance"]["host"]
            servers = (
                (record["server"] or {"servers": ()})["servers"] if here[0]["rank"] == 0 else ()
            )
            labels = [f"rank{w['rank']}" for w in here] + [
                f"server{i}" for i in range(len(servers))
            ]
            share = len(place["affinity"]) / max(len(labels), len(place["affinity"]))
            used = {label: 100 * share * noise.uniform(0.85, 1) for label in labels if phase}
            host_pct = (sum(used.values()) + noise.uniform(2, 12)) / place["cores_logical"]
            before = record["provenance"].get("busy_at_start", {}).get("0", {}).get("load_1m")
            now = here[0]["provenance"]["load_1m"]
            left = 0.0 if before is None else (before - now) * math.exp(-t_s / 30)
            load = {"load_1m": now + left + noise.uniform(0, 0.1)}
            load |= {"mem_available_bytes": 2**37 - noise.randrange(2**30)}
            rows.append(common | {"kind": "host", "id": host, "cpu_pct": round(host_pct, 1)} | load)
            held = {w["rank"]: w["memory"]["peak_bytes"] for w in here if not has_gpus}
            for label, pct in used.items():
                rss = held.get(int(label[4:]), 2**31) if label.startswith("rank") else 2**30
                row = {"kind": "process", "id": label, "cpu_pct": round(pct, 1), "rss_bytes": rss}
                rows.append(common | row)
            for worker in here if has_gpus else ():
                gpu, rank = worker["provenance"]["gpu"], worker["rank"]
                aim_w = mean_w * (1 + wandering + noise.gauss(0, 0.02)) if training else 90.0
                watts[rank] += (aim_w - watts[rank]) * min(1.0, period_s)
                drawn_w = watts[rank] if begun else 60.0
                memory_bytes = worker["memory"]["nvml_used_bytes"] if begun else 10 * MIB
                used_pct = min(100, round(100 * busy * noise.uniform(0.9, 1.1))) if training else 0
                rows.append(
                    common
                    | {"kind": "gpu", "id": gpu.get("index", gpu["uuid"]), "throttle": ""}
                    | {"gpu_util_pct": used_pct, "power_w": round(drawn_w, 3)}
                    | {"mem_used_bytes": memory_bytes, "sm_clock_mhz": 1980, "temperature_c": 60}
                )
    return rows


def timeline_text(rows: list[dict[str, Any]]) -> str:
    """Samples as the text of a timeline.csv."""
    out, columns = io.StringIO(), (*SAMPLE_COLUMNS, "phase")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([row.get(column, "") for column in columns] for row in rows)
    return out.getvalue()


def make_record(cell: Cell, status: str = "ok", device: str = "cuda") -> dict[str, Any]:
    """A record of `cell` that ended with `status`, on `device` cuda or cpu."""
    millions, epoch_s, activations_mib = MODELS.get(cell.model, (1.0, 2.0, 20.0))
    factor, serial, accuracy = STRATEGIES.get(cell.strategy, (1.05, 0.1, 0.97))
    if cell.gpus == 1:  # nothing is stale
        accuracy = STRATEGIES["ps-sync" if cell.strategy.startswith("ps-") else "single"][2]
    strategy, given = BASES.get(cell.strategy, (cell.strategy, {}))
    options = get_option_defaults(strategy) | given
    traits = get_traits(strategy, options, cell.gpus)
    noise = random_of(cell)
    server = get_strategy_class(strategy).kind == "server"
    epoch_time_s = epoch_s * factor * ((1 - serial) / cell.gpus + serial * math.sqrt(cell.gpus))
    if cell.gpus == 1:
        epoch_time_s = epoch_s * factor
    epoch_time_s *= noise.uniform(0.965, 1.035)
    global_batch, steps = 128, 390
    each = global_batch // cell.gpus
    per_step = each // options.get("pushes_per_batch", 1)
    # A server's workers wait for no epoch, so that all are trained before a loss is looked at.
    run = {"ok": EPOCHS, "timeout": 2, "diverged": EPOCHS if server else 1, "oom": 0}[status]
    finished = status in ("ok", "diverged")
    epoch_times_s = [epoch_time_s * noise.uniform(0.985, 1.015) for _ in range(run)]
    train_time_s = sum(epoch_times_s) if finished else None
    samples = steps * global_batch * run
    #: Steps of one worker.
    own_steps = steps * run * each // per_step
    step_ms = 1000 * sum(epoch_times_s) / own_steps if own_steps else 0.0
    ends = [sum(epoch_times_s[: e + 1]) for e in range(run)]
    # Equal arithmetic from equal weights makes equal losses.
    own = () if traits.equals_ddp else (cell.strategy, cell.gpus)
    loss = random_of("loss", cell.model, cell.dataset, cell.repeat, *own).uniform(0.98, 1.02)
    per_epoch = [
        {
            "epoch": e + 1,
            "train_time_s": ends[e],
            "train_loss": loss * 2.3 * math.exp(-0.6 * (e + 1)),
            "test_loss": loss * 2.2 * math.exp(-0.5 * (e + 1)),
            "score": round(
                TEST_SAMPLES
                * (
                    0.1
                    + (accuracy - 0.1) * (1 - math.exp(-0.9 * (e + 1)))
                    + noise.uniform(-0.002, 0.002)
                )
            )
            / TEST_SAMPLES,
        }
        for e in range(run)
    ]
    if status == "diverged":
        per_epoch[-1] |= {"train_loss": None, "test_loss": None, "score": 0.1}
    parameters = int(millions * 1e6)
    parameter_bytes = parameters * 4
    held = -(-parameters // traits.weight_parts) * 4
    moments = -(-parameters // (traits.optimizer_parts or 1)) * 4
    moments += 376 if traits.optimizer_padded else 0
    batchnorm = not cell.model.startswith(("vgg", "convnext"))
    states = {
        "parameters_bytes": held,
        "gradients_bytes": held,
        "optimizer_bytes": 0 if server else moments,
        "buffers_bytes": 53_120 if batchnorm else 0,
    }
    peak = sum(states.values()) + int(activations_mib * MIB / cell.gpus)
    peak += int(0.06 * parameter_bytes) if cell.gpus > 1 else 0
    base = sum(states.values()) - states["gradients_bytes"]  # held when the clock starts
    if device == "cpu":
        peak, base = peak + 300 * MIB, base + 300 * MIB
    method = "cuda-allocator" if device == "cuda" else "vmhwm"
    used = {"method": method, "base_bytes": base, "peak_bytes": peak}
    used["peak_over_base_bytes"] = peak - base
    if device == "cuda":
        used |= {"allocated_peak_bytes": peak, "reserved_peak_bytes": peak + 64 * MIB}
        asked = {"requested_peak_bytes": peak - MIB // 2, "cublas_bytes": MIB // 4}
        used |= asked
        used["nvml_used_bytes"] = peak + 700 * MIB
    total_s = {"timeout": TIME_LIMIT_S + 1, "oom": 9.0}.get(status, 14.0 + sum(epoch_times_s))
    # No two cells at the same time, and repeat after repeat.
    started = datetime(2000, 1, 1, tzinfo=UTC)
    started += timedelta(hours=10**5 * cell.repeat + random_of("start", cell).randrange(10**5))
    slow = TIME_LIMIT_S / EPOCHS if status == "timeout" else 0.0
    for entry in per_epoch if slow else ():
        entry["train_time_s"] = slow * entry["epoch"]
    workers = [
        {
            "rank": rank,
            "steps": own_steps,
            "samples": own_steps * per_step,
            # Rank 0 is the slowest, and no two clocks agree.
            "train_time_s": train_time_s
            and train_time_s * (1 - 1e-4 * rank * noise.uniform(0.5, 1)),
            "memory": used,
            "provenance": provenance_of_worker(cell, rank, device),
        }
        for rank in range(cell.gpus)
    ]
    updates = round((traits.updates_per_step or 1) * steps * run)
    pushes = Pushes(own_steps * cell.gpus, updates)
    record: dict[str, Any] = {
        "schema_version": 2,
        "cell": cell.as_dict(),
        "status": status,
        "reason": {
            "ok": None,
            "oom": "rank 0 ran out of device memory in step 1",
            "timeout": f"the cell's limit of {TIME_LIMIT_S:g} s was reached",
            "diverged": "the training loss became nan in epoch 1 of 6",
        }[status],
        "settings": asdict(
            Settings(
                strategy=strategy,
                options=options,
                model=cell.model,
                dataset=cell.dataset,
                gpus=cell.gpus,
                seed=1000 + cell.repeat,
                epochs=EPOCHS,
                global_batch=global_batch,
                per_worker_batch=each,
                precision="fp32",
                lr=0.01,
                momentum=0.9,
                weight_decay=0.0,
                nesterov=False,
                augment=False,
                warmup_steps=3,
                device=device,
                threads=1,
                slowdown=None,
            )
        ),
        "strategy": {
            "name": strategy,
            "kind": get_strategy_class(strategy).kind,
            "options": options,
            "traits": asdict(traits),
            "mesh": {"replicas": cell.gpus, "tensor": 1, "stages": 1},
            "wrap_groups": [{"label": f"block{i}", "parameters": parameters // 4} for i in range(4)]
            if get_strategy_class(strategy).uses_wrap_groups and finished
            else [],
            "details": {
                "compute_dtype": "float32",
                "weights_dtype": "float32",
                "skipped_steps": 0,
                "optimizer_dtype": "float32",
            }
            if finished
            else {},
        },
        "model": {
            "parameters": parameters if finished else None,
            "trainable_parameters": parameters if finished else None,
            "initial_weights_sha256": sha(cell.model, cell.repeat) if finished else None,
            "input_shape": [3, 32, 32],
            "classes": 10,
            "batchnorm": batchnorm if finished else None,
            "dropout": cell.model.startswith(("vgg", "convnext", "efficientnet"))
            if finished
            else None,
        },
        "task": {
            "name": "classification",
            "score": "accuracy",
            "unit": "share",
            "better": "higher",
            "tolerance": 1.0,
            "guess": 0.1,
            "counts": "images",
            "counts_per_sample": 1,
            "least_loss": None,
            "own": None,
        },
        "data": {
            "name": cell.dataset,
            "sha256": sha(cell.dataset),
            "train_samples": 50_000,
            "test_samples": TEST_SAMPLES,
            "synthetic": False,
        },
        "batch": {
            "global_batch": global_batch,
            "per_worker_batch": each,
            "samples_per_step": per_step,
            "steps_per_epoch": steps,
            "samples_seen": samples if finished else None,
            "samples_applied": samples if finished else None,
            "updates_applied": updates if finished else None,
        },
        "time": {
            "train_time_s": train_time_s,
            "epoch_times_s": epoch_times_s if finished else [],
            "start_skew_ms": [noise.uniform(0.3, 0.5) for _ in range(1 if server else run)]
            if run and cell.gpus > 1
            else None,
            "step_ms": {
                "count": own_steps * cell.gpus,
                "mean": step_ms,
                "std": step_ms * 0.05,
                "min": step_ms * 0.9,
                "p10": step_ms * 0.94,
                "p50": step_ms * 0.99,
                "p90": step_ms * 1.05,
                "p99": step_ms * 1.21,
                "max": step_ms * 1.4,
            }
            if finished
            else None,
            "breakdown_ms": {
                "data": 0.01 * step_ms,
                "forward": 0.3 * step_ms,
                "backward": 0.5 * step_ms,
            }
            | (
                {"push": 0.09 * step_ms, "server_wait": 0.1 * step_ms}
                if server
                else {"exposed_communication": 0.05 * step_ms, "optimizer": 0.14 * step_ms}
                if strategy == "ddp"
                else {"optimizer": 0.19 * step_ms}
            )
            if finished
            else None,
            "throughput_samples_per_s": samples / train_time_s if train_time_s else None,
            "setup_s": 6.0 if finished else None,
            "data_s": 0.8 if finished else None,
            "warmup_s": 1.5 if finished else None,
            "eval_s": 2.0 if finished else None,
            "total_s": total_s,
            "time_limit_s": TIME_LIMIT_S,
        },
        "compute": None,
        "communication": None,
        "energy": None,
        "memory": {
            "method": method if finished else None,
            "peak_bytes": peak if finished else None,
            "peak_over_base_bytes": peak - base if finished else None,
            "model_states": states if finished else None,
            **(asked if finished and device == "cuda" else {}),
        },
        "score": {
            "final": per_epoch[-1]["score"] if status == "ok" else None,
            "best": max((p["score"] for p in per_epoch), default=None),
            "per_epoch": per_epoch,
            "evaluated_on": "server state" if server else "rank 0",
        },
        "server": server_statistics(cell, traits, pushes, epoch_times_s, parameter_bytes)
        if server and finished
        else None,
        "workers": workers if finished else [],
        "provenance": {
            "constructed": "synthetic fixture, not measured",
            "git": {"revision": "0" * 40, "dirty": False},
            "device": device,
            "nodes": 1,
            "workers_per_node": cell.gpus,
            "threads_per_worker": 1,
            "started": started.isoformat(timespec="seconds"),
            "finished": (started + timedelta(seconds=total_s)).isoformat(timespec="seconds"),
        },
    }
    if not finished:
        return record
    achieved = 6e6 * millions * samples / train_time_s
    record["compute"] = {
        "forward_flops_per_sample": int(2e6 * millions),
        "training_flops_per_sample": 3 * int(2e6 * millions),
        "achieved_flops_per_s": achieved,
    }
    if device == "cuda":
        peak_flops_per_s = 1e14 * cell.gpus
        record["compute"] |= {"peak_flops_per_s": peak_flops_per_s}
        record["compute"]["mfu"] = achieved / peak_flops_per_s
        joules = 300.0 * cell.gpus * train_time_s
        record["energy"] = {"train_joules": joules, "joules_per_sample": joules / samples}
    record["communication"] = communication(traits, record, parameter_bytes, step_ms)
    return record


def expand(
    strategies: Sequence[str] = tuple(STRATEGIES),
    models: Sequence[str] = ("vgg16", "efficientnet_v2_l", "convnext_large"),
    gpus: Sequence[int] = (1, 2, 4),
    repeats: int = 1,
    study: str = "constructed",
    experiment: str = "main",
    dataset: str = "cifar10",
) -> list[Cell]:
    """The cells of one experiment; `single` at one worker only."""
    pairs = [(name, 1 if name == "single" else None) for name in strategies]
    return list(
        coordinates.expand_cells(study, experiment, dataset, pairs, models, gpus, repeats=repeats)
    )


def write_study(
    root: Path,
    cells: Iterable[Cell],
    statuses: Mapping[tuple[str, str, int], str] | None = None,
    device: str = "cuda",
    change: Callable[[Cell, dict[str, Any]], dict[str, Any] | None] | None = None,
    timelines: bool = False,
) -> Path:
    """Write records below `root`/<study>/cells and the list of cells; returns the study's folder.

    `statuses` maps (strategy, model, gpus) to a status; `missing` writes nothing, and `error`
    leaves the evidence of a crash. `change(cell, record)` may alter a record, or drop it by
    returning None.
    """
    cells = list(cells)
    study_dir = root / cells[0].study
    study_dir.mkdir(parents=True, exist_ok=True)
    (study_dir / "cells.json").write_text(json.dumps([c.as_dict() for c in cells]))
    for cell in cells:
        status = (statuses or {}).get((cell.strategy, cell.model, cell.gpus), "ok")
        if status == "missing":
            continue
        if status == "error":
            log_dir = cell.log_dir(root)
            log_dir.mkdir(parents=True, exist_ok=True)
            (log_dir / "failure.json").write_text(json.dumps({"reason": "worker 1 exited with -9"}))
            continue
        record: dict[str, Any] | None = make_record(cell, status, device)
        if change is not None and record is not None:
            record = change(cell, copy.deepcopy(record))
        if record is None:
            continue
        path = cell.record_path(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
        if timelines:
            rows = timeline_of(record, record["time"]["total_s"] / 40) if record["workers"] else []
            path.with_name("timeline.csv").write_text(timeline_text(rows))
    return study_dir


DEMO_STATUSES = {
    ("ddp", "convnext_large", 1): "oom",
    ("single", "convnext_large", 1): "oom",
    ("ps-async-modified", "efficientnet_v2_l", 2): "timeout",
    ("ps-async", "vgg16", 4): "diverged",
    ("ps-sync", "convnext_large", 4): "missing",
    ("ps-dana", "convnext_large", 4): "error",
}


def main() -> None:
    """Write a study for the eye."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--all-ok", action="store_true")
    args = parser.parse_args()
    cells = expand(repeats=args.repeats) + expand(
        strategies=("ddp", "ps-sync", "ps-async"),
        models=("resnet50", "densenet121"),
        repeats=args.repeats,
        experiment="server",
        dataset="mnist",
    )
    print(write_study(args.folder, cells, None if args.all_ok else DEMO_STATUSES, args.device))


if __name__ == "__main__":
    main()
