"""Summarises the samples of a cell's timeline in one pass over the file, for tables and audit rules."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

#: Reasons for lower clocks of a GPU that is too hot or lacks power.
SLOWED = ("hw_slowdown", "thermal_slowdown", "power_brake")
#: Reason for lower clocks of a GPU that is at its normal power limit.
CAPPED = "sw_power_cap"
#: Columns that identify what is sampled, and columns with the time of a sample and the state at this time.
PLACE, MOMENT = ("node", "kind", "id"), ("t_s", "phase", "throttle")
#: Columns that are summarised, by the kind of sample.
COLUMNS = {
    "gpu": ("gpu_util_pct", "mem_used_bytes", "power_w", "sm_clock_mhz"),
    "process": ("cpu_pct", "rss_bytes"),
    "host": ("cpu_pct", "load_1m"),
}
#: The column with the utilisation, by the kind of sample.
BUSY = {"gpu": "gpu_util_pct", "process": "cpu_pct"}
#: The column with the memory in use, by the kind of sample.
HELD = {"gpu": "mem_used_bytes", "process": "rss_bytes"}
#: A GPU with at least this utilisation in percent counts as busy.
WORKING_PCT = 50.0

#: Node, kind and id of what is sampled: a host, a process or a GPU.
SampleSource = tuple[str, str, str]


@dataclass(frozen=True)
class ColumnSummary:
    """Number, mean and maximum of a column's values over some samples."""

    count: int
    mean: float
    maximum: float

    @classmethod
    def from_values(cls, values_or_none: Iterable[float | None]) -> ColumnSummary | None:
        """Return the summary of all values that are not None. None if there are no such values."""
        values = [value for value in values_or_none if value is not None]
        if not values:
            return None
        mean = math.fsum(values) / len(values)
        return cls(len(values), mean, max(values))


class Sample(NamedTuple):
    """A row of a timeline. Its values are in the order of COLUMNS for the row's kind."""

    t_s: float
    phase: str
    reasons: str
    values: list[float | None]


@dataclass(frozen=True)
class SampleSeries:
    """A summary of the samples of one host, process or GPU."""

    num_samples: int
    first_sample_time_s: float
    last_sample_time_s: float
    #: Summaries of all samples, by column.
    summaries_by_column: dict[str, ColumnSummary]
    #: Summaries of the samples during training, by column.
    training_summaries_by_column: dict[str, ColumnSummary]
    #: Values of the first sample, by column.
    first_values_by_column: dict[str, float]
    #: Values of the last sample, by column.
    last_values_by_column: dict[str, float]
    #: The cell's phase in the first sample; empty before the first phase.
    phase_of_first_sample: str
    #: The number of samples in which heat or the power brake slowed a GPU.
    num_throttled_samples: int
    #: Clock in MHz in the samples that show the GPU busy with training; None without such samples.
    busy_clock_mhz: ColumnSummary | None
    #: Fraction of these samples in which the GPU was at its power limit.
    share_of_samples_at_power_limit: float

    @classmethod
    def from_samples(cls, kind: str, samples: Sequence[Sample]) -> SampleSeries:
        """Return the summary of a source's samples. There is at least one, in the order of time."""
        trained = [sample for sample in samples if sample.phase == "train"]
        index_of = {name: i for i, name in enumerate(COLUMNS[kind])}
        working = []
        if kind == "gpu":
            used = index_of[BUSY[kind]]
            working = [sample for sample in trained if (sample.values[used] or 0) >= WORKING_PCT]
        clocks = [sample.values[index_of["sm_clock_mhz"]] for sample in working]
        return cls(
            num_samples=len(samples),
            first_sample_time_s=samples[0].t_s,
            last_sample_time_s=samples[-1].t_s,
            summaries_by_column=summarize_samples_by_column(index_of, samples),
            training_summaries_by_column=summarize_samples_by_column(index_of, trained),
            first_values_by_column=map_known_values_by_column(index_of, samples[0]),
            last_values_by_column=map_known_values_by_column(index_of, samples[-1]),
            phase_of_first_sample=samples[0].phase,
            num_throttled_samples=sum(
                any(name in sample.reasons for name in SLOWED) for sample in samples
            ),
            busy_clock_mhz=ColumnSummary.from_values(clocks),
            share_of_samples_at_power_limit=sum(CAPPED in sample.reasons for sample in working)
            / max(1, len(working)),
        )


def map_known_values_by_column(index_by_column: dict[str, int], sample: Sample) -> dict[str, float]:
    """Return the values of a sample that are not missing, by column."""
    return {name: v for name, i in index_by_column.items() if (v := sample.values[i]) is not None}


def summarize_samples_by_column(
    index_by_column: dict[str, int], samples: Sequence[Sample]
) -> dict[str, ColumnSummary]:
    """Return the summary of each column that has values in the samples."""
    by_column = {
        name: ColumnSummary.from_values([sample.values[i] for sample in samples])
        for name, i in index_by_column.items()
    }
    return {name: values for name, values in by_column.items() if values is not None}


@dataclass(frozen=True)
class Timeline:
    """The samples of a cell, summarised per source: by node, kind (host, process, gpu) and id."""

    series_by_source: dict[SampleSource, SampleSeries]

    def select_series_of_kind(self, kind: str) -> dict[tuple[str, str], SampleSeries]:
        """Return the summaries of all sources of one kind by node and id.

        The kind is `host`, `process` or `gpu`.
        """
        return {
            (node, name): one
            for (node, its, name), one in self.series_by_source.items()
            if its == kind
        }


def read_timeline(path: Path) -> Timeline | None:
    """Return the timeline in a file. None if the file is missing or has other content."""
    try:
        if not path.is_file():
            return None
        with open(path, newline="", encoding="utf-8") as f:
            return parse_timeline(f)
    except (OSError, ValueError, csv.Error):
        return None


def parse_timeline(csv_lines: Iterable[str]) -> Timeline | None:
    """Return the timeline in the lines of a CSV file. None if a column is missing.

    Raises:
        ValueError: A field is not a finite number.
    """
    rows = csv.reader(csv_lines)
    names = {name: i for i, name in enumerate(next(rows, ()))}
    if not names.keys() >= {*PLACE, *MOMENT, *chain(*COLUMNS.values())}:
        return None
    index_of, moment = ([names[name] for name in listed] for listed in (PLACE, MOMENT))
    wanted = {kind: [names[name] for name in listed] for kind, listed in COLUMNS.items()}
    samples_of: defaultdict[SampleSource, list[Sample]] = defaultdict(list)
    for row in rows:
        if len(row) < len(names):  # a killed sampler leaves an incomplete line
            continue
        node, kind, name = (row[at] for at in index_of)
        if kind not in wanted:
            continue
        t_s, phase, reasons = (row[at] for at in moment)
        values = [parse_finite_number(row[at]) for at in wanted[kind]]
        samples_of[node, kind, name].append(Sample(float(t_s), phase, reasons, values))
    return Timeline(
        {key: SampleSeries.from_samples(key[1], samples) for key, samples in samples_of.items()}
    )


def parse_finite_number(field_text: str) -> float | None:
    """Return a CSV field as a finite number, or None for an empty field.

    Raises:
        ValueError: The text is not a finite number.
    """
    if not field_text:
        return None
    value = float(field_text)
    if not math.isfinite(value):
        raise ValueError(f"the value {field_text} of a timeline is not a finite number")
    return value
