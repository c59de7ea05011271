"""Every figure of an experiment and model: its title, and which data it needs."""

from __future__ import annotations

from dataclasses import dataclass

from stratbench.analysis.records.measures import MEASURES
from stratbench.analysis.records.score import Score

#: The file, in the folder of the figures, that says what each shows.
INDEX = "figures.json"


@dataclass(frozen=True)
class Plot:
    """A figure of every experiment and model. One with the name of a measure shows that measure."""

    name: str
    #: The kind of chart, for a reader who cannot see it.
    chart: str
    #: Empty: the measure's title. `score` and `counts` stand for the experiment's.
    own_title: str = ""
    #: A column of cells.csv; without values in it there is nothing to draw.
    needs: str = "status"
    #: Whether the report shows it at once, not folded.
    primary: bool = False
    #: Whether there is one for each number of workers.
    by_count: bool = False

    def title_of(self, score: Score) -> str:
        """Its title in an experiment with this score."""
        named = self.own_title.replace("score", score.name).replace("counts", score.counts)
        named = named or MEASURES[self.name].named(score).title
        return f"{named[0].upper()}{named[1:]}"


# fmt: off
#: Figures by name, in the order of the report.
PLOTS: dict[str, Plot] = {
    p.name: p
    for p in (
        Plot("training_time", "Dot chart", primary=True),
        Plot("speedup_vs_single", "Line chart", primary=True),
        Plot("memory", "Dot chart", "Peak memory of a worker", primary=True),
        Plot("breakdown", "Bar chart", "Where a step's time goes", "breakdown_ms", primary=True),
        Plot("tradeoff", "Scatter chart", "score against training time", "epochs", primary=True),
        Plot("throughput", "Line chart", "Training throughput (counts/s)"),
        Plot("speedup", "Line chart"),
        Plot("score_over_time", "Line chart by time", "score over training time", "epochs"),
        Plot("staleness", "Line chart by staleness", "Staleness of the pushes to servers", "staleness"),
        Plot("utilisation", "Dot chart", needs="utilisation_pct"),
        Plot("utilisation_timelines", "Line charts by time", "Utilisation of each worker over time",
            "utilisation_pct"),
        Plot("memory_timelines", "Line charts by time", "Memory of each worker over time",
            "utilisation_pct"),
        Plot("score", "Line chart by epoch", "score by epoch", "epochs", primary=True, by_count=True),
    )
}
# fmt: on
