"""Constructed records for tests of the analysis: synthetic numbers from a simple cost model.

They are valid against the schema.

Nothing here was measured. Every record says so (`provenance.constructed`, and the device's name),
so that no figure made from one can pass for a result. `python tests/unit/fixture_records.py FOLDER`
writes a whole study to look at.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stratbench import cells as cells_module
from stratbench.cells import Cell
from stratbench.config import option_defaults
from stratbench.strategies import strategy_class, traits_of

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
    "async-scaled": ("ps-async", {"lr_scale": "1/N"}),
}
TIME_LIMIT_S = 3000.0
EPOCHS = 6


def random_of(*key: object) -> random.Random:
    """A generator that depends on the key alone."""
    return random.Random(repr(key))


def sha(*key: object) -> str:
    """A hash that depends on the key alone."""
    return hashlib.sha256(repr(key).encode()).hexdigest()


def provenance_of_worker(cell: Cell, rank: int, device: str) -> dict[str, Any]:
    """What a worker says of itself, with the keys of `telemetry.provenance.worker_provenance`."""
    cores = 2 if device == "cpu" else 32
    facts: dict[str, Any] = {
        "device": f"cuda:{rank}" if device == "cuda" else "cpu",
        "host": {
            "name": "constructed-host",
            "cpu_model": "Constructed CPU (not measured)",
            "cores_logical": cores,
            "affinity": list(range(cores)),
        },
        "load_1m": 0.1,
        "software": {"torch": "0.0.0+constructed"},
    }
    if device == "cuda":
        facts |= {"gpu": {"name": GPU_NAME}, "driver": "000.00"}
    return facts


def server_statistics(cell: Cell, pushes: int, parameter_bytes: int) -> dict[str, Any]:
    """What one server says, with the keys that the report reads; as stale as there are workers."""
    waits = cell.strategy == "ps-sync"
    counts = [pushes] if waits else [pushes // cell.gpus] * cell.gpus
    link = {"bytes_in": pushes * parameter_bytes, "bytes_out": pushes * parameter_bytes}
    workers = [link | {"worker": rank, "wait_s": 1.0} for rank in range(cell.gpus)]
    return {"servers": [{"workers": workers, "lost": [], "staleness_all_shards": counts}]}


def communication(
    server: bool, workers: int, parameter_bytes: int, step_ms: float
) -> dict[str, Any]:
    """What a worker sends and receives in a step."""
    share = 1.0 if server else 2 * (workers - 1) / workers
    sent = share * parameter_bytes
    found = {
        "method": "measured" if server else "ring",
        "sent_bytes_per_step": sent,
        "received_bytes_per_step": sent,
        "implied_bytes_per_s": sent * 1000 / step_ms,
    }
    if server:
        found["busiest_server_bytes_per_s"] = 2 * workers * sent * 1000 / step_ms
    return found


def write_timeline(path: Path, cell: Cell) -> None:
    """Constructed samples of every GPU: 90 % busy while training."""
    lines = ["t_s,kind,id,gpu_util_pct,mem_used_bytes,throttle,phase"]
    for t_s in range(20):
        phase = "train" if 5 <= t_s < 18 else "build"
        for gpu in range(cell.gpus):
            lines.append(f"{t_s},gpu,{gpu},{90 if phase == 'train' else 5},{2**30},,{phase}")
    path.write_text("\n".join(lines) + "\n")


def make_record(cell: Cell, status: str = "ok", device: str = "cuda") -> dict[str, Any]:
    """A record of `cell` that ended with `status`, on `device` cuda or cpu."""
    millions, epoch_s, activations_mib = MODELS.get(cell.model, (1.0, 2.0, 20.0))
    factor, serial, accuracy = STRATEGIES.get(cell.strategy, (1.05, 0.1, 0.97))
    if cell.gpus == 1:  # nothing is stale
        accuracy = STRATEGIES["ps-sync" if cell.strategy.startswith("ps-") else "single"][2]
    strategy, given = BASES.get(cell.strategy, (cell.strategy, {}))
    options = option_defaults(strategy) | given
    noise = random_of(cell)
    server = strategy_class(strategy).kind == "server"
    sharded = cell.strategy.startswith("fsdp")
    epoch_time_s = epoch_s * factor * ((1 - serial) / cell.gpus + serial * math.sqrt(cell.gpus))
    if cell.gpus == 1:
        epoch_time_s = epoch_s * factor
    epoch_time_s *= noise.uniform(0.965, 1.035)
    epoch_times_s = [epoch_time_s * noise.uniform(0.985, 1.015) for _ in range(EPOCHS)]
    global_batch, steps = 128, 390
    finished = {"ok": EPOCHS, "timeout": 2, "diverged": 1, "oom": 0}[status]
    epoch_times_s = epoch_times_s[:finished]
    train_time_s = sum(epoch_times_s) if status == "ok" else None
    samples = steps * global_batch * EPOCHS
    step_ms = epoch_time_s / steps * 1000
    per_epoch = [
        {
            "epoch": e + 1,
            "train_time_s": sum(epoch_times_s[: e + 1]),
            "train_loss": 2.3 * math.exp(-0.6 * (e + 1)),
            "test_loss": 2.2 * math.exp(-0.5 * (e + 1)),
            "accuracy": 0.1
            + (accuracy - 0.1) * (1 - math.exp(-0.9 * (e + 1)))
            + noise.uniform(-0.002, 0.002),
        }
        for e in range(finished)
    ]
    parameter_bytes = int(millions * 1e6) * 4
    shards = cell.gpus if sharded else 1
    held = -(-parameter_bytes // shards)
    states = {
        "parameters_bytes": held,
        "gradients_bytes": held,
        "optimizer_bytes": 0 if server else held,
        "buffers_bytes": 53_120,
    }
    peak = sum(states.values()) + int(activations_mib * MIB / cell.gpus)
    peak += int(0.06 * parameter_bytes) if cell.gpus > 1 else 0
    base = sum(states.values()) - states["gradients_bytes"]  # held when the clock starts
    ok = status == "ok"
    return {
        "schema_version": 1,
        "cell": cell.as_dict(),
        "status": status,
        "reason": {
            "ok": None,
            "oom": "rank 0 ran out of device memory in step 1",
            "timeout": f"reached the cell's limit of {TIME_LIMIT_S:.0f} s in epoch 3",
            "diverged": "loss became non-finite in epoch 2",
        }[status],
        "settings": {"epochs": EPOCHS, "precision": "fp32", "lr": 0.01},
        "strategy": {
            "name": strategy,
            "kind": strategy_class(strategy).kind,
            "options": options,
            "traits": asdict(traits_of(strategy, options, cell.gpus)),
            "wrap_groups": [],
            "details": {"compute_dtype": "float32"},
        },
        "model": {
            "parameters": int(millions * 1e6),
            "initial_weights_sha256": sha(cell.model, cell.repeat),
            "input_shape": [3, 32, 32],
            "classes": 10,
            "batchnorm": not cell.model.startswith(("vgg", "convnext")),
            "dropout": cell.model.startswith(("vgg", "convnext", "efficientnet")),
        },
        "data": {
            "name": cell.dataset,
            "sha256": sha(cell.dataset),
            "train_samples": 50_000,
            "test_samples": 10_000,
            "synthetic": False,
        },
        "batch": {
            "global_batch": global_batch,
            "per_worker_batch": global_batch // cell.gpus,
            "steps_per_epoch": steps,
            "samples_seen": samples if ok else None,
            "samples_applied": samples if ok else None,
            "updates_applied": steps * EPOCHS * (cell.gpus if "async" in cell.strategy else 1)
            if ok
            else None,
        },
        "time": {
            "train_time_s": train_time_s,
            "epoch_times_s": epoch_times_s,
            "step_ms": {
                "count": steps * EPOCHS,
                "mean": step_ms,
                "p50": step_ms * 0.99,
                "p90": step_ms * 1.05,
                "p99": step_ms * 1.21,
            }
            if ok
            else None,
            "breakdown_ms": {
                "data": 0.01 * step_ms,
                "forward": 0.3 * step_ms,
                "backward": 0.55 * step_ms,
                "server" if server else "optimizer": 0.14 * step_ms,
            }
            if ok
            else None,
            "throughput_samples_per_s": samples / train_time_s if train_time_s else None,
            "setup_s": 6.0,
            "data_s": 0.8,
            "warmup_s": 1.5,
            "eval_s": 2.0,
            "total_s": 12.0 + sum(epoch_times_s),
            "time_limit_s": TIME_LIMIT_S,
        },
        "compute": {
            "forward_flops_per_sample": 2e6 * millions,
            "achieved_flops_per_s": 6e6 * millions * samples / train_time_s,
            "peak_flops_per_s": 1e14 * cell.gpus,
            "mfu": 6e6 * millions * samples / train_time_s / (1e14 * cell.gpus),
        }
        if ok
        else None,
        "communication": communication(server, cell.gpus, parameter_bytes, step_ms) if ok else None,
        "energy": {
            "train_joules": 300.0 * train_time_s,
            "joules_per_sample": 300.0 * train_time_s / samples,
        }
        if ok and device == "cuda"
        else None,
        "memory": {
            "method": "cuda-allocator" if device == "cuda" else "vmhwm",
            "peak_bytes": (peak if device == "cuda" else peak + 300 * MIB) if ok else None,
            "peak_over_base_bytes": peak - base if ok else None,
            "model_states": states if ok else None,
        },
        "accuracy": {
            "final": per_epoch[-1]["accuracy"] if ok else None,
            "best": max((p["accuracy"] for p in per_epoch), default=None) if ok else None,
            "per_epoch": per_epoch,
            "evaluated_on": "server state" if server else "rank 0",
        },
        "server": server_statistics(cell, steps * EPOCHS, parameter_bytes) if server else None,
        "workers": [
            {
                "rank": rank,
                "steps": steps * EPOCHS if ok else None,
                "samples": samples // cell.gpus if ok else None,
                "train_time_s": train_time_s,
                "memory": {"peak_bytes": peak, "peak_over_base_bytes": peak - base} if ok else None,
                "provenance": provenance_of_worker(cell, rank, device),
            }
            for rank in range(cell.gpus)
        ],
        "provenance": {
            "constructed": "synthetic fixture, not measured",
            "git": {"revision": "0" * 40, "dirty": False},
            "device": device,
            "started": "2000-01-01T00:00:00+00:00",
        },
    }


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
        cells_module.expand(study, experiment, dataset, pairs, models, gpus, repeats=repeats)
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
        path.write_text(json.dumps(record, indent=1))
        if timelines:
            write_timeline(path.with_name("timeline.csv"), cell)
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
