"""Cells that a command of the user's trains: started, watched from outside, ended, and what it reports."""

from __future__ import annotations

import sys

import pytest

from launching import settings
from stratbench.cell import record
from stratbench.cell.settings import Settings
from stratbench.strategies import option_defaults, strategy_class
from stratbench.workload.users_code import digest_of

pytestmark = pytest.mark.timeout(300)

#: A trainer that reports what it did not do, for its launcher: so many steps on a batch, and a score an epoch.
TRAINER = """
import os, sys, time
from stratbench.report import Report
report = Report(parameters=1000)
for epoch in range({epochs}):
    for step in range(4):
        time.sleep(0.01)
        report.step({batch}, 0.5)
    report.pause()
    time.sleep(0.02)
    report.score(0.5, test_loss=0.7)
"""


def of_command(command: list[str], **changes) -> Settings:
    """Settings of a cell that `command` trains, as a study resolves them."""
    options = option_defaults("command") | {"command": command}
    files = strategy_class("command").files(options)
    options["sha256"] = digest_of(files) if files else None
    return settings("command", options=options, **changes)


@pytest.fixture
def trainer(tmp_path):
    """Writes a trainer; returns the settings of its cell."""

    def write(code: str = TRAINER, epochs: int = 1, batch: int = 16, **changes) -> Settings:
        path = tmp_path / "train.py"
        path.write_text(code.replace("{epochs}", str(epochs)).replace("{batch}", str(batch)))
        return of_command([sys.executable, str(path)], epochs=epochs, **changes)

    return write


def test_a_command_becomes_a_record(start_cell, trainer):
    launched = start_cell(trainer(epochs=2))
    code, output = launched.finish()
    assert code == 0, output
    found = record.read(launched.record)  # validates
    assert found["status"] == "ok"
    import json

    json.dump(found, open("/tmp/rec.json", "w"), indent=1)
