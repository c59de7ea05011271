"""Stage 8: checks the GPU's energy and power counters, and the rate of operations it reaches."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from stage import Stage, in_child
from stratbench.telemetry.machine.hardware import find_datasheet
from stratbench.telemetry.machine.nvml import Gpu, Nvml
from stratbench.telemetry.memory import get_cuda_uuid
from stratbench.train import efficiency
from stratbench.train import worker as worker_process
from stratbench.train.job import Job
from stratbench.workload.network import models
from subject import job_of, prepared, settings

PRODUCT = 8192  # rows of the two square matrices
LOADED_S, SAMPLED_S = 8.0, 0.05
#: Aims: the energy counter against the integral of power; the share of the datasheet's peak.
ENERGY, SHARE = 0.10, (0.7, 1.0)


def run(stage: Stage) -> None:
    with stage.attempt("achieved operations follow from raw figures"):
        data_dir = prepared(stage, 96)
        precision = "bf16" if stage.on_cuda else "fp32"
        s = settings("single", stage.device, model="resnet-compact", precision=precision, epochs=2)
        said = in_child(stage, achieved, job_of(s, data_dir, stage.folder("single")))
        stage.figures(achieved=said)
        off = said["recorded"] / said["expected"] - 1
        stage.check("achieved operations follow from raw figures", abs(off) < 1e-9, f"{off:+.1e}")
        if said["mfu"] is not None:
            same = abs(said["mfu"] * said["peak"] / said["recorded"] - 1) < 1e-9
            stage.check("MFU is achieved operations of the peak", same, f"{said['mfu']:.4f}")
    names = (
        "NVML and CUDA name the same GPU", "the energy counter is the integral of power",
        "a matrix product reaches the datasheet",
    )  # fmt: skip
    if not stage.needs_gpu(*names):
        return
    with stage.attempt(names[0]):
        found = in_child(stage, loaded)
        stage.figures(loaded={k: v for k, v in found.items() if k != "samples"})
        if found["uuid"] is None:
            for name in names[:2]:
                stage.skip(name, f"NVML cannot tell: {found['reason']}")
        else:
            stage.check(names[0], found["uuid"] == found["uuid_by_index"], found["uuid"])
            energy_and_power(stage, names[1], found["samples"])
        share = found["share"]
        if share is None:
            stage.skip(names[2], f"no datasheet peak of {found['gpu']}")
        else:
            holds = SHARE[0] <= share <= SHARE[1]
            stage.check(names[2], holds, f"{found['tflops']:.0f} TFLOP/s, {share:.0%} of the peak")


def achieved(job: Job) -> dict[str, Any]:
    """Operations a second of a run as its record would have them, and by our own count."""
    result = worker_process.train_as_worker(job, 0, 0)
    run = {"samples_seen": result["samples"], "samples_applied": result["samples"]}
    run["train_time_s"] = result["train_time_s"]
    found = efficiency.compute_flops_and_mfu(job, [result], run) or {}
    shape = models.compute_input_shape(job.settings.model, job.data_shape)
    model = models.build_model(job.settings.model, result["model"]["classes"], shape).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, *shape))
    expected = 3 * counter.get_total_flops() * result["samples"] / result["train_time_s"]
    return {
        "recorded": found["achieved_flops_per_s"],
        "expected": expected,
        "mfu": found.get("mfu"),
        "peak": found.get("peak_flops_per_s"),
    }


def loaded() -> dict[str, Any]:
    """Large products in bf16 for some seconds, with NVML's counters meanwhile."""
    device = torch.device("cuda", 0)
    name, uuid = torch.cuda.get_device_name(device), get_cuda_uuid(device)
    nvml = Nvml()
    gpu, reason, by_index = nvml.find_gpu_by_uuid(uuid), nvml.reason, None
    if gpu is not None and gpu.index is None:
        gpu, reason = None, "a MIG instance has no index and no power of its own"
    if gpu is not None:
        by_index = nvml.list_gpus()[gpu.index].read_identity_and_settings().get("uuid")
    a, b = (
        torch.randn(PRODUCT, PRODUCT, device=device, dtype=torch.bfloat16) for _ in range(2)
    )  # random: a product of zeros draws less power, and is faster
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    done = threading.Event()
    samples: list[dict[str, float]] = []
    sampler = threading.Thread(target=sample, args=(gpu, done, samples))
    sampler.start()
    began, products = time.perf_counter(), 0
    while time.perf_counter() - began < LOADED_S:
        for _ in range(10):
            a @ b
        torch.cuda.synchronize()
        products += 10
    seconds = time.perf_counter() - began
    done.set()
    sampler.join()
    tflops = 2 * PRODUCT**3 * products / seconds / 1e12
    peak = find_datasheet(name)
    datasheet = peak.get_peak_tflops("bf16") if peak else None
    return {
        "gpu": name,
        "uuid": uuid if gpu is not None else None,
        "uuid_by_index": by_index,
        "reason": reason,
        "tflops": tflops,
        "share": tflops / datasheet if datasheet else None,
        "samples": samples,
    }


def sample(gpu: Gpu | None, done: threading.Event, samples: list[dict[str, float]]) -> None:
    while gpu is not None and not done.wait(SAMPLED_S):
        t_s = time.perf_counter()
        found = gpu.read_counters()
        if "energy_j" in found and "power_w" in found:
            samples.append({"t_s": t_s, "energy_j": found["energy_j"], "power_w": found["power_w"]})


def energy_and_power(stage: Stage, what: str, samples: list[dict[str, float]]) -> None:
    """Over the later half: the driver averages power over a second, and load has just begun."""
    late = samples[len(samples) // 2 :]
    if len(late) < 10:
        stage.check(what, False, f"{len(samples)} samples with energy and power")
        return
    counted = late[-1]["energy_j"] - late[0]["energy_j"]
    pairs = pairwise(late)
    integral = sum((b["t_s"] - a["t_s"]) * (a["power_w"] + b["power_w"]) / 2 for a, b in pairs)
    off = counted / integral - 1
    stage.figures(energy_j=round(counted, 1), integral_of_power_j=round(integral, 1))
    stage.check(what, abs(off) <= ENERGY, f"{counted:.0f} J, {integral:.0f} J: {off:+.1%}")
