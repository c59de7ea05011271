"""What a cell asks SLURM for, what is told of a request that it can never meet, and taking it back."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from cluster import NODES, SlurmCluster
from cluster_workflow import (
    CELLS_ONLY,
    ENDLESS,
    LOOK_VARIABLE,
    NEVER_S,
    PROFILE,
    ClusterWorkflow,
    study,
)

from launching import LIMIT_S, assert_gone, until

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]


def as_shipped(experiments: dict) -> dict:
    """A study on CPUs with the defaults of `cluster`, made for nodes of GPUs."""
    config = study(experiments)
    del config["cluster"]
    return config


@dataclass
class Interrupted:
    """A run that got Ctrl-C while its cells trained: the CPUs and memory that each had asked for."""

    workflow: ClusterWorkflow
    asked: dict[str, list[str]]
    workers: list[psutil.Process]
    returncode: int


@pytest.fixture(scope="module")
def interrupted(
    slurm_session: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Interrupted]:
    folder = tmp_path_factory.mktemp("interrupted")
    slowed = {"workers": [0], "factor": 30}
    served = {"strategies": ["ps-sync"], "gpus": [4], "epochs": 500, "slowdown": slowed}
    experiments = {
        "alone": ENDLESS | {"threads": 1},
        "served": ENDLESS | {"threads": 1} | served,  # each epoch has its snapshot on disk
    }
    workflow = ClusterWorkflow(folder, as_shipped(experiments), slurm_session)
    # It ends without the next look, which by itself may be minutes away.
    workflow.variables[LOOK_VARIABLE] = str(NEVER_S)
    run = workflow.start()
    try:
        workers = [until(lambda e=e: workflow.training_worker(e)) for e in experiments]
        rows = slurm_session.run("squeue", "-h", "-o", "%Z|%k|%C|%m").splitlines()
        asked = {
            row.split("|")[1].split("_")[5]: row.split("|")[2:]
            for row in rows
            if row.startswith(str(folder))
        }
        os.killpg(run.pid, signal.SIGINT)
        workflow.finish(run)
        yield Interrupted(workflow, asked, workers, run.returncode)
    finally:
        slurm_session.cancel_all()


def test_cells_on_cpus_train_on_small_nodes_with_the_defaults(interrupted: Interrupted) -> None:
    assert interrupted.asked == {"alone": ["1", "2G"], "served": ["5", "10G"]}


def test_ctrl_c_takes_the_cells_from_slurm(interrupted: Interrupted) -> None:
    workflow = interrupted.workflow
    assert interrupted.returncode != 0
    until(lambda: {job["state"] for job in workflow.slurm_jobs()} == {"CANCELLED"})
    assert_gone(interrupted.workers)
    assert [workflow.cell_record(name) for name in interrupted.asked] == [None, None]
    assert workflow.jobs()["train_cell"] == 2


#: A squeue that answers Snakemake once HOLD is no longer there, and says that it waits; all others at once.
HOLDING = """#!/bin/sh
trap '' INT
case "$*" in
    *"--format=%i|%T|"*) while [ -e HOLD ]; do touch WAITS; sleep 0.1; done ;;
esac
exec REAL "$@"
"""


def test_ctrl_c_while_slurm_is_asked_for_states_takes_the_cells_from_slurm(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Snakemake knows none of its jobs meanwhile, and cancels none."""
    workflow = ClusterWorkflow(tmp_path / "w", study({"one": ENDLESS}), slurm)
    path = slurm.env["PATH"]
    hold, waits = tmp_path / "hold", tmp_path / "waits"
    text = HOLDING.replace("REAL", shutil.which("squeue", path=path))
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(text.replace("HOLD", str(hold)).replace("WAITS", str(waits)))
    squeue.chmod(0o755)
    workflow.variables["PATH"] = f"{squeue.parent}:{path}"
    printed = tmp_path / "printed"
    with printed.open("w") as output:
        run = workflow.start(*CELLS_ONLY, stdout=output)
    try:
        worker = until(lambda: workflow.training_worker("one"))
        hold.touch()
        until(waits.exists)
        os.killpg(run.pid, signal.SIGINT)
        until(lambda: workflow.slurm_jobs()[0]["state"] == "CANCELLED")
        hold.unlink()
        run.wait(timeout=LIMIT_S)
        assert_gone([worker])
    finally:
        hold.unlink(missing_ok=True)
        run.kill()
        slurm.cancel_all()


def test_a_request_that_no_node_can_hold_is_told_before_anything_is_submitted(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    config = study({"good": {}, "wide": {"threads": 17}, "long": {"time_limit_s": 7200}})
    workflow = ClusterWorkflow(tmp_path, config, slurm)
    try:
        slurm.run("scontrol", "update", "PartitionName=gpu", "MaxTime=60")
        output = workflow.run().stdout
    finally:
        slurm.run("scontrol", "update", "PartitionName=gpu", "MaxTime=INFINITE")
    told = [line for line in output.splitlines() if "asks for" in line]
    assert len(told) == 2, output
    assert told[0] == (
        "tiny/long: single, vgg-compact, 1 worker, repeat 0 asks for a node with 1 CPU core, 12,000 MiB "
        "and 130 minutes, but the largest node of partition gpu has 16 CPU cores, 24,000 MiB and 60 "
        "minutes: lower studies.tiny.experiments.long.time_limit_s or cluster.startup_allowance_s"
    )
    assert "17 CPU cores" in told[1]
    assert "lower studies.tiny.experiments.wide.threads" in told[1]
    assert workflow.slurm_jobs() == []
    assert "Traceback" not in output


def test_a_refused_sbatch_says_why_and_not_its_command_line(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    workflow = ClusterWorkflow(tmp_path, study({"one": {}}), slurm)
    workflow.change_code(PROFILE, "  # constraint: a100 #", "  constraint: a100 #")
    run = workflow.run("--retries", "0")
    output = run.stdout
    assert run.returncode != 0
    assert (
        "SLURM refuses it: Batch job submission failed: Invalid feature specification. "
        "tiny/one: single, vgg-compact, 1 worker, repeat 0 asks for a node with 1 CPU core"
        in output
    )
    assert "--wrap" not in output
    assert "stratbench.train.launch" not in output


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [
        ("PartitionTimeLimit", "no node of the partition has the requested resources"),
        ("Nodes required for job are DOWN", "down, drained or reserved"),
        ("ReqNodeNotAvail, UnavailableNodes:node2", "a node that it requests is not available"),
        ("Reservation", "its reservation has not begun"),
    ],
)
def test_a_job_that_does_not_start_is_named(
    slurm: SlurmCluster, tmp_path: Path, reason: str, meaning: str
) -> None:
    """After two minutes; here, after 2 s."""
    workflow = ClusterWorkflow(tmp_path, study({"one": {}}), slurm)
    code = "workflow/stratbench/study/slurm/waiting.py"
    workflow.change_code(code, "PATIENCE_S = 120.0", "PATIENCE_S = 2.0")
    extra = {"ReqNodeNotAvail, UnavailableNodes:node2": "--nodelist=node2"}
    extra["Reservation"] = "--reservation=later"
    if reason in extra:
        workflow.ask_sbatch_for(extra[reason])
    drained = f"nodename={','.join(NODES)}"
    if reason == "Reservation":
        slurm.run("scontrol", "create", "reservation", "ReservationName=later", "Users=root",
                  "StartTime=now+2days", "Duration=60", "Nodes=node1")  # fmt: skip
    else:
        slurm.run("scontrol", "update", drained, "state=drain", "reason=test")
    run = workflow.start()
    try:
        (job,) = until(workflow.slurm_jobs)
        if reason == "PartitionTimeLimit":
            slurm.run("scontrol", "update", "PartitionName=gpu", "MaxTime=1")
        os.set_blocking(run.stdout.fileno(), False)
        said = bytearray()

        def told() -> str | None:
            with contextlib.suppress(BlockingIOError):
                said.extend(os.read(run.stdout.fileno(), 1 << 16))
            lines = said.decode().splitlines()
            return next((line for line in lines if "waits for the reason" in line), None)

        sentence = until(told)
        assert f"SLURM job {job['id']} (results/tiny/cells/one/" in sentence
        assert f"waits for the reason {reason}" in sentence
        assert meaning in sentence
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait(timeout=300)
        slurm.run("scontrol", "update", "PartitionName=gpu", "MaxTime=INFINITE")
        slurm.cancel_all()
        if reason == "Reservation":
            slurm.run("scontrol", "delete", "ReservationName=later")
        else:
            slurm.run("scontrol", "update", drained, "state=resume")


def test_a_waiting_cell_trains_what_it_was_submitted_with(
    slurm: SlurmCluster, tmp_path: Path, warm: dict[str, str]
) -> None:
    """It reads nothing of a config.yaml that was changed, and is half a file at the time."""
    workflow = ClusterWorkflow(tmp_path, study({"a": {}}), slurm)
    workflow.share_import(warm)
    workflow.ask_sbatch_for("--hold")
    run = workflow.start(*CELLS_ONLY, "--retries", "0")
    [job] = until(workflow.slurm_jobs)
    (tmp_path / "config.yaml").write_text("studies: {tiny: {experiments: [")
    slurm.run("scontrol", "release", job["id"])
    output = workflow.finish(run)
    assert run.returncode == 0, output
    assert json.loads(workflow.cell_record("a").read_text())["settings"]["epochs"] == 1
