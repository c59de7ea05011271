"""Measures a worker's memory: the peak in training, and bytes of model states.

On a CPU the peak is the kernel's high-water mark of resident memory since a reset. On CUDA it is the peak of
the caching allocator, beside NVML's values.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from stratbench.telemetry.machine.nvml import Nvml
from stratbench.telemetry.shards import free_gathered_parameters, get_local_shard
from stratbench.workload.torch_internals import free_cublas_workspaces

METHOD_RESET = "vmhwm"
# Method if the kernel's peak cannot be reset at start(). The peak may then be from before start(), so it is
# an upper bound.
METHOD_LIFETIME = "vmhwm-since-process-start"
METHOD_MAXRSS = "maxrss-since-process-start"
METHOD_CUDA = "cuda-allocator"

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class MemoryMeter:
    """Meter of the peak memory that this process uses on a device since `start`.

    It must be created before the model, since on a CPU the memory in use at its creation is not the
    training's. It must be started after the warm-up. The base then has libraries, weights, optimizer state
    and allocator pools, and the peak over the base is the memory that a training step adds.
    """

    def __init__(self, device: torch.device | str, nvml: Nvml | None = None) -> None:
        self.device = torch.device(device)
        self._nvml = nvml
        self._method = ""
        self._base_bytes = 0
        self._idle_bytes = _read_resident_bytes() if self.device.type == "cpu" else None

    def start(self) -> None:
        """Start a new measurement of the peak, with the present memory as base. Wait for the device."""
        if self.device.type == "cuda":
            self._nvml = self._nvml or Nvml()
            torch.cuda.synchronize(self.device)
            # The memory in use at the start must not contain cuBLAS's workspaces (tens of MiB per stream),
            # which are no model states.
            free_cublas_workspaces()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._method = METHOD_CUDA
            self._base_bytes = torch.cuda.memory_allocated(self.device)
            return
        gc.collect()
        _trim_heap()
        self._method = _reset_peak_and_choose_peak_method()
        self._base_bytes = _read_resident_bytes()

    def read_memory_since_start(self) -> dict[str, int | str]:
        """Return the peak memory since `start()` and related values in bytes, as far as available.

        It must be called outside of the timed training: it frees cuBLAS's workspaces, which the next matrix
        product allocates again from the allocator's cache.

        Returns:
            `method`: how the peak was measured. `base_bytes`, `peak_bytes`, `peak_over_base_bytes`. On a CPU
            `idle_bytes`: resident memory at the meter's creation, which is part of the peak. On CUDA
            `allocated_peak_bytes` and `reserved_peak_bytes` of the allocator; `requested_peak_bytes`, without
            the allocator's rounding; `cublas_bytes`, which are part of these peaks; `nvml_used_bytes` of the
            whole device and `nvml_process_used_bytes` of this process, both at present.

        Raises:
            RuntimeError: If `start()` was not called.
        """
        if not self._method:
            raise RuntimeError(
                "the memory is read before MemoryMeter.start() was called; call start() first"
            )
        on_cuda = self.device.type == "cuda"
        peak_bytes = (
            torch.cuda.max_memory_allocated(self.device)
            if on_cuda
            else _read_peak_resident_bytes(self._method)
        )
        figures: dict[str, int | str] = {
            "method": self._method,
            "base_bytes": self._base_bytes,
            "peak_bytes": peak_bytes,
            "peak_over_base_bytes": max(peak_bytes - self._base_bytes, 0),
        }
        if self._idle_bytes is not None:
            figures["idle_bytes"] = self._idle_bytes
        if on_cuda:
            figures["allocated_peak_bytes"] = peak_bytes
            figures["reserved_peak_bytes"] = torch.cuda.max_memory_reserved(self.device)
            figures |= _read_peak_requested_bytes(self.device)
            figures |= self._read_nvml_memory()
        return figures

    def _read_nvml_memory(self) -> dict[str, int]:
        gpu = self._nvml.find_gpu_by_uuid(get_cuda_uuid(self.device)) if self._nvml else None
        if gpu is None:
            return {}
        figures = {
            "nvml_used_bytes": gpu.read_used_memory_bytes(),
            "nvml_process_used_bytes": gpu.read_own_process_memory_bytes(),
        }
        return {name: value for name, value in figures.items() if value is not None}


def _read_peak_requested_bytes(device: torch.device) -> dict[str, int]:
    """Return the peak of bytes requested from CUDA's allocator, and cuBLAS's bytes in it.

    cuBLAS allocates a workspace per thread and stream with its first matrix product; the function frees these
    workspaces. Requests are counted before the allocator rounds them up.
    """
    before = torch.cuda.memory_stats(device)
    # Other allocators, such as cudaMallocAsync, do not count requested bytes.
    if not before.get("requested_bytes.all.peak"):
        return {}
    free_cublas_workspaces()
    kept_bytes = (
        before["requested_bytes.all.current"]
        - torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    )
    return {
        "requested_peak_bytes": before["requested_bytes.all.peak"],
        "cublas_bytes": kept_bytes,
    }


def get_cuda_uuid(device: torch.device) -> str | None:
    """Return the UUID of a CUDA device (`GPU-...`). None if torch does not report it."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return None
    text = str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def measure_model_state_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, int]:
    """Return the bytes of parameters, gradients, optimizer state and buffers on this rank.

    The bytes are those between two training steps. A DTensor counts as its local shard, without padding.
    Gradients count as much as the trainable parameters, whether or not they exist now. The optimizer's bytes
    are those of the tensors in its state. Parameters that FSDP2 has left gathered are freed first, since they
    would count in full.
    """
    free_gathered_parameters(model)
    parameters = list(model.parameters())
    state = get_optimizer_state(optimizer).values() if optimizer is not None else ()
    return {
        "parameters_bytes": _sum_local_bytes(parameters),
        "gradients_bytes": _sum_local_bytes(p for p in parameters if p.requires_grad),
        "optimizer_bytes": _sum_local_bytes(
            value for entry in state for value in entry.values() if torch.is_tensor(value)
        ),
        "buffers_bytes": _sum_local_bytes(model.buffers()),
    }


def get_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the dict in which the optimizer stores its state on this rank, by parameter."""
    # ZeroRedundancyOptimizer wraps another optimizer, which has this rank's share of the state.
    return getattr(optimizer, "optim", optimizer).state


def _sum_local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in map(get_local_shard, tensors))


def _trim_heap() -> None:
    """Give unused heap memory back to the kernel.

    The base then does not include this memory. The call works with glibc only.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def _reset_peak_and_choose_peak_method() -> str:
    """Set the kernel's record of peak resident memory (VmHWM) to the present resident memory.

    A write to /proc/self/clear_refs does this (proc(5)). It fails in containers that mount /proc read-only,
    and on systems without /proc.

    Returns:
        Name of the method by which `read_memory_since_start` can then measure the peak.
    """
    try:
        _CLEAR_REFS.write_text("5", encoding="utf-8")
    except OSError:
        return METHOD_LIFETIME if _read_process_status_bytes("VmHWM") is not None else METHOD_MAXRSS
    return METHOD_RESET


def _read_resident_bytes() -> int:
    status_bytes = _read_process_status_bytes("VmRSS")
    return psutil.Process().memory_info().rss if status_bytes is None else status_bytes


def _read_peak_resident_bytes(method: str) -> int:
    peak_bytes = None if method == METHOD_MAXRSS else _read_process_status_bytes("VmHWM")
    if peak_bytes is not None:
        return peak_bytes
    # Without VmHWM, ru_maxrss is used. It is an upper bound, since a program inherits the peak of the program
    # that has started it. Its unit is KiB on Linux, and bytes on macOS.
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _read_process_status_bytes(field: str) -> int | None:
    """Return the bytes in a field of /proc/self/status, or None if the field is missing."""
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None
