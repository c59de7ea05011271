"""Before Snakemake submits to SLURM: no cell that still runs there may be started a second time.

Snakemake does not know its SLURM jobs again after it was killed: it would submit them once more.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratbench.study.resume import restart

#: Between two status requests, each for all jobs, in seconds.
POLL_S = 15
#: The longest that Snakemake's SLURM plugin lets pass between two requests for its jobs' states, in
#: seconds. A job that has ended and is forgotten in between never ends for Snakemake.
LONGEST_POLL_S = 180


def comment_of(rule: str, wildcards: list[str]) -> str:
    """The comment that Snakemake's SLURM plugin gives to the job of a rule with these wildcards."""
    return f"rule_{rule}_wildcards_{'_'.join(wildcards).replace('/', '_')}"


def live_jobs(directory: Path) -> dict[str, str] | None:
    """The user's queued and running SLURM jobs started from `directory`: comment by job id.

    Empty on a machine without SLURM; None where SLURM does not answer.
    """
    if shutil.which("squeue") is None:
        return {}
    command = ["squeue", "--me", "--noheader", "--format=%i|%Z|%k"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return None
    rows = [line.split("|", 2) for line in done.stdout.splitlines() if line.count("|") >= 2]
    here = directory.resolve()
    return {job: comment for job, folder, comment in rows if Path(folder).resolve() == here}


def warn_of_forgetful_slurm() -> None:
    """Tell the user where SLURM forgets ended jobs before Snakemake is sure to have asked for them."""
    if shutil.which("scontrol") is None:
        return
    command = ["scontrol", "show", "config"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except subprocess.TimeoutExpired:
        return
    age = re.search(r"^MinJobAge\s*=\s*(\d+)", shown, re.MULTILINE)
    if age and int(age[1]) <= LONGEST_POLL_S:
        tell(
            f"this SLURM forgets ended jobs after {age[1]} s (MinJobAge), and Snakemake may ask for "
            f"them {LONGEST_POLL_S} s later. If it waits for a job that squeue does not show any "
            "more: kill -9 it, which leaves running jobs alone, then snakemake --unlock, and start "
            "it again"
        )


def hold_until_ended(workflow: Any, planned: Sequence[Any]) -> None:
    """Before the first submission: wait for those of the `planned` jobs that SLURM runs already.

    Afterwards Snakemake is started again in this process's place, since what they finished need not
    be planned. Does nothing, and returns, where no planned job is live. `workflow` and the jobs are
    Snakemake's.
    """
    cells = {comment_of(job.rule.name, list(job.wildcards)): str(job.output[0]) for job in planned}
    if wait_for_live(cells, Path.cwd()):
        restart(workflow)


def wait_for_live(cells: Mapping[str, str], directory: Path) -> bool:
    """Wait until none of `cells` (what they make, by job comment) is queued or runs.

    Returns whether there was one to wait for. A SLURM that does not answer is asked again while
    waiting; at first, the user is told.
    """
    waited = False
    while True:
        jobs = live_jobs(directory)
        if jobs is None and not waited:
            tell("squeue does not answer: whether cells of an earlier run still train is unknown")
            return False
        live = {job: cells[comment] for job, comment in (jobs or {}).items() if comment in cells}
        if not live and jobs is not None:
            return waited
        if not waited:
            tell(describe_live_jobs(live))
            waited = True
        time.sleep(POLL_S)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def describe_live_jobs(live: Mapping[str, str]) -> str:
    """What the user is told: which cells (by SLURM job id) run, and the three ways out."""
    listed = "\n".join(f"  SLURM job {job}: {cell}" for job, cell in live.items())
    return (
        f"{len(live)} cells still run, or wait in SLURM's queue, from an earlier snakemake:\n{listed}\n"
        "Starting them again would train them twice, so this run waits until they have ended, and "
        "then goes on with what is missing.\n"
        "Ctrl-C stops waiting and leaves them running; to start them afresh: "
        f"scancel {' '.join(live)}"
    )
