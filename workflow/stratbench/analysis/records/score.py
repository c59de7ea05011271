"""Defines the score of an experiment's task: name and unit for texts, axes and decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Score:
    """The score of a task. A fraction is shown in percent, other values in the record's unit."""

    name: str = "accuracy"
    #: The unit of scores in the record; `share` is a fraction of 1.
    unit: str = "share"
    better: str = "higher"
    #: By how much a score may be worse than the best, by default, in the shown unit.
    tolerance: float = 1.0
    #: What throughput counts: `samples` or `tokens`.
    throughput_unit: str = "samples"
    #: How many of the units that throughput counts one sample has.
    counts_per_sample: float = 1.0
    #: The lowest possible mean loss in nats per token; None if unknown.
    min_loss: float | None = None

    @property
    def is_unit_fraction(self) -> bool:
        return self.unit == "share"

    @property
    def shown_unit(self) -> str:
        return "%" if self.is_unit_fraction else self.unit

    @property
    def display_factor(self) -> float:
        """The factor from a score in the record to the shown score."""
        return 100.0 if self.is_unit_fraction else 1.0

    @property
    def higher_is_better_sign(self) -> float:
        """1 if a higher score is better, else -1."""
        return 1.0 if self.better == "higher" else -1.0

    @property
    def shown_decimals(self) -> int:
        return 2 if self.is_unit_fraction else 3

    @property
    def word_for_worse(self) -> str:
        """The word for a score that is worse than another: `less` or `more`."""
        return "less" if self.better == "higher" else "more"

    @property
    def best_possible_score(self) -> float | None:
        """The lowest possible loss, if the score is a loss and this is known. Else None."""
        return self.min_loss if self.unit == "nats/token" else None

    def format_score(self, shown_score: float) -> str:
        """Return a score, given in the shown unit, as text with the unit: `91.20 %`."""
        return f"{shown_score:.{self.shown_decimals}f} {self.shown_unit}".rstrip()

    def format_difference(self, shown_difference: float, decimals: int | None = None) -> str:
        """Return a difference of two scores, given in the shown unit, as text: `1.20 points`."""
        digits = self.shown_decimals if decimals is None else decimals
        unit = "points" if self.is_unit_fraction else self.unit
        return f"{shown_difference:.{digits}f} {unit}".rstrip()


#: For each field of Score: the column of cells.csv that has its value.
_SAID = {
    "name": "score_name",
    "unit": "score_unit",
    "better": "score_better",
    "tolerance": "score_tolerance",
    "throughput_unit": "throughput_unit",
    "counts_per_sample": "counts_per_sample",
    "min_loss": "least_loss",
}


def read_score(rows: pd.DataFrame) -> Score:
    """Return the score of an experiment's task, as its rows of cells.csv describe it. Default: accuracy."""
    recorded = {name: rows[column].dropna() for name, column in _SAID.items() if column in rows}
    return Score(**{name: values.iloc[0] for name, values in recorded.items() if len(values)})
