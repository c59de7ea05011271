"""Collects facts on a worker's host and software, for the comparison of records.

Each worker collects it on its own node. Facts that the machine does not offer are absent. Secrets are never
included: environment variables are selected by an allow-list, and a variable whose name or value looks like a
secret is left out.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch

from stratbench.telemetry.machine import environment
from stratbench.telemetry.machine.node import collect_node_facts
from stratbench.telemetry.machine.nvml import Nvml
from stratbench.telemetry.memory import get_cuda_uuid
from stratbench.telemetry.shards import gather_full_tensor

_PACKAGES = ("torch", "torchvision", "numpy", "nvidia-ml-py", "psutil")


def collect_worker_provenance(
    device: torch.device | str, nvml: Nvml | None = None
) -> dict[str, Any]:
    """Return facts on host, libraries, flags, environment and device of this worker, for the record.

    Keys: `device`, `host`, `load_1m` (at the call), `software`, `flags`, `environment`, `slurm` (inside a
    SLURM job), and for a CUDA device `gpu`, `driver`, `topology`.
    """
    device = torch.device(device)
    facts: dict[str, Any] = {
        "device": str(device),
        "host": collect_host_facts(),
        "load_1m": os.getloadavg()[0],
        "software": _list_software_versions(),
        "flags": _list_torch_flags(),
        "environment": environment.select_training_variables(os.environ),
    }
    if slurm := environment.select_slurm_variables(os.environ):
        facts["slurm"] = slurm
    if device.type == "cuda":
        facts |= _collect_gpu_facts(device, nvml or Nvml())
    return facts


def collect_host_facts() -> dict[str, Any]:
    """Return this node's name, cores and memory, and PyTorch's thread counts."""
    threads = {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
    }
    return collect_node_facts() | threads


def hash_state_dict(state_dict: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the weights in a model's state dict.

    The hash is over the name, dtype, shape and bytes of each, sorted by name. Equal weights have equal
    hashes, regardless of device, memory layout, sharding and wrapper: the name prefixes of DDP and
    torch.compile are removed. With DTensors every rank must call it.

    Raises:
        TypeError: If an entry is not a tensor.
    """
    wrapped = all(name.startswith("module.") for name in state_dict)
    bare = {
        (name.removeprefix("module.") if wrapped else name).replace("_orig_mod.", ""): tensor
        for name, tensor in state_dict.items()
    }
    digest = hashlib.sha256()
    for name in sorted(bare):
        tensor = bare[name]
        if not torch.is_tensor(tensor):
            raise TypeError(
                f"the state dict to hash has an entry {name!r} of type {type(tensor).__name__}; give "
                "tensors only"
            )
        tensor = gather_full_tensor(tensor)
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()


def _list_software_versions() -> dict[str, Any]:
    versions: dict[str, Any] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # torch's own version has the suffix of the build (+cpu, +cu130), which package metadata may lack.
    versions["torch"] = torch.__version__
    backends = torch.distributed if torch.distributed.is_available() else None
    # gloo has torch's version, because its source is part of torch.
    libraries = {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": _call_if_supported(torch.backends.cudnn.version),
        "nccl": _call_if_supported(
            lambda: ".".join(str(part) for part in torch.cuda.nccl.version())
        ),
        "gloo": f"bundled with torch {torch.__version__}"
        if backends and backends.is_gloo_available()
        else None,
    }
    return versions | {name: value for name, value in libraries.items() if value is not None}


def _list_torch_flags() -> dict[str, Any]:
    # Older flags are read by `_call_if_supported`: reading them fails once newer precision settings were
    # used.
    flags = {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_enabled": torch.backends.cudnn.enabled,
        "float32_matmul_precision": _call_if_supported(torch.get_float32_matmul_precision),
        "matmul_tf32": _call_if_supported(lambda: torch.backends.cuda.matmul.allow_tf32),
        "cudnn_tf32": _call_if_supported(lambda: torch.backends.cudnn.allow_tf32),
        "default_dtype": str(torch.get_default_dtype()),
    }
    return {name: value for name, value in flags.items() if value is not None}


def _call_if_supported(query: Callable[[], Any]) -> Any | None:
    """Return the result of a query of PyTorch. None if this build of PyTorch does not support it."""
    try:
        return query()
    except (AttributeError, RuntimeError, ImportError):
        return None


def _collect_gpu_facts(device: torch.device, nvml: Nvml) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    gpu: dict[str, Any] = {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
    }
    if uuid := get_cuda_uuid(device):
        gpu["uuid"] = uuid
    if nvml_gpu := nvml.find_gpu_by_uuid(uuid):
        gpu |= nvml_gpu.read_identity_and_settings()
    facts: dict[str, Any] = {"gpu": gpu}
    if nvml.reason:
        facts["nvml_reason"] = nvml.reason
    if driver := nvml.read_driver_versions():
        facts["driver"] = driver
    if topology := nvml.list_gpu_pair_pcie_paths():
        facts["topology"] = topology
    return facts
