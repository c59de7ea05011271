"""No cell is started a second time while SLURM still runs it: `study.slurm` against a fake squeue."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stratbench.study import snakemake_internals
from stratbench.study.slurm import commands, live_jobs


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a shell script as a SLURM command; the folder of scripts is all of PATH."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    monkeypatch.setenv("PATH", str(bin_dir))
    monkeypatch.setattr(live_jobs.time, "sleep", lambda seconds: None)
    monkeypatch.chdir(tmp_path)

    def install(name: str, script: str) -> None:
        (bin_dir / name).write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
        (bin_dir / name).chmod(0o755)

    return install


def job(tmp_path: Path, *wildcards: str) -> SimpleNamespace:
    """What `wait_for_earlier_jobs` uses of a Snakemake job."""
    return SimpleNamespace(
        rule=SimpleNamespace(name="train_cell"),
        wildcards=list(wildcards),
        output=[str(tmp_path / "_".join(wildcards))],
    )


@pytest.fixture
def snakemake(monkeypatch: pytest.MonkeyPatch):
    """What it uses of Snakemake's workflow; `log` tells what was done to it."""
    log: list[str] = []
    monkeypatch.setattr(
        snakemake_internals.os, "execv", lambda program, argv: log.append(argv[1:3])
    )
    return SimpleNamespace(
        persistence=SimpleNamespace(unlock=lambda: log.append("unlock")), log=log
    )


def test_a_machine_without_slurm_has_no_live_jobs(fake, snakemake, tmp_path, capfd):
    live_jobs.wait_for_earlier_jobs(snakemake, [job(tmp_path, "a", "1")])
    assert snakemake.log == []
    assert capfd.readouterr() == ("", "")


def test_only_live_jobs_of_this_folder_and_of_planned_cells_are_waited_for(
    fake, snakemake, tmp_path, capfd
):
    elsewhere = tmp_path / "elsewhere"
    fake(
        "squeue",
        f"""echo '7|{elsewhere}|rule_train_cell_wildcards_a_1'
        echo '8|{tmp_path}|rule_train_cell_wildcards_b_1'
        echo '9|{tmp_path}|(null)'""",
    )
    live_jobs.wait_for_earlier_jobs(snakemake, [job(tmp_path, "a", "1")])
    assert snakemake.log == []
    assert capfd.readouterr().err == ""


def test_a_live_cell_is_named_waited_for_and_planned_anew(fake, snakemake, tmp_path, capfd):
    # Live for two requests; then SLURM fails to answer, which is no sign of an end; then gone.
    fake(
        "squeue",
        f"""echo x >> {tmp_path}/calls
        case $(wc -l < {tmp_path}/calls) in
        1|2) echo '12|{tmp_path}|rule_train_cell_wildcards_demo_a_b_1';;
        3) exit 1;;
        esac""",
    )
    live_jobs.wait_for_earlier_jobs(snakemake, [job(tmp_path, "demo", "a/b", "1")])
    assert (tmp_path / "calls").read_text() == "x\n" * 4
    assert snakemake.log == ["unlock", ["-m", "snakemake"]]
    told = capfd.readouterr().err
    assert told.count("SLURM job 12: ") == 1
    assert "scancel 12" in told


def test_a_slurm_that_does_not_answer_is_told(fake, snakemake, tmp_path, capfd):
    fake("squeue", "exit 1")
    live_jobs.wait_for_earlier_jobs(snakemake, [job(tmp_path, "a")])
    assert snakemake.log == []
    assert "squeue does not answer" in capfd.readouterr().err


def test_the_comment_is_the_one_that_the_plugin_gives():
    """The plugin's own function for the wildcards, and its pattern, as pinned in envs/."""
    utils = pytest.importorskip("snakemake_executor_plugin_slurm.utils")
    wildcards = ["tiny", "first", "ps-async", "a/b", "2", "0"]
    theirs = utils.get_job_wildcards(SimpleNamespace(wildcards=wildcards))
    source = Path(sys.modules["snakemake_executor_plugin_slurm"].__file__).read_text()
    assert 'f"rule_{job.name}_wildcards_{wildcard_str}"' in source
    assert (
        live_jobs.make_job_comment("train_cell", wildcards) == f"rule_train_cell_wildcards_{theirs}"
    )
    assert os.sep not in theirs


def test_slurm_is_asked_as_the_user_has_set_it_and_in_a_job_by_nothing_of_the_jobs(
    fake, monkeypatch
):
    fake("squeue", 'echo "$SLURM_CLUSTERS"')
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_CLUSTERS", "here")
    assert commands.run_slurm_command(["squeue"]).stdout == "here\n"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert commands.run_slurm_command(["squeue"]).stdout == "\n"
    assert commands.run_slurm_command(["sinfo"]).returncode == commands.NOT_THERE
