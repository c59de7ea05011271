"""Cells that share a SLURM job: what stays and what comes again where a cell, the job or the driver ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from cluster import SlurmCluster
from cluster_workflow import CELLS_ONLY, NEVER_S, ClusterWorkflow, study

from launching import until

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
CELLS = tuple("abcde")
#: No time limit ends a cell that is held.
HELD = {"time_limit_s": NEVER_S}


@pytest.fixture
def workflow(slurm: SlurmCluster, tmp_path: Path) -> ClusterWorkflow:
    """Five cells, of an experiment each, that may share a job, and that wait until they are released."""
    shared = ClusterWorkflow(tmp_path, study(dict.fromkeys(CELLS, HELD), cells_per_job=5), slurm)
    shared.hold(*CELLS)
    return shared


def training(workflow: ClusterWorkflow, *of: str) -> tuple[str, psutil.Process] | None:
    """The cell among those that trains, and its worker. There is never more than one."""
    found = [(name, worker) for name in of if (worker := workflow.training_worker(name))]
    assert len(found) < 2
    return found[0] if found else None


def processes_of(workflow: ClusterWorkflow, job: str) -> list[psutil.Process]:
    """What runs in a SLURM job, or was left by it."""
    of_job = {"SLURM_CONF": str(workflow.cluster.conf), "SLURM_JOB_ID": job}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if of_job.items() <= process.environ().items():
                found.append(process)
    return found


def test_each_cell_of_a_shared_job_fails_and_is_trained_again_by_itself(
    workflow: ClusterWorkflow,
) -> None:
    slurm = workflow.cluster
    run = workflow.start("--retries", "0", *CELLS_ONLY)
    good, _ = until(lambda: training(workflow, *CELLS))
    workflow.release(good)
    others = [name for name in CELLS if name != good]
    crashed, worker = until(lambda: training(workflow, *others))
    assert workflow.status(good) == "ok"  # the next begins when one has ended
    worker.kill()
    others.remove(crashed)
    cut_off, _ = until(lambda: training(workflow, *others))
    others.remove(cut_off)
    [shared] = workflow.slurm_jobs()
    assert processes_of(workflow, shared["id"])
    slurm.run("scancel", shared["id"])
    output = workflow.finish(run)
    assert run.returncode != 0
    until(lambda: not processes_of(workflow, shared["id"]))
    assert {name: workflow.status(name) for name in CELLS} == dict.fromkeys(CELLS) | {good: "ok"}
    assert "killed by SIGKILL" in output
    for name in (crashed, cut_off):
        assert f"log: results/tiny/logs/{name}/" in output
    assert f"SLURM job {shared['id']} ended before the turn of 2 of its 5 cells" in output

    # What is missing shares a job again; a cell that is tried again has one of its own.
    before = workflow.cell_record(good).read_bytes()
    assert workflow.jobs(*CELLS_ONLY) == {"train_cell": 4}
    run = workflow.start(*CELLS_ONLY)
    until(lambda: training(workflow, *(name for name in CELLS if name != good)))
    second = workflow.slurm_jobs()[1:]
    assert len(second) == 1
    workflow.release(*(name for name in CELLS if name != good))
    slurm.run("scancel", second[0]["id"])
    output = workflow.finish(run)
    assert run.returncode == 0, output
    assert {workflow.status(name) for name in CELLS} == {"ok"}
    assert workflow.cell_record(good).read_bytes() == before
    states = [job["state"] for job in workflow.slurm_jobs()]
    records = [json.loads(workflow.cell_record(name).read_text()) for name in CELLS]
    own = {r["provenance"]["slurm_job_id"] for r in records} - {shared["id"], second[0]["id"]}
    assert states == ["CANCELLED"] * 2 + ["COMPLETED"] * len(own)


def test_a_shared_job_outlives_a_killed_driver_and_its_cells_are_not_started_twice(
    workflow: ClusterWorkflow,
) -> None:
    workflow.change_code(
        "workflow/stratbench/study/slurm/live_jobs.py", "POLL_S = 15", "POLL_S = 1"
    )
    run = workflow.start(*CELLS_ONLY)
    first, _ = until(lambda: training(workflow, *CELLS))
    workflow.release(first)
    others = [name for name in CELLS if name != first]
    until(lambda: training(workflow, *others))
    [shared] = workflow.slurm_jobs()
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    assert workflow.run("--unlock").returncode == 0
    printed = workflow.folder / "printed"
    with printed.open("w") as file:
        run = workflow.start(*CELLS_ONLY, stdout=file)
    until(lambda: "still run, or wait in SLURM's queue" in printed.read_text())
    assert f"SLURM job {shared['id']}: results/tiny/cells/{others[0]}/" in printed.read_text()
    limit = workflow.cluster.run("squeue", "-h", "-o", "%l", "-j", shared["id"])
    each_min = (NEVER_S + 600) // 60  # and the allowance for its start
    assert limit == f"{5 * each_min // 60}:{5 * each_min % 60:02}:00"
    workflow.release(*others)
    workflow.finish(run)
    assert {workflow.status(name) for name in CELLS} == {"ok"}, printed.read_text()
    assert [job["id"] for job in workflow.slurm_jobs()] == [shared["id"]]
    records = [json.loads(workflow.cell_record(name).read_text()) for name in CELLS]
    assert {r["provenance"]["slurm_job_id"] for r in records} == {shared["id"]}
    shared_import = "this run's cells share a fork server"
    logs = [
        workflow.folder / f"results/tiny/logs/{n}/single/vgg-compact/1gpu/rep0.log" for n in CELLS
    ]
    assert all(shared_import in log.read_text() for log in logs)
    assert workflow.jobs(*CELLS_ONLY) == {}


def test_ctrl_c_cancels_the_shared_job_and_submits_no_more(workflow: ClusterWorkflow) -> None:
    workflow.write_config(study(dict.fromkeys(CELLS, HELD), cells_per_job=2))
    run = workflow.start("--jobs", "1", *CELLS_ONLY)
    good, _ = until(lambda: training(workflow, *CELLS))
    workflow.release(good)
    others = [name for name in CELLS if name != good]
    until(lambda: training(workflow, *others))
    [shared] = workflow.slurm_jobs()  # of two cells: the next waits for its end
    os.killpg(run.pid, signal.SIGINT)
    workflow.finish(run)
    assert run.returncode != 0
    until(lambda: not processes_of(workflow, shared["id"]))
    until(lambda: [job["state"] for job in workflow.slurm_jobs()] == ["CANCELLED"])
    before = workflow.cell_record(good).read_bytes()
    workflow.release(*others)
    output = workflow.run(*CELLS_ONLY).stdout
    assert {workflow.status(name) for name in CELLS} == {"ok"}, output
    assert workflow.cell_record(good).read_bytes() == before
    assert [job["state"] for job in workflow.slurm_jobs()] == ["CANCELLED", *["COMPLETED"] * 2]
