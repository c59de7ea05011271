"""States of a run's jobs, as squeue and sacct give them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stratbench.study.slurm.commands import printed_by

#: States of a job that has ended, and did not complete.
FAILED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
    | {"REVOKED", "TIMEOUT"}
)
COMPLETED = "COMPLETED"
#: States of a job that has not begun.
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
#: Job id, state, nodes, reason, comment, and last, since it may be empty, the (expected) start.
_FORMAT = "%i|%T|%N|%r|%k|%S"


@dataclass(frozen=True)
class JobState:
    """A job as squeue shows it.

    Attributes:
        word: SLURM's word for the state, such as `RUNNING`.
        nodes: SLURM's list of the job's nodes; empty while it waits.
        reason: Why it waits, in SLURM's word.
        comment: The comment that it was submitted with.
        start: When it began or is expected to begin, as SLURM writes it; `N/A` where unknown.
    """

    word: str
    nodes: str = ""
    reason: str = ""
    comment: str = ""
    start: str = "N/A"


def states_of_run(run: str, clusters: Iterable[str] = ()) -> dict[str, JobState] | None:
    """Return the states of all jobs with the name `run`, ended ones too, by id.

    Return None if SLURM does not answer.
    """
    names = ",".join(sorted(set(clusters)))
    shown = printed_by(
        [
            *("squeue", "--noheader", "--array", "--states=all", f"--name={run}"),
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


def accounted_state(job: str) -> str | None:
    """Return the state of a job that left squeue, or None without accounting."""
    shown = printed_by(
        ["sacct", "--allocations", "--noheader", f"--jobs={job}", "--format=State%30"]
    )
    words = (shown or "").split()
    return words[0] if words else None


def has_live_jobs() -> bool | None:
    """Return whether the user has any job queued or running.

    Return None where SLURM does not answer.
    """
    shown = printed_by(["squeue", "--me", "--noheader", "--format=%i"])
    return None if shown is None else bool(shown.strip())
