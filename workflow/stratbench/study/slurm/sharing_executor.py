"""Cells that share a SLURM job, as Snakemake's SLURM plugin submits them and follows them."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from snakemake.iocontainers import ResourceList
from snakemake.jobs import GroupJob
from snakemake_executor_plugin_slurm import Executor

from stratbench.cell import record
from stratbench.study.slurm import nodes
from stratbench.study.slurm.live_jobs import shared_list, tell
from stratbench.study.slurm.sharing import VARIABLE, divide, longest_job_min

#: How the job's Snakemake runs its cells: one at a time, and the next one whatever becomes of one.
ONE_BY_ONE = "--keep-going --resources gpu_slots=1"
#: Resources in which cells that share a job may differ: it asks for the sum of the times, the most memory.
MAY_DIFFER = {"runtime", "mem", "mem_mb", "mem_mib", "disk", "disk_mb", "disk_mib"}
MAY_DIFFER |= {"time_limit_s", "server_cpus"}


class SharedJob(GroupJob):
    """Cells that share a SLURM job, as the plugin's executor takes jobs."""

    def __init__(self, cells: Sequence[Any]) -> None:
        """`cells`: Snakemake's jobs."""
        super().__init__(cells[0].rule.name, tuple(cells), None)
        self.finalize()
        self.rule = cells[0].rule
        # The plugin makes the job's comment of it: `slurm.shared_list` finds the cells by that.
        self.wildcards = [cells[0].wildcards.study, "shared", secrets.token_hex(4)]
        self._before = {cell: (_state(cell.output.record), _state(cell.log[0])) for cell in cells}

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def resources(self) -> ResourceList:
        asked = [dict(cell.resources.items()) for cell in self.jobs]
        return ResourceList(
            fromdict={k: v for k, v in asked[0].items() if k not in MAY_DIFFER}
            | {
                "runtime": sum(a["runtime"] for a in asked),
                "mem_mb": max(a["mem_mb"] for a in asked),
            }
        )

    def has_finished(self, cell: Any) -> bool:
        """Whether the cell's record has been written since."""
        path = Path(cell.output.record)
        return _state(path) != self._before[cell][0] and record.is_of(
            path, cell.params.cell, cell.params.settings
        )

    def has_begun(self, cell: Any) -> bool:
        """Whether the cell's log has been written since."""
        return _state(cell.log[0]) != self._before[cell][1]


def _state(path: str | Path) -> tuple[int, int] | None:
    """What differs once a file has been written anew; None if there is none.

    Its folder is read first: a network file system may remember for a while that there was none.
    """
    try:
        os.listdir(Path(path).parent)
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


class SharingExecutor(Executor):
    """The plugin's executor where cells share jobs. `begin_sharing` makes one of it."""

    def run_jobs(self, jobs: Sequence[Any]) -> None:
        """Queue jobs, those of cells together. At most `jobs` of the profile are submitted at a time.

        A cell that is tried again has a job of its own: it may be what had ended the job of all.
        """
        alone = [job for job in jobs if not self._may_share(job)]
        together = sorted((job for job in jobs if self._may_share(job)), key=self._place)
        shares = divide(
            together,
            _kind,
            lambda job: job.resources["runtime"],
            self.cells_per_job,
            lambda job: longest_job_min(self.offered, job.resources.get("slurm_partition")),
        )
        with self.sharing:
            self.waiting += alone
            self.waiting += [SharedJob(cells) if len(cells) > 1 else cells[0] for cells in shares]
        self._go_on()

    def format_job_exec(self, job: Any) -> str:
        """The command of a job: for cells that share it, of one Snakemake in place of two.

        It takes the place of the job's shell, so that what ends the job ends it.
        """
        command = super().format_job_exec(job)
        if not isinstance(job, SharedJob):
            return command
        start = f"{self.get_python_executable()} -m snakemake "
        for old, new in (
            (start, f"exec env {VARIABLE}=1 {start}"),
            (self.additional_general_args(), ONE_BY_ONE),
        ):
            if command.count(old) != 1:
                raise RuntimeError(f"{old!r} is not once in {command!r}; set cells_per_job to 1")
            command = command.replace(old, new)
        return command

    def report_job_success(self, job_info: Any) -> None:
        for part in _parts(job_info):
            super().report_job_success(part)
        self._go_on(ended=1)

    def report_job_error(self, job_info: Any, msg: str | None = None, **kwargs: Any) -> None:
        """Report each cell by what it has left: a record, a log, or nothing where its turn never came."""
        shared, missed = job_info.job, []
        for part in _parts(job_info):
            if not isinstance(shared, SharedJob) or (
                shared.has_begun(part.job) and not shared.has_finished(part.job)
            ):
                super().report_job_error(part, msg=msg, **kwargs)
                kwargs.pop("aux_logs", None)  # the job's own log is shown once
            elif shared.has_finished(part.job):
                super().report_job_success(part)
            else:
                missed.append(part.job)
        if missed:
            tell(
                f"SLURM job {job_info.external_jobid} ended before the turn of {len(missed)} of its "
                f"{len(shared)} cells, the first {missed[0].output.record}: {msg}"
            )
        for cell in missed:
            self.workflow.scheduler.error_callback(cell)
        self._go_on(ended=1)

    def cancel(self) -> None:
        with self.sharing:
            self.waiting.clear()
        super().cancel()

    def _may_share(self, job: Any) -> bool:
        first = not job.is_group() and job.attempt == 1
        if not first or job.rule.name != self.rule:
            return False
        return job.resources.get("nodes") == 1 and not job.resources.get("worker_jobs")

    def _place(self, job: Any) -> tuple[Any, ...]:
        """The order: by priority, and what is compared close together."""
        w = job.wildcards
        compared = (w.experiment, w.model, int(w.gpus), w.strategy)
        return (-self.workflow.dag.priority(job), int(w.repeat), *compared)

    def _go_on(self, ended: int = 0) -> None:
        """Submit what waits, where fewer are underway than may be; nothing after a SIGTERM."""
        scheduler, start = self.workflow.scheduler, []
        with self.sharing:
            self.underway -= ended
            if scheduler._user_kill:
                given_up = {cell for job in self.waiting for cell in _cells(job)}
                self.waiting.clear()
                with scheduler._lock:
                    scheduler.running -= given_up
                scheduler._open_jobs.release()  # it looks again
            while self.waiting and self.underway < self.workflow.nodes:
                self.underway += 1
                start.append(self.waiting.popleft())
        for job in start:
            if isinstance(job, SharedJob):
                # For a Snakemake that comes after this one was killed.
                made = "".join(f"{cell.output.record}\n" for cell in job.jobs)
                shared_list(self.lists, job.wildcards[-1]).write_text(made, encoding="utf-8")
            self._submit_job(job)


def begin_sharing(workflow: Any, rule: str, cells_per_job: int, lists: Path) -> None:
    """Let the jobs of a rule, one a cell, share SLURM jobs from now on.

    `workflow` is Snakemake's, about to submit to SLURM. `lists`: the folder for which cells share a job.
    """
    lists.mkdir(parents=True, exist_ok=True)
    executor, scheduler = workflow.scheduler._executor, workflow.scheduler
    executor.rule, executor.cells_per_job, executor.lists = rule, cells_per_job, lists
    executor.offered = nodes.cluster_nodes()
    executor.sharing, executor.waiting, executor.underway = threading.Lock(), deque(), 0
    executor.__class__ = SharingExecutor
    # `jobs` counts SLURM jobs: the scheduler gives all cells, and the executor keeps to it.
    scheduler.resources["_nodes"] = sys.maxsize


def _kind(job: Any) -> Hashable:
    """What cells that share a job have in common: the repeat, and what they ask for."""
    asked = ((k, v) for k, v in job.resources.items() if k not in MAY_DIFFER)
    return job.wildcards.repeat, tuple(sorted(asked))


def _cells(job: Any) -> Sequence[Any]:
    return job.jobs if isinstance(job, SharedJob) else (job,)


def _parts(job_info: Any) -> list[Any]:
    """The same of each cell of a job."""
    return [replace(job_info, job=cell) for cell in _cells(job_info.job)]
