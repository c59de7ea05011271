"""Asks NVIDIA's management library (NVML) about GPUs. No function raises an exception.

Values that the driver, the GPU or the library does not offer are absent, and never zero.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

# Reasons why a GPU's clocks are reduced: bits of nvmlClocksEventReasons (nvml.h), with nvidia-smi's names.
THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}

# Kinds of paths between two GPUs: values of nvmlGpuTopologyLevel, with the names of `nvidia-smi topo -m`.
_PATHS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

# Numbers of NVML's fields and constants, from nvml.h. They never change, so they are copied here.
_FIELD_NVLINK_TX_KIB, _FIELD_NVLINK_RX_KIB = 138, 139
_FIELD_PCIE_TX_BYTES, _FIELD_PCIE_RX_BYTES = 197, 198
_ALL_LINKS = 0xFFFFFFFF
_MAX_LINKS = 36
_VALUE_TYPE_UINT64 = 3
_TEMPERATURE_GPU = 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_PCIE_TX, _PCIE_RX = 0, 1


class Nvml:
    """The initialised NVML library. It lists no GPUs if the library or the driver is missing.

    `library` replaces the module `pynvml` (package nvidia-ml-py). `reason` says why NVML does not work, or is
    None if it works.
    """

    def __init__(self, library: Any | None = None) -> None:
        self.reason: str | None = None
        self._library = library
        try:
            if library is None:
                self._library = importlib.import_module("pynvml")
            self._library.nvmlInit()
        except Exception as error:
            self._library = None
            self.reason = f"{type(error).__name__}: {error}"

    def list_gpus(self) -> list[Gpu]:
        """Return all GPUs of this node in NVML's (PCI) order, regardless of CUDA_VISIBLE_DEVICES."""
        count = self.call_function("nvmlDeviceGetCount") or 0
        handles = ((i, self.call_function("nvmlDeviceGetHandleByIndex", i)) for i in range(count))
        return [Gpu(self, index, handle) for index, handle in handles if handle is not None]

    def find_gpu_by_uuid(self, uuid: str | None) -> Gpu | None:
        """Return the GPU or MIG instance with this UUID (`GPU-...`, `MIG-...`), or None.

        CUDA reports an instance's UUID without the prefix `MIG-`, so a UUID that is no GPU's is looked up as
        an instance's. A GPU that is divided into instances is not found, since its power and energy are those
        of all instances.
        """
        if not uuid:
            return None
        handle = self.call_function("nvmlDeviceGetHandleByUUID", uuid)
        if handle is None:
            uuid = uuid.replace("GPU-", "MIG-", 1)
            handle = self.call_function("nvmlDeviceGetHandleByUUID", uuid)
        if handle is None:
            return None
        if uuid.startswith("MIG-"):
            # NVML counts MIG instances within their GPU, so an instance gets no index here.
            return Gpu(self, None, handle)
        divided, _ = self.call_function("nvmlDeviceGetMigMode", handle) or (False, False)
        return (
            None if divided else Gpu(self, self.call_function("nvmlDeviceGetIndex", handle), handle)
        )

    def find_gpu_uuid(self, name: str) -> str | None:
        """Return the UUID of the GPU or MIG instance that an entry of CUDA_VISIBLE_DEVICES names.

        The result is None if no GPU or more than one has this name.

        Args:
            name: Number in NVML's (PCI) order, or the beginning of a GPU's or MIG instance's UUID.
        """
        if not name:
            return None
        gpus = self.list_gpus()
        if name.isdecimal():
            return next((gpu.read_uuid() or name for gpu in gpus if gpu.index == int(name)), None)
        uuids = [
            each.read_uuid() or "" for gpu in gpus for each in (gpu, *gpu.list_mig_instances())
        ]
        fitting = [uuid for uuid in uuids if uuid.startswith(name)]
        return fitting[0] if len(fitting) == 1 else None

    def find_gpu_by_name(self, name: str) -> Gpu | None:
        """Return the GPU or MIG instance that an entry of CUDA_VISIBLE_DEVICES names, or None."""
        return self.find_gpu_by_uuid(self.find_gpu_uuid(name))

    def read_driver_versions(self) -> dict[str, str]:
        """Return the versions of the GPU driver and of the newest CUDA that it supports.

        The keys are `driver_version` and `cuda_driver_version`; the latter is major.minor.
        """
        cuda = self.call_function("nvmlSystemGetCudaDriverVersion_v2")
        return _drop_none_values(
            driver_version=_decode_text(self.call_function("nvmlSystemGetDriverVersion")),
            cuda_driver_version=cuda and f"{cuda // 1000}.{cuda % 1000 // 10}",
        )

    def list_gpu_pair_pcie_paths(self) -> list[dict[str, Any]]:
        """Return the PCI path of each pair of GPUs, as `{"gpus": [0, 1], "path": "PIX"}`.

        The paths have the names of `nvidia-smi topo -m`. `Gpu.read_identity_and_settings()` has the NVLinks.
        """
        gpus = self.list_gpus()
        pairs = []
        for position, one in enumerate(gpus):
            for other in gpus[position + 1 :]:
                level = self.call_function(
                    "nvmlDeviceGetTopologyCommonAncestor", one.handle, other.handle
                )
                if level is not None:
                    path = _PATHS.get(level, str(level))
                    pairs.append({"gpus": [one.index, other.index], "path": path})
        return pairs

    def call_function(self, function: str, *arguments: Any) -> Any | None:
        """Call a function of NVML. Return its result, or None if the function is missing or fails."""
        if self._library is None:
            return None
        try:
            return getattr(self._library, function)(*arguments)
        except Exception:
            return None


class Gpu:
    """One GPU, or one MIG instance (a part of a GPU), which has no `index`."""

    def __init__(self, nvml: Nvml, index: int | None, handle: Any) -> None:
        self.index = index
        self.handle = handle
        self._nvml = nvml

    def read_counters(self) -> dict[str, float | int | str]:
        """Return the GPU's counters that change while a cell trains, such as power and memory.

        The energy is read first. Keys: `gpu_util_pct` (share of time with a running kernel),
        `mem_bus_util_pct`, `mem_used_bytes`, `power_w` (averaged by the driver over about a second on recent
        GPUs), `energy_j` (cumulative since the driver was loaded), `temperature_c`, `sm_clock_mhz`,
        `mem_clock_mhz`, `throttle` (names joined by `;`, empty if nothing limits the clocks),
        `nvlink_tx_bytes`, `nvlink_rx_bytes`, `pcie_tx_bytes`, `pcie_rx_bytes` (cumulative; present if they
        are 64-bit counters, otherwise see `measure_pcie_bytes_per_s`).
        """
        # Power and energy are not read for a MIG instance: NVML may return those of the whole GPU.
        whole = self.index is not None
        energy_mj = self._call_function("nvmlDeviceGetTotalEnergyConsumption") if whole else None
        power_mw = self._call_function("nvmlDeviceGetPowerUsage") if whole else None
        utilisation = self._call_function("nvmlDeviceGetUtilizationRates")
        return self._read_traffic_counters() | _drop_none_values(
            gpu_util_pct=getattr(utilisation, "gpu", None),
            mem_bus_util_pct=getattr(utilisation, "memory", None),
            mem_used_bytes=self.read_used_memory_bytes(),
            power_w=_scale_unless_none(power_mw, 1e-3),
            energy_j=_scale_unless_none(energy_mj, 1e-3),
            temperature_c=self._call_function("nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
            sm_clock_mhz=self._call_function("nvmlDeviceGetClockInfo", _CLOCK_SM),
            mem_clock_mhz=self._call_function("nvmlDeviceGetClockInfo", _CLOCK_MEMORY),
            throttle=self._list_throttle_reasons(),
        )

    def measure_pcie_bytes_per_s(self) -> dict[str, int]:
        """Measure the bytes per second that the GPU sends and receives over PCIe.

        Each of the two measurements takes 20 ms.
        """
        return _drop_none_values(
            pcie_tx_bytes_per_s=_scale_unless_none(
                self._call_function("nvmlDeviceGetPcieThroughput", _PCIE_TX), 1000
            ),
            pcie_rx_bytes_per_s=_scale_unless_none(
                self._call_function("nvmlDeviceGetPcieThroughput", _PCIE_RX), 1000
            ),
        )

    def read_uuid(self) -> str | None:
        """Return the UUID of the GPU (`GPU-...`) or MIG instance (`MIG-...`)."""
        return _decode_text(self._call_function("nvmlDeviceGetUUID"))

    def list_mig_instances(self) -> list[Gpu]:
        """Return the MIG instances into which the GPU is divided."""
        max_instances = self._call_function("nvmlDeviceGetMaxMigDeviceCount") or 0
        handles = (
            self._call_function("nvmlDeviceGetMigDeviceHandleByIndex", i)
            for i in range(max_instances)
        )
        return [Gpu(self._nvml, None, handle) for handle in handles if handle is not None]

    def read_identity_and_settings(self) -> dict[str, Any]:
        """Return the GPU's name, ids, memory, power limit and other settings, for the record."""
        memory = self._read_memory_info()
        return _drop_none_values(
            index=self.index,
            name=_decode_text(self._call_function("nvmlDeviceGetName")),
            uuid=self.read_uuid(),
            pci_bus_id=_decode_text(
                getattr(self._call_function("nvmlDeviceGetPciInfo"), "busId", None)
            ),
            memory_bytes=getattr(memory, "total", None),
            power_limit_w=_scale_unless_none(
                self._call_function("nvmlDeviceGetEnforcedPowerLimit"), 1e-3
            ),
            max_sm_clock_mhz=self._call_function("nvmlDeviceGetMaxClockInfo", _CLOCK_SM),
            max_mem_clock_mhz=self._call_function("nvmlDeviceGetMaxClockInfo", _CLOCK_MEMORY),
            application_sm_clock_mhz=self._call_function(
                "nvmlDeviceGetApplicationsClock", _CLOCK_SM
            ),
            pcie_generation=self._call_function("nvmlDeviceGetCurrPcieLinkGeneration"),
            pcie_width=self._call_function("nvmlDeviceGetCurrPcieLinkWidth"),
            nvlinks_active=self._count_active_nvlinks(),
        )

    def read_used_memory_bytes(self) -> int | None:
        """Return the bytes of memory that all processes together use on the whole device."""
        return getattr(self._read_memory_info(), "used", None)

    def read_own_process_memory_bytes(self) -> int | None:
        """Return the bytes of GPU memory that this process uses.

        The result is None if NVML does not know the id of this process, as within a container.
        """
        wanted = os.getpid()
        for process in self._call_function("nvmlDeviceGetComputeRunningProcesses") or ():
            if process.pid == wanted:
                return process.usedGpuMemory
        return None

    def read_memory_bytes_by_pid(self) -> dict[int, int | None]:
        """Return, by process id, the bytes of GPU memory of each computing process.

        A program that also draws, as a desktop does, is left out. A process has None if its memory is
        unknown.
        """
        processes = self._call_function("nvmlDeviceGetComputeRunningProcesses") or ()
        drawing = {
            p.pid for p in self._call_function("nvmlDeviceGetGraphicsRunningProcesses") or ()
        }
        return {p.pid: p.usedGpuMemory for p in processes if p.pid not in drawing}

    def _call_function(self, function: str, *arguments: Any) -> Any | None:
        return self._nvml.call_function(function, self.handle, *arguments)

    def _read_memory_info(self) -> Any | None:
        # Version 2 of the function does not count memory that the driver reserves as used; version 1 does.
        version_2 = 0x02000000 | 40
        info = self._call_function("nvmlDeviceGetMemoryInfo", version_2)
        return self._call_function("nvmlDeviceGetMemoryInfo") if info is None else info

    def _list_throttle_reasons(self) -> str | None:
        bits = self._call_function("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            # Drivers before R535 only have the function's older name.
            bits = self._call_function("nvmlDeviceGetCurrentClocksThrottleReasons")
        if bits is None:
            return None
        return ";".join(name for bit, name in THROTTLE_REASONS.items() if bits & bit)

    def _read_traffic_counters(self) -> dict[str, int]:
        fields = [
            (_FIELD_NVLINK_TX_KIB, _ALL_LINKS),
            (_FIELD_NVLINK_RX_KIB, _ALL_LINKS),
            _FIELD_PCIE_TX_BYTES,
            _FIELD_PCIE_RX_BYTES,
        ]
        answers = self._call_function("nvmlDeviceGetFieldValues", fields)
        if answers is None or len(answers) != len(fields):
            return {}
        # Only 64-bit counters of bytes are used, since a 32-bit one overflows between two samples.
        nv_tx, nv_rx, pcie_tx, pcie_rx = (
            int(a.value.ullVal) if a.nvmlReturn == 0 and a.valueType == _VALUE_TYPE_UINT64 else None
            for a in answers
        )
        return _drop_none_values(
            nvlink_tx_bytes=_scale_unless_none(nv_tx, 1024),
            nvlink_rx_bytes=_scale_unless_none(nv_rx, 1024),
            pcie_tx_bytes=pcie_tx,
            pcie_rx_bytes=pcie_rx,
        )

    def _count_active_nvlinks(self) -> int | None:
        states = []
        for link in range(_MAX_LINKS):
            state = self._call_function("nvmlDeviceGetNvLinkState", link)
            if state is None:
                break
            states.append(state)
        return sum(states) if states else None


def _drop_none_values(**figures: Any) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if value is not None}


def _scale_unless_none(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _decode_text(value: str | bytes | None) -> str | None:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
