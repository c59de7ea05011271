"""Runs elastic cells, whose workers are separate jobs that join and leave during the training."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.extensions.elastic import launch, served
from stratbench.extensions.elastic.accounts import accounts, served_accounts
from stratbench.extensions.elastic.jobs.worker_job import WorkerJob
from stratbench.extensions.servers.cells import has_servers, read_finished_server_statistics
from stratbench.extensions.servers.figures import compute_server_cell_totals, make_server_entry
from stratbench.strategies import get_strategy_class
from stratbench.telemetry.pauses import PauseWatch
from stratbench.telemetry.timeline import PhaseInterval, read_phase_intervals
from stratbench.train import efficiency
from stratbench.train.agent import Exits
from stratbench.train.ending import CellEnding
from stratbench.train.job import Job
from stratbench.train.nodes.paused import write_worker_pauses
from stratbench.train.running.runner import Runner
from stratbench.workload.data import prepared


class ElasticRunner(Runner):
    """Runner of elastic cells. If the launcher is restarted, it resumes the training."""

    section = "elastic"
    is_gang = False

    @classmethod
    def runs_cells_with(cls, s: Settings) -> bool:
        return "elastic" in s.more

    def prepare(self, folder: RunFolder, cell: Cell, s: Settings, data_dir: Path) -> None:
        launch.prepare_run_folder(folder, cell, s, prepared.read_unverified_metadata(data_dir))

    @contextmanager
    def reserve_gpus(self, s: Settings, args: argparse.Namespace) -> Iterator[bool]:
        """Reserve GPUs of this machine for the workers, unless the workers are SLURM jobs.

        SLURM jobs have GPUs of their own.
        """
        if (worker_job := parse_worker_job(args)) is not None:
            yield worker_job.gpus > 0
            return
        with super().reserve_gpus(s, args) as use_cuda:
            yield use_cuda

    def count_threads_per_worker(self, s: Settings, workers: int, args: argparse.Namespace) -> int:
        if (worker_job := parse_worker_job(args)) is not None:
            return s.threads or worker_job.cpus
        return super().count_threads_per_worker(s, workers, args)

    def run(self, job: Job, args: argparse.Namespace) -> tuple[Job, Exits, CellEnding]:
        job = launch.shift_times_to_first_launcher(job)
        by, watch = served if has_servers(job.settings) else launch, PauseWatch()
        try:
            ending = by.launch_training(job, parse_worker_job(args), watch)
        finally:
            watch.stop()
            # Pauses of this launcher are added to those that earlier launchers of the cell recorded.
            write_worker_pauses(job, 0, watch, job.folder.read_pauses_of_workers().get("0", ()))
        return job, Exits([], False), ending

    def workers(self, job: Job) -> list[dict[str, Any]]:
        return list(accounts.read_member_results(job).values())

    def compute_totals(self, job: Job, workers: list[dict[str, Any]]) -> dict[str, Any]:
        s, servers, per_epoch = job.settings, read_finished_server_statistics(job), self.epochs(job)
        if not servers:
            return accounts.compute_training_totals(job, per_epoch)
        samples = get_strategy_class(s.strategy).samples_per_step(s)
        kept = served_accounts.drop_server_work_after_last_epoch(servers, len(per_epoch))
        return compute_server_cell_totals(workers, kept, samples, per_epoch)

    def build_server_entry(self, job: Job) -> dict[str, Any] | None:
        """Make the record's section `server`, or None for a cell without parameter servers."""
        return make_server_entry(job)

    def epochs(self, job: Job) -> list[dict[str, Any]]:
        return (
            served_accounts.list_evaluated_epochs(job)
            if has_servers(job.settings)
            else super().epochs(job)
        )

    def build_section_entry(self, job: Job, workers: list[dict[str, Any]]) -> dict[str, Any]:
        return (served_accounts if has_servers(job.settings) else accounts).make_elastic_entry(job)

    def read_training_phases(self, job: Job, node: int) -> list[PhaseInterval]:
        """Return the intervals in which workers trained, on all nodes.

        Synchronous workers train from when they have joined a process group.
        """
        phases = read_phase_intervals(job.folder.list_phase_log_paths())
        joined = [
            PhaseInterval(p.rank, "train", p.end_s, math.inf) for p in phases if p.phase == "join"
        ]
        return [*joined, *(p for p in phases if p.phase == "train")]

    def read_gpu_intervals(
        self, job: Job, workers: Sequence[Mapping[str, Any]]
    ) -> efficiency.Intervals | None:
        """Return None: the intervals are unknown, because killed workers do not record them."""
        return None


def parse_worker_job(args: argparse.Namespace) -> WorkerJob | None:
    """Return the SLURM request of worker jobs, or None if workers run on this machine."""
    return WorkerJob.from_json(args.worker_job) if args.worker_job else None
