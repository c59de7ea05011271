"""Every figure of an experiment: what it shows, how to read it, and which data it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stratbench.analysis.records.measures import MEASURES
from stratbench.analysis.records.score import Score

if TYPE_CHECKING:
    import pandas as pd

#: Sentences of a caption, each with what has to be drawn for it to be true (a key of DRAWN; empty: always).
Reading = tuple[tuple[str, str], ...]

_CROSSES = (
    "failed",
    "A cross on the horizontal axis is a cell without a result, named in the panel.",
)
_SHADED = (
    "",
    "The first repeat on the most workers, from the start of the cell; shaded: training.",
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
                _SHADED,
                ("servers", "Dashed: servers."),
            ),
            "Line charts by time",
            "Utilisation of each worker over time (%)",
            "utilisation_pct",
        ),
        Plot(
            "memory_timelines",
            (
                _SHADED,
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
