"""Runs a cell with checkpoints: each attempt resumes from the checkpoints of the previous attempt."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.extensions.checkpoints import attempts
from stratbench.train.agent import Exits
from stratbench.train.ending import CellEnding
from stratbench.train.job import Job
from stratbench.train.running.runner import Runner


class RestartRunner(Runner):
    """Runner of cells with checkpoints. The record of a cell includes the times of earlier attempts."""

    section = "restarts"
    _ended_unix_s: float | None = None

    @classmethod
    def runs_cells_with(cls, s: Settings) -> bool:
        return "checkpoints" in s.more

    def prepare(self, folder: RunFolder, cell: Cell, s: Settings, data_dir: Path) -> None:
        self._ended_unix_s = attempts.find_last_write_unix_s(folder)
        super().prepare(folder, cell, s, data_dir)

    def run(self, job: Job, args: argparse.Namespace) -> tuple[Job, Exits, CellEnding]:
        # Segments (the short trainings of a verdict's block) write no checkpoints.
        if job.is_in_block:
            return super().run(job, args)
        job = attempts.make_next_attempt_job(job, self._ended_unix_s)
        # Unlike `super().run`, this does not train the cell again if its processes were paused.
        return job, *self.launch_processes(job, args.cpus_per_node)

    def build_section_entry(self, job: Job, workers: list[dict[str, Any]]) -> dict[str, Any]:
        return attempts.make_restarts_entry(job, workers)
