"""Describes a cell before planning, and derives what it needs from its footprint.

The needs are bytes to send, work and memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.settings import Settings
from stratbench.cell.text.words import MIB
from stratbench.extensions.plan import servers
from stratbench.extensions.plan.device_rates import CPU_PROCESS_BYTES, GPU_HOST_PROCESS_BYTES
from stratbench.extensions.plan.footprint.footprint import Footprint
from stratbench.extensions.plan.footprint.request import (
    Request,
    compute_batch_buffer_bytes,
    compute_data_bytes,
)
from stratbench.extensions.plan.footprint.traffic import compute_wire_bytes
from stratbench.strategies import get_strategy_class
from stratbench.strategies.base import Strategy
from stratbench.strategies.mesh import Mesh
from stratbench.study import resources
from stratbench.study.config.config import Study
from stratbench.study.config.messages import ConfigError
from stratbench.workload.data.dataset import Dataset
from stratbench.workload.data.device_data import compute_epoch_tables_bytes


@dataclass(frozen=True)
class CellToPlan:
    """A cell to plan, with all that is known before its footprint is predicted."""

    cell: Cell
    settings: Settings
    data: Dataset
    served: bool
    time_limit_s: float | None
    request: Request

    @property
    def samples_per_step(self) -> int:
        """Number of samples that a worker computes at once, in one forward and backward."""
        return get_strategy_class(self.settings.strategy).samples_per_step(self.settings)

    @property
    def steps_per_batch(self) -> int:
        """Number of steps in which a worker processes its part of a global batch."""
        return self.settings.per_worker_batch // self.samples_per_step

    @property
    def steps(self) -> int:
        """Number of global batches of the whole training."""
        return self.settings.count_steps(self.data.train_samples)

    @property
    def share_of_exchanging_steps(self) -> float:
        """Fraction of the steps in which workers exchange data."""
        return self.strategy.count_exchanges(self.steps) / self.steps

    @property
    def strategy(self) -> Strategy:
        """The cell's strategy with its options, before `setup`."""
        cls = get_strategy_class(self.settings.strategy)
        return cls(cls.Options(**self.settings.options))

    @property
    def mesh(self) -> Mesh:
        """Device mesh of the cell's workers: replicas, tensor groups and pipeline stages."""
        return self.strategy.mesh(self.cell.gpus)

    @property
    def bubble_share(self) -> float:
        """Fraction of a step in which a pipeline stage waits for other stages."""
        return self.strategy.bubble_share(self.cell.gpus) or 0.0

    @property
    def slowdown(self) -> float:
        """Configured slowdown factor of the slowest worker."""
        return float((self.settings.slowdown or {}).get("factor", 1.0))


def make_cell_to_plan(config: Mapping[str, Any], study: Study, cell: Cell) -> CellToPlan:
    settings = study.settings(cell)
    data = study.get_dataset(cell.dataset)
    if not data.has_known_metadata:
        raise ConfigError(
            f"config: datasets.{cell.dataset}: is not yet prepared, so its size is unknown; run "
            "`stratbench plan` first, which prepares it"
        )
    return CellToPlan(
        cell=cell,
        settings=settings,
        data=data,
        served=study.get_strategy_kind(cell.strategy) == "server",
        time_limit_s=study.time_limit_s(cell),
        request=Request.from_settings(
            settings,
            data,
            on_cuda=settings.device != "cpu",
            workers_per_node=resources.count_workers_per_node(cell, config["cluster"]),
        ),
    )


def compute_sent_bytes_per_batch(s: CellToPlan, footprint: Footprint) -> float:
    """Return the bytes that a rank sends per global batch, averaged over the training."""
    if s.served:
        sent, _ = servers.compute_worker_sent_and_received_bytes(
            s.settings, footprint.flat_tensor_bytes
        )
        return sent
    on_gloo = not s.request.is_on_cuda
    return fmean(
        compute_mean_wire_bytes_per_step(s, f, f.collectives, on_gloo)
        for f in footprint.footprints_of_stages
    )


def compute_mean_wire_bytes_per_step(
    s: CellToPlan, footprint: Footprint, collectives: Iterable[Sequence[Any]], on_gloo: bool
) -> float:
    """Return the mean bytes per step that a rank sends in the given collectives.

    Strategies may have steps with other collectives, or steps without any.

    Args:
        s: The cell.
        footprint: Footprint of the cell.
        collectives: Collectives of a step.
        on_gloo: Whether the backend is gloo.
    """
    each = s.share_of_exchanging_steps * compute_wire_bytes(
        collectives, s.cell.gpus, on_gloo, s.samples_per_step
    )
    if not (first := min(s.strategy.num_uncompressed_steps, s.steps)):
        return each
    whole = compute_wire_bytes_of_averaging_step(s, footprint, collectives, on_gloo)
    return (first * whole + (s.steps - first) * each) / s.steps


def compute_wire_bytes_of_averaging_step(
    s: CellToPlan, footprint: Footprint, collectives: Iterable[Sequence[Any]], on_gloo: bool
) -> float:
    """Return the bytes that a rank sends in a step that averages all gradients.

    Some strategies begin a training with such steps.

    Args:
        s: The cell.
        footprint: Footprint of the cell.
        collectives: Collectives of a step.
        on_gloo: Whether the backend is gloo.
    """
    whole = [c for c in collectives if c[0] == "broadcast"]
    whole.append(("all_reduce", footprint.model_states_bytes["gradients_bytes"]))
    return compute_wire_bytes(whole, s.cell.gpus, on_gloo)


def compute_sent_bytes_within_nodes(s: CellToPlan, footprint: Footprint, node_ranks: int) -> float:
    """Return the bytes per batch that a rank sends to ranks on its own node.

    The result is 0 with parameter servers.

    Args:
        s: The cell.
        footprint: Footprint of the cell.
        node_ranks: Ranks of a node.
    """
    if s.served:
        return 0.0
    return s.share_of_exchanging_steps * fmean(
        compute_wire_bytes(
            f.collectives, s.cell.gpus, not s.request.is_on_cuda, s.samples_per_step, node_ranks
        )
        for f in footprint.footprints_of_stages
    )


def compute_awaited_activation_bytes(
    s: CellToPlan, footprint: Footprint, ranks_per_node: int | None = None
) -> float:
    """Return the bytes per step of sent activations for which the next layer waits.

    Args:
        s: The cell.
        footprint: Footprint of the cell.
        ranks_per_node: Count only groups within a node of so many ranks, unless None.
    """
    if not s.strategy.waits_for_activations:
        return 0.0
    calls, on_gloo = footprint.slowest_rank_footprint.collectives, not s.request.is_on_cuda
    each = [
        compute_wire_bytes(calls, s.cell.gpus, on_gloo, n, ranks_per_node)
        for n in (0, s.samples_per_step)
    ]
    return each[1] - each[0]


def compute_data_bytes_on_device(s: CellToPlan, batch_samples: int | None = None) -> int:
    """Return the bytes on the device of the data set or of waiting batches.

    Batches wait there if the data set is in host memory. On a CPU mapped files become resident when they are
    read, so that they count completely.
    """
    if s.settings.data_placement == "host" and s.request.is_on_cuda:
        each = s.samples_per_step if batch_samples is None else batch_samples
        return compute_batch_buffer_bytes(s.data, each, s.settings.augment)
    return compute_data_bytes(s.data, s.request.input_shape, s.settings.augment)


@dataclass(frozen=True)
class Needs:
    """Memory, traffic and nodes that a cell needs, on any device.

    Values on parameter servers are None or 0 without servers.
    """

    nodes: int
    data_bytes: int  # bytes of data on a worker's device
    wire_bytes: float  # bytes that a rank sends per step; it receives as many
    #: Part of `wire_bytes` that the next layer waits for. No computation hides it.
    awaited_bytes: float
    sent_bytes_within_node: float  # part of `wire_bytes` that stays within a node
    awaited_bytes_within_node: float  # part of `awaited_bytes` that stays within a node
    collectives: int  # number of collectives per step
    host_bytes: int  # predicted host memory of all processes on a node
    slowest_rank_footprint: Footprint  # footprint of the pipeline rank that computes most
    link_bytes: float | None = None  # bytes per global batch, over the busiest link
    #: Bytes that one server process receives from all workers and sends to them per step.
    served_bytes: float = 0.0
    server_bytes: int | None = None  # host memory of the largest server process
    servers_host_bytes: int = 0  # host memory of all server processes together
    #: Bytes on disk of the servers' snapshots, one per epoch, which are deleted after their evaluation.
    snapshot_bytes: int | None = None

    @property
    def host_mib(self) -> int:
        return -(-self.host_bytes // MIB)

    @property
    def servers_host_mib(self) -> int:
        return -(-self.servers_host_bytes // MIB)


def derive_needs(s: CellToPlan, footprint: Footprint, n_nodes: int) -> Needs:
    """Return what a cell needs, derived from its footprint.

    Args:
        s: The cell.
        footprint: Footprint of the cell.
        n_nodes: Number of nodes.
    """
    data_bytes, node_ranks = compute_data_bytes_on_device(s), -(-s.cell.gpus // n_nodes)
    host_bytes = node_ranks * _compute_worker_host_bytes(s, footprint, data_bytes)
    served: dict[str, Any] = {}
    if s.served:
        flat, n_servers = footprint.flat_tensor_bytes, s.settings.options["servers"]
        server_bytes = sum(
            servers.predict_server_bytes_by_purpose(s.settings, flat, n_nodes).values()
        )
        process_bytes = CPU_PROCESS_BYTES + server_bytes
        host_bytes += -(-n_servers // n_nodes) * process_bytes
        traffic_bytes = servers.compute_worker_sent_and_received_bytes(s.settings, flat)
        served = {
            "link_bytes": servers.compute_busiest_link_bytes(s.settings, flat, n_nodes),
            "served_bytes": s.cell.gpus * sum(traffic_bytes) / n_servers,
            "server_bytes": server_bytes,
            "servers_host_bytes": n_servers * process_bytes,
            "snapshot_bytes": (s.settings.epochs or 0) * sum(flat.values()),
        }
    return Needs(
        nodes=n_nodes,
        data_bytes=data_bytes,
        wire_bytes=compute_sent_bytes_per_batch(s, footprint),
        awaited_bytes=compute_awaited_activation_bytes(s, footprint),
        sent_bytes_within_node=compute_sent_bytes_within_nodes(s, footprint, node_ranks),
        awaited_bytes_within_node=compute_awaited_activation_bytes(s, footprint, node_ranks),
        collectives=len(footprint.collectives),
        host_bytes=host_bytes,
        slowest_rank_footprint=footprint.slowest_rank_footprint,
        **served,
    )


def _compute_worker_host_bytes(s: CellToPlan, footprint: Footprint, data_bytes: int) -> int:
    """Return the bytes of host memory that one worker's process needs."""
    # The warm-up copies states to host memory before it changes them. This line counts those of the
    # optimizer. On a CPU `needed_bytes` below includes the copy of the weights.
    n_bytes = footprint.between_steps_bytes.get("optimizer", 0)
    # From the first checkpoint on, a copy of the saved states exists.
    if "checkpoints" in s.settings.more:
        states = footprint.model_states_bytes
        n_bytes += sum(states.values()) - states["gradients_bytes"]
    if s.served:
        passes = s.settings.count_training_set_passes(s.data.train_samples)
        n_bytes += passes * compute_epoch_tables_bytes(s.data, s.settings.augment)
    if not s.request.is_on_cuda:
        needed_bytes = footprint.compute_needed_bytes(s.samples_per_step) + data_bytes
        return n_bytes + CPU_PROCESS_BYTES + needed_bytes
    flat = footprint.flat_tensor_bytes
    mirror_bytes = 2 * flat["weights"] + flat["buffers"] if s.served else 0
    # Offloaded states: parameters, gradients of equal size, optimizer states, and the copies from which the
    # warm-up restores parameters and optimizer states.
    host_bytes = footprint.host_bytes
    kept_bytes = 3 * host_bytes.get("parameters", 0) + 2 * host_bytes.get("optimizer", 0)
    kept_bytes -= 2 * footprint.frozen_parameter_bytes if host_bytes else 0
    n_bytes += GPU_HOST_PROCESS_BYTES + footprint.warmup_copy_host_bytes + mirror_bytes + kept_bytes
    if s.settings.data_placement == "host":  # the data set is in pinned memory
        n_bytes += data_bytes
    return n_bytes
