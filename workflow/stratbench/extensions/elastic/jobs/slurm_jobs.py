"""Submits, polls and cancels the worker jobs of an elastic cell in SLURM."""

from __future__ import annotations

import re
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime

from stratbench.cell.run_folder import RunFolder, format_worker_name
from stratbench.extensions.elastic.jobs.keeper import JobStatus, SubmissionRefused, WorkerJobBackend
from stratbench.extensions.elastic.jobs.worker_job import WorkerJob
from stratbench.extensions.elastic.run_files import RunFiles
from stratbench.study.slurm import submission
from stratbench.study.slurm.commands import TIMEOUT_S, read_command_output, run_slurm_command
from stratbench.study.slurm.job_states import QUEUED

#: Seconds before its job's time limit at which a worker gets SIGUSR1.
WARNING_S = 60
#: Format of squeue's output: job id, state, reason, start and end.
_FORMAT = "%i|%T|%r|%S|%e"
#: SLURM's states of a job whose processes may run.
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
#: SLURM's final states of a job that are no failure of its worker.
_HARMLESS_ENDS = {"COMPLETED", "CANCELLED", "PREEMPTED", "TIMEOUT", "NODE_FAIL", "REVOKED"}

#: Advice to the user if sbatch rejects a worker job.
_REMEDY = (
    "if this node may not submit jobs, set slurm_partition in the profile to a partition whose nodes may, "
    "and cluster.worker_partition to the partition of the workers"
)


class SlurmJobs(WorkerJobBackend):
    """Scheduler that runs the worker jobs of an elastic cell as SLURM jobs.

    A job's script has only paths and numbers, because `scontrol` shows it to other users. The worker runs in
    a job step, so that signals of SLURM reach it directly. It gets SIGUSR1 before its time limit.
    """

    def __init__(self, worker_job: WorkerJob, folder: RunFolder, cell: str) -> None:
        """Prepare to submit worker jobs. SLURM shows the cell's path `cell` as their comment."""
        self._worker_job, self._folder, self._cell = worker_job, folder, cell
        #: Workers whose job may exist, because sbatch did not answer.
        self._is_unacknowledged: set[int] = set()

    def submit_worker_job(self, worker_number: int, slot: int) -> str:
        if worker_number in self._is_unacknowledged and (
            taken := self._find_accepted_job(worker_number)
        ):
            return taken
        output = str(self._folder.get_log_path(format_worker_name(worker_number))).replace(
            "%", "%%"
        )
        command = [
            "sbatch",
            "--parsable",
            "--no-requeue",
            "--job-name=stratbench-worker",
            f"--comment={self._make_job_comment(worker_number)}",
            f"--output={output}",
            "--open-mode=append",
            f"--signal=USR1@{WARNING_S}",
            *self._worker_job.sbatch_arguments,
        ]
        done = run_slurm_command(command, self.make_job_script(worker_number))
        if done is None:
            self._is_unacknowledged.add(worker_number)
            raise SubmissionRefused(f"sbatch did not answer within {TIMEOUT_S:g} s", "silence")
        if done.returncode != 0:
            reason = submission.join_error_lines(done.stderr)
            kind = submission.classify_refusal(reason)
            if kind == "silence":
                self._is_unacknowledged.add(worker_number)
            remedy = "" if kind else f"; {_REMEDY}"
            raise SubmissionRefused(f"sbatch: {reason} (on {socket.gethostname()}){remedy}", kind)
        lines = [line.strip() for line in done.stdout.splitlines()]
        # On some clusters sbatch prints other lines before the job's number.
        numbers = [line for line in lines if re.fullmatch(r"\d+(;.+)?", line)]
        if not numbers:
            printed = " ".join(done.stdout.split())[:200]
            raise SubmissionRefused(f"sbatch printed {printed!r} instead of a job number")
        return numbers[-1].partition(";")[0]

    def _make_job_comment(self, worker: int) -> str:
        return f"worker {worker} of {self._cell}"

    def _find_accepted_job(self, worker: int) -> str | None:
        """Return the id of a worker's job if SLURM has accepted it, else None.

        SLURM may accept a job although sbatch does not answer.
        """
        shown = read_command_output(
            ["squeue", "--me", "--noheader", "--states=all", "--format=%i|%k"]
        )
        if shown is None:
            raise SubmissionRefused("squeue does not answer", "silence")
        rows = [line.split("|", 1) for line in shown.splitlines() if "|" in line]
        return next(
            (id_ for id_, comment in rows if comment == self._make_job_comment(worker)), None
        )

    def make_job_script(self, worker: int) -> str:
        """Return the job script of a worker. The script exits at once if the training is over."""
        job = self._folder.job_path
        command = [sys.executable, "-m", "stratbench.extensions.elastic.worker", job, str(worker)]
        step = [
            "srun",
            "--ntasks=1",
            f"--cpus-per-task={self._worker_job.cpus}",
            "--quiet",
            *command,
        ]
        over = shlex.join(["test", "-e", str(RunFiles(self._folder).end_marker_path)])
        return f"#!/bin/sh\n{over} && exit 0\nexec {shlex.join(map(str, step))}\n"

    def poll_worker_jobs(self, job_ids: Iterable[str]) -> Mapping[str, JobStatus] | None:
        wanted = set(job_ids)
        done = run_slurm_command(
            ["squeue", "--me", "--noheader", "--states=all", f"--format={_FORMAT}"]
        )
        if done is None or done.returncode != 0:
            return None
        rows = [line.split("|") for line in done.stdout.splitlines()]
        return {
            row[0]: _parse_job_status(*row[1:])
            for row in rows
            if len(row) == 5 and row[0] in wanted
        }

    def cancel_worker_jobs(self, job_ids: Iterable[str]) -> None:
        if ids := list(job_ids):
            run_slurm_command(["scancel", "--quiet", *ids])


def _parse_job_status(state: str, reason: str, start: str, end: str) -> JobStatus:
    state = state.partition(" ")[0]  # without the user in "CANCELLED by 1000"
    if state in QUEUED:
        return JobStatus("queued", reason)
    if state in _RUNNING:
        return JobStatus("running", started_unix_s=_parse_squeue_time(start))
    text = state if reason in ("None", "") else f"{state} ({reason})"
    return JobStatus(
        "ended",
        text,
        state not in _HARMLESS_ENDS,
        _parse_squeue_time(start),
        _parse_squeue_time(end),
    )


def _parse_squeue_time(text: str) -> float | None:
    """Return a time that squeue printed, in seconds since 1970. None if it is unknown."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # squeue prints N/A or Unknown for an unknown time
        return None
