"""The job: everything the processes of one cell are told by the launcher, as one JSON text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stratbench.cells import Cell
from stratbench.config import Settings
from stratbench.strategies import strategy_class

#: The profiler's trace in a cell's run folder (`profile: true`).
PROFILE_TRACE = "profile.json.gz"


@dataclass(frozen=True)
class Job:
    """One cell's run.

    Paths are absolute; `run_dir` is seen by all nodes, `store_path` by one. The timeline and the time
    limit count from `origin_unix_s`.
    """

    cell: Cell
    settings: Settings
    data_dir: Path
    data_shape: tuple[int, int, int]
    train_samples: int
    run_dir: Path
    store_path: Path
    n_nodes: int
    workers_per_node: int
    use_cuda: bool
    threads: int
    origin_unix_s: float
    time_limit_s: float | None

    @property
    def deadline_unix_s(self) -> float | None:
        return None if self.time_limit_s is None else self.origin_unix_s + self.time_limit_s

    @property
    def has_servers(self) -> bool:
        """Whether the cell has parameter servers."""
        return strategy_class(self.settings.strategy).kind == "server"

    @property
    def world_size(self) -> int:
        return self.cell.gpus

    def ranks_of(self, node: int) -> range:
        """The ranks that run on node number `node`."""
        first = node * self.workers_per_node
        return range(first, min(first + self.workers_per_node, self.world_size))

    def to_json(self) -> str:
        fields: dict[str, Any] = asdict(self)
        for key in ("data_dir", "run_dir", "store_path"):
            fields[key] = str(fields[key])
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        fields["cell"] = Cell(**fields["cell"])
        fields["settings"] = Settings(**fields["settings"])
        fields["data_shape"] = tuple(fields["data_shape"])
        for key in ("data_dir", "run_dir", "store_path"):
            fields[key] = Path(fields[key])
        return cls(**fields)
