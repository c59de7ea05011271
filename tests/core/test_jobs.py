"""What the rules ask of a study: which cells are trained, with what, and in which environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stratbench.extensions.links.jobs import links_arguments, links_request
from stratbench.study.config.config import Study, load_config
from stratbench.study.config.messages import ConfigError
from stratbench.study.job_environment import add_cache_command, set_job_environment
from stratbench.study.jobs import Jobs
from stratbench.study.plan_file import digest_of
from stratbench.study.slurm.nodes import Node


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
    cell = jobs.cell_of(wildcards("ddp", 2))
    assert (cell.strategy, cell.gpus, cell.dataset) == ("ddp", 2, "digits")
    assert jobs.settings_of(cell).per_worker_batch == 32
    assert jobs.request_of(cell).gpus == 2
    with pytest.raises(
        ConfigError, match="e/single/vgg-compact/2gpu/rep0 is not a cell of the study"
    ):
        jobs.cell_of(wildcards("single", 2))


def test_what_the_plan_calls_infeasible_is_skipped_where_the_config_lets_it(tmp_path):
    first = jobs_of(tmp_path)
    cell = first.cell_of(wildcards("ddp", 2))
    plan = {
        "gpu": "A10G 24GB",
        "cells": {
            cell.path: {
                "settings": digest_of(first.settings_of(cell)),
                "infeasible": "needs more",
                "host_mem_mib": 5_000_000,
            }
        },
    }
    (tmp_path / "s").mkdir()
    (tmp_path / "s/plan.json").write_text(json.dumps(plan))
    cluster = {"gpu": "A10G 24GB"}
    kept = jobs_of(tmp_path, **cluster)
    assert kept.skipped == {}
    assert len(kept.record_paths()) == 3
    assert kept.request_of(cell).mem_mib == 5_000_000
    further = kept.cell_of(wildcards("ddp", 2) | {"repeat": "7"})  # as a verdict adds them
    assert kept.request_of(further) == kept.request_of(cell)
    skipping = jobs_of(tmp_path, **cluster, skip_infeasible=True)
    assert skipping.skipped == {cell.path: "needs more"}
    assert str(cell.record_path(tmp_path)) not in skipping.record_paths()
    assert len(skipping.record_paths()) == 2


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


def test_links_are_measured_as_the_strategies_use_them(tmp_path):
    def told(*strategies: str, models: tuple[str, ...] = ("vgg-compact",), **cluster) -> str:
        block = {
            "strategies": list(strategies),
            "models": list(models),
            "gpus": [1, 2, 4],
            "device": "cpu",
        }
        whole, study = config_of(tmp_path, block, **{"gpus_per_node": 4} | cluster)
        return " ".join(links_arguments(study, whole["cluster"]))

    assert told("ddp") == "--a-node 4 --workers 2 4 --largest-mib 3 --kinds all_reduce broadcast"
    assert told("ddp", gpus_per_node=2).startswith("--a-node 2 --workers 2 ")
    assert "--kinds all_gather all_reduce reduce_scatter" in told("fsdp", "local-sgd")
    # Servers alone need no collective, and are measured by the transport that they have here.
    assert told("ps-async").endswith("--kinds --servers shm")
    # One that does not say what it uses is measured with all there are.
    assert "--kinds" not in told("ddp", "deepspeed")
    assert "--largest-mib 256" in told("ddp", models=("vgg16",))


def test_links_are_measured_on_two_nodes_where_a_partition_has_them(tmp_path):
    def node(partition: str, name: str, gpus: int = 4, cpus: int = 40) -> Node:
        return Node(partition, False, name, cpus, 100_000, gpus, None)

    block = {"strategies": ["ddp", "ps-sync"], "gpus": [1, 2]}
    cluster = {"gpus_per_node": 4, "cpus_per_gpu": 8, "mem_mib_per_gpu": 9000, "server_cpus": 3}
    whole, study = config_of(tmp_path, block, **cluster)
    pair = [node("a", "n1"), node("a", "n2")]
    asked = links_request(study, whole["cluster"], pair)
    assert (asked.nodes, asked.gpus, asked.cpus) == (2, 4, 4 * 8 + 3)
    assert asked.mem_mib > 4 * 9000
    # Nodes of two partitions are no pair, and neither is one that lacks GPUs.
    for offered in ([], pair[:1], [pair[0], node("b", "n2")], [pair[0], node("a", "n2", gpus=2)]):
        asked = links_request(study, whole["cluster"], offered)
        assert (asked.nodes, asked.gpus) == (1, 4)


def test_an_elastic_cell_asks_for_no_gpu_and_its_workers_for_one_each(tmp_path):
    changes = {"strategies": ["ddp", "ps-ormo"], "gpus": [16], "elastic": True}
    cluster = {"cpus_per_gpu": 6, "mem_mib_per_gpu": 9000, "server_cpus": 3, "elastic_wait_h": 2}
    jobs = jobs_of(tmp_path, changes, worker_time_limit_min=45, startup_allowance_s=60, **cluster)
    for strategy, cpus in (("ddp", 1), ("ps-ormo", 3)):
        asked = jobs.request_of(jobs.cell_of(wildcards(strategy, 16)))
        assert (asked.nodes, asked.gpus, asked.cpus, asked.workers) == (1, 0, cpus, 16)
        assert asked.runtime_min == 11 + 120
        each = asked.worker
        assert (each.nodes, each.gpus, each.cpus, each.mem_mib) == (1, 1, 6, 9000)
        assert (each.runtime_min, each.workers, each.server_cpus) == (45, 0, 0)
        assert "; up to 16 times: sbatch --nodes=1" in asked.sbatch
    # Its servers are all in its own job, which holds what the plan says of them.
    (tmp_path / "s").mkdir()
    plan = {"gpu": None, "cells": {}}
    for mib, expected in ((100, 16384), (99_000, 99_000)):
        served = jobs.cell_of(wildcards("ps-ormo", 16))
        plan["cells"][served.path] = {"servers_mem_mib": mib}
        (tmp_path / "s/plan.json").write_text(json.dumps(plan))
        again = jobs_of(tmp_path, changes, **cluster).request_of(served)
        assert (again.mem_mib, again.worker.mem_mib) == (expected + 1024, 9000)
    gang = jobs_of(tmp_path, {"gpus": [4], "strategies": ["ddp"]})
    assert not gang.request_of(gang.cell_of(wildcards("ddp", 4))).workers


@pytest.mark.parametrize(("workers", "of_node"), [(16, 4), (3, 3)])
def test_an_elastic_worker_asks_for_its_part_of_what_the_plan_says_of_a_node(
    tmp_path, workers: int, of_node: int
):
    changes = {"gpus": [workers], "global_batch": 48, "elastic": True, "strategies": ["ddp"]}
    cluster = {"gpus_per_node": 4, "mem_mib_per_gpu": 9000}
    cell = jobs_of(tmp_path, changes, **cluster).cell_of(wildcards("ddp", workers))
    planned = {cell.path: {"host_mem_mib": of_node * 20_000}}
    (tmp_path / "s").mkdir()
    plan = {"gpu": None, "cells": planned}
    (tmp_path / "s/plan.json").write_text(json.dumps(plan))
    assert jobs_of(tmp_path, changes, **cluster).request_of(cell).worker.mem_mib == 20_000
