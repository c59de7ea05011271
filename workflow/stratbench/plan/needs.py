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
from stratbench.plan.footprint.footprint import Footprint
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
            local_world=-(-cell.gpus // resources.node_count(cell, settings, config["cluster"])),
        ),
    )


def sent_bytes(s: Subject, footprint: Footprint) -> float:
    """Bytes that a rank sends for each global batch, as a mean over the training."""
    if s.served:
        return servers.server_side(s.settings, footprint.flat_bytes, 1).sent_bytes
    on_gloo = not s.request.on_cuda
    return fmean(mean_wire_bytes(s, f, f.collectives, on_gloo) for f in footprint.each)


def mean_wire_bytes(
    s: Subject, footprint: Footprint, collectives: Iterable[Sequence[Any]], on_gloo: bool
) -> float:
    """Bytes that a rank (of a stage) sends in a step by these collectives, as a mean over the training."""
    each = s.exchanging_share * wire_bytes(collectives, s.cell.gpus, on_gloo, s.samples_per_step)
    if not (first := min(s.strategy.plain_steps, s.steps)):
        return each
    whole = plain_wire_bytes(s, footprint, collectives, on_gloo)
    return (first * whole + (s.steps - first) * each) / s.steps


def plain_wire_bytes(
    s: Subject, footprint: Footprint, collectives: Iterable[Sequence[Any]], on_gloo: bool
) -> float:
    """Bytes that a rank sends in one of the first steps in which gradients are averaged whole."""
    whole = [c for c in collectives if c[0] == "broadcast"]
    whole.append(("all_reduce", footprint.model_states_bytes["gradients_bytes"]))
    return wire_bytes(whole, s.cell.gpus, on_gloo)


def awaited_bytes(s: Subject, footprint: Footprint) -> float:
    """Of the bytes that a rank sends in a step, those of activations that its next layer waits for."""
    if not s.strategy.waits_for_activations:
        return 0.0
    calls, on_gloo = footprint.slowest.collectives, not s.request.on_cuda
    each = [wire_bytes(calls, s.cell.gpus, on_gloo, n) for n in (0, s.samples_per_step)]
    return each[1] - each[0]


def data_bytes_of(s: Subject, samples: int | None = None) -> int:
    """Bytes on the device: of the whole data set, or of the batches of `samples` (or the cell's) that wait.

    On a CPU what is mapped from files becomes resident as it is read, so that it counts whole.
    """
    if s.settings.placement == "host" and s.request.on_cuda:
        each = s.samples_per_step if samples is None else samples
        return buffer_bytes(s.data, each, s.settings.augment)
    return data_bytes(s.data, models.model_of(s.settings), s.settings.augment)


@dataclass(frozen=True)
class Needs:
    """What a cell takes wherever it runs. What only cells with servers have is None for others."""

    data_bytes: int  # of a worker's device
    wire_bytes: float  # sent by a rank in a step
    collectives: int  # in a step
    link_bytes: float | None  # a global batch, over the busiest link between nodes
    server_bytes: int | None  # memory of a server process
    snapshot_bytes: (
        int | None
    )  # disk: the servers' snapshots, one an epoch, until they are evaluated
    host_bytes: int  # memory of a node's processes, as far as known
    work: Work


def needs_of(s: Subject, footprint: Footprint, n_nodes: int) -> Needs:
    """The needs of a cell on so many nodes, by its footprint."""
    data_bytes, wire = data_bytes_of(s), sent_bytes(s, footprint)
    side = servers.server_side(s.settings, footprint.flat_bytes, n_nodes) if s.served else None
    through_server = 0.0
    if side is not None:
        moved_bytes = s.cell.gpus * (side.sent_bytes + side.received_bytes)
        through_server = moved_bytes / s.settings.options["servers"]
    return Needs(
        data_bytes=data_bytes,
        wire_bytes=wire,
        collectives=len(footprint.collectives),
        link_bytes=side and side.link_bytes,
        server_bytes=side and side.process_bytes,
        snapshot_bytes=side and (s.settings.epochs or 0) * sum(footprint.flat_bytes.values()),
        host_bytes=_host_bytes(s, footprint, data_bytes, side, n_nodes),
        work=Work(
            footprint=footprint.slowest,
            batch=s.samples_per_step,
            pushes=s.steps_per_batch,
            # The nodes' link carries what all workers and servers on it send.
            wire_bytes=max(wire, side.link_bytes if side else 0.0),
            awaited_bytes=awaited_bytes(s, footprint),
            server_bytes=through_server,
            steps=s.steps,
            test_samples=s.data.test_samples,
            evaluations=s.settings.epochs or 0,
            replicas=s.strategy.mesh(s.cell.gpus).replicas,
            nodes=n_nodes,
            least_nodes=1 if s.settings.scattered else n_nodes,
            recomputes=s.settings.activation_checkpointing,
            bubble_share=s.strategy.bubble_share(s.cell.gpus) or 0.0,
            slowdown=float((s.settings.slowdown or {}).get("factor", 1.0)),
        ),
    )


def _host_bytes(
    s: Subject, footprint: Footprint, data_bytes: int, side: servers.ServerSide | None, n_nodes: int
) -> int:
    """Bytes of host memory that the cell's processes take on the fullest node."""
    # In the warm-up the optimizer's state waits there, to be restored.
    saved_bytes = footprint.between_steps_bytes.get("optimizer", 0)
    if s.settings.checkpoint_every:  # a copy of all that is kept, from the first one on
        states = footprint.model_states_bytes
        saved_bytes += sum(states.values()) - states["gradients_bytes"]
    if s.request.on_cuda:
        flat = footprint.flat_bytes
        mirror_bytes = 2 * flat["weights"] + flat["buffers"] if s.served else 0
        # With gradients as large as the parameters, and what the warm-up keeps, to put it back.
        kept = footprint.host_bytes
        kept_bytes = 3 * kept.get("parameters", 0) + 2 * kept.get("optimizer", 0)
        kept_bytes -= 2 * footprint.frozen_bytes if kept else 0
        worker_bytes = GPU_HOST_PROCESS_BYTES + mirror_bytes + saved_bytes + kept_bytes
        if s.settings.placement == "host":  # pinned; mapped files are the kernel's to keep or drop
            worker_bytes += data_bytes
    else:
        needed_bytes = footprint.needed_bytes(s.samples_per_step) + data_bytes
        worker_bytes = CPU_PROCESS_BYTES + needed_bytes + saved_bytes
    servers_bytes = 0
    if side is not None:
        passes = s.settings.passes(s.data.train_samples)
        worker_bytes += passes * packed_bytes(s.data, s.settings.augment)
        on_this_node = -(-s.settings.options["servers"] // n_nodes)
        servers_bytes = on_this_node * (CPU_PROCESS_BYTES + side.process_bytes)
    return -(-s.cell.gpus // n_nodes) * worker_bytes + servers_bytes
