"""Workers have equally many threads under every strategy, whatever it requests in addition."""

from __future__ import annotations

import pytest

from launching import settings
from stratbench.cell.coordinates import Cell
from stratbench.strategies import REGISTRY, get_option_defaults, get_strategy_class
from stratbench.study.resources import build_job_request
from stratbench.train import gpu_locks


@pytest.mark.parametrize("request_gpus", [True, False])
@pytest.mark.parametrize("in_job", [True, False])
def test_workers_have_equal_threads_under_every_strategy(monkeypatch, request_gpus, in_job):
    """Whatever is asked for in addition for servers, in a job of one's own and on a whole machine."""
    cluster = {
        "gpus_per_node": 4, "cpus_per_gpu": 8, "server_cpus": 4, "mem_mib_per_gpu": 1,
        "server_mem_mib": 1, "mem_mib_per_cpu_worker": 1, "memory_margin": 0.0,
        "startup_allowance_s": 60, "request_gpus": request_gpus, "gpu_type": None,
    }  # fmt: skip
    if in_job:
        monkeypatch.setenv("SLURM_JOB_ID", "1")
    else:
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    asked, threads = set(), set()
    for name in REGISTRY:
        cls = get_strategy_class(name)
        if cls.max_workers == 1:
            continue
        for given in ({}, {"server_placement": "colocated"}) if cls.kind == "server" else ({},):
            options = cls.resolve(get_option_defaults(name) | given, 4)
            s = settings(name, threads=None, gpus=4, options=options, device="auto")
            cell = Cell("s", "e", name, "m", "d", 4, 0)
            request = build_job_request(cell, s, cluster, None)
            cores = request.cpus if in_job else 64
            monkeypatch.setattr(
                gpu_locks, "list_usable_cores", lambda cores=cores: set(range(cores))
            )
            asked.add(request.cpus)
            threads.add(gpu_locks.count_threads_per_worker(s, 4, request.cpus, request.server_cpus))
    assert len(asked) > 1
    assert threads == {(8 if request_gpus else 1) if in_job else 16}
