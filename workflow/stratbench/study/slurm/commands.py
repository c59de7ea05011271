"""Runs SLURM's commands, such as squeue, and returns what they print."""

from __future__ import annotations

import os
import subprocess

TIMEOUT_S = 120.0
#: Exit code if a command does not exist, as in shells.
NOT_THERE = 127
#: Prefixes of environment variables that change what SLURM's commands show.
_FILTERS = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_")


def run_slurm_command(
    command: list[str], stdin_text: str | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run one of SLURM's commands, without SLURM's own environment variables.

    Variables that SLURM has set for a job would act as options of the command. A user's variables for squeue,
    sinfo and sacct would hide jobs. Others, such as SLURM_CLUSTERS, are kept.

    Args:
        command: The command and its arguments.
        stdin_text: Standard input of the command, if any.

    Returns:
        The result, with the exit code NOT_THERE if the command is missing, or None if SLURM does not answer.
    """
    unwanted = _FILTERS + (("SLURM_", "SRUN_") if "SLURM_JOB_ID" in os.environ else ())
    environment = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    conf = os.environ.get("SLURM_CONF") or os.environ.get("STRATBENCH_SLURM_CONF")
    env = environment | ({"SLURM_CONF": conf} if conf else {})
    stdin = {"input": stdin_text} if stdin_text is not None else {"stdin": subprocess.DEVNULL}
    try:
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, **stdin
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        return subprocess.CompletedProcess(
            command, NOT_THERE, "", f"{command[0]}: {error.strerror}"
        )


def read_command_output(command: list[str]) -> str | None:
    """Run one of SLURM's commands, and return its output. None if it fails or does not answer."""
    done = run_slurm_command(command)
    return done.stdout if done is not None and done.returncode == 0 else None
