"""Values that are too long for a job's command line reach its program by a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launching import WORKFLOW
from stratbench.study import job_values

#: Prints its arguments.
PROGRAM = """
import sys

def main():
    print(sys.argv[1], len(sys.argv[2]), *sys.argv[3:])
"""
#: More characters than Linux lets a command line's argument have.
LONG = 1 << 18


def job(folder: Path, command: str, **params: str) -> SimpleNamespace:
    """A job as Snakemake has it."""
    return SimpleNamespace(
        rule=SimpleNamespace(shellcmd=command),
        params=SimpleNamespace(**params),
        log=[str(folder / "one.log")],
    )


def test_a_value_of_any_length_reaches_the_program_under_its_name(tmp_path):
    (tmp_path / "some.py").write_text(PROGRAM)
    command = f"python -m stratbench.study.program $PPID {job_values.OF_JOB} -m some --study @study @other"
    job_values.write_job_values(
        [job(tmp_path, command, study="x" * LONG, other="@study", more="y")]
    )
    shell = command.replace("{log:q}", "'one.log'").replace("python", sys.executable)
    done = subprocess.run(
        ["bash", "-c", f"{shell} @third"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{WORKFLOW}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    # A value is not looked up again, and what has no value stays.
    assert (done.stdout, done.stderr) == (f"--study {LONG} @study @third\n", "")


def test_a_command_without_values_has_no_file(tmp_path):
    job_values.write_job_values(
        [job(tmp_path, "python -m some @study", study="x"), job(tmp_path, None)]
    )
    assert list(tmp_path.iterdir()) == []
    assert job_values.insert_job_values(["--study", "@study"]) == ["--study", "@study"]


def test_a_command_whose_values_are_all_optional_finds_its_file(tmp_path):
    """Such as that of a decision, which has none without a projection."""
    job_values.write_job_values([job(tmp_path, f"python {job_values.OF_JOB} -m some")])
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == {}
    assert job_values.insert_job_values([job_values.OPTION, str(file), "-m"]) == ["-m"]


def test_a_missing_file_is_told_with_its_causes(tmp_path):
    with pytest.raises(SystemExit, match=r"one.json: does not exist; .* --no-hooks, .* `onstart`"):
        job_values.insert_job_values([job_values.OPTION, str(tmp_path / "one.json"), "@study"])
