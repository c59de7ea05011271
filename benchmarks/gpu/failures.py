"""Stage 9: cells that fail: how the launcher classifies them, and what they leave on the GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from stage import Stage, in_child
from stratbench.cell import record
from stratbench.cell.run_folder import RunFolder, format_worker_name
from stratbench.train import worker as worker_process
from stratbench.train.job import Job
from subject import job_of, launch_command, prepared, set_up, settings

FOREVER = 1_000_000  # epochs
LIMIT_S = 15.0
#: A batch of MODEL whose activations no GPU holds. One sample more, and a tensor would have 2^31 elements,
#: which cuDNN refuses in other words than for want of memory.
MODEL, TOO_LARGE = "resnet50", (1 << 17) - 1
#: Steps with less and less memory; cuDNN's search takes seconds in each.
LEVELS = 6


def run(stage: Stage) -> None:
    data_dir = prepared(stage, 96)
    before_bytes = in_child(stage, free_bytes) if stage.on_cuda else 0
    with stage.attempt("a killed worker and a time limit"):
        killed_and_late(stage, data_dir)
    if stage.on_cuda:
        with stage.attempt("a killed worker's memory is free again"):
            # Within what drivers keep; nothing of ours runs now.
            kept = before_bytes - in_child(stage, free_bytes)
            holds = kept < 64 << 20
            said = f"{kept / 2**20:.0f} MiB less than before"
            stage.check("a killed worker's memory is free again", holds, said)
        with stage.attempt("a batch too large is a result"):
            too_large(stage, data_dir)
        with stage.attempt("what runs out of memory is known as such"):
            tight(stage, data_dir)
    stage.needs_gpu(
        "a killed worker's memory is free again", "a batch too large is a result",
        "what cuDNN says without memory is known as such", "two launchers share no GPU",
    )  # fmt: skip


def start(
    stage: Stage, name: str, data_dir: Path, limit_s: float, **changes: Any
) -> tuple[subprocess.Popen[str], Path]:
    folder = stage.folder(name)
    s = settings("ddp", stage.device, epochs=FOREVER, **changes)
    process = subprocess.Popen(
        launch_command(s, data_dir, folder, limit_s), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return process, folder


def killed_and_late(stage: Stage, data_dir: Path) -> None:
    """Two launchers: the worker of one is killed; the other, which wants the same GPU, runs too long."""
    killed, folder = start(stage, "killed", data_dir, 0)
    run_folder = RunFolder.from_log_dir(folder / "logs")
    while not run_folder.epoch_results_path.exists():
        if killed.poll() is not None or stage.left_s < 5:
            raise RuntimeError(
                f"it does not train: {killed.stdout and killed.stdout.read()[-500:]}"
            )
        time.sleep(0.05)
    late, late_folder = start(stage, "late", data_dir, LIMIT_S)
    time.sleep(2)  # it asks for the GPU meanwhile
    pids = run_folder.get_pid_list_path(0).read_text(encoding="utf-8").split("\n")
    (pid,) = (int(line.split()[1]) for line in pids if line.startswith(f"{format_worker_name(0)} "))
    os.kill(pid, signal.SIGKILL)
    killed_at = time.time()
    output, _ = killed.communicate(timeout=max(stage.left_s - 1, 1))
    print(output)
    failure = json.loads((folder / "logs" / "failure.json").read_text(encoding="utf-8"))
    told = " ".join([str(failure["reason"]), *failure["processes"]])
    stage.check(
        "a killed worker leaves evidence and no record",
        killed.returncode == 1 and "SIGKILL" in told and not (folder / "record.json").exists(),
        told[:200],
    )
    output, _ = late.communicate(timeout=max(stage.left_s - 1, 1))
    print(output)
    path = late_folder / "record.json"
    if not path.exists():  # of a host so slow that it took no step
        told = record.read_failure_reason(late_folder / "logs") or "no evidence"
        slow = told.startswith("no step within the cell's limit")
        stage.check("a time limit is a result", slow, told[:200])
        return
    rec = record.read_record(path)
    stage.check(
        "a time limit is a result",
        late.returncode == 0 and rec["status"] == "timeout",
        f"{rec['status']}: {rec['reason']}",
    )
    stage.check_invariants("a time limit", rec)
    if stage.on_cuda:
        started = datetime.fromisoformat(rec["provenance"]["started"]).timestamp()
        stage.check(
            "two launchers share no GPU",
            started >= int(killed_at),
            f"the second began {started - killed_at:.0f} s after the first was killed",
        )


def too_large(stage: Stage, data_dir: Path) -> None:
    process, folder = start(stage, "large", data_dir, 0, model=MODEL, per_worker_batch=TOO_LARGE)
    output, _ = process.communicate(timeout=max(stage.left_s - 1, 1))
    print(output)
    rec = record.read_record(folder / "record.json")
    holds = process.returncode == 0 and rec["status"] == "oom"
    stage.check("a batch too large is a result", holds, f"{rec['status']}: {rec['reason']}")
    stage.check_invariants("a batch too large", rec)


def tight(stage: Stage, data_dir: Path) -> None:
    """Steps with less and less memory, until cuDNN has no room for its workspaces."""
    s = settings("single", stage.device, model=MODEL, per_worker_batch=64)
    job = job_of(s, data_dir, stage.folder("tight"))
    found = in_child(stage, starved, job, stage.deadline_s - 10)
    unknown = [f for f in found if not f["known"]]
    stage.figures(starved=found)
    stage.check(
        "what runs out of memory is known as such",
        bool(found) and not unknown,
        f"{len(found)} failures; not known: {[f['message'] for f in unknown]}",
    )
    if not any("unable to find an engine" in f["message"] for f in found):
        stage.skip("what cuDNN says without memory is known as such", "it never said it")


def starved(job: Job, until_s: float) -> list[dict[str, Any]]:
    """The first line of each failure, and whether the worker calls it out of memory.

    No step begins after `until_s` of time.monotonic().
    """
    t = set_up(job)
    x, y = t.data.make_training_batch(torch.arange(64, device=t.worker.device))
    t.strategy.step(x, y)
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_reserved()
    _, total_bytes = torch.cuda.mem_get_info()
    held_bytes = torch.cuda.memory_allocated()
    found = []
    for step in range(LEVELS):
        if time.monotonic() > until_s:
            break
        torch.cuda.empty_cache()
        allowed = held_bytes + (peak_bytes - held_bytes) * (LEVELS - 1 - step) / LEVELS
        torch.cuda.set_per_process_memory_fraction(min(allowed / total_bytes, 1.0), 0)
        # Other shapes: cuDNN's search is made anew, with the memory that is left.
        n = 64 - step
        try:
            t.strategy.step(x[:n], y[:n])
            torch.cuda.synchronize()
        except Exception as e:
            known = worker_process.is_out_of_memory_error(e)
            found.append({"message": worker_process.format_error_line(e)[:200], "known": known})
        t.strategy.optimizer.zero_grad(set_to_none=True)
    return found


def free_bytes() -> int:
    """Free memory of the GPU; this process's own context is always in it."""
    return torch.cuda.mem_get_info(0)[0]
