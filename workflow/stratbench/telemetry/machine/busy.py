"""Measures how much other programs use this machine before a cell begins."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil

from stratbench.telemetry.machine.foreign_processes import is_mps_server
from stratbench.telemetry.machine.nvml import Nvml


def measure_load_of_other_programs(
    window_s: float = 0.5, nvml: Nvml | None = None
) -> dict[str, Any]:
    """Measure for `window_s` how much other programs use this machine; return CPU load and processes.

    Other programs are all processes except this one, its ancestors and its descendants. The function must be
    called before a cell starts, when the cell uses no GPU.

    Returns:
        `other_cpu_cores`: cores that other processes keep busy, including those of other containers.
        `load_1m`: the system's load average. `other_processes`: at most five visible processes that use more
        than a tenth of a core, the busiest first. `other_gpu_processes`: NVML's numbers of the processes on
        each GPU of the node, if any; they may differ in a container.
    """
    ours = _list_own_process_tree_pids()
    before, total_before = _read_cpu_s_by_pid(), _read_busy_cpu_s()
    begun_s = time.monotonic()
    time.sleep(window_s)
    after, total_after = _read_cpu_s_by_pid(), _read_busy_cpu_s()
    # Processes that this process started during the measurement do not count as other programs either.
    ours |= _list_own_process_tree_pids()
    elapsed_s = time.monotonic() - begun_s
    cores = {pid: (after[pid] - before.get(pid, 0.0)) / elapsed_s for pid in after}
    own_cores = sum(used for pid, used in cores.items() if pid in ours)
    busiest = sorted((p for p in cores if p not in ours), key=cores.__getitem__, reverse=True)
    facts: dict[str, Any] = {
        "other_cpu_cores": round(max(0.0, (total_after - total_before) / elapsed_s - own_cores), 3),
        "load_1m": os.getloadavg()[0],
        "other_processes": [
            {"pid": pid, "name": _get_process_name(pid), "cores": round(cores[pid], 3)}
            for pid in busiest[:5]
            if cores[pid] > 0.1
        ],
    }
    foreign_processes = {
        gpu.index: [p for p in gpu.read_memory_bytes_by_pid() if not is_mps_server(p)]
        for gpu in (nvml or Nvml()).list_gpus()
    }
    if any(foreign_processes.values()):
        facts["other_gpu_processes"] = {
            gpu: pids for gpu, pids in foreign_processes.items() if pids
        }
    return facts


def _list_own_process_tree_pids() -> set[int]:
    here = psutil.Process()
    relatives = [here, *here.parents(), *here.children(recursive=True)]
    return {process.pid for process in relatives}


def _read_cpu_s_by_pid() -> dict[int, float]:
    """Return the CPU seconds of every visible process, by process id."""
    seconds = {}
    for process in psutil.process_iter():
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        seconds[process.pid] = times.user + times.system
    return seconds


def _read_busy_cpu_s() -> float:
    """Return the CPU seconds that all processes have used since boot, summed over the cores."""
    times = psutil.cpu_times()
    # Guests' time is already part of user and nice time. Stolen time is used by other virtual machines.
    idle = ("idle", "iowait", "steal", "guest", "guest_nice")
    return sum(value for name, value in times._asdict().items() if name not in idle)


def _get_process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "?"
