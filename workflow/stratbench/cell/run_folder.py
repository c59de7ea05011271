"""Defines the run folder, whose files the launcher, agents, workers and servers of a cell share."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from stratbench.cell.files import read_json_lines, write_text_atomically

#: Period in seconds at which a process looks for a file of another node.
_POLL_S = 0.05


def format_worker_name(rank: int) -> str:
    """Return a worker's name in processes, files and the timeline: `rank3`."""
    return f"rank{rank}"


def format_server_name(server: int) -> str:
    """Return a parameter server's name in processes, files and the timeline: `server0`."""
    return f"server{server}"


def parse_rank(name: str) -> int | None:
    """Return the rank in a worker's name, or None for another name."""
    match = re.fullmatch(r"rank(\d+)", name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class RunFolder:
    """The paths in a cell's run folder, with functions that read and write its JSON files.

    All nodes of the cell share `path`. `node_local_dir` is a folder on this node's own disk; without it,
    local files are also in `path`. JSON files are written atomically.
    """

    #: The name of the run folder in the cell's log folder.
    NAME: ClassVar[str] = "run"

    path: Path
    node_local_dir: Path | None = None

    @classmethod
    def from_log_dir(cls, log_dir: Path, node_local_dir: Path | None = None) -> RunFolder:
        """Return the run folder in a cell's log folder, with an absolute path."""
        return cls((log_dir / cls.NAME).resolve(), node_local_dir)

    @property
    def log_dir(self) -> Path:
        """The log folder of the cell, which contains the run folder."""
        return self.path.parent

    @property
    def saved_state_dir(self) -> Path:
        """The folder with the state from which the cell's next attempt resumes (`train.restarts`)."""
        return self.log_dir / "checkpoints"

    def create_empty_folder(self) -> None:
        """Create the empty folder. Files of an earlier run of the cell are deleted."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)

    def get_log_path(self, process: str) -> Path:
        """Return the path of the file with a process's output, such as `rank3.log`."""
        return self.path / f"{process}.log"

    def list_log_paths(self) -> list[Path]:
        """Return the paths of the outputs of all started processes, sorted by name."""
        return sorted(self.path.glob("*.log"))

    def get_phase_log_path(self, rank: int) -> Path:
        """Return the path of the log of a worker's phases (`telemetry.timeline.PhaseLog`)."""
        return self.path / f"phases{rank}.jsonl"

    def list_phase_log_paths(self) -> list[Path]:
        """Return the paths of the phase logs of all started workers."""
        return sorted(self.path.glob("phases*.jsonl"))

    def get_heartbeat_path(self, rank: int) -> Path:
        """Return the path of a worker's heartbeat file (`telemetry.heartbeat`), which only its node reads."""
        return self._dir_for_local_files / f"{format_worker_name(rank)}.heartbeat"

    def get_stack_trace_path(self, process: str) -> Path:
        """Return the path of the file into which a process writes its stack traces."""
        return self.path / f"{process}.stack"

    def list_stack_trace_paths(self) -> list[Path]:
        """Return the paths of all written stack traces, sorted by process name."""
        return sorted(p for p in self.path.glob("*.stack") if p.stat().st_size)

    def get_timeline_samples_path(self, node: int) -> Path:
        """Return the path of the CSV file with a node's samples (`telemetry.timeline.SAMPLE_COLUMNS`)."""
        return self.path / f"samples{node}.csv"

    def list_timeline_samples_paths(self) -> list[Path]:
        """Return the paths of the sample files of all nodes."""
        return sorted(self.path.glob("samples*.csv"))

    def get_pid_list_path(self, node: int) -> Path:
        """Return the path of the file that lists the processes to sample on a node."""
        return self.path / f"samples{node}.pids"

    @property
    def profile_trace_path(self) -> Path:
        """The path of the profiler's trace (`profile: true`)."""
        return self.path / "profile.json.gz"

    @property
    def file_store_path(self) -> Path:
        """The path of the `torch.distributed.FileStore` that the workers of one node share."""
        return self._dir_for_local_files / "store"

    @property
    def job_secret_path(self) -> Path:
        """The path of the job's secret, which `servers.wire.handshake` writes, reads and checks."""
        return self.path / "secret"

    @property
    def server_rendezvous_path(self) -> Path:
        """The common start of the paths of the servers' rendezvous files. Server 0 adds `.0`."""
        return self.path / "server"

    def get_snapshot_dir(self, shared: bool) -> Path:
        """Return the path of the folder in which servers store an epoch's state for evaluation.

        Args:
            shared: Whether other nodes must see the folder.
        """
        return (self.path if shared else self._dir_for_local_files) / "snapshots"

    @property
    def _dir_for_local_files(self) -> Path:
        return self.node_local_dir or self.path

    def write_job(self, job_json: str) -> Path:
        """Write the description of the cell's job for the agents of other nodes. Return the path."""
        write_text_atomically(self.job_path, job_json)
        return self.job_path

    @property
    def job_path(self) -> Path:
        """The path of the description of the cell's job, which `write_job` writes."""
        return self.path / "job.json"

    def write_node0_endpoint(self, host: str, port: int) -> None:
        """Write the host and port at which all nodes connect to node 0."""
        write_text_atomically(self._node0_endpoint_path, json.dumps({"host": host, "port": port}))

    def read_node0_endpoint(self) -> tuple[str, int] | None:
        """Return the host and port at which all nodes connect. None before node 0 has written them."""
        endpoint = read_json_if_exists(self._node0_endpoint_path)
        return endpoint and (endpoint["host"], endpoint["port"])

    def wait_for_node0_endpoint(self, timeout_s: float) -> tuple[str, int]:
        """Wait until node 0 has written the address for all nodes, and return it.

        Raises:
            TimeoutError: Node 0 has not written the address within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while (endpoint := self.read_node0_endpoint()) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    "node 0 did not write its address for the other nodes into "
                    f"{self._node0_endpoint_path} within {timeout_s:g} s; its log in this folder has the "
                    "reason. If there is no log, the nodes do not share this folder: set `results` in "
                    "config.yaml to a folder that all nodes share"
                )
            time.sleep(_POLL_S)
        return endpoint

    @property
    def _node0_endpoint_path(self) -> Path:
        return self.path / "endpoint.json"

    def write_worker_result(self, rank: int, result: dict[str, Any]) -> None:
        """Store the results of a worker, or the reason why the worker failed."""
        write_text_atomically(self._get_worker_result_path(rank), json.dumps(result))

    def read_worker_result(self, rank: int) -> dict[str, Any] | None:
        """Return the result that a worker wrote at its end. None if the worker wrote none."""
        return read_json_if_exists(self._get_worker_result_path(rank))

    def read_worker_results(self, world_size: int) -> dict[int, dict[str, Any]]:
        """Return the workers' results by rank, without workers that wrote none."""
        results = {rank: self.read_worker_result(rank) for rank in range(world_size)}
        return {rank: result for rank, result in results.items() if result is not None}

    def _get_worker_result_path(self, rank: int) -> Path:
        return self.path / f"{format_worker_name(rank)}.json"

    def get_server_statistics_path(self, server: int) -> Path:
        """Return the path of the statistics that a parameter server writes at its end."""
        return self.path / f"{format_server_name(server)}.json"

    def read_server_statistics(self, server: int) -> dict[str, Any] | None:
        """Return the statistics of a parameter server. None before the server has reached its end."""
        return read_json_if_exists(self.get_server_statistics_path(server))

    def read_all_server_statistics(self, n_servers: int) -> list[dict[str, Any]]:
        """Return the statistics of all parameter servers that reached their end, in order."""
        each = (self.read_server_statistics(k) for k in range(n_servers))
        return [statistics for statistics in each if statistics is not None]

    @property
    def epoch_results_path(self) -> Path:
        """The path of the file with the finished epochs, one JSON object per line."""
        return self.path / "progress.jsonl"

    def append_epoch_result(self, epoch_result: dict[str, Any]) -> None:
        """Store the result of a finished epoch, so that the result survives a timeout."""
        with self.epoch_results_path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(epoch_result) + "\n")

    def read_epoch_results(self) -> list[dict[str, Any]]:
        """Return the results of all epochs that finished before the cell ended."""
        return read_json_lines(self.epoch_results_path)

    def write_load_of_other_processes(self, node: int, load: dict[str, Any]) -> None:
        """Store the load of other processes on a node when the cell began (`telemetry.machine.busy`)."""
        write_text_atomically(self.path / f"busy{node}.json", json.dumps(load))

    def get_foreign_processes_path(self, node: int) -> Path:
        """Return the path of the list of other jobs' processes on a node's GPUs.

        `telemetry.machine.foreign_processes` writes the file if there were any.
        """
        return self.path / f"foreign_processes{node}.json"

    def read_foreign_processes(self) -> dict[str, list[dict[str, Any]]]:
        """Return the processes of other jobs that each node's GPUs had, by node number."""
        return self._read_json_by_node("foreign_processes")

    def read_load_of_other_processes(self) -> dict[str, dict[str, Any]]:
        """Return other processes' load on each node at the cell's start, by node number."""
        return self._read_json_by_node("busy")

    def write_pauses_of_workers(self, node: int, pauses: list[dict[str, Any]]) -> None:
        """Store the periods in which the workers of a node were stopped (`train.nodes.paused`)."""
        write_text_atomically(self.path / f"pauses{node}.json", json.dumps(pauses))

    def read_pauses_of_workers(self) -> dict[str, list[dict[str, Any]]]:
        """Return the periods in which workers were stopped, by node number as text."""
        return self._read_json_by_node("pauses")

    def _read_json_by_node(self, file_name_prefix: str) -> dict[str, Any]:
        paths = sorted(self.path.glob(f"{file_name_prefix}*.json"))
        return {
            path.stem.removeprefix(file_name_prefix): read_json_if_exists(path) for path in paths
        }

    def write_worker_states(self, node: int, states: dict[str, Any]) -> None:
        """Store the state of a node's workers at the cell's end, by worker name."""
        write_text_atomically(self.path / f"standing{node}.json", json.dumps(states))

    def read_worker_states(self) -> dict[str, dict[str, Any]]:
        """Return the state of all nodes' workers at the cell's end, by worker name."""
        return read_and_merge_json_files(self.path.glob("standing*.json"))

    def write_process_locations(self, node: int, locations: dict[str, Any]) -> None:
        """Store each process's host, and each worker's GPU, by process name."""
        write_text_atomically(self.path / f"places{node}.json", json.dumps(locations))

    def read_process_locations(self) -> dict[str, dict[str, Any]]:
        """Return each process's host, and each worker's GPU, by process name, for all nodes."""
        return read_and_merge_json_files(self.path.glob("places*.json"))


def read_and_merge_json_files(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the entries of the JSON objects in several files as one dict."""
    return {
        name: entry for path in sorted(paths) for name, entry in read_json_if_exists(path).items()
    }


def read_json_if_exists(path: Path) -> Any:
    """Return the value in a JSON file, or None if the file is missing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
