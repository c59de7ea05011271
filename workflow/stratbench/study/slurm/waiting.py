"""Reports why jobs wait in SLURM's queue, and the progress of the run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from stratbench.cell.text.help_page import format_help_address
from stratbench.cell.text.words import format_count
from stratbench.study.slurm.job_states import QUEUED, JobState

#: Seconds that a job must have waited for one reason before the user is told.
PATIENCE_S = 120.0
#: SLURM's reasons of an ordinary wait: for the job's turn, for a requested date, or for another job.
ORDINARY = frozenset({"Priority", "Resources", "None", "Dependency", "BeginTime", ""})
#: Meaning of SLURM's reasons by pattern, with a remedy where only a person can end the wait. The first match
#: counts.
MEANINGS = {
    r"PartitionConfig|PartitionNodeLimit|PartitionTimeLimit|BadConstraints": (
        "no node of the partition has the requested resources, or the partition's limits forbid them: change "
        "`cluster` or the experiment's time_limit_s in config.yaml, or the profile's partition and constraint"
    ),
    r"InvalidAccount|AccountNotAllowed|InvalidQOS|QOSNotAllowed": (
        "change slurm_account, qos or slurm_partition in the profile"
    ),
    r"PartitionDown|PartitionInactive": "the partition takes no jobs: name another in the profile",
    r"JobHeld\w*|launch failed requeued held": "it is held: release it by scontrol release JOB, or cancel it",
    r"(QOS|Assoc)\w*(PerJob|PerNode|MaxWall|TimeLimit|ResourceLimit)\w*|QOSMin\w*|MaxMemPerLimit": (
        "your QOS or association allows a job fewer resources or less time: change `cluster` or the "
        "experiment's time_limit_s in config.yaml, or qos and slurm_account in the profile"
    ),
    r"(QOS|Assoc|Max)\w+": (
        "your QOS or association allows no more at a time; it starts when other jobs under this limit end"
    ),
    r"Nodes required for job are DOWN.*": (
        "the nodes that could run it are down, drained or reserved: `sinfo --list-reasons` says why; "
        "name another partition in the profile, or wait for the nodes"
    ),
    r"ReqNodeNotAvail.*[Rr]eserved for maint.*": (
        "its nodes are reserved for maintenance; it starts after the maintenance"
    ),
    r"ReqNodeNotAvail.*": (
        "a node that it requests is not available: `sinfo --list-reasons` says why; remove --nodelist from "
        "slurm_extra in the profile, or wait for the node"
    ),
    r"Reservation": "its reservation has not begun: `scontrol show reservation` says when it does",
    r"ReservationDeleted": "its reservation was deleted: remove it from slurm_extra in the profile",
    r"Licenses": "it waits for a licence that other jobs use",
    r"Cleaning|Prolog": "SLURM is still preparing its nodes",
}


@dataclass
class WaitingJobs:
    """The reasons for which jobs wait in the queue, and since when.

    Attributes:
        first_output_by_job_id: First output file of each job, by SLURM's job id.
    """

    first_output_by_job_id: dict[str, str] = field(default_factory=dict)
    _waiting_since_s_by_job_and_reason: dict[tuple[str, str], float] = field(default_factory=dict)
    _reported_reasons: set[str] = field(default_factory=set)

    def iter_wait_explanations(self, states: Mapping[str, JobState], now: float) -> Iterator[str]:
        """Yield a sentence on each reason for which a job has waited PATIENCE_S.

        Each reason is reported once.

        Args:
            states: State of each live job, by SLURM's id.
            now: Monotonic time in seconds.
        """
        waiting = {
            (job, state.reason): state
            for job, state in states.items()
            if state.state in QUEUED and state.reason not in ORDINARY
        }
        for key in self._waiting_since_s_by_job_and_reason.keys() - waiting.keys():
            del self._waiting_since_s_by_job_and_reason[key]
        by_reason: dict[str, list[str]] = {}
        for job, reason in waiting:
            if (
                now - self._waiting_since_s_by_job_and_reason.setdefault((job, reason), now)
                >= PATIENCE_S
            ):
                by_reason.setdefault(reason, []).append(job)
        for reason, jobs in by_reason.items():
            if reason not in self._reported_reasons:
                self._reported_reasons.add(reason)
                yield self._describe_wait(reason, jobs, waiting[jobs[0], reason].start_time)

    def _describe_wait(self, reason: str, job_ids: list[str], start_time: str) -> str:
        first = job_ids[0]
        what = f"SLURM job {first} ({self.first_output_by_job_id.get(first, 'of this run')})"
        if others := len(job_ids) - 1:
            what += f" and {format_count(others, 'other')}"
        meaning = next((m for p, m in MEANINGS.items() if re.fullmatch(p, reason)), None)
        text = f"{what} {'wait' if len(job_ids) > 1 else 'waits'} for the reason {reason}"
        text += f": {meaning.replace('JOB', first)}" if meaning else ""
        text += f"; SLURM expects it to start at {start_time}" if "T" in start_time else ""
        return f"{text}; `scancel {first}` cancels it {format_help_address('for the reason')}"


def describe_progress(
    num_planned: int,
    num_succeeded: int,
    num_failed: int,
    num_to_submit: int,
    states: Mapping[str, JobState],
) -> str:
    """Return a line on the progress of the run's jobs.

    Args:
        num_planned: Number of jobs that the run has on SLURM.
        num_succeeded: Number of jobs that have succeeded.
        num_failed: Number of jobs that have failed, some of which may be tried again.
        num_to_submit: Number of jobs that SLURM has not accepted yet.
        states: States of the jobs that wait or run.
    """
    reasons = Counter(
        s.reason if s.reason not in ("None", "") else "no reason given"
        for s in states.values()
        if s.state in QUEUED
    )
    waiting = reasons.total()
    running = len(states) - waiting
    text = f"{num_succeeded} of {format_count(num_planned, 'job')} done, {running} running"
    named = ", ".join(f"{n} {reason}" for reason, n in reasons.most_common())
    text += f", {waiting} queued ({named})" if waiting else ""
    text += f", {num_to_submit} to be submitted" if num_to_submit else ""
    return text + (f", {num_failed} failed" if num_failed else "")
