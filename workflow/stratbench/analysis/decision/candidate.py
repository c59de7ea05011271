"""A candidate of a decision: one strategy on one worker count, and why it is excluded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pandas as pd

from stratbench.analysis.records.score import Score
from stratbench.strategies.base import Traits

if TYPE_CHECKING:
    from stratbench.analysis.decision.constraints import Constraints

#: Kind of exclusion by the status of a cell.
EXCLUDED = {
    "oom": "does not fit",
    "timeout": "too slow",
    "diverged": "worse score",
    "unsupported": "unsupported",
}
#: Reason for the exclusion of a candidate whose loss was not a number.
DIVERGED = "training diverged"


def _three_digits(value: float) -> str:
    """Return a number with three digits and commas between thousands."""
    return f"{float(f'{value:.3g}'):,.{0 if value >= 100 else 1}f}"


@dataclass(eq=False)
class Candidate:
    """A strategy on a number of workers; `kind` and `reason` say why it is excluded, if it is."""

    strategy: str
    gpus: int
    traits: Traits = field(default_factory=Traits)
    basis: str = "measured"
    times: pd.Series = field(default_factory=lambda: pd.Series(dtype=float))  # by repeat, in s
    time_s: float | None = None
    #: Noun for the unit of its times: `repeat`, or `block`.
    unit: str = "repeat"
    #: Whether its time is projected; then the 80 % interval of its time, and its values as text.
    projected: bool = False
    time_low_s: float | None = None
    time_high_s: float | None = None
    projected_figures: str = ""
    score: Score = field(default_factory=Score)
    scores: pd.Series = field(default_factory=lambda: pd.Series(dtype=float))  # by repeat, as shown
    #: Standard error of one repeat's score, from the finite test set, as shown; None: not recorded.
    score_error: float | None = None
    #: Whether it was trained for a number of steps and not evaluated.
    unscored: bool = False
    memory_bytes: float | None = None
    #: The audit's rules on its memory, if no answer depends on it.
    memory_doubts: list[str] = field(default_factory=list)
    states_bytes: float | None = None
    #: The memory of the GPU; None: not known, or no GPU.
    card_bytes: float | None = None
    #: Tokens per second of all workers, where text is trained, and the model FLOPs utilisation as a share.
    tokens_per_s: float | None = None
    mfu: float | None = None
    test_samples: float | None = None
    on_cpu: bool = False
    served: bool = False  # by parameter servers
    #: Whether other numbers of workers train something else: BatchNorm, or a loss that does not add up.
    counts_apart: bool = True
    global_batch: float | None = None
    hosts: frozenset[str] = frozenset()  # all hosts of a repeat are one text
    #: Upper bound (95 %) on how much worse its score may be, as shown; None: not known.
    score_loss_upper: float | None = None
    #: Why nothing is projected to the requested number of workers, if nothing is.
    not_projected: str = ""
    #: Whose score is the best.
    best_score: str = ""
    price_per_gpu_hour: float | None = None
    #: Where workers came and went: for how long they all together held GPUs, in s, and how many were there on
    #: average; None: all from start to end.
    held_s: float | None = None
    present: float | None = None
    #: Whether it has the repeats that its records say were planned before they ran.
    repeats_fixed: bool = False
    kind: str = ""
    reason: str = ""
    doubts: list[str] = field(default_factory=list)
    #: The claim of a verdict on its comparison, with the confidence, if it leads the comparison.
    claim: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """Short name: `ddp × 4` is ddp on 4 workers."""
        return f"{self.strategy} × {self.gpus}"

    @property
    def diverged(self) -> bool:
        """Whether it is excluded because a training of it diverged."""
        return self.reason.endswith(DIVERGED)

    @property
    def rate_text(self) -> str:
        """The rate on text and MFU: `41,300 tokens/s (5,160 per worker, MFU 38 %)`.

        Else empty.
        """
        if self.tokens_per_s is None:
            return ""
        each = [f"{_three_digits(self.tokens_per_s / self.gpus)} per worker"] * (self.gpus > 1)
        each += [] if self.mfu is None else [f"MFU {100 * self.mfu:.0f} %"]
        return f"{_three_digits(self.tokens_per_s)} tokens/s" + (
            f" ({', '.join(each)})" if each else ""
        )

    @property
    def reach(self) -> tuple[float, float]:
        """The least and the most time: of a projection its interval, else of its repeats."""
        if self.time_low_s is not None and self.time_high_s is not None:
            return self.time_low_s, self.time_high_s
        if len(self.times):
            return float(self.times.min()), float(self.times.max())
        return self.time_s or 0.0, self.time_s or math.inf

    @property
    def run(self) -> str:
        """Noun for one of its times: `run` or `block`."""
        return "run" if self.unit == "repeat" else self.unit

    @property
    def by_cost(self) -> bool:
        """Whether it is ranked by cost, because there is a price."""
        return self.price_per_gpu_hour is not None

    @property
    def cost(self) -> float | None:
        """GPU-hours times price, without servers, or None without a time or a price."""
        if self.time_s is None or self.price_per_gpu_hour is None:
            return None
        held_s = self.time_s * self.gpus if self.held_s is None else self.held_s
        return held_s / 3600 * self.price_per_gpu_hour

    @property
    def objective(self) -> float:
        """The value to rank by: cost if there is a price, else training time.

        Infinite if not known.
        """
        value = self.cost if self.by_cost else self.time_s
        return float("inf") if value is None else value

    @property
    def sound_memory_bytes(self) -> float | None:
        """Its memory for ranking, unless the audit has a finding on it."""
        return None if self.memory_doubts else self.memory_bytes

    @property
    def mean_score(self) -> float | None:
        """The mean of the score over the repeats, as shown."""
        return float(self.scores.mean()) if len(self.scores) else None

    def is_score_open(self, constraints: Constraints) -> bool:
        """Return whether its score may be worse than allowed.

        One that was not measured is not.
        """
        if self.unscored or self.score_loss_upper is None:
            return False
        return bool(self.score_loss_upper > constraints.tolerance_of(self.score))

    def exclude(self, kind: str, reason: str) -> None:
        """Exclude the candidate, unless it is excluded already."""
        if not self.kind:
            self.kind, self.reason = kind, reason
