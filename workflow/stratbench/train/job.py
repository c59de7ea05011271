"""The job: everything that a cell's processes get from the launcher, as one JSON text."""

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
from stratbench.strategies import strategy_class

#: How long SLURM may take to start the agents of a job on its nodes, in seconds.
MAX_CALL_S = 60.0


@dataclass(frozen=True)
class Job:
    """One cell's run.

    Paths are absolute. The timeline and the time limit count from the origin: `origin_unix_s` is its date,
    `origin_s` the value that this node's monotonic clock had then. Measurements use the latter, since a date
    may be changed.
    """

    cell: Cell
    settings: Settings
    data_dir: Path
    #: The meta data of what is prepared there: the workers train on this data set or on none.
    data: dict[str, Any]
    folder: RunFolder
    #: Workers on each node, in the order of their ranks; the last node may have fewer.
    workers_per_node: int
    use_cuda: bool
    threads: int
    origin_unix_s: float
    origin_s: float
    time_limit_s: float | None
    #: Whether it is a segment: those of a block share a fork server, on the same devices.
    in_block: bool = False
    #: How long the cell's own job waited in SLURM's queue; None: there is none, or it is not known.
    queue_wait_s: float | None = None
    #: Of a cell that keeps checkpoints the attempts before this one (`train.restarts.attempts`).
    attempts: tuple[dict[str, Any], ...] = ()
    #: Repeats of the cell that the configuration asks for; None: not known.
    planned_repeats: int | None = None

    @property
    def data_shape(self) -> tuple[int, ...]:
        """The shape of a sample as it is stored."""
        return tuple(self.data["shape"])

    @property
    def train_samples(self) -> int:
        """Number of training samples."""
        return self.data["train_samples"]

    @property
    def deadline_s(self) -> float | None:
        """Time limit on this node's monotonic clock, or None without a limit."""
        return None if self.time_limit_s is None else self.origin_s + self.time_limit_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the origin."""
        return time.monotonic() - self.origin_s

    def on_another_node(self, spent_s: float, local: Path) -> Job:
        """Return the job on this node's clock, with its folder `local`, `spent_s` after the call.

        If the dates of both nodes agree, they correct it by the seconds that the call took.
        """
        by_date_s = time.time() - self.origin_unix_s
        agree = spent_s <= by_date_s <= spent_s + MAX_CALL_S
        folder = replace(self.folder, local=local)
        origin_s = time.monotonic() - (by_date_s if agree else spent_s)
        return replace(self, origin_s=origin_s, folder=folder)

    @property
    def spent_s(self) -> float:
        """Seconds of the attempts before this one, which its times count."""
        return sum(attempt["ran_s"] for attempt in self.attempts)

    @property
    def has_servers(self) -> bool:
        """Whether the cell has parameter servers."""
        return strategy_class(self.settings.strategy).kind == "server"

    @property
    def n_servers(self) -> int:
        """Number of parameter servers, or 0 for a collective strategy."""
        return self.settings.options["servers"] if self.has_servers else 0

    @property
    def world_size(self) -> int:
        """Number of workers on all nodes."""
        return self.cell.gpus

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return -(-self.world_size // self.workers_per_node)

    def ranks_of(self, node: int) -> range:
        """Return the ranks that run on node number `node`."""
        first = node * self.workers_per_node
        return range(first, min(first + self.workers_per_node, self.world_size))

    def node_of(self, rank: int) -> int:
        """Return the number of the node that worker `rank` runs on."""
        return rank // self.workers_per_node

    def workers_beside(self, rank: int) -> int:
        """Return the number of workers on the node of worker `rank`, itself included."""
        return len(self.ranks_of(self.node_of(rank)))

    def to_json(self) -> str:
        """Return the job as a text for `from_json`."""
        return json.dumps(asdict(self), default=os.fspath)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that `to_json` wrote."""
        fields = json.loads(text)
        fields["cell"] = Cell(**fields["cell"])
        fields["settings"] = Settings(**fields["settings"])
        fields["data_dir"] = Path(fields["data_dir"])
        fields["attempts"] = tuple(fields["attempts"])
        paths = fields["folder"]
        fields["folder"] = RunFolder(**{key: path and Path(path) for key, path in paths.items()})
        return cls(**fields)
