"""Failures of a study: what the user sees, what stays, and what the next run does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from tiny_study import tiny_config

from launching import LIMIT_S, assert_gone, phase_logs, until
from stratbench.cell.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LONG_CELL = "train_cell:study=tiny,experiment=second,strategy=ddp,model=vgg-compact,gpus=2,repeat=0"


def one_long_cell() -> dict:
    """The tiny study with one cell that trains long enough to be hit."""
    config = tiny_config()
    second = config["studies"]["tiny"]["experiments"]["second"]
    second["strategies"] = ["ddp"]
    second["gpus"] = [2]
    second["epochs"] = 2000
    config["studies"]["tiny"]["experiments"]["first"]["gpus"] = [1]
    return config


def text_of(path: Path) -> str:
    """What the file holds; nothing where there is none at the moment."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def training_workers(folder: Path) -> list[psutil.Process] | None:
    """The worker processes of the long cell, once both train."""
    phases = phase_logs(folder / "results/tiny/logs/second/ddp")
    if len(phases) < 2 or any('"train"' not in p.read_text() for p in phases):
        return None
    workers = [child for server in fork_servers(folder) for child in server.children()]
    return workers if len(workers) == 2 else None


def fork_servers(folder: Path) -> list[psutil.Process]:
    """The fork servers of a run there; what they have forked has the same command line."""
    alike = [
        p
        for p in psutil.process_iter(["cmdline", "cwd"])
        if "stratbench.train.forkserver" in (p.info["cmdline"] or [])
        and p.info["cwd"] == str(folder)
    ]
    parents, found = {other.pid for other in alike}, []
    for process in alike:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            found += [process] * (process.ppid() not in parents)
    return found


def test_a_killed_worker_fails_its_cell_and_no_other(workflow):
    workflow.write_config(one_long_cell())
    workflow.hold("second")
    run = workflow.start()
    workers = until(lambda: training_workers(workflow.folder))
    workers[0].send_signal(signal.SIGKILL)
    output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode != 0
    # The others finished, and the message names the cell and shows the end of its log.
    for strategy in ("single", "ddp"):
        assert workflow.record("first", strategy, "vgg-compact", "1gpu").exists()
    assert "cell tiny/second: ddp, vgg-compact, 2 workers" in output
    assert "killed by SIGKILL" in output
    summary = output[output.index("Failed: 1 cell\n") :]
    assert "  vgg-compact with ddp on 2 workers (1 cell of second): " in summary
    assert "\nLogs: results/tiny/logs/second/ddp/vgg-compact/2gpu/rep0.log\n" in summary
    assert len(summary.splitlines()) < 10  # nothing but Snakemake's end comes after it
    record = workflow.record("second", "ddp", "vgg-compact", "2gpu")
    assert not record.exists()
    evidence = workflow.folder / "results/tiny/logs/second/ddp/vgg-compact/2gpu/rep0/failure.json"
    assert "SIGKILL" in evidence.read_text()
    assert_gone([*workers, *fork_servers(workflow.folder)])
    # The next run trains that cell, and it alone.
    assert workflow.jobs()["train_cell"] == 1


def test_ctrl_c_ends_every_process_and_the_next_run_goes_on(workflow):
    workflow.write_config(one_long_cell())
    workflow.hold("second")
    run = workflow.start("--target-jobs", LONG_CELL)
    workers = until(lambda: training_workers(workflow.folder))
    servers = fork_servers(workflow.folder)
    assert servers
    os.killpg(run.pid, signal.SIGINT)  # what a terminal sends
    run.communicate(timeout=LIMIT_S)
    assert_gone([*workers, *servers])
    assert not workflow.record("second", "ddp", "vgg-compact", "2gpu").exists()
    assert workflow.jobs()["train_cell"] >= 1


def test_a_cell_ends_with_its_snakemake(workflow, tmp_path):
    """The kernel may kill it for memory, far into a cell of hours; or a second one is let in beside it.

    The temporary folder is one whose name is too long for sockets.
    """
    tmp = tmp_path / ("t" * 100)
    tmp.mkdir()
    workflow.variables["TMPDIR"] = str(tmp)
    squeue = tmp / "squeue"  # of a cluster that does not answer; a run on this machine does not ask
    squeue.write_text("#!/bin/sh\nexit 1\n")
    squeue.chmod(0o755)
    workflow.variables["PATH"] = f"{tmp}:{os.environ['PATH']}"
    workflow.write_config(one_long_cell())
    workflow.hold("second")
    run = workflow.start("--target-jobs", LONG_CELL)
    workers = until(lambda: training_workers(workflow.folder))
    family = [*workers, *psutil.Process(run.pid).children(recursive=True)]
    log = workflow.folder / "results/tiny/logs/second/ddp/vgg-compact/2gpu/rep0.log"
    assert "share a fork server" in log.read_text()
    # It would train the same cell, and waits instead.
    second = workflow.start("--nolock", "--target-jobs", LONG_CELL)
    # Snakemake takes the first one's log away before the second launcher writes its own.
    until(lambda: "another launcher trains" in text_of(log))
    assert all(p.is_running() for p in workers)
    run.kill()
    assert "squeue" not in run.communicate()[0]
    assert_gone(family)
    workers = until(lambda: training_workers(workflow.folder))
    family = [*workers, *psutil.Process(second.pid).children(recursive=True)]
    os.killpg(second.pid, signal.SIGKILL)
    second.communicate()
    assert_gone(family)
    assert not workflow.record("second", "ddp", "vgg-compact", "2gpu").exists()
    assert workflow.run("--unlock").returncode == 0
    assert workflow.jobs()["train_cell"] >= 1


def test_an_unknown_gpu_is_told_before_any_job(workflow):
    """The report needs it, which is made when everything has been trained."""
    workflow.write_config(tiny_config() | {"cluster": {"gpu": "A1000000"}})
    result = workflow.run()
    assert result.returncode != 0
    assert "config: cluster.gpu = 'A1000000': is not in the table of GPUs" in result.stdout
    assert "Traceback" not in result.stdout
    assert not (workflow.folder / "results").exists()


def test_outcomes_are_results_and_are_printed_as_such(workflow):
    config = tiny_config()
    experiments = config["studies"]["tiny"]["experiments"]
    experiments["first"] |= {"strategies": ["single"], "gpus": [1], "lr": 1e12}
    experiments["second"] |= {"epochs": 100000, "time_limit_s": 5}
    workflow.write_config(config)
    workflow.hold()
    # No limit is reached before the second has an epoch behind it.
    reached = workflow.folder / "limits-are-reached"
    workflow.change_code(
        "workflow/stratbench/train/job.py",
        "self.origin_s + self.time_limit_s\n",
        f"self.origin_s + (self.time_limit_s if Path({str(reached)!r}).exists() else 1e6)\n",
    )
    workflow.change_code(
        "workflow/stratbench/train/agent.py", "CHECK_INTERVAL_S = 60.0", "CHECK_INTERVAL_S = 1.0"
    )
    tables = "results/tiny/tables"
    run = workflow.start(tables)
    logs = workflow.folder / "results/tiny/logs/second/single/vgg-compact/1gpu/rep0"
    until(lambda: text_of(RunFolder.from_log_dir(logs).epoch_results_path))
    workflow.hold("second")  # it waits for its limit without computing
    reached.touch()
    output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, output
    diverged = json.loads(workflow.record("first", "single", "vgg-compact", "1gpu").read_text())
    assert diverged["status"] == "diverged"
    late = json.loads(workflow.record("second", "single", "vgg-compact", "1gpu").read_text())
    assert late["status"] == "timeout"
    assert late["score"]["per_epoch"], "the epochs finished before the limit are kept"
    assert "div." in (workflow.folder / tables / "first/training_time.csv").read_text()
    assert ">5" in (workflow.folder / tables / "second/training_time.csv").read_text()
    assert workflow.jobs(tables) == {}


def test_a_config_mistake_is_one_message_before_any_job(workflow):
    config = tiny_config()
    config["studies"]["tiny"]["experiments"]["first"]["lr"] = "fast"
    workflow.write_config(config)
    result = workflow.run()
    assert result.returncode != 0
    message = "config: studies.tiny.experiments.first.lr = 'fast': must be a number"
    assert message in result.stdout
    assert "Traceback" not in result.stdout
    assert not (workflow.folder / "results").exists()
