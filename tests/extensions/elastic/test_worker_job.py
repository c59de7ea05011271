"""Jobs of elastic workers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from test_job_requests import request
from test_jobs import jobs_of, wildcards

from stratbench.extensions.elastic.jobs.worker_job import WorkerJob


def test_the_job_of_a_worker_asks_for_the_type_of_gpu():
    *_, asked = request("ddp", 4, device="cuda", cluster={"gpu_type": "a100", "gpus_per_node": 4})
    each = WorkerJob.from_request(replace(asked, gpus=1), {}, None)
    assert "--gres=gpu:a100:1" in WorkerJob.from_json(each.as_json()).sbatch_arguments


def test_an_elastic_cell_asks_for_no_gpu_and_its_workers_for_one_each(tmp_path):
    changes = {"strategies": ["ddp", "ps-ormo"], "gpus": [16], "elastic": True}
    cluster = {"cpus_per_gpu": 6, "mem_mib_per_gpu": 9000, "server_cpus": 3, "elastic_wait_h": 2}
    jobs = jobs_of(tmp_path, changes, worker_time_limit_min=45, startup_allowance_s=60, **cluster)
    for strategy, cpus in (("ddp", 1), ("ps-ormo", 3)):
        asked = jobs.build_job_request(jobs.find_cell(wildcards(strategy, 16)))
        assert (asked.nodes, asked.gpus, asked.cpus, asked.workers) == (1, 0, cpus, 16)
        assert asked.runtime_min == 11 + 120
        each = asked.worker
        assert (each.nodes, each.gpus, each.cpus, each.mem_mib) == (1, 1, 6, 9000)
        assert (each.runtime_min, each.workers, each.server_cpus) == (45, 0, 0)
        assert "; up to 16 times: sbatch --nodes=1" in asked.sbatch_command
    # Its servers are all in its own job, which holds what the plan says of them.
    (tmp_path / "s").mkdir()
    plan = {"gpu": None, "cells": {}}
    for mib, expected in ((100, 16384), (99_000, 99_000)):
        served = jobs.find_cell(wildcards("ps-ormo", 16))
        plan["cells"][served.path] = {"servers_mem_mib": mib}
        (tmp_path / "s/plan.json").write_text(json.dumps(plan))
        again = jobs_of(tmp_path, changes, **cluster).build_job_request(served)
        assert (again.mem_mib, again.worker.mem_mib) == (expected + 1024, 9000)
    gang = jobs_of(tmp_path, {"gpus": [4], "strategies": ["ddp"]})
    assert not gang.build_job_request(gang.find_cell(wildcards("ddp", 4))).workers


@pytest.mark.parametrize(("workers", "of_node"), [(16, 4), (3, 3)])
def test_an_elastic_worker_asks_for_its_part_of_what_the_plan_says_of_a_node(
    tmp_path, workers: int, of_node: int
):
    changes = {"gpus": [workers], "global_batch": 48, "elastic": True, "strategies": ["ddp"]}
    cluster = {"gpus_per_node": 4, "mem_mib_per_gpu": 9000}
    cell = jobs_of(tmp_path, changes, **cluster).find_cell(wildcards("ddp", workers))
    planned = {cell.path: {"host_mem_mib": of_node * 20_000}}
    (tmp_path / "s").mkdir()
    plan = {"gpu": None, "cells": planned}
    (tmp_path / "s/plan.json").write_text(json.dumps(plan))
    assert jobs_of(tmp_path, changes, **cluster).build_job_request(cell).worker.mem_mib == 20_000
