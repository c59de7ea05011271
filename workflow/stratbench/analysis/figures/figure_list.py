"""Lists the figures of an experiment and model, with their titles and the data that they need."""

from __future__ import annotations

from dataclasses import dataclass

from stratbench.analysis.records.measures import MEASURES
from stratbench.analysis.records.score import Score

#: The file that lists titles and captions of all figures in its folder.
INDEX = "figures.json"


@dataclass(frozen=True)
class Plot:
    """A figure of an experiment and model. A figure with a metric's name shows this metric."""

    name: str
    #: The kind of chart, for screen readers.
    chart_kind: str
    #: The title, in which the experiment's names replace `score` and `counts`. If empty, the metric's title.
    title_template: str = ""
    #: The column of cells.csv that the figure needs. If it has no values, there is no figure.
    required_column: str = "status"
    #: Whether the report shows the figure at once, instead of after a click.
    is_unfolded: bool = False
    #: Whether there is one figure per number of workers.
    is_per_worker_count: bool = False

    def format_title(self, score: Score) -> str:
        """Return the figure's title, with the name and unit of an experiment's score filled in."""
        named = self.title_template.replace("score", score.name).replace(
            "counts", score.throughput_unit
        )
        named = named or MEASURES[self.name].fill_in_score_names(score).title
        return f"{named[0].upper()}{named[1:]}"


# fmt: off
#: Figures by name, in the order of the report.
PLOTS: dict[str, Plot] = {
    p.name: p
    for p in (
        Plot("training_time", "Dot chart", is_unfolded=True),
        Plot("speedup_vs_single", "Line chart", is_unfolded=True),
        Plot("memory", "Dot chart", "Peak memory of a worker", is_unfolded=True),
        Plot("breakdown", "Bar chart", "Time of a step by phase", "breakdown_ms", is_unfolded=True),
        Plot("tradeoff", "Scatter chart", "score against training time", "epochs", is_unfolded=True),
        Plot("throughput", "Line chart", "Training throughput (counts/s)"),
        Plot("speedup", "Line chart"),
        Plot("score_over_time", "Line chart by time", "score over training time", "epochs"),
        Plot("staleness", "Line chart by staleness", "Staleness of the pushes to servers", "staleness"),
        Plot("utilisation", "Dot chart", required_column="utilisation_pct"),
        Plot("utilisation_timelines", "Line charts by time", "Utilisation of each worker over time",
            "utilisation_pct"),
        Plot("memory_timelines", "Line charts by time", "Memory of each worker over time",
            "utilisation_pct"),
        Plot("score", "Line chart by epoch", "score by epoch", "epochs", is_unfolded=True,
            is_per_worker_count=True),
    )
}
# fmt: on
