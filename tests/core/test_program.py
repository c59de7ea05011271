"""Programs of rules: one after the other, alone in their folder, and ended with the Snakemake above them.

Errors of rules are shown without their places.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launching import WORKFLOW, assert_gone, until
from stratbench.study import program
from stratbench.study.snakemake_internals import remove_places_from_error

pytestmark = pytest.mark.timeout(300)

#: Tells which it is; fails if told to; with a pool's method, has two processes of a pool wait in it.
PROGRAM = """
import multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

def wait(i):
    Path(f"in-{i}").touch()
    while True:
        time.sleep(1)

def main():
    print(*sys.argv, flush=True)
    if "fail" in sys.argv:
        return 3
    if sys.argv[1:2] == ["wait"]:
        try:
            if len(sys.argv) == 2:
                wait(0)
            with ProcessPoolExecutor(2, multiprocessing.get_context(sys.argv[2])) as pool:
                list(pool.map(wait, range(5)))
        finally:
            Path("cleaned-up").touch()
"""
START = "{python} -m stratbench.study.program $PPID"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """A function that starts a shell with a command line, as a Snakemake does that can be killed."""
    (tmp_path / "some.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": f"{WORKFLOW}:{tmp_path}"}
    started = []

    def run(command: str) -> subprocess.Popen[str]:
        code = "import subprocess, sys; sys.exit(subprocess.call(['bash', '-c', sys.argv[1]]))"
        process = subprocess.Popen(
            [sys.executable, "-c", code, command.replace("PROGRAM", START)
             .replace("{python}", sys.executable)],
            cwd=tmp_path, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()


def test_every_program_of_a_rule_has_a_main():
    text = "".join(path.read_text() for path in (WORKFLOW / "rules").glob("*.smk"))
    names = set(re.findall(r"[\"(]-m (stratbench\.[\w.]+)", text))
    assert len(names) > 5
    for name in names:
        assert callable(program.find_main_function(name)), name


def test_programs_run_in_turn_up_to_one_that_fails(start):
    run = start("PROGRAM -m some a --b=1 -m some fail -m some c")
    assert run.communicate()[0].splitlines() == ["some a --b=1", "some fail"]
    assert run.returncode == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "-m some wait > log 2>&1",
        "-m some wait fork 2>&1 | tee log",
        "-m some wait forkserver > log",
    ],
)
def test_a_killed_snakemake_ends_a_program_and_what_it_has_started(start, tmp_path, command):
    snakemake = start(f"set -euo pipefail; (echo; PROGRAM {command})")
    until(lambda: (tmp_path / "in-0").exists())
    family = psutil.Process(snakemake.pid).children(recursive=True)
    snakemake.kill()
    snakemake.wait()
    assert_gone(family)
    assert "which had started this one, has ended" in (tmp_path / "log").read_text()
    assert (tmp_path / "cleaned-up").exists()


@pytest.mark.slow
def test_a_second_program_in_a_folder_says_so_and_goes_on_when_the_first_was_killed(
    start, tmp_path
):
    first = start("PROGRAM --hold out -m some wait")
    until(lambda: (tmp_path / "in-0").exists())
    second = start("PROGRAM --hold out -m some second")
    said = second.communicate()[0]
    assert second.returncode == 1
    assert said == "error: another run is writing to out; start again when that run has ended\n"
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    third = start("PROGRAM --hold out -m some third")
    assert third.communicate()[0] == "some third\n"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            'InputFunctionException in rule compare in file "/x/sets.smk", line 36:\nError:\n'
            "  WorkflowError:\n    sets: is missing; name\n    two\nWildcards:\n\nTraceback:\n"
            '  File "/x/sets.smk", line 43, in <lambda>\n',
            "sets: is missing; name\ntwo",
        ),
        (
            'WorkflowError in file "/x/common.smk", line 51:\nfoo = 1: unknown key\n'
            '  File "/x/common.smk", line 51, in <module>',
            "foo = 1: unknown key",
        ),
        ("WorkflowError:\nthe Traceback: is a word", "the Traceback: is a word"),
        ("LockException:\nThe folder is locked.", "LockException:\nThe folder is locked."),
    ],
)
def test_an_error_of_the_rules_is_shown_without_its_place(message: str, shown: str):
    assert remove_places_from_error(message) == shown
