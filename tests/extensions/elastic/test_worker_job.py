"""Jobs of elastic workers."""

from __future__ import annotations

from dataclasses import replace

from test_job_requests import request

from stratbench.extensions.elastic.jobs.worker_job import WorkerJob


def test_the_job_of_a_worker_asks_for_the_type_of_gpu():
    *_, asked = request("ddp", 4, device="cuda", cluster={"gpu_type": "a100", "gpus_per_node": 4})
    each = WorkerJob.of(replace(asked, gpus=1), {}, None)
    assert "--gres=gpu:a100:1" in WorkerJob.from_json(each.as_json()).arguments
