"""The state of a run's jobs on SLURM: postponed, submitted, waiting, failed and succeeded ones."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stratbench.cell.text.help_page import format_help_address
from stratbench.study.slurm import submission
from stratbench.study.slurm.live_jobs import print_to_stderr
from stratbench.study.slurm.waiting import WaitingJobs

#: Reason of a job's failure, and the remedy, by the job's state in SLURM.
ENDS = {
    "CANCELLED": "it was cancelled",
    "DEADLINE": "its deadline passed",
    "NODE_FAIL": "its node failed; it runs again on another node if `retries` in the profile allows this",
    "OUT_OF_MEMORY": "it used more memory than it asked for: raise cluster.mem_mib_per_gpu or "
    f"cluster.mem_mib_per_cpu_worker {format_help_address('it used more memory than it asked for')}",
    "PREEMPTED": "SLURM gave its node to another job; it runs again if `retries` in the profile allows this "
    f"{format_help_address('SLURM gave its node to another job')}",
    "TIMEOUT": "SLURM's time limit came before the cell's own; if its log does not say where it hung, raise "
    "cluster.startup_allowance_s "
    f"{format_help_address('time limit came before')}",
}


@dataclass
class FollowedRun:
    """The state of the jobs of one Snakemake run on SLURM.

    Attributes:
        request_text_by_output: Each job's request to SLURM in words, by the job's first output file.
        max_time_s_by_output: Longest time in seconds that the plan expects of a job, by the job's first
            output file.
        num_planned_jobs: Number of jobs that the run submits to SLURM.
        postponed_jobs: Jobs to submit again.
        waiting_jobs: Reasons for which jobs wait in the queue.
        lock: Guards all fields: the plugin submits in a thread of its own.
        run_is_ending: Set once Snakemake cancels its jobs, after which no job is submitted.
        submitted_job_ids: SLURM's ids of all jobs that were submitted.
        old_output_signatures: Signatures of a job's output files before its submission, by Snakemake's job.
        omitted_since_s_by_job_id: Monotonic time in seconds since which SLURM's answers omit a job, by
            SLURM's id.
        reported_refusal_reasons: Reasons of refusals that were reported to the user.
        num_succeeded_jobs: Number of jobs that have succeeded.
        failed_jobs: Snakemake's jobs that have failed.
        slurm_silent_since_s: Monotonic time in seconds since which SLURM has not answered, or None.
        has_reported_silence: Whether a message to the user says that SLURM does not answer.
        last_message_at_s: Monotonic time in seconds of the last message to the user.
    """

    request_text_by_output: Mapping[str, str] = field(default_factory=dict)
    max_time_s_by_output: Mapping[str, float] = field(default_factory=dict)
    num_planned_jobs: int = 0
    postponed_jobs: submission.Postponed = field(default_factory=submission.Postponed)
    waiting_jobs: WaitingJobs = field(default_factory=WaitingJobs)
    lock: threading.RLock = field(default_factory=threading.RLock)
    run_is_ending: threading.Event = field(default_factory=threading.Event)
    submitted_job_ids: set[str] = field(default_factory=set)
    old_output_signatures: dict[Any, dict[str, FileSignature | None]] = field(default_factory=dict)
    omitted_since_s_by_job_id: dict[str, float] = field(default_factory=dict)
    reported_refusal_reasons: set[str] = field(default_factory=set)
    num_succeeded_jobs: int = 0
    failed_jobs: set[Any] = field(default_factory=set)
    slurm_silent_since_s: float | None = None
    has_reported_silence: bool = False
    last_message_at_s: float = field(default_factory=time.monotonic)

    def print_message(self, text: str) -> None:
        self.last_message_at_s = time.monotonic()
        print_to_stderr(text)


def get_first_output(job: Any) -> str:
    """Return the path of the first output file of a job, or an empty text."""
    return str(next(iter(job.output), ""))


#: Modification time in nanoseconds, inode and size of a file. They differ if the file was replaced.
FileSignature = tuple[int, int, int]


def read_file_signatures(paths: Iterable[Any]) -> dict[str, FileSignature | None]:
    """Return the signature of each file by its path, or None for a missing file."""
    signatures: dict[str, FileSignature | None] = {}
    for path in map(str, paths):
        try:
            # Listing the folder updates a network file system's cache, in which the file may be missing.
            os.listdir(Path(path).parent)
            s = Path(path).stat()
            signatures[path] = s.st_mtime_ns, s.st_ino, s.st_size
        except OSError:
            signatures[path] = None
    return signatures
