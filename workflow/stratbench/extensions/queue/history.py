"""A cluster's history, from SLURM's accounting: waiting times, and others' jobs for the simulator.

sacct -a -X -P -D -S now-30days -o FIELDS > history.txt

With `-D` a job that was queued again has a line for each run. A file without the line of names (`-n`) is read
in the order of FIELDS. Times are SLURM's own, to the second, without a time zone.
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

import numpy as np

from stratbench.cell.text.words import printable
from stratbench.extensions.queue.simulator import Arrival

FIELDS = (
    "JobIDRaw", "User", "Partition", "Submit", "Eligible", "Start", "End", "State", "TimelimitRaw",
    "NNodes", "ReqTRES", "AllocTRES", "Flags",
)  # fmt: skip
#: Columns without which a line is useless.
NEEDED = ("Submit", "Start", "End", "State", "AllocTRES")
#: Widths with similar waits, reported together; the last has no end.
WIDTH_BINS = ((1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 10**9))
#: Assumed ratio of requested to used wall time, if the accounting has no limits.
UNKNOWN_FACTOR = 3.0


class HistoryError(ValueError):
    """A file is no accounting, or has too little data; the message has the remedy."""


@dataclass(frozen=True)
class Entry:
    """A job, or a run of one that was queued again. Times in seconds; None: not yet, or unknown."""

    submit_s: float
    eligible_s: float | None
    start_s: float | None
    end_s: float | None
    state: str
    limit_s: float | None
    gpus: int
    backfilled: bool | None
    user: str = ""

    @property
    def queued_s(self) -> float:
        """Seconds in the queue since it could have run: a dependency, begin time or hold is no queue."""
        return max(self.submit_s, self.eligible_s or 0.0)

    @property
    def wait_s(self) -> float | None:
        """Seconds in the queue, or None if it has not started."""
        return None if self.start_s is None else max(0.0, self.start_s - self.queued_s)

    @property
    def ran_s(self) -> float | None:
        if self.start_s is None or self.end_s is None:
            return None
        return max(0.0, self.end_s - self.start_s)


@dataclass(frozen=True)
class WidthRow:
    """Jobs of similar width: the number `jobs`, and the waits in seconds of those that started.

    None if unknown.
    """

    label: str
    jobs: int
    mean_s: float
    median_s: float
    p90_s: float
    backfilled: float | None
    #: Mean used fraction of the requested wall time.
    used: float | None


@dataclass(frozen=True)
class AccountingHistory:
    """The jobs with GPUs of an accounting."""

    entries: tuple[Entry, ...]
    #: Whether GPUs are nodes times the GPUs of one, because the accounting counts none.
    gpus_by_nodes: bool

    @cached_property
    def window_s(self) -> tuple[float, float]:
        """Times between which all jobs are in the file: sacct lists those not ended at its begin."""
        times = [t for e in self.entries for t in (e.submit_s, e.start_s, e.end_s) if t is not None]
        ends = [e.end_s for e in self.entries if e.end_s is not None]
        if not ends or max(times) <= min(ends):
            raise HistoryError("history: no two jobs have ended in it; ask sacct for more days")
        return min(ends), max(times)

    @property
    def days(self) -> float:
        begin_s, end_s = self.window_s
        return (end_s - begin_s) / 86400

    def _steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Times in the window, and the GPUs in use from each on."""
        begin_s, end_s = self.window_s
        changes: list[tuple[float, int]] = [(begin_s, 0), (end_s, 0)]
        for e in self.entries:
            if e.start_s is not None and e.gpus:
                stop_s = end_s if e.end_s is None else e.end_s
                if stop_s > max(e.start_s, begin_s):
                    changes.append((max(e.start_s, begin_s), e.gpus))
                    changes.append((stop_s, -e.gpus))
        times = np.array(sorted({t for t, _ in changes}))
        by_time = np.zeros(len(times))
        np.add.at(by_time, np.searchsorted(times, [t for t, _ in changes]), [g for _, g in changes])
        return times, np.cumsum(by_time)

    @property
    def most_gpus(self) -> int:
        """The most GPUs that were in use at once."""
        return int(self._steps()[1].max())

    @property
    def mean_gpus(self) -> float:
        """The GPUs in use, on average over the window."""
        times, used = self._steps()
        return float((used[:-1] * np.diff(times)).sum() / (times[-1] - times[0]))

    @cached_property
    def growth_gpus(self) -> float:
        """Equivalent busy GPUs of the work that was queued in the window, at least 0.

        Work is GPUs times the duration, or for jobs that have not run, the duration expected from their
        limits.
        """
        begin_s, end_s = self.window_s
        known = [e.ran_s for e in self.entries if e.ran_s]
        usual_s = statistics.median(known) if known else 0.0

        def waiting(at_s: float) -> float:
            """Return GPU-seconds of the jobs that waited then."""
            return sum(
                e.gpus * (e.ran_s or (e.limit_s / self._factor if e.limit_s else usual_s))
                for e in self.entries
                if e.queued_s <= at_s < (e.start_s or e.end_s or math.inf)
            )

        return max(0.0, waiting(end_s) - waiting(begin_s)) / (end_s - begin_s)

    @property
    def one_user(self) -> bool:
        """Whether all lines name one user: then others' are likely hidden, and the load is unknown."""
        return bool(self.entries[0].user) and len({e.user for e in self.entries}) == 1

    @property
    def request_factors(self) -> list[float]:
        """Ratios of requested to used wall time of finished jobs."""
        done = (e for e in self.entries if e.state == "COMPLETED" and e.limit_s and e.ran_s)
        return [e.limit_s / e.ran_s for e in done]

    @cached_property
    def _factor(self) -> float:
        """Assumed ratio of requested to used wall time."""
        factors = self.request_factors
        return max(1.0, statistics.median(factors)) if factors else UNKNOWN_FACTOR

    def node_mtbf_days(self, nodes: int) -> float | None:
        """Return days between failures of one node, from jobs that ended NODE_FAIL, or None.

        Failures of unused nodes are not seen, so this is an upper bound.
        """
        failures = sum(e.state == "NODE_FAIL" for e in self.entries)
        return nodes * self.days / failures if failures else None

    def by_width(self) -> Iterator[WidthRow]:
        """Waits by the number of GPUs."""
        for low, high in WIDTH_BINS:
            mine = [e for e in self.entries if low <= e.gpus <= high]
            waits = [e.wait_s for e in mine if e.wait_s is not None]
            if not waits:
                continue
            used = [
                min(1.0, e.ran_s / e.limit_s) for e in mine if e.ran_s is not None and e.limit_s
            ]
            backfilled = [e.backfilled for e in mine if e.backfilled is not None]
            median_s, p90_s = (float(q) for q in np.percentile(waits, [50, 90]))
            yield WidthRow(
                label=str(low) if low == high else f"{low}+" if high == 10**9 else f"{low}-{high}",
                jobs=len(mine),
                mean_s=statistics.fmean(waits),
                median_s=median_s,
                p90_s=p90_s,
                backfilled=statistics.fmean(backfilled) if backfilled else None,
                used=statistics.fmean(used) if used else None,
            )

    def came_s(self, entry: Entry) -> float:
        """Return when a started job joins the queue, for the simulator.

        A job that had started when the window begins joins at its start, and one that waited then joins at
        the begin. The jobs that they had waited for are mostly not in the file.
        """
        begin_s, _ = self.window_s
        return entry.start_s if entry.start_s < begin_s else max(entry.queued_s, begin_s)

    @cached_property
    def _first_s(self) -> float:
        return min(self.window_s[0], min(e.start_s for e in self.entries if e.start_s is not None))

    @property
    def settled_s(self) -> float:
        """Time from which `arrivals` has all jobs: the begin of the window, on its clock."""
        return self.window_s[0] - self._first_s

    def arrivals(self) -> list[Arrival]:
        """Return its jobs for the simulator, from 0 on.

        Those that never started are left out.
        """
        _, end_s = self.window_s
        started = [e for e in self.entries if e.start_s is not None and e.gpus]
        jobs = []
        for e in sorted(started, key=lambda e: e.queued_s):
            ran_s = max(1.0, e.ran_s if e.ran_s is not None else end_s - e.start_s)
            jobs.append(
                Arrival(
                    self.came_s(e) - self._first_s,
                    e.gpus,
                    ran_s,
                    max(e.limit_s or ran_s * self._factor, ran_s),
                )
            )
        return sorted(jobs, key=lambda a: a.submit_s)


def read_history(
    path: str | Path, gpus_per_node: int, partition: str | None = None
) -> AccountingHistory:
    """Return the accounting in a file, of one partition or of all.

    Args:
        path: The file.
        gpus_per_node: GPUs of a node.
        partition: Name of the partition, or None for all.

    Raises:
        HistoryError: For another format, naming the line, and if there is no job with GPUs.
        OSError: If the file cannot be read.
    """
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        lines = list(csv.reader(file, delimiter="|", quoting=csv.QUOTE_NONE))
    rows = list(_named(Path(path).name, lines))
    if partition is not None:
        # A pending job may name several partitions.
        in_partition = [r for r in rows if partition in r.get("Partition", "").split(",")]
        if not in_partition:
            names = sorted({r.get("Partition", "") for r in rows})
            raise HistoryError(
                f"decide.queue.partition = {partition!r}: no job of {path} ran there; it has "
                f"{printable(', '.join(names))}"
            )
        rows = in_partition
    counted = any("gres/gpu" in r["AllocTRES"] + r.get("ReqTRES", "") for r in rows)
    entries = [_entry(r, gpus_per_node, counted) for r in rows]
    with_gpus = tuple(e for e in entries if e.gpus)
    if not any(e.start_s is not None for e in with_gpus):
        raise HistoryError(
            f"{path}: no job with a GPU has started in it; ask sacct for more days, with -a for all users"
        )
    return AccountingHistory(with_gpus, not counted)


def _named(name: str, lines: Sequence[Sequence[str]]) -> Iterator[dict[str, str]]:
    """Yield each line's values by their names."""
    names: Sequence[str] = FIELDS
    for number, values in enumerate(lines, 1):
        if not values or values == [""]:
            continue
        if number == 1 and {"Submit", "State"} <= set(values):
            names = values
            if missing := [field for field in NEEDED if field not in names]:
                raise HistoryError(
                    f"{name}: has no column {missing[0]}; ask sacct for -o {','.join(FIELDS)}"
                )
            continue
        if len(values) != len(names):
            raise HistoryError(
                f"{name}, line {number}: {len(values)} values where {len(names)} belong; write it with "
                f"sacct -a -X -P -D -o {','.join(FIELDS)}"
            )
        row = dict(zip(names, values, strict=True))
        for field in ("Submit", "Start", "End"):
            try:
                _time(row[field])
            except ValueError:
                raise HistoryError(
                    f"{name}, line {number}: {field} = {row[field]!r} is no time, as 2026-01-31T12:00:00"
                ) from None
        if _time(row["Submit"]) is None:
            raise HistoryError(f"{name}, line {number}: nothing says when it was submitted")
        yield row


def _entry(row: Mapping[str, str], gpus_per_node: int, counted: bool) -> Entry:
    limit, nodes = row.get("TimelimitRaw", ""), row.get("NNodes", "")
    n = int(nodes) if nodes.isdigit() else 0
    gpus = n * gpus_per_node
    if counted:
        gpus = gpus_of(row["AllocTRES"]) or gpus_of(row.get("ReqTRES", ""))
    start_s, end_s = _time(row["Start"]), _time(row["End"])
    if not row["AllocTRES"]:  # cancelled in the queue: older versions state its end as its start
        start_s = None
    flags = row.get("Flags")
    return Entry(
        submit_s=_time(row["Submit"]) or 0.0,
        eligible_s=_time(row.get("Eligible", "")),
        start_s=start_s,
        end_s=end_s,
        state=row["State"].split(" ")[0],
        # Minutes; Partition_Limit and UNLIMITED are no numbers.
        limit_s=int(limit) * 60.0 if limit.isdigit() and int(limit) else None,
        gpus=gpus,
        backfilled="SchedBackfill" in flags if flags else None,
        user=row.get("User", ""),
    )


def gpus_of(tres: str) -> int:
    """The GPUs of `cpu=4,gres/gpu=2,gres/gpu:a100=2`: the count without a type, else the sum of the types."""
    counts = dict(re.findall(r"gres/gpu(:[^=,]+)?=(\d+)", tres))
    return int(counts[""]) if "" in counts else sum(map(int, counts.values()))


def _time(text: str) -> float | None:
    if text in ("", "Unknown", "None", "N/A"):
        return None
    if text.isdigit():  # SLURM_TIME_FORMAT=%s
        return float(text)
    # As if it were UTC: only differences count, and they must not depend on the reader's time zone.
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
