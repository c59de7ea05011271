"""Submissions that SLURM has rejected temporarily, which are retried with growing pauses.

There are two temporary reasons: SLURM does not answer, or a user's jobs reach a limit on their number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

#: How long submissions are tried again while SLURM does not answer, in seconds.
SILENCE_S = 600.0
#: The shortest and the longest pause between two tries, in seconds: it doubles.
SHORTEST_PAUSE_S, MAX_PAUSE_S = 5.0, 60.0
#: Messages of sbatch where the number of a user's jobs is limited.
_LIMITS = re.compile(
    r"(Assoc|QOS)(Max|Grp)\w*Submit\w*Limit|MaxJobCount|MaxArraySize"
    r"|job submit limit|Job(s)? (count|number) limit",
    re.IGNORECASE,
)
#: Messages of sbatch where SLURM did not answer, or could not.
_SILENCE = re.compile(
    r"timed? ?out|unable to (contact|connect|establish)|temporarily un|unexpected message received"
    r"|slurm_persist_conn|zero bytes|connection (refused|reset|failure)|communication \w* ?(failure|error)"
    r"|in standby|backup controller|transport endpoint|no route to host|try again|protocol authentication",
    re.IGNORECASE,
)
#: How the SLURM plugin reports a refused sbatch.
_REPORT = re.compile(
    r"SLURM sbatch failed\. The error message was '(.*?)'\.\n\s+sbatch call:", re.DOTALL
)

Kind = Literal["limit", "silence"]


def refusal_by_sbatch(message: str) -> str | None:
    """Return why sbatch rejected a job, from the SLURM plugin's report.

    Return None for other messages.
    """
    match = _REPORT.match(message)
    return reason_of(match[1]) if match else None


def reason_of(printed: str) -> str:
    """Return what sbatch printed of an error, as one line."""
    lines = [line.removeprefix("sbatch: ").strip() for line in printed.splitlines()]
    return "; ".join(line.removeprefix("error: ").rstrip(".") for line in lines if line)


def kind_of_refusal(reason: str) -> Kind | None:
    """Return the kind of a temporary rejection, or None for a permanent one."""
    if _LIMITS.search(reason):
        return "limit"
    return "silence" if _SILENCE.search(reason) else None


@dataclass
class Postponed:
    """Jobs that are to be submitted again, in the order in which they were refused. Times are monotonic.

    Attributes:
        jobs: Snakemake's.
        silent_since: Since when SLURM has not answered, in seconds.
        not_before: When the next one is tried.
        told: The kinds of refusals that the user has been told of; silence anew once SLURM has taken a job.
    """

    jobs: list[Any] = field(default_factory=list)
    silent_since: float | None = None
    not_before: float = 0.0
    told: set[Kind] = field(default_factory=set)
    _pause_s: float = SHORTEST_PAUSE_S

    def waits(self, now: float) -> bool:
        """Return whether no submission is tried now, because one was rejected shortly before."""
        return bool(self.jobs) and now < self.not_before

    def add(self, job: Any, kind: Kind, now: float) -> None:
        """Store a rejected job, and double the pause.

        Args:
            job: Snakemake's job.
            kind: Kind of the rejection.
            now: Monotonic time in seconds.
        """
        self.jobs.append(job)
        if kind == "limit":
            self.silent_since = None
        elif self.silent_since is None:
            self.silent_since = now
        if now >= self.not_before:
            self.not_before = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def is_over(self, now: float) -> bool:
        """Return whether SLURM has been silent for so long that the jobs are given up."""
        return self.silent_since is not None and now - self.silent_since >= SILENCE_S

    def hurry(self) -> None:
        """Try the next one at once: SLURM has taken a job."""
        self.not_before, self.silent_since, self._pause_s = 0.0, None, SHORTEST_PAUSE_S
        self.told.discard("silence")
