"""Describes the devices that cells run on: GPUs named in the config, and this host's CPU."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from stratbench.cell.text.words import GIB, MIB
from stratbench.study.config.messages import ConfigError
from stratbench.telemetry.machine.hardware import Datasheet, find_datasheet, list_datasheets

#: Maximum fraction of the advertised memory that the driver reserves (ECC and its own needs).
DRIVER_SHARE = 0.06
#: Fraction of the advertised memory that PyTorch's allocator does not manage: the CUDA context, NCCL's
#: buffers, cuBLAS and cuDNN. With the default `cluster.memory_margin` cells may use 81 %.
CONTEXT_SHARE = 0.05
#: Resident memory of a CPU worker in addition to its training. The interpreter, torch and its libraries
#: need about 0.4 GiB, and the C library's allocator retains freed memory.
CPU_PROCESS_BYTES = 1 * GIB
#: Host memory of a GPU worker in addition to its training, including CUDA and NCCL.
GPU_HOST_PROCESS_BYTES = 4 * GIB
#: Fraction of the peak rate that fused attention reaches, if causal attention counts as full. The first value
#: is for GPUs such as the A100. The second is for GPUs such as the H100, with more than FAST_TFLOPS dense
#: TFLOPS in half precision. Both values fit published training steps of MPT.
ATTENTION_UTILISATION = (0.6, 0.33)
FAST_TFLOPS = 400
#: Assumed one-way rate between two nodes if the config gives none: 100 Gbit/s.
NETWORK_GB_PER_S = 12.5


@dataclass(frozen=True)
class Device:
    """A device of one worker, with the memory and rates that the plan assumes.

    Rates are peaks per second, or None if unknown.

    Attributes:
        memory_bytes: Maximum memory that a worker can use.
        reserve_bytes: Part of the memory that may be used outside of the framework's allocator.
        flops_per_s: Floating-point operations.
        memory_bytes_per_s: Bytes of device memory.
        link_bytes_per_s: Bytes sent to a worker on the same node.
        network_bytes_per_s: Bytes sent to a worker on another node.
        resident_threads: Threads that the whole GPU can run at once, from the table of GPUs.
        attention_utilisation: Fraction of the peak rate that fused attention usually reaches; None if
            equal to other products.
    """

    name: str
    memory_bytes: int
    flops_per_s: float | None
    memory_bytes_per_s: float | None
    link_bytes_per_s: float
    network_bytes_per_s: float
    is_gpu: bool
    resident_threads: int = 0
    reserve_bytes: int = 0
    attention_utilisation: float | None = None

    def compute_max_fitting_bytes(self, margin: float) -> float:
        """Return the largest prediction in bytes with which a cell certainly fits.

        The real need may exceed the prediction by the fraction `margin`.
        """
        return (self.memory_bytes - self.reserve_bytes) / (1 + margin)

    def compute_max_bytes_that_may_fit(self, margin: float) -> float:
        """Return the largest prediction in bytes with which a cell may still fit.

        On GPUs the prediction may exceed the real need by the fraction `margin`.
        """
        return self.memory_bytes * (1 + margin if self.is_gpu else 1)

    def get_slowest_link_bytes_per_s(self, nodes: int) -> float:
        """Return one-way bytes per second of the slowest link in a ring over `nodes` nodes."""
        if nodes == 1:
            return self.link_bytes_per_s
        return min(self.link_bytes_per_s, self.network_bytes_per_s)


def find_matching_datasheets(gpu_name: str) -> list[Datasheet]:
    """Return the datasheets of the GPUs that a name such as `A10G 24GB` may mean."""
    if (exact := find_datasheet(gpu_name)) is not None:
        return [exact]
    size = re.search(r"(\d+)\s*gi?b\b", gpu_name, re.IGNORECASE)
    words = set(re.sub(r"\d+\s*gi?b\b", " ", gpu_name, flags=re.IGNORECASE).lower().split())
    words -= {"nvidia", "tesla", "geforce"}
    return [
        peak
        for peak in list_datasheets()
        if words
        and words <= set(peak.name.lower().split())
        and (size is None or int(size[1]) == round(peak.memory_gib))
    ]


def find_gpu_datasheet(gpu_name: str, where: str = "config: cluster.gpu") -> Datasheet:
    """Return the datasheet of a named GPU, the first if the name fits several.

    Raises:
        ConfigError: If no GPU matches; the message begins with `where`.
    """
    for peak in find_matching_datasheets(gpu_name):
        return peak
    raise ConfigError(
        f"{where} = {gpu_name!r}: is not in the table of GPUs; choose one of {format_known_gpu_names()}"
    )


def format_known_gpu_names() -> str:
    """Return the names of the table's GPUs, separated by commas."""
    return ", ".join(peak.name for peak in list_datasheets())


def list_configured_gpus(cluster: Mapping[str, Any]) -> list[Datasheet]:
    """Return the datasheets of the GPUs in the config: `gpu`, then `compare_gpus`.

    Raises:
        ConfigError: For an unknown GPU.
    """
    own = [cluster["gpu"]] if cluster["gpu"] else []
    return list(dict.fromkeys(find_gpu_datasheet(name) for name in own + cluster["compare_gpus"]))


def make_gpu_device(datasheet: Datasheet, precision: str, cluster: Mapping[str, Any]) -> Device:
    """Return a GPU as a device of the plan, with memory, rates and link.

    The link rate is that of the config, or else that of the datasheet.

    Args:
        datasheet: Datasheet of the GPU.
        precision: Precision of the training.
        cluster: The block `cluster` of the config.
    """
    tflops = None if precision == "fp64" else datasheet.get_peak_tflops(precision)
    link_gb_per_s = cluster["link_gb_per_s"] or datasheet.link_gb_per_s
    return Device(
        name=datasheet.name,
        memory_bytes=int(datasheet.memory_gib * GIB * (1 - DRIVER_SHARE)),
        reserve_bytes=int(datasheet.memory_gib * GIB * CONTEXT_SHARE),
        flops_per_s=None if tflops is None else tflops * 1e12,
        memory_bytes_per_s=datasheet.memory_gb_per_s * 1e9,
        link_bytes_per_s=link_gb_per_s * 1e9,
        network_bytes_per_s=(cluster["network_gb_per_s"] or NETWORK_GB_PER_S) * 1e9,
        is_gpu=True,
        resident_threads=datasheet.resident_threads,
        attention_utilisation=ATTENTION_UTILISATION[(datasheet.bf16_tflops or 0) > FAST_TFLOPS],
    )


def make_cpu_device(cluster: Mapping[str, Any], workers: int) -> Device:
    """Return one worker's part of this host's CPU, as a device of the plan.

    `workers` processes share the CPU.
    """
    return Device(
        name="CPU",
        memory_bytes=cluster["mem_mib_per_gpu"] * MIB - CPU_PROCESS_BYTES,
        flops_per_s=measure_cpu_flops_per_s() / workers,
        memory_bytes_per_s=None,
        link_bytes_per_s=_LOOPBACK_BYTES_PER_S,
        network_bytes_per_s=(cluster["network_gb_per_s"] or NETWORK_GB_PER_S) * 1e9,
        is_gpu=False,
    )


#: Assumed rate of gloo or a socket between two processes of the same host.
_LOOPBACK_BYTES_PER_S = 2e9


@cache
def measure_cpu_flops_per_s() -> float:
    """Measure the floating-point operations per second of all cores of this host."""
    import numpy as np

    a = np.ones((1024, 1024), dtype=np.float32)
    a @ a  # not timed, since it starts the library's threads
    best_s = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        a @ a
        best_s = min(best_s, time.perf_counter() - begun)
    return 2 * 1024**3 / best_s
