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

#: Why a candidate is excluded, by the status of one of its cells.
EXCLUDED = {
    "oom": "does not fit",
    "timeout": "too slow",
    "diverged": "worse score",
    "unsupported": "unsupported",
}
#: Reason to exclude a candidate: the loss of one of its trainings was not a number.
DIVERGED = "training diverged"


def format_three_digits(value: float) -> str:
    """Return a number as text with three significant digits and commas between thousands."""
    return f"{float(f'{value:.3g}'):,.{0 if value >= 100 else 1}f}"


@dataclass(eq=False)
class Candidate:
    """A candidate of a decision: a strategy on a number of workers, with its results."""

    strategy: str
    gpus: int
    traits: Traits = field(default_factory=Traits)
    time_source_text: str = "measured"
    #: Training time of each repeat in s.
    times: pd.Series = field(default_factory=lambda: pd.Series(dtype=float))
    time_s: float | None = None
    #: What one training time covers: `repeat`, or `block` (timed steps of a verdict).
    repetition_noun: str = "repeat"
    #: Whether the training time is projected from other numbers of workers instead of measured.
    has_projected_time: bool = False
    #: Ends of the projected time's 80 % interval in s; None if the time is measured.
    projected_time_low_s: float | None = None
    projected_time_high_s: float | None = None
    #: Sentences with the projected results; empty if the time is measured.
    projection_text: str = ""
    score: Score = field(default_factory=Score)
    #: Score of each repeat, in the unit in which scores are shown.
    scores: pd.Series = field(default_factory=lambda: pd.Series(dtype=float))
    #: Standard error of a repeat's score that is due to the finite test set; None if not recorded.
    score_standard_error: float | None = None
    #: Whether the cells trained for a number of steps and skipped evaluation.
    skips_evaluation: bool = False
    peak_memory_bytes: float | None = None
    #: Names of audit rules whose findings make the peak memory doubtful. They are only collected if no
    #: constraint limits the memory.
    rules_doubting_peak_memory: list[str] = field(default_factory=list)
    model_states_bytes: float | None = None
    #: Memory of the smallest GPU in bytes; None if unknown or without a GPU.
    gpu_memory_bytes: float | None = None
    #: Tokens per second of all workers together; None if the data are not text.
    tokens_per_s: float | None = None
    #: Model FLOPs utilisation as a fraction of 1; None if unknown.
    mfu: float | None = None
    #: Number of samples in the test set, a float as all columns of numbers; None if unknown.
    test_samples: float | None = None
    has_cpu_workers: bool = False
    has_servers: bool = False  # whether the candidate has parameter servers
    #: Whether the score depends on the number of workers. It does if the model has BatchNorm, or if a batch's
    #: loss is not the mean of its parts' losses.
    score_depends_on_worker_count: bool = True
    global_batch: float | None = None
    hosts: frozenset[str] = frozenset()  # one text per set of hosts that trained a repeat together
    #: Upper bound (95 %) on how much worse than the best the score is, in the shown unit; None if unknown.
    max_score_loss: float | None = None
    #: Why the time could not be projected to the requested number of workers; empty otherwise.
    no_projection_reason: str = ""
    #: Names of the candidates with the best score, joined to one text.
    best_scoring_candidates_text: str = ""
    price_per_gpu_hour: float | None = None
    #: GPU-seconds that all workers' jobs held, if workers joined and left; None if all workers stayed.
    allocated_gpu_s: float | None = None
    #: Mean number of workers present, if workers joined and left; None if all workers stayed.
    mean_num_workers: float | None = None
    #: Whether all records of the candidate plan as many repeats as there are.
    has_planned_repeats: bool = False
    exclusion_kind: str = ""
    exclusion_reason: str = ""
    caveats: list[str] = field(default_factory=list)
    #: The verdict's claim (a sentence) and its confidence (`high`, `medium` or `low`). None without a verdict
    #: (a sequential test), or if the candidate does not lead its ranking.
    verdict_claim_and_confidence: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """Short name such as `ddp × 4`, which is the strategy ddp on 4 workers."""
        return f"{self.strategy} × {self.gpus}"

    @property
    def has_diverged_training(self) -> bool:
        """Whether the candidate is excluded because one of its trainings diverged."""
        return self.exclusion_reason.endswith(DIVERGED)

    @property
    def token_rate_text(self) -> str:
        """Tokens per second and model FLOPs utilisation (MFU) as text. Empty if the data are not text.

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
    def training_time_range_s(self) -> tuple[float, float]:
        """Lowest and highest training time in s: of the repeats, or of the projection's interval."""
        if self.projected_time_low_s is not None and self.projected_time_high_s is not None:
            return self.projected_time_low_s, self.projected_time_high_s
        if len(self.times):
            return float(self.times.min()), float(self.times.max())
        return self.time_s or 0.0, self.time_s or math.inf

    @property
    def measurement_noun(self) -> str:
        """Noun for one measured training time: `run`, or `block` (timed steps of a verdict)."""
        return "run" if self.repetition_noun == "repeat" else self.repetition_noun

    @property
    def is_ranked_by_cost(self) -> bool:
        """Whether candidates are ranked by cost instead of training time, since a price is set."""
        return self.price_per_gpu_hour is not None

    @property
    def training_cost(self) -> float | None:
        """Cost of the training: GPU-hours of the workers times the price. None without time or price."""
        if self.time_s is None or self.price_per_gpu_hour is None:
            return None
        held_s = self.time_s * self.gpus if self.allocated_gpu_s is None else self.allocated_gpu_s
        return held_s / 3600 * self.price_per_gpu_hour

    @property
    def cost_or_time(self) -> float:
        """Cost of the training if a price is set, else training time in s. Infinite if unknown."""
        value = self.training_cost if self.is_ranked_by_cost else self.time_s
        return float("inf") if value is None else value

    @property
    def peak_memory_bytes_unless_doubted(self) -> float | None:
        """Peak memory per worker in bytes. None if the audit has a finding on this memory."""
        return None if self.rules_doubting_peak_memory else self.peak_memory_bytes

    @property
    def mean_score(self) -> float | None:
        """Mean score over the repeats, in the unit in which scores are shown."""
        return float(self.scores.mean()) if len(self.scores) else None

    def may_have_intolerable_score(self, constraints: Constraints) -> bool:
        """Return whether the score may be worse than the tolerance allows. False if it is unknown."""
        if self.skips_evaluation or self.max_score_loss is None:
            return False
        return bool(self.max_score_loss > constraints.find_score_tolerance(self.score))

    def exclude_from_decision(self, kind: str, reason: str) -> None:
        """Exclude the candidate from the decision, unless it is already excluded for another reason."""
        if not self.exclusion_kind:
            self.exclusion_kind, self.exclusion_reason = kind, reason
