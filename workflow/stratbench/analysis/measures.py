"""The measures of tables and figures: the column, the unit and the baseline of each.

A measure that shows a column as it is has the column's unit and definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from stratbench.analysis.columns import BY_NAME
from stratbench.analysis.score import Score, score_of
from stratbench.cell.words import MIB

if TYPE_CHECKING:
    import pandas as pd

#: The mark on a figure that the audit doubts, in tables and in figures.
DOUBT = "†"
#: The text in a table if the study has no such cell (`single` on two workers).
NO_CELL = "–"
#: The strategy without any distribution, on one worker, which speedups are relative to.
ALONE = "single"
#: The factor from a column's unit to the unit in which it is shown.
FACTORS = {
    ("bytes", "MiB"): 1 / MIB,
    ("bytes/s", "GB/s"): 1e-9,
    ("FLOP/s", "GFLOP/s"): 1e-9,
    ("share", "%"): 100.0,
}


@dataclass(frozen=True)
class Measure:
    """A measure: a column of cells.csv in some unit, or its ratio to a baseline."""

    name: str
    title: str
    #: The column of cells.csv.
    column: str
    #: The unit in which it is shown; None: the column's. A ratio has none.
    shown_unit: str | None = None
    #: The meaning; empty: the column's definition.
    own_definition: str = ""
    better: Literal["lower", "higher"] | None = "lower"  # None: neither
    #: `self`: divided by the same strategy at one worker; `single`: by strategy `single`; another
    #: name: by that strategy on as many workers.
    baseline: Literal["self", "single", "ddp", "ps-sync"] | None = None
    #: Divide the baseline by the measure instead.
    inverted: bool = False
    #: Divide by the number of workers too.
    per_worker: bool = False
    #: The kind of the audit's findings that cast doubt on it.
    concerns: Literal["time", "memory", "score"] = "time"
    #: Digits after the point; None: three significant digits.
    decimals: int | None = None
    #: Whether its name comes from each experiment's records: the `score`, or what throughput `counts`.
    named_by: Literal["score", "counts"] | None = None
    #: The factor from the column's values to the shown ones; None: from the units.
    own_scale: float | None = None

    @property
    def unit(self) -> str:
        """The unit in which it is shown; empty for a ratio."""
        if self.baseline:
            return ""
        return BY_NAME[self.column].unit if self.shown_unit is None else self.shown_unit

    @property
    def scale(self) -> float:
        """The factor from the column's values to the shown ones; a ratio has none."""
        if self.own_scale is not None:
            return self.own_scale
        unit = BY_NAME[self.column].unit
        return 1.0 if self.baseline or self.unit == unit else FACTORS[unit, self.unit]

    @property
    def definition(self) -> str:
        """The meaning of the measure, in a few sentences."""
        return self.own_definition or BY_NAME[self.column].definition

    @property
    def heading(self) -> str:
        """Title with the unit, for axes and captions."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def named(self, score: Score) -> Measure:
        """The measure as shown in an experiment with this score."""
        if self.named_by == "score":
            return replace(
                self,
                title=self.title.replace("score", score.name),
                shown_unit=score.shown_unit,
                better=score.better,
                decimals=score.decimals,
                own_scale=score.factor,
            )
        if self.named_by == "counts":
            unit = f"{score.counts}/s"
            return replace(self, shown_unit=unit, own_scale=score.counts_per_sample)
        return self


_THROUGHPUT = "throughput_samples_per_s"
_SPEEDUP = (
    "Ratio of training throughputs; it equals the ratio of training times where as many samples "
    "entered the weights. They do in cells of one experiment, but where a server drops late pushes."
)

MEASURES: dict[str, Measure] = {
    m.name: m
    for m in (
        Measure("training_time", "Training time", "train_time_s"),
        Measure(
            "throughput", "Training throughput", _THROUGHPUT, better="higher", named_by="counts"
        ),
        Measure(
            "achieved",
            "Achieved arithmetic rate",
            "achieved_flops_per_s",
            "GFLOP/s",
            better="higher",
        ),
        Measure("mfu", "Model FLOPs utilisation (MFU)", "mfu", "%", better="higher"),
        Measure(
            "speedup",
            "Speedup over one worker",
            _THROUGHPUT,
            own_definition=f"Against the same strategy with one worker. {_SPEEDUP}",
            better="higher",
            baseline="self",
            decimals=2,
        ),
        Measure(
            "efficiency",
            "Scaling efficiency",
            _THROUGHPUT,
            own_definition="Speedup over the same strategy with one worker, divided by the number of "
            "workers.",
            better="higher",
            baseline="self",
            per_worker=True,
            decimals=2,
        ),
        Measure(
            "speedup_vs_single",
            "Speedup over single",
            _THROUGHPUT,
            own_definition="Against strategy single, a bare training loop in one process, which has no "
            f"cost of distribution. {_SPEEDUP}",
            better="higher",
            baseline="single",
            decimals=2,
        ),
        Measure(
            "efficiency_vs_single",
            "Efficiency against single",
            _THROUGHPUT,
            own_definition="Speedup over strategy single, divided by the number of workers.",
            better="higher",
            baseline="single",
            per_worker=True,
            decimals=2,
        ),
        Measure(
            "time_vs_ddp",
            "Training time against ddp",
            "train_time_s",
            own_definition="Training time divided by that of ddp on as many workers.",
            baseline="ddp",
            decimals=2,
        ),
        Measure(
            "time_vs_sync",
            "Training time against ps-sync",
            "train_time_s",
            own_definition="Training time divided by that of ps-sync on as many workers.",
            baseline="ps-sync",
            decimals=2,
        ),
        Measure(
            "memory",
            "Peak memory per worker",
            "peak_memory_bytes",
            "MiB",
            concerns="memory",
            decimals=0,
        ),
        Measure(
            "model_states",
            "Model states per worker",
            "model_states_bytes",
            "MiB",
            concerns="memory",
        ),
        Measure(
            "memory_reduction",
            "Memory reduction against ddp",
            "peak_memory_bytes",
            own_definition="Peak memory per worker of ddp on as many workers, divided by it. Sharding "
            "divides the model states by the number of workers at most, and activations not at all. "
            "On a CPU weights and momentum are in neither peak.",
            better="higher",
            baseline="ddp",
            inverted=True,
            concerns="memory",
            decimals=2,
        ),
        Measure("sent_per_step", "Sent by a worker in a step", "sent_bytes_per_step", "MiB"),
        Measure(
            "bandwidth",
            "Implied bandwidth of a worker",
            "implied_bytes_per_s",
            "GB/s",
            better=None,
        ),
        Measure("energy", "Energy of the GPUs per sample", "joules_per_sample"),
        Measure("time_to_target", "Training time to the target score", "time_to_target_s"),
        Measure(
            "score",
            "Test score after the last epoch",
            "score_final",
            better="higher",
            concerns="score",
            named_by="score",
        ),
        Measure("perplexity", "Perplexity per token", "perplexity", concerns="score"),
        Measure(
            "utilisation",
            "Utilisation while training",
            "utilisation_pct",
            better="higher",
            decimals=1,
        ),
    )
}


def measures_of(rows: pd.DataFrame) -> dict[str, Measure]:
    """The measures by name, with the names of one experiment's records (rows of cells.csv)."""
    score = score_of(rows)
    return {name: measure.named(score) for name, measure in MEASURES.items()}


#: Sentences of a caption, each with what has to be drawn for it to be true (a key of DRAWN; empty: always).
Reading = tuple[tuple[str, str], ...]

_CROSSES = (
    "failed",
    "A cross on the horizontal axis is a cell without a result, named in the panel.",
)
_LABELLED = ("failed", "A cross with a label stands for a cell without a result.")


def _ran_on(kind: str) -> Callable[[pd.DataFrame], bool]:
    return lambda rows: bool((rows["device_kind"] == kind).any())


#: Whether rows of cells.csv, of one experiment, have something that a figure shows in its own way.
DRAWN: dict[str, Callable[[pd.DataFrame], bool]] = {
    "": lambda rows: True,
    "failed": lambda rows: bool((rows["status"] != "ok").any()),
    "repeats": lambda rows: rows["repeat"].nunique() > 1,
    "GPUs": _ran_on("cuda"),
    "CPUs": _ran_on("cpu"),
    "least loss": lambda rows: bool(rows["least_loss"].notna().any()),
    "accuracy": lambda rows: bool((rows["score_name"] == "accuracy").any()),
    "loss": lambda rows: bool((rows["score_name"] == "loss").any()),
    "alone": lambda rows: bool((rows.groupby("strategy")["gpus"].max() == 1).any()),
    "servers": lambda rows: bool((rows["strategy_kind"] == "server").any()),
}


@dataclass(frozen=True)
class Plot:
    """A figure of every experiment: how to read it, and which data it needs.

    A figure with the name of a measure shows that measure.
    """

    name: str
    #: How to read it, below the figure.
    reading: Reading
    #: The kind of chart, for a reader who cannot see it. `plots.CHARTS` draws a measure by this.
    chart: str = "Line chart"
    #: Empty: the measure's heading. `score` and `unit` stand for those of the experiment.
    own_title: str = ""
    #: A column of cells.csv; without values in it there is nothing to draw.
    needs: str = "status"
    #: Whether the report shows it at once, not folded.
    primary: bool = False
    #: Whether its reading says what it shows, in the place of the measure's definition.
    defines: bool = False

    def title_of(self, score: Score) -> str:
        """Its title, with the unit, in an experiment with this score."""
        if self.own_title:
            return self.own_title.replace("score", score.name).replace("unit", score.shown_unit)
        return MEASURES[self.name].named(score).heading

    def caption_of(self, rows: pd.DataFrame) -> str:
        """What the figure shows of these cells, and how to read it."""
        return " ".join([*self._definition, *(t for what, t in self.reading if DRAWN[what](rows))])

    @property
    def caption(self) -> str:
        """The same of any cells."""
        return " ".join([*self._definition, *(text for _, text in self.reading)])

    @property
    def _definition(self) -> list[str]:
        measure = MEASURES.get(self.name)
        return [measure.definition] if measure and not self.defines else []


#: Figures by name, in the order of the report.
PLOTS: dict[str, Plot] = {
    p.name: p
    for p in (
        Plot("training_time", (_LABELLED,), "Bar chart", primary=True),
        Plot("throughput", (("alone", "Dotted: a strategy that has one worker only."), _CROSSES)),
        Plot("speedup", (("", "Dashed: the ideal."), _CROSSES)),
        Plot("speedup_vs_single", (("", "Dashed: the ideal."), _CROSSES), primary=True),
        Plot(
            "breakdown",
            (
                (
                    "",
                    "Mean of all workers' steps on the most workers, in the phases that the strategy "
                    "can separate. Communication that overlaps the backward pass is inside it.",
                ),
            ),
            "Stacked bar chart",
            "A step by phase (ms)",
            "breakdown_ms",
        ),
        Plot(
            "memory",
            (
                ("", "Of the worker that used most."),
                (
                    "GPUs",
                    "On a GPU the peak that the framework allocated; the black line across a bar is "
                    "the part that model states take.",
                ),
                (
                    "CPUs",
                    "Of a CPU process the high-water mark of the resident set above its base before "
                    "training, which holds weights and momentum already.",
                ),
                _LABELLED,
            ),
            "Bar chart",
            primary=True,
            defines=True,
        ),
        Plot(
            "score",
            (
                ("", "After each epoch, over the whole test set, outside the timed region."),
                ("accuracy", "Accuracy: the share classified correctly."),
                ("loss", "Loss: the mean cross-entropy of the next token."),
                (
                    "repeats",
                    "The line is the median of the repeats; the band goes from the lowest to the highest.",
                ),
                ("failed", "A cross ends the line of a cell that was cut short."),
                ("least loss", "Dotted: the least possible loss."),
            ),
            "Line chart by epoch",
            "Test score by epoch (unit)",
            needs="epochs",
            primary=True,
            defines=True,
        ),
        Plot(
            "score_over_time",
            (
                (
                    "",
                    "On the most workers of the experiment; the time is that of the training steps alone.",
                ),
                ("repeats", "The medians of both at each epoch."),
            ),
            "Line chart by time",
            "Test score over training time",
            "epochs",
        ),
        Plot(
            "tradeoff",
            (
                (
                    "",
                    "Each point is a strategy on the number of workers beside it; its area is the peak "
                    "memory of a worker. The grey line joins those that no other beats in both time and "
                    "score.",
                ),
            ),
            "Scatter chart",
            "Training time, memory and score together",
            "epochs",
        ),
        Plot(
            "staleness",
            (
                (
                    "",
                    "Share of the pushes that were computed from a state so many updates old, on the "
                    "most workers, over all shards and repeats.",
                ),
            ),
            "Line chart by staleness",
            "Staleness of the pushes to parameter servers",
            "staleness",
        ),
        Plot("utilisation", (_LABELLED,), "Bar chart", needs="utilisation_pct"),
        Plot(
            "utilisation_timelines",
            (
                (
                    "",
                    "The first repeat on the most workers, from the start of the cell; shaded: training.",
                ),
                ("servers", "Dashed: servers."),
            ),
            "Line charts by time",
            "Utilisation of each worker over time (%)",
            "utilisation_pct",
        ),
        Plot(
            "memory_timelines",
            (
                (
                    "",
                    "The first repeat on the most workers, from the start of the cell; shaded: training.",
                ),
                ("GPUs", "On a GPU the device's memory in use."),
                ("CPUs", "On a CPU the process's resident set."),
                ("servers", "Dashed: servers."),
            ),
            "Line charts by time",
            "Memory of each worker over time (MiB)",
            "utilisation_pct",
        ),
    )
}


def format_number(value: float, decimals: int | None) -> str:
    """`value` as text with `decimals` digits after the point.

    None: as many as give three significant digits, but at most three.
    """
    if decimals is None:
        magnitude = abs(value)
        decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3
    return f"{value:.{decimals}f}"


def status_label(status: str, time_limit_s: float | None, reason: str | None = None) -> str:
    """The text of a table in place of a number, for a cell that is not `ok`."""
    if status == "infeasible":
        return f"infeasible ({reason})"
    if status == "timeout":
        return f">{time_limit_s:g} s" if time_limit_s else "timeout"
    return {"oom": "OOM", "diverged": "div."}.get(status, status)
