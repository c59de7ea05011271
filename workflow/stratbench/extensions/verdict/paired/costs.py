"""Costs of a verdict: spent so far, of the next round, and of the full matrix."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from stratbench.extensions.verdict.block_rules import MATRIX_REPEATS
from stratbench.extensions.verdict.blocks import ComparisonKey

if TYPE_CHECKING:
    from stratbench.extensions.verdict.paired.rounds import Course
    from stratbench.extensions.verdict.paired.state import State


class Costs:
    """GPU-seconds of a sequential analysis, measured on its blocks and full runs."""

    def __init__(self, analysis: Course) -> None:
        self._course, self._evidence = analysis, analysis.evidence
        self._runs_s: dict[ComparisonKey, float] = {}
        for cell in analysis.asked:
            if run := self._evidence.full_runs.get(cell):
                key = ComparisonKey.of(cell)
                self._runs_s[key] = self._runs_s.get(key, 0.0) + run.gpu_seconds

    @property
    def spent_s(self) -> float:
        """GPU-seconds of all blocks, and of the full runs that the verdict asked for."""
        return sum(self.blocks_s(s) + self.runs_s(s) for s in self._course.states)

    def blocks_s(self, state: State) -> float:
        """Return GPU-seconds of a comparison's blocks."""
        return sum(block.gpu_seconds for block in self._evidence.blocks_of(state.comparison.place))

    def runs_s(self, state: State) -> float:
        """Return GPU-seconds of the full runs that the verdict asked for in a comparison."""
        return self._runs_s.get(state.comparison.place, 0.0)

    @property
    def expected_s(self) -> float | None:
        """GPU-seconds of the next round.

        None if a part of it cannot be estimated yet.
        """
        expected = 0.0
        for state, _ in self._course.missing_blocks:
            if not (blocks := self._evidence.blocks_of(state.comparison.place)):
                return None
            last = blocks[-1]
            before = {s.strategy for s in last.segments}
            still = len(before & set(state.active))
            expected += last.gpu_seconds * (still + 0.5) / (len(before) + 0.5)
        states = {state.comparison.place: state for state in self._course.states}
        for cell in self._course.missing_runs:
            full = self.full_s(states[ComparisonKey.of(cell)], cell.strategy)
            if full is None:
                return None
            expected += full
        return expected

    def step_s(self, state: State, strategy: str) -> float | None:
        """Return seconds per step of a strategy over its blocks (geometric mean)."""
        logs = [block.value(strategy) for block in self._evidence.blocks_of(state.comparison.place)]
        known = [log for log in logs if math.isfinite(log)]
        return math.exp(statistics.fmean(known)) if known else None

    def full_s(self, state: State, strategy: str) -> float | None:
        """Return GPU-seconds of a full cell, from its runs or its block steps.

        The estimate leaves out evaluations. None if the step time or the number of steps is not known.
        """
        if runs := self._evidence.runs_of(state.comparison, strategy):
            return statistics.fmean(run.gpu_seconds for run in runs)
        step_s, steps = self.step_s(state, strategy), state.comparison.full_steps
        if step_s is None or steps is None:
            return None
        starts = [
            s.start_s
            for block in self._evidence.blocks_of(state.comparison.place)
            for s in block.segments
            if s.strategy == strategy and s.status == "ok"
        ]
        return state.comparison.place.gpus * (statistics.median(starts) + steps * step_s)

    def matrix_s(self, state: State) -> float | None:
        """Return GPU-seconds of the comparison in the full matrix of MATRIX_REPEATS repeats.

        Failed cells cost nothing. None if the time of cells is unknown.
        """
        costs = [self.full_s(state, strategy) for strategy in state.comparison.strategies]
        known = [f for f in costs if f is not None]
        return MATRIX_REPEATS * sum(known) if known else None
