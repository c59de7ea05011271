"""Scores of full runs: which strategies may lead, and how certain the leader's score is."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np

from stratbench.cell.coordinates import Cell
from stratbench.extensions.verdict.block_rules import MATRIX_REPEATS
from stratbench.extensions.verdict.paired.evidence import FullRun, PairedComparison, PairedEvidence
from stratbench.statistics.moderated import ALPHA


@dataclass(frozen=True)
class Loss:
    """Difference of a strategy's score to the reference, as shown (points of accuracy)."""

    lost: float
    #: Upper bound with 95 %; infinite if no strategy of the model has scores of two seeds.
    at_most: float
    tolerance: float
    score_name: str
    seeds: int

    @property
    def settled(self) -> bool:
        """Whether the loss is no more than tolerated, with 95 %."""
        return self.at_most <= self.tolerance


class FullRunScores:
    """Scores of the strategies, from the full runs that the verdict has requested."""

    def __init__(self, evidence: PairedEvidence, requested: Container[Cell]) -> None:
        """`requested`: the cells that count, and it may grow; other records are not looked at."""
        self._evidence, self._asked = evidence, requested
        #: The strategies of equal arithmetic, and all strategies of a model: what a strategy may be compared
        #: with.
        self._equal: dict[object, list[tuple[PairedComparison, str]]] = {}
        self._of_model: dict[object, list[tuple[PairedComparison, str]]] = {}
        for comparison in evidence.comparisons:
            for strategy, equal in zip(comparison.strategies, comparison.equal, strict=True):
                if equal:
                    self._equal.setdefault(comparison.arithmetic, []).append((comparison, strategy))
                self._of_model.setdefault(_model(comparison), []).append((comparison, strategy))

    def runs_of(self, comparison: PairedComparison, strategy: str) -> list[FullRun]:
        """Return the full runs of a strategy, by seed."""
        cells = (
            self._evidence.cell(comparison, strategy, repeat) for repeat in range(MATRIX_REPEATS)
        )
        runs = self._evidence.full_runs
        return [runs[cell] for cell in cells if cell in self._asked and cell in runs]

    def reference(self, comparison: PairedComparison) -> list[FullRun]:
        """Return the reference runs for losses: those of equal arithmetic, else of the best strategy."""
        shared = [
            run
            for other, strategy in self._equal.get(comparison.arithmetic, ())
            for run in self.runs_of(other, strategy)
        ]
        if any(run.score is not None for run in shared):
            return shared
        by_strategy = [
            [r for r in self.runs_of(comparison, a) if r.score is not None]
            for a in comparison.strategies
        ]
        return max(
            filter(None, by_strategy), key=lambda runs: runs[0].sign * _mean(runs), default=[]
        )

    def loss_of(self, comparison: PairedComparison, strategy: str) -> Loss | None:
        """Return the loss of a strategy.

        Return None if its score or the reference's is not known.
        """
        own = [run for run in self.runs_of(comparison, strategy) if run.score is not None]
        reference = [run for run in self.reference(comparison) if run.score is not None]
        if not own or not reference:
            return None
        first = own[0]
        lost = first.sign * (_mean(reference) - _mean(own))
        sd, dof = self._seed_scatter(comparison)
        width = math.inf
        if dof:
            from scipy.special import stdtrit  # takes 0.2 s, and the first rounds need none

            quantile = -float(stdtrit(dof, ALPHA))
            width = quantile * sd * math.sqrt(1 / len(own) + 1 / len(reference))
        tolerance = self._evidence.tolerances.get(first.score_name, first.tolerance)
        return Loss(lost, lost + width, tolerance, first.score_name, len(own))

    def _seed_scatter(self, comparison: PairedComparison) -> tuple[float, int]:
        """Return the standard deviation of the score between seeds, over all strategies, and its degrees."""
        squares, dof = 0.0, 0
        for other, strategy in self._of_model[_model(comparison)]:
            scores = [r.score for r in self.runs_of(other, strategy) if r.score is not None]
            squares += float(np.var(scores) * len(scores)) if scores else 0.0
            dof += max(0, len(scores) - 1)
        return (math.sqrt(squares / dof), dof) if dof else (math.nan, 0)

    def why_failed(self, comparison: PairedComparison, strategy: str) -> str | None:
        """Return why a strategy is out by its score or its full run's end.

        Return None otherwise.
        """
        for run in self.runs_of(comparison, strategy):
            if run.status != "ok":
                return f"its full run: {run.reason or run.status}"
        if comparison.equal[comparison.strategies.index(strategy)]:
            return None  # its score is the reference
        loss = self.loss_of(comparison, strategy)
        if loss is None or loss.lost <= loss.tolerance:
            return None
        unit = " points" if loss.score_name == "accuracy" else ""
        return (
            f"its {loss.score_name} is {loss.lost:.2g}{unit} worse than the "
            f"reference ({loss.tolerance:g} allowed)"
        )


def _model(comparison: PairedComparison) -> tuple[str, str]:
    return comparison.place.experiment, comparison.place.model


def _mean(runs: Iterable[FullRun]) -> float:
    return float(np.mean([run.score for run in runs]))
