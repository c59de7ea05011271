"""Runs a cell that a user's command trains, once per node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stratbench.cell.settings import Settings
from stratbench.extensions.commands import results
from stratbench.extensions.commands.files import get_command_file_stem, read_exit_statuses
from stratbench.strategies import get_strategy_class
from stratbench.telemetry.timeline import PhaseInterval
from stratbench.train import agent, efficiency
from stratbench.train.ending import (
    KILLED_FOR_MEMORY,
    CellEnding,
    has_oom_kill_since,
    make_time_limit_ending,
)
from stratbench.train.job import Job
from stratbench.train.nodes.paused import read_training_phases
from stratbench.train.out_of_memory import find_out_of_memory_line
from stratbench.train.running.runner import Runner


class CommandRunner(Runner):
    """Runner of cells that a user's command trains.

    The command is started once per node, and its results are stored as those of one worker.
    """

    section = "program"
    processes = "stratbench.extensions.commands.process:make_command_process"

    @classmethod
    def runs_cells_with(cls, s: Settings) -> bool:
        return get_strategy_class(s.strategy).kind == "own"

    def read_exits(self, job: Job, missing_exit_code: int | None) -> list[agent.ProcessExit]:
        ends = {e["node"]: e["exit_code"] for e in read_exit_statuses(job.folder, job.n_nodes)}
        return [
            agent.ProcessExit(get_command_file_stem(n), ends.get(n, missing_exit_code))
            for n in range(job.n_nodes)
        ]

    def classify(self, job: Job, exits: agent.Exits, oom_kills_before: int | None) -> CellEnding:
        """Store the command's report, and return how the cell ended.

        The cell ended out of memory if the command's log says so, or if the kernel killed one of its
        processes.

        Args:
            job: Job of the cell.
            exits: Exits of the cell's processes, with reasons.
            oom_kills_before: Number of the kernel's kills for memory before the cell, or None if unknown.
        """
        results.store_results(job)
        worker = job.folder.read_worker_result(0) or {}
        if worker.get("status") == "diverged":
            return CellEnding("diverged", worker["reason"])
        failed = [p for p in exits.processes if p.exit_code not in (0, None)]
        if failed:
            if has_oom_kill_since(oom_kills_before):
                return KILLED_FOR_MEMORY
            line = find_out_of_memory_line(results.read_last_log_lines(job))
            if line is None:
                return CellEnding("error", results.describe_command_failure(job, exits.processes))
            if job.folder.read_foreign_processes():
                reason = (
                    "ran out of memory while other processes used its GPUs: free these, and train it "
                    "again"
                )
                return CellEnding("error", f"the command {reason}; {line.strip()}")
            return CellEnding("oom", line.strip())
        if exits.reached_time_limit:
            return make_time_limit_ending(job, results.find_hang_reason(job))
        if worker.get("status") != "ok":
            return CellEnding("error", worker.get("reason", "the command left no result"))
        return CellEnding("ok", None)

    def build_section_entry(self, job: Job, workers: list[dict[str, Any]]) -> dict[str, Any]:
        return results.make_program_entry(job)

    def read_training_phases(self, job: Job, node: int) -> list[PhaseInterval]:
        return read_training_phases(job, range(1))

    def read_gpu_intervals(
        self, job: Job, workers: Sequence[Mapping[str, Any]]
    ) -> efficiency.Intervals | None:
        """Return the training intervals that the command reported, for each GPU of the cell."""
        places = [p for p in job.folder.read_process_locations().values() if "gpu" in p]
        if any(p["gpu"].get("index") is None for p in places):
            return None
        spans = [(i.start_s, i.end_s) for i in read_training_phases(job, range(1))]
        return {(p["host"], str(p["gpu"]["index"])): spans for p in places}
