"""Defines how workers are divided into replicas of the model, stages and tensor workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


def check_equal_groups(option: str, group_size: int, gpus: int) -> None:
    """Raise ValueError if a cell's workers cannot form groups of the given size.

    Args:
        option: Name and value of the option that sets the group size, for the message.
        group_size: Workers per group.
        gpus: Number of workers of the cell.
    """
    if gpus % group_size:
        raise ValueError(
            f"{option} does not divide the {gpus} workers into equal groups; change the option or `gpus`"
        )


class MeshCoordinate(NamedTuple):
    """Position of a worker in a mesh: replica, pipeline stage and tensor worker, from 0."""

    replica: int
    stage: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """Division of a cell's workers into replicas of the model, stages and tensor workers.

    Each replica computes on its share of a global batch, whether its states are whole (DDP) or divided among
    the replicas (FSDP). The workers of one replica compute on the same samples. Consecutive ranks are tensor
    workers of one stage, since these exchange most data. The stage changes slowest with the rank.
    """

    #: Number of replicas of the model.
    replicas: int
    #: Number of workers among which each layer is divided.
    tensor: int = 1
    #: Number of pipeline stages per replica.
    stages: int = 1

    @property
    def num_workers(self) -> int:
        """Number of workers of the cell."""
        return self.replicas * self.workers_per_replica

    @property
    def workers_per_replica(self) -> int:
        """Number of workers that share one replica of the model."""
        return self.tensor * self.stages

    def get_coordinate(self, rank: int) -> MeshCoordinate:
        """Return the coordinate in the mesh of the worker with this rank."""
        rest, tensor = divmod(rank, self.tensor)
        stage, replica = divmod(rest, self.replicas)
        return MeshCoordinate(replica, stage, tensor)

    def get_rank(self, coordinate: MeshCoordinate) -> int:
        """Return the rank of the worker at a coordinate of the mesh."""
        return (
            coordinate.stage * self.replicas + coordinate.replica
        ) * self.tensor + coordinate.tensor

    def reports_replica_results(self, rank: int) -> bool:
        """Return whether the worker with this rank reports the results of its replica.

        In each replica only the first worker of the last pipeline stage does so.
        """
        at = self.get_coordinate(rank)
        return at.tensor == 0 and at.stage == self.stages - 1
