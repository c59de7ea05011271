"""Failures on a SLURM cluster: what the user sees, what stays, and what the next run does."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from cluster import SlurmCluster
from cluster_workflow import CELLS_ONLY, ENDLESS, ClusterWorkflow, study, wait_for

pytest_plugins = ["cluster_fixtures"]
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.xdist_group("slurm-1"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
#: On the test cluster, whose nodes are taken to have one GPU.
TWO_NODES = {"strategies": ["ddp"], "gpus": [2]}

#: Experiments of one cell each, all in one run: one that succeeds, one that reaches its own limit,
#: and one for every way to fail.
ONE_OF_EACH = {
    "good": {},
    "late": ENDLESS | {"time_limit_s": 25},
    "broken": {"device": "cuda"},
    "killed": ENDLESS,
    "hung": ENDLESS | {"time_limit_s": 20},
    "cancelled": ENDLESS,
    "hungry": {"dataset": "big-batch", "global_batch": 8192},
    "late-two": TWO_NODES | ENDLESS | {"time_limit_s": 40},
    "killed-two": TWO_NODES | ENDLESS,
}
FAILING = ("broken", "killed", "hung", "cancelled", "hungry", "killed-two")


@dataclass
class Disaster:
    """A run in which every kind of failure has happened, and what it printed."""

    workflow: ClusterWorkflow
    output: str
    returncode: int


@pytest.fixture(scope="module")
def disaster(
    slurm_session: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Disaster]:
    # SLURM's limit of the hung cell is a minute, the least that it knows.
    config = study(ONE_OF_EACH, mem_mib_per_cpu_worker=1500, startup_allowance_s=40)
    config["datasets"]["big-batch"] = config["datasets"]["tiny-images"] | {
        "train_samples": 8192,
        "channels": 3,
        "size": 32,
    }
    folder = tmp_path_factory.mktemp("disaster")
    workflow = ClusterWorkflow(folder, config, slurm_session)
    run = workflow.start("--retries", "0", "--jobs", "6")

    def launcher_that_has_begun() -> psutil.Process | None:
        log = folder / "results/tiny/logs/hung/single/vgg-compact/1gpu/rep0.log"
        return workflow.launcher("hung") if log.exists() and log.read_text() else None

    # A launcher that is stopped cannot keep the cell's limit, so that SLURM's is reached.
    to_break = {
        "killed": lambda: workflow.training_worker("killed"),
        "killed-two": lambda: workflow.training_worker("killed-two"),
        "hung": launcher_that_has_begun,
        "cancelled": lambda: workflow.training_worker("cancelled"),
    }
    try:
        for _ in range(len(to_break)):
            name, process = wait_for(
                lambda: next(((k, p) for k, find in to_break.items() if (p := find())), None), 200
            )
            del to_break[name]
            if name == "cancelled":
                slurm_session.run("scancel", workflow.slurm_jobs("cancelled")[0]["id"])
            else:
                process.send_signal(signal.SIGSTOP if name == "hung" else signal.SIGKILL)
        output = workflow.finish(run, limit_s=400)
        yield Disaster(workflow, output, run.returncode)
    finally:
        slurm_session.cancel_all()


def test_the_driver_ends_with_an_error_when_all_others_have_finished(disaster: Disaster) -> None:
    assert disaster.returncode != 0
    states = {job["comment"].split("_")[5]: job["state"] for job in disaster.workflow.slurm_jobs()}
    assert states == {
        "good": "COMPLETED",
        "late": "COMPLETED",
        "broken": "FAILED",
        "killed": "FAILED",
        "hung": "TIMEOUT",
        "cancelled": "CANCELLED",
        "hungry": "FAILED",
        "late-two": "COMPLETED",
        "killed-two": "FAILED",
    }


def test_a_cell_that_reaches_its_own_limit_is_a_result(disaster: Disaster) -> None:
    assert disaster.workflow.status("good") == "ok"
    assert disaster.workflow.status("late") == "timeout"
    assert disaster.workflow.status("late-two") == "timeout"


@pytest.mark.parametrize("experiment", FAILING)
def test_a_failure_leaves_no_result_and_is_named_with_its_log(
    disaster: Disaster, experiment: str
) -> None:
    assert disaster.workflow.cell_record(experiment) is None
    assert f"log: results/tiny/logs/{experiment}/" in disaster.output
    assert f"cell tiny/{experiment}: " in disaster.output


def test_the_cause_is_told(disaster: Disaster) -> None:
    for sign in (
        "killed by SIGKILL",
        "SLURM status is: 'TIMEOUT'",
        "SLURM status is: 'CANCELLED'",
        "exceeded memory limit",
    ):
        assert sign in disaster.output


def test_a_cell_for_gpus_asks_slurm_for_them_and_others_do_not(disaster: Disaster) -> None:
    assert disaster.workflow.slurm_jobs("broken")[0]["gres"] in ("gres:gpu:1", "gpu:1")
    assert disaster.workflow.slurm_jobs("good")[0]["gres"] == "N/A"


def test_the_next_run_trains_what_failed_and_nothing_else(disaster: Disaster) -> None:
    assert disaster.workflow.jobs()["train_cell"] == len(FAILING)
    workflow = disaster.workflow
    before = {k: workflow.cell_record(k).read_bytes() for k in ONE_OF_EACH if k not in FAILING}
    n_jobs = len(workflow.slurm_jobs())
    repaired = {k: {} if k in FAILING else v for k, v in ONE_OF_EACH.items()}
    workflow.write_config(study(repaired, startup_allowance_s=300))
    output = workflow.finish(workflow.start(), limit_s=400)
    assert (workflow.folder / "results/tiny/report.html").exists(), output
    assert len(workflow.slurm_jobs()) == n_jobs + len(FAILING)
    assert before == {k: workflow.cell_record(k).read_bytes() for k in before}


def test_ctrl_c_takes_the_cells_from_slurm(slurm: SlurmCluster, tmp_path: Path) -> None:
    workflow = ClusterWorkflow(tmp_path, study({"one": ENDLESS}), slurm)
    run = workflow.start()
    worker = wait_for(lambda: workflow.training_worker("one"))
    os.killpg(run.pid, signal.SIGINT)
    workflow.finish(run, limit_s=60)
    assert run.returncode != 0
    wait_for(lambda: workflow.slurm_jobs("one")[0]["state"] == "CANCELLED", 30)
    worker.wait(timeout=20)
    assert workflow.cell_record("one") is None
    assert workflow.jobs()["train_cell"] == 1


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of its own, of 1 MiB, without a free byte."""
    folder = tmp_path / "results/tiny/cells"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
            while filler.write(b"\0" * 4096):
                pass
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)


def test_a_full_disk_fails_the_cell_and_the_next_run_trains_it(
    slurm: SlurmCluster, tmp_path: Path, full_disk: Path
) -> None:
    workflow = ClusterWorkflow(tmp_path, study({"one": {}}), slurm)
    run = workflow.start("--retries", "0", *CELLS_ONLY)
    output = workflow.finish(run, limit_s=200)
    assert run.returncode != 0
    assert "No space left on device" in output
    assert "results/tiny/logs/one/single/vgg-compact/1gpu/rep0.log" in output
    assert workflow.cell_record("one") is None
    (full_disk / "filler").unlink()
    output = workflow.finish(workflow.start("--retries", "0", *CELLS_ONLY), limit_s=200)
    assert workflow.status("one") == "ok", output
