"""Stage 4: compares the step times of single, ddp and fsdp, measured in turns in one process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch

from stage import Stage, median
from stratbench.telemetry.clock import StepClock, synchronise
from stratbench.train import loop
from stratbench.train import worker as worker_process
from stratbench.workload.data.device_data import DeviceData
from stratbench.workload.network import models
from subject import Trainee, job_of, prepared, set_up, settings

VARIANTS = ("single", "ddp", "fsdp", "fsdp-never")
#: FSDP's step in DDP's, on one GPU, where neither sends anything.
AIM = 1.05


def run(stage: Stage) -> None:
    if stage.on_cuda:
        names, precisions = ("resnet50", "vgg16", "convnext_large"), ("fp16", "bf16")
        sizes = {"batch": 128, "warm_up": 20, "blocks": 6, "steps": 10}
    else:
        names, precisions = ("resnet-compact",), ("fp32",)
        sizes = {"batch": 8, "warm_up": 2, "blocks": 3, "steps": 3}
    data_dir = prepared(stage, sizes["batch"] * sizes["steps"])
    first = job_of(settings("ddp", stage.device), data_dir, stage.folder("group"))
    device = torch.device(stage.device, 0) if stage.on_cuda else torch.device("cpu")
    worker_process.configure_torch(first.settings, device, 1)
    worker_process.join_process_group(first, 0, device)
    for model in names:
        for precision in precisions:
            name = f"{model} {precision}"
            try:
                if stage.left_s < 12 and stage.on_cuda:
                    raise TimeoutError("no time left for it")
                compare(stage, name, model, precision, data_dir, sizes)
            except Exception as e:
                if worker_process.is_out_of_memory_error(e):
                    stage.skip(f"{name}: step times", "this GPU has too little memory for four")
                else:
                    stage.check(f"{name}: step times", False, worker_process.format_error_line(e))
            gc.collect()
            if stage.on_cuda:
                torch.cuda.empty_cache()
    stage.needs_gpu(f"fsdp's step is at most {AIM} of ddp's")


def compare(
    stage: Stage, name: str, model: str, precision: str, data_dir: Path, sizes: dict[str, int]
) -> None:
    """All variants set up at once; then blocks of steps in turns, each time in another order."""
    # Large models' initial weights take seconds, and are the same for every variant.
    once = cache(models.build_model)
    build = lambda *args: deepcopy(once(*args))  # noqa: E731
    trainees, setup = prepare(stage, name, model, precision, data_dir, sizes, build)
    stage.figures(**{name: setup})
    clocks = {variant: StepClock(t.worker.device) for variant, t in trainees.items()}
    for block in range(sizes["blocks"]):
        turn = block % len(VARIANTS)
        for variant in VARIANTS[turn:] + VARIANTS[:turn]:
            t = trainees[variant]
            # An epoch of the data set is one block.
            loop.train_epoch(t.strategy, t.data, t.worker, clocks[variant], t.log, block)
        medians = {v: block_medians(clock, sizes, block + 1) for v, clock in clocks.items()}
        stage.figures(**{name: {v: setup[v] | {"blocks_ms": medians[v]} for v in VARIANTS}})
    judge(stage, name, medians, setup)
    for t in trainees.values():
        t.strategy.close()


def prepare(
    stage: Stage,
    name: str,
    model: str,
    precision: str,
    data_dir: Path,
    sizes: dict[str, int],
    build: Callable[..., torch.nn.Module],
) -> tuple[dict[str, Trainee], dict[str, dict[str, float]]]:
    """Every variant, set up and warmed up, and the seconds that each took for it."""
    trainees: dict[str, Trainee] = {}
    setup: dict[str, dict[str, float]] = {}
    data: DeviceData | None = None
    for variant in VARIANTS:
        s = settings(
            variant, stage.device, model=model, precision=precision,
            per_worker_batch=sizes["batch"], warmup_steps=sizes["warm_up"],
        )  # fmt: skip
        job = job_of(s, data_dir, stage.folder(f"{name}-{variant}".replace(" ", "-")))
        began = time.perf_counter()
        t = set_up(job, data, build)
        synchronise(t.worker.device)
        built = time.perf_counter()
        data = t.data
        loop.warm_up(t.strategy, t.data, t.worker)
        synchronise(t.worker.device)
        setup[variant] = {"setup_s": built - began, "warmup_s": time.perf_counter() - built}
        trainees[variant] = t
    return trainees, setup


def judge(
    stage: Stage,
    name: str,
    medians: dict[str, list[float]],
    setup: dict[str, dict[str, float]],
) -> None:
    """Ratios of the blocks' medians, with their range, against the aim."""
    found: dict[str, Any] = {
        v: setup[v] | {"step_ms": median(medians[v]), "blocks_ms": medians[v]} for v in VARIANTS
    }
    for one, other in (("ddp", "single"), ("fsdp", "ddp"), ("fsdp-never", "ddp")):
        ratios = [a / b for a, b in zip(medians[one], medians[other], strict=True)]
        found[f"{one} / {other}"] = {"median": median(ratios), "range": [min(ratios), max(ratios)]}
    stage.figures(**{name: found})
    told = "; ".join(
        f"{key} {value['median']:.3f} ({value['range'][0]:.3f} to {value['range'][1]:.3f})"
        for key, value in found.items()
        if "median" in value
    )
    low = found["fsdp / ddp"]["range"][0]
    # The range over 6 blocks holds the median ratio with 97 % (1 - 2 / 2^6).
    holds = low <= AIM if stage.on_cuda else low > 0
    what = f"fsdp's step is at most {AIM} of ddp's" if stage.on_cuda else "step times are told"
    stage.check(f"{name}: {what}", holds, told)


def block_medians(clock: StepClock, sizes: dict[str, int], blocks: int) -> list[float]:
    """The median step of each of the first `blocks` blocks, in ms."""
    steps = clock.step_ms
    n = sizes["steps"]
    return [median(steps[k * n : (k + 1) * n]) for k in range(blocks)]
