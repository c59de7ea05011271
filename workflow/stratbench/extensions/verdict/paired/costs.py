"""Computes costs of a verdict: spent so far, the next round's, and the full matrix's."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from stratbench.extensions.verdict.block_rules import MATRIX_REPEATS
from stratbench.extensions.verdict.blocks import ComparisonKey

if TYPE_CHECKING:
    from stratbench.extensions.verdict.paired.rounds import RoundReplay
    from stratbench.extensions.verdict.paired.state import ComparisonState


class VerdictGpuSeconds:
    """GPU-seconds of a verdict: measured ones of past blocks and full runs, estimates of future ones."""

    def __init__(self, replay: RoundReplay) -> None:
        self._course, self._evidence = replay, replay.evidence
        self._runs_s: dict[ComparisonKey, float] = {}
        for cell in replay.requested_runs:
            if run := self._evidence.full_runs.get(cell):
                key = ComparisonKey.from_cell(cell)
                self._runs_s[key] = self._runs_s.get(key, 0.0) + run.gpu_seconds

    @property
    def spent_gpu_seconds(self) -> float:
        """GPU-seconds of all blocks, and of the full runs that the verdict requested."""
        return sum(
            self.sum_block_gpu_seconds(s) + self.sum_full_run_gpu_seconds(s)
            for s in self._course.states
        )

    def sum_block_gpu_seconds(self, state: ComparisonState) -> float:
        """Return the GPU-seconds that a comparison's blocks took."""
        return sum(
            block.gpu_seconds
            for block in self._evidence.list_blocks_of_comparison(state.comparison.comparison_key)
        )

    def sum_full_run_gpu_seconds(self, state: ComparisonState) -> float:
        """Return the GPU-seconds of a comparison's full runs that the verdict requested."""
        return self._runs_s.get(state.comparison.comparison_key, 0.0)

    @property
    def expected_gpu_seconds_of_next_round(self) -> float | None:
        """Expected GPU-seconds of the next round.

        The value is None if a part of it cannot be estimated yet.
        """
        expected = 0.0
        for state, _ in self._course.missing_blocks:
            if not (
                blocks := self._evidence.list_blocks_of_comparison(state.comparison.comparison_key)
            ):
                return None
            last = blocks[-1]
            before = {s.strategy for s in last.segments}
            still = len(before & set(state.active_strategies))
            expected += last.gpu_seconds * (still + 0.5) / (len(before) + 0.5)
        states = {state.comparison.comparison_key: state for state in self._course.states}
        for cell in self._course.missing_runs:
            full = self.estimate_full_run_gpu_seconds(
                states[ComparisonKey.from_cell(cell)], cell.strategy
            )
            if full is None:
                return None
            expected += full
        return expected

    def average_step_seconds(self, state: ComparisonState, strategy: str) -> float | None:
        """Return a strategy's seconds per step: the geometric mean over its blocks."""
        logs = [
            block.compute_log_step_time(strategy)
            for block in self._evidence.list_blocks_of_comparison(state.comparison.comparison_key)
        ]
        known = [log for log in logs if math.isfinite(log)]
        return math.exp(statistics.fmean(known)) if known else None

    def estimate_full_run_gpu_seconds(self, state: ComparisonState, strategy: str) -> float | None:
        """Return the GPU-seconds of a strategy's full run, measured or estimated from its blocks.

        The estimate leaves out evaluations. The result is None if the step time or the number of steps is
        unknown.
        """
        if runs := self._evidence.list_full_runs(state.comparison, strategy):
            return statistics.fmean(run.gpu_seconds for run in runs)
        step_s, steps = self.average_step_seconds(state, strategy), state.comparison.full_run_steps
        if step_s is None or steps is None:
            return None
        starts = [
            s.start_s
            for block in self._evidence.list_blocks_of_comparison(state.comparison.comparison_key)
            for s in block.segments
            if s.strategy == strategy and s.status == "ok"
        ]
        return state.comparison.comparison_key.gpus * (statistics.median(starts) + steps * step_s)

    def estimate_full_matrix_gpu_seconds(self, state: ComparisonState) -> float | None:
        """Return the GPU-seconds of complete trainings of a comparison, each with MATRIX_REPEATS repeats.

        A strategy that fails costs nothing. The result is None if the time of no training is known.
        """
        costs = [
            self.estimate_full_run_gpu_seconds(state, strategy)
            for strategy in state.comparison.strategies
        ]
        known = [f for f in costs if f is not None]
        return MATRIX_REPEATS * sum(known) if known else None
