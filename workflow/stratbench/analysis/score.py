"""The score of an experiment's task as its records name it: all that texts, axes and decisions call it by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Score:
    """A task's score; values are as shown: a share in percent, anything else in the record's unit."""

    name: str = "accuracy"
    #: The record's unit.
    unit: str = "share"
    better: str = "higher"
    #: By how much it may be worse, as shown.
    tolerance: float = 1.0
    #: What throughput counts, and how many of them a sample is.
    counts: str = "samples"
    counts_per_sample: float = 1.0
    #: The least possible mean loss, in nats a token; None: not known.
    least_loss: float | None = None

    @property
    def is_share(self) -> bool:
        return self.unit == "share"

    @property
    def shown_unit(self) -> str:
        return "%" if self.is_share else self.unit

    @property
    def factor(self) -> float:
        """From a record's value to what is shown."""
        return 100.0 if self.is_share else 1.0

    @property
    def sign(self) -> float:
        """What makes of two values the better one the larger."""
        return 1.0 if self.better == "higher" else -1.0

    @property
    def decimals(self) -> int:
        return 2 if self.is_share else 3

    @property
    def worse_word(self) -> str:
        """How a worse value differs from a better one."""
        return "less" if self.better == "higher" else "more"

    @property
    def least_possible(self) -> float | None:
        """The best value that the score can have, where it is a loss whose least is known."""
        return self.least_loss if self.unit == "nats/token" else None

    def text(self, shown: float) -> str:
        """A value with its unit."""
        return f"{shown:.{self.decimals}f} {self.shown_unit}".rstrip()

    def difference(self, shown: float, decimals: int | None = None) -> str:
        """A difference of two values with its unit: `1.20 points`."""
        digits = self.decimals if decimals is None else decimals
        return f"{shown:.{digits}f} {'points' if self.is_share else self.unit}".rstrip()


#: The columns of cells.csv that say it, by what it is called here.
_SAID = {
    "name": "score_name",
    "unit": "score_unit",
    "better": "score_better",
    "tolerance": "score_tolerance",
    "counts": "counts",
    "counts_per_sample": "counts_per_sample",
    "least_loss": "least_loss",
}


def score_of(rows: pd.DataFrame) -> Score:
    """What rows of cells.csv of one experiment say of their score; accuracy where none says anything."""
    found = {name: rows[column].dropna() for name, column in _SAID.items() if column in rows}
    return Score(**{name: values.iloc[0] for name, values in found.items() if len(values)})
