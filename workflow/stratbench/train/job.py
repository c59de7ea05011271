"""Defines the job of a cell: everything that the cell's processes get from its launcher."""

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

#: Longest time in seconds that SLURM may take to start a job's agents on its nodes.
MAX_CALL_S = 60.0


@dataclass(frozen=True)
class Job:
    """Everything that a cell's processes need to know to train the cell. All paths are absolute."""

    cell: Cell
    settings: Settings
    data_dir: Path
    #: Metadata of the prepared data set in `data_dir`. Workers refuse a data set with other metadata.
    data: dict[str, Any]
    folder: RunFolder
    #: Number of workers on each node, in the order of ranks. The last node may have fewer.
    workers_per_node: int
    use_cuda: bool
    #: CPU threads per worker.
    threads: int
    #: Unix time of the cell's start, from which the timeline and the time limit count.
    origin_unix_s: float
    #: Value of this node's monotonic clock at the cell's start. Measurements use this clock, because the
    #: system's date may be changed.
    origin_s: float
    #: Time limit of the cell in seconds after its start. None: there is no limit.
    time_limit_s: float | None
    #: Whether the job is a segment: one of the short timed runs in a block of a verdict. Segments of a block
    #: share a fork server and devices.
    is_in_block: bool = False
    #: Seconds that the cell's SLURM job waited in the queue. None: there is no SLURM job, or the wait is
    #: unknown.
    queue_wait_s: float | None = None
    #: Earlier attempts to train the cell, if it has checkpoints (see the extension `checkpoints`).
    earlier_attempts: tuple[dict[str, Any], ...] = ()
    #: Number of repeats that the config plans for the cell. None: the number is unknown.
    planned_repeats: int | None = None

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of a sample in the prepared data set."""
        return tuple(self.data["shape"])

    @property
    def train_samples(self) -> int:
        """Number of training samples in the data set."""
        return self.data["train_samples"]

    @property
    def deadline_s(self) -> float | None:
        """Value of this node's monotonic clock at which the time limit ends. None without a limit."""
        return None if self.time_limit_s is None else self.origin_s + self.time_limit_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the cell."""
        return time.monotonic() - self.origin_s

    def make_copy_for_node(self, spent_s: float, local: Path) -> Job:
        """Return a copy of the job with this node's clock and local folder.

        The job comes from the launcher's node. If both nodes agree on the date, the start is corrected by the
        seconds that the call of the agent took.

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
        """Total seconds of the earlier attempts. The times of the cell include them."""
        return sum(attempt["ran_s"] for attempt in self.earlier_attempts)

    @property
    def world_size(self) -> int:
        """Number of workers on all nodes."""
        return self.cell.gpus

    @property
    def n_nodes(self) -> int:
        """Number of nodes on which the workers run."""
        return -(-self.world_size // self.workers_per_node)

    def list_ranks_on_node(self, node: int) -> range:
        """Return the ranks of the workers that run on a node."""
        first = node * self.workers_per_node
        return range(first, min(first + self.workers_per_node, self.world_size))

    def get_node_of_rank(self, rank: int) -> int:
        """Return the number of the node on which the worker with this rank runs."""
        return rank // self.workers_per_node

    def count_workers_on_node_of_rank(self, rank: int) -> int:
        """Return how many workers run on the node of this rank, including it."""
        return len(self.list_ranks_on_node(self.get_node_of_rank(rank)))

    def to_json(self) -> str:
        """Return the job as JSON, which `from_json` reads."""
        return json.dumps(asdict(self), default=os.fspath)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job from the JSON text that `to_json` returned."""
        fields = json.loads(text)
        fields["cell"] = Cell(**fields["cell"])
        fields["settings"] = Settings(**fields["settings"])
        fields["data_dir"] = Path(fields["data_dir"])
        fields["earlier_attempts"] = tuple(fields["earlier_attempts"])
        paths = fields["folder"]
        fields["folder"] = RunFolder(**{key: path and Path(path) for key, path in paths.items()})
        return cls(**fields)
