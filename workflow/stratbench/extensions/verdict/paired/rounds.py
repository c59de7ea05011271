"""Rounds: replays the decisions from the evidence, and determines the next round.

This is a pure function of the evidence: a round is evaluated once all its blocks and full runs exist, and by
those alone. So neither the order of files nor of their arrival matters, and a killed run resumes where it
was.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stratbench.cell.coordinates import Cell
from stratbench.extensions.verdict.block_rules import MATRIX_REPEATS, MAX_OFF, disagreement_limit
from stratbench.extensions.verdict.paired import checks, judging
from stratbench.extensions.verdict.paired.evidence import PairedEvidence
from stratbench.extensions.verdict.paired.scores import FullRunScores
from stratbench.extensions.verdict.paired.state import Drop, Judged, Ratio, State
from stratbench.statistics import moderated


class Course:
    """The replay of a study's rounds, as far as its evidence goes."""

    def __init__(self, evidence: PairedEvidence) -> None:
        self.evidence = evidence
        self.states = [
            State(comparison, active=list(comparison.strategies))
            for comparison in evidence.comparisons
        ]
        #: The requested full runs, in order of request, and their scores.
        self.asked: dict[Cell, None] = {}
        self.scores = FullRunScores(evidence, self.asked)
        self.round = 0
        self.missing_blocks: list[tuple[State, int]] = []
        self.missing_runs: list[Cell] = []
        self._limits: dict[int, float | None] = {}
        self._level = checks.level_scatter(evidence)
        self._strategies = max(
            (len(comparison.strategies) for comparison in evidence.comparisons), default=0
        )
        self._analysis = judging.SequentialAnalysis(
            self._array("served"), self._array("equal"), self._array("strategies"), evidence.margin
        )
        while self.states and self._advance():
            pass

    def disagreement(self, blocks: int) -> float | None:
        """Return the difference from which two segments of one strategy disagree.

        Estimated from the first `blocks` blocks of each comparison; None if no strategy ended two segments in
        them.
        """
        if blocks not in self._limits:
            apart = [
                abs(logs[0] - logs[1])
                for block in self.evidence.blocks.values()
                if block.number <= blocks
                for strategy in {s.strategy for s in block.segments}
                if (logs := block.logs(strategy))
            ]
            self._limits[blocks] = disagreement_limit(apart) if apart else None
        return self._limits[blocks]

    def _array(self, name: str) -> np.ndarray:
        """Return a property of the strategies, False for strategies that a comparison does not have.

        Shape [comparisons, strategies].
        """
        array = np.zeros((len(self.states), self._strategies), dtype=bool)
        for row, state in zip(array, self.states, strict=True):
            values = getattr(state.comparison, name)
            row[: len(values)] = [bool(value) for value in values]
        return array

    def _advance(self) -> bool:
        """Replays a round.

        False if a part of it is missing, or nothing is left to do.
        """
        self.missing_blocks = self._blocks_to_come()
        self.missing_runs = [cell for cell in self.asked if cell not in self.evidence.full_runs]
        if self.missing_blocks or self.missing_runs:
            return False
        self._learn()
        if not self._analysis.open.any():
            return self._ask_for_leaders()
        if self._blocks_to_come():
            return True  # a comparison that a score has opened again may need one more block
        self.round += 1
        blocks, targets = self._analysis.blocks, self._targets()
        new = np.array(targets) - blocks
        max_blocks = max(int(new.max()), 1)
        step = self._analysis.advance(
            self._values(blocks, targets, max_blocks),
            new,
            self._nodes(blocks, targets, max_blocks),
            self.disagreement(1) or 0.0,
            self._doubtful(targets),
        )
        self._note(step)
        self._ask(step)
        return True

    def _blocks_to_come(self) -> list[tuple[State, int]]:
        """Return the blocks that are missing up to each comparison's next look.

        A block without a strategy that is in the comparison is missing, too: the strategy may be new in the
        study.
        """
        ends = zip(self.states, self._analysis.blocks, self._targets(), strict=True)
        return [
            (state, number)
            for state, at, target in ends
            for number in range(at + 1, target + 1)
            if (block := self.evidence.blocks.get((state.comparison.place, number))) is None
            or not set(state.active) <= {s.strategy for s in block.segments}
        ]

    def _targets(self) -> list[int]:
        """The number of blocks at each comparison's next look.

        Its present number if none is to come.
        """
        waiting = self._analysis.open & ~self._analysis.again
        return [
            (judging.next_look(int(at)) or int(at)) if waits else int(at)
            for at, waits in zip(self._analysis.blocks, waiting, strict=True)
        ]

    @property
    def may_follow(self) -> int:
        """The most rounds of blocks that may follow the next one."""
        ends = zip(self._targets(), self._analysis.open, strict=True)
        return max(
            (sum(n > end for n in judging.LOOKS) for end, is_open in ends if is_open), default=0
        )

    def _values(self, blocks: np.ndarray, targets: list[int], max_blocks: int) -> np.ndarray:
        """The new blocks' values, NaN for strategies out of the comparison; shape [comparisons, strategies,
        most].
        """
        values = np.full((len(self.states), self._strategies, max_blocks), np.nan)
        for i, state in enumerate(self.states):
            for k in range(targets[i] - int(blocks[i])):
                block = self.evidence.blocks[state.comparison.place, int(blocks[i]) + 1 + k]
                for j, strategy in enumerate(state.comparison.strategies):
                    if self._analysis.active[i, j]:
                        values[i, j, k] = block.value(strategy)
        return values

    def _nodes(self, blocks: np.ndarray, targets: list[int], max_blocks: int) -> np.ndarray:
        """Return a number for the node set of each new block; shape [comparisons, most]."""
        nodes = np.zeros((len(self.states), max_blocks), dtype=int)
        for i, state in enumerate(self.states):
            seen: dict[tuple[str, ...], int] = {}
            for number in range(1, targets[i] + 1):
                hosts = self.evidence.blocks[state.comparison.place, number].hosts
                label = seen.setdefault(hosts, len(seen))
                if number > blocks[i]:
                    nodes[i, number - 1 - int(blocks[i])] = label
        return nodes

    def _doubtful(self, targets: list[int]) -> np.ndarray:
        """Return the strategies with a block that contradicts their own full run.

        Shape [comparisons, strategies].
        """
        suspect = np.zeros_like(self._analysis.active)
        for i, state in enumerate(self.states):
            for block in self.evidence.blocks_of(state.comparison.place)[: targets[i]]:
                for strategy, _ in checks.far_from_full_run(self.evidence, state.comparison, block):
                    suspect[i, state.comparison.strategies.index(strategy)] = True
        return suspect

    def _note(self, step: judging.InterimResult) -> None:
        """Records a round's looks and drops in words."""
        look = step.look
        for i, state in enumerate(self.states):
            if not step.judged[i]:
                continue
            strategies, blocks = state.comparison.strategies, int(self._analysis.blocks[i])
            parts = (look.mean[i], look.low[i], look.high[i], look.bound[i])
            ratios = {
                strategy: Ratio(*(float(part[j]) for part in parts))
                for j, strategy in enumerate(strategies)
                if look.rivals[i, j]
            }
            leader = strategies[int(look.leader[i])]
            for j, strategy in enumerate(strategies):
                if step.failed[i, j]:
                    status = self._why_without_value(state, strategy, blocks)
                    state.drops.append(Drop(strategy, blocks, status, FAILURES.get(status, status)))
                elif step.dropped[i, j] and look.blocks[i] == 1:
                    reason = f"more than {moderated.SCREEN:g} times as slow in the first block"
                    state.drops.append(
                        Drop(strategy, blocks, "much slower", reason, ratios[strategy], leader)
                    )
                elif step.dropped[i, j]:
                    reason = f"slower than {leader}"
                    state.drops.append(
                        Drop(strategy, blocks, "slower", reason, ratios[strategy], leader)
                    )
            state.looks.append(
                Judged(
                    blocks=blocks,
                    counted=int(look.blocks[i]),
                    alike=bool(look.alike[i]),
                    unlike=float(look.unlike[i]),
                    leader=leader,
                    at_most=float(look.at_most[i]),
                    fastest=bool(look.fastest[i]),
                    ratios=ratios,
                    slower=tuple(a for j, a in enumerate(strategies) if look.slower[i, j]),
                    equal=tuple(a for j, a in enumerate(strategies) if look.equal[i, j]),
                )
            )
            self._refresh(i)

    def _refresh(self, i: int) -> None:
        """Copy a comparison's state from the verdict."""
        state = self.states[i]
        state.active = [
            a for j, a in enumerate(state.comparison.strategies) if self._analysis.active[i, j]
        ]
        state.open = bool(self._analysis.open[i])
        # Strategies that were slower than a strategy that is now out have come back.
        state.drops = [drop for drop in state.drops if drop.strategy not in state.active]

    def _why_without_value(self, state: State, strategy: str, blocks: int) -> str:
        seen = self.evidence.blocks_of(state.comparison.place)[:blocks]
        return next(filter(None, (block.status(strategy) for block in seen)), "missing")

    # ------------------------------------------------------------ full runs

    def _ask(self, step: judging.InterimResult) -> None:
        """Request full runs that may change the answer, of the fastest strategies without a score.

        Once the first look has given strategies' times, also request one run of each equal arithmetic.
        """
        for comparison, strategy in np.argwhere(self._analysis.unknown):
            state = self.states[comparison]
            if state.comparison.scored:
                self.asked.setdefault(
                    self.evidence.cell(state.comparison, state.comparison.strategies[strategy])
                )
        if self.round == 1:
            for state, strategy in self._references(step.look):
                self.asked.setdefault(self.evidence.cell(state.comparison, strategy))

    def _references(self, look: judging.Look) -> Iterator[tuple[State, str]]:
        """Yield the fastest strategy in the smallest comparison of each equal arithmetic."""
        seen = set()
        for i, state in sorted(enumerate(self.states), key=lambda s: s[1].comparison.place.gpus):
            comparison = state.comparison
            if not comparison.scored or not state.looks or comparison.arithmetic in seen:
                continue
            leader = int(look.leader[i])
            equal = [
                j
                for j in range(len(comparison.strategies))
                if comparison.equal[j] and self._analysis.active[i, j]
            ]
            if equal:
                seen.add(comparison.arithmetic)
                fastest = min(equal, key=lambda j: (j != leader, look.mean[i, j]))
                yield state, comparison.strategies[fastest]

    def _learn(self) -> None:
        """Passes the requested scores to the comparison: strategies that lose too much are out."""
        good, bad = np.zeros_like(self._analysis.active), np.zeros_like(self._analysis.active)
        for i, state in enumerate(self.states):
            for j, strategy in enumerate(state.comparison.strategies):
                if not self._analysis.active[i, j]:
                    continue
                if not state.comparison.scored:
                    good[i, j] = True
                elif self.scores.runs_of(state.comparison, strategy):
                    reason = self.scores.why_failed(state.comparison, strategy)
                    good[i, j], bad[i, j] = reason is None, reason is not None
                    if reason is not None:
                        blocks = int(self._analysis.blocks[i])
                        state.drops.append(Drop(strategy, blocks, "score", reason))
        self._analysis.learn(good, bad)
        for i in range(len(self.states)):
            self._refresh(i)

    def _ask_for_leaders(self) -> bool:
        """Request a full run, or another seed, of each leader with an uncertain score.

        Return whether there was any.
        """
        before = len(self.asked)
        for state in self.states:
            if not state.last or not state.comparison.scored or state.compared < 2:
                continue
            comparison, leader = state.comparison, state.last.leader
            if leader not in state.active:
                continue
            runs = len(self.scores.runs_of(comparison, leader))
            correction, deviations = self.moved(state), self.off_from_steps(state)
            mean = {strategy: statistics.fmean(logs) for strategy, logs in deviations.items()}
            own = mean.pop(leader, 0.0)
            equal = comparison.equal[comparison.strategies.index(leader)]
            loss = None if equal else self.scores.loss_of(comparison, leader)
            near = correction is None and own <= MAX_OFF / 2
            certain = near and (loss is None or loss.settled)
            if not runs or (not certain and runs < MATRIX_REPEATS):
                self.asked.setdefault(self.evidence.cell(comparison, leader, runs))
            # The alternative that compensates for the leader's full runs, or does not.
            rival = max(mean, key=mean.__getitem__, default=None)
            if correction and (correction.nearest in mean or not mean):
                rival = correction.nearest
            done = len(deviations.get(rival, ()))
            if rival and (correction or own > MAX_OFF) and done < MATRIX_REPEATS:
                self.asked.setdefault(self.evidence.cell(comparison, rival, done))
        return len(self.asked) > before

    def off_from_steps(self, state: State) -> dict[str, list[float]]:
        """Return the deviations of a comparison's full runs from its blocks, by strategy."""
        blocks = self.evidence.blocks_of(state.comparison.place)[
            : state.last.blocks if state.last else None
        ]
        return checks.off_from_steps(self.evidence, state.comparison, blocks)

    def checked(self, state: State) -> bool:
        """Return whether the leader's full runs could be compared with its steps, to about MAX_OFF."""
        runs = len(self.off_from_steps(state).get(state.last.leader, ())) if state.last else 0
        return runs > 0 and checks.check_scatter(runs, state.last.blocks, self._level) <= MAX_OFF

    def moved(self, state: State) -> checks.Moved | None:
        """Return the correction of a comparison's conclusion by full runs, or None."""
        last = state.last
        if last is None or last.leader not in state.active:
            return None
        bounds = {strategy: ratio.bound for strategy, ratio in last.ratios.items()}
        for drop in state.drops:
            if drop.ratio is not None:
                bound = drop.ratio.bound if drop.kind == "slower" else math.log(moderated.SCREEN)
                bounds[drop.strategy] = bound
        deviations = self.off_from_steps(state)
        return checks.moved_by(deviations, last.leader, bounds, last.blocks, self._level)

    def claimed(self, state: State) -> Judged | None:
        """Return the latest look, corrected by full runs: the basis of a conclusion."""
        last, correction = state.last, self.moved(state)
        if last is None or correction is None:
            return last
        at_most = max(last.at_most, correction.at_most)
        return replace(last, at_most=at_most, fastest=last.fastest and correction.fastest)


#: Why a strategy left the comparison in a block, as text.
FAILURES = {
    "oom": "does not fit: out of memory",
    "timeout": "did not end within its time limit",
    "diverged": "training diverged",
    "unsupported": "cannot train the network",
    "missing": "has no segment in a block",
}
