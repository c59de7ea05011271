"""Pauses of an elastic cell: it says that it was stopped."""

from __future__ import annotations

import math
import signal
import time

import psutil
import pytest

from launching import LIMIT_S, settings, until
from stratbench.cell import record
from stratbench.telemetry import pauses
from stratbench.telemetry.timeline import read_phase_intervals

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ps-ormo"])
def test_a_cell_that_is_stopped_while_it_trains_says_so(start_cell, strategy):
    """The pause counts towards no limit, and the audit calls the times unusable."""
    slow = {"workers": [0], "factor": 10}
    s = settings(
        strategy,
        gpus=2,
        more={"elastic": {"elastic": True}},
        epochs=15,
        lr=1e-6,
        slowdown=slow,
        warmup_steps=1,
    )
    launched = start_cell(s, time_limit_s=LIMIT_S)
    # Members of a group train once they have joined.
    until(
        lambda: any(
            p.phase == "train" or (p.phase == "join" and math.isfinite(p.end_s))
            for p in read_phase_intervals(launched.folder.list_phase_log_paths())
        )
    )
    tree = [launched.process, *psutil.Process(launched.process.pid).children(recursive=True)]
    for process in tree:
        process.send_signal(signal.SIGSTOP)
    time.sleep(2 * pauses.SHORTEST_S)
    for process in tree:
        process.send_signal(signal.SIGCONT)
    code, output = launched.finish()
    assert code == 0, output
    found = record.read_record(launched.record)
    assert found["status"] == "ok"
    [pause] = found["pauses"]
    assert pause["in_training"]
    assert pause["length_s"] > pauses.SHORTEST_S
