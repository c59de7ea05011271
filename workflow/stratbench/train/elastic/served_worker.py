"""What one worker job of an elastic cell with parameter servers does."""

from __future__ import annotations

import threading
from typing import Any

import torch

from stratbench.ps.elastic.channel import RunOver
from stratbench.ps.wire.link import Left, ServerLost
from stratbench.strategies import strategy_class
from stratbench.strategies.mesh import Mesh
from stratbench.strategies.ps import ParameterServer
from stratbench.telemetry.clock import Phases
from stratbench.telemetry.memory import MemoryMeter
from stratbench.telemetry.pulse import Pulse
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train import loop, worker
from stratbench.train.elastic.member import Over
from stratbench.train.job import Job


def train(job: Job, number: int, local_rank: int, leaving: threading.Event) -> dict[str, Any]:
    """Train as one of the cell's workers; returns what the worker measured.

    Raises Over where the training is over before it has joined, where it leaves before that, and where the
    servers are gone for good.
    """
    try:
        return _train(job, number, local_rank, leaving)
    except (RunOver, Left, ServerLost) as over:
        raise Over(str(over)) from over


def _train(job: Job, number: int, local_rank: int, leaving: threading.Event) -> dict[str, Any]:
    s = job.settings
    device = torch.device("cuda", local_rank) if job.use_cuda else torch.device("cpu")
    worker.configure_torch(s, device, job.threads)
    memory = MemoryMeter(device)
    pulse = Pulse(job.folder.pulse(number))
    log = PhaseLog(job.folder.phases(number), number, job.origin_s, pulse.alive)
    phases = Phases(device, log)
    started_s = job.elapsed_s
    cls = strategy_class(s.strategy)
    strategy: ParameterServer = cls(cls.Options(**s.options))
    with phases("data"):
        data = worker.load_data(job, device)
    with phases("build"):
        # A worker's number never comes again: those of `slowdown.workers` are what is left over `gpus`.
        ready = worker.set_up(
            s, strategy, data, device, number % s.gpus,
            rank=number, world_size=s.gpus, local_world=1, folder=job.folder,
            pulse=pulse, mesh=Mesh(1), leaving=leaving,
        )  # fmt: skip
        torch.manual_seed(s.seed + 1 + number)  # what is random per copy (dropout)
    progress = loop.Progress(None)
    result = loop.train_with_server(strategy, data, ready.worker, phases, log, memory, progress)
    measured = worker.worker_result(result, strategy, phases, number)
    worker.describe(measured, ready, strategy, data)
    if not strategy.channel.left:
        measured |= worker.flops_of(s, ready.built)
    measured["left"], measured["returns"] = strategy.channel.left, strategy.channel.returns
    measured["started_s"] = started_s
    strategy.close()
    return measured
