"""The run folder: the files that the launcher, agents, workers and servers of one cell share."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from stratbench.cell.files import read_json_lines, write_atomic

#: How often a file of another node is looked for, in seconds.
_POLL_S = 0.05


def worker_name(rank: int) -> str:
    """Return the name of worker `rank`: of its process, its files and its rows in the timeline."""
    return f"rank{rank}"


def server_name(server: int) -> str:
    """Return the name of parameter server number `server`, used like a worker's."""
    return f"server{server}"


def rank_of(name: str) -> int | None:
    """Return the rank of the worker with this name.

    Return None if it is not a worker's name.
    """
    match = re.fullmatch(r"rank(\d+)", name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class RunFolder:
    """Paths of one cell's run folder, and the readers and writers of its JSON files.

    All nodes of the cell see `path`. `local` is a folder on this node's own disk; without it, such files
    are in `path` too. JSON files appear whole or not at all.
    """

    #: Its name in the log folder of the cell.
    NAME: ClassVar[str] = "run"

    path: Path
    local: Path | None = None

    @classmethod
    def of_logs(cls, logs: Path, local: Path | None = None) -> RunFolder:
        """Return the run folder of the cell with this log folder; its path is absolute."""
        return cls((logs / cls.NAME).resolve(), local)

    @property
    def logs(self) -> Path:
        """The log folder of the cell, which holds the run folder."""
        return self.path.parent

    @property
    def kept(self) -> Path:
        """The folder beside it of what the next attempt of the cell goes on from (`train.restarts`)."""
        return self.logs / "checkpoints"

    def create(self) -> None:
        """Make the folder, empty: what an earlier run of the cell left is deleted."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)

    # ------------------------------------------------------------ processes

    def log(self, process: str) -> Path:
        """Return the output of a process, by its name (rank3, server0)."""
        return self.path / f"{process}.log"

    def process_logs(self) -> list[Path]:
        """Return the outputs of all processes that have started, by name."""
        return sorted(self.path.glob("*.log"))

    def phases(self, rank: int) -> Path:
        """Return the log of a worker's phases (`telemetry.timeline.PhaseLog`)."""
        return self.path / f"phases{rank}.jsonl"

    def phase_logs(self) -> list[Path]:
        """Return the phase logs of all workers that have started."""
        return sorted(self.path.glob("phases*.jsonl"))

    def heartbeat(self, rank: int) -> Path:
        """When a worker last got on (`telemetry.heartbeat`); only its own node reads it."""
        return self._local / f"{worker_name(rank)}.heartbeat"

    def stack(self, process: str) -> Path:
        """Where a process writes the stacks of its threads when its agent asks for them."""
        return self.path / f"{process}.stack"

    def stacks(self) -> list[Path]:
        """Return the stacks of the processes that were asked for them, by name."""
        return sorted(p for p in self.path.glob("*.stack") if p.stat().st_size)

    def samples(self, node: int) -> Path:
        """What the sampler of a node saw, as CSV (`telemetry.timeline.SAMPLE_COLUMNS`)."""
        return self.path / f"samples{node}.csv"

    def sample_files(self) -> list[Path]:
        """Return the samples of all nodes."""
        return sorted(self.path.glob("samples*.csv"))

    def pids(self, node: int) -> Path:
        """Return names and ids of the processes that the sampler of a node watches, while it runs."""
        return self.path / f"samples{node}.pids"

    @property
    def profile_trace(self) -> Path:
        """The profiler's trace (`profile: true`)."""
        return self.path / "profile.json.gz"

    # ------------------------------------------------------------ how they find each other

    @property
    def store(self) -> Path:
        """The file by which the workers of one node form their process group."""
        return self._local / "store"

    @property
    def secret(self) -> Path:
        """The job's secret. `ps.handshake` writes and reads it, and checks who else could."""
        return self.path / "secret"

    @property
    def rendezvous(self) -> Path:
        """Path of the servers' rendezvous files, without their ending (`.0` for server 0)."""
        return self.path / "server"

    def snapshots(self, shared: bool) -> Path:
        """The folder where servers keep an epoch's state until a worker evaluates it, perhaps elsewhere."""
        return (self.path if shared else self._local) / "snapshots"

    @property
    def _local(self) -> Path:
        return self.local or self.path

    def write_job(self, text: str) -> Path:
        """Keep the job for the agents of other nodes; returns its path."""
        write_atomic(self.job, text)
        return self.job

    @property
    def job(self) -> Path:
        """The job as `write_job` keeps it."""
        return self.path / "job.json"

    @property
    def worker_jobs(self) -> Path:
        """Of an elastic cell the worker jobs that were submitted (`train.elastic.keeper`)."""
        return self.path / "worker_jobs.jsonl"

    @property
    def ended(self) -> Path:
        """A file that is there once an elastic cell's training is over: a late worker has nothing to do."""
        return self.path / "ended"

    @property
    def servers(self) -> Path:
        """The folder that the incarnations of an elastic cell's parameter servers share (`ps.elastic`)."""
        return self.path / "servers"

    def write_unheard(self, number: int, last: dict[str, Any]) -> None:
        """Keep what an elastic cell's worker would have told a launcher that was gone."""
        write_atomic(self.path / f"unheard{number}.json", json.dumps(last))

    def read_unheard(self, number: int) -> dict[str, Any] | None:
        """What `write_unheard` kept; None: it was heard."""
        return _read(self.path / f"unheard{number}.json")

    def incarnations(self) -> list[Path]:
        """What each launcher of an elastic cell kept of its members, in order."""
        return sorted(
            self.path.glob("incarnation*.json"),
            key=lambda p: int(p.stem.removeprefix("incarnation")),
        )

    def write_incarnation(self, number: int, facts: dict[str, Any]) -> None:
        """Keep what happened to the members of an elastic cell under its launcher `number`, from 0."""
        write_atomic(self.path / f"incarnation{number}.json", json.dumps(facts))

    def write_endpoint(self, host: str, port: int) -> None:
        """Tell the other nodes where all meet: where rank 0's store listens, or a command's node 0."""
        write_atomic(self._endpoint, json.dumps({"host": host, "port": port}))

    def read_endpoint(self) -> tuple[str, int] | None:
        """Host and port where all meet; None while node 0 has told none."""
        endpoint = _read(self._endpoint)
        return endpoint and (endpoint["host"], endpoint["port"])

    def wait_for_endpoint(self, limit_s: float) -> tuple[str, int]:
        """Return the same, once node 0 has told it.

        Raises:
            TimeoutError: Where that takes longer than `limit_s`.
        """
        deadline_s = time.monotonic() + limit_s
        while (endpoint := self.read_endpoint()) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"node 0 did not tell in {self._endpoint}, within {limit_s:g} s, where all meet: its log "
                    "there says why; without one, the nodes do not see the same files, and `results` must "
                    "lie where they do"
                )
            time.sleep(_POLL_S)
        return endpoint

    @property
    def _endpoint(self) -> Path:
        return self.path / "endpoint.json"

    # ------------------------------------------------------------ what they found

    def write_worker(self, rank: int, result: dict[str, Any]) -> None:
        """Keep what a worker measured, or why it failed."""
        write_atomic(self._worker(rank), json.dumps(result))

    def read_worker(self, rank: int) -> dict[str, Any] | None:
        """What a worker wrote at its end, or None if it wrote nothing."""
        return _read(self._worker(rank))

    def read_workers(self, world_size: int) -> dict[int, dict[str, Any]]:
        """What each worker wrote, by rank; workers that wrote nothing are absent."""
        results = {rank: self.read_worker(rank) for rank in range(world_size)}
        return {rank: result for rank, result in results.items() if result is not None}

    def _worker(self, rank: int) -> Path:
        return self.path / f"{worker_name(rank)}.json"

    def server_statistics(self, server: int) -> Path:
        """Where a parameter server writes its statistics at its end."""
        return self.path / f"{server_name(server)}.json"

    def read_server(self, server: int) -> dict[str, Any] | None:
        """Return the statistics of a parameter server.

        Return None if it has not reached its end.
        """
        return _read(self.server_statistics(server))

    def read_servers(self, n_servers: int) -> list[dict[str, Any]]:
        """Return the statistics of the parameter servers that reached their end, by number."""
        each = (self.read_server(k) for k in range(n_servers))
        return [statistics for statistics in each if statistics is not None]

    @property
    def progress(self) -> Path:
        """The epochs that are finished, one JSON object a line."""
        return self.path / "progress.jsonl"

    def add_epoch(self, entry: dict[str, Any]) -> None:
        """Keep what a finished epoch gave, so that a timeout loses nothing."""
        with self.progress.open("a", encoding="utf-8") as f:
            f.write(json.dumps(entry) + "\n")

    def read_epochs(self) -> list[dict[str, Any]]:
        """Return the epochs that were finished before the cell ended, however it ended."""
        return read_json_lines(self.progress)

    def write_busy(self, node: int, facts: dict[str, Any]) -> None:
        """Keep what else used a node when the cell began (`telemetry.machine.busy`)."""
        write_atomic(self.path / f"busy{node}.json", json.dumps(facts))

    def foreign_processes(self, node: int) -> Path:
        """Who else computed on the cell's GPUs of a node (`telemetry.machine.foreign_processes`); none: no
        file.
        """
        return self.path / f"foreign_processes{node}.json"

    def read_foreign_processes(self) -> dict[str, list[dict[str, Any]]]:
        """Return the same of all nodes that had any, by the node's number as a text."""
        return self._by_node("foreign_processes")

    def read_busy(self) -> dict[str, dict[str, Any]]:
        """What else used each node when the cell began, by the node's number as a text."""
        return self._by_node("busy")

    def write_pauses(self, node: int, pauses: list[dict[str, Any]]) -> None:
        """Keep the spans in which the workers of a node were stopped (`train.nodes.paused`)."""
        write_atomic(self.path / f"pauses{node}.json", json.dumps(pauses))

    def read_pauses(self) -> dict[str, list[dict[str, Any]]]:
        """Return the same of all nodes that had any, by the node's number as a text."""
        return self._by_node("pauses")

    def _by_node(self, name: str) -> dict[str, Any]:
        paths = sorted(self.path.glob(f"{name}*.json"))
        return {path.stem.removeprefix(name): _read(path) for path in paths}

    def write_standing(self, node: int, standing: dict[str, Any]) -> None:
        """Keep where each worker of a node was when the cell was ended, by name (`train.standing`)."""
        write_atomic(self.path / f"standing{node}.json", json.dumps(standing))

    def read_standing(self) -> dict[str, dict[str, Any]]:
        """Return the same of all nodes."""
        return _read_all(self.path.glob("standing*.json"))

    def write_places(self, node: int, places: dict[str, Any]) -> None:
        """Keep where each process of a node runs, by name: its host, and a worker's GPU."""
        write_atomic(self.path / f"places{node}.json", json.dumps(places))

    def read_places(self) -> dict[str, dict[str, Any]]:
        """Return the same of all nodes."""
        return _read_all(self.path.glob("places*.json"))


def _read_all(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the entries of several JSON files of ours, by the files' names."""
    return {name: entry for path in sorted(paths) for name, entry in _read(path).items()}


def _read(path: Path) -> Any:
    """Return the value in a JSON file of ours.

    Return None where there is no file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
