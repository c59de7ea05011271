"""A machine with GPUs in software: its file, its GPUs' names, and what processes have done on it."""

from __future__ import annotations

import ctypes
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from stratbench.cell import software_gpu

LIBRARIES = Path(sys.prefix, software_gpu.FOLDER)
#: Of `layout` in libraries/hardware.h.
LAYOUT_BYTES = 1024


@dataclass(frozen=True)
class Process:
    """What a process has done: bytes that it holds, by GPU, and counts by name."""

    pid: int
    ended: bool
    used_bytes: tuple[int, ...]
    counts: dict[str, int]


class Machine:
    """The machine of a file. Processes are on it whose SOFTWARE_GPU_STATE names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def processes(self) -> list[Process]:
        """All processes that have been on it, in no order."""
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        gpus, most, *names = content[:LAYOUT_BYTES].rstrip(b"\0").decode().split()
        gpus, most = int(gpus), int(most)
        entry = struct.Struct(f"iiq{gpus}q{len(names)}q")
        first = LAYOUT_BYTES + 8 * (1 + gpus)
        found = []
        for n in range(most):
            pid, ended, _, *values = entry.unpack_from(content, first + n * entry.size)
            if pid > 0:
                counts = dict(zip(names, values[gpus:], strict=True))
                found.append(Process(pid, bool(ended), tuple(values[:gpus]), counts))
        return found

    def total(self, name: str) -> int:
        """A count over all processes."""
        return sum(process.counts[name] for process in self.processes())

    def uuid(self, gpu: int, mig: bool = False) -> str:
        """The UUID of a GPU, or of its MIG instance, as NVML tells it. The machine must be this process's."""
        nvml = ctypes.CDLL(str(LIBRARIES / "libnvidia-ml.so.1"))
        handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        assert nvml.nvmlInit_v2() == 0
        assert nvml.nvmlDeviceGetHandleByIndex_v2(gpu, ctypes.byref(handle)) == 0
        if mig:
            assert nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0, ctypes.byref(handle)) == 0
        assert nvml.nvmlDeviceGetUUID(handle, text, 96) == 0
        return text.value.decode()

    def remove(self) -> None:
        """Forget it, with what its communicators have left."""
        for path in self.path.parent.glob(f"{self.path.name}*"):
            path.unlink(missing_ok=True)
