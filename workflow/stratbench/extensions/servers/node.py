"""The processes of one node of a cell with parameter servers: servers and workers."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from stratbench.cell.run_folder import RunFolder, format_server_name, format_worker_name, parse_rank
from stratbench.extensions.servers.ps.server_config import ServerConfig
from stratbench.extensions.servers.strategy import find_node_of_server, make_server_configs
from stratbench.telemetry.timeline import read_phase_intervals
from stratbench.train.agent import NodeProcesses, create_workers, start_fork_server
from stratbench.train.forkserver import Process
from stratbench.train.job import Job

#: The function that a server process calls, as `module:name`.
SERVER = "stratbench.extensions.servers.process:serve_parameters"


@contextmanager
def make_node_processes(job: Job, node: int) -> Iterator[NodeProcesses]:
    """Yield the processes of the servers and workers on a node, before their start."""
    with start_fork_server(job) as path:
        servers = make_server_processes(path, job.folder, list_server_configs_of_node(job, node))
        yield ServedProcesses(job, create_workers(job, node, path), servers)


class ServedProcesses(NodeProcesses):
    """The processes of the servers and workers on a node.

    If a worker is lost, the others continue as long as the servers run. A worker that the servers have
    declared lost is killed, because its process may be stopped for good.
    """

    poll_s = 0.5

    def tolerates_failure(self, name: str) -> bool:
        """Return whether the cell may continue after the process failed.

        It may if the process is a worker that had joined the servers.
        """
        rank = parse_rank(name)
        return rank is not None and has_worker_joined(self.job, rank)

    def is_success_impossible(self, ended: Mapping[str, int]) -> bool:
        """Return whether all workers have ended, or the servers wait for an ended worker.

        The cell fails in both cases.
        """
        # On several nodes, workers of other nodes may still run when all workers of this node have ended.
        return super().is_success_impossible(ended) or (
            self.job.n_nodes == 1 and all(p.name in ended for p in self.workers)
        )

    def are_workers_hung(self, awake_since_s: float) -> bool:
        """Return whether no worker of the cell makes progress. False on several nodes."""
        # On several nodes, workers of other nodes may make progress while those of this node do not.
        return self.job.n_nodes == 1 and super().are_workers_hung(awake_since_s)

    def list_lost_processes(self) -> set[str]:
        """Return the names of the workers that the servers have declared lost.

        The set is empty before server 0 has ended.
        """
        server = self.job.folder.read_server_statistics(0)
        return {format_worker_name(w["worker"]) for w in server["lost"]} if server else set()


def make_server_processes(
    fork_server: Path, run: RunFolder, configs: Sequence[ServerConfig], entry: str = SERVER
) -> list[Process]:
    """Return the processes of parameter servers, which are not started yet.

    Args:
        fork_server: Folder of the fork server.
        run: Run folder of the cell.
        configs: Config of each server.
        entry: The function that each process calls.
    """
    return [
        Process(
            fork_server, format_server_name(c.server), entry, json.dumps(asdict(c)), str(run.path)
        )
        for c in configs
    ]


def list_server_configs_of_node(job: Job, node: int) -> list[ServerConfig]:
    """Return the configs of the parameter servers on a node."""
    host = socket.gethostname() if job.n_nodes > 1 else None
    configs = make_server_configs(job.settings, job.train_samples, job.folder, host)
    return [c for c in configs if find_node_of_server(job.settings, c.server, job.n_nodes) == node]


def has_worker_joined(job: Job, rank: int) -> bool:
    """Return whether the worker with rank `rank` has joined the servers.

    If a worker ends before it has joined, the servers still wait for it.
    """
    phases = read_phase_intervals([job.folder.get_phase_log_path(rank)])
    return any(p.phase == "build" and math.isfinite(p.end_s) for p in phases)
