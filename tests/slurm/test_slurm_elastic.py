"""Elastic cells on a SLURM cluster: their worker jobs come, are taken away, and never outlive them."""

from __future__ import annotations

import csv
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import SlurmCluster
from cluster_workflow import CELLS_ONLY, ClusterWorkflow, study
from elastic_cells import ENDLESS, SERVED, SPLIT, Elastic, Served

from launching import until

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]


def two_cells(
    folder: Path, cluster: SlurmCluster, changes: dict[str, Any], **of_cluster: Any
) -> tuple[ClusterWorkflow, Elastic, Served]:
    """A workflow with a cell of split synchronous workers and one of servers."""
    config = study(
        {"split": SPLIT | changes, "served": SERVED | changes},
        mem_mib_per_cpu_worker=1500,
        **of_cluster,
    )
    workflow = ClusterWorkflow(folder, config, cluster)
    return workflow, Elastic(workflow, "split"), Served(workflow, "served")


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
    slurm: SlurmCluster, spare: str, tmp_path: Path
) -> None:
    """Asked to end, killed, preempted, warned of their time's end, on a node that falls silent.

    At last the cells' own jobs are cancelled, which leave no worker job behind.
    """
    workflow, *cells = two_cells(tmp_path / "w", slurm, ENDLESS, worker_partition=spare)
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

        assert split.run.secret.stat().st_mode & 0o777 == 0o600
        shown = slurm.run("scontrol", "show", "job", split.job_of(min(here[split])))
        assert split.run.secret.read_text() not in shown

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
            log = cell.run.log(f"rank{min(numbers)}").read_text()
            assert "SIGUSR1: this worker leaves" in log
        slurm.run("scancel", other)
        here = {cell: cell.wait_for_new(here[cell]) for cell in cells}

        # All are gone: nothing of the node answers, and no connection closes. Its jobs are submitted anew.
        slurm.freeze_node("node2")
        since = time.time()
        for cell in cells:
            print("frozen:", noticed(cell, "lost", here[cell], since))
        until(lambda: slurm.node_states()["node2"].startswith("down"))
        slurm.lose_node("node2")
        time.sleep(max(0.0, since + 60 - time.time()))
        slurm.restore_node("node2")
        here = {cell: cell.wait_for_new(here[cell]) for cell in cells}

        for cell in cells:
            slurm.run("scancel", cell.coordinator())
        until(lambda: not any(cell.jobs("RUNNING", "PENDING") for cell in cells))
    finally:
        output = workflow.finish(run, 300)
    assert "CANCELLED" in output


def test_cells_whose_own_jobs_are_lost_go_on_and_finish(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """One is queued again by SLURM, as after the loss of its node; the other's launcher is killed."""
    slow = {"slowdown": {"workers": [0, 1], "factor": 15}}
    workflow, split, served = two_cells(tmp_path / "w", slurm, slow | {"epochs": 20})
    run = workflow.start(*CELLS_ONLY, "--retries", "1")
    try:
        split.wait_for_new(set())
        own = split.coordinator()
        slurm.run("scontrol", "update", f"JobId={own}", "Requeue=1")
        slurm.run("scontrol", "requeue", own)
        served.wait_for("score", 1)
        served.launcher().kill()
        until(lambda: slurm.run("squeue", "-h", "-j", own, "-o", "%T") == "PENDING")
        slurm.run(
            "scontrol", "update", f"JobId={own}", "StartTime=now"
        )  # in place of 121 s from now
        served.wait_for("life", 2)
    finally:
        output = workflow.finish(run, 900)
    records = {
        c: json.loads(workflow.cell_record(c.experiment).read_text()) for c in (split, served)
    }
    for cell, found in records.items():
        assert found["status"] == "ok", output
        assert found["batch"]["samples_seen"] == 20 * found["batch"]["steps_per_epoch"] * 32
        assert not cell.jobs("RUNNING", "PENDING")
        assert not cell.run.secret.exists()
    assert split.coordinator() == own
    told = records[split]["elastic"]
    assert told["lives"] == 2
    first, second = (next(g for g in told["generations"] if g["life"] == life) for life in (0, 1))
    assert second["from_step"] >= first["from_step"]
    assert not list(split.run.path.glob("checkpoint*"))
    told = records[served]["elastic"]["servers"]
    assert len(told["lives"]) == 2
    second = told["lives"][1]  # what an epoch had settled by then was saved, or was done twice
    tickets = 2 * records[served]["batch"]["steps_per_epoch"]
    assert second["tickets_before"] + second["tickets_done_twice"] >= tickets
    assert told["evaluations"] >= 20
    print({k: told[k] for k in ("tickets_done_twice", "returns", "lives")})


def test_all_arms_of_a_small_study_leave_records_that_the_audit_believes(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """A gang, split synchronous and split asynchronous workers, in one queue."""
    common = {"epochs": 2}
    arms = {
        "gang": common | {"strategies": ["ddp"], "gpus": [2], "warmup_steps": 1},
        "split": common | SPLIT,
        "served": common | {**SPLIT, "strategies": ["ps-ormo"]},
    }
    config = study(arms, gpus_per_node=2, mem_mib_per_cpu_worker=1500)
    workflow = ClusterWorkflow(tmp_path / "w", config, slurm)
    done = workflow.run("--until", "audit_records")
    assert done.returncode == 0, done.stdout
    records = {arm: json.loads(workflow.cell_record(arm).read_text()) for arm in arms}
    assert {arm: r["status"] for arm, r in records.items()} == dict.fromkeys(arms, "ok")
    for arm in ("split", "served"):
        told = records[arm]["elastic"]
        assert len(told["jobs"]) >= 2
        assert told["queue_wait_s"] >= 0
        assert 0 < told["first_step_s"] < records[arm]["time"]["total_s"]
        assert 0 < told["idle_s"] < told["allocated_s"]
    assert all(r["time"]["queue_wait_s"] >= 0 for r in records.values())
    with open(workflow.folder / "results/tiny/audit.csv", newline="") as file:
        assert [r for r in csv.DictReader(file) if r["severity"] == "unusable"] == []
