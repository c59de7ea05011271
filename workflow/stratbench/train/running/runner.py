"""Runs a cell's processes, and builds their part of the record. Extensions derive runners of their own."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from stratbench.cell.coordinates import Cell
from stratbench.cell.extensions import iter_imported_additions
from stratbench.cell.run_folder import RunFolder, format_worker_name
from stratbench.cell.settings import Settings
from stratbench.cell.text.help_page import format_help_address
from stratbench.strategies import get_mesh
from stratbench.telemetry.pauses import PauseWatch
from stratbench.telemetry.timeline import PhaseInterval
from stratbench.train import agent, efficiency, gpu_locks
from stratbench.train.ending import CellEnding, classify_ending, count_oom_kills
from stratbench.train.job import Job
from stratbench.train.nodes.paused import invalidating_pauses_reason, read_training_phases
from stratbench.train.nodes.srun import run_module_on_nodes
from stratbench.train.running.totals import summarize_collective_run
from stratbench.train.standing import WorkerState, hang_reason, read_worker_states


class Runner:
    """Runner of a cell whose workers all start and end together (a gang)."""

    #: Key of the record's entry that `build_section_entry` returns. None: there is no such entry.
    section: ClassVar[str | None] = None
    #: Sentence that says what the profiler's trace of a worker does not contain, for the record. None:
    #: nothing is missing.
    profile_note: ClassVar[str | None] = None
    #: Whether all workers are present from start to end. Only then are rates of all workers together
    #: meaningful.
    is_gang: ClassVar[bool] = True
    #: Path of the function that creates the processes of a node, as "module:function". The agent of each node
    #: gets this path.
    processes: ClassVar[str] = "stratbench.train.agent:create_node_processes"

    @classmethod
    def runs_cells_with(cls, s: Settings) -> bool:
        """Return whether this class is the runner for cells with these settings."""
        return True

    def prepare(self, folder: RunFolder, cell: Cell, s: Settings, data_dir: Path) -> None:
        """Create the run folder, and what else the cell needs before its processes start.

        Args:
            folder: The run folder.
            cell: The cell.
            s: Settings of the cell.
            data_dir: Folder of the prepared data set.
        """
        folder.create_empty_folder()

    def reserve_gpus(self, s: Settings, args: argparse.Namespace) -> AbstractContextManager[bool]:
        """Reserve the cell's GPUs on this node in this context. Yield whether the cell trains on GPUs."""
        return gpu_locks.reserve_cell_gpus(s, args.nodes)

    def count_threads_per_worker(self, s: Settings, workers: int, args: argparse.Namespace) -> int:
        """Return the number of CPU threads per worker on a node.

        Args:
            s: Settings of the cell.
            workers: Number of workers on the node.
            args: The launcher's command line.
        """
        return gpu_locks.count_threads_per_worker(s, workers, args.cpus_per_node, args.server_cpus)

    def run(self, job: Job, args: argparse.Namespace) -> tuple[Job, agent.Exits, CellEnding]:
        """Run the cell. If pauses invalidated the measurements, run it once more.

        Args:
            job: Job of the cell.
            args: The launcher's command line.

        Returns:
            The job of the final run, how its processes exited, and how the cell ended.
        """
        exits, ending = self.launch_processes(job, args.cpus_per_node)
        paused = invalidating_pauses_reason(job, ending.status, self.read_training_phases)
        if paused is None:
            return job, exits, ending
        reason = f"; {ending.reason}" if ending.reason else ""
        text = f"cell {job.cell}: {paused} while it trained; it trains again{reason}"
        print(f"{text} {format_help_address('paused for')}", flush=True)
        folder = job.folder
        folder.create_empty_folder()
        if folder.node_local_dir is not None:
            folder = replace(folder, node_local_dir=folder.node_local_dir / "again")
            folder.node_local_dir.mkdir()
        job = replace(job, folder=folder, origin_unix_s=time.time(), origin_s=time.monotonic())
        return job, *self.launch_processes(job, args.cpus_per_node)

    def launch_processes(self, job: Job, cpus_per_node: int) -> tuple[agent.Exits, CellEnding]:
        """Run the job's processes on all nodes. Return how the processes and how the cell ended."""
        oom_kills_before = count_oom_kills()
        exits = (
            agent.run_node_processes(job, 0, self.processes)
            if job.n_nodes == 1
            else self.launch_with_srun(job, cpus_per_node)
        )
        ending = self.classify(job, exits, oom_kills_before)
        if ending.status == "error" and (
            paused := invalidating_pauses_reason(job, ending.status, self.read_training_phases)
        ):
            ending = replace(ending, reason=f"{ending.reason}; {paused}")
        return exits, ending

    def launch_with_srun(self, job: Job, cpus_per_node: int) -> agent.Exits:
        """Run an agent on each node by srun, and return how the processes ended.

        Each agent applies the time limit. This function ends agents that do not.
        """
        path = job.folder.write_job(job.to_json())
        agent_of_job = [str(path), str(job.elapsed_s), self.processes]
        watch = PauseWatch()

        def compute_remaining_s(beyond_s: float = 15.0) -> float:
            """Return the seconds until the time limit, plus `beyond_s` in which agents can end."""
            deadline_s = agent.compute_extended_deadline_s(job, watch)
            return math.inf if deadline_s is None else deadline_s + beyond_s - time.monotonic()

        try:
            code = run_module_on_nodes(
                job.n_nodes,
                cpus_per_node,
                "stratbench.train.agent",
                agent_of_job,
                compute_remaining_s,
            )
            late = compute_remaining_s(beyond_s=0) <= 0
        finally:
            watch.stop()
        ended = code != 0
        hung = ended and hang_reason(read_worker_states(job)) is not None
        exits = self.read_exits(job, missing_exit_code=1 if ended and not late else None)
        return agent.Exits(exits, reached_time_limit=late and ended, has_hung=hung and not late)

    def read_exits(self, job: Job, missing_exit_code: int | None) -> list[agent.ProcessExit]:
        """Read how the processes on all nodes ended, which srun does not report.

        Args:
            job: Job of the cell.
            missing_exit_code: Exit code for a process that left no information.
        """
        standings = read_worker_states(job)
        return [
            agent.ProcessExit(
                format_worker_name(r), _read_worker_exit_code(job, r, standings.get(r))
            )
            for r in range(job.world_size)
        ]

    def classify(self, job: Job, exits: agent.Exits, oom_kills_before: int | None) -> CellEnding:
        """Return how the cell ended. Subclasses may also store results of the processes.

        Args:
            job: Job of the cell.
            exits: How the cell's processes exited.
            oom_kills_before: Number of processes that the kernel had killed for lack of memory before the
                cell. None if unknown.
        """
        return classify_ending(job, exits, oom_kills_before)

    def workers(self, job: Job) -> list[dict[str, Any]]:
        """Return the results that workers have written at their end."""
        return list(job.folder.read_worker_results(job.world_size).values())

    def compute_totals(self, job: Job, workers: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the total time, samples and epochs of a cell whose training is complete.

        Args:
            job: Job of the cell.
            workers: Results of the workers.
        """
        s = job.settings
        return summarize_collective_run(workers, get_mesh(s.strategy, s.options, s.gpus))

    def communication(
        self, job: Job, workers: list[dict[str, Any]], run: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return the entry `communication` of the record, or None if no worker reports its traffic.

        Args:
            job: Job of the cell.
            workers: Results of the workers.
            run: Totals over all workers.
        """
        return efficiency.build_communication_entry(workers, run, self.is_gang)

    def build_server_entry(self, job: Job) -> dict[str, Any] | None:
        """Return the entry `server` of the record, or None without parameter servers."""
        return None

    def list_lost_workers(self, job: Job) -> list[dict[str, Any]]:
        """Return the number and the reason of each lost worker, after which the others continued."""
        return []

    def read_step_times_s(self, job: Job) -> list[list[float]]:
        """Return all step times in seconds, with one list per process that counts steps."""
        workers = job.folder.read_worker_results(job.world_size).values()
        return [[ms / 1e3 for ms in w["step_ms"]] for w in workers]

    def epochs(self, job: Job) -> list[dict[str, Any]]:
        """Return the results of each epoch that was evaluated before the cell ended."""
        return job.folder.read_epoch_results()

    def build_section_entry(self, job: Job, workers: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the record's entry of this runner's extension, whose key is `section`."""
        return {}

    def read_training_phases(self, job: Job, node: int) -> list[PhaseInterval]:
        """Return the time intervals in which the workers of a node trained."""
        return read_training_phases(job, job.list_ranks_on_node(node))

    def read_gpu_intervals(
        self, job: Job, workers: Sequence[Mapping[str, Any]]
    ) -> efficiency.Intervals | None:
        """Return the time intervals in which each GPU trained. None if those of any GPU are unknown."""
        return efficiency.read_gpu_training_intervals(job, workers)


def _read_worker_exit_code(job: Job, rank: int, state: WorkerState | None) -> int | None:
    """Return a worker's exit code: from the worker's result, or else from its agent's file."""
    result = job.folder.read_worker_result(rank)
    if result is None:
        return None if state is None else state.exit_code
    return int(result["status"] not in ("ok", "diverged"))


def create_runner(s: Settings) -> Runner:
    """Return the runner for a cell with these settings: an extension's, or the core's."""
    return next(
        (
            runner
            for _, runner in iter_imported_additions("runner_class")
            if runner.runs_cells_with(s)
        ),
        Runner,
    )()
