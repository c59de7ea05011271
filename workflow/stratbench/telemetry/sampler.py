"""Samples CPU, memory and GPUs of a node while a cell trains. This runs in its own process per node.

python -m stratbench.telemetry.sampler --out samples.csv --origin-s 4200.0

A launcher starts and stops this process by `Sampler`. The process imports no torch, has the lowest priority
and avoids the cores to which the watched processes are bound. Columns: `timeline.SAMPLE_COLUMNS`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil

from stratbench.telemetry.machine.cores import list_usable_cores
from stratbench.telemetry.machine.foreign_processes import ForeignProcessWatch
from stratbench.telemetry.machine.nvml import Gpu, Nvml
from stratbench.telemetry.timeline import SAMPLE_COLUMNS

#: Longest time in seconds that the sampler process may take to end before it is killed.
MAX_STOP_S = 5.0
# Number of samples per measurement of PCIe rates, which blocks the sampler for 20 ms.
_SAMPLES_PER_PCIE_SNAPSHOT = 10
# Number of samples per check for foreign processes on the cell's GPUs.
_SAMPLES_PER_PROCESS_CHECK = 2
# Longest time in seconds between two checks that the sampler's parent process still exists.
_MAX_WAIT_S = 1.0
# Signal on which the sampler takes a sample at once. SIGCONT does not harm a sampler that is still starting.
_WAKE = signal.SIGCONT
# Text after a process's id in the launcher's file if its rows include the process's descendants.
_WITH_DESCENDANTS = "with-descendants"
# Shortest time in seconds over which a share of CPU time is computed. The kernel counts in ticks of 10 ms.
_SHORTEST_SHARE_S = 0.05


class Sampler:
    """Handle on the node's sampler process for the launcher that starts it.

    The process ends when the launcher ends. If it cannot start or ends early, the cell does not fail, but the
    file has fewer rows.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        pids: str | os.PathLike[str],
        origin_s: float,
        period_s: float = 0.5,
        foreign_processes: str | os.PathLike[str] | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        """Start the sampler process of this node.

        Args:
            out: CSV file of samples to write.
            pids: File that lists the watched processes, until `stop`.
            origin_s: Time of `time.monotonic()` at which the column t_s is 0.
            period_s: Seconds between samples.
            foreign_processes: File to write foreign processes on these GPUs to, if any.
            gpus: GPUs to sample, named as in CUDA_VISIBLE_DEVICES.
        """
        self._pids_file = Path(pids)
        self._pids_file.write_text("", encoding="utf-8")
        package_root = str(Path(__file__).resolve().parents[2])
        search_path = [package_root, os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, search_path))}
        command = [sys.executable, "-m", "stratbench.telemetry.sampler"]
        command += ["--out", os.fspath(out), "--pids-file", os.fspath(self._pids_file)]
        command += ["--period-s", str(period_s), "--origin-s", repr(origin_s)]
        command += ["--parent-pid", str(os.getpid()), "--gpus", *gpus]
        if foreign_processes is not None:
            command += ["--foreign-processes", os.fspath(foreign_processes)]
        # The sampler gets its own session. Otherwise a signal to the cell's process group would end it, and
        # the end of the timeline would be lost.
        try:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            print(f"sampler: could not start, so there is no timeline: {error}", file=sys.stderr)
            self._process = None

    @property
    def pid(self) -> int | None:
        """Process id of the sampler. None if the sampler could not start."""
        return self._process.pid if self._process else None

    def watch_process(self, label: str, pid: int, with_descendants: bool = False) -> None:
        """Add a process to all samples from now on, and take a sample now.

        Args:
            label: Label of the process, such as rank0 or server1.
            pid: Id of the process.
            with_descendants: Whether the row includes the descendants of the process.
        """
        with self._pids_file.open("a", encoding="utf-8") as file:
            file.write(f"{label} {pid}{f' {_WITH_DESCENDANTS}' if with_descendants else ''}\n")
        if self._process is not None:
            self._process.send_signal(_WAKE)

    def stop(self) -> bool:
        """Make the sampler take a last sample and end. Return whether it ended in time."""
        self._pids_file.unlink(missing_ok=True)
        if self._process is None:
            return False
        self._process.terminate()
        try:
            return self._process.wait(MAX_STOP_S) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False


class CellProcesses:
    """The processes of a cell on this node, from a file of the launcher.

    The launcher appends a line `label pid` per process, with `_WITH_DESCENDANTS` if the rows include all
    descendants of the process. A process that has ended is left out.
    """

    def __init__(self, pids_file: Path | None) -> None:
        self._pids_file = pids_file
        self._lines_read = 0
        self._processes: dict[str, psutil.Process] = {}
        self._with_descendants: set[str] = set()
        self._before: dict[str, tuple[float, dict[int, float]]] = {}

    def read_new_processes_if_any(self) -> bool:
        """Read new lines of the launcher's file, and return whether there are any."""
        if self._pids_file is None:
            return False
        try:
            text = self._pids_file.read_text(encoding="utf-8")
        except OSError:
            return False
        # The text after the last line break is left out: it may be an incomplete line.
        lines = text.split("\n")[:-1]
        new, self._lines_read = lines[self._lines_read :], len(lines)
        for line in new:
            label, *fields = line.split(" ")
            try:
                self._processes[label] = psutil.Process(int(fields[0]))
            except (ValueError, IndexError, psutil.Error):
                continue
            if fields[1:] == [_WITH_DESCENDANTS]:
                self._with_descendants.add(label)
        return bool(new)

    def sample_processes(self) -> list[dict[str, Any]]:
        """Return a timeline row per running process, with its CPU time and memory.

        A process's first row has no `cpu_pct`. In a row for several processes, shared memory counts for each
        of them.
        """
        rows = []
        for label, process in list(self._processes.items()):
            try:
                figures = _read_cpu_time_and_memory(process)
                descendants = (
                    process.children(recursive=True) if label in self._with_descendants else []
                )
            except psutil.Error:
                del self._processes[label]
                continue
            each = {process.pid: figures}
            for other in descendants:
                with contextlib.suppress(psutil.Error):
                    each[other.pid] = _read_cpu_time_and_memory(other)
            row = {
                "kind": "process",
                "id": label,
                "cpu_time_s": round(sum(cpu_time_s for cpu_time_s, _ in each.values()), 2),
                "rss_bytes": sum(rss_bytes for _, rss_bytes in each.values()),
            }
            rows.append(
                row | self._measure_cpu_share(label, {pid: t for pid, (t, _) in each.items()})
            )
        return rows

    def _measure_cpu_share(self, label: str, cpu_times_s: dict[int, float]) -> dict[str, float]:
        now_s = time.monotonic()
        then_s, before = self._before.setdefault(label, (now_s, cpu_times_s))
        if now_s - then_s < _SHORTEST_SHARE_S:
            return {}
        self._before[label] = (now_s, cpu_times_s)
        used_s = sum(t - before.get(pid, 0.0) for pid, t in cpu_times_s.items())
        return {"cpu_pct": round(100 * used_s / (now_s - then_s), 1)}

    def list_bound_cores(self) -> set[int]:
        """Return the CPU cores on which at least one of the processes may run."""
        cores: set[int] = set()
        for process in self._processes.values():
            try:
                cores.update(process.cpu_affinity())
            except (psutil.Error, AttributeError):
                continue
        return cores


def _read_cpu_time_and_memory(process: psutil.Process) -> tuple[float, int]:
    """Return the CPU time in seconds and the resident bytes of a process.

    Raises:
        psutil.Error: If the process has ended.
    """
    with process.oneshot():
        # A zombie counts as ended: the kernel reports 0 bytes for it.
        if process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.ZombieProcess(process.pid)
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss


class Host:
    """Sampler of the whole node's load, memory, and use of cores since the previous sample."""

    def __init__(self, node: str) -> None:
        self._node = node
        # The first result is a mean since boot, and is not used. The call starts the count for the next one.
        psutil.cpu_percent(percpu=True)
        self._asked_s = time.monotonic()

    def sample_node(self) -> dict[str, Any]:
        """Return a timeline row with the node's load, memory and use of cores.

        The row has no use of cores if the previous sample is too recent.
        """
        memory = psutil.virtual_memory()
        row: dict[str, Any] = {
            "kind": "host",
            "id": self._node,
            "load_1m": round(os.getloadavg()[0], 2),
            "mem_available_bytes": memory.available,
            "mem_used_bytes": memory.used,
        }
        if time.monotonic() - self._asked_s >= _SHORTEST_SHARE_S:
            self._asked_s = time.monotonic()
            by_core = psutil.cpu_percent(percpu=True)
            row["cpu_pct"] = round(sum(by_core) / len(by_core), 1)
            row["cores_pct"] = " ".join(f"{percent:.0f}" for percent in by_core)
        return row


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line of the sampler process."""
    parser = argparse.ArgumentParser(prog="stratbench.telemetry.sampler", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="CSV file of samples to write")
    parser.add_argument("--period-s", type=float, default=0.5, help="seconds between samples")
    parser.add_argument(
        "--origin-s",
        type=float,
        help="value of time.monotonic() at which the column t_s is 0; default: now",
    )
    parser.add_argument(
        "--pids-file",
        type=Path,
        help="file that lists the processes to sample, with one line `label pid` per process",
    )
    parser.add_argument(
        "--parent-pid",
        type=int,
        default=os.getppid(),
        help="id of the process whose end also ends the sampler; default: the parent process",
    )
    parser.add_argument(
        "--gpus", nargs="*", default=[], help="GPUs to sample, named as in CUDA_VISIBLE_DEVICES"
    )
    parser.add_argument(
        "--foreign-processes",
        type=Path,
        help="file to write, with the processes of other programs on --gpus",
    )
    options = parser.parse_args(arguments)
    if not options.period_s > 0:
        parser.error(f"--period-s {options.period_s}: must be more than 0")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Sample until SIGTERM or SIGINT, or until the parent process has ended."""
    options = parse_arguments(arguments)
    stop, wake = threading.Event(), threading.Event()

    def handle_signal(signum: int, frame: object) -> None:
        if signum != _WAKE:
            stop.set()
        wake.set()

    for number in (signal.SIGTERM, signal.SIGINT, _WAKE):
        signal.signal(number, handle_signal)
    _set_lowest_priority()
    gpus = find_gpus(options.gpus, Nvml())
    watch = options.foreign_processes and ForeignProcessWatch(
        options.foreign_processes, gpus, options.parent_pid
    )
    try:
        # `write_samples_until_stop` writes each sample at once. So only whole rows remain if the sampler is
        # killed.
        with options.out.open("w", newline="", encoding="utf-8") as file:
            write_samples_until_stop(
                stop,
                wake,
                file,
                gpus,
                CellProcesses(options.pids_file),
                watch,
                parent_pid=options.parent_pid,
                period_s=options.period_s,
                origin_s=time.monotonic() if options.origin_s is None else options.origin_s,
            )
    except OSError as error:
        # The sampler ends if it cannot write, as on a full disk.
        print(f"sampler: {error.strerror}: {options.out}; the timeline ends", file=sys.stderr)
        return 1
    return 0


def write_samples_until_stop(
    stop: threading.Event,
    wake: threading.Event,
    file: TextIO,
    gpus: Sequence[Gpu],
    watched: CellProcesses,
    foreign_processes: ForeignProcessWatch | None = None,
    *,
    parent_pid: int,
    period_s: float,
    origin_s: float,
) -> None:
    """Write samples of node, processes and GPUs to a file until `stop` is set.

    Args:
        stop: Event that ends the sampling. Set `wake` with it, so that the wait ends.
        wake: Event that causes an extra sample.
        file: CSV file to write to.
        gpus: GPUs to sample.
        watched: Processes to sample.
        foreign_processes: Records foreign processes on the GPUs, if they are to be recorded.
        parent_pid: Process whose end also ends the sampling.
        period_s: Seconds between samples.
        origin_s: Time of `time.monotonic()` at which t_s is 0.
    """
    node = socket.gethostname()
    host = Host(node)
    allowed_cores = list_usable_cores()
    begun_s = time.monotonic()
    file.write(",".join(SAMPLE_COLUMNS) + "\n")
    count, in_time = 0, True
    while True:
        ending = stop.is_set() or os.getppid() != parent_pid
        if watched.read_new_processes_if_any():
            _bind_to_cores(allowed_cores - watched.list_bound_cores())
        t_s = round(time.monotonic() - origin_s, 3)
        rows = [{"t_s": t_s} | row for row in (host.sample_node(), *watched.sample_processes())]
        pcie_snapshots = in_time and count % _SAMPLES_PER_PCIE_SNAPSHOT == 0
        rows += sample_gpus(gpus, origin_s, pcie_snapshots)
        file.write(_format_samples_as_csv({"node": node} | row for row in rows))
        file.flush()
        if foreign_processes is not None and in_time and count % _SAMPLES_PER_PROCESS_CHECK == 0:
            foreign_processes.poll_gpus(t_s)
        if ending:
            if foreign_processes is not None:
                foreign_processes.write_foreign_processes()
            return
        count += in_time
        in_time = _wait_until_due_or_woken(wake, begun_s + count * period_s, parent_pid)
        wake.clear()


def find_gpus(names: Iterable[str], nvml: Nvml) -> list[Gpu]:
    """Return the GPUs with these names, and print which cannot be sampled."""
    gpus = []
    for name in names:
        if (gpu := nvml.find_gpu_by_name(name)) is not None:
            gpus.append(gpu)
            continue
        reason = nvml.reason or "it is unknown, or divided into MIG instances"
        print(
            f"NVML cannot sample GPU {name} ({reason}): its utilisation, power and energy are missing",
            file=sys.stderr,
            flush=True,
        )
    return gpus


def sample_gpus(gpus: Sequence[Gpu], origin_s: float, pcie_snapshots: bool) -> list[dict[str, Any]]:
    """Return a timeline row per GPU, with the time of the GPU's energy reading.

    Snapshots of PCIe, which block the sampler, are taken after the energy of all GPUs was read.

    Args:
        gpus: GPUs to sample.
        origin_s: Time of `time.monotonic()` at which t_s is 0.
        pcie_snapshots: Whether PCIe's rates are measured by snapshots.
    """
    rows = []
    for gpu in gpus:
        name = gpu.read_uuid() if gpu.index is None else gpu.index
        t_s = round(time.monotonic() - origin_s, 3)
        rows.append({"t_s": t_s, "kind": "gpu", "id": name, **gpu.read_counters()})
    if pcie_snapshots:
        for gpu, row in zip(gpus, rows, strict=True):
            if "pcie_tx_bytes" not in row:
                row |= gpu.measure_pcie_bytes_per_s()
    return rows


def _wait_until_due_or_woken(wake: threading.Event, due_s: float, parent_pid: int) -> bool:
    """Wait until `due_s`, until `wake` is set, or until the parent process ends.

    Returns:
        False if `wake` has ended the wait, else True.
    """
    while True:
        left_s = due_s - time.monotonic()
        if wake.wait(min(max(0.0, left_s), _MAX_WAIT_S)):
            return False
        if left_s <= _MAX_WAIT_S or os.getppid() != parent_pid:
            return True


def _format_samples_as_csv(rows: Any) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, SAMPLE_COLUMNS, restval="", lineterminator="\n")
    writer.writerows(rows)
    return text.getvalue()


def _set_lowest_priority() -> None:
    try:
        os.nice(19)
    except OSError:
        return


def _bind_to_cores(cores: set[int]) -> None:
    """Bind this process to CPU cores. Do nothing without cores, or if the system cannot bind."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main())
