"""Finds SLURM jobs of an earlier Snakemake, and waits for them before the first submission.

Snakemake does not remember its SLURM jobs after it was killed, and would submit them again.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratbench.study.slurm.commands import read_command_output
from stratbench.study.snakemake_internals import restart_snakemake

#: Seconds between two requests for the states of all jobs.
POLL_S = 15


def make_job_comment(rule: str, wildcards: list[str]) -> str:
    """Return the SLURM comment that Snakemake's plugin gives the job of a rule with wildcards."""
    return f"rule_{rule}_wildcards_{'_'.join(wildcards).replace('/', '_')}"


def find_live_job_comments_by_id(directory: Path) -> dict[str, str] | None:
    """Return the comments of a directory's queued and running jobs, by job id.

    Only jobs of the user count. The mapping is empty on a machine without SLURM. The result is None if SLURM
    does not answer.
    """
    if shutil.which("squeue") is None:
        return {}
    shown = read_command_output(["squeue", "--me", "--noheader", "--format=%i|%Z|%k"])
    if shown is None:
        return None
    rows = [line.split("|", 2) for line in shown.splitlines() if line.count("|") >= 2]
    here = directory.resolve()
    return {job: comment for job, folder, comment in rows if Path(folder).resolve() == here}


def wait_for_earlier_jobs(workflow: Any, planned: Sequence[Any]) -> None:
    """Wait for planned jobs that already are live on SLURM, then restart Snakemake.

    A live job is queued or running. The restarted Snakemake does not plan jobs that have ended meanwhile. The
    function returns at once if no planned job is live. `workflow` and the jobs are Snakemake's.
    """
    cells = {
        make_job_comment(job.rule.name, list(job.wildcards)): str(job.output[0]) for job in planned
    }
    if wait_for_live_jobs_of_outputs(cells, Path.cwd()):
        restart_snakemake(workflow)


def wait_for_live_jobs_of_outputs(output_by_comment: Mapping[str, str], directory: Path) -> bool:
    """Wait until no earlier job with one of these comments is queued or running.

    If SLURM does not answer at first, the user gets a message. During the wait SLURM is asked again.

    Args:
        output_by_comment: Output file of each job, by the job's comment.
        directory: Working directory of the jobs.

    Returns:
        Whether there was such a job to wait for.
    """
    waited = False
    while True:
        jobs = find_live_job_comments_by_id(directory)
        if jobs is None and not waited:
            print_to_stderr("squeue does not answer, so cells of an earlier run may still train")
            return False
        live = {
            job: output_by_comment[comment]
            for job, comment in (jobs or {}).items()
            if comment in output_by_comment
        }
        if not live and jobs is not None:
            return waited
        if not waited:
            print_to_stderr(describe_live_jobs(live))
            waited = True
        time.sleep(POLL_S)


def print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def describe_live_jobs(output_by_job_id: Mapping[str, str]) -> str:
    """Return a message on the live jobs of an earlier run.

    The message also says which actions the user can take.

    Args:
        output_by_job_id: Output file of each live job, by SLURM's job id.
    """
    listed = "\n".join(f"  SLURM job {job}: {cell}" for job, cell in output_by_job_id.items())
    return (
        f"{len(output_by_job_id)} cells of an earlier snakemake still run or wait in SLURM's queue:\n"
        f"{listed}\n"
        "To submit these cells again would train them twice. This run waits until they have ended, and "
        "then trains the missing cells.\n"
        "Ctrl-C ends this run and leaves them running. To cancel them and train them again: "
        f"scancel {' '.join(output_by_job_id)}"
    )
