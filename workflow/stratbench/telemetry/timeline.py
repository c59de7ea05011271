"""Writes and reads a cell's timeline: samples of the machine, and phases of ranks.

Times are seconds since an origin that the launcher sets. Each sample of a sample file has a row per host,
process and GPU. A field is empty if the machine does not offer its counter. `merge_timeline` adds the phase.
This module imports no torch.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stratbench.cell.files import replace_file_atomically
from stratbench.cell.run_folder import parse_rank

# Columns of a sample file. `kind` is host, process or gpu. `id` is the node's name, the label that the
# launcher gave to the process (rank0, server1), or the GPU's index.
SAMPLE_COLUMNS = (
    "t_s",
    "node",
    "kind",
    "id",
    # In rows of the host: percent of all cores that are in use. In rows of a process: percent of one core.
    "cpu_pct",
    # In rows of the host: percent of each core that is in use, separated by blanks.
    "cores_pct",
    # In rows of a process: CPU time in seconds since the start of the process.
    "cpu_time_s",
    # In rows of a process: bytes of resident memory.
    "rss_bytes",
    # In rows of the host: load average over one minute.
    "load_1m",
    # In rows of the host: bytes of memory that new processes could use.
    "mem_available_bytes",
    # In rows of the host: bytes of memory in use. In rows of a GPU: bytes in use on the GPU.
    "mem_used_bytes",
    # This column and all further ones are only in rows of GPUs (see nvml.Gpu.read_counters).
    "gpu_util_pct",
    "mem_bus_util_pct",
    "power_w",
    "energy_j",
    "temperature_c",
    "sm_clock_mhz",
    "mem_clock_mhz",
    "throttle",
    "pcie_tx_bytes",
    "pcie_rx_bytes",
    "pcie_tx_bytes_per_s",
    "pcie_rx_bytes_per_s",
    "nvlink_tx_bytes",
    "nvlink_rx_bytes",
)


class PhaseLog:
    """Log of a rank's phases, with a line of JSON per start and end.

    `event` is `start` or `end`. Each line is flushed at once, so that a killed rank loses at most its last
    line.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int,
        origin_s: float,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the log of a rank's phases for appending.

        Args:
            path: File to append to.
            rank: Rank of the worker.
            origin_s: This node's `time.monotonic()` when the cell began, from which all ranks count.
            alive: Function that is called after each entry.
        """
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open until the process ends
        self._rank = rank
        self._origin_s = origin_s
        self._alive = alive

    def write_phase_event(
        self, phase: str, event: Literal["start", "end"], at_s: float | None = None
    ) -> None:
        """Write to the log that a phase starts or ends.

        Args:
            phase: Name of the phase.
            event: `start` or `end`.
            at_s: Time of `time.monotonic`, or None for now.
        """
        t_s = round((time.monotonic() if at_s is None else at_s) - self._origin_s, 4)
        line = {"t_s": t_s, "rank": self._rank, "phase": phase, "event": event}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._alive()


class PhaseInterval(NamedTuple):
    """Time span of one rank's phase, in seconds since the start of the cell."""

    rank: int
    phase: str
    start_s: float
    end_s: float


def read_phase_intervals(paths: Iterable[str | os.PathLike[str]]) -> list[PhaseInterval]:
    """Return the intervals of all phases in these logs of ranks, sorted by start.

    A phase without an end ends at infinity. A missing log has no phases. A line that a kill has truncated is
    left out.
    """
    intervals: list[PhaseInterval] = []
    for path in paths:
        open_phases: dict[tuple[int, str], list[float]] = {}
        for entry in _iter_log_entries(Path(path)):
            key = (entry["rank"], entry["phase"])
            if entry["event"] == "start":
                open_phases.setdefault(key, []).append(entry["t_s"])
            elif open_phases.get(key):
                intervals.append(PhaseInterval(*key, open_phases[key].pop(), entry["t_s"]))
        for key, starts in open_phases.items():
            intervals += [PhaseInterval(*key, start_s, float("inf")) for start_s in starts]
    return sorted(intervals, key=lambda interval: interval.start_s)


def merge_timeline(
    sample_csvs: Iterable[str | os.PathLike[str]],
    phase_logs: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
) -> None:
    """Write the samples of all nodes to one CSV file, sorted by time.

    A further column has the phase. A row of process `rank3` gets rank 3's phase. Every other row gets the
    phase of the lowest rank with a log. The innermost of nested phases counts. Missing files and truncated
    rows are ignored.

    Args:
        sample_csvs: Sample files of the nodes.
        phase_logs: Phase logs of the ranks.
        out: File to write.
    """
    intervals = read_phase_intervals(phase_logs)
    by_rank: dict[int, list[PhaseInterval]] = {}
    for interval in intervals:
        by_rank.setdefault(interval.rank, []).append(interval)
    lowest = min(by_rank, default=0)
    rows = sorted(
        (row for path in sample_csvs for row in read_samples(path)), key=lambda row: row["t_s"]
    )
    with (
        replace_file_atomically(out) as unfinished,
        unfinished.open("x", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, (*SAMPLE_COLUMNS, "phase"), extrasaction="ignore", restval="")
        writer.writeheader()
        for row in rows:
            rank = parse_rank(row["id"]) if row["kind"] == "process" else None
            mine = by_rank.get(lowest if rank is None else rank, [])
            writer.writerow(row | {"phase": _find_phase_at(mine, row["t_s"])})


def read_samples(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield each row of a sample file or timeline as a dict by column name.

    The value `t_s` is a number, and all others are texts. A missing file has no rows. A row that a kill has
    truncated is left out.
    """
    if not Path(path).is_file():
        return
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if None in row.values():
                continue
            try:
                t_s = float(row["t_s"])
            except ValueError:
                continue
            yield row | {"t_s": t_s}


def compute_energy_joules(
    sample_csvs: Iterable[str | os.PathLike[str]],
    intervals: Mapping[tuple[str, str], Sequence[tuple[float, float]]],
) -> float | None:
    """Return the total joules that GPUs used, each GPU within its own time intervals.

    The energy is the difference of the GPU's energy counter, interpolated at both ends, if the counter only
    grows. Otherwise it is the integral of the power, by the trapezoidal rule.

    Args:
        sample_csvs: Sample files of the nodes.
        intervals: Intervals (start_s, end_s), ascending, by (node, id) of the GPU.

    Returns:
        The energy, or None without intervals, or if a GPU's samples do not cover one of its intervals.
    """
    of_gpu = _read_energy_samples_by_gpu(sample_csvs)
    parts = [
        _compute_joules_between(*of_gpu[gpu], *interval) if gpu in of_gpu else None
        for gpu, its in intervals.items()
        for interval in its
    ]
    return None if not parts or None in parts else sum(parts)


#: Values of a GPU over time, as pairs of time in seconds and value.
_Series = list[tuple[float, float]]


def _compute_joules_between(
    counter: _Series, power: _Series, t0_s: float, t1_s: float
) -> float | None:
    counted = _compute_joules_from_counter(counter, t0_s, t1_s)
    return _compute_joules_from_power(power, t0_s, t1_s) if counted is None else counted


def _read_energy_samples_by_gpu(
    sample_csvs: Iterable[str | os.PathLike[str]],
) -> dict[tuple[str, str], tuple[_Series, _Series]]:
    """Return each GPU's total joules and its watts over time, by (node, id)."""
    by_gpu: dict[tuple[str, str], tuple[_Series, _Series]] = {}
    for row in (row for path in sample_csvs for row in read_samples(path)):
        if row["kind"] != "gpu":
            continue
        counter, power = by_gpu.setdefault((row["node"], row["id"]), ([], []))
        if row["energy_j"]:
            counter.append((row["t_s"], float(row["energy_j"])))
        if row["power_w"]:
            power.append((row["t_s"], float(row["power_w"])))
    return by_gpu


def _iter_log_entries(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and {"t_s", "rank", "phase", "event"} <= entry.keys():
            yield entry


def _find_phase_at(intervals: list[PhaseInterval], t_s: float) -> str:
    last = bisect.bisect_right(intervals, t_s, key=lambda interval: interval.start_s)
    for interval in reversed(intervals[:last]):
        if t_s < interval.end_s:
            return interval.phase
    return ""


def _compute_joules_from_counter(series: _Series, t0_s: float, t1_s: float) -> float | None:
    values = [value for _, value in series]
    # The counter has decreased, because the driver was reloaded.
    if values != sorted(values):
        return None
    at_start, at_end = _interpolate_at(series, t0_s), _interpolate_at(series, t1_s)
    return None if at_start is None or at_end is None else at_end - at_start


def _compute_joules_from_power(series: _Series, t0_s: float, t1_s: float) -> float | None:
    at_start, at_end = _interpolate_at(series, t0_s), _interpolate_at(series, t1_s)
    if at_start is None or at_end is None:
        return None
    inside = [(t, watts) for t, watts in series if t0_s < t < t1_s]
    points = [(t0_s, at_start), *inside, (t1_s, at_end)]
    return sum(
        (t - before) * (watts + watts_before) / 2
        for (before, watts_before), (t, watts) in itertools.pairwise(points)
    )


def _interpolate_at(series: _Series, t_s: float) -> float | None:
    after = bisect.bisect_left(series, t_s, key=lambda point: point[0])
    if after == len(series):
        return None
    t_after, value_after = series[after]
    if t_after == t_s:
        return value_after
    if after == 0:
        return None
    t_before, value_before = series[after - 1]
    share = (t_s - t_before) / (t_after - t_before)
    return value_before + share * (value_after - value_before)
