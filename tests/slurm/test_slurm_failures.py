"""Failures on a SLURM cluster: what the user sees, what stays, and what the next run does."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import SlurmCluster
from cluster_conf import MEMORY_EACH_SECOND
from cluster_workflow import ENDLESS, ClusterWorkflow, study

from launching import LIMIT_S, until

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
#: On the test cluster, whose nodes are taken to have one GPU.
TWO_NODES = {"strategies": ["ddp"], "gpus": [2]}

#: Experiments of one cell each, all in one run: one that succeeds, one that reaches its own limit,
#: and one for every way to fail.
ONE_OF_EACH = {
    "good": {},
    "broken": {"device": "cuda"},
    "hung": ENDLESS,
    "hungry": {"dataset": "big-batch", "global_batch": 8192},
    "full": {},  # its disk
    "late-two": TWO_NODES | ENDLESS | {"time_limit_s": 150},  # with a step before it
    "killed-two": TWO_NODES | ENDLESS,
}
FAILING = ("broken", "hung", "hungry", "full", "killed-two")


@dataclass
class Disaster:
    """A run in which every kind of failure has happened, and what it printed."""

    workflow: ClusterWorkflow
    output: str
    returncode: int


def config_with(experiments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    config = study(experiments, mem_mib_per_cpu_worker=1500)
    images = config["datasets"]["tiny-images"]
    large = {"train_samples": 8192, "channels": 3, "size": 32}
    config["datasets"]["big-batch"] = images | large
    return config


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Make `folder` a file system of its own, of 1 MiB, without a free byte."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
            while filler.write(b"\0" * 4096):
                pass
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def disaster(
    slurm_session: SlurmCluster, tmp_path_factory: pytest.TempPathFactory, warm: dict[str, str]
) -> Iterator[Disaster]:
    folder = tmp_path_factory.mktemp("disaster")
    workflow = ClusterWorkflow(folder, config_with(ONE_OF_EACH), slurm_session)
    workflow.ask_sbatch_for(MEMORY_EACH_SECOND)
    # All but the one whose memory counts, which has to be its job's.
    workflow.share_import(warm, *(ONE_OF_EACH.keys() - {"hungry"}))

    def hang(launcher: psutil.Process) -> None:
        """Stop a launcher, so that it cannot keep the cell's limit, and have SLURM's reached."""
        launcher.send_signal(signal.SIGSTOP)
        workflow.reach_limit(workflow.slurm_jobs("hung")[0]["id"])

    def launcher_that_has_begun() -> psutil.Process | None:
        log = folder / "results/tiny/logs/hung/single/vgg-compact/1gpu/rep0.log"
        return workflow.launcher("hung") if log.exists() and log.read_text() else None

    to_break = [
        (launcher_that_has_begun, hang),
        (lambda: workflow.training_worker("killed-two"), psutil.Process.kill),
    ]
    with full_disk(folder / "results/tiny/cells/full"):
        run = workflow.start("--retries", "0")
        try:
            while to_break:
                which, found = until(
                    lambda: next(((w, p) for w in to_break if (p := w[0]())), None)
                )
                to_break.remove(which)
                which[1](found)
            output = workflow.finish(run)
            yield Disaster(workflow, output, run.returncode)
        finally:
            slurm_session.cancel_all()


def test_the_driver_ends_with_an_error_when_all_others_have_finished(disaster: Disaster) -> None:
    assert disaster.returncode != 0
    states = {job["comment"].split("_")[5]: job["state"] for job in disaster.workflow.slurm_jobs()}
    assert states == {
        "good": "COMPLETED",
        "broken": "FAILED",
        "hung": "TIMEOUT",
        "hungry": "FAILED",
        "full": "FAILED",
        "late-two": "COMPLETED",
        "killed-two": "FAILED",
    }


def test_a_cell_that_reaches_its_own_limit_is_a_result(disaster: Disaster) -> None:
    assert disaster.workflow.status("good") == "ok"
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
        "failed: TIMEOUT on node",
        "exceeded memory limit",
        "No space left on device",
    ):
        assert sign in disaster.output


def test_a_cell_for_gpus_asks_slurm_for_them_and_others_do_not(disaster: Disaster) -> None:
    assert disaster.workflow.slurm_jobs("broken")[0]["gres"] in ("gres:gpu:1", "gpu:1")
    assert disaster.workflow.slurm_jobs("good")[0]["gres"] == "N/A"


def test_the_next_run_trains_what_failed_and_nothing_else(disaster: Disaster) -> None:
    workflow = disaster.workflow
    assert workflow.jobs()["train_cell"] == len(FAILING)
    before = {k: workflow.cell_record(k).read_bytes() for k in ONE_OF_EACH if k not in FAILING}
    n_jobs = len(workflow.slurm_jobs())
    (workflow.folder / "results/tiny/cells/full/filler").unlink()
    record = workflow.record("full", "single", "vgg-compact", "1gpu")
    output = workflow.run("--", str(record.relative_to(workflow.folder))).stdout
    assert workflow.status("full") == "ok", output
    assert len(workflow.slurm_jobs()) == n_jobs + 1
    assert before == {k: workflow.cell_record(k).read_bytes() for k in before}
