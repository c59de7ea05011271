"""Runs a cell with checkpoints: as a gang, in attempts, each of which resumes from the one before."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.extensions.checkpoints import attempts
from stratbench.train.agent import Exits
from stratbench.train.ending import Ending
from stratbench.train.job import Job
from stratbench.train.running.runner import Runner


class RestartRunner(Runner):
    """Runs a cell whose measurements before a restart count."""

    section = "restarts"
    _ended_unix_s: float | None = None

    @classmethod
    def takes(cls, s: Settings) -> bool:
        return "checkpoints" in s.more

    def prepare(self, folder: RunFolder, cell: Cell, s: Settings, data_dir: Path) -> None:
        self._ended_unix_s = attempts.last_sign(folder)
        super().prepare(folder, cell, s, data_dir)

    def run(self, job: Job, args: argparse.Namespace) -> tuple[Job, Exits, Ending]:
        if job.in_block:  # short enough to begin anew
            return super().run(job, args)
        job = attempts.begin(job, self._ended_unix_s)
        # After pauses it is not trained again: the record says what they were.
        return job, *self.launch(job, args.cpus_per_node)

    def entry(self, job: Job, workers: list[dict[str, Any]]) -> dict[str, Any]:
        return attempts.entry_of(job, workers)
