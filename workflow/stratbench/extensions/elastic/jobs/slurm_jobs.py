"""Worker jobs of an elastic cell in SLURM: submission, polling and cancelling."""

from __future__ import annotations

import re
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime

from stratbench.cell.run_folder import RunFolder, worker_name
from stratbench.extensions.elastic.jobs.keeper import Backend, Seen, SubmissionRefused
from stratbench.extensions.elastic.jobs.worker_job import WorkerJob
from stratbench.study.slurm import submission
from stratbench.study.slurm.commands import TIMEOUT_S, ask_slurm, printed_by
from stratbench.study.slurm.job_states import QUEUED

#: How long before the end of a job's time its worker is told, in seconds.
WARNING_S = 60
#: A job's id, state, reason, start and end, as squeue writes them.
_FORMAT = "%i|%T|%r|%S|%e"
#: States of a job whose processes may run.
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
#: Ends that say nothing against the worker.
_TAKEN_BACK = {"COMPLETED", "CANCELLED", "PREEMPTED", "TIMEOUT", "NODE_FAIL", "REVOKED"}

#: What helps where sbatch refuses the cell's own job.
_REMEDY = (
    "where this node may not submit jobs, give the cell's own job a partition whose nodes may, by "
    "slurm_partition in the profile; workers may have another partition, cluster.worker_partition"
)


class SlurmJobs(Backend):
    """SLURM as a `keeper.Backend`.

    A job's script holds paths and numbers alone: `scontrol` shows it to others. The worker is a step, so that
    SLURM's signals reach it at once; before its time ends it gets SIGUSR1.
    """

    def __init__(self, worker_job: WorkerJob, folder: RunFolder, cell: str) -> None:
        """`cell`: its path among the results, which `squeue` shows."""
        self._asked, self._folder, self._cell = worker_job, folder, cell
        #: Workers of which sbatch has not said whether it took their job.
        self._unanswered: set[int] = set()

    def submit(self, number: int, slot: int) -> str:
        if number in self._unanswered and (taken := self._taken(number)):
            return taken
        output = str(self._folder.log(worker_name(number))).replace("%", "%%")
        command = [
            "sbatch",
            "--parsable",
            "--no-requeue",
            "--job-name=stratbench-worker",
            f"--comment={self._comment(number)}",
            f"--output={output}",
            "--open-mode=append",
            f"--signal=USR1@{WARNING_S}",
            *self._asked.arguments,
        ]
        done = ask_slurm(command, self.script(number))
        if done is None:
            self._unanswered.add(number)
            raise SubmissionRefused(f"sbatch did not answer in {TIMEOUT_S:g} s", "silence")
        if done.returncode != 0:
            reason = submission.reason_of(done.stderr)
            kind = submission.kind_of_refusal(reason)
            if kind == "silence":
                self._unanswered.add(number)
            remedy = "" if kind else f"; {_REMEDY}"
            raise SubmissionRefused(f"sbatch: {reason} (on {socket.gethostname()}){remedy}", kind)
        lines = [line.strip() for line in done.stdout.splitlines()]
        numbers = [line for line in lines if re.fullmatch(r"\d+(;.+)?", line)]  # a site's may greet
        if not numbers:
            printed = " ".join(done.stdout.split())[:200]
            raise SubmissionRefused(f"sbatch printed {printed!r} and no job's number")
        return numbers[-1].partition(";")[0]

    def _comment(self, number: int) -> str:
        return f"worker {number} of {self._cell}"

    def _taken(self, number: int) -> str | None:
        """Return the job of a worker whose sbatch did not answer, if SLURM has accepted it."""
        shown = printed_by(["squeue", "--me", "--noheader", "--states=all", "--format=%i|%k"])
        if shown is None:
            raise SubmissionRefused("squeue does not answer", "silence")
        rows = [line.split("|", 1) for line in shown.splitlines() if "|" in line]
        return next((id_ for id_, comment in rows if comment == self._comment(number)), None)

    def script(self, number: int) -> str:
        """Return the script of worker `number`, which does nothing after the end."""
        job = self._folder.job
        worker = [sys.executable, "-m", "stratbench.extensions.elastic.worker", job, str(number)]
        step = ["srun", "--ntasks=1", f"--cpus-per-task={self._asked.cpus}", "--quiet", *worker]
        over = shlex.join(["test", "-e", str(self._folder.ended)])
        return f"#!/bin/sh\n{over} && exit 0\nexec {shlex.join(map(str, step))}\n"

    def look(self, ids: Iterable[str]) -> Mapping[str, Seen] | None:
        wanted = set(ids)
        done = ask_slurm(["squeue", "--me", "--noheader", "--states=all", f"--format={_FORMAT}"])
        if done is None or done.returncode != 0:
            return None
        rows = [line.split("|") for line in done.stdout.splitlines()]
        return {row[0]: _seen(*row[1:]) for row in rows if len(row) == 5 and row[0] in wanted}

    def cancel(self, ids: Iterable[str]) -> None:
        if ids := list(ids):
            ask_slurm(["scancel", "--quiet", *ids])


def _seen(state: str, reason: str, start: str, end: str) -> Seen:
    state = state.partition(" ")[0]  # CANCELLED by 1000
    if state in QUEUED:
        return Seen("queued", reason)
    if state in _RUNNING:
        return Seen("running", started_unix_s=_date(start))
    text = state if reason in ("None", "") else f"{state} ({reason})"
    return Seen("ended", text, state not in _TAKEN_BACK, _date(start), _date(end))


def _date(text: str) -> float | None:
    """Return squeue's date, in this machine's time zone, as seconds since 1970."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # N/A, Unknown
        return None
