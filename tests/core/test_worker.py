"""What a worker does around its training: what it imports, how it joins, what it calls out of memory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launching import LIMIT_S, WORKFLOW, settings
from stratbench.cell import record
from stratbench.cell.run_folder import RunFolder
from stratbench.train import forkserver, worker
from stratbench.train.worker import is_out_of_memory_error
from stratbench.workload.network.precision import get_weights_and_compute_dtypes

pytestmark = pytest.mark.timeout(300)

NCCL = (
    "NCCL error in: NCCLUtils.cpp:76, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
)
NO_ENGINE = [
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)"
        ),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        dist.DistBackendError(
            f"{NCCL}ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
            "Failed to CUDA calloc 67108864 bytes"
        ),
        dist.DistBackendError(
            f"{NCCL}ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
            "Cuda failure 2 'out of memory'"
        ),
        RuntimeError("cudaHostRegister refused to pin 553439232 bytes: out of memory"),
        RuntimeError("std::bad_alloc"),
    ],
    ids=lambda e: f"{type(e).__name__}-{str(e)[-30:]}",
)
def test_out_of_memory_in_every_librarys_words(error: BaseException):
    assert is_out_of_memory_error(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
        ),
        dist.DistBackendError(f"{NCCL}Last error:\nCuda failure 1 'invalid argument'"),
        dist.DistBackendError(f"{NCCL}Last error:\nFailed to find CUDA library libcuda.so.1"),
        ValueError("out of memory is what this is about"),
        *map(RuntimeError, NO_ENGINE),  # no GPU here, so none is full
    ],
    ids=lambda e: f"{type(e).__name__}-{str(e)[-30:]}",
)
def test_what_is_not_for_want_of_memory(error: BaseException):
    assert not is_out_of_memory_error(error)


@pytest.mark.parametrize("message", NO_ENGINE)
@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "refused", "expected"),
    [
        (5, 90, 89, 0, True),  # nearly full
        (50, 40, 30, 0, False),  # an engine is missing for another reason
        (1, 95, 40, 0, False),  # full of what the allocator keeps for later
        (50, 40, 30, 1, True),  # full when the workspaces were asked for
    ],
)
def test_cudnn_without_an_engine_is_out_of_memory_on_a_full_gpu(
    monkeypatch, message, free, reserved, allocated, refused, expected
):
    for name, answer in {
        "is_initialized": True, "mem_get_info": (free, 100), "memory_reserved": reserved,
        "memory_allocated": allocated, "memory_stats": {"num_ooms": refused},
    }.items():  # fmt: skip
        stand_in = mock.create_autospec(getattr(torch.cuda, name), return_value=answer)
        monkeypatch.setattr(torch.cuda, name, stand_in)
    assert is_out_of_memory_error(RuntimeError(message)) is expected


def test_a_broken_gpu_is_not_a_full_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    broken = mock.Mock(side_effect=RuntimeError("CUDA error: an illegal memory access"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    assert not is_out_of_memory_error(RuntimeError(NO_ENGINE[0]))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), "tf32"),
        ((8, 0), "tf32"),
        ((7, 5), "float32 (no TensorFloat-32 on a GPU of compute capability 7.5)"),
        (None, "float32 (no TensorFloat-32 on a CPU)"),
    ],
)
def test_tf32_is_said_only_where_it_is_used(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0) if capability else torch.device("cpu")
    assert get_weights_and_compute_dtypes("tf32", device) == {
        "weights_dtype": "float32",
        "compute_dtype": expected,
    }


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_the_group_is_connected_when_it_has_been_joined(monkeypatch, tmp_path, device):
    """With one collective, on the device; NCCL is told the device, so that it connects at once."""
    device = torch.device(device)
    init = mock.create_autospec(dist.init_process_group)
    reduce = mock.create_autospec(dist.all_reduce)
    zeros = mock.Mock(return_value="ones's own")
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(torch, "zeros", zeros)
    job = mock.Mock(n_nodes=1, world_size=1, folder=RunFolder(tmp_path))
    worker.join_process_group(job, 0, device)
    assert init.call_args.args == ("nccl" if device.type == "cuda" else "gloo",)
    assert init.call_args.kwargs["device_id"] == (device if device.type == "cuda" else None)
    reduce.assert_called_once_with(zeros.return_value)
    assert zeros.call_args.kwargs == {"device": device}


UNTOUCHED = """
import os
import torch
def asked():
    raise AssertionError("CUDA was asked for its devices: forks could not use them")
torch._C._cuda_getDeviceCount = torch._C._cuda_init = asked
torch._C._cuda_getCurrentRawStream = asked  # a build for CUDA has it, and is taken for one now
from stratbench.train import forkserver
assert "worker" in forkserver.import_entry_functions()
assert not torch.cuda.is_initialized()
try:
    torch.cuda.is_available()
except AssertionError:
    print("would be noticed", flush=True)
os._exit(0)  # sooner
"""


@pytest.mark.slow
def test_what_is_forked_has_not_touched_cuda():
    command = [sys.executable, "-c", UNTOUCHED]
    env = os.environ | {"PYTHONPATH": str(WORKFLOW)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "would be noticed\n", done.stderr


def test_a_fork_server_asks_nvml_for_gpus(monkeypatch, tmp_path):
    popen = mock.Mock()
    monkeypatch.setattr(forkserver.subprocess, "Popen", popen)
    forkserver.ForkServer(tmp_path)
    assert popen.call_args.kwargs["env"]["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


BARE = """
import importlib.machinery
LACKING = {"snakemake", "fastjsonschema", "jsonschema", "yaml", "pandas", "matplotlib", "scipy", "sklearn",
           "jinja2", "tqdm"}
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *where: None if name.partition(".")[0] in LACKING else find(name, *where)
)
"""


@pytest.mark.slow
def test_a_machine_that_can_only_train_keeps_its_record(start_cell, tmp_path):
    """PyTorch and little more: no Snakemake, and nothing that validates."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    launched = start_cell(settings("ddp"), workflow=Path(f"{tmp_path}{os.pathsep}{WORKFLOW}"))
    output = launched.finish_with(0)
    assert "will not be validated here" in output
    found = record.read_record(launched.record)  # validates, since this machine can
    assert found["status"] == "ok"
    # A CPU cell sees no GPU, wherever it runs.
    environment = found["workers"][0]["provenance"]["environment"]
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
