"""Memory of a rank: a known allocation is seen, and model states are exact to the byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fake_nvml import UUIDS, FakeNvml
from torch import nn

from stratbench.telemetry import memory
from stratbench.telemetry.machine.nvml import Nvml
from stratbench.telemetry.memory import MemoryMeter, measure_model_state_bytes

MIB = 1 << 20
WORKFLOW = Path(memory.__file__).parents[2]

ALLOCATE = """
import json, sys, torch
from stratbench.telemetry.memory import MemoryMeter
earlier = torch.ones(400 << 18)
del earlier
meter = MemoryMeter("cpu")
meter.start()
first = meter.read_memory_since_start()
block = torch.ones(200 << 18)
del block
print(json.dumps([first, meter.read_memory_since_start()]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_known_allocation_is_the_peak_and_an_earlier_larger_one_is_not():
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATE],
        env=os.environ | {"PYTHONPATH": str(WORKFLOW), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    before, after = json.loads(done.stdout)
    if before["method"] != memory.METHOD_RESET:
        pytest.skip(f"the high-water mark cannot be reset here: {before['method']}")
    assert before["peak_over_base_bytes"] < 10 * MIB
    assert after["peak_over_base_bytes"] == pytest.approx(200 * MIB, abs=4 * MIB)
    assert after["peak_bytes"] == after["base_bytes"] + after["peak_over_base_bytes"]
    assert after.keys() == {
        "method", "base_bytes", "idle_bytes", "peak_bytes", "peak_over_base_bytes",
    }  # fmt: skip


def test_without_a_reset_the_method_says_that_the_peak_is_the_lifetimes(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    meter = MemoryMeter("cpu")
    meter.start()
    figures = meter.read_memory_since_start()
    assert figures["method"] == memory.METHOD_LIFETIME
    assert figures["peak_bytes"] >= figures["base_bytes"] > 10 * MIB


def test_without_proc_the_peak_is_maxrss_in_bytes(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "absent" / "status")
    meter = MemoryMeter("cpu")
    meter.start()
    figures = meter.read_memory_since_start()
    assert figures["method"] == memory.METHOD_MAXRSS
    assert figures["peak_bytes"] >= 0.9 * figures["base_bytes"]
    assert 10 * MIB < figures["peak_bytes"] < 1 << 40


def test_reading_before_the_start_is_refused():
    with pytest.raises(RuntimeError, match="start"):
        MemoryMeter("cpu").read_memory_since_start()


class Properties:
    uuid = UUIDS[0].removeprefix("GPU-")


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda's memory figures, by name; `reset` sets the peak to what is allocated."""
    figures = {"memory_allocated": 100, "max_memory_allocated": 900, "max_memory_reserved": 1000}
    requested = {"requested_bytes.all.current": 90, "requested_bytes.all.peak": 650}
    figures["memory_stats"] = requested
    for name in figures:
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: figures[name])
    monkeypatch.setattr(
        torch.cuda,
        "reset_peak_memory_stats",
        lambda device: figures.update(max_memory_allocated=figures["memory_allocated"]),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    cleared = lambda: figures.update(memory_stats=requested | {"requested_bytes.all.current": 58})  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", cleared, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    return figures


def test_cuda_figures_are_the_allocators_and_nvmls(cuda):
    meter = MemoryMeter("cuda:0", nvml=Nvml(FakeNvml()))
    meter.start()
    assert meter.read_memory_since_start()["peak_bytes"] == 100
    cuda["max_memory_allocated"] = 700
    cuda["memory_stats"] = {"requested_bytes.all.current": 90, "requested_bytes.all.peak": 650}
    assert meter.read_memory_since_start() == {
        "method": "cuda-allocator",
        "base_bytes": 100,
        "peak_bytes": 700,
        "peak_over_base_bytes": 600,
        "allocated_peak_bytes": 700,
        "reserved_peak_bytes": 1000,
        "requested_peak_bytes": 650,
        "cublas_bytes": 32,
        "nvml_used_bytes": 12884901888,
    }


def test_an_allocator_that_does_not_know_requests_leaves_them_out(cuda):
    meter = MemoryMeter("cuda:0", nvml=Nvml(FakeNvml()))
    meter.start()
    cuda["memory_stats"] = {"requested_bytes.all.current": 0, "requested_bytes.all.peak": 0}
    assert not {"requested_peak_bytes", "cublas_bytes"} & set(meter.read_memory_since_start())


def test_cublas_workspaces_are_not_in_the_base(cuda, monkeypatch):
    cleared = lambda: cuda.update(memory_allocated=30)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", cleared, raising=False)
    meter = MemoryMeter("cuda:0", nvml=Nvml(FakeNvml()))
    meter.start()
    figures = meter.read_memory_since_start()
    assert figures["base_bytes"] == figures["peak_bytes"] == 30


def test_cuda_figures_without_nvml_lack_its_figures(cuda):
    meter = MemoryMeter("cuda:0", nvml=Nvml(FakeNvml(failures={"nvmlInit": OSError("no driver")})))
    meter.start()
    assert not any(name.startswith("nvml") for name in meter.read_memory_since_start())


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


# fp32: Linear 10x7 + 7, BatchNorm 7 + 7, Linear 7x3 + 3 = 115 parameters; the BatchNorm's mean
# and variance are 14 floats, and its counter one int64.
PARAMETERS_BYTES = 4 * (77 + 14 + 24)
BUFFERS_BYTES = 4 * 14 + 8


def train_one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(5, 10)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_states_of_sgd_with_momentum_are_exact_and_momentum_comes_with_the_first_step():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fresh = {
        "parameters_bytes": PARAMETERS_BYTES,
        "gradients_bytes": PARAMETERS_BYTES,
        "optimizer_bytes": 0,
        "buffers_bytes": BUFFERS_BYTES,
    }
    assert measure_model_state_bytes(model, optimizer) == fresh
    train_one_step(model, optimizer)
    assert measure_model_state_bytes(model, optimizer) == fresh | {
        "optimizer_bytes": PARAMETERS_BYTES
    }
    assert measure_model_state_bytes(model, None)["optimizer_bytes"] == 0


def test_states_of_adam_count_both_moments_and_the_step_counters():
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    train_one_step(model, optimizer)
    tensors = len(list(model.parameters()))
    assert (
        measure_model_state_bytes(model, optimizer)["optimizer_bytes"]
        == 2 * PARAMETERS_BYTES + 4 * tensors
    )


def test_frozen_parameters_have_no_gradients_and_tied_ones_count_once():
    model = small_model()
    model[0].requires_grad_(False)
    states = measure_model_state_bytes(model, None)
    assert states["parameters_bytes"] == PARAMETERS_BYTES
    assert states["gradients_bytes"] == PARAMETERS_BYTES - 4 * 77
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    assert measure_model_state_bytes(tied, None)["parameters_bytes"] == 64


def test_half_precision_counts_its_own_size():
    assert (
        measure_model_state_bytes(nn.Linear(8, 4, bias=False).bfloat16(), None)["parameters_bytes"]
        == 64
    )


def sharded_states(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = small_model()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_one_step(model, optimizer)
    with torch.no_grad():
        model.eval()(torch.randn(5, 10))  # leaves the root gathered
    Path(folder, f"{rank}.json").write_text(json.dumps(measure_model_state_bytes(model, optimizer)))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_states_under_fsdp2_are_this_ranks_shard(tmp_path):
    mp.start_processes(sharded_states, (str(tmp_path),), nprocs=2, start_method="forkserver")
    # Rows of 7 split as 4 and 3, rows of 3 as 2 and 1.
    for rank, (rows, last_rows) in enumerate(((4, 2), (3, 1))):
        shard_bytes = 4 * (rows * 11 + rows * 2 + last_rows * 8)
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "parameters_bytes": shard_bytes,
            "gradients_bytes": shard_bytes,
            "optimizer_bytes": shard_bytes,
            "buffers_bytes": BUFFERS_BYTES,
        }
