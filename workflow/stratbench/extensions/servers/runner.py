"""Runs a cell with parameter servers. If a worker is lost, the servers decide whether the cell fails."""

from __future__ import annotations

import shutil
from itertools import pairwise
from typing import Any

from stratbench.cell.settings import Settings
from stratbench.extensions.servers.cells import has_servers, read_finished_server_statistics
from stratbench.extensions.servers.endings import classify_server_cell_ending
from stratbench.extensions.servers.figures import (
    compute_server_cell_totals,
    compute_server_traffic,
    make_server_entry,
)
from stratbench.extensions.servers.wire.handshake import make_secret, write_secret
from stratbench.strategies import get_strategy_class
from stratbench.train.agent import Exits
from stratbench.train.ending import CellEnding, classify_ending
from stratbench.train.job import Job
from stratbench.train.running.runner import Runner


class ServedRunner(Runner):
    """Runner of cells with parameter servers, whose statistics give training time, samples and epochs."""

    processes = "stratbench.extensions.servers.node:make_node_processes"
    profile_note = "the servers had ended: the exchange with them is not in it"

    @classmethod
    def runs_cells_with(cls, s: Settings) -> bool:
        """Return whether a cell with these settings has parameter servers."""
        return has_servers(s)

    def launch_processes(self, job: Job, cpus_per_node: int) -> tuple[Exits, CellEnding]:
        """Run the cell's processes. A new secret authenticates their connections."""
        write_secret(job.folder.job_secret_path, make_secret())
        try:
            return super().launch_processes(job, cpus_per_node)
        finally:
            job.folder.job_secret_path.unlink(missing_ok=True)
            # The workers delete evaluated snapshots. Snapshots that were not evaluated are deleted here.
            shutil.rmtree(job.folder.get_snapshot_dir(job.n_nodes > 1), ignore_errors=True)

    def classify(self, job: Job, exits: Exits, oom_kills_before: int | None) -> CellEnding:
        """Return how the cell ended. If a worker was lost, the servers have decided whether the cell fails.

        Args:
            job: Job of the cell.
            exits: Exits of the cell's processes, with reasons.
            oom_kills_before: The kernel's count of memory kills before the cell, or None if unknown.
        """
        return classify_ending(job, exits, oom_kills_before, classify_server_cell_ending)

    def compute_totals(self, job: Job, workers: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the training time, samples and epochs of the run, as the servers counted them."""
        servers, s = read_finished_server_statistics(job), job.settings
        if not servers:
            return super().compute_totals(job, workers)
        each = (w["per_epoch"] for w in workers if w["per_epoch"])
        per_epoch: list[dict[str, Any]] = next(each, [])
        samples = get_strategy_class(s.strategy).samples_per_step(s)
        return compute_server_cell_totals(workers, servers, samples, per_epoch)

    def communication(
        self, job: Job, workers: list[dict[str, Any]], run: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Make the record's section `communication`, with the traffic of servers and links.

        Args:
            job: Job of the cell.
            workers: Results of the workers.
            run: Totals of the run.
        """
        figures, servers = (
            super().communication(job, workers, run),
            read_finished_server_statistics(job),
        )
        if figures is None or not servers:
            return figures
        return figures | compute_server_traffic(job, workers, servers, run)

    def list_lost_workers(self, job: Job) -> list[dict[str, Any]]:
        """Return an entry for each worker that a server declared lost."""
        return [
            w for server in read_finished_server_statistics(job) for w in server.get("lost", ())
        ]

    def read_step_times_s(self, job: Job) -> list[list[float]]:
        """Return for each server the seconds that each global batch took.

        The time of one worker's step does not show how fast all workers together are.
        """
        ends = [[0.0, *server["step_ends_s"]] for server in read_finished_server_statistics(job)]
        return [[after - before for before, after in pairwise(e)] for e in ends]

    def build_server_entry(self, job: Job) -> dict[str, Any] | None:
        """Make the record's section `server` from the servers' statistics."""
        return make_server_entry(job)
