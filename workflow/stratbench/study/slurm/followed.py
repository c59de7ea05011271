"""State of a run's jobs on SLURM: those to submit, those running, and the number ended."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stratbench.cell.text.help_page import help_address
from stratbench.study.slurm import submission
from stratbench.study.slurm.live_jobs import tell
from stratbench.study.slurm.waiting import Waiting

#: The meaning of each state of a failed job, and the remedy.
ENDS = {
    "CANCELLED": "it was cancelled",
    "DEADLINE": "its deadline passed",
    "NODE_FAIL": "node failure; it is tried again elsewhere if `retries` in the profile allows",
    "OUT_OF_MEMORY": "it used more memory than it asked for: raise cluster.mem_mib_per_gpu or "
    f"cluster.mem_mib_per_cpu_worker {help_address('it used more memory than it asked for')}",
    "PREEMPTED": "SLURM gave its node to another job; it is tried again if `retries` in the profile allows "
    f"{help_address('SLURM gave its node to another job')}",
    "TIMEOUT": "SLURM's time limit came before the cell's own; if its log does not say where it hung, raise "
    "cluster.startup_allowance_s "
    f"{help_address('time limit came before')}",
}


@dataclass
class FollowedJob:
    """State of the run's jobs.

    Attributes:
        asks: What each job asks SLURM for, in words, by the first file that it makes.
        longest_s: The plan's upper estimate of its time, by the same; only where there is one.
        planned: How many jobs the run has on SLURM.
    """

    asks: Mapping[str, str] = field(default_factory=dict)
    longest_s: Mapping[str, float] = field(default_factory=dict)
    planned: int = 0
    postponed: submission.Postponed = field(default_factory=submission.Postponed)
    waiting: Waiting = field(default_factory=Waiting)
    lock: threading.RLock = field(default_factory=threading.RLock)
    #: Set once Snakemake cancels its jobs: none is submitted any more.
    ends: threading.Event = field(default_factory=threading.Event)
    #: The ids of all jobs that were submitted, and by Snakemake's job the files as they were before.
    submitted: set[str] = field(default_factory=set)
    before: dict[Any, Any] = field(default_factory=dict)
    #: Since when SLURM's answers have omitted a job.
    omitted: dict[str, float] = field(default_factory=dict)
    refusals: set[str] = field(default_factory=set)
    done: int = 0
    failed: set[Any] = field(default_factory=set)
    silent_since: float | None = None
    silence_told: bool = False
    told_at: float = field(default_factory=time.monotonic)

    def tell(self, text: str) -> None:
        self.told_at = time.monotonic()
        tell(text)


def first_output(job: Any) -> str:
    """Return the first file that a job makes."""
    return str(next(iter(job.output), ""))


def signatures_of(paths: Iterable[Any]) -> dict[str, tuple[int, int, int] | None]:
    """Return a signature of each file by path, which differs if it was replaced.

    None if missing.
    """
    signatures: dict[str, tuple[int, int, int] | None] = {}
    for path in map(str, paths):
        try:
            os.listdir(Path(path).parent)  # a network file system may remember that there was none
            s = Path(path).stat()
            signatures[path] = s.st_mtime_ns, s.st_ino, s.st_size
        except OSError:
            signatures[path] = None
    return signatures
