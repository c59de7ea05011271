"""Waits for a core: counted where others compute on it, and not where a process is slow by itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from launching import LIMIT_S, WORKFLOW, settings
from stratbench.telemetry.machine import core_waits
from stratbench.telemetry.machine.core_waits import CoreWaits

#: On one core beside a busy process: it tells how long it waited, and how long the span was.
SPAN = """
import json, os, subprocess, sys, threading, time
from stratbench.telemetry.machine.core_waits import CoreWaits

def compute():
    while time.thread_time() < 0.5:
        pass

def compute_in_a_thread():
    done, told = threading.Event(), threading.Event()
    threading.Thread(target=lambda: (compute(), done.set(), told.wait())).start()
    done.wait()
    return told.set

def sleep():
    time.sleep(1.0)

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
waits, begun_s = CoreWaits(), time.monotonic()
waits.begin_span()
let_end = globals()[sys.argv[1]]()
waits.end_span()
print(json.dumps([waits.longest_core_wait_s, time.monotonic() - begun_s]))
other.kill()
if let_end:
    let_end()
"""
needs_counts = pytest.mark.skipif(
    not core_waits.read_core_waits_by_thread_ns(), reason="this kernel counts no waits for a core"
)


@pytest.mark.slow
@needs_counts
@pytest.mark.parametrize(
    ("does", "least", "most"),
    [("compute", 0.25, 1.01), ("compute_in_a_thread", 0.25, 1.01), ("sleep", 0.0, 0.25)],
)
def test_a_process_waits_for_a_core_where_it_could_compute(does, least, most):
    """One that sleeps is as slow, and does not wait."""
    done = subprocess.run(
        [sys.executable, "-c", SPAN, does],
        env={"PYTHONPATH": str(WORKFLOW)},
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    waited_s, span_s = json.loads(done.stdout)
    assert least <= waited_s / span_s <= most


def test_spans_add_up_and_nothing_is_said_where_nothing_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(core_waits, "TASKS", str(tmp_path))
    waits = CoreWaits()
    waits.end_span()  # a clock that was started by nobody who counts
    for before, after in ((0, 10**9), (5 * 10**9, 7 * 10**9)):
        for waited_ns, act in ((before, waits.begin_span), (after, waits.end_span)):
            for thread, ns in (("1", waited_ns), ("2", waited_ns // 2)):
                (tmp_path / thread).mkdir(exist_ok=True)
                (tmp_path / thread / "schedstat").write_text(f"5 {ns} 1\n")
            act()
    assert waits.longest_core_wait_s == 3.0
    for path in tmp_path.glob("*/schedstat"):
        path.write_text("0 0 0\n")
    silent = CoreWaits()
    silent.begin_span()
    silent.end_span()
    assert silent.longest_core_wait_s is None


@needs_counts
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ps-async"])
def test_each_worker_records_its_wait(start_cell, warm, strategy):
    launched = start_cell(settings(strategy), env=warm)
    launched.finish_with(0)
    for worker in launched.read_record()["workers"]:
        assert worker["core_wait_s"] >= 0
