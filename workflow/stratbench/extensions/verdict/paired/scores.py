"""Decides which strategies have good enough scores in full runs to lead a verdict."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np

from stratbench.cell.coordinates import Cell
from stratbench.extensions.verdict.block_rules import MATRIX_REPEATS
from stratbench.extensions.verdict.paired.evidence import (
    FullRun,
    PairedComparison,
    PairedEvidence,
    SdEstimate,
)
from stratbench.statistics.moderated import ALPHA


@dataclass(frozen=True)
class ScoreLoss:
    """Loss of a strategy's score relative to the reference, in the unit of the report."""

    score_loss: float
    #: Upper 95 % bound of the loss; infinite if no strategy of the model was trained with two seeds.
    max_score_loss: float
    score_tolerance: float
    score_name: str
    num_seeds: int

    @property
    def is_within_tolerance(self) -> bool:
        """Whether the loss is within the tolerance with 95 % confidence."""
        return self.max_score_loss <= self.score_tolerance


class FullRunScores:
    """Scores of the strategies, from the full runs that the verdict has requested."""

    def __init__(self, evidence: PairedEvidence, requested: Container[Cell]) -> None:
        """Read the scores of requested full runs only.

        Args:
            evidence: Evidence of the verdict.
            requested: Cells whose full runs were requested. Callers may add cells later.
        """
        self._evidence, self._asked = evidence, requested
        #: Strategies whose arithmetic equals DDP's, in groups with the same score.
        self._equal: dict[object, list[tuple[PairedComparison, str]]] = {}
        #: All strategies, by experiment and model.
        self._of_model: dict[object, list[tuple[PairedComparison, str]]] = {}
        for comparison in evidence.comparisons:
            for strategy, equal in zip(comparison.strategies, comparison.equals_ddp, strict=True):
                if equal:
                    self._equal.setdefault(comparison.shared_score_key, []).append(
                        (comparison, strategy)
                    )
                self._of_model.setdefault(_get_experiment_and_model(comparison), []).append(
                    (comparison, strategy)
                )

    def list_requested_full_runs(
        self, comparison: PairedComparison, strategy: str
    ) -> list[FullRun]:
        """Return the requested full runs of a strategy, one per seed."""
        cells = (
            self._evidence.make_full_run_cell(comparison, strategy, repeat)
            for repeat in range(MATRIX_REPEATS)
        )
        runs = self._evidence.full_runs
        return [runs[cell] for cell in cells if cell in self._asked and cell in runs]

    def list_reference_runs(self, comparison: PairedComparison) -> list[FullRun]:
        """Return the full runs whose mean score is the reference of a comparison.

        They are the runs of strategies whose arithmetic equals DDP's. Without scores of such runs, they are
        those of the strategy with the best score.
        """
        shared = [
            run
            for other, strategy in self._equal.get(comparison.shared_score_key, ())
            for run in self.list_requested_full_runs(other, strategy)
        ]
        if any(run.score is not None for run in shared):
            return shared
        by_strategy = [
            [r for r in self.list_requested_full_runs(comparison, a) if r.score is not None]
            for a in comparison.strategies
        ]
        return max(
            filter(None, by_strategy),
            key=lambda runs: runs[0].score_sign * _average_score(runs),
            default=[],
        )

    def estimate_score_loss(self, comparison: PairedComparison, strategy: str) -> ScoreLoss | None:
        """Estimate by how much a strategy's score is worse than the reference.

        Return None if either score is unknown.
        """
        own = [
            run
            for run in self.list_requested_full_runs(comparison, strategy)
            if run.score is not None
        ]
        reference = [run for run in self.list_reference_runs(comparison) if run.score is not None]
        if not own or not reference:
            return None
        first = own[0]
        lost = first.score_sign * (_average_score(reference) - _average_score(own))
        sd, dof = self._estimate_score_sd_between_seeds(comparison)
        width = math.inf
        if dof:
            # This import takes 0.2 s, and the first rounds do not need it.
            from scipy.special import stdtrit

            quantile = -float(stdtrit(dof, ALPHA))
            width = quantile * sd * math.sqrt(1 / len(own) + 1 / len(reference))
        tolerance = self._evidence.score_tolerances.get(first.score_name, first.score_tolerance)
        return ScoreLoss(lost, lost + width, tolerance, first.score_name, len(own))

    def _estimate_score_sd_between_seeds(self, comparison: PairedComparison) -> SdEstimate:
        """Return the standard deviation of the score between seeds, and its degrees of freedom.

        The deviation is pooled over all strategies of the experiment and model.
        """
        squares, dof = 0.0, 0
        for other, strategy in self._of_model[_get_experiment_and_model(comparison)]:
            scores = [
                r.score
                for r in self.list_requested_full_runs(other, strategy)
                if r.score is not None
            ]
            squares += float(np.var(scores) * len(scores)) if scores else 0.0
            dof += max(0, len(scores) - 1)
        return SdEstimate(math.sqrt(squares / dof), dof) if dof else SdEstimate(math.nan, 0)

    def find_exclusion_reason(self, comparison: PairedComparison, strategy: str) -> str | None:
        """Return the reason why a strategy's full runs exclude it, or None."""
        for run in self.list_requested_full_runs(comparison, strategy):
            if run.status != "ok":
                return f"its full run failed: {run.failure_reason or run.status}"
        if comparison.equals_ddp[comparison.strategies.index(strategy)]:
            return None  # the score of a strategy that equals DDP is itself the reference
        loss = self.estimate_score_loss(comparison, strategy)
        if loss is None or loss.score_loss <= loss.score_tolerance:
            return None
        unit = " points" if loss.score_name == "accuracy" else ""
        return (
            f"its {loss.score_name} is {loss.score_loss:.2g}{unit} worse than the "
            f"reference ({loss.score_tolerance:g} allowed)"
        )


def _get_experiment_and_model(comparison: PairedComparison) -> tuple[str, str]:
    return comparison.comparison_key.experiment, comparison.comparison_key.model


def _average_score(runs: Iterable[FullRun]) -> float:
    return float(np.mean([run.score for run in runs]))
