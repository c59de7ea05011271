"""Stage 2: the launcher trains whole cells, and their records are checked."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from stage import Stage, median
from stratbench.cell import record
from stratbench.cell.run_folder import RunFolder
from stratbench.telemetry.machine.hardware import find_datasheet
from stratbench.train.forkserver import run_shared_fork_server
from stratbench.workload.data.prepare import prepare_data_set
from stratbench.workload.data.sources import DataError
from subject import launch_command, prepared, settings

#: (variant or strategy, precision) on a GPU, and on a CPU.
ON_GPU = (
    ("single", "fp16"), ("ddp", "fp16"), ("fsdp", "fp16"), ("ps-sync", "fp32"),
    ("ps-async-modified", "fp16"), ("fsdp-policy", "bf16"),
)  # fmt: skip
ON_CPU = (("ddp", "fp32"), ("fsdp", "bf16"), ("ps-sync", "fp32"), ("ps-async-modified", "fp32"))
SMALL = (("ddp", "fp32"), ("ps-sync", "fp32"))
#: Aims: how far the phases' sum may be from the step, and the steps' sum from the epoch.
PHASES, EPOCH, MIN_S, FIRST_STEP = 0.02, 0.01, 0.02, 3.0


def run(stage: Stage) -> None:
    folder, dataset = digits(stage)
    if not record.can_validate_records():
        stage.skip("records are valid", "fastjsonschema is not installed")
    cells = ON_GPU if stage.on_cuda else SMALL if stage.small else ON_CPU
    # On CPUs the cells share one import of PyTorch, as those of a workflow do.
    with nullcontext() if stage.on_cuda else run_shared_fork_server():
        for variant, precision in cells:
            s = settings(
                variant, stage.device, precision=precision, dataset=dataset, per_worker_batch=32,
                epochs=30 if stage.on_cuda else 2,
            )  # fmt: skip
            name = f"{variant}-{precision}"
            with stage.attempt(f"{name}: the launcher writes a record"):
                look_at(stage, name, launched(stage, name, s, folder), s.precision)
    stage.needs_gpu(
        "records have the GPU's UUID", "records have energy", "records have MFU",
        "the first step is no slower than three median ones",
    )  # fmt: skip


def digits(stage: Stage) -> tuple[Path, str]:
    """Digits where scikit-learn is, which holds them; else images made up."""
    try:
        folder = stage.scratch / "digits"
        prepare_data_set("digits", folder)
        return folder, "digits"
    except (ImportError, DataError) as e:
        stage.skip("cells on digits", f"made-up images instead: {e}")
        return prepared(stage, 1024), "synthetic"


def launched(stage: Stage, name: str, s: Any, data_dir: Path) -> tuple[dict[str, Any], RunFolder]:
    """The record of a cell, validated by the reader, and its run folder."""
    folder = stage.folder(name)
    done = subprocess.run(
        launch_command(s, data_dir, folder), capture_output=True, text=True,
        timeout=max(stage.left_s - 1, 1),
    )  # fmt: skip
    print(done.stdout, done.stderr, flush=True)
    if done.returncode:
        raise RuntimeError("; ".join((done.stdout + done.stderr).strip().splitlines()[-3:]))
    return record.read_record(folder / "record.json"), RunFolder.from_log_dir(folder / "logs")


def look_at(
    stage: Stage, name: str, found: tuple[dict[str, Any], RunFolder], precision: str
) -> None:
    rec, run_folder = found
    t, device = rec["time"], rec["provenance"]["device"]
    stage.check(
        f"{name}: the record is there, ok, of this device",
        rec["status"] == "ok" and device == stage.device,
        f"{rec['status']} on {device}",
    )
    stage.check_invariants(name, rec)
    step_ms, phases_ms = t["step_ms"]["mean"], sum(t["breakdown_ms"].values())
    stage.check(
        f"{name}: phases sum to the step",
        abs(phases_ms / step_ms - 1) <= PHASES,
        f"{phases_ms:.3f} of {step_ms:.3f} ms",
    )
    steps_s = t["step_ms"]["count"] * step_ms / 1e3
    stage.check(
        f"{name}: steps sum to the epochs",
        abs(steps_s - t["train_time_s"]) <= max(EPOCH * t["train_time_s"], MIN_S),
        f"{steps_s:.4f} of {t['train_time_s']:.4f} s",
    )
    seen, applied = rec["batch"]["samples_seen"], rec["batch"]["samples_applied"]
    # In fp16 the first steps find the loss scale, and are skipped.
    enough = applied == seen if precision != "fp16" else 0.9 * seen <= applied <= seen
    stage.check(f"{name}: samples are applied", enough, f"{applied} of {seen}")
    accuracy = rec["score"]["final"]
    stage.check(f"{name}: an accuracy", accuracy is not None, f"{accuracy}")
    steps_ms = run_folder.read_worker_result(0)["step_ms"]
    stage.figures(**{name: {"step_ms": t["step_ms"], "breakdown_ms": t["breakdown_ms"],
                            "accuracy": accuracy, "memory": rec["memory"], "compute": rec["compute"],
                            "energy": rec["energy"], "setup_s": t["setup_s"],
                            "warmup_s": t["warmup_s"], "first_steps_ms": steps_ms[:3]}})  # fmt: skip
    if stage.on_cuda:
        of_the_gpu(stage, name, rec, steps_ms, precision)


def of_the_gpu(
    stage: Stage, name: str, rec: dict[str, Any], steps_ms: list[float], precision: str
) -> None:
    first, middle = steps_ms[0], median(steps_ms)
    stage.check(
        f"{name}: the first step is no slower than three median ones",
        first < FIRST_STEP * middle,
        f"{first:.2f} ms, median {middle:.2f} ms",
    )
    gpu = rec["workers"][0]["provenance"].get("gpu", {})
    joules = (rec["energy"] or {}).get("train_joules")
    if str(gpu.get("uuid")).startswith("MIG-"):
        stage.skip(f"{name}: energy of the training", "a MIG instance has no counter of its own")
    elif "uuid" in gpu:
        stage.check(f"{name}: the GPU's UUID", str(gpu["uuid"]).startswith("GPU-"), gpu["uuid"])
        stage.check(f"{name}: energy of the training", bool(joules), f"{joules} J")
    else:
        stage.skip(f"{name}: UUID and energy", "NVML does not answer (nvidia-ml-py)")
    peak = find_datasheet(gpu.get("name", ""))
    if peak is None or peak.get_peak_tflops(precision) is None:
        stage.skip(f"{name}: MFU", f"no datasheet peak of {gpu.get('name')} in {precision}")
    else:
        mfu = (rec["compute"] or {}).get("mfu")
        stage.check(f"{name}: MFU", mfu is not None and 0 < mfu < 1, f"{mfu}")
