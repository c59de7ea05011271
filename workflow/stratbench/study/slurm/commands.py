"""SLURM's own commands, called from within a job, and what they say of jobs."""

from __future__ import annotations

import os
import subprocess

TIMEOUT_S = 120.0
#: States of a job whose processes may run.
RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}


def may_run(job: str) -> bool:
    """Whether processes of a job may run: not where SLURM says that it has ended, or waits."""
    done = ask_slurm(["squeue", "--noheader", f"--jobs={job}", "--format=%T"])
    if done is None or done.returncode != 0:
        return done is None or "Invalid job id" not in done.stderr  # one that it has forgotten
    return bool(RUNNING & set(done.stdout.split()))


def ask_slurm(
    command: list[str], text: str | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run one of SLURM's commands; None where it does not answer, exit code 127 where it is not there.

    What SLURM told this process of its own job would be taken for options.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SRUN_"))}
    conf = os.environ.get("SLURM_CONF") or os.environ.get("STRATBENCH_SLURM_CONF")
    env = kept | ({"SLURM_CONF": conf} if conf else {})
    stdin = {"input": text} if text is not None else {"stdin": subprocess.DEVNULL}
    try:
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, **stdin
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: {error.strerror}")
