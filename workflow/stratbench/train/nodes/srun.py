"""Starts a program on each node of the SLURM job that this process runs in."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime

from stratbench.study.slurm.commands import run_slurm_command

#: Maximum seconds that `srun` may take to end after a signal.
SRUN_END_S = 30.0


def read_slurm_job_facts() -> dict[str, str]:
    """Return SLURM's data on the job of this process. Empty without a job.

    The data do not come from environment variables, most of which Snakemake's plugin removes.
    """
    if (number := os.environ.get("SLURM_JOB_ID")) is None:
        return {}
    done = run_slurm_command(["scontrol", "--oneliner", "show", "job", number])
    shown = done.stdout if done else ""
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def read_slurm_job_size() -> tuple[int, int]:
    """Return this SLURM job's number of nodes and cores per node. (1, 1) outside of SLURM."""
    facts = read_slurm_job_facts()
    nodes, cpus = (int(facts.get(key, "1").partition("-")[0]) for key in ("NumNodes", "NumCPUs"))
    return nodes, max(1, cpus // nodes)


def compute_queue_wait_s() -> float | None:
    """Return the seconds that this SLURM job waited since submission or its earliest start.

    The result is None outside of SLURM, or if SLURM does not answer.
    """
    facts = read_slurm_job_facts()
    try:
        submitted, eligible, started = (
            datetime.fromisoformat(facts[key])
            for key in ("SubmitTime", "EligibleTime", "StartTime")
        )
    except (KeyError, ValueError):
        return None
    return max(0.0, (started - max(submitted, eligible)).total_seconds())


def run_module_on_nodes(
    nodes: int,
    cpus: int,
    module: str,
    arguments: Sequence[str],
    left_s: Callable[[], float],
) -> int:
    """Run a module on several nodes with srun. Return srun's exit code, 0 if all succeeded.

    All are ended when the time is over, and when this process is asked to end.

    Args:
        nodes: Number of nodes.
        cpus: Cores that the module may use on each node. By default srun would give 1, whatever the job has.
        module: Module to run.
        arguments: Command-line arguments of the module.
        left_s: Returns the remaining time in seconds.
    """
    command = [
        "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}", "--kill-on-bad-exit=1", "--wait=0",
        sys.executable, "-m", module, *arguments,
    ]  # fmt: skip
    # Snakemake's SLURM plugin removes SLURM_CONF, of which the Snakefile has kept a copy.
    conf = os.environ.get("STRATBENCH_SLURM_CONF")
    env = os.environ | ({"SLURM_CONF": conf} if conf else {})
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
    try:
        while process.poll() is None and (wait_s := left_s()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=None if math.isinf(wait_s) else wait_s)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=SRUN_END_S)
            except subprocess.TimeoutExpired:
                process.kill()  # SLURM ends the remaining processes with the job
                process.wait()
    return process.returncode
