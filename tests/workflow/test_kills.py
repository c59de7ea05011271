"""Random kills of any process of a run: nothing finished is lost, nothing trained twice or by two at once.

A witness in the copy of the workflow, which shares nothing with the locks, notes which worker starts when
and which record is written, and looks whether workers of another launcher live.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tiny_study import Workflow, tiny_config

from launching import LIMIT_S, assert_gone, until
from stratbench.cell.locks import try_to_lock_file
from stratbench.study.program import LOCK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 12
KINDS = ("worker", "server", "launcher", "fork server", "sampler", "snakemake", "worker")
#: A file that makes the next launcher to write a record kill its Snakemake at that moment.
AT_RECORD = "kill-at-record"
#: A file that keeps the workers of the long cell from training.
HOLD = "hold"
#: A line of each module, before its imports.
FUTURE = "from __future__ import annotations\n"

WITNESS = f'''
"""Appended to by whoever starts or finishes something: JSON lines, in the order of their happening."""
import json, os, signal, time
from pathlib import Path
import psutil
ROOT = Path(__file__).parents[2]

def note(**entry):
    fd = os.open(ROOT / "witness.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, json.dumps(entry).encode() + b"\\n")
    os.close(fd)

def started(logs, launcher):
    me = psutil.Process()
    here = {{"cell": str(logs), "launcher": launcher}}
    note(event="start", pid=me.pid, created=me.create_time(), **here)
    for line in (ROOT / "witness.jsonl").read_text().split("\\n")[:-1]:
        other = json.loads(line)
        if other["event"] == "start" and other["cell"] == here["cell"]:
            if other["launcher"] != launcher and lives(other["pid"], other["created"]):
                note(event="two at once", other=other, **here)

def wait(logs):
    while "/second/" in str(logs) and (ROOT / "{HOLD}").exists():
        time.sleep(0.1)

def lives(pid, created):
    try:
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

def finished(record):
    note(event="finish", cell=str(record.resolve().parent).replace("/cells/", "/logs/"))
    if (ROOT / "{AT_RECORD}").exists():
        (ROOT / "{AT_RECORD}").unlink()
        os.kill(os.getppid(), signal.SIGKILL)
'''
IN_WORKER = """
from stratbench import witness
_main, _train = main, train_as_worker

def main(job_json, *ranks):
    job = Job.from_json(job_json)
    witness.started(job.folder.log_dir, job.origin_s)
    _main(job_json, *ranks)

def train_as_worker(job, *ranks):
    witness.wait(job.folder.log_dir)
    return _train(job, *ranks)
"""
IN_RECORD = """
from stratbench import witness
_write_record = write_record

def write_record(path, record):
    _write_record(path, record)
    witness.finished(Path(path))
"""


def at_import(folder: Path) -> str:
    """Code of a module: the next who imports it says so, and waits."""
    return f"""
import time as _time
from pathlib import Path as _Path
while _Path({str(folder / HOLD)!r}).exists():
    _Path({str(folder / "reached")!r}).touch()
    _time.sleep(0.1)
"""


def until_reached(folder: Path, run: subprocess.Popen) -> None:
    """Wait until someone waits there."""
    reached = folder / "reached"
    until(lambda: reached.exists() or run.poll() is not None)
    assert reached.exists(), "the run was over before"


@pytest.fixture
def ten_cells(tmp_path: Path) -> Workflow:
    """Ten cells of all kinds of strategies, one of them long, with a witness."""
    config = tiny_config()
    first, second = config["studies"]["tiny"]["experiments"].values()
    first |= {"strategies": ["single", "ddp", "fsdp", "ps-sync", "ps-async"], "threads": 1}
    second |= {"threads": 1}
    workflow = Workflow(tmp_path, config)
    package = tmp_path / "workflow/stratbench"
    (package / "witness.py").write_text(WITNESS)
    for path, code in (
        (package / "train/worker.py", IN_WORKER),
        (package / "cell/record.py", IN_RECORD),
    ):
        path.write_text(path.read_text() + code)
    return workflow


def processes(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """What runs there, with its kind."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd() != str(folder) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            command = " ".join(process.cmdline())
            output = Path(f"/proc/{process.pid}/fd/1").readlink().name
            if "-m snakemake" in command or "snakemake_forks" in command:
                yield "snakemake", process
            elif "train.launch" in command:
                yield "launcher", process
            elif "telemetry.sampler" in command:
                yield "sampler", process
            elif "train.forkserver" in command:
                forked = {"r": "worker", "s": "server"}.get(output[0]) if ".log" in output else None
                yield ("fork server" if forked is None or output == "rep0.log" else forked), process


def events(folder: Path) -> list[dict]:
    path = folder / "witness.jsonl"
    # The last line may be half written.
    return [json.loads(x) for x in path.read_text().split("\n")[:-1]] if path.exists() else []


def is_long(event: dict) -> bool:
    """Whether it is of the cell that lasts longer than Snakemake's next start."""
    return "/second/" in event["cell"]


def test_nothing_is_lost_and_nothing_trained_twice(ten_cells):
    folder = ten_cells.folder
    rng = random.Random(SEED)
    to_kill = list(KINDS)
    target = ("--until", "train_cell")
    (folder / AT_RECORD).touch()
    (folder / HOLD).touch()
    printed = folder / "printed"
    for _ in range(12):
        with printed.open("w") as file:
            run = ten_cells.start(*target, stdout=file)
        while run.poll() is None:
            time.sleep(rng.uniform(0.05, 1.0))
            there = list(processes(folder))
            training = any(kind == "worker" for kind, _ in there)
            seen = events(folder)
            at_long_cell = bool(seen) and is_long(seen[-1])
            # It lasts until the next Snakemake has started it again, and all has been killed but a
            # server, which it has none of.
            if not set(to_kill) - {"server"} and sum(is_long(e) for e in seen) > 1:
                (folder / HOLD).unlink(missing_ok=True)
            victims = [
                (kind, process)
                for kind, process in there
                if kind in to_kill
                and (kind == "snakemake") == (at_long_cell and "snakemake" in to_kill)
            ]
            if training and victims:
                rare = [(kind, process) for kind, process in victims if kind == "server"]
                kind, victim = rng.choice(rare or victims)
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
                    to_kill.remove(kind)
        if run.returncode == 0:
            break
        if run.returncode == -signal.SIGKILL:  # what it had started may live for a moment
            assert ten_cells.run("--unlock").returncode == 0
    assert run.returncode == 0, printed.read_text()
    assert len(to_kill) <= 1, "the run was over before the kills were"
    assert not (folder / AT_RECORD).exists()
    seen = events(folder)
    assert [e for e in seen if e["event"] == "two at once"] == []
    ends = [e["cell"] for e in seen if e["event"] == "finish"]
    assert len(ends) == len(set(ends)) == 10
    for cell in ends:
        mine = [e["event"] for e in seen if e["cell"] == cell]
        assert mine[-1] == "finish", (cell, mine)
    assert len(list(folder.glob("results/tiny/cells/**/record.json"))) == 10
    assert ten_cells.jobs(*target) == {}
    assert_gone([process for _, process in processes(folder)])


@pytest.mark.parametrize(
    ("target", "module"),
    [
        ("results/data/tiny-images/meta.json", "workload/data/prepare.py"),
        ("check", "workload/with_torch.py"),  # in the process that all others are forked from
        ("plan", "extensions/plan/footprint/footprint.py"),
        ("decide", "analysis/decision/candidates.py"),
    ],
)
def test_what_trains_nothing_ends_with_its_snakemake(workflow, target, module):
    path = workflow.folder / "workflow/stratbench" / module
    path.write_text(path.read_text().replace(FUTURE, FUTURE + at_import(workflow.folder)))
    hold = workflow.folder / HOLD
    hold.touch()
    run = workflow.start(target)
    try:
        until_reached(workflow.folder, run)
        family = psutil.Process(run.pid).children(recursive=True)
        assert family
        run.kill()
        run.wait()
        assert_gone(family)
    finally:
        hold.unlink()


def test_two_reports_of_what_is_there_are_not_written_at_once(workflow):
    path = workflow.folder / "workflow/stratbench/analysis/records/collect.py"
    held = f"{at_import(workflow.folder)}\ndef main"
    path.write_text(path.read_text().replace("\ndef main", held))
    hold = workflow.folder / HOLD
    hold.touch()
    first = workflow.start("partial")
    try:
        until_reached(workflow.folder, first)
        second = workflow.run("--nolock", "partial")
        assert second.returncode != 0
        sentence = "another run is writing to results/tiny/partial"
        assert sentence in second.stdout, second.stdout
        family = psutil.Process(first.pid).children(recursive=True)
        first.kill()
        first.wait()
        assert_gone(family)
    finally:
        hold.unlink()
    lock = try_to_lock_file(workflow.folder / "results/tiny/partial" / LOCK)
    assert lock is not None  # a third would be let in
    os.close(lock)


def test_a_snakemake_that_is_told_to_stop_as_it_chooses_jobs_ends(workflow):
    solver, at_work = workflow.folder / "cbc", workflow.folder / "at-work"
    solver.write_text(f"#!/bin/sh\ntouch {at_work}\nwhile [ -e {at_work} ]; do sleep 0.05; done\n")
    solver.chmod(0o755)
    workflow.variables["PATH"] = f"{workflow.folder}:{os.environ['PATH']}"
    run = workflow.start("--scheduler-ilp-solver", "COIN_CMD", "--until", "list_cells")
    until(at_work.exists)
    os.kill(run.pid, signal.SIGTERM)
    at_work.unlink()
    run.communicate(timeout=LIMIT_S)
