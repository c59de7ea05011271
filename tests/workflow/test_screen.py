"""What a user reads when `check`, `plan` or `decide` fails: a sentence, however they were started."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys

import pytest
from snakemake_forks import run_snakemake
from tiny_study import TIMEOUT_S, Workflow, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOT_FINITE = """
import numpy as np

def load():
    x = np.full((40, 1, 16, 16), np.nan, dtype=np.float32)
    y = np.arange(40) % 10
    return x, y, x, y
"""
BAD_DATA = (
    "error: data set 'mine' (my_nan.load): train_x[0] has NaN or infinity; every value must be "
    "finite"
)


def with_bad_data(work: Workflow) -> str:
    """Give the study data that cannot be prepared; returns the sentence about them."""
    config = tiny_config()
    config["datasets"]["mine"] = {"call": "my_nan.load"}
    config["studies"]["tiny"]["experiments"]["second"]["dataset"] = "mine"
    work.write_config(config)
    (work.folder / "my_nan.py").write_text(NOT_FINITE)
    return BAD_DATA


def while_another_decides(work: Workflow) -> str:
    """Hold the folder that `decide` writes, until this process ends; returns the sentence about it."""
    folder = work.folder / "results/tiny/decision"
    folder.mkdir(parents=True)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return "error: another run is writing to results/tiny/decision"


def read_on_screen(work: Workflow, program: str, command: str) -> tuple[int, str]:
    """Exit code and screen of a command, started without a profile, with one, or as `stratbench`."""
    if program == "stratbench":
        done = subprocess.run(
            [sys.executable, "-m", "stratbench.command", command],
            cwd=work.folder,
            env=work.environment() | {"PYTHONPATH": str(work.folder / "workflow")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return done.returncode, done.stdout
    if program == "profile":
        done = work.run(command)
        return done.returncode, done.stdout
    return run_snakemake(["-c1", command], work.folder, work.environment(), TIMEOUT_S)


@pytest.mark.parametrize(
    ("mistake", "command", "program"),
    [
        (with_bad_data, "check", "no profile"),
        (with_bad_data, "plan", "profile"),
        (with_bad_data, "plan", "stratbench"),
        (while_another_decides, "decide", "no profile"),
        (while_another_decides, "decide", "profile"),
        (while_another_decides, "decide", "stratbench"),
    ],
)
def test_the_sentence_is_on_the_screen_and_nothing_of_the_config(
    workflow, mistake, command, program
):
    sentence = mistake(workflow)
    code, screen = read_on_screen(workflow, program, command)
    assert code == 1, screen
    # It may be broken, so that it fits the screen.
    *_, after = re.split(r"\s+".join(map(re.escape, sentence.split())), screen)
    assert after != screen
    # What Snakemake adds is short, and holds nothing of the config.
    assert len(after.splitlines()) < 20, screen
    assert '{"' not in screen, screen
    if program == "stratbench":
        assert "Error in rule" not in screen
