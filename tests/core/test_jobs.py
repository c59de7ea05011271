"""What the rules ask of a study: which cells are trained, with what, and in which environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stratbench.study.config.config import Study, load_config
from stratbench.study.config.messages import ConfigError
from stratbench.study.job_environment import add_cache_command, set_job_environment
from stratbench.study.jobs import Jobs
from stratbench.study.plan_file import compute_settings_digest


def config_of(results: Path, changes: dict | None = None, **cluster) -> tuple[dict, Study]:
    block = {
        "dataset": "digits", "strategies": ["single", "ddp"], "models": ["vgg-compact"],
        "gpus": [1, 2], "epochs": 1, "global_batch": 64, "lr": 0.1, "time_limit_s": 600,
    } | (changes or {})  # fmt: skip
    raw = {
        "study": "s",
        "results": str(results),
        "cluster": cluster,
        "studies": {"s": {"experiments": {"e": block}}},
    }
    return load_config(raw)


def jobs_of(results: Path, changes: dict | None = None, **cluster) -> Jobs:
    return Jobs(*config_of(results, changes, **cluster))


def wildcards(strategy: str, gpus: int) -> dict[str, str]:
    return {"experiment": "e", "strategy": strategy, "model": "vgg-compact", "gpus": str(gpus),
            "repeat": "0", "study": "s"}  # fmt: skip


def test_wildcards_name_a_cell_of_the_study(tmp_path):
    jobs = jobs_of(tmp_path)
    cell = jobs.find_cell(wildcards("ddp", 2))
    assert (cell.strategy, cell.gpus, cell.dataset) == ("ddp", 2, "digits")
    assert jobs.resolve_settings(cell).per_worker_batch == 32
    assert jobs.build_job_request(cell).gpus == 2
    with pytest.raises(
        ConfigError, match="e/single/vgg-compact/2gpu/rep0 is not a cell of the study"
    ):
        jobs.find_cell(wildcards("single", 2))


def test_what_the_plan_calls_infeasible_is_skipped_where_the_config_lets_it(tmp_path):
    first = jobs_of(tmp_path)
    cell = first.find_cell(wildcards("ddp", 2))
    plan = {
        "gpu": "A10G 24GB",
        "cells": {
            cell.path: {
                "settings": compute_settings_digest(first.resolve_settings(cell)),
                "infeasible": "needs more",
                "host_mem_mib": 5_000_000,
            }
        },
    }
    (tmp_path / "s").mkdir()
    (tmp_path / "s/plan.json").write_text(json.dumps(plan))
    cluster = {"gpu": "A10G 24GB"}
    kept = jobs_of(tmp_path, **cluster)
    assert kept.skip_reasons == {}
    assert len(kept.list_record_paths()) == 3
    assert kept.build_job_request(cell).mem_mib == 5_000_000
    further = kept.find_cell(wildcards("ddp", 2) | {"repeat": "7"})  # as a verdict adds them
    assert kept.build_job_request(further) == kept.build_job_request(cell)
    skipping = jobs_of(tmp_path, **cluster, skip_infeasible=True)
    assert skipping.skip_reasons == {cell.path: "needs more"}
    assert str(cell.record_path(tmp_path)) not in skipping.list_record_paths()
    assert len(skipping.list_record_paths()) == 2


def test_jobs_find_the_package_this_python_and_the_data(tmp_path, monkeypatch):
    shell = {"PATH": "/bin", "PYTHONPATH": "/mine", "SLURM_CONF": "/c", "PYTHONOPTIMIZE": "2"}
    shell["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # of a terminal in Jupyter
    monkeypatch.setattr(os, "environ", shell)
    monkeypatch.chdir(tmp_path)
    config = {"data": {"root": str(tmp_path), "download": False}, "code": ["nets", str(tmp_path)]}
    for _ in range(2):  # a Snakefile is parsed in every job
        set_job_environment(config, "/package")
    assert os.environ["PYTHONPATH"] == "/package:/mine"
    assert os.environ["PATH"] == f"{Path(sys.executable).parent}:/bin"
    assert os.environ["STRATBENCH_PACKAGE"] == "/package"
    assert os.environ["MPLBACKEND"] == "agg"
    assert "PYTHONOPTIMIZE" not in os.environ
    assert os.environ["STRATBENCH_SLURM_CONF"] == "/c"
    assert os.environ["STRATBENCH_DATA"] == str(tmp_path)
    assert os.environ["STRATBENCH_NO_DOWNLOAD"] == "1"
    assert os.environ["STRATBENCH_CODE"] == f"{tmp_path / 'nets'}{os.pathsep}{tmp_path}"


@pytest.mark.parametrize("home", ["home", "my home"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_job_whose_node_has_no_home_has_a_cache_in_the_runs_folder(
    tmp_path, monkeypatch, home, is_there
):
    monkeypatch.setenv("HOME", str(tmp_path / home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    settings = SimpleNamespace(precommand="true")
    for _ in range(2):  # a Snakefile's module is read again
        add_cache_command(settings, tmp_path / ".snakemake/cache")
    assert settings.precommand.count("export") == 1
    if is_there:
        (tmp_path / home).mkdir()
    shell = ["/bin/sh", "-c", f'{settings.precommand} && echo "$XDG_CACHE_HOME"']
    printed = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.strip()
    assert printed == ("" if is_there else str(tmp_path / ".snakemake/cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/mine")
    mine = SimpleNamespace(precommand=None)
    add_cache_command(mine, tmp_path)
    assert mine.precommand is None
    add_cache_command(None, tmp_path)  # as it is asked for a list of rules
