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

#: Period of polling for a file of another node, in seconds.
_POLL_S = 0.05


def worker_name(rank: int) -> str:
    """Return the name of worker `rank` in processes, files and the timeline."""
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

    All nodes of the cell see `path`. `local` is a folder on this node's own disk; without it, such files are
    in `path` too. JSON files appear complete or not at all.
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
        """The folder next to it with the state from which the cell's next attempt resumes.

        See `train.restarts`.
        """
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
        """Return the file with a worker's last progress (`telemetry.heartbeat`); only its node reads it."""
        return self._local / f"{worker_name(rank)}.heartbeat"

    def stack(self, process: str) -> Path:
        """Return the file to which a process writes its stacks on its agent's request."""
        return self.path / f"{process}.stack"

    def stacks(self) -> list[Path]:
        """Return the stacks of the processes that wrote theirs on request, by name."""
        return sorted(p for p in self.path.glob("*.stack") if p.stat().st_size)

    def samples(self, node: int) -> Path:
        """Return the CSV file of a node's sampler (`telemetry.timeline.SAMPLE_COLUMNS`)."""
        return self.path / f"samples{node}.csv"

    def sample_files(self) -> list[Path]:
        """Return the samples of all nodes."""
        return sorted(self.path.glob("samples*.csv"))

    def pids(self, node: int) -> Path:
        """Return names and ids of the processes that a node's sampler watches."""
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
        """The job's secret. `servers.wire.handshake` writes and reads it, and checks its permissions."""
        return self.path / "secret"

    @property
    def rendezvous(self) -> Path:
        """Path of the servers' rendezvous files, without their ending (`.0` for server 0)."""
        return self.path / "server"

    def snapshots(self, shared: bool) -> Path:
        """Return the folder in which servers store an epoch's state until a worker evaluates it."""
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
        """The list of submitted worker jobs of an elastic cell (`train.elastic.keeper`)."""
        return self.path / "worker_jobs.jsonl"

    @property
    def ended(self) -> Path:
        """The file that marks the end of an elastic cell, for late workers."""
        return self.path / "ended"

    @property
    def servers(self) -> Path:
        """The folder that the incarnations of an elastic cell's parameter servers share."""
        return self.path / "servers"

    def write_unheard(self, number: int, last: dict[str, Any]) -> None:
        """Store the result of an elastic cell's worker whose launcher is gone."""
        write_atomic(self.path / f"unheard{number}.json", json.dumps(last))

    def read_unheard(self, number: int) -> dict[str, Any] | None:
        """Return the result stored by `write_unheard`, or None if the launcher received it."""
        return read_json_or_none(self.path / f"unheard{number}.json")

    def incarnations(self) -> list[Path]:
        """Return the files on the members of an elastic cell, one per launcher, in order."""
        return sorted(
            self.path.glob("incarnation*.json"),
            key=lambda p: int(p.stem.removeprefix("incarnation")),
        )

    def write_incarnation(self, number: int, facts: dict[str, Any]) -> None:
        """Store what happened to the members of an elastic cell under launcher `number`, from 0."""
        write_atomic(self.path / f"incarnation{number}.json", json.dumps(facts))

    def write_endpoint(self, host: str, port: int) -> None:
        """Write the address at which all nodes meet.

        It is that of rank 0's store, or of a command's node 0.
        """
        write_atomic(self._endpoint, json.dumps({"host": host, "port": port}))

    def read_endpoint(self) -> tuple[str, int] | None:
        """Return host and port where all nodes meet.

        Return None until node 0 has written them.
        """
        endpoint = read_json_or_none(self._endpoint)
        return endpoint and (endpoint["host"], endpoint["port"])

    def wait_for_endpoint(self, limit_s: float) -> tuple[str, int]:
        """Return host and port where all nodes meet, once node 0 has written them.

        Raises:
            TimeoutError: If that takes longer than `limit_s`.
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
        """Store the results of a worker, or the reason why it failed."""
        write_atomic(self._worker(rank), json.dumps(result))

    def read_worker(self, rank: int) -> dict[str, Any] | None:
        """Return what a worker wrote at its end, or None if it wrote nothing."""
        return read_json_or_none(self._worker(rank))

    def read_workers(self, world_size: int) -> dict[int, dict[str, Any]]:
        """Return what each worker wrote, by rank; workers that wrote nothing are absent."""
        results = {rank: self.read_worker(rank) for rank in range(world_size)}
        return {rank: result for rank, result in results.items() if result is not None}

    def _worker(self, rank: int) -> Path:
        return self.path / f"{worker_name(rank)}.json"

    def server_statistics(self, server: int) -> Path:
        """Return the file of a parameter server's statistics, written at its end."""
        return self.path / f"{server_name(server)}.json"

    def read_server(self, server: int) -> dict[str, Any] | None:
        """Return the statistics of a parameter server.

        Return None if it has not reached its end.
        """
        return read_json_or_none(self.server_statistics(server))

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
        """Return the file of foreign processes on the cell's GPUs of a node.

        `telemetry.machine.foreign_processes` writes it if there were any.
        """
        return self.path / f"foreign_processes{node}.json"

    def read_foreign_processes(self) -> dict[str, list[dict[str, Any]]]:
        """Return the foreign processes of each node that had any, by its number as text."""
        return self._by_node("foreign_processes")

    def read_busy(self) -> dict[str, dict[str, Any]]:
        """Return the other load on each node at the begin, by its number as text."""
        return self._by_node("busy")

    def write_pauses(self, node: int, pauses: list[dict[str, Any]]) -> None:
        """Keep the spans in which the workers of a node were stopped (`train.nodes.paused`)."""
        write_atomic(self.path / f"pauses{node}.json", json.dumps(pauses))

    def read_pauses(self) -> dict[str, list[dict[str, Any]]]:
        """Return the pauses of each node that had any, by its number as text."""
        return self._by_node("pauses")

    def _by_node(self, name: str) -> dict[str, Any]:
        paths = sorted(self.path.glob(f"{name}*.json"))
        return {path.stem.removeprefix(name): read_json_or_none(path) for path in paths}

    def write_standing(self, node: int, standing: dict[str, Any]) -> None:
        """Store the state of a node's workers at the cell's end, by name (`train.standing`)."""
        write_atomic(self.path / f"standing{node}.json", json.dumps(standing))

    def read_standing(self) -> dict[str, dict[str, Any]]:
        """Return the same of all nodes."""
        return read_merged_json(self.path.glob("standing*.json"))

    def write_places(self, node: int, places: dict[str, Any]) -> None:
        """Store where a node's processes run, by name: host, and a worker's GPU."""
        write_atomic(self.path / f"places{node}.json", json.dumps(places))

    def read_places(self) -> dict[str, dict[str, Any]]:
        """Return the same of all nodes."""
        return read_merged_json(self.path.glob("places*.json"))


def read_merged_json(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the entries of several JSON files of ours, by the files' names."""
    return {
        name: entry for path in sorted(paths) for name, entry in read_json_or_none(path).items()
    }


def read_json_or_none(path: Path) -> Any:
    """Return the value in a JSON file of ours.

    Return None where there is no file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
