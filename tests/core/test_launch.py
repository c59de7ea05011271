"""How a cell ends: every end is caused for real, and what is left of it is looked at.

Results (ok, oom, timeout, diverged) leave a record and exit code 0; errors and signals leave no
record and no process.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import gzip
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from launching import (
    FOREVER,
    LIMIT_S,
    LIMITS_S,
    TINY,
    WORKFLOW,
    LaunchedCell,
    assert_gone,
    select_installed,
    settings,
    train_one_epoch,
    trains_one_epoch,
    until,
)
from stratbench.cell import record
from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.telemetry import heartbeat as heartbeat_module
from stratbench.telemetry.heartbeat import Heartbeat, read_heartbeat
from stratbench.telemetry.pauses import PauseWatch
from stratbench.train import agent, assemble, ending, forkserver, launch, standing
from stratbench.train import job as job_module
from stratbench.train.agent import Exits, NodeProcesses, ProcessExit
from stratbench.train.beside.profile import RECORDED_STEPS
from stratbench.train.ending import CellEnding
from stratbench.train.job import Job
from stratbench.train.nodes import srun as srun_module
from stratbench.train.running.runner import Runner, create_runner
from stratbench.train.standing import WorkerState
from stratbench.workload import users_code
from stratbench.workload.data.prepare import prepare_data_set
from stratbench.workload.data.prepared import read_verified_metadata
from stratbench.workload.data.sources import DataError

pytestmark = pytest.mark.timeout(300)


def family(launched: LaunchedCell) -> list[psutil.Process]:
    """The launcher's descendants: its fork server, workers, sampler."""
    return psutil.Process(launched.process.pid).children(recursive=True)


def commands(launched: LaunchedCell) -> Iterator[str]:
    """Their command lines, but for those that have just ended."""
    for process in family(launched):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield " ".join(process.cmdline())


def worker_pids(launched: LaunchedCell) -> dict[str, int]:
    """Process ids by name, as the launcher tells its sampler."""
    lines = launched.folder.get_pid_list_path(0).read_text().split("\n")[:-1]
    return {name: int(pid) for name, pid in (line.split() for line in lines)}


#: The user's: workers do not build the first as long as a file is there, and have no memory for the other.
NETWORKS = """
import time
from pathlib import Path

import torch

def stays(classes):
    while Path(__file__).with_name("stay").exists():
        time.sleep(0.05)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, classes))

class Large(torch.nn.Linear):
    def __init__(self, classes):
        super().__init__(256, classes)

    def forward(self, x):
        if len(x) == 8:
            torch.empty(2**50)
        return super().forward(x.flatten(1))
"""


@pytest.fixture
def own(tmp_path: Path, warm: dict[str, str]) -> Callable[..., dict[str, Any]]:
    """A function that makes a cell's settings and environment, for one of `NETWORKS`."""
    (tmp_path / "networks.py").write_text(NETWORKS)

    def make(strategy: str, name: str, **changes: Any) -> dict[str, Any]:
        spec = {"call": f"networks.{name}", "kwargs": {}, "wrap_classes": []}
        spec |= users_code.compute_code_fingerprint(spec["call"], [tmp_path])
        s = settings(strategy, model="net", own_model=spec, **changes)
        return {"s": s, "env": warm | {users_code.CODE_VARIABLE: str(tmp_path)}}

    return make


# ---------------------------------------------------------------- results


@pytest.mark.slow
def test_a_cell_that_finishes(start_cell, warm):
    launched = start_cell(settings("ddp", epochs=2), env=warm)
    launched.record.parent.mkdir(parents=True)
    launched.finish_with(0)
    found = record.read_record(launched.record)  # validates
    assert found["status"] == "ok"
    assert found["reason"] is None
    assert found["cell"] == launched.cell.as_dict()
    batch, t = found["batch"], found["time"]
    assert batch["samples_seen"] == batch["samples_applied"] == 2 * 64
    assert batch["updates_applied"] == 2 * batch["steps_per_epoch"] == 8
    assert t["step_ms"]["count"] == 2 * 8
    assert t["train_time_s"] == pytest.approx(
        max(w["train_time_s"] for w in found["workers"]), rel=1e-9
    )
    assert sum(t["epoch_times_s"]) <= t["train_time_s"] * (1 + 1e-9)
    parts = ("train_time_s", "setup_s", "data_s", "warmup_s", "eval_s")
    assert 0 < sum(t[part] for part in parts) < t["total_s"]
    assert [e["epoch"] for e in found["score"]["per_epoch"]] == [1, 2]
    assert found["score"]["final"] == found["score"]["per_epoch"][-1]["score"]
    assert found["provenance"]["device"] == "cpu"
    assert launched.folder.get_log_path("rank0").read_text().count("epoch ") == 2
    with launched.timeline.open() as f:
        rows = list(csv.DictReader(f))
    assert {row["id"] for row in rows if row["kind"] == "process"} == {"rank0", "rank1"}
    assert not (launched.logs / "failure.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ps-async"])
def test_a_profiled_cell(start_cell, warm, strategy):
    """The trace is beside the logs and in no figure; the rest of the record has its context."""
    launched = start_cell(settings(strategy, epochs=2, profile=True), env=warm)
    launched.record.parent.mkdir(parents=True)
    launched.finish_with(0)
    found = record.read_record(launched.record)
    assert found["batch"]["samples_seen"] == 2 * 64
    assert found["time"]["step_ms"]["count"] == 2 * 8
    with gzip.open(launched.logs / found["profile"]["trace"], "rt") as f:
        names = [event.get("name", "") for event in json.load(f)["traceEvents"]]
    steps = {name for name in names if name.startswith("ProfilerStep#")}
    assert len(steps) == RECORDED_STEPS
    assert any("allreduce" in name for name in names) == (strategy == "ddp")
    assert found["energy"] is None  # no GPU
    compute, communication = found["compute"], found["communication"]
    assert "mfu" not in compute
    assert compute["achieved_flops_per_s"] == pytest.approx(
        3 * compute["forward_flops_per_sample"] * found["time"]["throughput_samples_per_s"]
    )
    parameters_bytes = 4 * found["model"]["parameters"]
    # Of two workers a ring and a server ask the same; the flat gradients are aligned.
    assert communication["sent_bytes_per_step"] == pytest.approx(parameters_bytes, rel=1e-3)
    assert communication["received_bytes_per_step"] == pytest.approx(parameters_bytes, rel=0.15)
    # Workers of servers take steps of their own, a quick one more of them: each counts the same.
    steps_ms = [launched.folder.read_worker_result(rank)["step_ms"] for rank in (0, 1)]
    step_ms = statistics.mean(map(statistics.mean, steps_ms))
    part = "exposed_communication" if strategy == "ddp" else "server_wait"
    assert 0 < found["time"]["breakdown_ms"][part] < step_ms
    assert sum(found["time"]["breakdown_ms"].values()) == pytest.approx(step_ms, rel=0.05)


@pytest.mark.slow
def test_a_straggler_slows_every_step(start_cell, warm):
    """Factor 3 on one of two synchronous workers: each step takes three times that worker's own."""
    slow = {"workers": [1], "factor": 3}
    launched = start_cell(
        settings("ddp", global_batch=64, per_worker_batch=32, epochs=4, slowdown=slow), env=warm
    )
    launched.finish_with(0)
    ranks = [launched.folder.read_worker_result(r) for r in (0, 1)]
    done = ranks[1]["strategy"]["details"]["slowdown"]
    assert "slowdown" not in ranks[0]["strategy"]["details"]
    assert done["factor"] == done["mean_factor"] == 3
    step_ms = launched.read_record()["time"]["step_ms"]["p50"]
    assert 2 * done["step_without_ms"] < step_ms  # the sleep alone


@pytest.mark.slow
def test_time_limit(start_cell, warm):
    # The workers sleep most of it.
    s = settings("fsdp", epochs=FOREVER, lr=1e-6, slowdown={"workers": [0, 1], "factor": 20})
    for limit_s in LIMITS_S:
        launched = start_cell(s, time_limit_s=limit_s, env=warm)
        if trains_one_epoch(launched):
            break
    processes = [*family(launched), *map(psutil.Process, worker_pids(launched).values())]
    launched.finish_with(0)
    assert_gone(processes)
    found = record.read_record(launched.record)
    assert found["status"] == "timeout"
    assert f"{limit_s:g} s" in found["reason"]
    assert found["time"]["train_time_s"] is None
    assert found["time"]["time_limit_s"] == limit_s
    assert limit_s <= found["time"]["total_s"] < limit_s + LIMIT_S
    epochs = found["score"]["per_epoch"]
    assert len(epochs) >= 1
    assert epochs[0]["epoch"] == 1
    assert found["score"]["final"] is None
    assert found["score"]["best"] == max(e["score"] for e in epochs)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ps-async"])
def test_a_time_limit_before_the_first_step_is_an_error(start_cell, warm, strategy):
    launched = start_cell(settings(strategy), time_limit_s=0.01, env=warm)
    output = launched.finish_with(1)
    assert not launched.record.exists()
    evidence = json.loads((launched.logs / "failure.json").read_text())
    assert evidence["reason"] == (
        "no step within the cell's limit of 0.01 s; ranks 0, 1: 0 steps, in phase start "
        "[docs/troubleshooting.md#no-step-within]"
    )
    assert evidence["places"]["rank1"] == {"host": socket.gethostname()}
    assert f"rank1 ran on {socket.gethostname()}" in output


#: Imported by every Python that finds it: worker 1 trains three steps, then waits for something else.
SLEEPS = """
import time
from pathlib import Path
from stratbench.telemetry.heartbeat import Heartbeat

init, step = Heartbeat.__init__, Heartbeat.record_step

def keep(self, path):
    self.path = path
    init(self, path)

def step_and_sleep(self):
    step(self)
    if self._steps == 3 and self.path.name == "rank1.heartbeat":
        Path({file!r}).touch()
        time.sleep(600)

Heartbeat.__init__, Heartbeat.record_step = keep, step_and_sleep
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ps-sync"])
def test_a_cell_that_hangs_is_an_error_that_says_who_waits_for_whom(
    tmp_path, tiny_data, monkeypatch, strategy
):
    """Once worker 1 sleeps, the agent's clock jumps beyond the limit: no worker made progress for so long."""
    (tmp_path / "sitecustomize.py").write_text(SLEEPS.format(file=str(tmp_path / "sleeps")))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{WORKFLOW}")
    ahead_s = 0.0

    def now_s() -> float:
        return time.monotonic() + ahead_s

    def wait_and_look(sentinels, timeout):
        nonlocal ahead_s
        found = multiprocessing.connection.wait(sentinels, min(timeout, 0.05))
        heartbeats = [
            read_heartbeat(job.folder.get_heartbeat_path(rank), now_s()) for rank in (0, 1)
        ]
        # Worker 0 is in the step that needs worker 1.
        if (
            (tmp_path / "sleeps").exists()
            and heartbeats[0]
            and heartbeats[0].without_progress_s > 0.5
        ):
            ahead_s = 10_000.0
        return found

    clock = SimpleNamespace(monotonic=now_s, sleep=time.sleep)
    monkeypatch.setattr(agent, "time", clock)
    monkeypatch.setattr(standing, "time", clock)
    monkeypatch.setattr(agent, "wait", wait_and_look)
    monkeypatch.setattr(forkserver, "FOLDER_VARIABLE", "NO_SHARED_SERVER")
    s = settings(strategy, epochs=100, lr=1e-6)  # a server's worker draws them all at first
    RunFolder.from_log_dir(tmp_path / "logs").create_empty_folder()
    with job_for(s, tiny_data, tmp_path / "logs", 9_000) as job:
        exits, ended = create_runner(s).launch_processes(job, 1)
    assert exits.reached_time_limit
    assert ended.status == "error", ended
    assert "it hangs: no worker made progress for" in ended.reason
    assert "rank 1: 3 steps, in phase train, in step_and_sleep (sitecustomize.py:" in ended.reason
    waits = r"rank 0: \d steps, in phase train, in \w+ \(\w+\.py:\d+\)"
    assert re.search(waits, ended.reason), ended.reason
    assert (
        launch.store_failure_and_get_exit_code(tmp_path / "logs", job.cell, ended.reason, []) == 1
    )
    evidence = json.loads((tmp_path / "logs/failure.json").read_text())
    assert "sitecustomize.py" in evidence["stacks"]["rank1.stack"][0]


@pytest.mark.slow
def test_out_of_memory(start_cell, own):
    """A step asks for more than any machine has."""
    launched = start_cell(**own("ddp", "Large"))
    seen = set()
    until(lambda: seen.update(family(launched)) or launched.process.poll() is not None)
    launched.finish_with(0)
    assert_gone([*seen])
    found = record.read_record(launched.record)
    assert found["status"] == "oom"
    assert "allocate" in found["reason"]
    assert "\n" not in found["reason"]


# ---------------------------------------------------------------- errors


@pytest.mark.slow
def test_a_killed_worker(start_cell, warm):
    launched = start_cell(settings("ddp", epochs=FOREVER, lr=1e-6), env=warm)
    train_one_epoch(launched)
    processes = [*family(launched), *map(psutil.Process, worker_pids(launched).values())]
    psutil.Process(worker_pids(launched)["rank1"]).kill()
    output = launched.finish_with(1)
    assert_gone(processes)
    assert not launched.record.exists()
    evidence = json.loads((launched.logs / "failure.json").read_text())
    assert evidence["cell"] == launched.cell.as_dict()
    assert evidence["reason"].startswith("rank1: killed by SIGKILL")
    assert "rank1: killed by SIGKILL" in evidence["processes"]
    path = launched.folder.get_log_path("rank0")
    log = path.read_text()
    assert evidence["logs"][path.name] == log.splitlines()[-20:]
    assert str(launched.cell) in output
    assert "rank1: killed by SIGKILL" in output
    assert log.splitlines()[-1] in output


@pytest.mark.slow
def test_a_worker_killed_before_the_servers_know_it_is_not_waited_for(start_cell, own, tmp_path):
    (tmp_path / "stay").touch()
    launched = start_cell(**own("ps-async", "stays", epochs=4))
    pids = launched.folder.get_pid_list_path(0)
    until(lambda: pids.exists() and "rank1 " in pids.read_text())
    psutil.Process(worker_pids(launched)["rank1"]).kill()
    output = launched.finish_with(1)  # the servers would wait 600 s
    assert "rank1: killed by SIGKILL" in output
    assert not launched.record.exists()


@pytest.mark.slow
def test_a_worker_that_raises(start_cell, warm):
    """An error in Python: the traceback's end is in the evidence."""
    launched = start_cell(settings("ddp", model="no-such-model"), env=warm)
    output = launched.finish_with(1)
    assert not launched.record.exists()
    evidence = json.loads((launched.logs / "failure.json").read_text())
    assert "no-such-model" in evidence["reason"]
    assert "Traceback" in "\n".join(evidence["logs"][launched.folder.get_log_path("rank1").name])
    assert "rank0: exit code 1" in output


def test_missing_gpus(start_cell):
    launched = start_cell(settings("ddp", device="cuda"))
    output = launched.finish_with(1)
    assert "no GPU is visible" in output
    assert "device: cpu" in output
    assert "Traceback" not in output
    assert not launched.record.exists()
    assert "no GPU" in json.loads((launched.logs / "failure.json").read_text())["reason"]


def test_missing_data(start_cell, tmp_path):
    launched = start_cell(settings("ddp"), data_dir=tmp_path / "nowhere")
    output = launched.finish_with(1)
    assert str(tmp_path / "nowhere") in output
    assert "Traceback" not in output


def test_changed_data_fails_the_cell_instead_of_repeating_the_old_hash(
    start_cell, tiny_data, tmp_path
):
    folder = tmp_path / "changed"
    shutil.copytree(tiny_data, folder)
    with (folder / "train_inputs.npy").open("r+b") as f:
        f.seek(-1, 2)
        last = f.read(1)
        f.seek(-1, 2)
        f.write(bytes([last[0] ^ 1]))
    launched = start_cell(settings("ddp"), data_dir=folder)
    output = launched.finish_with(1)
    assert "train_inputs have changed since the data set was prepared" in output
    assert "Traceback" not in output
    assert not launched.record.exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data_spec": TINY | {"train_samples": 32}}, "'train_samples': 64"),
        ({"data_spec": TINY | {"seed": 1}}, "'seed': 1"),
        ({"data_spec": None}, "in place of None"),
        ({"dataset": "digits", "data_spec": None}, "name 'tiny' in place of 'digits'"),
    ],
)
def test_other_data_of_the_same_name_are_refused(tiny_data, tmp_path, changes, told):
    """Another config with the same results, or an earlier state of this one, has prepared them."""
    s = settings(**changes)
    for check in (
        partial(launch.check_code_and_data, tiny_data, s),
        partial(enter, job_for(s, tiny_data, tmp_path)),
    ):
        with pytest.raises(DataError, match="is not that of the cell's settings") as e:
            check()
        assert told in str(e.value)
        assert "\n" not in str(e.value)


def job_for(s: Settings, data: Path, logs: Path, limit_s: float = 0) -> AbstractContextManager[Job]:
    cell = Cell("tests", "tiny", s.strategy, s.model, s.dataset, s.gpus, 0)
    unused = [
        part for name in ("cell", "settings", "record", "timeline") for part in (f"--{name}", "")
    ]
    given = ["--data", str(data), "--logs", str(logs), "--time-limit-s", str(limit_s)]
    args = launch.parse_arguments([*unused, *given])
    return launch.create_job(cell, s, False, args)


def enter(job: AbstractContextManager[Job]) -> None:
    with job:
        pass


@pytest.mark.slow
def test_data_that_are_replaced_while_a_cell_starts_end_it(start_cell, warm, tiny_data, tmp_path):
    """Another config's preparation comes between the launcher's look and the worker's."""
    folder, other = tmp_path / "tiny", tmp_path / "other"
    shutil.copytree(tiny_data, folder)
    prepare_data_set("tiny", other, spec=TINY | {"seed": 1})
    code = (
        "import shutil\nfrom stratbench.train import launch\n"
        "from stratbench.train.running.runner import Runner\nlater = Runner.launch_processes\n"
        "def replaced(*args):\n"
        f"    shutil.rmtree({str(folder)!r})\n    shutil.move({str(other)!r}, {str(folder)!r})\n"
        "    return later(*args)\n"
        "Runner.launch_processes = replaced\nraise SystemExit(launch.main())\n"
    )
    s = settings("single", gpus=1, per_worker_batch=16)
    launched = start_cell(s, data_dir=folder, program=("-c", code), env=warm)
    returned, output = launched.finish()
    assert returned == 1
    assert f"{folder} was prepared again while the cell started" in output
    assert not launched.record.exists()


def test_data_that_are_replaced_while_a_cell_trains_make_no_record(tmp_path, tiny_data):
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_data, folder)
    with job_for(settings(), folder, tmp_path / "logs") as job:
        prepare_data_set("tiny", folder, spec=TINY | {"seed": 1})
        with pytest.raises(DataError, match="was prepared again while the cell trained"):
            assemble.make_record(job, CellEnding("timeout", "the cell's limit was reached"))


def test_results_that_cannot_be_written_are_one_message(start_cell, tmp_path):
    (tmp_path / "tests").write_text("in place of the folder")
    launched = start_cell(settings("ddp"))
    output = launched.finish_with(1)
    assert "FAILED: [Errno" in output
    assert "--- not kept: " in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("error", "reason", "traced"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), "No space left on device", False),
        (RuntimeError("unheard of"), "RuntimeError: unheard of", True),
    ],
)
def test_whatever_happens_is_told_and_kept(tmp_path, monkeypatch, capsys, error, reason, traced):
    """A full disk at the record or in TMPDIR, or a mistake of ours."""

    def fails(*_: object) -> int:
        raise error

    monkeypatch.setattr(launch, "train_locked_cell", fails)
    monkeypatch.setattr(agent, "handle_stop_signals", lambda action: None)
    cell = Cell("tests", "tiny", "ddp", "vgg-compact", "tiny", 2, 0)
    paths = [f"--{name}={tmp_path / name}" for name in ("data", "record", "timeline", "logs")]
    given = [f"--cell={json.dumps(cell.as_dict())}", f"--settings={settings('ddp').as_json()}"]
    assert launch.main([*given, *paths]) == 1
    assert f"cell {cell} FAILED: " in capsys.readouterr().out
    evidence = json.loads((tmp_path / "logs/failure.json").read_text())
    assert reason in evidence["reason"]
    assert ("unheard of" in "".join(evidence["logs"].get("launcher", []))) is traced


def test_a_locale_without_umlauts_stops_nothing(start_cell, tmp_path):
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    launched = start_cell(settings("ddp"), data_dir=tmp_path / "größe", env=os.environ | plain)
    output = launched.finish_with(1)
    assert "is not a complete prepared data set" in output
    assert "Traceback" not in output
    assert "gr" in json.loads((launched.logs / "failure.json").read_text())["reason"]


@pytest.mark.slow
def test_a_worker_of_servers_that_raises_while_building_ends_the_cell_at_once(start_cell, warm):
    """Worker 1 lives and waits with the servers for worker 0, whose slowdown makes no sense."""
    broken = {"workers": [0], "factor": "three"}
    launched = start_cell(settings("ps-sync", slowdown=broken, epochs=1000), env=warm)
    launched.finish_with(1)  # the servers would wait 600 s
    evidence = json.loads((launched.logs / "failure.json").read_text())
    assert "Error: " in evidence["reason"]
    assert "rank0: exit code 1" in evidence["processes"]


@pytest.mark.slow
def test_a_second_launcher_of_a_cell_waits_and_keeps_the_firsts_record(start_cell, own, tmp_path):
    (tmp_path / "stay").touch()
    first = start_cell(**own("ps-async", "stays"))
    until(lambda: first.folder.job_secret_path.exists())
    second = start_cell(**own("ps-async", "stays"))
    output = iter(second.process.stdout.readline, "")
    assert any("waiting: another launcher trains this cell" in line for line in output)
    (tmp_path / "stay").unlink()
    assert any("its record stays" in line for line in output)
    assert second.process.wait() == 0
    first.finish_with(0)
    assert record.read_record(first.record)["status"] == "ok"
    assert not first.folder.job_secret_path.exists()


@pytest.mark.slow
def test_a_launcher_ends_without_its_parent(start_cell, warm):
    """Here of a process that is not its parent, as of one that ended before it could look."""
    parent = subprocess.Popen(["sleep", "600"])
    launched = start_cell(settings("ddp", epochs=FOREVER), parent=parent.pid, env=warm)
    code, output = launched.finish()
    parent.kill()
    parent.wait()
    assert code == 128 + signal.SIGTERM
    assert f"process {parent.pid}, which had started this one, has ended" in output
    assert not launched.record.exists()


@pytest.mark.slow
def test_results_and_evidence_of_an_earlier_run_are_removed_first(start_cell):
    launched = start_cell(settings("ddp", device="cuda"))
    launched.finish()
    launched.record.parent.mkdir(parents=True, exist_ok=True)
    launched.record.write_text("old")
    launched.folder.write_worker_result(0, {"status": "old"})
    again = start_cell(settings("ddp", device="cuda"))
    again.finish()
    assert not launched.record.exists()
    assert launched.folder.read_worker_result(0) is None


# ---------------------------------------------------------------- signals


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_launcher_takes_everything_with_it(start_cell, warm, signum):
    """With a fork server of its own, and with one that it shares."""
    shared = {"env": warm} if signum == signal.SIGINT else {}
    launched = start_cell(settings("ddp", epochs=FOREVER, lr=1e-6), **shared)
    train_one_epoch(launched)
    workers = [*map(psutil.Process, worker_pids(launched).values())]
    processes = {*family(launched), *workers}
    assert len(workers) == 2
    assert len(processes) >= (3 if shared else 4)
    launched.process.send_signal(signum)
    code, output = launched.finish(timeout_s=LIMIT_S)
    assert_gone([*processes])
    assert code == 128 + signum
    assert signum.name in output
    assert "Traceback" not in output
    assert not launched.record.exists()


@pytest.mark.slow
def test_stopped_while_starting(start_cell):
    """The fork server is importing torch, and no worker exists yet."""
    launched = start_cell(settings("ddp", epochs=FOREVER, lr=1e-6))
    until(lambda: any("forkserver" in command for command in commands(launched)))
    processes = family(launched)
    launched.process.terminate()
    code, _ = launched.finish(timeout_s=LIMIT_S)
    assert_gone(processes)
    assert code == 128 + signal.SIGTERM
    assert not launched.record.exists()


@pytest.mark.slow
def test_a_killed_launcher_takes_everything_with_it(start_cell):
    launched = start_cell(settings("ddp", epochs=FOREVER, lr=1e-6))
    train_one_epoch(launched)
    processes = family(launched)
    launched.process.kill()
    assert_gone(processes)
    assert not launched.record.exists()


@pytest.mark.slow
def test_a_launcher_that_waits_leaves_the_log_of_the_one_that_trains(start_cell, warm):
    """Two folders with the same results: each launcher's shell appends to the cell's one log."""
    first = start_cell(settings("single", gpus=1, per_worker_batch=16, epochs=FOREVER))
    first.process.kill()  # for its command alone
    first.process.communicate()
    log = first.logs.with_name(f"{first.logs.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("an earlier training's\n")
    command = shlex.join(first.process.args)
    shell = f"exec {command} >> {shlex.quote(str(log))} 2>&1"
    started = []
    try:
        for _ in range(2):
            started.append(subprocess.Popen(["bash", "-c", shell], env=warm))
            train_one_epoch(replace(first, process=started[0]))
        until(lambda: "waiting: another launcher trains this cell" in log.read_text())
        said = log.read_text()
        assert said.startswith(f"cell {first.cell}\n")
        assert "earlier" not in said
        assert "\0" not in said
    finally:
        for process in started:
            process.terminate()
            process.wait()
    check_log_is_appended("train", "train.launch")


def check_log_is_appended(rules: str, module: str) -> None:
    """AssertionError if a rules file replaces the log of what it starts, which another may write."""
    text = (WORKFLOW / f"rules/{rules}.smk").read_text()
    command = text.partition(f"exec python -m stratbench.{module} ")[2]
    assert command.partition("{log:q}")[0].endswith('" >> ')


# ---------------------------------------------------------------- classification


def job_with(
    folder: Path,
    workers: list[dict | None],
    origin_s: float = 0.0,
    time_limit_s: float | None = 10,
) -> Job:
    """A job whose workers have written these files."""
    s = settings(gpus=len(workers))
    for rank, content in enumerate(workers):
        if content is not None:
            RunFolder(folder).write_worker_result(rank, content)
    cell = Cell("tests", "tiny", "ddp", s.model, s.dataset, s.gpus, 0)
    return Job(
        cell=cell, settings=s, data_dir=folder, data={"shape": [1, 16, 16], "train_samples": 64},
        folder=RunFolder(folder), workers_per_node=s.gpus,
        use_cuda=False, threads=1, origin_unix_s=0.0, origin_s=origin_s,
        time_limit_s=time_limit_s,
    )  # fmt: skip


def test_ranks_and_nodes_where_the_last_node_has_fewer(tmp_path):
    job = replace(job_with(tmp_path, [None] * 6), workers_per_node=4)
    assert [list(job.list_ranks_on_node(node)) for node in (0, 1)] == [[0, 1, 2, 3], [4, 5]]
    assert [job.get_node_of_rank(rank) for rank in range(6)] == [0, 0, 0, 0, 1, 1]
    assert [job.count_workers_on_node_of_rank(rank) for rank in range(6)] == [4, 4, 4, 4, 2, 2]
    assert (job.n_nodes, job.workers_per_node) == (2, 4)
    assert Job.from_json(job.to_json()) == job


OK = {"status": "ok", "reason": None}
OOM = {"status": "oom", "reason": "OutOfMemoryError: CUDA out of memory"}
LOST = {"status": "error", "reason": "RuntimeError: Connection closed by peer"}
DIVERGED = {"status": "diverged", "reason": "the training loss became nan"}


@pytest.mark.parametrize(
    ("workers", "codes", "timed_out", "expected"),
    [
        ([OK, OK], [0, 0], False, "ok"),
        ([DIVERGED, DIVERGED], [0, 0], False, "diverged"),
        ([LOST, OOM], [1, 3], False, "oom"),  # one's memory, the other's lost partner
        ([None, OOM], [None, 3], True, "oom"),
        ([OK, None], [0, None], True, "timeout"),
        ([LOST, None], [1, None], True, "error"),  # an error just before the deadline is one
        ([None, LOST], [-9, 1], False, "error"),
        ([OK, None], [0, 0], False, "error"),
        ([None, None], [255, None], False, "error"),
    ],
)
def test_classification(tmp_path, workers, codes, timed_out, expected):
    job = job_with(tmp_path, workers)
    processes = [ProcessExit(f"rank{rank}", code) for rank, code in enumerate(codes)]
    found = ending.classify_ending(job, Exits(processes, timed_out))
    assert found.status == expected
    assert (found.reason is None) == (expected == "ok")
    if codes[0] == -9:
        assert found.reason.startswith("rank0: killed by SIGKILL")


def stood(steps: int, hangs: bool, exit_code: int | None = None) -> dict:
    """As an agent notes a worker at the time limit."""
    return asdict(WorkerState(steps, "train", exit_code, 50.0 if hangs else 0.1, 0.2, hangs))


@pytest.mark.parametrize(
    ("standings", "status"),
    [
        ([stood(40, True), stood(41, True)], "error"),
        ([stood(40, False), stood(41, False)], "timeout"),  # slow
        ([stood(40, True), stood(41, False)], "timeout"),  # a server's worker is stuck, one goes on
        ([stood(40, True), stood(80, False, exit_code=0)], "error"),  # through, it does not go on
        ([stood(40, True)], "timeout"),  # nobody knows of the other node
        ([stood(0, False), stood(0, False)], "error"),  # no step
        ([stood(0, False), stood(1, False)], "timeout"),
        ([stood(3, False, exit_code=0), stood(3, False, exit_code=0)], "timeout"),
    ],
)
@pytest.mark.parametrize("strategy", select_installed("ddp", "ps-async"))
def test_a_slow_cell_is_told_from_one_that_hangs(tmp_path, strategy, standings, status):
    job = replace(job_with(tmp_path, [None, None]), settings=settings(strategy))
    job = replace(job, workers_per_node=1)
    for rank, standing_of in enumerate(standings):
        job.folder.write_worker_states(rank, {f"rank{rank}": standing_of})
    exits = Exits([ProcessExit(f"rank{rank}", None) for rank in (0, 1)], reached_time_limit=True)
    found = ending.classify_ending(job, exits)
    assert found.status == status
    assert found.reason.startswith(
        {
            "timeout": "the cell's limit",
            "error": ("it hangs", "no step")[not standings[0]["steps"]],
        }[status]
    )


#: What PyTorch 2.11 wrote, on the software GPU, as a communicator reported an error.
WATCHDOG = """\
[rank1]:[E1123 19:13:38.525298755 ProcessGroupNCCL.cpp:612] [Rank 1] Collective WorkNCCL(SeqNum=11, \
OpType=ALLREDUCE, NumelIn=389187, NumelOut=389187, Timeout(ms)=600000) raised the following async \
exception: NCCL error: remote process exited or there was a network error, NCCL version 2.28.9
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f in libc10.so)
[rank1]:[E1123 19:14:38.527562455 ProcessGroupNCCL.cpp:2119] [PG ID 0 PG GUID 0(default_pg) Rank 1] \
Process group watchdog thread terminated with exception: NCCL error: remote process exited or there \
was a network error, NCCL version 2.28.9
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with \
exception: NCCL error: remote process exited or there was a network error, NCCL version 2.28.9
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f in libc10.so)
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            WATCHDOG,
            "rank1: Collective WorkNCCL(SeqNum=11, OpType=ALLREDUCE, NumelIn=389187, NumelOut=389187, "
            "Timeout(ms)=600000) raised the following async exception: NCCL error: remote process exited "
            "or there was a network error, NCCL version 2.28.9",
        ),
        (
            WATCHDOG[WATCHDOG.index("[rank1]:[E1123 19:14") :],
            "rank1: Process group watchdog thread terminated with exception: NCCL error: remote process "
            "exited or there was a network error, NCCL version 2.28.9",
        ),
        ("free(): invalid pointer\n", "rank1: killed by SIGABRT"),
        (None, "rank1: killed by SIGABRT"),
    ],
)
def test_what_nccls_watchdog_says_is_the_reason(tmp_path, log, reason):
    job = job_with(tmp_path, [None, None])
    if log is not None:
        job.folder.get_log_path("rank1").write_text(log)
    exits = Exits([ProcessExit("rank0", None), ProcessExit("rank1", -6)], reached_time_limit=False)
    assert ending.classify_ending(job, exits) == ending.CellEnding("error", reason)


def test_nccls_watchdog_waits_for_no_dump(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", raising=False)
    seen = []

    def fork_server(may_share: bool):
        seen.append(os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"])
        raise OSError("enough is seen")

    monkeypatch.setattr(agent, "run_fork_server", fork_server)
    for given in (None, "90000"):
        if given:
            monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", given)
        with pytest.raises(OSError, match="enough"):
            agent.run_node_processes(job_with(tmp_path, [None]), 0)
    assert seen == ["1000", "90000"]


@pytest.mark.parametrize("strategy", select_installed("ddp", "ps-sync"))
def test_out_of_memory_beside_a_stranger_is_an_error(tmp_path, strategy):
    others = {"processes": [{"pid": 4711, "bytes": int(79.5 * 2**30)}], "others_bytes": 1}
    crowded = OOM | {"others": others}
    job = replace(job_with(tmp_path, [LOST, crowded]), settings=settings(strategy))
    gpu = {"index": 3, "uuid": "GPU-d8c5e28f"}
    job.folder.write_process_locations(0, {"rank1": {"host": "node7", "gpu": gpu}})
    exits = Exits([ProcessExit("rank0", 1), ProcessExit("rank1", 3)], reached_time_limit=False)
    found = ending.classify_ending(job, exits)
    assert found.status == "error"
    assert found.reason.startswith(
        "rank1 had no memory left on GPU 3 (GPU-d8c5e28f) of node7, of which others used a part: "
        "process 4711 79.5 GiB (85,362,475,008 bytes). "
    )
    # One that has its GPU to itself says as much of the strategy as alone.
    job.folder.write_worker_result(0, OOM | {"others": None})
    assert ending.classify_ending(job, exits) == ending.CellEnding("oom", OOM["reason"])


def test_a_timeout_is_one_although_srun_does_not_end(tmp_path, monkeypatch):
    """It waits for a node that is gone, say."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 0.1; done\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(srun_module, "SRUN_END_S", 0.2)
    # The limit was reached before the 15 s that the agents have to keep it themselves.
    job = replace(job_with(tmp_path, [OK, None], time.monotonic() - 30), workers_per_node=1)
    exits = Runner().launch_with_srun(job, cpus_per_node=1)
    assert ending.classify_ending(job, exits).status == "timeout"


def test_a_kill_by_the_kernel_for_want_of_memory_is_oom(tmp_path, monkeypatch):
    job = job_with(tmp_path, [None, LOST])
    exits = Exits([ProcessExit("rank0", -9), ProcessExit("rank1", 1)], reached_time_limit=False)
    monkeypatch.setattr(ending, "count_oom_kills", lambda: 5)
    assert ending.classify_ending(job, exits, oom_kills_before=4).status == "oom"
    assert (
        ending.classify_ending(job, exits, oom_kills_before=5).status == "error"
    )  # one of a cell before


GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [192.0.2.2]:9944"


@pytest.mark.parametrize(
    ("reasons", "timed_out", "cause"),
    [
        ([None, GONE], True, None),  # node 0 ended its worker at the limit, a moment before
        ([None, GONE], False, GONE),
        ([GONE, "ValueError: broken"], False, "ValueError: broken"),
        ([GONE, "ValueError: broken"], True, "ValueError: broken"),
    ],
)
def test_the_loss_of_a_worker_is_no_cause_of_an_end(tmp_path, reasons, timed_out, cause):
    results = [r and {"status": "error", "reason": r} for r in reasons]
    job = job_with(tmp_path, results, time.monotonic() - 30)
    exits = Exits([ProcessExit(f"rank{i}", r and 1) for i, r in enumerate(reasons)], timed_out)
    reason = ending.classify_ending(job, exits).reason
    assert reason.startswith(cause or "no step within the cell's limit of 10 s")


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        ("0::/slurm/job_7\n", "slurm/job_7/memory.events", "low 0\noom 2\noom_kill 3\n"),
        (
            "5:cpuset:/\n4:memory:/slurm/job_7/step_batch\n0::/\n",
            "memory/slurm/job_7/step_batch/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_kills_for_memory_are_counted_in_control_groups_of_both_versions(
    tmp_path, groups, file, text
):
    proc = tmp_path / "cgroup"
    assert ending.count_oom_kills(proc, tmp_path) == 0
    proc.write_text(groups)
    assert ending.count_oom_kills(proc, tmp_path) == 0
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert ending.count_oom_kills(proc, tmp_path) == 3


def test_total_and_finish_are_one_instant_however_long_the_rest_takes(
    tmp_path, tiny_data, monkeypatch
):
    """git may take seconds on a slow disk: they are in no figure."""
    meta = read_verified_metadata(tiny_data)
    job = replace(job_with(tmp_path, [None, None]), data_dir=tiny_data, data=meta)
    now_s = 100.0

    def slow_git(folder: Path) -> None:
        nonlocal now_s
        now_s += 60.0

    date = SimpleNamespace(
        now=lambda zone: datetime.fromtimestamp(now_s, zone), fromtimestamp=datetime.fromtimestamp
    )
    monkeypatch.setattr(job_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(assemble, "datetime", date)
    monkeypatch.setattr(assemble, "read_git_state", slow_git)
    monkeypatch.setattr(assemble, "INSTALLED", False)
    found = assemble.make_record(job, ending.CellEnding("timeout", "slow"))
    started, finished = (found["provenance"][end] for end in ("started", "finished"))
    span = datetime.fromisoformat(finished) - datetime.fromisoformat(started)
    assert now_s == 160
    assert found["time"]["total_s"] == span.total_seconds() == 100


class FakeProcess:
    """A process that never ends, for the deadline."""

    exitcode = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.sentinel, self._other_end = multiprocessing.Pipe()


def test_supervise_ends_at_the_deadline_whatever_the_date(tmp_path, monkeypatch):
    begun = time.monotonic()
    job = job_with(tmp_path, [None], origin_s=begun, time_limit_s=0.3)
    dates = itertools.cycle([time.time() + 7200, time.time() - 7200])
    monkeypatch.setattr(time, "time", lambda: next(dates))  # somebody sets the clock
    exits = agent.wait_for_exits(NodeProcesses(job, [FakeProcess("rank0")]), PauseWatch())
    assert 0.3 <= time.monotonic() - begun < LIMIT_S
    assert exits.reached_time_limit
    assert exits.processes == [ProcessExit("rank0", None)]


@pytest.mark.parametrize(
    ("steps", "alive", "hung"), [((3, 4), (), True), ((3, 4), (1,), False), ((3, 0), (), False)]
)
def test_without_a_limit_a_cell_ends_when_no_worker_gets_on(
    tmp_path, monkeypatch, steps, alive, hung
):
    """Half an hour later all are quiet, one has just made progress, or one has never trained."""
    job = job_with(tmp_path, [None, None], time.monotonic(), time_limit_s=None)
    heartbeats = [Heartbeat(job.folder.get_heartbeat_path(rank)) for rank in (0, 1)]
    for heartbeat, taken in zip(heartbeats, steps, strict=True):
        for _ in range(taken):
            heartbeat.record_step()
    later_s = time.monotonic() + 1800
    monkeypatch.setattr(heartbeat_module, "monotonic_ns", lambda: round(later_s * 1e9))
    for rank in alive:
        heartbeats[rank].record_step()
    monkeypatch.setattr(standing, "time", SimpleNamespace(monotonic=lambda: later_s))
    monkeypatch.setattr(agent, "CHECK_INTERVAL_S", 0.01)
    workers = [FakeProcess("rank0"), FakeProcess("rank1")]
    assert standing.are_all_workers_hung(job, workers, 0.0) is hung
    if hung:
        exits = agent.wait_for_exits(NodeProcesses(job, workers), PauseWatch())
        assert exits == Exits([ProcessExit(w.name, None) for w in workers], False, has_hung=True)


def test_a_cell_that_was_ended_because_it_hung_is_an_error(tmp_path):
    job = job_with(tmp_path, [None, None], time_limit_s=None)
    exits = Exits(
        [ProcessExit(f"rank{r}", None) for r in (0, 1)], reached_time_limit=False, has_hung=True
    )
    assert ending.classify_ending(job, exits) == ending.CellEnding(
        "error", "it hangs: no worker made progress"
    )
    job.folder.write_worker_states(0, {"rank0": stood(3, True), "rank1": stood(2, True)})
    assert ending.classify_ending(job, exits).reason == (
        "it hangs: no worker made progress for 50.0 s, and no step before had taken longer than 0.2 s; "
        "rank 1: 2 steps, in phase train; rank 0: 3 steps, in phase train "
        "[docs/troubleshooting.md#no-worker-made-progress]"
    )


def test_who_did_not_come_to_a_collective_is_named(tmp_path):
    """gloo's error, as it was on two processes of which one slept."""
    reason = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 600000ms for recv operation to complete"
    job = job_with(tmp_path, [{"status": "error", "reason": reason}, None])
    exits = Exits([ProcessExit("rank0", 1), ProcessExit("rank1", None)], reached_time_limit=False)
    assert ending.classify_ending(job, exits).reason == reason
    job.folder.write_worker_states(
        0, {"rank0": stood(4, True, exit_code=1), "rank1": stood(3, True)}
    )
    found = ending.classify_ending(job, exits)
    assert found.status == "error"
    assert found.reason.startswith(f"{reason}; it hangs: no worker made progress for 50.0 s")
    assert "; rank 1: 3 steps, in phase train [docs/troubleshooting.md" in found.reason


#: Two threads as faulthandler wrote them, in a backward that FSDP's collective stopped.
STACKS = """\
Thread 0x00007f3497fff6c0 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 4652 in reduce_scatter_tensor
  File "/venv/torch/autograd/function.py", line 317 in apply

Thread 0x00007f34a4ef76c0 (most recent call first):
  <no Python frame>

Current thread 0x00007f352f3d4b80 (most recent call first):
  File "/venv/torch/autograd/graph.py", line 869 in _engine_run_backward
  File "/code/strategies/base.py", line 396 in step
"""


@pytest.mark.parametrize(
    ("text", "call", "length"),
    [
        (STACKS, "reduce_scatter_tensor (distributed_c10d.py:4652)", 4),
        (STACKS.replace("_engine_run_backward", "join"), "join (graph.py:869)", 2),
        ("", None, 0),
        ("Thread 0x1 (most rec", None, 0),  # cut short
        (None, None, 0),
    ],
)
def test_where_a_process_is_by_its_stacks(tmp_path, text, call, length):
    if text is not None:
        (tmp_path / "stack").write_text(text)
    assert standing.read_innermost_call(tmp_path / "stack") == call
    assert len(standing.read_stack_calls(tmp_path / "stack")) == length


@pytest.mark.parametrize("ahead_s", [0, 7200, -7200])
def test_another_nodes_clock_may_be_wrong(tmp_path, monkeypatch, ahead_s):
    """15 s of the cell had passed when the node was called; its date is right, or hours off."""
    clock = SimpleNamespace(time=lambda: 1e9, monotonic=lambda: 500.0)
    monkeypatch.setattr(job_module, "time", clock)
    job = replace(job_with(tmp_path, [None]), origin_unix_s=1e9 + ahead_s - 20)
    there = job.make_copy_for_node(15, tmp_path / "own")
    assert (there.folder.path, there.folder.node_local_dir) == (job.folder.path, tmp_path / "own")
    assert there.elapsed_s == (20 if ahead_s == 0 else 15)
    assert there.deadline_s - there.origin_s == job.time_limit_s


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_room_on_the_disk_the_reason_names_the_file(start_cell, warm):
    """No file may have more than 6000 bytes, which ends the write of a record as a full disk does."""
    launched = start_cell(
        settings(),
        env=warm | {"PYTHONDONTWRITEBYTECODE": "1"},  # it would be cut off
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000)),
    )
    output = launched.finish_with(1)
    [failed] = [line for line in output.splitlines() if " FAILED: " in line]
    assert "File too large" in failed
    assert failed.endswith(("/record.json'", "/timeline.csv'"))  # more samples on a busy machine
    assert "Traceback" not in output
    assert not launched.record.exists()


@pytest.mark.parametrize(
    ("module", "imported", "exit_code"),
    [("launch", "argparse", -signal.SIGINT), ("forkserver", "socket", 7)],
)
def test_ctrl_c_while_a_process_still_imports_leaves_no_traceback(
    tmp_path, module, imported, exit_code
):
    """The launcher ends, and the fork server leaves it to its launchers."""
    pressed = "import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\nsys.exit(7)\n"
    (tmp_path / f"{imported}.py").write_text(pressed)
    found = os.pathsep.join([str(tmp_path), str(WORKFLOW)])
    done = subprocess.run(
        [sys.executable, "-m", f"stratbench.train.{module}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": found},
    )
    assert (done.returncode, done.stdout) == (exit_code, "")
