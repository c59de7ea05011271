"""Reads the states of a run's jobs from squeue and sacct."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stratbench.study.slurm.commands import read_command_output

#: SLURM's states of a job that has ended without success.
FAILED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
    | {"REVOKED", "TIMEOUT"}
)
COMPLETED = "COMPLETED"
#: SLURM's states of a job that has not begun.
QUEUED = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    }
)
#: squeue's format: job id, state, nodes, reason, comment and (expected) start. A comment may contain `|`, so
#: the start, which never does, is last.
_FORMAT = "%i|%T|%N|%r|%k|%S"


@dataclass(frozen=True)
class JobState:
    """The state of a job as squeue shows it: state, nodes, reason and start.

    Attributes:
        state: SLURM's name of the state, such as `RUNNING`.
        node_names: SLURM's list of the job's nodes; empty while the job waits.
        reason: SLURM's word for the reason why the job waits.
        comment: Comment that the job was submitted with.
        start_time: Time at which the job began or is expected to begin, as SLURM writes it; `N/A` if unknown.
    """

    state: str
    node_names: str = ""
    reason: str = ""
    comment: str = ""
    start_time: str = "N/A"


def read_job_states(run_name: str, clusters: Iterable[str] = ()) -> dict[str, JobState] | None:
    """Return the states of a run's jobs by SLURM's id. The result is None if SLURM does not answer.

    Args:
        run_name: SLURM's name of all jobs of the run.
        clusters: SLURM clusters to ask; none for the default cluster.
    """
    names = ",".join(sorted(set(clusters)))
    shown = read_command_output(
        [
            *("squeue", "--noheader", "--array", "--states=all", f"--name={run_name}"),
            *([f"--clusters={names}"] if names else []),
            f"--format={_FORMAT}",
        ]
    )
    if shown is None:
        return None
    states = {}
    for line in shown.splitlines():
        if line.count("|") >= 5:
            job, word, nodes, reason, rest = line.split("|", 4)
            comment, _, start = rest.rpartition("|")
            states[job.strip()] = JobState(word.partition(" ")[0], nodes, reason, comment, start)
    return states


def read_accounted_state(job_id: str) -> str | None:
    """Return sacct's state of a job that squeue no longer shows, or None without accounting."""
    shown = read_command_output(
        ["sacct", "--allocations", "--noheader", f"--jobs={job_id}", "--format=State%30"]
    )
    words = (shown or "").split()
    return words[0] if words else None


def has_user_live_jobs() -> bool | None:
    """Return whether the user has any queued or running job. The result is None if SLURM does not answer."""
    shown = read_command_output(["squeue", "--me", "--noheader", "--format=%i"])
    return None if shown is None else bool(shown.strip())
