"""Reports why jobs wait in SLURM's queue, and the progress of the run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from stratbench.cell.text.help_page import help_address
from stratbench.cell.text.words import counted
from stratbench.study.slurm.job_states import QUEUED, JobState

#: How long a job must have waited for one reason before the user is told of it, in seconds.
PATIENCE_S = 120.0
#: The queue's own reasons: the job waits for its turn, for a date that was asked for, or for another job.
ORDINARY = frozenset({"Priority", "Resources", "None", "Dependency", "BeginTime", ""})
#: The meaning of SLURM's reasons, and the remedy where only a person can end the wait. The first counts.
MEANINGS = {
    r"PartitionConfig|PartitionNodeLimit|PartitionTimeLimit|BadConstraints": (
        "no node of the partition has what it asks for, or its limits forbid it: change `cluster` or the "
        "experiment's time_limit_s in config.yaml, or partition and constraint in the profile"
    ),
    r"InvalidAccount|AccountNotAllowed|InvalidQOS|QOSNotAllowed": (
        "change slurm_account, qos or slurm_partition in the profile"
    ),
    r"PartitionDown|PartitionInactive": "the partition takes no jobs: name another in the profile",
    r"JobHeld\w*|launch failed requeued held": "it is held: scontrol release JOB, or cancel it",
    r"(QOS|Assoc)\w*(PerJob|PerNode|MaxWall|TimeLimit|ResourceLimit)\w*|QOSMin\w*|MaxMemPerLimit": (
        "your QOS or association allows one job less: change `cluster` or the experiment's time_limit_s "
        "in config.yaml, or qos and slurm_account in the profile"
    ),
    r"(QOS|Assoc|Max)\w+": (
        "your QOS or association allows no more at a time; it starts as other jobs under that limit end"
    ),
    r"Nodes required for job are DOWN.*": (
        "the nodes that could run it are down, drained or kept for others: `sinfo --list-reasons` says why; "
        "name another partition in the profile, or wait for the nodes"
    ),
    r"ReqNodeNotAvail.*[Rr]eserved for maint.*": (
        "its nodes are reserved for maintenance; it starts after that"
    ),
    r"ReqNodeNotAvail.*": (
        "a node that it names is not available: `sinfo --list-reasons` says why; remove --nodelist from "
        "slurm_extra in the profile, or wait for the node"
    ),
    r"Reservation": "its reservation has not begun: `scontrol show reservation` says when it does",
    r"ReservationDeleted": "its reservation is gone: remove it from slurm_extra in the profile",
    r"Licenses": "it waits for a licence that others use",
    r"Cleaning|Prolog": "SLURM still prepares its nodes",
}


@dataclass
class Waiting:
    """The reasons for which jobs wait, and since when.

    Attributes:
        cells: The file that a job makes, by job id.
    """

    cells: dict[str, str] = field(default_factory=dict)
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def sentences(self, states: Mapping[str, JobState], now: float) -> Iterator[str]:
        """Yield a sentence, once, on each reason for which a job has waited PATIENCE_S.

        `now` in seconds.
        """
        waiting = {
            (job, state.reason): state
            for job, state in states.items()
            if state.word in QUEUED and state.reason not in ORDINARY
        }
        for key in self._since.keys() - waiting.keys():
            del self._since[key]
        by_reason: dict[str, list[str]] = {}
        for job, reason in waiting:
            if now - self._since.setdefault((job, reason), now) >= PATIENCE_S:
                by_reason.setdefault(reason, []).append(job)
        for reason, jobs in by_reason.items():
            if reason not in self._told:
                self._told.add(reason)
                yield self._sentence(reason, jobs, waiting[jobs[0], reason].start)

    def _sentence(self, reason: str, jobs: list[str], start: str) -> str:
        first = jobs[0]
        what = f"SLURM job {first} ({self.cells.get(first, 'of this run')})"
        if others := len(jobs) - 1:
            what += f" and {counted(others, 'other')}"
        meaning = next((m for p, m in MEANINGS.items() if re.fullmatch(p, reason)), None)
        text = f"{what} {'wait' if len(jobs) > 1 else 'waits'} for the reason {reason}"
        text += f": {meaning.replace('JOB', first)}" if meaning else ""
        text += f"; SLURM expects it to start at {start}" if "T" in start else ""
        return f"{text}; `scancel {first}` gives it up {help_address('for the reason')}"


def describe_progress(
    planned: int, done: int, failed: int, to_submit: int, states: Mapping[str, JobState]
) -> str:
    """Return a line on the progress of the run.

    Args:
        planned: The number of the run's jobs on SLURM.
        done: How many have succeeded.
        failed: How many have failed for good or are tried again.
        to_submit: How many SLURM has not accepted yet.
        states: Those of the jobs that wait or run.
    """
    reasons = Counter(
        s.reason if s.reason not in ("None", "") else "no reason given"
        for s in states.values()
        if s.word in QUEUED
    )
    waiting = reasons.total()
    text = f"{done} of {counted(planned, 'job')} done, {len(states) - waiting} running"
    named = ", ".join(f"{n} {reason}" for reason, n in reasons.most_common())
    text += f", {waiting} queued ({named})" if waiting else ""
    text += f", {to_submit} to be submitted" if to_submit else ""
    return text + (f", {failed} failed" if failed else "")
