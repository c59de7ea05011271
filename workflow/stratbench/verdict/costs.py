"""What a race has cost, what its next round will, and what the full matrix would have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from stratbench.verdict.evidence import MATRIX_REPEATS

if TYPE_CHECKING:
    from stratbench.verdict.rounds import Course, State


class Costs:
    """GPU-seconds of a course, by what its blocks and full runs took."""

    def __init__(self, course: Course) -> None:
        self._course, self._evidence = course, course.evidence

    @property
    def spent_s(self) -> float:
        """Of all blocks, and of the full runs that the race asked for."""
        return sum(self.blocks_s(s) + self.runs_s(s) for s in self._course.states)

    def blocks_s(self, state: State) -> float:
        """Of a bout's blocks."""
        found = self._evidence.blocks.values()
        return sum(b.gpu_seconds for b in found if b.place == state.bout.place)

    def runs_s(self, state: State) -> float:
        """Of a bout's full runs that the race asked for."""
        place = state.bout.place
        return sum(
            run.gpu_seconds
            for cell in self._course.asked
            if (cell.experiment, cell.model, cell.gpus)
            == (place.experiment, place.model, place.gpus)
            and (run := self._evidence.full_runs.get(cell))
        )

    @property
    def expected_s(self) -> float | None:
        """Of the next round; None where nothing like it was measured yet."""
        expected = 0.0
        for state, _ in self._course.missing_blocks:
            last = self._last_block(state)
            if last is None:
                return None
            before = {s.strategy for s in last.segments}
            still = len(before & set(state.active))
            expected += last.gpu_seconds * (still + 0.5) / (len(before) + 0.5)
        for cell in self._course.missing_runs:
            state = next(
                s for s in self._course.states
                if (s.bout.place.experiment, s.bout.place.model, s.bout.place.gpus)
                == (cell.experiment, cell.model, cell.gpus)
            )  # fmt: skip
            full = self.full_s(state, cell.strategy)
            if full is None:
                return None
            expected += full
        return expected

    def _last_block(self, state: State):
        found = [b for b in self._evidence.blocks.values() if b.place == state.bout.place]
        return max(found, key=lambda b: b.number, default=None)

    def step_s(self, state: State, arm: str) -> float | None:
        """An arm's seconds a step over its blocks (geometric mean)."""
        blocks = self._evidence.blocks.values()
        logs = [b.value(arm) for b in blocks if b.place == state.bout.place]
        known = [log for log in logs if math.isfinite(log)]
        return math.exp(float(np.mean(known))) if known else None

    def full_s(self, state: State, arm: str) -> float | None:
        """GPU-seconds of a full cell: of its runs, else its start and its steps by the blocks.

        Evaluations are left out of the estimate. None where nothing tells.
        """
        cells = (self._evidence.cell(state.bout, arm, repeat) for repeat in range(MATRIX_REPEATS))
        runs = [
            self._evidence.full_runs[c].gpu_seconds for c in cells if c in self._evidence.full_runs
        ]
        if runs:
            return float(np.mean(runs))
        step_s, steps = self.step_s(state, arm), state.bout.full_steps
        if step_s is None or steps is None:
            return None
        starts = [
            s.start_s
            for block in self._evidence.blocks.values()
            if block.place == state.bout.place
            for s in block.segments
            if s.strategy == arm and s.start_s is not None
        ]
        start_s = float(np.median(starts)) if starts else 0.0
        return state.bout.place.gpus * (start_s + steps * step_s)

    def matrix_s(self, state: State) -> float | None:
        """Of the bout's cells in the full matrix of MATRIX_REPEATS repeats; what failed costs nothing.

        None where nothing tells what a cell takes.
        """
        found = [self.full_s(state, arm) for arm in state.bout.arms]
        known = [f for f in found if f is not None]
        return MATRIX_REPEATS * sum(known) if known else None
