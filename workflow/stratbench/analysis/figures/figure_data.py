"""The data of one experiment, from which its figures are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from stratbench.analysis.figures.style import Style, styles_of
from stratbench.analysis.records.measures import DOUBT, Measure, measures_of
from stratbench.analysis.records.score import Score, score_of
from stratbench.analysis.tables.tables import rules_by_severity, spread_note, workers_are


@dataclass(frozen=True)
class FigureData:
    """The data of an experiment's figures: its rows of the three tables, and its styles."""

    cells: pd.DataFrame
    epochs: pd.DataFrame
    summary: pd.DataFrame
    styles: dict[str, Style]
    #: results/<study>, the folder of the timelines; None: draw no timelines.
    study_dir: Path | None = None

    @property
    def models(self) -> list[str]:
        """The models in the order of the config."""
        return list(dict.fromkeys(self.cells["model"]))

    @property
    def titles(self) -> dict[str, str]:
        """The titles of panels by model: its name."""
        return {model: model for model in self.models}

    @property
    def score(self) -> Score:
        """The score of the experiment's task."""
        return score_of(self.cells)

    @property
    def score_label(self) -> str:
        """The label of an axis of scores."""
        return f"Test {self.score.name} ({self.score.shown_unit})"

    @property
    def measures(self) -> dict[str, Measure]:
        """The measures, with the names that the experiment gives them."""
        return measures_of(self.cells)

    @property
    def on_cpu(self) -> bool:
        """Whether any worker was a CPU process."""
        return bool((self.cells["device_kind"] == "cpu").any())

    @property
    def note(self) -> str:
        """The line below every figure: what was measured, and on what."""
        first = self.cells.iloc[0]
        place = f"experiment {first['experiment']}, data set {first['dataset']}."
        slowed = sorted(set(self.cells["slowdown"].dropna()))
        slowed_text = f" Slowed down on purpose: {'; '.join(slowed)}." if slowed else ""
        return f"{place} {workers_are(self.cells)}{slowed_text}"

    @property
    def strategies(self) -> list[str]:
        """The strategies in the order of the config."""
        return list(dict.fromkeys(self.cells["strategy"]))

    @property
    def counts(self) -> list[int]:
        """The worker counts, ascending."""
        return sorted(self.cells["gpus"].unique())

    @property
    def most(self) -> int:
        """The largest worker count."""
        return int(self.counts[-1])

    def doubt_note(self, *measures: str) -> str:
        """The meaning of a dagger, if one of these measures has one, after a space; else empty."""
        told = rules_by_severity(self.summary["flags"][self.summary["measure"].isin(measures)])
        return f" {DOUBT}: {' or '.join(told)}, says the audit." if told else ""

    def note_on(self, measure: Measure) -> str:
        """The line below a figure of one measure, which also explains bars and daggers."""
        return f"{spread_note(self.cells, measure)} {self.note}{self.doubt_note(measure.name)}"

    def rows(self, measure: str, model: str) -> pd.DataFrame:
        """The summary rows of one panel, in the order of the config."""
        found = self.summary
        return found[(found["measure"] == measure) & (found["model"] == model)]


def styles_in_order(data: FigureData) -> dict[str, Style]:
    """The styles of the experiment's strategies, in the order of the config."""
    return {name: data.styles[name] for name in data.strategies}


def figure_data_by_experiment(
    cells: pd.DataFrame,
    epochs: pd.DataFrame,
    summary: pd.DataFrame,
    study_dir: Path | None = None,
) -> dict[str, FigureData]:
    """The data of each experiment of a study; all experiments have the same styles."""
    looks = styles_of(cells)
    return {
        str(name): FigureData(
            rows,
            epochs[epochs["experiment"] == name],
            summary[summary["experiment"] == name],
            looks,
            study_dir,
        )
        for name, rows in cells.groupby("experiment", sort=False)
    }
