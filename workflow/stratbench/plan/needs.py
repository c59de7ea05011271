"""A cell before it is planned, and what follows from its footprint: bytes, work, memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.settings import Settings
from stratbench.plan import servers
from stratbench.plan.device_rates import CPU_PROCESS_BYTES, GPU_HOST_PROCESS_BYTES
from stratbench.plan.duration import Work
from stratbench.plan.footprint.footprint import Footprint, MemoryPeak
from stratbench.plan.footprint.request import Request, buffer_bytes, data_bytes
from stratbench.plan.footprint.traffic import wire_bytes
from stratbench.strategies import strategy_class
from stratbench.strategies.base import Strategy
from stratbench.study import resources
from stratbench.study.config.config import Study
from stratbench.study.config.messages import ConfigError
from stratbench.workload.data.dataset import Dataset
from stratbench.workload.data.device_data import packed_bytes
from stratbench.workload.network import models


@dataclass(frozen=True)
class Subject:
    """A cell with what is known of it before anything is predicted."""

    cell: Cell
    settings: Settings
    data: Dataset
    served: bool
    time_limit_s: float | None
    request: Request

    @property
    def samples_per_step(self) -> int:
        """Samples that a worker computes on at once."""
        return strategy_class(self.settings.strategy).samples_per_step(self.settings)

    @property
    def steps_per_batch(self) -> int:
        """Steps in which a worker takes its part of a global batch."""
        return self.settings.per_worker_batch // self.samples_per_step

    @property
    def steps(self) -> int:
        """Global batches of the whole training."""
        return self.settings.total_steps(self.data.train_samples)

    @property
    def exchanging_share(self) -> float:
        """The share of the steps in which the workers communicate."""
        return self.strategy.exchanges(self.steps) / self.steps

    @property
    def strategy(self) -> Strategy:
        """The cell's strategy, not set up."""
        cls = strategy_class(self.settings.strategy)
        return cls(cls.Options(**self.settings.options))


def subject_of(config: Mapping[str, Any], study: Study, cell: Cell) -> Subject:
    settings = study.settings(cell)
    data = study.dataset(cell.dataset)
    if not data.is_read:
        raise ConfigError(
            f"config: datasets.{cell.dataset}: is not yet prepared, so that nothing is known of its size; "
            "`snakemake plan` prepares it, and this command can follow"
        )
    return Subject(
        cell=cell,
        settings=settings,
        data=data,
        served=study.strategy_kind(cell.strategy) == "server",
        time_limit_s=study.time_limit_s(cell),
        request=Request.of(
            settings,
            data,
            on_cuda=settings.device != "cpu",
            local_world=-(-cell.gpus // resources.node_count(cell, config["cluster"])),
        ),
    )


def sent_bytes(s: Subject, footprint: Footprint) -> float:
    """Bytes that a rank sends for each global batch, as a mean over the training."""
    if s.served:
        over_tcp = s.settings.options["transport"] == "tcp"
        sent, _ = servers.worker_traffic_bytes(
            s.settings.strategy, s.settings.options, footprint.flat_bytes, over_tcp
        )
        return sent
    on_gloo = not s.request.on_cuda
    return fmean(mean_wire_bytes(s, f, f.collectives, on_gloo) for f in footprint.each)


def mean_wire_bytes(
    s: Subject, footprint: Footprint, collectives: Iterable[Sequence[Any]], on_gloo: bool
) -> float:
    """Bytes that a rank (of a stage) sends in a step by these collectives, as a mean over the training."""
    each = s.exchanging_share * wire_bytes(collectives, s.cell.gpus, on_gloo, s.samples_per_step)
    if not (first := min(s.strategy.plain_steps, s.steps)):
        return each
    whole = [c for c in collectives if c[0] == "broadcast"]
    whole.append(("all_reduce", footprint.model_states_bytes["gradients_bytes"]))
    return (first * wire_bytes(whole, s.cell.gpus, on_gloo) + (s.steps - first) * each) / s.steps


def peak_with_data(peak: MemoryPeak, s: Subject) -> MemoryPeak:
    """The peak with what lies on the device of the data set."""
    n_bytes = data_bytes_of(s)
    return MemoryPeak(peak.n_bytes + n_bytes, peak.phase, peak.parts_bytes | {"data": n_bytes})


def data_bytes_of(s: Subject) -> int:
    """Bytes on the device: of the whole data set, or of the batches that wait there.

    On a CPU what is mapped from files becomes resident as it is read, so that it counts whole.
    """
    if s.settings.placement == "host" and s.request.on_cuda:
        return buffer_bytes(s.data, s.samples_per_step, s.settings.augment)
    return data_bytes(s.data, models.model_of(s.settings), s.settings.augment)


def work_of(s: Subject, footprint: Footprint, wire: float, nodes: int) -> Work:
    through_server = 0.0
    if s.served:
        options = s.settings.options
        sent, received = servers.worker_traffic_bytes(
            s.settings.strategy, options, footprint.flat_bytes, options["transport"] == "tcp"
        )
        through_server = s.cell.gpus * (sent + received) / options["servers"]
    return Work(
        footprint=footprint.slowest,
        batch=s.samples_per_step,
        pushes=s.steps_per_batch,
        # The nodes' link carries what all workers and servers on it send.
        wire_bytes=max(wire, link_bytes_of(s, footprint, nodes)),
        server_bytes=through_server,
        steps=s.steps,
        test_samples=s.data.test_samples,
        evaluations=s.settings.epochs or 0,
        replicas=s.strategy.mesh(s.cell.gpus).replicas,
        nodes=nodes,
        recomputes=s.settings.activation_checkpointing,
        bubble_share=s.strategy.bubble_share(s.cell.gpus) or 0.0,
        slowdown=float((s.settings.slowdown or {}).get("factor", 1.0)),
    )


def link_bytes_of(s: Subject, footprint: Footprint, nodes: int) -> float:
    """Bytes a global batch over the busiest link between nodes of a cell with servers; else 0."""
    return servers.busiest_link_bytes(s.settings, footprint.flat_bytes, nodes) if s.served else 0.0


def server_bytes_of(s: Subject, footprint: Footprint, nodes: int) -> int:
    if not s.served:
        return 0
    return servers.server_needs(
        s.settings.strategy,
        s.settings.options,
        s.cell.gpus,
        footprint.flat_bytes,
        moments=2 if s.settings.optimizer == "adamw" else int(s.settings.momentum > 0),
        shared_memory=s.settings.options["transport"] != "tcp" and nodes == 1,
        scaled=s.settings.precision == "fp16",
    ).total_bytes


def snapshot_bytes_of(s: Subject, footprint: Footprint) -> int:
    """Bytes on disk of the servers' snapshots, one an epoch, until they are evaluated."""
    return (s.settings.epochs or 0) * sum(footprint.flat_bytes.values()) if s.served else 0


def host_bytes_of(
    s: Subject, footprint: Footprint, needed_bytes: int, server_bytes: int, nodes: int
) -> int:
    """Bytes of host memory that the cell's processes take on the fullest node."""
    # In the warm-up the optimizer's state waits there, to be restored.
    saved_bytes = footprint.between_steps_bytes.get("optimizer", 0)
    worker_bytes = CPU_PROCESS_BYTES + needed_bytes + saved_bytes
    if s.request.on_cuda:
        flat = footprint.flat_bytes
        mirror_bytes = 2 * flat["weights"] + flat["buffers"] if s.served else 0
        # With gradients as large as the parameters, and what the warm-up keeps, to put it back.
        kept = footprint.host_bytes
        kept_bytes = 3 * kept.get("parameters", 0) + 2 * kept.get("optimizer", 0)
        kept_bytes -= 2 * footprint.frozen_bytes if kept else 0
        worker_bytes = GPU_HOST_PROCESS_BYTES + mirror_bytes + saved_bytes + kept_bytes
        if s.settings.placement == "host":  # pinned; mapped files are the kernel's to keep or drop
            worker_bytes += data_bytes_of(s)
    servers_bytes = 0
    if s.served:
        passes = s.settings.passes(s.data.train_samples)
        worker_bytes += passes * packed_bytes(s.data, s.settings.augment)
        on_this_node = -(-s.settings.options["servers"] // nodes)
        servers_bytes = on_this_node * (CPU_PROCESS_BYTES + server_bytes)
    return -(-s.cell.gpus // nodes) * worker_bytes + servers_bytes
