"""Defines the score of an experiment's task: name and unit for texts, axes and decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Score:
    """The score of a task; shown values are in percent for a fraction, else in the record's unit."""

    name: str = "accuracy"
    #: The unit in the record.
    unit: str = "share"
    better: str = "higher"
    #: Tolerated difference of two scores, in the shown unit.
    tolerance: float = 1.0
    #: What throughput counts (samples or tokens), and their number per sample.
    throughput_unit: str = "samples"
    counts_per_sample: float = 1.0
    #: The lowest possible mean loss in nats per token; None if unknown.
    min_loss: float | None = None

    @property
    def is_fraction(self) -> bool:
        return self.unit == "share"

    @property
    def shown_unit(self) -> str:
        return "%" if self.is_fraction else self.unit

    @property
    def display_factor(self) -> float:
        """The factor from a record's value to the shown value."""
        return 100.0 if self.is_fraction else 1.0

    @property
    def sign(self) -> float:
        """The factor (1 or -1) after which the better of two values is larger."""
        return 1.0 if self.better == "higher" else -1.0

    @property
    def decimals(self) -> int:
        return 2 if self.is_fraction else 3

    @property
    def worse_word(self) -> str:
        """The word for a worse value: `less` or `more`."""
        return "less" if self.better == "higher" else "more"

    @property
    def best_possible_score(self) -> float | None:
        """The best possible score, if the score is a loss with a known minimum. Else None."""
        return self.min_loss if self.unit == "nats/token" else None

    def format_score(self, shown: float) -> str:
        """Return a score in the shown unit as text, with the unit."""
        return f"{shown:.{self.decimals}f} {self.shown_unit}".rstrip()

    def format_difference(self, shown: float, decimals: int | None = None) -> str:
        """Return a difference of two scores in the shown unit as text: `1.20 points`."""
        digits = self.decimals if decimals is None else decimals
        return f"{shown:.{digits}f} {'points' if self.is_fraction else self.unit}".rstrip()


#: The columns of cells.csv behind the fields of Score.
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
    """Return the score that one experiment's rows of cells.csv describe, accuracy by default."""
    recorded = {name: rows[column].dropna() for name, column in _SAID.items() if column in rows}
    return Score(**{name: values.iloc[0] for name, values in recorded.items() if len(values)})
