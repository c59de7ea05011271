"""Division of a cell's workers: copies of the model, each on one worker or over several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


def refuse_uneven(option: str, workers: int, gpus: int) -> None:
    """Raise ValueError if `gpus` workers cannot form groups of `workers`.

    Args:
        option: The option that sets the group size.
        workers: Workers of a group.
        gpus: Number of workers.
    """
    if gpus % workers:
        raise ValueError(
            f"{option} does not divide {gpus} workers into equal groups; change it or the number of workers"
        )


class MeshCoordinate(NamedTuple):
    """A worker's coordinates in a mesh, each from 0."""

    replica: int
    stage: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """Copies of the model: `replicas` of `stages` pipeline stages of `tensor` workers each.

    The copies divide each global batch, whether each of them is complete (DDP) or its states are divided
    among them too (FSDP). The workers of one copy compute on the same samples. Ranks count through the tensor
    workers first, which exchange most and so are neighbours, and through the stages last.
    """

    replicas: int
    tensor: int = 1
    stages: int = 1

    @property
    def workers(self) -> int:
        """Number of workers: the cell's `gpus`."""
        return self.replicas * self.members

    @property
    def members(self) -> int:
        """Number of workers that share one copy of the model."""
        return self.tensor * self.stages

    def place(self, rank: int) -> MeshCoordinate:
        """Return the coordinates of a rank's worker."""
        rest, tensor = divmod(rank, self.tensor)
        stage, replica = divmod(rest, self.replicas)
        return MeshCoordinate(replica, stage, tensor)

    def rank(self, at: MeshCoordinate) -> int:
        """Return the rank of the worker at these coordinates."""
        return (at.stage * self.replicas + at.replica) * self.tensor + at.tensor

    def speaks(self, rank: int) -> bool:
        """Return whether the worker reports for its copy: the first of the last stage."""
        at = self.place(rank)
        return at.tensor == 0 and at.stage == self.stages - 1
