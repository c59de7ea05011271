"""Defines a candidate of a decision: one strategy with one number of workers, and why it may be excluded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pandas as pd

from stratbench.analysis.records.score import Score
from stratbench.strategies.base import Traits

if TYPE_CHECKING:
    from stratbench.analysis.decision.constraints import Constraints

#: Kinds of exclusion by the status of a cell.
EXCLUDED = {
    "oom": "does not fit",
    "timeout": "too slow",
    "diverged": "worse score",
    "unsupported": "unsupported",
}
#: Reason for the exclusion of a candidate whose loss was not a number.
DIVERGED = "training diverged"


def format_three_digits(value: float) -> str:
    """Return a number as text with three significant digits and commas between thousands."""
    return f"{float(f'{value:.3g}'):,.{0 if value >= 100 else 1}f}"


@dataclass(eq=False)
class Candidate:
    """A strategy on a number of workers. `kind` and `reason` say why an excluded candidate is excluded."""

    strategy: str
    gpus: int
    traits: Traits = field(default_factory=Traits)
    basis: str = "measured"
    # Training times by repeat, in s.
    times: pd.Series = field(default_factory=lambda: pd.Series(dtype=float))
    time_s: float | None = None
    #: Noun for the unit of the times: `repeat`, or `block` of a verdict.
    repetition_unit: str = "repeat"
    #: Whether the time is projected, and if so its 80 % interval and the projected results as text.
    is_projected: bool = False
    time_low_s: float | None = None
    time_high_s: float | None = None
    projected_figures: str = ""
    score: Score = field(default_factory=Score)
    # Scores by repeat, in the shown unit.
    scores: pd.Series = field(default_factory=lambda: pd.Series(dtype=float))
    #: Standard error of one repeat's score from the finite test set, in the shown unit; None if not recorded.
    score_error: float | None = None
    #: Whether the cells trained for a number of steps and skipped evaluation.
    skips_evaluation: bool = False
    memory_bytes: float | None = None
    #: The audit's rules with a finding on the memory, if no constraint limits the memory.
    memory_caveats: list[str] = field(default_factory=list)
    model_states_bytes: float | None = None
    #: The memory of the GPU; None if unknown or without a GPU.
    gpu_memory_bytes: float | None = None
    #: Tokens per second of all workers, if the data are text, and the model FLOPs utilisation as a share.
    tokens_per_s: float | None = None
    mfu: float | None = None
    test_samples: float | None = None
    is_on_cpu: bool = False
    has_servers: bool = False  # whether the candidate has parameter servers
    #: Whether the result depends on the number of workers: by BatchNorm, or by a loss that does not add up.
    score_depends_on_workers: bool = True
    global_batch: float | None = None
    hosts: frozenset[str] = frozenset()  # names of hosts; several hosts of one repeat are one text
    #: Upper bound (95 %) on how much worse the score may be, in the shown unit; None if unknown.
    score_loss_upper: float | None = None
    #: Why there is no projection to the requested number of workers; empty if there is one.
    no_projection_reason: str = ""
    #: Names of the candidates with the best score.
    best_scoring_names: str = ""
    price_per_gpu_hour: float | None = None
    #: If workers joined and left: GPU-seconds allocated to all workers, and the mean number of workers.
    #: None if all workers stay from start to end.
    allocated_gpu_s: float | None = None
    mean_num_workers: float | None = None
    #: Whether the candidate's number of repeats is the one that its records state as planned before they ran.
    has_planned_repeats: bool = False
    exclusion_kind: str = ""
    exclusion_reason: str = ""
    caveats: list[str] = field(default_factory=list)
    #: The claim of a verdict and its confidence, if the candidate leads the verdict's comparison.
    verdict_claim: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """Short name such as `ddp × 4`, which is the strategy ddp on 4 workers."""
        return f"{self.strategy} × {self.gpus}"

    @property
    def has_diverged(self) -> bool:
        """Whether the candidate is excluded because one of its trainings diverged."""
        return self.exclusion_reason.endswith(DIVERGED)

    @property
    def rate_text(self) -> str:
        """Tokens per second and MFU as text. Empty if the data set has no text.

        For instance `41,300 tokens/s (5,160 per worker, MFU 38 %)`.
        """
        if self.tokens_per_s is None:
            return ""
        each = [f"{format_three_digits(self.tokens_per_s / self.gpus)} per worker"] * (
            self.gpus > 1
        )
        each += [] if self.mfu is None else [f"MFU {100 * self.mfu:.0f} %"]
        return f"{format_three_digits(self.tokens_per_s)} tokens/s" + (
            f" ({', '.join(each)})" if each else ""
        )

    @property
    def time_range_s(self) -> tuple[float, float]:
        """Low and high end of the training time in s, from its projection or repeats."""
        if self.time_low_s is not None and self.time_high_s is not None:
            return self.time_low_s, self.time_high_s
        if len(self.times):
            return float(self.times.min()), float(self.times.max())
        return self.time_s or 0.0, self.time_s or math.inf

    @property
    def run(self) -> str:
        """Noun for one measurement of the training time: `run` or `block`."""
        return "run" if self.repetition_unit == "repeat" else self.repetition_unit

    @property
    def is_ranked_by_cost(self) -> bool:
        """Whether candidates are ranked by cost, which requires a price per GPU-hour."""
        return self.price_per_gpu_hour is not None

    @property
    def cost(self) -> float | None:
        """GPU-hours of the workers times the price, or None without a time or a price."""
        if self.time_s is None or self.price_per_gpu_hour is None:
            return None
        held_s = self.time_s * self.gpus if self.allocated_gpu_s is None else self.allocated_gpu_s
        return held_s / 3600 * self.price_per_gpu_hour

    @property
    def objective(self) -> float:
        """The value to minimise: cost if there is a price, else training time. Infinite if unknown."""
        value = self.cost if self.is_ranked_by_cost else self.time_s
        return float("inf") if value is None else value

    @property
    def trusted_memory_bytes(self) -> float | None:
        """Peak memory per worker in bytes. None if the audit has a finding on the measurement."""
        return None if self.memory_caveats else self.memory_bytes

    @property
    def mean_score(self) -> float | None:
        """Mean score over the repeats, in the shown unit."""
        return float(self.scores.mean()) if len(self.scores) else None

    def may_miss_score_tolerance(self, constraints: Constraints) -> bool:
        """Return whether the candidate's score may be worse than tolerated. False if unmeasured."""
        if self.skips_evaluation or self.score_loss_upper is None:
            return False
        return bool(self.score_loss_upper > constraints.find_score_tolerance(self.score))

    def exclude(self, kind: str, reason: str) -> None:
        """Exclude the candidate for a reason. A candidate that is already excluded keeps its reason."""
        if not self.exclusion_kind:
            self.exclusion_kind, self.exclusion_reason = kind, reason
