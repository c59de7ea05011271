"""Starts programs on the nodes of this SLURM job, and reads its facts."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime

from stratbench.study.slurm.commands import run_slurm_command

#: Longest time in seconds that `srun` may take to end after SIGTERM, before it is killed.
SRUN_END_S = 30.0


def read_slurm_job_facts() -> dict[str, str]:
    """Return what SLURM knows about this process's job, by field name; empty outside of SLURM.

    `scontrol` reports the data. Environment variables do not suffice: Snakemake's plugin removes most of
    them.
    """
    if (number := os.environ.get("SLURM_JOB_ID")) is None:
        return {}
    done = run_slurm_command(["scontrol", "--oneliner", "show", "job", number])
    shown = done.stdout if done else ""
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def read_slurm_node_and_core_counts() -> tuple[int, int]:
    """Return this SLURM job's number of nodes, and of cores per node. (1, 1) outside of SLURM."""
    facts = read_slurm_job_facts()
    nodes, cpus = (int(facts.get(key, "1").partition("-")[0]) for key in ("NumNodes", "NumCPUs"))
    return nodes, max(1, cpus // nodes)


def compute_queue_wait_s() -> float | None:
    """Return how many seconds this SLURM job has waited in the queue.

    The wait begins with the submission, or later if the job may only start later (SLURM's EligibleTime). The
    result is None outside of SLURM, or if SLURM does not answer.
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
    node_count: int,
    cpus_per_node: int,
    module: str,
    arguments: Sequence[str],
    compute_remaining_s: Callable[[], float],
) -> int:
    """Run a Python module on several nodes by srun. Return srun's exit code.

    The exit code is 0 if all processes succeeded. All are ended when the time is over, and when this process
    is asked to end.

    Args:
        node_count: Number of nodes.
        cpus_per_node: Cores that the module may use on each node. By default srun would allow only one.
        module: Module to run.
        arguments: Command-line arguments of the module.
        compute_remaining_s: Function that returns the remaining time in seconds.
    """
    command = [
        "srun", f"--nodes={node_count}", f"--ntasks={node_count}", "--ntasks-per-node=1",
        f"--cpus-per-task={cpus_per_node}", "--kill-on-bad-exit=1", "--wait=0",
        sys.executable, "-m", module, *arguments,
    ]  # fmt: skip
    # STRATBENCH_SLURM_CONF is the Snakefile's copy of SLURM_CONF, which Snakemake's SLURM plugin removes.
    conf = os.environ.get("STRATBENCH_SLURM_CONF")
    env = os.environ | ({"SLURM_CONF": conf} if conf else {})
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
    try:
        while process.poll() is None and (wait_s := compute_remaining_s()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=None if math.isinf(wait_s) else wait_s)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=SRUN_END_S)
            except subprocess.TimeoutExpired:
                process.kill()  # this kills only srun; SLURM ends its processes on the nodes with the job
                process.wait()
    return process.returncode
