"""Jobs that Snakemake does not know of, before it submits to SLURM and when it ends.

A Snakemake that was killed does not remember its SLURM jobs: it would submit them again. One that Ctrl-C
interrupts while it asks SLURM for its jobs' states cancels none of them.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratbench.study.resume import restart
from stratbench.study.slurm.commands import ask_slurm, printed_by

#: The time between two status requests, each for all jobs, in seconds.
POLL_S = 15
#: The longest time between two requests of Snakemake's SLURM plugin for the states of its jobs, in
#: seconds. A job that ends and is forgotten in between never ends for Snakemake.
LONGEST_POLL_S = 180
#: How often the wait between two requests looks whether Snakemake ends, in seconds.
_WAKE_S = 0.5


def comment_of(rule: str, wildcards: list[str]) -> str:
    """The comment that Snakemake's SLURM plugin gives to the job of a rule with these wildcards."""
    return f"rule_{rule}_wildcards_{'_'.join(wildcards).replace('/', '_')}"


def live_jobs(directory: Path) -> dict[str, str] | None:
    """The user's queued and running SLURM jobs that were started from `directory`: comment by job id.

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


def warn_of_forgetful_slurm() -> None:
    """Warns the user if SLURM forgets ended jobs before Snakemake is sure to have asked for them."""
    shown = printed_by(["scontrol", "show", "config"])
    age = re.search(r"^MinJobAge\s*=\s*(\d+)", shown or "", re.MULTILINE)
    if age and int(age[1]) <= LONGEST_POLL_S:
        tell(
            f"this SLURM forgets ended jobs after {age[1]} s (MinJobAge), and Snakemake may ask for "
            f"them {LONGEST_POLL_S} s later. If it waits for a job that squeue does not show any "
            "more: kill -9 it, which leaves running jobs alone, then snakemake --unlock, and start "
            "it again"
        )


def hold_until_ended(workflow: Any, planned: Sequence[Any]) -> None:
    """Wait, before the first submission, for those of the `planned` jobs that SLURM already queues or runs.

    Then start Snakemake again in this process's place, since what they finished need not be planned.
    Return at once if no planned job is live. `workflow` and the jobs are Snakemake's.
    """
    cells = {comment_of(job.rule.name, list(job.wildcards)): str(job.output[0]) for job in planned}
    if wait_for_live(cells, Path.cwd()):
        restart(workflow)


def wait_for_live(cells: Mapping[str, str], directory: Path) -> bool:
    """Wait until none of `cells` (the file that a job makes, by its comment) is queued or runs.

    If SLURM does not answer at first, the user is told; while waiting, SLURM is asked again.

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


def wake_to_end() -> None:
    """From now on have an executor that waits between two requests for its jobs' states wake when it ends.

    It would first sleep to the end, for up to LONGEST_POLL_S. To be called before there is an executor,
    since it begins to wait as soon as it is there.
    """
    from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

    async def sleep(executor: Any) -> None:
        until = time.monotonic() + executor.next_seconds_between_status_checks
        while executor.wait and time.monotonic() < until:
            await asyncio.sleep(_WAKE_S)

    RemoteExecutor.sleep = sleep


def cancel_all(workflow: Any) -> None:
    """From now on have Ctrl-C cancel all SLURM jobs of this run.

    Snakemake knows none of its jobs while it asks for their states, and not yet the one that it is just
    submitting: all have the run's id as their name. `workflow` is Snakemake's.
    """
    executor = workflow.scheduler._executor
    cancel_known, run = executor.cancel_jobs, executor.run_uuid

    def cancel_jobs(known: list[Any]) -> None:
        try:
            cancel_known(known)
        finally:
            shown = printed_by(["squeue", "--me", "--noheader", f"--name={run}", "--format=%i %T"])
            jobs = [line.split() for line in (shown or "").splitlines()]
            if left := [job for job, state in jobs if state != "COMPLETING"]:
                ask_slurm(["scancel", "--quiet", *left])
                tell(
                    f"SLURM jobs that Snakemake had lost from view are cancelled: {' '.join(left)}"
                )

    executor.cancel_jobs = cancel_jobs


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
