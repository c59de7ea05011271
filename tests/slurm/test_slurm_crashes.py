"""Crashes on a SLURM cluster, of a node and of the driver: what runs on is kept, what is lost comes again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import SlurmCluster
from cluster_workflow import CELLS_ONLY, NEVER_S, ClusterWorkflow, study

from launching import until

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
#: A cell that is held: no time limit ends it before it is released.
HELD = {"time_limit_s": NEVER_S}


def test_a_cell_on_a_node_that_dies_is_trained_on_another(
    slurm: SlurmCluster, tmp_path: Path, warm_holding: dict[str, str]
) -> None:
    whole = {"mem_mib_per_cpu_worker": 24000}  # one cell a node
    workflow = ClusterWorkflow(tmp_path, study({"one": HELD, "two": HELD}, **whole), slurm)
    workflow.share_import(warm_holding)
    workflow.hold("one", "two")
    run = workflow.start(*CELLS_ONLY)
    until(lambda: workflow.training_worker("one") and workflow.training_worker("two"))
    lost = workflow.slurm_jobs("one")[0]
    slurm.lose_node(lost["nodes"])
    workflow.release("one", "two")
    output = workflow.finish(run)
    assert run.returncode == 0, output
    assert "its node failed" in output
    first, second = workflow.slurm_jobs("one")
    assert first["state"] == "NODE_FAIL"
    assert second["state"] == "COMPLETED"
    assert second["nodes"] != lost["nodes"]
    assert len(workflow.slurm_jobs("two")) == 1
    assert [workflow.status(name) for name in ("one", "two")] == ["ok", "ok"]


@dataclass
class Resumed:
    """A study whose driver was killed while a and b trained; the next run waited, and trained c."""

    workflow: ClusterWorkflow
    live: list[str]
    output: str


@pytest.fixture(scope="module")
def resumed(
    slurm_session: SlurmCluster,
    tmp_path_factory: pytest.TempPathFactory,
    warm_holding: dict[str, str],
) -> Iterator[Resumed]:
    folder = tmp_path_factory.mktemp("resumed")
    workflow = ClusterWorkflow(folder, study({"a": HELD, "b": HELD, "c": {}}), slurm_session)
    workflow.change_code(
        "workflow/stratbench/study/slurm/live_jobs.py", "POLL_S = 15", "POLL_S = 1"
    )
    workflow.share_import(warm_holding)
    workflow.hold("a", "b")
    records = [workflow.record(name, "single", "vgg-compact", "1gpu") for name in "ab"]
    try:
        run = workflow.start("--", *(str(record.relative_to(folder)) for record in records))
        until(lambda: workflow.training_worker("a") and workflow.training_worker("b"))
        live = [job["id"] for job in workflow.slurm_jobs()]
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        # Snakemake's own lock comes first, with its own advice.
        locked = workflow.run()
        assert locked.returncode != 0
        assert "--unlock" in locked.stdout
        assert workflow.run("--unlock").returncode == 0
        printed = folder / "printed"
        with printed.open("w") as file:
            run = workflow.start("--slurm-keep-successful-logs", *CELLS_ONLY, stdout=file)
        until(lambda: "still run or wait in SLURM's queue" in printed.read_text())
        workflow.release("a", "b")
        workflow.finish(run)
        yield Resumed(workflow, live, printed.read_text())
    finally:
        slurm_session.cancel_all()


def test_cells_that_outlive_a_killed_driver_are_not_started_twice(resumed: Resumed) -> None:
    workflow, output = resumed.workflow, resumed.output
    assert len(resumed.live) == 2
    assert all(f"SLURM job {job}: results/tiny/cells/" in output for job in resumed.live)
    assert [workflow.status(name) for name in "abc"] == ["ok"] * 3, output
    jobs = workflow.slurm_jobs()
    assert [job["state"] for job in jobs] == ["COMPLETED"] * 3
    assert len({job["comment"] for job in jobs}) == 3


def test_by_which_settings_cells_finished_while_nobody_looked_is_known(resumed: Resumed) -> None:
    assert resumed.workflow.jobs(*CELLS_ONLY) == {}
    resumed.workflow.write_config(study({name: HELD | {"lr": 0.01} for name in "abc"}))
    assert resumed.workflow.jobs()["train_cell"] == 3


def birth_s(path: Path) -> float:
    """When a file was made: renaming and touching it, as Snakemake does, do not change that."""
    shown = subprocess.run(["stat", "-c", "%.W", path], capture_output=True, text=True, check=True)
    return float(shown.stdout)


def test_slurm_adds_two_starts_of_snakemake_to_a_cell(resumed: Resumed) -> None:
    """And how long the whole takes is printed, beside a start of Snakemake on the same machine."""
    folder = resumed.workflow.folder
    before_s = time.monotonic()
    resumed.workflow.jobs(*CELLS_ONLY)
    start_s = time.monotonic() - before_s
    record = resumed.workflow.cell_record("c")
    assert record is not None, resumed.output
    slurm_logs = folder / ".snakemake/slurm_logs/rule_train_cell/tiny_c_single_vgg-compact_1_0"
    (slurm_log,) = slurm_logs.glob("*.log")
    own_s = json.loads(record.read_text())["time"]["total_s"]
    moments = {
        "submitted": birth_s(slurm_logs),
        "started by SLURM": birth_s(slurm_log),
        "launcher started": birth_s(
            folder / "results/tiny/logs/c/single/vgg-compact/1gpu/rep0.log"
        ),
        "record written": birth_s(record),
    }
    since_s = {what: round(at - moments["submitted"], 2) for what, at in moments.items()}
    print(f"seconds since submission: {since_s}; own: {own_s:.2f}; a start: {start_s:.2f}")
    assert sorted(moments, key=moments.get) == list(moments)
    assert 0 < own_s < since_s["record written"]
    assert slurm_log.read_text().count("Building DAG of jobs") == 2
