"""How a cell's workers divide its work: copies of the network, each on one worker or split over several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


def refuse_uneven(option: str, workers: int, gpus: int) -> None:
    """Raises ValueError where `gpus` workers cannot form groups of `workers`, as `option` asks."""
    if gpus % workers:
        raise ValueError(
            f"{option} does not divide {gpus} workers into equal groups; change it or the number of workers"
        )


class MeshCoordinate(NamedTuple):
    """Where in a mesh a worker stands, each number from 0."""

    replica: int
    stage: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """`replicas` copies of the network, each divided into `stages` one after the other, and a stage's layers
    among `tensor` workers.

    The copies divide each global batch, whether each of them is whole (DDP) or its states are divided
    among them too (FSDP). The workers of one copy compute on the same samples. Ranks count through the
    tensor workers first, which exchange most and so are neighbours, and through the stages last.
    """

    replicas: int
    tensor: int = 1
    stages: int = 1

    @property
    def workers(self) -> int:
        """How many workers it takes: the cell's `gpus`."""
        return self.replicas * self.members

    @property
    def members(self) -> int:
        """How many workers share one copy of the network."""
        return self.tensor * self.stages

    def place(self, rank: int) -> MeshCoordinate:
        """Where the worker of a rank stands."""
        rest, tensor = divmod(rank, self.tensor)
        stage, replica = divmod(rest, self.replicas)
        return MeshCoordinate(replica, stage, tensor)

    def rank(self, place: MeshCoordinate) -> int:
        """Return the rank of the worker that stands there."""
        return (place.stage * self.replicas + place.replica) * self.tensor + place.tensor

    def speaks(self, rank: int) -> bool:
        """Whether it is the one worker of its copy whose samples and sums count: the last stage's first."""
        place = self.place(rank)
        return place.tensor == 0 and place.stage == self.stages - 1
