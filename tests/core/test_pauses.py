"""Pauses of a cell: they are noticed, told from a slow machine, and spoil no figure unseen."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from launching import LIMIT_S, WORKFLOW, LaunchedCell, settings, until
from stratbench.cell import record
from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.telemetry import pauses
from stratbench.telemetry.heartbeat import Heartbeat
from stratbench.telemetry.pauses import Pause, iter_worker_pauses
from stratbench.telemetry.timeline import SAMPLE_COLUMNS, PhaseLog
from stratbench.train import agent, forkserver, standing
from stratbench.train.agent import Exits
from stratbench.train.ending import CellEnding
from stratbench.train.job import Job
from stratbench.train.nodes.paused import build_pauses_entry, is_deadline_over
from stratbench.train.running.runner import Runner

pytestmark = pytest.mark.timeout(300)

#: Watches until its input ends, then tells its pauses. Of a span in which its thread waited for a core
#: for long enough to be a pause, it tells at once what it makes of it: others may take that core later.
WATCHES = """
import json, sys
from stratbench.telemetry import pauses

pauses.PERIOD_S, pauses.SHORTEST_S = map(float, sys.argv[1:])
between = pauses._find_pause

def telling(before, now, shortest_s):
    pause = between(before, now, shortest_s)
    if now.waited_s - before.waited_s > shortest_s:
        print(json.dumps({"starved": pause}), flush=True)
    return pause

pauses._find_pause = telling
watch = pauses.PauseWatch()
watch.wait_for_latest_reading()
print(watch._start_thread.native_id, flush=True)
sys.stdin.read()
watch.stop()
print(json.dumps(watch.pauses))
"""


@contextmanager
def watching(
    period_s: float = pauses.PERIOD_S, shortest_s: float = pauses.SHORTEST_S
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that watches for its own pauses, as `WATCHES` says, and the thread that does."""
    environment = os.environ | {"PYTHONPATH": str(WORKFLOW)}
    with subprocess.Popen(
        [sys.executable, "-c", WATCHES, str(period_s), str(shortest_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> list[Pause]:
    """The pauses of `watching`, which ends."""
    output, _ = process.communicate(timeout=LIMIT_S)
    return [Pause(*entry) for entry in json.loads(output.splitlines()[-1])]


def test_a_stopped_process_has_a_pause():
    with watching() as (process, _):
        process.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        begun_s = time.monotonic()
        time.sleep(2 * pauses.SHORTEST_S)
        ended_s = time.monotonic()
        process.send_signal(signal.SIGCONT)
        (pause,) = told(process)
    assert pause.length_s > ended_s - begun_s - 2 * pauses.PERIOD_S
    assert pause.begin_s < begun_s
    assert ended_s - 2 * pauses.PERIOD_S < pause.end_s
    assert pause.asleep_s < 0.1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no counts of waits")
def test_a_process_that_gets_no_core_has_none():
    core = min(os.sched_getaffinity(0))
    hogs = []
    try:
        # The kernel starves a thread for seconds at its own discretion, and for a third of one soon.
        with watching(period_s=0.05, shortest_s=0.3) as (process, thread):
            os.sched_setaffinity(thread, {core})
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            for _ in range(4):
                hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                os.sched_setaffinity(hog.pid, {core})
                hogs.append(hog)
            assert json.loads(process.stdout.readline()) == {"starved": None}
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def test_sleep_of_the_machine_is_a_pause_that_its_clock_does_not_count():
    before, now = pauses._ClockReading(10.0, 100.0, 0.0), pauses._ClockReading(10.6, 3700.6, 0.1)
    pause = pauses._find_pause(before, now, pauses.SHORTEST_S)
    assert pause == pytest.approx((10.0, 3600.0, 3600.0), abs=0.01)
    assert pause.end_s == pytest.approx(10.0, abs=0.01)


@pytest.mark.parametrize(("cpu_s", "kept"), [((5.0, 5.0, 5.01), True), ((5.0, 6.0, 7.0), False)])
def test_a_pause_of_the_agent_alone_is_none_of_the_workers(tmp_path, cpu_s, kept):
    """The sampler and a user's command have sessions of their own, which Ctrl-Z does not stop."""
    rows = [
        {"t_s": t_s, "kind": "process", "id": "rank0", "cpu_time_s": used_s}
        for t_s, used_s in zip((12, 15, 18), cpu_s, strict=True)
    ]
    lines = [",".join(str(row.get(column, "")) for column in SAMPLE_COLUMNS) for row in rows]
    path = tmp_path / "node.csv"
    path.write_text("\n".join([",".join(SAMPLE_COLUMNS), *lines]) + "\n")
    pause = Pause(110.0, 10.0, 0.0)
    assert list(iter_worker_pauses([pause], path, 100.0)) == [pause] * kept


@contextmanager
def stopped(launched: LaunchedCell, in_group: bool = False) -> Iterator[None]:
    """Stop a cell's launcher and all that it has started, as SLURM does, or its process group as Ctrl-Z."""
    launcher = psutil.Process(launched.process.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    if in_group:
        processes = [p for p in processes if os.getpgid(p.pid) == os.getpgid(launcher.pid)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


#: Imported by every Python that finds it: workers stay in a step as long as there is a file.
STAYS = """
import time
from pathlib import Path
from stratbench.telemetry.heartbeat import Heartbeat

step, folder = Heartbeat.record_step, Path({folder!r})

def step_and_stay(self):
    step(self)
    (folder / "trains").touch()
    while (folder / "stay").exists():
        time.sleep(0.01)

Heartbeat.record_step = step_and_stay
"""


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "in_group"), [("ddp", True), ("ps-sync", False)])
def test_a_cell_that_is_stopped_while_it_trains_trains_again(
    start_cell, tmp_path, strategy, in_group
):
    (tmp_path / "sitecustomize.py").write_text(STAYS.format(folder=str(tmp_path)))
    (tmp_path / "stay").touch()
    # A launcher's own fork server has the launcher's session, and a shared one that of the tests.
    environment = {k: v for k, v in os.environ.items() if k != forkserver.FOLDER_VARIABLE}
    launched = start_cell(
        settings(strategy, lr=1e-6),
        workflow=Path(f"{tmp_path}{os.pathsep}{WORKFLOW}"),
        env=environment,
        start_new_session=True,
    )
    until((tmp_path / "trains").exists)
    with stopped(launched, in_group):
        time.sleep(2 * pauses.SHORTEST_S)
        (tmp_path / "stay").unlink()
    output = launched.finish_with(0)
    assert re.search(r"paused for \d+\.\d s \(.*\) while it trained; it trains again", output)
    found = record.read_record(launched.record)
    assert found["status"] == "ok"
    assert "pauses" not in found


def test_a_deadline_is_put_off_by_pauses():
    watch = pauses.PauseWatch()
    assert is_deadline_over(time.monotonic() - 1, watch)
    watch.pauses.append(Pause(time.monotonic() - 100, 90.0, 0.0))
    assert not is_deadline_over(time.monotonic() - 80, watch)
    assert is_deadline_over(time.monotonic() - 100, watch)
    watch.stop()


def paused(job: Job, **pause: float) -> None:
    """Have the run folder say that the job's node was paused in the middle of 100 s of training."""
    phases = PhaseLog(job.folder.get_phase_log_path(0), 0, job.origin_s)
    phases.write_phase_event("train", "start", at_s=job.origin_s)
    phases.write_phase_event("train", "end", at_s=job.origin_s + 100)
    entry = {"begin_s": 50.0, "length_s": 30.0, "asleep_s": 0.0}
    job.folder.write_pauses_of_workers(0, [entry | pause])


@pytest.mark.parametrize(
    ("status", "pause", "launches"),
    [
        ("ok", {}, 2),
        ("ok", {"begin_s": 110.0}, 1),  # while it was evaluated
        ("ok", {"length_s": 0.9}, 1),  # in 100 s
        ("timeout", {}, 2),
        ("error", {"begin_s": 110.0}, 2),  # a collective may have been waited for too long
        ("oom", {}, 1),
    ],
)
def test_what_a_pause_has_spoiled_trains_once_more(tmp_path, monkeypatch, status, pause, launches):
    endings = []

    def end(self: Runner, job: Job, cpus: int) -> tuple[Exits, CellEnding]:
        paused(job, **pause)
        endings.append(CellEnding(status, None))
        return Exits([], False), endings[-1]

    monkeypatch.setattr(Runner, "launch_processes", end)
    first = job_with(tmp_path / "run")
    job, _, ending = Runner().run(first, SimpleNamespace(cpus_per_node=1))
    assert len(endings) == launches
    assert ending is endings[-1]
    assert (job.origin_s > first.origin_s) is (launches == 2)
    entry = {"node": 0, "begin_s": 50.0, "length_s": 30.0, "asleep_s": 0.0} | pause
    assert build_pauses_entry(job, Runner().read_training_phases) == [
        entry | {"in_training": entry["begin_s"] < 100}
    ]


def job_with(folder: Path, **changes: Any) -> Job:
    """A job of one worker that began 200 s ago."""
    folder.mkdir()
    s, began_s = settings(gpus=1), time.monotonic() - 200
    cell = Cell("tests", "tiny", "ddp", s.model, s.dataset, s.gpus, 0)
    fields = {
        "cell": cell, "settings": s, "data_dir": folder, "data": {}, "folder": RunFolder(folder),
        "workers_per_node": 1, "use_cuda": False, "threads": 1, "origin_unix_s": 0.0,
        "origin_s": began_s, "time_limit_s": 100.0,
    }  # fmt: skip
    return Job(**fields | changes)


def test_time_in_a_pause_counts_towards_no_limit(tmp_path):
    """200 s after its begin the cell, whose limit is 100 s, has trained for 50 s."""
    job, watch = job_with(tmp_path / "run"), pauses.PauseWatch()
    assert agent.compute_extended_deadline_s(job, watch) == job.deadline_s
    watch.pauses.append(Pause(job.origin_s + 10, 150.0, 0.0))
    assert agent.compute_extended_deadline_s(job, watch) == pytest.approx(
        time.monotonic() + 50, abs=40
    )
    watch.stop()


def test_a_pause_is_no_hang(tmp_path):
    """The worker, quiet since it was stopped an hour ago, has just been woken."""
    job, worker = job_with(tmp_path / "run"), SimpleNamespace(name="rank0", exitcode=None, pid=None)
    Heartbeat(job.folder.get_heartbeat_path(0)).record_step()
    later_s = time.monotonic() + 3600
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standing, "time", SimpleNamespace(monotonic=lambda: later_s))
        assert standing.are_all_workers_hung(job, [worker], 0.0)
        assert not standing.are_all_workers_hung(job, [worker], later_s - 1)
        standing.write_worker_states(
            job, 0, [worker], reached_time_limit=False, awake_since_s=later_s - 1
        )
    assert not job.folder.read_worker_states()["rank0"]["is_hung"]
