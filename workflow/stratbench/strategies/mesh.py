"""The division of a cell's workers into replicas of the model, pipeline stages and tensor workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


def check_equal_groups(option: str, workers: int, gpus: int) -> None:
    """Raise ValueError if a cell's workers cannot form equal groups.

    Args:
        option: Option that sets the group size, and its value, for the message.
        workers: Workers per group.
        gpus: Number of workers of the cell.
    """
    if gpus % workers:
        raise ValueError(
            f"{option} does not divide {gpus} workers into equal groups; change it or the number of workers"
        )


class MeshCoordinate(NamedTuple):
    """A worker's coordinate in a mesh: its replica, pipeline stage and tensor worker, each from 0."""

    replica: int
    stage: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """A division of workers: replicas of the model, each with pipeline stages of tensor workers.

    Each replica computes on its share of a global batch, whether its states are whole (DDP) or divided among
    the replicas (FSDP). The workers of one replica compute on the same samples. Consecutive ranks are tensor
    workers of one stage, since these exchange most data. Ranks count through the stages last.
    """

    #: Number of replicas of the model.
    replicas: int
    #: Number of workers that divide each layer.
    tensor: int = 1
    #: Number of pipeline stages per replica.
    stages: int = 1

    @property
    def workers(self) -> int:
        """Number of workers of the cell."""
        return self.replicas * self.workers_per_replica

    @property
    def workers_per_replica(self) -> int:
        """Number of workers that share one replica of the model."""
        return self.tensor * self.stages

    def place(self, rank: int) -> MeshCoordinate:
        """Return the mesh coordinate of the worker with rank `rank`."""
        rest, tensor = divmod(rank, self.tensor)
        stage, replica = divmod(rest, self.replicas)
        return MeshCoordinate(replica, stage, tensor)

    def get_rank(self, at: MeshCoordinate) -> int:
        """Return the rank of the worker at a mesh coordinate."""
        return (at.stage * self.replicas + at.replica) * self.tensor + at.tensor

    def reports_for_replica(self, rank: int) -> bool:
        """Return whether a worker reports for its replica. The first worker of its last stage does."""
        at = self.place(rank)
        return at.tensor == 0 and at.stage == self.stages - 1
