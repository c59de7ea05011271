"""Foreign processes on a cell's GPU: told from its own processes, displays and brokers, whatever NVML
says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from fake_nvml import UUIDS, FakeNvml

from stratbench.telemetry.machine import foreign_processes
from stratbench.telemetry.machine.foreign_processes import (
    ForeignProcessWatch,
    find_gpu_index_and_uuid,
    find_other_gpu_users,
)
from stratbench.telemetry.machine.nvml import Nvml

GIB = 2**30
#: Of no process: the kernel gives out less.
NOBODY = 2**22 + 7
#: Of a process that is not a child of this one.
STRANGER = os.getppid()


def nvml_with(
    computing: dict[int, int | None], drawing: tuple[int, ...] = (), **answers: Any
) -> Nvml:
    listed = [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in computing.items()]
    return Nvml(
        FakeNvml(
            gpus=2,
            answers={
                "nvmlDeviceGetComputeRunningProcesses": listed,
                "nvmlDeviceGetGraphicsRunningProcesses": [SimpleNamespace(pid=p) for p in drawing],
            }
            | answers,
        )
    )


@pytest.fixture
def worker():
    """A process of the cell, whose agent this process is; by way of another, as through a fork server."""
    code = (
        "import subprocess; p = subprocess.Popen(['sleep', '600']);"
        "print(p.pid, flush=True); p.wait()"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(server.stdout.readline())
    yield pid
    psutil.Process(pid).kill()
    server.wait()


def noted(tmp_path, *looks: Nvml) -> list[dict[str, Any]] | None:
    """What a watch of GPU 1 notes in so many looks, a second apart."""
    out = tmp_path / "foreign_processes.json"
    watch = ForeignProcessWatch(out, [], os.getpid())
    for t_s, nvml in enumerate(looks):
        watch._gpus = [nvml.list_gpus()[1]]
        watch.poll_gpus(float(t_s))
    watch.write_foreign_processes()
    return json.loads(out.read_text()) if out.exists() else None


def test_a_stranger_is_noted_with_the_most_that_it_held(tmp_path, worker):
    alone = nvml_with({worker: GIB})
    looks = [nvml_with({worker: GIB, STRANGER: held}) for held in (5, 9, 7)]
    assert noted(tmp_path, alone, *looks, alone) == [
        {"gpu": 1, "pid": STRANGER, "bytes": 9, "first_s": 1.0, "last_s": 3.0}
    ]
    unknown = noted(tmp_path, nvml_with({worker: None, STRANGER: None}))
    assert unknown[0]["bytes"] is None


@pytest.mark.parametrize("case", ["own", "ended", "draws", "numbered in another way", "broker"])
def test_who_is_no_stranger(tmp_path, worker, monkeypatch, case):
    if case == "broker":
        monkeypatch.setattr(foreign_processes, "_MPS_SERVERS", (psutil.Process(STRANGER).name(),))
    found = {
        "own": nvml_with({worker: GIB, os.getpid(): GIB}),
        "ended": nvml_with({worker: GIB, NOBODY: GIB}),
        "draws": nvml_with({worker: GIB, STRANGER: GIB}, drawing=(STRANGER,)),
        "numbered in another way": nvml_with({STRANGER: GIB}),  # in a container it is the worker
        "broker": nvml_with({worker: GIB, STRANGER: GIB}),
    }[case]
    assert noted(tmp_path, found) is None


def memory(used: float) -> SimpleNamespace:
    return SimpleNamespace(total=80 * GIB, used=int(used * GIB), free=0)


@pytest.mark.parametrize(
    ("computing", "used", "allocated", "pids", "others"),
    [
        ({"worker": 79}, 79.6, 78, None, None),  # alone
        ({"worker": 1, STRANGER: 78}, 79.3, 0.5, [STRANGER], 78.3),
        ({STRANGER: 79.5}, 79.6, None, [STRANGER], 79.6),  # its own context found no room
        ({}, 79.6, None, [], 79.6),  # whoever it is, NVML does not say
        ({"worker": 40}, 79.6, 39, [], 39.6),
        ({STRANGER: 79}, 79.6, 78, None, None),  # in a container, where that is itself
        ({STRANGER: 30, NOBODY: 49}, 79.6, 29, [], 49.6),  # one of them is; 1 GiB is its context
    ],
)
def test_who_else_uses_the_gpu_of_a_worker_out_of_memory(
    worker, computing, used, allocated, pids, others
):
    held = {worker if p == "worker" else p: int(n * GIB) for p, n in computing.items()}
    nvml = nvml_with(held, nvmlDeviceGetMemoryInfo=memory(used))
    own_bytes = None if allocated is None else int(allocated * GIB)
    found = find_other_gpu_users(nvml.list_gpus()[0], os.getpid(), worker, own_bytes)
    if pids is None:
        assert found is None
        return
    assert [p["pid"] for p in found["processes"]] == pids
    assert found["others_bytes"] == pytest.approx(others * GIB, rel=1e-6)


def test_places_by_number_and_uuid():
    nvml = Nvml(FakeNvml(gpus=2))
    here = {"index": 1, "uuid": UUIDS[1]}
    assert find_gpu_index_and_uuid(nvml, "1") == find_gpu_index_and_uuid(nvml, UUIDS[1]) == here
    assert nvml.find_gpu_by_name("7") is None
    assert find_gpu_index_and_uuid(nvml, "7") == {"name": "7"}
    assert find_gpu_index_and_uuid(Nvml(SimpleNamespace()), "0") == {"name": "0"}
