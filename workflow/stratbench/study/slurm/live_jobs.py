"""Jobs that Snakemake does not know of before it submits to SLURM.

A Snakemake that was killed does not remember its SLURM jobs: it would submit them again.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratbench.study.slurm.commands import printed_by
from stratbench.study.snakemake_internals import restart

#: The time between two status requests, each for all jobs, in seconds.
POLL_S = 15


def comment_of(rule: str, wildcards: list[str]) -> str:
    """Return the comment that Snakemake's SLURM plugin sets on a job of a rule and wildcards."""
    return f"rule_{rule}_wildcards_{'_'.join(wildcards).replace('/', '_')}"


def live_jobs(directory: Path) -> dict[str, str] | None:
    """Return the comments of the user's queued and running SLURM jobs of `directory`, by job id.

    Empty on a machine without SLURM; None if SLURM does not answer.
    """
    if shutil.which("squeue") is None:
        return {}
    shown = printed_by(["squeue", "--me", "--noheader", "--format=%i|%Z|%k"])
    if shown is None:
        return None
    rows = [line.split("|", 2) for line in shown.splitlines() if line.count("|") >= 2]
    here = directory.resolve()
    return {job: comment for job, folder, comment in rows if Path(folder).resolve() == here}


def hold_until_ended(workflow: Any, planned: Sequence[Any]) -> None:
    """Wait, before the first submission, for those `planned` jobs that are queued or running on SLURM.

    Then restart Snakemake in this process, since their results need not be planned. Return at once if no
    planned job is live. `workflow` and the jobs are Snakemake's.
    """
    cells = {comment_of(job.rule.name, list(job.wildcards)): str(job.output[0]) for job in planned}
    if wait_for_live(cells, Path.cwd()):
        restart(workflow)


def wait_for_live(cells: Mapping[str, str], directory: Path) -> bool:
    """Wait until none of `cells` is queued or running.

    If SLURM does not answer at first, the user gets a message; while waiting, SLURM is asked again.

    Args:
        cells: The file that a job makes, by its comment.
        directory: Working directory of the jobs.

    Returns:
        Whether it had to wait.
    """
    waited = False
    while True:
        jobs = live_jobs(directory)
        if jobs is None and not waited:
            tell("squeue does not answer: whether cells of an earlier run still train is unknown")
            return False
        live = {job: cells[name] for job, name in (jobs or {}).items() if name in cells}
        if not live and jobs is not None:
            return waited
        if not waited:
            tell(describe_live_jobs(live))
            waited = True
        time.sleep(POLL_S)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def describe_live_jobs(live: Mapping[str, str]) -> str:
    """Describe to the user which cells (by SLURM job id) run, and the three ways out."""
    listed = "\n".join(f"  SLURM job {job}: {cell}" for job, cell in live.items())
    return (
        f"{len(live)} cells still run, or wait in SLURM's queue, from an earlier snakemake:\n{listed}\n"
        "Starting them again would train them twice, so this run waits until they have ended, and "
        "then goes on with what is missing.\n"
        "Ctrl-C stops waiting and leaves them running; to start them afresh: "
        f"scancel {' '.join(live)}"
    )
