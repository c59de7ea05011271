"""Scores of full runs: which arms may lead, and how certain it is that the leader's score is good enough."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np

from stratbench.analysis.race.evidence import Bout, FullRun, RaceEvidence
from stratbench.cell.block_rules import MATRIX_REPEATS
from stratbench.cell.coordinates import Cell
from stratbench.statistics.moderated import ALPHA


@dataclass(frozen=True)
class Loss:
    """How much worse an arm's score is than the reference, as shown (points of accuracy)."""

    lost: float
    #: Upper bound with 95 %; infinite if no arm of the model has scores of two seeds.
    at_most: float
    tolerance: float
    score_name: str
    seeds: int

    @property
    def settled(self) -> bool:
        """Whether the loss is no more than tolerated, with 95 %."""
        return self.at_most <= self.tolerance


class Scores:
    """Scores of the arms, from the full runs that the race has asked for."""

    def __init__(self, evidence: RaceEvidence, asked: Container[Cell]) -> None:
        """`asked`: the cells that count, and it may grow; other records are not looked at."""
        self._evidence, self._asked = evidence, asked
        #: The arms of equal arithmetic, and all arms of a model: what an arm may be compared with.
        self._equal: dict[object, list[tuple[Bout, str]]] = {}
        self._of_model: dict[object, list[tuple[Bout, str]]] = {}
        for bout in evidence.bouts:
            for arm, equal in zip(bout.arms, bout.equal, strict=True):
                if equal:
                    self._equal.setdefault(bout.arithmetic, []).append((bout, arm))
                self._of_model.setdefault(_model(bout), []).append((bout, arm))

    def runs_of(self, bout: Bout, arm: str) -> list[FullRun]:
        """The full runs of an arm, by seed."""
        cells = (self._evidence.cell(bout, arm, repeat) for repeat in range(MATRIX_REPEATS))
        runs = self._evidence.full_runs
        return [runs[cell] for cell in cells if cell in self._asked and cell in runs]

    def reference(self, bout: Bout) -> list[FullRun]:
        """The runs from which losses are measured: those of equal arithmetic, else of the best arm."""
        shared = [
            run
            for other, arm in self._equal.get(bout.arithmetic, ())
            for run in self.runs_of(other, arm)
        ]
        if any(run.score is not None for run in shared):
            return shared
        by_arm = [[r for r in self.runs_of(bout, a) if r.score is not None] for a in bout.arms]
        return max(filter(None, by_arm), key=lambda runs: runs[0].sign * _mean(runs), default=[])

    def loss_of(self, bout: Bout, arm: str) -> Loss | None:
        """The loss of an arm; None if its score or the reference's is not known."""
        own = [run for run in self.runs_of(bout, arm) if run.score is not None]
        reference = [run for run in self.reference(bout) if run.score is not None]
        if not own or not reference:
            return None
        first = own[0]
        lost = first.sign * (_mean(reference) - _mean(own))
        sd, dof = self._seed_scatter(bout)
        width = math.inf
        if dof:
            from scipy.special import stdtrit  # takes 0.2 s, and the first rounds need none

            quantile = -float(stdtrit(dof, ALPHA))
            width = quantile * sd * math.sqrt(1 / len(own) + 1 / len(reference))
        tolerance = self._evidence.tolerances.get(first.score_name, first.tolerance)
        return Loss(lost, lost + width, tolerance, first.score_name, len(own))

    def _seed_scatter(self, bout: Bout) -> tuple[float, int]:
        """Standard deviation of the score between seeds, over all arms of the model, and its degrees."""
        squares, dof = 0.0, 0
        for other, arm in self._of_model[_model(bout)]:
            found = [r.score for r in self.runs_of(other, arm) if r.score is not None]
            squares += float(np.var(found) * len(found)) if found else 0.0
            dof += max(0, len(found) - 1)
        return (math.sqrt(squares / dof), dof) if dof else (math.nan, 0)

    def why_failed(self, bout: Bout, arm: str) -> str | None:
        """The reason why an arm is out by its score, or by how a full run ended; None if there is none."""
        for run in self.runs_of(bout, arm):
            if run.status != "ok":
                return f"its full run: {run.reason or run.status}"
        if bout.equal[bout.arms.index(arm)]:
            return None  # its score is the reference
        loss = self.loss_of(bout, arm)
        if loss is None or loss.lost <= loss.tolerance:
            return None
        unit = " points" if loss.score_name == "accuracy" else ""
        return (
            f"its {loss.score_name} is {loss.lost:.2g}{unit} worse than the "
            f"reference ({loss.tolerance:g} allowed)"
        )


def _model(bout: Bout) -> tuple[str, str]:
    return bout.place.experiment, bout.place.model


def _mean(runs: Iterable[FullRun]) -> float:
    return float(np.mean([run.score for run in runs]))
