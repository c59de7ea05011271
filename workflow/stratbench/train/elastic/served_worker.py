"""What one worker job of an elastic cell with parameter servers does."""

from __future__ import annotations

import threading
from typing import Any

import torch

from stratbench.ps.elastic.channel import RunOver
from stratbench.ps.wire.link import Left, ServerLost
from stratbench.strategies import acceptance, strategy_class
from stratbench.strategies.base import Worker
from stratbench.strategies.mesh import Mesh
from stratbench.strategies.ps import ParameterServer
from stratbench.strategies.slowdown import Slowdown
from stratbench.telemetry.clock import Phases
from stratbench.telemetry.memory import MemoryMeter
from stratbench.telemetry.provenance import worker_provenance
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
        built = worker.build(s, strategy, data, device)
        # A worker's number never comes again: those of `slowdown.workers` are what is left over `gpus`.
        rank, classes = number % s.gpus, data.meta["classes"]
        slowdown = Slowdown.of(s, rank, built.model, built.shape, classes, device)
        me = Worker(
            s,
            number,
            s.gpus,
            1,
            device,
            job.folder,
            built.groups,
            slowdown.wait,
            task=built.task,
            total_steps=s.total_steps(job.train_samples),
            pulse=pulse,
            mesh=Mesh(1),
            input_shape=built.shape,
            trial=built.trial,
            leaving=leaving,
        )
        if built.trial is not None:
            acceptance.check_model(strategy, built.network, built.model, me)
        strategy.setup(built.model, me)
        torch.manual_seed(s.seed + 1 + number)  # what is random per copy (dropout)
    progress = loop.Progress(None)
    result = loop.train_with_server(strategy, data, me, phases, log, memory, progress)
    measured = worker.worker_result(result, strategy, phases, number)
    measured |= worker.description_of(s, built, strategy, data)
    if not strategy.channel.left:
        measured |= worker.flops_of(s, built)
    measured["left"], measured["returns"] = strategy.channel.left, strategy.channel.returns
    measured["started_s"] = started_s
    measured["provenance"] = worker_provenance(device)
    if slowdown.factors:
        measured["strategy"]["details"]["slowdown"] = slowdown.summary()
    strategy.close()
    return measured
