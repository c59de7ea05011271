"""Retries submissions that SLURM has rejected for a temporary reason, with growing pauses.

There are two such reasons: SLURM does not answer, or a user has reached a limit on the number of jobs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

#: Time in seconds without an answer of SLURM after which submissions are no longer retried.
SILENCE_S = 600.0
#: Shortest and longest pause between two attempts to submit, in seconds. The pause doubles after each
#: attempt.
SHORTEST_PAUSE_S, MAX_PAUSE_S = 5.0, 60.0
#: Messages of sbatch when a user has reached a limit on the number of jobs.
_LIMITS = re.compile(
    r"(Assoc|QOS)(Max|Grp)\w*Submit\w*Limit|MaxJobCount|MaxArraySize"
    r"|job submit limit|Job(s)? (count|number) limit",
    re.IGNORECASE,
)
#: Messages of sbatch when SLURM does not answer.
_SILENCE = re.compile(
    r"timed? ?out|unable to (contact|connect|establish)|temporarily un|unexpected message received"
    r"|slurm_persist_conn|zero bytes|connection (refused|reset|failure)|communication \w* ?(failure|error)"
    r"|in standby|backup controller|transport endpoint|no route to host|try again|protocol authentication",
    re.IGNORECASE,
)
#: Message of Snakemake's SLURM plugin when sbatch has refused a job.
_REPORT = re.compile(
    r"SLURM sbatch failed\. The error message was '(.*?)'\.\n\s+sbatch call:", re.DOTALL
)

Kind = Literal["limit", "silence"]


def parse_sbatch_refusal(message: str) -> str | None:
    """Return sbatch's reason from the SLURM plugin's report of a rejected job, else None."""
    match = _REPORT.match(message)
    return join_error_lines(match[1]) if match else None


def join_error_lines(sbatch_output: str) -> str:
    """Return the error lines that sbatch has printed, joined into one line."""
    lines = [line.removeprefix("sbatch: ").strip() for line in sbatch_output.splitlines()]
    return "; ".join(line.removeprefix("error: ").rstrip(".") for line in lines if line)


def classify_refusal(reason: str) -> Kind | None:
    """Return the kind of a temporary reason for which sbatch rejected a job.

    The result is None for a permanent reason.
    """
    if _LIMITS.search(reason):
        return "limit"
    return "silence" if _SILENCE.search(reason) else None


@dataclass
class Postponed:
    """Jobs that are to be submitted again, in the order in which SLURM has rejected them.

    Attributes:
        jobs: Snakemake's jobs.
        slurm_silent_since_s: Monotonic time in seconds since which SLURM has not answered, or None.
        next_submission_at_s: Monotonic time in seconds of the next submission.
        reported_refusal_kinds: Kinds of refusals that were reported to the user. `silence` is removed once
            SLURM accepts a job.
    """

    jobs: list[Any] = field(default_factory=list)
    slurm_silent_since_s: float | None = None
    next_submission_at_s: float = 0.0
    reported_refusal_kinds: set[Kind] = field(default_factory=set)
    _pause_s: float = SHORTEST_PAUSE_S

    def is_submission_paused(self, now_s: float) -> bool:
        """Return whether no job may be submitted now, because SLURM has just rejected one."""
        return bool(self.jobs) and now_s < self.next_submission_at_s

    def add_refused_job(self, job: Any, kind: Kind, now_s: float) -> None:
        """Store a rejected job, and double the pause before the next submission.

        Args:
            job: Snakemake's job.
            kind: Kind of the rejection.
            now_s: Monotonic time in seconds.
        """
        self.jobs.append(job)
        if kind == "limit":
            self.slurm_silent_since_s = None
        elif self.slurm_silent_since_s is None:
            self.slurm_silent_since_s = now_s
        if now_s >= self.next_submission_at_s:
            self.next_submission_at_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def has_waited_too_long(self, now_s: float) -> bool:
        """Return whether SLURM has not answered for so long that the postponed jobs fail."""
        return (
            self.slurm_silent_since_s is not None and now_s - self.slurm_silent_since_s >= SILENCE_S
        )

    def end_pause(self) -> None:
        """Allow the next submission at once, because SLURM has just accepted a job."""
        self.next_submission_at_s, self.slurm_silent_since_s, self._pause_s = (
            0.0,
            None,
            SHORTEST_PAUSE_S,
        )
        self.reported_refusal_kinds.discard("silence")
