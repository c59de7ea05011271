"""Stage 6: checks the workers of a parameter server: overlap, pinned memory, overflow, transports."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from stage import Child, Stage, in_child, median
from stratbench.cell.settings import Settings
from stratbench.telemetry.clock import synchronise
from stratbench.train import loop
from stratbench.train import worker as worker_process
from stratbench.train.job import Job
from stratbench.workload.data.device_data import draw_epoch_order
from subject import (
    Trainee,
    differ,
    job_of,
    prepared,
    served,
    set_up,
    settings,
    trace_events,
    weights_of,
)

STEPS = 10  # of an epoch
#: The epochs of the run: one as it comes, two armed and unarmed in turns, one under the profiler.
EPOCHS, TURNS, PROFILED = 4, (1, 2), 3
#: Aims: share of the copies to the host that run beside kernels; bandwidth in pinned memory's.
OVERLAP, BANDWIDTH = 0.5, 0.8
#: How far the weights may be from single's after ten steps, in lengths of single's change.
LIMITS = {"fp64": 1e-9, "fp32": 1e-2, "bf16": 0.5, "fp16": 0.5}


def run(stage: Stage) -> None:
    # A backward that takes several times as long as its gradients' way to the host, in 16 bits, too; else
    # most of the copies could not overlap it.
    model, batch = ("resnet50", 2048) if stage.on_cuda else ("resnet-compact", 4)
    data_dir = prepared(stage, STEPS * batch)
    for precision in ("fp32", "bf16", "fp16") if stage.on_cuda else ("fp64",):
        name = f"{model} {precision}"
        with stage.attempt(f"{name}: ten steps are single's"):
            s = settings(
                "ps", stage.device, model=model, precision=precision, per_worker_batch=batch,
                epochs=EPOCHS,
            )  # fmt: skip
            found = with_servers(stage, s, data_dir, f"pushed-{precision}", pushed)
            look_at(stage, name, found, precision)
    small = prepared(stage, 96)
    if not stage.small:
        overflow(stage, small)
        transports(stage, small)
    stage.needs_gpu(
        "armed pushes are no slower than unarmed ones", "copies to the host overlap kernels",
        "registered memory is as fast as pinned memory", "two workers share one GPU",
    )  # fmt: skip


def with_servers(stage: Stage, s: Settings, data_dir: Path, name: str, function: Any) -> Any:
    """`function(job)` in a process, with the job's servers in others."""
    job = job_of(s, data_dir, stage.folder(name))
    with served(job):
        return in_child(stage, function, job)


# ---------------------------------------------------------------- one worker's pushes


def pushed(job: Job) -> dict[str, Any]:
    """Step times armed and unarmed, overlap, bandwidths, and the distance from single."""
    single = alone(job)
    t = set_up(job)
    strategy, data, worker = t.strategy, t.data, t.worker
    loop.warm_up(strategy, data, worker)
    before = weights_of(strategy)
    times: dict[bool, list[float]] = {True: [], False: []}
    recording: Any = None
    done = 0
    for epoch, where in strategy.iter_tickets():
        if epoch == PROFILED and recording is None and worker.device.type == "cuda":
            recording = profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            recording.__enter__()
        armed = epoch not in TURNS or done % 2 == 0
        if not armed:
            strategy.channel.send_gradients_during_backward = lambda *args, **kwargs: None
        synchronise(worker.device)
        began = time.perf_counter()
        order = draw_epoch_order(data.train_samples, worker.settings.seed, epoch).to(worker.device)
        strategy.step(*data.make_training_batch(order[where]))
        synchronise(worker.device)
        if epoch in TURNS:
            times[armed].append(1e3 * (time.perf_counter() - began))
        vars(strategy.channel).pop("arm", None)
        done += 1
    overlap = None
    if recording is not None:
        recording.__exit__(None, None, None)
        trace = job.folder.profile_trace_path
        recording.export_chrome_trace(str(trace))
        overlap = overlapped(trace)
    found = {"armed_ms": median(times[True]), "unarmed_ms": median(times[False])}
    found |= {"steps": done, "overlap": overlap, "transports": strategy.channel.transports}
    found["skipped"] = strategy.report()["details"]["skipped_steps"]
    if worker.device.type == "cuda":
        found |= bandwidths(strategy.flat)
    strategy.load_snapshot(0)
    found["apart"] = differ(before, single, weights_of(strategy))
    strategy.close()
    return found


def alone(job: Job) -> list[torch.Tensor]:
    """The weights after the same first epoch without a server."""
    own = settings("single", job.settings.device)
    t = set_up(replace(job, settings=replace(job.settings, strategy="single", options=own.options)))
    loop.warm_up(t.strategy, t.data, t.worker)
    order = draw_epoch_order(t.data.train_samples, t.worker.settings.seed, 0).to(t.worker.device)
    for indices in t.strategy.batches(order, 0):
        t.strategy.step(*t.data.make_training_batch(indices))
    return weights_of(t.strategy)


def overlapped(trace: Path) -> dict[str, float]:
    """Time of copies to the host (ms), and the share of it during which a kernel ran."""
    kernels = merged([(e["ts"], e["ts"] + e["dur"]) for e in trace_events(trace, "kernel")])
    copies = [e for e in trace_events(trace, "gpu_memcpy") if "DtoH" in e["name"]]
    total = sum(e["dur"] for e in copies)
    beside = sum(
        max(0.0, min(stop, e["ts"] + e["dur"]) - max(start, e["ts"]))
        for e in copies
        for start, stop in kernels
    )
    return {"copies_ms": total / 1e3, "share": beside / total if total else 0.0}


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as intervals that do not overlap."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def bandwidths(flat: Any) -> dict[str, float]:
    """GB/s from the device to memory that we registered, and to memory that PyTorch pinned."""
    pinned = torch.empty(flat.grads.shape, dtype=flat.grads.dtype, pin_memory=True)
    n_bytes = flat.grads.numel() * flat.grads.element_size()
    found: dict[str, list[float]] = {"registered": [], "pinned": []}
    for _ in range(5):
        for name, target in (("registered", flat.host.grads), ("pinned", pinned)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(flat.grads, non_blocking=True)
            torch.cuda.synchronize()
            found[name].append(n_bytes / 1e9 / (time.perf_counter() - began))
    return {f"{name}_gb_per_s": median(values) for name, values in found.items()}


def look_at(stage: Stage, name: str, found: dict[str, Any], precision: str) -> None:
    stage.figures(**{name: found})
    stage.check(
        f"{name}: ten steps are single's",
        found["apart"] <= LIMITS[precision],
        f"{found['apart']:.1e} of single's change; {found['skipped']} skipped",
    )
    stage.check(
        f"{name}: every ticket is settled", found["steps"] == EPOCHS * STEPS, f"{found['steps']}"
    )
    if not stage.on_cuda:
        return
    armed, unarmed = found["armed_ms"], found["unarmed_ms"]
    stage.check(
        f"{name}: armed pushes are no slower than unarmed ones",
        armed <= 1.02 * unarmed,
        f"{armed:.1f} and {unarmed:.1f} ms",
    )
    share = found["overlap"]["share"]
    stage.check(f"{name}: copies overlap kernels", share > OVERLAP, f"{share:.0%} of their time")
    ratio = found["registered_gb_per_s"] / found["pinned_gb_per_s"]
    stage.check(
        f"{name}: registered memory is as fast as pinned memory",
        ratio >= BANDWIDTH,
        f"{found['registered_gb_per_s']:.1f} and {found['pinned_gb_per_s']:.1f} GB/s",
    )


# ---------------------------------------------------------------- overflow and transports


def overflow(stage: Stage, data_dir: Path) -> None:
    """A loss scale that no fp16 gradient survives: steps are skipped, the run goes on, weights stay."""
    with stage.attempt("an overflow is skipped"):
        s = settings("ps", stage.device, model="resnet-compact", precision="fp16")
        skipped, steps, moved = with_servers(stage, s, data_dir, "overflow", overflowed)
        stage.check(
            "an overflow is skipped",
            0 < skipped <= steps and (moved == 0 or skipped < steps),
            f"{skipped} of {steps} steps; weights moved by {moved:.1e}",
        )


def overflowed(job: Job) -> tuple[int, int, float]:
    t: Trainee = set_up(job)
    strategy, data, worker = t.strategy, t.data, t.worker
    loop.warm_up(strategy, data, worker)
    before = weights_of(strategy)
    strategy.scale.value = 2.0**60
    steps = 0
    for epoch, where in strategy.iter_tickets():
        order = draw_epoch_order(data.train_samples, worker.settings.seed, epoch).to(worker.device)
        strategy.step(*data.make_training_batch(order[where]))
        steps += 1
    strategy.load_snapshot(0)
    pairs = zip(before, weights_of(strategy), strict=True)
    moved = max(float((a - b).abs().max()) for a, b in pairs)
    skipped = strategy.report()["details"]["skipped_steps"]
    strategy.close()
    return skipped, steps, moved


def transports(stage: Stage, data_dir: Path) -> None:
    """Two workers on one device by shared memory, and one by TCP: the worker's own runs."""
    with stage.attempt("two workers share one device"):
        s = settings("ps-async", stage.device, model="vgg-compact", gpus=2, epochs=2)
        results = runs(stage, job_of(s, data_dir, stage.folder("two")))
        samples = [r["samples"] for r in results]
        used = {name for r in results for name in r["strategy"]["details"]["transports"]}
        stage.check(
            "two workers share one device",
            sum(samples) == 2 * 96 and min(samples) > 0 and used == {"shm"},
            f"{samples} samples, {used}, {[r['status'] for r in results]}",
        )
    with stage.attempt("a worker pushes over TCP"):
        s = settings("ps", stage.device, options={"transport": "tcp"}, epochs=2)
        (result,) = runs(stage, job_of(s, data_dir, stage.folder("tcp")))
        used = result["strategy"]["details"]["transports"]
        stage.check(
            "a worker pushes over TCP",
            result["samples"] == 2 * 96 and used == ["tcp"] and result["status"] == "ok",
            f"{result['samples']} samples, {used}, {result['status']}",
        )


def runs(stage: Stage, job: Job) -> list[dict[str, Any]]:
    """What each worker of the job returns; all of them use the first device."""
    with served(job):
        workers = [
            Child(worker_process.train_as_worker, job, rank, 0) for rank in range(job.world_size)
        ]
        return [worker.result(stage.left_s - 1) for worker in workers]
