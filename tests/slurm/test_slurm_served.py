"""Elastic cells with parameter servers on a SLURM cluster: what is killed there, and what goes on."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import SlurmCluster
from cluster_workflow import CELLS_ONLY
from test_slurm_elastic import ENDLESS, Elastic

from launching import until
from stratbench.cell.run_folder import RunFolder
from stratbench.ps.elastic.journal import read_journal

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]
SERVED = ENDLESS | {"strategies": ["ps-ormo"], "lr": 0.002, "epochs": 3000}
SHORT = SERVED | {"epochs": 15, "slowdown": {"workers": [0, 1], "factor": 15}}


class Served(Elastic):
    """A workflow with one elastic cell of parameter servers."""

    def __init__(self, folder: Path, cell: dict[str, Any], cluster: SlurmCluster) -> None:
        super().__init__(folder, cell, cluster)
        self.run = RunFolder(folder / "results/tiny/logs/one/ps-ormo/vgg-compact/2gpu/rep0/run")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the servers noted of this kind."""
        return [e for e in read_journal(self.run.servers) if e["event"] == kind]

    def wait_for(self, kind: str, count: int) -> list[dict[str, Any]]:
        """Wait until the servers have noted so many events of a kind; these."""
        return until(lambda: (found := self.events(kind)) and len(found) >= count and found)

    def job_of(self, number: int) -> str:
        """The id of the SLURM job of a worker."""
        lines = self.run.worker_jobs.read_text().split("\n")[:-1]
        return next(j["id"] for j in map(json.loads, lines) if j["number"] == number)

    def process_of(self, number: int) -> psutil.Process:
        """The process of a worker: SLURM's nodes are all on this machine."""
        job = str(self.run.job)
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            is_worker = words[-2:] == [job, str(number)] and "srun" not in words[0]
            if is_worker and "stratbench.train.elastic.worker" in words:
                return process
        raise AssertionError(f"worker {number} has no process")


def test_workers_that_are_asked_to_end_or_killed_give_their_tickets_back(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """By SLURM's signal to the step, by SIGKILL, and with the cell's own job, which leaves none behind."""
    cell = Served(tmp_path / "w", SERVED, slurm)
    run = cell.workflow.start(*CELLS_ONLY, "--retries", "0")
    try:
        cell.wait_for("begin", 2)
        asked = time.time()
        slurm.run("scancel", "--signal=TERM", cell.job_of(0))
        (left,) = cell.wait_for("leave", 1)
        assert left["worker"] == 0
        print(f"LEAVE {left['at_unix_s'] - asked:.2f} s after scancel --signal=TERM")
        cell.wait_for("begin", 3)
        killed = time.time()
        cell.process_of(1).send_signal(signal.SIGKILL)
        (lost,) = cell.wait_for("loss", 1)
        assert (lost["worker"], len(lost["tickets"])) == (1, 1)
        print(f"ticket back {lost['at_unix_s'] - killed:.2f} s after SIGKILL")
        assert cell.run.secret.stat().st_mode & 0o777 == 0o600
        shown = slurm.run("scontrol", "show", "job", cell.jobs("RUNNING")[0])
        assert cell.run.secret.read_text() not in shown
        slurm.run("scancel", cell.coordinator())
        until(lambda: not cell.jobs("RUNNING") and not cell.jobs("PENDING"))
    finally:
        output = cell.workflow.finish(run, 300)
    assert "CANCELLED" in output


def test_servers_whose_job_is_killed_go_on_and_workers_find_them(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    cell = Served(tmp_path / "w", SHORT, slurm)
    run = cell.workflow.start(*CELLS_ONLY, "--retries", "1")
    try:
        cell.wait_for("begin", 2)
        cell.wait_for("score", 1)
        cell.launcher().kill()
        cell.wait_for("life", 2)
    finally:
        output = cell.workflow.finish(run, 600)
    found = json.loads(cell.workflow.cell_record("one").read_text())
    assert found["status"] == "ok", output
    told = found["elastic"]["servers"]
    assert len(told["lives"]) == 2
    second = told["lives"][1]  # what an epoch had settled by then was saved, or was done twice
    tickets = 2 * found["batch"]["steps_per_epoch"]
    assert second["tickets_before"] + second["tickets_done_twice"] >= tickets
    assert told["evaluations"] >= 15
    print({k: told[k] for k in ("tickets_done_twice", "returns", "lives")})
    assert found["batch"]["samples_seen"] == 15 * found["batch"]["steps_per_epoch"] * 32
    assert not cell.jobs("RUNNING")
    assert not cell.jobs("PENDING")
    assert not cell.run.secret.exists()
