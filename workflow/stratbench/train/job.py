"""Defines the job of a cell: everything that its processes need from the launcher, as JSON."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings

#: Maximum seconds that SLURM needs to start the agents of a job on its nodes.
MAX_CALL_S = 60.0


@dataclass(frozen=True)
class Job:
    """The training of one cell, as its launcher has set it up. All paths are absolute."""

    cell: Cell
    settings: Settings
    data_dir: Path
    #: Meta data of the prepared data set in `data_dir`. Workers refuse to train on another one.
    data: dict[str, Any]
    folder: RunFolder
    #: Number of workers on each node, in the order of ranks. The last node may have fewer.
    workers_per_node: int
    use_cuda: bool
    #: CPU threads per worker.
    threads: int
    #: Unix time of the start, from which the timeline and the time limit count.
    origin_unix_s: float
    #: Value of this node's monotonic clock at the start. Measurements use it, since a date may be changed.
    origin_s: float
    #: Time limit in seconds from the start. None: none.
    time_limit_s: float | None
    #: Whether this is a segment of a block, which shares a fork server and devices with the block's other
    #: segments.
    is_in_block: bool = False
    #: Seconds that the cell's SLURM job waited in the queue. None: there is no such job, or it is not known.
    queue_wait_s: float | None = None
    #: Earlier attempts of a cell with checkpoints (`train.restarts.attempts`).
    earlier_attempts: tuple[dict[str, Any], ...] = ()
    #: Number of repeats of the cell in the config. None: not known.
    planned_repeats: int | None = None

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of a stored sample."""
        return tuple(self.data["shape"])

    @property
    def train_samples(self) -> int:
        """Number of training samples."""
        return self.data["train_samples"]

    @property
    def deadline_s(self) -> float | None:
        """Value of this node's monotonic clock at the time limit, or None without a limit."""
        return None if self.time_limit_s is None else self.origin_s + self.time_limit_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the cell."""
        return time.monotonic() - self.origin_s

    def for_another_node(self, spent_s: float, local: Path) -> Job:
        """Return the job for another node, with that node's clock and local folder.

        If the clocks of both nodes agree on the date, the start is corrected by the seconds that the call
        took.

        Args:
            spent_s: Seconds between the cell's start and the call of this node's agent.
            local: Folder for temporary files on this node.
        """
        by_date_s = time.time() - self.origin_unix_s
        agree = spent_s <= by_date_s <= spent_s + MAX_CALL_S
        folder = replace(self.folder, node_local_dir=local)
        origin_s = time.monotonic() - (by_date_s if agree else spent_s)
        return replace(self, origin_s=origin_s, folder=folder)

    @property
    def earlier_attempts_s(self) -> float:
        """Seconds of all earlier attempts, which the cell's times include."""
        return sum(attempt["ran_s"] for attempt in self.earlier_attempts)

    @property
    def world_size(self) -> int:
        """Number of workers on all nodes."""
        return self.cell.gpus

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return -(-self.world_size // self.workers_per_node)

    def list_ranks(self, node: int) -> range:
        """Return the ranks that run on a node."""
        first = node * self.workers_per_node
        return range(first, min(first + self.workers_per_node, self.world_size))

    def compute_node(self, rank: int) -> int:
        """Return the number of the node on which a rank runs."""
        return rank // self.workers_per_node

    def count_workers_on_node(self, rank: int) -> int:
        """Return how many workers run on the node of a rank, including the rank itself."""
        return len(self.list_ranks(self.compute_node(rank)))

    def to_json(self) -> str:
        """Return the job as JSON for `from_json`."""
        return json.dumps(asdict(self), default=os.fspath)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job from the JSON that `to_json` has written."""
        fields = json.loads(text)
        fields["cell"] = Cell(**fields["cell"])
        fields["settings"] = Settings(**fields["settings"])
        fields["data_dir"] = Path(fields["data_dir"])
        fields["earlier_attempts"] = tuple(fields["earlier_attempts"])
        paths = fields["folder"]
        fields["folder"] = RunFolder(**{key: path and Path(path) for key, path in paths.items()})
        return cls(**fields)
