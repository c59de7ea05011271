"""The data from which the figures of one experiment and model are drawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.figures.marks import Mark, assign_marks_by_strategy
from stratbench.analysis.records.groups import map_base_strategies
from stratbench.analysis.records.measures import DOUBT, Measure, map_measures_by_name
from stratbench.analysis.records.score import Score, read_score
from stratbench.analysis.tables.tables import group_rules_by_severity
from stratbench.cell.text.words import choose_noun_for_workers, format_count


@dataclass(frozen=True)
class FigureData:
    """The data of all figures of one model in one experiment: rows of tables, and strategies' marks."""

    cells: pd.DataFrame
    epochs: pd.DataFrame
    summary: pd.DataFrame
    marks_by_strategy: Mapping[str, Mark]
    #: The chosen strategy and number of workers; None without a choice.
    chosen_strategy_and_gpus: tuple[str, int] | None = None
    #: The fraction by which two times may differ and still count as equal.
    equivalence_margin: float = 0.03
    #: The folder results/<study> with the cells' timelines; None to draw no timelines.
    study_dir: Path | None = None

    @property
    def experiment(self) -> str:
        return str(self.cells["experiment"].iloc[0])

    @property
    def model(self) -> str:
        return str(self.cells["model"].iloc[0])

    @property
    def score(self) -> Score:
        """The score of the experiment's task, with its name and unit."""
        return read_score(self.cells)

    @property
    def measures(self) -> dict[str, Measure]:
        """All metrics by name, with the titles and units that suit this experiment."""
        units = dict(zip(self.summary["measure"], self.summary["unit"], strict=True))
        found = map_measures_by_name(self.cells)
        return {name: m.replace_unit(units.get(name, m.unit)) for name, m in found.items()}

    @property
    def has_cpu_workers(self) -> bool:
        """Whether any worker was a CPU process."""
        return bool((self.cells["device_kind"] == "cpu").any())

    @property
    def strategies(self) -> list[str]:
        """The strategies in the order of the config."""
        return list(dict.fromkeys(self.cells["strategy"]))

    @property
    def worker_counts(self) -> list[int]:
        """The numbers of workers in the experiment, in ascending order."""
        return sorted(int(n) for n in self.cells["gpus"].unique())

    @property
    def shown_worker_count(self) -> int:
        """Number of workers in figures that show one number only: the choice's, else the largest."""
        chosen = self.chosen_strategy_and_gpus
        if chosen is not None and chosen[1] > 1 and chosen[1] in self.worker_counts:
            return chosen[1]
        return self.worker_counts[-1]

    def is_chosen_strategy(self, strategy: str) -> bool:
        """Return whether the decision chose this strategy."""
        return (
            self.chosen_strategy_and_gpus is not None
            and strategy == self.chosen_strategy_and_gpus[0]
        )

    def format_workers(self, count: int) -> str:
        """Return a number of workers with its noun: `4 GPUs`."""
        return format_count(count, choose_noun_for_workers(self.cells["device_kind"]))

    def iter_dagger_notes(self, flags: Iterable[str]) -> Iterator[str]:
        """Yield a sentence that explains the dagger (†). Nothing if no drawn value has an audit finding."""
        if severities := group_rules_by_severity(flags):
            yield f"{DOUBT}: the audit has a finding on the value ({' or '.join(severities)})."

    def select_summary_rows(self, measure: str) -> pd.DataFrame:
        """Return the rows of summary.csv for a metric, in the order of the config."""
        return self.summary[self.summary["measure"] == measure]


def assign_marks(cells: pd.DataFrame, further_strategies: Iterable[str] = ()) -> dict[str, Mark]:
    """Return the mark of each strategy in rows of cells.csv, and of further strategies."""
    bases = map_base_strategies(cells)
    names = {*cells["strategy"], *further_strategies}
    return assign_marks_by_strategy((name, bases.get(name)) for name in names)


def build_figure_data(
    cells: pd.DataFrame,
    epochs: pd.DataFrame,
    summary: pd.DataFrame,
    answers_json: Mapping[str, Any] | None = None,
    study_dir: Path | None = None,
) -> list[FigureData]:
    """Return the figure data of each experiment and model.

    A strategy has the same mark in all of them.

    Args:
        cells: Rows of cells.csv.
        epochs: Rows of epochs.csv.
        summary: Rows of summary.csv.
        answers_json: Content of answers.json, for the choices; None without choices.
        study_dir: The folder results/<study>; None to draw no timelines.
    """
    marks = assign_marks(cells)
    answers = answers_json["answers"] if answers_json else []
    choices = {
        (a["experiment"], a["model"]): (a["short"]["strategy"], a["short"]["gpus"])
        for a in answers
        if a["short"]["strategy"] is not None
    }
    keys = ["experiment", "model"]
    epochs_of = dict(iter(epochs.groupby(keys, sort=False)))
    summary_of = dict(iter(summary.groupby(keys, sort=False)))
    return [
        FigureData(
            rows,
            epochs_of.get(key, epochs.iloc[:0]),
            summary_of.get(key, summary.iloc[:0]),
            marks,
            choices.get(key),
            answers_json["equivalence_margin"] if answers_json else 0.03,
            study_dir,
        )
        for key, rows in cells.groupby(keys, sort=False)
    ]
