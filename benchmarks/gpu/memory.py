"""Stage 5: compares the memory that training really takes with what the plan predicts.

More workers than one GPU has are ranks of a fake process group on real tensors: rank 0 holds what it
would hold, and its collectives return at once.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from stage import Stage, in_child
from stratbench.cell.settings import Settings
from stratbench.extensions.plan.against_records import get_measured_peak_bytes
from stratbench.extensions.plan.device_rates import CONTEXT_SHARE
from stratbench.extensions.plan.footprint.fake import replace_attribute
from stratbench.extensions.plan.footprint.footprint import Footprint, make_footprint
from stratbench.extensions.plan.footprint.request import Request, compute_data_bytes
from stratbench.study.config.schema import build_config_schema
from stratbench.telemetry.machine.cores import list_usable_cores
from stratbench.train import worker as worker_process
from stratbench.train.job import Job
from stratbench.workload.data.dataset import Dataset
from stratbench.workload.data.datasets import make_dataset_metadata
from stratbench.workload.network.models import compute_input_shape
from subject import job_of, prepared, served, settings, spec_of

#: Samples of a worker's batch on a GPU and on a CPU; the data set has one for each of 64 workers.
BATCH = {"cuda": 32, "cpu": 4}
MAX_WORKERS = 64
#: How far the peak may be from the plan's without cuDNN's search, whose workspaces it cannot know.
CLOSE = 0.02


@dataclass(frozen=True)
class Case:
    """A variant on rank 0 of `world` workers; `search`: with cuDNN's search for the fastest kernel."""

    variant: str
    world: int
    search: bool = False

    def __str__(self) -> str:
        return f"{self.variant} on {self.world}" + (", with cuDNN's search" if self.search else "")


ON_GPU = (
    *(Case(variant, 1) for variant in ("single", "ddp", "fsdp", "fsdp-never", "ps")),
    *(Case("fsdp", world) for world in (2, 4, 8, 16, 64)),
    *(Case(variant, 1, search=True) for variant in ("single", "fsdp")),
)
ON_CPU = (Case("ddp", 1), Case("fsdp", 4), Case("fsdp", 64), Case("ps", 1))
SMALL = (Case("fsdp", 4),)


def run(stage: Stage) -> None:
    cases = ON_GPU if stage.on_cuda else SMALL if stage.small else ON_CPU
    model = "vgg16" if stage.on_cuda else "resnet-compact"
    batch = BATCH[stage.device]
    data_dir = prepared(stage, MAX_WORKERS * batch)
    jobs = {}
    for case in cases:
        s = settings(
            case.variant, stage.device, model=model, gpus=case.world, per_worker_batch=batch
        )
        folder = stage.folder(f"{case.variant}-{case.world}-{case.search:d}")
        jobs[case] = job_of(s, data_dir, folder)
    with planned(stage, jobs) as plans:
        for case, job in jobs.items():
            with stage.attempt(f"{case}: memory"):
                with served(job) if case.variant == "ps" else nullcontext():
                    found = in_child(stage, measured, job, case)
                look_at(stage, case, job.settings, found, plans[case].result(stage.left_s))
    stage.needs_gpu(
        f"peaks are within {CLOSE:.0%} of the plan's", "cuDNN's search stays within the margin",
        "the allocator's gap, and what lies outside it",
    )  # fmt: skip


class planned:
    """The footprints of all jobs, made by other cores meanwhile: a future for each case."""

    def __init__(self, stage: Stage, jobs: dict[Case, Job]) -> None:
        workers = max(1, len(list_usable_cores()) - 1)
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))
        self._jobs, self._on_cuda = jobs, stage.on_cuda

    def __enter__(self) -> dict[Case, Any]:
        return {
            case: self._pool.submit(make_footprint, request_of(job.settings, self._on_cuda))
            for case, job in self._jobs.items()
        }

    def __exit__(self, *_: object) -> None:
        # Waited for: a pool left behind by a process that ends at once waits for ever.
        self._pool.shutdown(cancel_futures=True)


def request_of(s: Settings, on_cuda: bool) -> Request:
    return Request.from_settings(s, dataset_of(s), on_cuda, workers_per_node=s.gpus)


def dataset_of(s: Settings) -> Dataset:
    return make_dataset_metadata("synthetic", spec_of(MAX_WORKERS * s.per_worker_batch))


def measured(job: Job, case: Case) -> dict[str, Any]:
    """Memory and model states of rank 0 after the worker's own run of the job."""
    configure = worker_process.configure_torch

    def join_fake_group(job: Job, rank: int, device: torch.device) -> None:
        dist.init_process_group("fake", rank=0, world_size=case.world, store=FakeStore())

    def configure_torch(s: Settings, device: torch.device, threads: int) -> None:
        configure(s, device, threads)
        torch.backends.cudnn.benchmark = case.search

    with ExitStack() as stack:
        stack.enter_context(replace_attribute(worker_process, "configure_torch", configure_torch))
        if case.world > 1:
            stack.enter_context(
                replace_attribute(worker_process, "join_process_group", join_fake_group)
            )
        result = worker_process.train_as_worker(job, 0, 0)
    found = {key: result[key] for key in ("memory", "model_states", "status", "steps")}
    if not job.use_cuda:
        return found | {"resident_threads": 0}
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    return found | {"resident_threads": resident_threads(), "gpu_bytes": total_bytes}


def resident_threads() -> int:
    """How many threads this GPU holds at once, on which the buffers of sums depend."""
    gpu = torch.cuda.get_device_properties(0)
    return gpu.multi_processor_count * gpu.max_threads_per_multi_processor


def look_at(stage: Stage, case: Case, s: Settings, found: dict[str, Any], plan: Footprint) -> None:
    used, states = found["memory"], found["model_states"]
    stage.check(
        f"{case}: model states are the plan's",
        states == plan.model_states_bytes,
        f"{states}, plan {plan.model_states_bytes}",
    )
    predicted = plan.compute_training_peak(s.per_worker_batch, found["resident_threads"]).n_bytes
    data = dataset_of(s)
    predicted += compute_data_bytes(data, compute_input_shape(s.model, data.shape), s.augment)
    figures = used | {"steps": found["steps"], "predicted_bytes": predicted}
    if stage.on_cuda:
        peak_bytes = get_measured_peak_bytes(used, 0)
        off = peak_bytes / predicted - 1
        margin = build_config_schema()["properties"]["cluster"]["properties"]["memory_margin"][
            "default"
        ]
        limits = (-1.0, margin) if case.search else (-CLOSE, CLOSE)
        stage.check(
            f"{case}: the peak is the plan's",
            limits[0] <= off <= limits[1],
            f"{peak_bytes / 2**20:.0f} MiB and {used.get('cublas_bytes', 0) / 2**20:.0f} of cuBLAS's, "
            f"plan {predicted / 2**20:.0f}: {off:+.1%}",
        )
        figures["allocator_gap_bytes"] = used["reserved_peak_bytes"] - used["peak_bytes"]
        outside = used.get("nvml_process_used_bytes", used.get("nvml_used_bytes"))
        if outside is None:
            stage.skip(f"{case}: memory outside the allocator", "NVML does not answer")
        else:
            outside -= used["reserved_peak_bytes"]
            kept_bytes = CONTEXT_SHARE * found["gpu_bytes"]
            figures["outside_allocator_bytes"] = outside
            stage.check(
                f"{case}: what lies outside the allocator is what the plan keeps for it",
                outside <= kept_bytes,
                f"{outside / 2**20:.0f} MiB, plan {kept_bytes / 2**20:.0f}",
            )
    stage.figures(**{str(case): figures})
