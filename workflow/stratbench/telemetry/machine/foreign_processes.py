"""Detects foreign processes (of other programs) that compute on a cell's GPUs.

The cell's processes descend from its agent, as the fork server and the workers do. A program that only draws
on a screen is not a foreign process, nor is the server of CUDA's MPS, but their memory counts. Neither torch
nor psutil is imported before a process is checked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stratbench.cell.files import format_os_error, write_text_atomically
from stratbench.cell.text.words import GIB
from stratbench.telemetry.machine.nvml import Gpu, Nvml

#: Bytes of a cell's GPU that other processes may use without consequences. The plan reserves as much for
#: memory outside of PyTorch's allocator.
OTHERS_BYTES = 1 * GIB
_MPS_SERVERS = ("nvidia-cuda-mps-server",)


def find_gpu_index_and_uuid(nvml: Nvml, name: str) -> dict[str, Any]:
    """Return the index and UUID of a GPU by its name in CUDA_VISIBLE_DEVICES.

    The keys are `index` and `uuid`, or only `name` if NVML does not know the GPU.
    """
    gpu = nvml.find_gpu_by_name(name)
    known = {} if gpu is None else gpu.read_identity_and_settings()
    return {key: known[key] for key in ("index", "uuid") if key in known} or {"name": name}


def find_worker_gpu(nvml: Nvml, gpu: dict[str, Any]) -> Gpu | None:
    """Return the GPU with this index or UUID. None if NVML does not know it."""
    return nvml.find_gpu_by_name(str(gpu.get("uuid", gpu.get("index", ""))))


def describe_gpu(gpu: dict[str, Any]) -> str:
    """Return a GPU's index and UUID as text, such as `GPU 1 (GPU-d8c5e28f-…)`."""
    number, uuid = gpu.get("index", gpu.get("name")), gpu.get("uuid")
    return f"GPU {number}" + (f" ({uuid})" if uuid else "")


def is_mps_server(pid: int) -> bool:
    """Return whether a process is the server of CUDA's MPS, which computes for other processes."""
    import psutil

    try:
        return psutil.Process(pid).name() in _MPS_SERVERS
    except psutil.Error:
        return False


def is_foreign_process(pid: int, ancestor_pid: int) -> bool | None:
    """Return whether a process on a GPU does not belong to the cell.

    The result is None for an ended process, and for CUDA's MPS server, which computes for others.

    Args:
        pid: Process on a GPU.
        ancestor_pid: Process from which all processes of the cell descend.
    """
    import psutil

    if is_mps_server(pid) or not psutil.pid_exists(pid):
        return None
    try:
        return ancestor_pid not in (pid, *(p.pid for p in psutil.Process(pid).parents()))
    except psutil.Error:
        # The process is hidden from this user, so it belongs to another user.
        return True


class ForeignProcessWatch:
    """Recorder of foreign processes that compute on the cell's GPUs of this node.

    It watches only GPUs on which NVML lists a process of the cell: in a container NVML's process numbers may
    be meaningless.
    """

    def __init__(self, out: Path, gpus: Iterable[Gpu], agent_pid: int) -> None:
        self._out = out
        self._gpus = list(gpus)
        self._agent_pid = agent_pid
        self._foreign: dict[int, bool | None] = {agent_pid: False}
        self._found: dict[tuple[int | str | None, int], dict[str, Any]] = {}

    def poll_gpus(self, t_s: float) -> None:
        """Ask NVML for each GPU's processes. Write the file if a foreign one is new.

        Args:
            t_s: Present time in seconds, as it is recorded.
        """
        known = len(self._found)
        for gpu in self._gpus:
            held_bytes = gpu.read_memory_bytes_by_pid()
            for pid in held_bytes.keys() - self._foreign.keys():
                self._foreign[pid] = is_foreign_process(pid, self._agent_pid)
            if not any(self._foreign[pid] is False for pid in held_bytes):
                continue
            for pid in filter(self._foreign.get, held_bytes):
                entry = self._found.setdefault(
                    (gpu.read_uuid() if gpu.index is None else gpu.index, pid),
                    {"gpu": gpu.index, "pid": pid, "bytes": None, "first_s": t_s},
                )
                entry["bytes"] = max(entry["bytes"] or 0, held_bytes[pid] or 0) or None
                entry["last_s"] = t_s
        if len(self._found) > known:
            self.write_foreign_processes()

    def write_foreign_processes(self) -> None:
        """Write the foreign processes to the file, if there are any. An error is only printed."""
        try:
            if self._found:
                write_text_atomically(self._out, json.dumps(list(self._found.values())))
        except OSError as error:
            print(f"sampler: {format_os_error(error)}", file=sys.stderr, flush=True)


def find_other_gpu_users(
    gpu: Gpu, ancestor_pid: int, own_pid: int, allocated_bytes: int | None
) -> dict[str, Any] | None:
    """Return the other users of a GPU on which a worker ran out of memory. None without other users.

    Args:
        gpu: The GPU.
        ancestor_pid: Process from which all processes of the cell descend.
        own_pid: Process of the worker.
        allocated_bytes: Memory that PyTorch has allocated for the worker, or None before its first use.

    Returns:
        `processes`: foreign processes with their bytes. `others_bytes`: the memory in use without the
        worker's own, or None if unknown.
    """
    held_bytes = gpu.read_memory_bytes_by_pid()
    own_bytes = held_bytes.get(own_pid)
    foreign_processes = {}
    # If NVML does not list this worker, NVML's process ids are not this node's (as in a container).
    if allocated_bytes is None or own_pid in held_bytes:
        foreign_processes = {
            p: n for p, n in held_bytes.items() if is_foreign_process(p, ancestor_pid)
        }
    used_bytes = gpu.read_used_memory_bytes()
    if own_bytes is None:
        own_bytes = 0 if allocated_bytes is None else allocated_bytes + OTHERS_BYTES
    others_bytes = None if used_bytes is None else max(0, used_bytes - own_bytes)
    if not foreign_processes and (others_bytes or 0) <= OTHERS_BYTES:
        return None
    listed = [{"pid": pid, "bytes": held} for pid, held in foreign_processes.items()]
    return {"processes": listed, "others_bytes": others_bytes}
