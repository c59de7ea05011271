"""A stand-in for the pynvml module: answers shaped like a GPU's, and its ways to fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As pynvml raises for every call that fails."""


class NotSupported(NVMLError):
    pass


class GpuIsLost(NVMLError):
    pass


UUIDS = ("GPU-11111111-2222-3333-4444-555555555555", "GPU-66666666-7777-8888-9999-000000000000")
#: The MIG instance of each GPU, where there are instances; its handle is 10 more than its GPU's.
INSTANCES = ("MIG-aaaaaaaa-2222-3333-4444-555555555555", "MIG-aaaabbbb-7777-8888-9999-000000000000")

# What two A100s on one board answer, in NVML's own units (mW, mJ, KiB/s, bit masks).
ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=41),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=85899345920, used=12884901888, free=0),
    "nvmlDeviceGetPowerUsage": 312_500,
    "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x04 | 0x40,
    "nvmlDeviceGetName": "NVIDIA A100-SXM4-80GB",
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:07:00.0"),
    "nvmlDeviceGetEnforcedPowerLimit": 400_000,
    "nvmlDeviceGetApplicationsClock": 1275,
    "nvmlDeviceGetCurrPcieLinkGeneration": 4,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=4242, usedGpuMemory=1 << 30)],
}


class FakeNvml:
    """`failures` maps a function's name to what it raises; `missing` names what it lacks.

    `mig`: each GPU is divided into MIG instances, of which there is one.
    """

    def __init__(
        self,
        gpus: int = 1,
        failures: dict[str, Exception] | None = None,
        missing: tuple[str, ...] = (),
        answers: dict[str, Any] | None = None,
        mig: bool = False,
    ) -> None:
        self._gpus, self._mig = gpus, mig
        self._failures = failures or {}
        self._missing = missing
        self._answers = ANSWERS | (answers or {})
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in self._missing or not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self._failures:
                raise self._failures[name]
            if name in self._answers:
                return self._answers[name]
            return getattr(self, f"_{name}")(*arguments)

        return call

    def _nvmlInit(self) -> None: ...

    def _nvmlDeviceGetCount(self) -> int:
        return self._gpus

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= self._gpus:
            raise NVMLError("Invalid Argument")
        return index

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid in UUIDS[: self._gpus]:
            return UUIDS.index(uuid)
        if self._mig and uuid in INSTANCES[: self._gpus]:
            return 10 + INSTANCES.index(uuid)
        raise NVMLError("Not Found")

    def _nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle if handle < 10 else 0  # of an instance, its number within its GPU

    def _nvmlDeviceGetUUID(self, handle: int) -> str:
        return UUIDS[handle] if handle < 10 else INSTANCES[handle - 10]

    def _nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [int(self._mig)] * 2  # now, and after the next reset

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7 if self._mig else 0

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> int:
        if index:
            raise NVMLError("Not Found")
        return 10 + handle

    def _nvmlSystemGetDriverVersion(self) -> str:
        return "550.54.15"

    def _nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040

    def _nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return {1: 1410, 2: 1593}[clock]

    _nvmlDeviceGetMaxClockInfo = _nvmlDeviceGetClockInfo

    def _nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return 20

    def _nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 12:
            raise NVMLError("Invalid Argument")
        return 1 if link < 10 else 0

    def _nvmlDeviceGetPcieThroughput(self, handle: int, counter: int) -> int:
        return {0: 1500, 1: 2500}[counter]

    def _nvmlDeviceGetFieldValues(self, handle: int, fields: list[Any]) -> list[Any]:
        """NVLink has 64-bit counters; PCIe's are not supported, as before Hopper."""
        answers = {(138, 0xFFFFFFFF): (0, 100), (139, 0xFFFFFFFF): (0, 200)}
        return [
            SimpleNamespace(
                nvmlReturn=answers.get(field, (3, 0))[0],
                valueType=3,
                value=SimpleNamespace(ullVal=answers.get(field, (3, 0))[1]),
            )
            for field in fields
        ]
