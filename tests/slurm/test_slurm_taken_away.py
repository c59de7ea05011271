"""Elastic cells on a SLURM cluster whose workers are taken away in all ways that there are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SlurmCluster
from cluster_workflow import CELLS_ONLY
from elastic_cells import ENDLESS, Elastic, two_cells

from launching import until

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def spare(slurm: SlurmCluster) -> Iterator[str]:
    """A partition of node2 whose jobs all others preempt, with seconds of grace; node2 takes none yet."""
    slurm.run("scontrol", "create", "PartitionName=spare", "Nodes=node2", "State=UP",
              "MaxTime=INFINITE", "PriorityTier=0", "PreemptMode=CANCEL", "GraceTime=15")  # fmt: skip
    slurm.run("scontrol", "update", "nodename=node2", "state=drain", "reason=later")
    yield "spare"
    slurm.cancel_all()
    slurm.run("scontrol", "delete", "PartitionName=spare")


def noticed(cell: Elastic, how: str, numbers: set[int], since: float) -> str:
    """Wait until workers have been noted as gone; in words how long it took."""
    until(lambda: numbers <= cell.gone(how).keys())
    after_s = max(max(cell.gone(how)[n] for n in numbers) - since, 0.0) or time.time() - since
    return f"{cell.experiment}: {sorted(numbers)} {how} after {after_s:.2f} s"


def test_workers_are_taken_away_in_all_ways_and_training_goes_on(
    slurm: SlurmCluster, spare: str, tmp_path: Path, warm: dict[str, str]
) -> None:
    """Asked to end, killed, preempted, warned of their time's end, on a node that falls silent.

    At last one cell's own job is cancelled, and Snakemake is stopped by Ctrl-C; both leave no worker job
    behind.
    """
    workflow, *cells = two_cells(tmp_path / "w", slurm, ENDLESS, worker_partition=spare)
    workflow.share_import(warm)
    split, served = cells
    run = workflow.start(*CELLS_ONLY, "--retries", "0")
    try:
        for cell in cells:
            cell.launcher()  # on node1
        slurm.run("scontrol", "update", "nodename=node2", "state=resume")
        here = {cell: cell.wait_for_new(set()) for cell in cells}

        since = time.time()
        for cell in cells:
            slurm.run("scancel", "--signal=TERM", cell.job_of(min(here[cell])))
        for cell in cells:
            print("SIGTERM:", noticed(cell, "left", {min(here[cell])}, since))
        since = time.time()
        for cell in cells:
            cell.process_of(max(here[cell])).send_signal(signal.SIGKILL)
        for cell in cells:
            print("SIGKILL:", noticed(cell, "lost", {max(here[cell])}, since))
        (lost,) = served.events("loss")
        assert len(lost["tickets"]) <= 1  # none while it evaluates
        here = {cell: cell.wait_for_new(here[cell]) for cell in cells}

        assert split.run.job_secret_path.stat().st_mode & 0o777 == 0o600
        shown = slurm.run("scontrol", "show", "job", split.job_of(min(here[split])))
        assert split.run.job_secret_path.read_text() not in shown

        # Who is preempted leaves, and is submitted anew; the others stay.
        each = slurm.run("squeue", "-h", "-j", split.job_of(min(here[split])), "-o", "%m")
        of_two = slurm.memory_mib - 2 * int(each.removesuffix("M"))
        wide = ["--parsable", "--nodelist=node2", f"--mem={of_two}M", "--output=/dev/null"]
        since = time.time()
        other = slurm.run("sbatch", *wide, "--wrap=sleep 9999")
        until(lambda: slurm.run("squeue", "-h", "-j", other, "-o", "%T") == "RUNNING")
        taken = {cell: here[cell] & cell.gone("left").keys() for cell in cells}
        names = {cell.experiment: taken[cell] for cell in cells}
        print(f"preempted by job {other}: {names}, {time.time() - since:.2f} s")
        assert any(taken.values())
        assert sum(map(len, taken.values())) < 4
        until(lambda: all(len(c.jobs("PENDING", "RUNNING")) == 2 for c in cells))
        assert any(cell.jobs("PENDING") for cell in cells)
        # Who has stayed is told that its time ends.
        stayed = {cell: here[cell] - taken[cell] for cell in cells if here[cell] - taken[cell]}
        since = time.time()
        for cell, numbers in stayed.items():
            job = cell.job_of(min(numbers))
            slurm.run("scontrol", "update", f"JobId={job}", "EndTime=now+50")
        for cell, numbers in stayed.items():
            print("USR1:", noticed(cell, "left", {min(numbers)}, since))
            log = cell.run.get_log_path(f"rank{min(numbers)}").read_text()
            assert "SIGUSR1: this worker leaves" in log
        slurm.run("scancel", other)
        here = {cell: cell.wait_for_new(here[cell]) for cell in cells}

        # All are gone: nothing of the node answers, and no connection closes. Its jobs are submitted anew.
        slurm.freeze_node("node2")
        since = time.time()
        for cell in cells:
            print("frozen:", noticed(cell, "lost", here[cell], since))
        until(lambda: slurm.node_states()["node2"].startswith("down"))
        until(lambda: all(len(cell.jobs("PENDING")) == 2 for cell in cells))
        slurm.lose_node("node2")

        slurm.run("scancel", served.coordinator())
        until(lambda: not served.jobs("RUNNING", "PENDING"))
        own = split.coordinator()
        os.killpg(run.pid, signal.SIGINT)
        until(lambda: not split.jobs("RUNNING", "PENDING"))
    finally:
        print(workflow.finish(run))
    until(lambda: slurm.run("squeue", "-h", "-t", "all", "-j", own, "-o", "%T") == "CANCELLED")
