"""An elastic cell with parameter servers, by real processes: killed, started again, ended early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_elastic_split import found_in, jobs

import invariants
from launching import WORKFLOW, LaunchedCell, settings, until
from stratbench.analysis.records.columns import COLUMNS, build_row_from_record
from stratbench.cell import record
from stratbench.extensions.audit.audit import RULES
from stratbench.extensions.audit.rule import AuditData
from stratbench.extensions.elastic.run_files import RunFiles
from stratbench.extensions.elastic.servers.journal import read_journal, write_run_end_mark
from stratbench.strategies import get_option_defaults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Slow enough to be disturbed.
SLOW = {"gpus": 2, "more": {"elastic": {"elastic": True}}, "warmup_steps": 1, "lr": 0.002}
SLOW |= {"slowdown": {"workers": [0, 1], "factor": 6}}


def events(launched: LaunchedCell, kind: str) -> list[dict[str, Any]]:
    """What the servers noted of this kind, once the cell runs."""
    return [e for e in read_journal(RunFiles(launched.folder).servers_dir) if e["event"] == kind]


def wait_for(launched: LaunchedCell, kind: str, count: int) -> list[dict[str, Any]]:
    """Wait until the servers have noted so many events of a kind; these."""

    def noted() -> list[dict[str, Any]] | None:
        assert launched.process.poll() is None, launched.process.communicate()[0]
        found = events(launched, kind)
        return found if len(found) >= count else None

    return until(noted)


def said_of(found: dict[str, Any]) -> list[str]:
    """What the audit says of a record, for a failed test."""
    row = found["cell"] | build_row_from_record(found, Path("no timeline"))
    evidence = AuditData(pd.DataFrame([row], columns=list(COLUMNS)), [found])
    return [f"{rule.id}: {each.values_text}" for rule in RULES for each in rule.check(evidence)]


def send(launched: LaunchedCell, number: int, signum: signal.Signals) -> None:
    """Send a signal to a worker's process."""
    os.kill(int(jobs(launched)[number]["id"]), signum)


def test_a_cell_whose_workers_and_servers_come_and_go_trains_every_batch_once(
    start_cell: Callable[..., LaunchedCell], warm: dict[str, str]
) -> None:
    options = get_option_defaults("ps-ormo") | {"servers": 2}
    s = settings("ps-ormo", epochs=12, options=options, **SLOW)
    first = start_cell(s, env=warm)
    wait_for(first, "incarnation", 1)
    second = start_cell(s, env=warm)  # while the first one's workers start
    code, output = second.finish()
    assert code == 1
    assert f"another launcher trains this cell: process {first.process.pid} on " in output
    wait_for(first, "begin", 2)
    send(first, 0, signal.SIGTERM)
    (left,) = wait_for(first, "leave", 1)
    assert left["worker"] == 0
    wait_for(first, "begin", 3)
    send(first, 1, signal.SIGKILL)
    (lost,) = wait_for(first, "loss", 1)
    assert lost["worker"] == 1
    assert "connection" in lost["reason"]  # closed, or reset: not silence
    wait_for(first, "score", 1)
    first.process.send_signal(signal.SIGTERM)
    assert first.finish()[0] == 128 + signal.SIGTERM
    # As servers say that end with an error. It was theirs, and is mended.
    write_run_end_mark(RunFiles(first.folder).servers_dir, "No space left on device")
    again = start_cell(s, env=warm)
    code, output = again.finish()
    assert code == 0, output
    assert "incarnation 2 of the servers: they resume from their saved state" in output
    found = again.read_record()
    record.validate_record(found)
    told = found["elastic"]
    assert told["servers"]["incarnations"][1]["tickets_before"] > 0
    # Servers that are asked to end save their state.
    assert told["servers"]["tickets_done_twice"] == 0
    assert [told[k] for k in ("incarnations", "restarts", "leaves")] == [2, 1, 1]
    assert 4 <= told["joins"] <= len(told["jobs"])
    assert not again.folder.job_secret_path.exists()
    assert not list(RunFiles(again.folder).servers_dir.glob("state*"))
    assert found_in(found) == set(), said_of(found)
    for name, plant in PLANTED.items():
        copy = json.loads(json.dumps(found))
        plant(copy["elastic"], copy)
        assert invariants.broken(copy), name


def change_tickets(server: dict[str, Any], by: int) -> None:
    server["tickets_settled"] += by


#: Faults that break an invariant of a record: of the block `elastic`, and of the whole.
PLANTED: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "a ticket was never settled": lambda e, r: change_tickets(r["server"]["servers"][0], -1),
    "a shard took a ticket twice": lambda e, r: bump(r["server"]["servers"][1]["staleness"][0]),
    "a worker did less than its tickets": lambda e, r: r["workers"][-1].update(steps=0),
    "the servers had one incarnation": lambda e, r: e.update(incarnations=1),
    "it never went on": lambda e, r: e.update(restarts=0),
    "tickets were done twice": lambda e, r: e["servers"].update(tickets_done_twice=4),
    "more were there than may be": lambda e, r: e["servers"].update(most_at_a_time=3),
    "an epoch was not evaluated": lambda e, r: e["servers"].update(evaluations=2),
    "incarnation 2 began before incarnation 1": lambda e, r: e["servers"]["incarnations"][1].update(
        began_s=-9.0
    ),
    "a job that trained has gone": lambda e, r: e["jobs"].remove(
        next(j for j in e["jobs"] if j["first_step_s"] is not None)
    ),
    "it is not elastic": lambda e, r: r.pop("elastic"),
}


def bump(counts: list[int]) -> None:
    counts[0] += 1


def test_a_cell_ends_at_its_target_and_a_late_worker_with_it(
    start_cell: Callable[..., LaunchedCell], warm: dict[str, str]
) -> None:
    launched = start_cell(
        settings(
            "ps-ormo", epochs=500, **SLOW | {"more": {"elastic": {"elastic": True, "ends_at": 0.9}}}
        ),
        env=warm,
    )
    code, output = launched.finish()
    assert code == 0, output
    found = launched.read_record()
    last = found["elastic"]["servers"]["last_epoch"]
    per_epoch = found["score"]["per_epoch"]
    assert len(per_epoch) == last + 1 < 500
    assert per_epoch[-1]["score"] >= 0.9 > max([e["score"] for e in per_epoch[:-1]], default=0)
    assert found["time"]["train_time_s"] == per_epoch[-1]["train_time_s"]
    late = [
        sys.executable,
        "-m",
        "stratbench.extensions.elastic.worker",
        str(launched.folder.job_path),
        "99",
    ]
    came = subprocess.run(late, env=os.environ | {"PYTHONPATH": str(WORKFLOW)}, timeout=300)
    assert came.returncode == 0
    assert launched.folder.read_worker_result(99) is None
    assert found_in(found) == set(), said_of(found)
