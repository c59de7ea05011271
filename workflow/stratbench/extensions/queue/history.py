"""Reads a cluster's past jobs from a file of SLURM's accounting (the history).

sacct -a -X -P -D -S now-30days -o FIELDS > history.txt

This command writes the file. With `-D` a requeued job has a line per run. A file without a header line (`-n`)
must have the columns in the order of FIELDS. Times are local times of the cluster in whole seconds.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stratbench.cell.text.words import replace_control_characters
from stratbench.extensions.queue.simulator import Arrival

FIELDS = (
    "JobIDRaw", "User", "Partition", "Submit", "Eligible", "Start", "End", "State", "TimelimitRaw",
    "NNodes", "ReqTRES", "AllocTRES", "Flags",
)  # fmt: skip
#: Columns of sacct that the file must have.
NEEDED = ("Submit", "Start", "End", "State", "AllocTRES")
#: Minimum and maximum number of GPUs of jobs whose waits are reported together. The last range has no
#: maximum.
WIDTH_BINS = ((1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 10**9))
#: Assumed ratio of requested to used wall time of jobs if the file has no time limits.
UNKNOWN_FACTOR = 3.0


class HistoryError(ValueError):
    """A file is not SLURM's accounting, or has too few jobs. The message says what to do."""


@dataclass(frozen=True)
class AccountingEntry:
    """A job in SLURM's accounting, or one run of a requeued job.

    Times are in seconds since 1970, and None if unknown or not yet reached.

    Attributes:
        submit_unix_s: When the job was submitted.
        eligible_unix_s: When the job could start at the earliest.
        start_unix_s: When the job started.
        end_unix_s: When the job ended.
        state: SLURM's state of the job.
        time_limit_s: Requested wall time.
        gpus: Number of GPUs.
        is_backfilled: Whether backfill started the job; None if unknown.
        user: Name of the user; "" if unknown.
    """

    submit_unix_s: float
    eligible_unix_s: float | None
    start_unix_s: float | None
    end_unix_s: float | None
    state: str
    time_limit_s: float | None
    gpus: int
    is_backfilled: bool | None
    user: str = ""

    @property
    def queued_unix_s(self) -> float:
        """When the job's wait in the queue began, in seconds since 1970."""
        return max(self.submit_unix_s, self.eligible_unix_s or 0.0)

    @property
    def wait_s(self) -> float | None:
        """Seconds for which the job waited in the queue. None if it has not started."""
        return (
            None if self.start_unix_s is None else max(0.0, self.start_unix_s - self.queued_unix_s)
        )

    @property
    def run_s(self) -> float | None:
        """Seconds for which the job ran. None if it has not ended."""
        if self.start_unix_s is None or self.end_unix_s is None:
            return None
        return max(0.0, self.end_unix_s - self.start_unix_s)


@dataclass(frozen=True)
class WaitsOfWidth:
    """Waits in the queue of all jobs with a similar number of GPUs.

    Attributes:
        gpus_label: Range of the number of GPUs as a text, such as "4-7".
        num_jobs: Number of jobs.
        mean_wait_s: Mean wait.
        median_wait_s: Median wait.
        p90_wait_s: 90th percentile of waits.
        backfilled_share: Share of the jobs that backfill started; None if unknown.
        used_wall_time_share: Mean share of the requested wall time that the jobs used; None if unknown.
    """

    gpus_label: str
    num_jobs: int
    mean_wait_s: float
    median_wait_s: float
    p90_wait_s: float
    backfilled_share: float | None
    used_wall_time_share: float | None


class GpusInUse(NamedTuple):
    """Times at which the number of GPUs in use changes, and the number from each time on."""

    times_unix_s: np.ndarray
    num_gpus: np.ndarray


@dataclass(frozen=True)
class AccountingHistory:
    """All jobs with GPUs in a file of SLURM's accounting.

    Attributes:
        entries: The jobs.
        are_gpus_counted_by_node: Whether the file has no numbers of GPUs, so that all GPUs of a job's nodes
            count.
    """

    entries: tuple[AccountingEntry, ...]
    are_gpus_counted_by_node: bool

    @cached_property
    def window_unix_s(self) -> tuple[float, float]:
        """Begin and end of the time window in which the file has all jobs.

        The window begins with the first end of a job, because the file lacks jobs that ended before.
        """
        times = [
            t
            for e in self.entries
            for t in (e.submit_unix_s, e.start_unix_s, e.end_unix_s)
            if t is not None
        ]
        ends = [e.end_unix_s for e in self.entries if e.end_unix_s is not None]
        if not ends or max(times) <= min(ends):
            raise HistoryError(
                "decide.queue.history: the file has fewer than two jobs that ended; ask sacct for "
                "more days"
            )
        return min(ends), max(times)

    @property
    def window_days(self) -> float:
        """Length of the time window in which the file has all jobs, in days."""
        begin_s, end_s = self.window_unix_s
        return (end_s - begin_s) / 86400

    def _compute_gpus_in_use_over_time(self) -> GpusInUse:
        """Return the numbers of GPUs in use over the time window."""
        begin_s, end_s = self.window_unix_s
        changes: list[tuple[float, int]] = [(begin_s, 0), (end_s, 0)]
        for e in self.entries:
            if e.start_unix_s is not None and e.gpus:
                stop_s = end_s if e.end_unix_s is None else e.end_unix_s
                if stop_s > max(e.start_unix_s, begin_s):
                    changes.append((max(e.start_unix_s, begin_s), e.gpus))
                    changes.append((stop_s, -e.gpus))
        times = np.array(sorted({t for t, _ in changes}))
        by_time = np.zeros(len(times))
        np.add.at(by_time, np.searchsorted(times, [t for t, _ in changes]), [g for _, g in changes])
        return GpusInUse(times, np.cumsum(by_time))

    @property
    def max_gpus_in_use(self) -> int:
        """Largest number of GPUs that were in use at the same time."""
        return int(self._compute_gpus_in_use_over_time().num_gpus.max())

    @property
    def mean_gpus_in_use(self) -> float:
        """Mean number of GPUs in use over the time window."""
        times, used = self._compute_gpus_in_use_over_time()
        return float((used[:-1] * np.diff(times)).sum() / (times[-1] - times[0]))

    @cached_property
    def queue_growth_gpus(self) -> float:
        """Number of GPUs that the queue's growth during the time window would keep busy.

        The growth is that of the work of all waiting jobs. A job's work is its GPUs times its duration. Jobs
        that have not run have the duration expected from their time limits.
        """
        begin_s, end_s = self.window_unix_s
        known = [e.run_s for e in self.entries if e.run_s]
        usual_s = statistics.median(known) if known else 0.0

        def compute_waiting_gpu_s(at_s: float) -> float:
            """Return the work of all jobs that waited at a time, in GPU-seconds."""
            return sum(
                e.gpus
                * (
                    e.run_s
                    or (
                        e.time_limit_s / self._assumed_requested_to_used_ratio
                        if e.time_limit_s
                        else usual_s
                    )
                )
                for e in self.entries
                if e.queued_unix_s <= at_s < (e.start_unix_s or e.end_unix_s or math.inf)
            )

        return max(0.0, compute_waiting_gpu_s(end_s) - compute_waiting_gpu_s(begin_s)) / (
            end_s - begin_s
        )

    @property
    def has_one_user(self) -> bool:
        """Whether all jobs are of one user. Other users' jobs are then probably hidden."""
        return bool(self.entries[0].user) and len({e.user for e in self.entries}) == 1

    @property
    def requested_to_used_time_ratios(self) -> list[float]:
        """Ratios of requested to used wall time, one per finished job."""
        done = (e for e in self.entries if e.state == "COMPLETED" and e.time_limit_s and e.run_s)
        return [e.time_limit_s / e.run_s for e in done]

    @cached_property
    def _assumed_requested_to_used_ratio(self) -> float:
        """Assumed ratio of requested to used wall time for jobs without a time limit."""
        factors = self.requested_to_used_time_ratios
        return max(1.0, statistics.median(factors)) if factors else UNKNOWN_FACTOR

    def compute_node_mtbf_days(self, nodes: int) -> float | None:
        """Return the mean time between failures of one node in days.

        None if no job ended with NODE_FAIL. Failures of unused nodes are not recorded, so that the result is
        an upper bound.
        """
        failures = sum(e.state == "NODE_FAIL" for e in self.entries)
        return nodes * self.window_days / failures if failures else None

    def iter_waits_by_width(self) -> Iterator[WaitsOfWidth]:
        """Yield the waits of jobs, by ranges of the number of GPUs."""
        for low, high in WIDTH_BINS:
            mine = [e for e in self.entries if low <= e.gpus <= high]
            waits = [e.wait_s for e in mine if e.wait_s is not None]
            if not waits:
                continue
            used = [
                min(1.0, e.run_s / e.time_limit_s)
                for e in mine
                if e.run_s is not None and e.time_limit_s
            ]
            backfilled = [e.is_backfilled for e in mine if e.is_backfilled is not None]
            median_s, p90_s = (float(q) for q in np.percentile(waits, [50, 90]))
            yield WaitsOfWidth(
                gpus_label=str(low)
                if low == high
                else f"{low}+"
                if high == 10**9
                else f"{low}-{high}",
                num_jobs=len(mine),
                mean_wait_s=statistics.fmean(waits),
                median_wait_s=median_s,
                p90_wait_s=p90_s,
                backfilled_share=statistics.fmean(backfilled) if backfilled else None,
                used_wall_time_share=statistics.fmean(used) if used else None,
            )

    def compute_queue_entry_unix_s(self, entry: AccountingEntry) -> float:
        """Return when a started job is submitted in the simulation, in seconds since 1970.

        A job that started before the time window is submitted at its start. A job that waited at the window's
        begin is submitted then, because the file lacks most jobs that it waited for.
        """
        begin_s, _ = self.window_unix_s
        return (
            entry.start_unix_s
            if entry.start_unix_s < begin_s
            else max(entry.queued_unix_s, begin_s)
        )

    @cached_property
    def _earliest_job_start_unix_s(self) -> float:
        return min(
            self.window_unix_s[0],
            min(e.start_unix_s for e in self.entries if e.start_unix_s is not None),
        )

    @property
    def simulated_window_begin_s(self) -> float:
        """Begin of the time window on the simulation's clock, in seconds.

        From then on, the jobs of `make_arrivals` are complete.
        """
        return self.window_unix_s[0] - self._earliest_job_start_unix_s

    def make_arrivals(self) -> list[Arrival]:
        """Return the started jobs for the simulator, whose clock starts at 0."""
        _, end_s = self.window_unix_s
        started = [e for e in self.entries if e.start_unix_s is not None and e.gpus]
        jobs = []
        for e in sorted(started, key=lambda e: e.queued_unix_s):
            ran_s = max(1.0, e.run_s if e.run_s is not None else end_s - e.start_unix_s)
            jobs.append(
                Arrival(
                    self.compute_queue_entry_unix_s(e) - self._earliest_job_start_unix_s,
                    e.gpus,
                    ran_s,
                    max(e.time_limit_s or ran_s * self._assumed_requested_to_used_ratio, ran_s),
                )
            )
        return sorted(jobs, key=lambda a: a.submit_s)


def read_history(
    path: str | Path, gpus_per_node: int, partition: str | None = None
) -> AccountingHistory:
    """Read the jobs in a file of SLURM's accounting, as sacct writes it.

    Args:
        path: The file.
        gpus_per_node: GPUs of a node.
        partition: Partition whose jobs to keep, or None for all.

    Raises:
        HistoryError: If a line has another format, or if no job with GPUs has started.
        OSError: If the file cannot be read.
    """
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        lines = list(csv.reader(file, delimiter="|", quoting=csv.QUOTE_NONE))
    rows = list(_iter_accounting_rows(Path(path).name, lines))
    if partition is not None:
        # The column Partition of a waiting job may name several partitions.
        in_partition = [r for r in rows if partition in r.get("Partition", "").split(",")]
        if not in_partition:
            names = sorted({r.get("Partition", "") for r in rows})
            raise HistoryError(
                f"decide.queue.partition = {partition!r}: no job in {path} has this partition; give one of "
                f"{replace_control_characters(', '.join(names))}"
            )
        rows = in_partition
    has_gpu_counts = any("gres/gpu" in r["AllocTRES"] + r.get("ReqTRES", "") for r in rows)
    entries = [_make_accounting_entry(r, gpus_per_node, has_gpu_counts) for r in rows]
    with_gpus = tuple(e for e in entries if e.gpus)
    if not any(e.start_unix_s is not None for e in with_gpus):
        raise HistoryError(
            f"{path}: has no job with a GPU that started; ask sacct for more days, with -a for all users"
        )
    return AccountingHistory(with_gpus, not has_gpu_counts)


def _iter_accounting_rows(
    file_name: str, lines: Sequence[Sequence[str]]
) -> Iterator[dict[str, str]]:
    """Yield the values of each line of an accounting file, by column name."""
    names: Sequence[str] = FIELDS
    for number, values in enumerate(lines, 1):
        if not values or values == [""]:
            continue
        if number == 1 and {"Submit", "State"} <= set(values):
            names = values
            if missing := [field for field in NEEDED if field not in names]:
                raise HistoryError(
                    f"{file_name}: has no column {missing[0]}; write the file by sacct -o {','.join(FIELDS)}"
                )
            continue
        if len(values) != len(names):
            raise HistoryError(
                f"{file_name}, line {number}: has {len(values)} values instead of {len(names)}; write the "
                f"file by sacct -a -X -P -D -o {','.join(FIELDS)}"
            )
        row = dict(zip(names, values, strict=True))
        for field in ("Submit", "Start", "End"):
            try:
                _parse_accounting_time(row[field])
            except ValueError:
                raise HistoryError(
                    f"{file_name}, line {number}: {field} = {row[field]!r} is not a time such as "
                    "2026-01-31T12:00:00"
                ) from None
        if _parse_accounting_time(row["Submit"]) is None:
            raise HistoryError(f"{file_name}, line {number}: has no time in the column Submit")
        yield row


def _make_accounting_entry(
    row: Mapping[str, str], gpus_per_node: int, has_gpu_counts: bool
) -> AccountingEntry:
    limit, nodes = row.get("TimelimitRaw", ""), row.get("NNodes", "")
    n = int(nodes) if nodes.isdigit() else 0
    gpus = n * gpus_per_node
    if has_gpu_counts:
        gpus = parse_gpu_count(row["AllocTRES"]) or parse_gpu_count(row.get("ReqTRES", ""))
    start_s, end_s = _parse_accounting_time(row["Start"]), _parse_accounting_time(row["End"])
    # Older versions of SLURM record a start time for jobs that were cancelled in the queue.
    if not row["AllocTRES"]:
        start_s = None
    flags = row.get("Flags")
    return AccountingEntry(
        submit_unix_s=_parse_accounting_time(row["Submit"]) or 0.0,
        eligible_unix_s=_parse_accounting_time(row.get("Eligible", "")),
        start_unix_s=start_s,
        end_unix_s=end_s,
        state=row["State"].split(" ")[0],
        # sacct prints the time limit in minutes, or a word such as Partition_Limit or UNLIMITED.
        time_limit_s=int(limit) * 60.0 if limit.isdigit() and int(limit) else None,
        gpus=gpus,
        is_backfilled="SchedBackfill" in flags if flags else None,
        user=row.get("User", ""),
    )


def parse_gpu_count(tres: str) -> int:
    """Return the number of GPUs in a TRES text such as `cpu=4,gres/gpu=2,gres/gpu:a100=2`."""
    counts = dict(re.findall(r"gres/gpu(:[^=,]+)?=(\d+)", tres))
    return int(counts[""]) if "" in counts else sum(map(int, counts.values()))


def _parse_accounting_time(text: str) -> float | None:
    if text in ("", "Unknown", "None", "N/A"):
        return None
    if text.isdigit():  # with SLURM_TIME_FORMAT=%s, sacct prints seconds since 1970
        return float(text)
    # The local time of the cluster is read as UTC. Only differences matter, which must not depend on this
    # machine's time zone.
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
