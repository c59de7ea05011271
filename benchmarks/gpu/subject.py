"""The small cells that the stages train, built by the functions that a worker process calls."""

from __future__ import annotations

import gzip
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stage import Child, ChildFailed, Stage, end_tree
from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.extensions.servers.node import list_server_configs_of_node
from stratbench.extensions.servers.process import serve_parameters
from stratbench.extensions.servers.ps.server import run_server
from stratbench.extensions.servers.wire.handshake import load_secret, make_secret, write_secret
from stratbench.strategies import get_option_defaults, get_strategy_class
from stratbench.strategies.base import Strategy, Worker
from stratbench.telemetry.shards import gather_full_tensor
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train import worker as worker_process
from stratbench.train.job import Job
from stratbench.workload.data.device_data import DeviceData
from stratbench.workload.data.prepare import prepare_data_set
from stratbench.workload.data.prepared import read_unverified_metadata
from stratbench.workload.network import models
from stratbench.workload.network.precision import get_batch_memory_format, get_weights_dtype

#: The variants that are looked at, by name: a strategy and its options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("single", {}),
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "fsdp-never": ("fsdp", {"reshard_after_forward": "never"}),
    "fsdp-policy": ("fsdp", {"mixed_precision": "policy"}),
    "ps": ("ps-sync", {}),
}


def settings(variant: str, stage_device: str, **changes: Any) -> Settings:
    """Settings of one worker with batches of 8; `changes` replace any of them."""
    strategy, options = VARIANTS.get(variant, (variant, {}))
    base = Settings(
        strategy=strategy, options=get_option_defaults(strategy) | options, model="vgg-compact",
        dataset="synthetic", gpus=1, seed=7, epochs=1, global_batch=8, per_worker_batch=8, lr=0.01,
        momentum=0.9, weight_decay=1e-4, nesterov=False, precision="fp32", augment=False,
        warmup_steps=3, device=stage_device, threads=1, slowdown=None,
    )  # fmt: skip
    if "options" in changes:
        changes["options"] = base.options | changes["options"]
    s = replace(base, **changes)
    return replace(s, global_batch=s.per_worker_batch * s.gpus)


def spec_of(train_samples: int) -> dict[str, Any]:
    """A synthetic data set like CIFAR-10 but for its number of samples."""
    return {
        "source": "synthetic", "train_samples": train_samples, "test_samples": 32, "classes": 10,
        "channels": 3, "size": 32,
    }  # fmt: skip


def prepared(stage: Stage, train_samples: int) -> Path:
    """The folder of that data set."""
    folder = stage.scratch / f"synthetic-{train_samples}"
    prepare_data_set("synthetic", folder, spec=spec_of(train_samples))
    return folder


def job_of(s: Settings, data_dir: Path, path: Path) -> Job:
    """The job of a cell with `s`, as the launcher would make it; its secret is in the run folder, `path`."""
    folder = RunFolder(path)
    write_secret(folder.job_secret_path, make_secret())
    return Job(
        cell=Cell("gpu-check", "check", s.strategy, s.model, s.dataset, s.gpus, 0),
        settings=s,
        data_dir=data_dir,
        data=read_unverified_metadata(data_dir),
        folder=folder,
        workers_per_node=s.gpus,
        use_cuda=s.device == "cuda",
        threads=s.threads or 1,
        origin_unix_s=time.time(),
        origin_s=time.monotonic(),
        time_limit_s=None,
    )


@dataclass
class Trainee:
    """A strategy set up on its data, ready for a warm-up."""

    strategy: Strategy
    data: DeviceData
    worker: Worker
    log: PhaseLog


def device_of(job: Job) -> torch.device:
    return torch.device("cuda", 0) if job.use_cuda else torch.device("cpu")


def set_up(
    job: Job,
    data: DeviceData | None = None,
    build: Callable[..., torch.nn.Module] = models.build_model,
) -> Trainee:
    """A worker's steps up to its warm-up, in this process: `worker.train_as_worker` without the training.

    A strategy that needs a process group must find one (`worker.join_process_group`).
    """
    s, device = job.settings, device_of(job)
    worker_process.configure_torch(s, device, job.threads)
    shape = models.compute_input_shape(s.model, job.data_shape)
    dtype = get_weights_dtype(s.precision)
    memory_format = get_batch_memory_format(s.precision, device.type)
    data = data or DeviceData.load_prepared_data_set(
        job.data_dir, device, shape, dtype, memory_format
    )
    model = models.build_model_for_training(
        s.model, data.meta["classes"], shape, s.seed, device, dtype, build
    )
    groups = models.list_shard_groups(s.model, model)
    cls = get_strategy_class(s.strategy)
    strategy = cls(cls.Options(**s.options))
    worker = Worker(
        s, 0, job.world_size, job.count_workers_on_node_of_rank(0), device, job.folder, groups
    )
    strategy.setup(model, worker)
    torch.manual_seed(s.seed + 1)
    log = PhaseLog(job.folder.get_phase_log_path(0), 0, job.origin_s)
    return Trainee(strategy, data, worker, log)


def weights_of(strategy: Strategy) -> list[torch.Tensor]:
    """Whole copies of the model's parameters, in double precision on the CPU."""
    with torch.no_grad():
        return [
            gather_full_tensor(p).detach().double().cpu().clone() for p in _parameters(strategy)
        ]


def _parameters(strategy: Strategy) -> list[torch.nn.Parameter]:
    return list(strategy.model.parameters())  # type: ignore[attr-defined]


def differ(before: list[torch.Tensor], one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """How far two trainings from `before` are apart, in lengths of the first's own change."""
    change = sum(float((a - b).pow(2).sum()) for a, b in zip(one, before, strict=True))
    apart = sum(float((a - b).pow(2).sum()) for a, b in zip(one, other, strict=True))
    return 0.0 if apart == 0 and change == 0 else (apart / change) ** 0.5 if change else math.inf


@contextmanager
def served_by_threads(job: Job) -> Iterator[None]:
    """The job's parameter servers, on threads of this process."""
    threads = [
        threading.Thread(target=run_server, args=(config, load_secret(job.folder.job_secret_path)))
        for config in list_server_configs_of_node(job, 0)
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    yield
    for thread in threads:
        thread.join(30)


@contextmanager
def served(job: Job) -> Iterator[None]:
    """The job's parameter servers, as processes with the product's own entry point.

    ChildFailed at the end where one did not end well.
    """
    configs = list_server_configs_of_node(job, 0)
    servers = [
        Child(serve_parameters, json.dumps(asdict(config)), str(job.folder.path))
        for config in configs
    ]
    try:
        yield
        if codes := [code for server in servers if (code := server.exit_code(10)) != 0]:
            raise ChildFailed(f"servers ended with {codes}; None: not by themselves")
    finally:
        for server in servers:
            end_tree(server.pid)


def trace_events(path: Path, category: str) -> list[dict[str, Any]]:
    """The events of a profiler's trace that have a duration (`ts`, `dur` in us), by category."""
    with gzip.open(path, "rt", encoding="utf-8") as f:
        events = json.load(f)["traceEvents"]
    return [e for e in events if e.get("cat") == category and "dur" in e]


def launch_command(
    s: Settings, data_dir: Path, folder: Path, time_limit_s: float = 0.0
) -> list[str]:
    """The launcher's command line for a cell; record, timeline and logs go into `folder`."""
    cell = Cell("gpu-check", "check", s.strategy, s.model, s.dataset, s.gpus, 0)
    s = replace(s, data_spec=read_unverified_metadata(data_dir)["spec"])
    return [
        sys.executable, "-m", "stratbench.train.launch",
        "--cell", json.dumps(asdict(cell)), "--settings", s.as_json(),
        "--data", str(data_dir), "--record", str(folder / "record.json"),
        "--timeline", str(folder / "timeline.csv"), "--logs", str(folder / "logs"),
        "--time-limit-s", str(time_limit_s),
    ]  # fmt: skip
