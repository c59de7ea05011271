"""Reads properties of a node: its name, processor, cores and memory, without torch."""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path
from typing import Any

import psutil

from stratbench.telemetry.machine.cores import list_usable_cores


def collect_node_facts() -> dict[str, Any]:
    """Return this node's name, CPU model, memory, and the cores that this process may use."""
    cores = {
        "cores_logical": os.cpu_count(),
        "cores_physical": psutil.cpu_count(logical=False),
        "cpu_quota_cores": _read_cpu_quota_cores(),
    }
    return {
        "name": socket.gethostname(),
        "os": platform.platform(),
        "cpu_model": _read_cpu_model(),
        **{name: value for name, value in cores.items() if value is not None},
        "affinity": sorted(list_usable_cores()),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _read_cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _read_cpu_quota_cores() -> float | None:
    """Return the number of cores that the container's CPU quota (cgroup v2) allows.

    The result is None without a quota.
    """
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)
