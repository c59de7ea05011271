"""The metrics of tables and figures, each with its column, unit and baseline.

A metric that shows a column unchanged has the column's unit and definition.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from stratbench.analysis.records.columns import BY_NAME
from stratbench.analysis.records.score import Score, read_score
from stratbench.cell.coordinates import INCOMPARABLE
from stratbench.cell.text.words import GIB, MIB

if TYPE_CHECKING:
    import pandas as pd

#: The mark of a value on which the audit has a finding, in tables and figures.
DOUBT = "†"
#: The text in a table where the study has no cell, such as for `single` on two workers.
NO_CELL = "–"
#: The strategy without distribution, on one worker, to which speedups are relative.
ALONE = "single"
#: If the largest peak memory of an experiment has this many bytes, memory is shown in GiB.
GIB_FROM = 2 * GIB
#: The factor from a column's unit to the unit in which it is shown.
FACTORS = {
    ("bytes", "MiB"): 1 / MIB,
    ("bytes", "GiB"): 1 / GIB,
    ("bytes/s", "GB/s"): 1e-9,
    ("FLOP/s", "GFLOP/s"): 1e-9,
    ("share", "%"): 100.0,
}


@dataclass(frozen=True)
class Measure:
    """A metric: a column of cells.csv in some unit, or its ratio to a baseline."""

    name: str
    title: str
    #: The column of cells.csv from which the metric is computed.
    column: str
    #: The unit in which the metric is shown; None for the column's unit. A ratio has no unit.
    shown_unit: str | None = None
    #: The definition; empty for the column's definition.
    explicit_definition: str = ""
    better: Literal["lower", "higher"] | None = "lower"  # which values are better; None if neither
    #: The strategy by whose value the metric is divided: `self` (the same one) or `single` on one worker,
    #: or another strategy on the same number of workers.
    baseline: Literal["self", "single", "ddp", "ps-sync"] | None = None
    #: Whether the ratio is inverted: the baseline's value is divided by the strategy's.
    is_inverted: bool = False
    #: Whether the value is also divided by the number of workers.
    is_per_worker: bool = False
    #: The kind of audit findings that concern the metric.
    audit_kind: Literal["time", "memory", "score"] = "time"
    #: Digits after the decimal point; None for three significant digits.
    decimals: int | None = None
    #: What the task adds to the title. `score`: the name of its score. `counts`: the unit that its throughput
    #: counts. None: nothing.
    title_source: Literal["score", "counts"] | None = None
    #: The factor from the column's values to the shown values; None to derive it from the units.
    shown_factor_override: float | None = None

    @property
    def unit(self) -> str:
        """The unit in which the metric is shown, empty for a ratio."""
        if self.baseline:
            return ""
        return BY_NAME[self.column].unit if self.shown_unit is None else self.shown_unit

    @property
    def display_factor(self) -> float:
        """The factor from the column's values to the shown values. It is 1 for a ratio."""
        if self.shown_factor_override is not None:
            return self.shown_factor_override
        unit = BY_NAME[self.column].unit
        return 1.0 if self.baseline or self.unit == unit else FACTORS[unit, self.unit]

    @property
    def definition(self) -> str:
        """The meaning of the metric, in a few sentences."""
        return self.explicit_definition or BY_NAME[self.column].definition

    @property
    def heading(self) -> str:
        """The title of the metric with its unit, for axes and captions."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def fill_in_score_names(self, score: Score) -> Measure:
        """Return the metric with the names and units of a task's score filled in."""
        if self.title_source == "score":
            return replace(
                self,
                title=self.title.replace("score", score.name),
                shown_unit=score.shown_unit,
                better=score.better,
                decimals=score.shown_decimals,
                shown_factor_override=score.display_factor,
            )
        if self.title_source == "counts":
            unit = f"{score.throughput_unit}/s"
            return replace(self, shown_unit=unit, shown_factor_override=score.counts_per_sample)
        return self

    def choose_unit_for_rows(self, rows: pd.DataFrame) -> Measure:
        """Return the metric in a unit that suits the rows of cells.csv, such as GiB.

        All measures of memory have the unit that suits the peak.
        """
        column = "peak_memory_bytes" if self.audit_kind == "memory" else self.column
        return (
            self.replace_unit("GiB")
            if self.unit == "MiB" and rows[column].max() >= GIB_FROM
            else self
        )

    def replace_unit(self, unit: str) -> Measure:
        """Return the metric in another unit of the metric's column."""
        return self if unit == self.unit else replace(self, shown_unit=unit, decimals=None)


_THROUGHPUT = "throughput_samples_per_s"
_SPEEDUP = (
    "Ratio of training throughputs. In an experiment it equals the ratio of training times, unless a "
    "server drops late pushes."
)

# fmt: off
MEASURES: dict[str, Measure] = {
    m.name: m
    for m in (
        Measure("training_time", "Training time", "train_time_s"),
        Measure("throughput", "Training throughput", _THROUGHPUT, better="higher", title_source="counts"),
        Measure("throughput_per_worker", "Training throughput per worker", _THROUGHPUT, better="higher",
            explicit_definition="Training throughput divided by the number of workers.",
            title_source="counts",
            is_per_worker=True),
        Measure("achieved", "Achieved arithmetic rate", "achieved_flops_per_s", "GFLOP/s", better="higher"),
        Measure("mfu", "Model FLOPs utilisation (MFU)", "mfu", "%", better="higher"),
        Measure("speedup", "Speedup over one worker", _THROUGHPUT,
            explicit_definition=f"Speedup over the same strategy with one worker. {_SPEEDUP}",
            better="higher",
            baseline="self", decimals=2),
        Measure("efficiency", "Scaling efficiency", _THROUGHPUT,
            explicit_definition="Speedup over the same strategy with one worker, divided by the number of "
            "workers.", better="higher", baseline="self", is_per_worker=True, decimals=2),
        Measure("speedup_vs_single", "Speedup over single", _THROUGHPUT,
            explicit_definition="Speedup over strategy single, a plain training loop in one process without "
            f"distribution. {_SPEEDUP}", better="higher", baseline="single", decimals=2),
        Measure("efficiency_vs_single", "Efficiency against single", _THROUGHPUT,
            explicit_definition="Speedup over strategy single, divided by the number of workers.",
            better="higher", baseline="single", is_per_worker=True, decimals=2),
        Measure("time_vs_ddp", "Training time against ddp", "train_time_s",
            explicit_definition="Training time divided by that of ddp on the same number of workers.",
            baseline="ddp", decimals=2),
        Measure("time_vs_sync", "Training time against ps-sync", "train_time_s",
            explicit_definition="Training time divided by that of ps-sync on the same number of workers.",
            baseline="ps-sync", decimals=2),
        Measure("memory", "Peak memory per worker", "peak_memory_bytes", "MiB", audit_kind="memory",
            decimals=0),
        Measure("model_states", "Model states per worker", "model_states_bytes", "MiB", audit_kind="memory"),
        Measure("memory_reduction", "Memory reduction against ddp", "peak_memory_bytes",
            explicit_definition="Peak memory per worker of ddp divided by the strategy's, on the "
                                "same number of "
            "workers. Sharding divides model states by the number of workers at most, and does not "
            "reduce activations. CPU peaks exclude weights and momentum.", better="higher", baseline="ddp",
            is_inverted=True, audit_kind="memory", decimals=2),
        Measure("sent_per_step", "Sent by a worker in a step", "sent_bytes_per_step", "MiB"),
        Measure("bandwidth", "Implied bandwidth of a worker", "implied_bytes_per_s", "GB/s", better=None),
        Measure("energy", "Energy of the GPUs per sample", "joules_per_sample"),
        Measure("time_to_target", "Training time to the target score", "time_to_target_s"),
        Measure("time_to_result", "Time to the result, queue included", "time_to_result_s"),
        Measure("score", "Test score after the last epoch", "score_final", better="higher",
            audit_kind="score", title_source="score"),
        Measure("perplexity", "Perplexity per token", "perplexity", audit_kind="score"),
        Measure("utilisation", "Utilisation while training", "utilisation_pct", better="higher",
            decimals=1),
    )
}
# fmt: on


def map_measures_by_name(rows: pd.DataFrame) -> dict[str, Measure]:
    """Return the metrics by name, with titles and units for one experiment's rows of cells.csv."""
    score = read_score(rows)
    return {
        name: m.fill_in_score_names(score).choose_unit_for_rows(rows)
        for name, m in MEASURES.items()
    }


def map_measures_by_experiment(cells: pd.DataFrame) -> dict[str, dict[str, Measure]]:
    """Return the metrics by experiment and by name, with titles and units for the experiment."""
    return {
        str(name): map_measures_by_name(rows)
        for name, rows in cells.groupby("experiment", sort=False)
    }


def format_number(value: float, decimals: int | None) -> str:
    """Return a number as text with `decimals` digits after the point.

    None gives three significant digits, with at most three digits after the point.
    """
    if decimals is None:
        magnitude = abs(value)
        decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3
    return f"{value:.{decimals}f}"


def append_dagger_if_flagged(text: str, flags: str) -> str:
    """Return a value's text. A dagger follows if the audit has a finding on the value."""
    return f"{text} {DOUBT}" if flags else text


def format_status_as_value(
    status: str, time_limit_s: float | None, reason: str | None = None
) -> str:
    """Return the text shown instead of a value if a cell is not `ok`. Example: `OOM`.

    Args:
        status: Status of the cell.
        time_limit_s: Time limit of the cell in seconds, if any.
        reason: Reason of the status, if any.
    """
    if status == "infeasible":
        return f"infeasible ({reason})"
    if status == "timeout":
        return f">{time_limit_s:g} s" if time_limit_s else "timeout"
    return {"oom": "OOM", "diverged": "div.", INCOMPARABLE: "other work"}.get(status, status)
