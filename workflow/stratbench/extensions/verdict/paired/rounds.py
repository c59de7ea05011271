"""Replays a verdict's rounds from the evidence, and finds what the next round needs.

The replay depends on the evidence alone: a round is evaluated once all its blocks and full runs exist. So the
order in which files arrive does not matter, and a killed run resumes where it was.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stratbench.cell.coordinates import Cell
from stratbench.extensions.verdict.block_rules import (
    MATRIX_REPEATS,
    MAX_LOG_DEVIATION,
    compute_segment_disagreement_limit,
)
from stratbench.extensions.verdict.paired import checks, judging
from stratbench.extensions.verdict.paired.evidence import PairedEvidence
from stratbench.extensions.verdict.paired.scores import FullRunScores
from stratbench.extensions.verdict.paired.state import (
    ComparisonAnalysis,
    ComparisonState,
    DroppedStrategy,
    Ratio,
)
from stratbench.statistics import moderated


class RoundReplay:
    """Replay of a study's rounds, up to the first round with missing blocks or full runs."""

    def __init__(self, evidence: PairedEvidence) -> None:
        self.evidence = evidence
        self.states = [
            ComparisonState(comparison, active_strategies=list(comparison.strategies))
            for comparison in evidence.comparisons
        ]
        #: Cells whose full runs were requested, in the order of the requests. Other full runs give no scores.
        self.requested_runs: dict[Cell, None] = {}
        self.scores = FullRunScores(evidence, self.requested_runs)
        self.round = 0
        self.missing_blocks: list[tuple[ComparisonState, int]] = []
        self.missing_runs: list[Cell] = []
        self._limits: dict[int, float | None] = {}
        self._level = checks.estimate_allocation_sd(evidence)
        self._strategies = max(
            (len(comparison.strategies) for comparison in evidence.comparisons), default=0
        )
        self._analysis = judging.SequentialAnalysis(
            self._make_strategy_mask("uses_servers"),
            self._make_strategy_mask("equals_ddp"),
            self._make_strategy_mask("strategies"),
            evidence.margin,
        )
        while self.states and self._replay_round_if_complete():
            pass

    def estimate_segment_disagreement_limit(self, num_blocks: int) -> float | None:
        """Return how much a strategy's two segments may differ without a third segment.

        A segment is a short timed run in a block. The difference is the absolute log ratio of their step
        times. The limit is estimated from the first `num_blocks` blocks of each comparison. It is None if no
        strategy completed two segments in these blocks.
        """
        if num_blocks not in self._limits:
            apart = [
                abs(logs[0] - logs[1])
                for block in self.evidence.blocks.values()
                if block.block_number <= num_blocks
                for strategy in {s.strategy for s in block.segments}
                if (logs := block.list_segment_log_step_times(strategy))
            ]
            self._limits[num_blocks] = compute_segment_disagreement_limit(apart) if apart else None
        return self._limits[num_blocks]

    def _make_strategy_mask(self, field_name: str) -> np.ndarray:
        """Return a field of the comparisons as a mask of shape [comparisons, strategies].

        A comparison with fewer strategies than others is padded by False.

        Args:
            field_name: Field of PairedComparison with one value per strategy, such as `equals_ddp`.
        """
        array = np.zeros((len(self.states), self._strategies), dtype=bool)
        for row, state in zip(array, self.states, strict=True):
            values = getattr(state.comparison, field_name)
            row[: len(values)] = [bool(value) for value in values]
        return array

    def _replay_round_if_complete(self) -> bool:
        """Replay one round, and return whether another round may follow.

        Return False if a block or full run is missing, or if nothing is left to do.
        """
        self.missing_blocks = self._list_missing_blocks()
        self.missing_runs = [
            cell for cell in self.requested_runs if cell not in self.evidence.full_runs
        ]
        if self.missing_blocks or self.missing_runs:
            return False
        self._apply_full_run_scores()
        if not self._analysis.open.any():
            return self._request_leader_runs_if_uncertain()
        if self._list_missing_blocks():
            return (
                True  # the scores have opened a comparison again, which needs another block first
            )
        self.round += 1
        blocks, targets = self._analysis.blocks, self._list_block_counts_at_next_analyses()
        new = np.array(targets) - blocks
        max_blocks = max(int(new.max()), 1)
        step = self._analysis.add_blocks(
            self._collect_new_log_step_times(blocks, targets, max_blocks),
            new,
            self._index_node_sets_of_new_blocks(blocks, targets, max_blocks),
            self.estimate_segment_disagreement_limit(1) or 0.0,
            self._mask_doubtful_strategies(targets),
        )
        self._record_round_in_states(step)
        self._request_full_runs(step)
        return True

    def _list_missing_blocks(self) -> list[tuple[ComparisonState, int]]:
        """Return the missing blocks before the next interim analysis, as comparison state and block number.

        A block that lacks an active strategy counts as missing, because the strategy may be new in the study.
        """
        ends = zip(
            self.states,
            self._analysis.blocks,
            self._list_block_counts_at_next_analyses(),
            strict=True,
        )
        return [
            (state, number)
            for state, at, target in ends
            for number in range(at + 1, target + 1)
            if (block := self.evidence.blocks.get((state.comparison.comparison_key, number)))
            is None
            or not set(state.active_strategies) <= {s.strategy for s in block.segments}
        ]

    def _list_block_counts_at_next_analyses(self) -> list[int]:
        """Return each comparison's number of blocks at its next interim analysis.

        If no analysis follows, the number is that of the blocks so far.
        """
        waiting = self._analysis.open & ~self._analysis.again
        return [
            (judging.get_block_count_at_next_analysis(int(at)) or int(at)) if waits else int(at)
            for at, waits in zip(self._analysis.blocks, waiting, strict=True)
        ]

    @property
    def max_later_block_rounds(self) -> int:
        """Largest number of rounds of blocks that may follow the next round."""
        ends = zip(self._list_block_counts_at_next_analyses(), self._analysis.open, strict=True)
        return max(
            (sum(n > end for n in judging.LOOKS) for end, is_open in ends if is_open), default=0
        )

    def _collect_new_log_step_times(
        self, block_counts: np.ndarray, target_counts: list[int], max_new_blocks: int
    ) -> np.ndarray:
        """Return the log step times of new blocks, shape [comparisons, strategies, max_blocks].

        Strategies that have left the comparison have NaN.

        Args:
            block_counts: Number of blocks so far of each comparison.
            target_counts: Number of blocks of each comparison after this round.
            max_new_blocks: Largest number of new blocks of a comparison.
        """
        values = np.full((len(self.states), self._strategies, max_new_blocks), np.nan)
        for i, state in enumerate(self.states):
            for k in range(target_counts[i] - int(block_counts[i])):
                block = self.evidence.blocks[
                    state.comparison.comparison_key, int(block_counts[i]) + 1 + k
                ]
                for j, strategy in enumerate(state.comparison.strategies):
                    if self._analysis.active[i, j]:
                        values[i, j, k] = block.compute_log_step_time(strategy)
        return values

    def _index_node_sets_of_new_blocks(
        self, block_counts: np.ndarray, target_counts: list[int], max_new_blocks: int
    ) -> np.ndarray:
        """Return the index of each new block's set of nodes, shape [comparisons, max_blocks].

        Args:
            block_counts: Number of blocks so far of each comparison.
            target_counts: Number of blocks of each comparison after this round.
            max_new_blocks: Largest number of new blocks of a comparison.
        """
        nodes = np.zeros((len(self.states), max_new_blocks), dtype=int)
        for i, state in enumerate(self.states):
            seen: dict[tuple[str, ...], int] = {}
            for number in range(1, target_counts[i] + 1):
                hosts = self.evidence.blocks[state.comparison.comparison_key, number].hosts
                label = seen.setdefault(hosts, len(seen))
                if number > block_counts[i]:
                    nodes[i, number - 1 - int(block_counts[i])] = label
        return nodes

    def _mask_doubtful_strategies(self, target_counts: list[int]) -> np.ndarray:
        """Return the mask of the strategies with a block that contradicts their own full run.

        The mask has shape [comparisons, strategies].

        Args:
            target_counts: Number of blocks of each comparison after this round.
        """
        suspect = np.zeros_like(self._analysis.active)
        for i, state in enumerate(self.states):
            for block in self.evidence.list_blocks_of_comparison(state.comparison.comparison_key)[
                : target_counts[i]
            ]:
                for strategy, _ in checks.iter_strategies_contradicting_full_runs(
                    self.evidence, state.comparison, block
                ):
                    suspect[i, state.comparison.strategies.index(strategy)] = True
        return suspect

    def _record_round_in_states(self, round_result: judging.InterimResult) -> None:
        """Append a round's analysis and dropped strategies to the state of each comparison."""
        look = round_result.look
        for i, state in enumerate(self.states):
            if not round_result.judged[i]:
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
                if round_result.failed[i, j]:
                    status = self._find_failure_status(state, strategy, blocks)
                    state.dropped_strategies.append(
                        DroppedStrategy(strategy, blocks, status, FAILURES.get(status, status))
                    )
                elif round_result.dropped[i, j]:
                    kind, reason = "slower", f"slower than {leader}"
                    if look.blocks[i] == 1:
                        kind = "much slower"
                        reason = f"more than {moderated.SCREEN:g} times as slow in the first block"
                    state.dropped_strategies.append(
                        DroppedStrategy(strategy, blocks, kind, reason, ratios[strategy], leader)
                    )
            state.looks.append(
                ComparisonAnalysis(
                    num_blocks=blocks,
                    num_common_blocks=int(look.blocks[i]),
                    reuses_few_nodes=bool(look.reuses_few_nodes[i]),
                    block_similarity_sds=float(look.excess_similarity_sds[i]),
                    leader=leader,
                    max_log_advantage_over_leader=float(look.at_most[i]),
                    is_leader_fastest=bool(look.is_leader_fastest[i]),
                    log_time_ratios_to_leader=ratios,
                    slower_strategies=tuple(
                        a for j, a in enumerate(strategies) if look.slower[i, j]
                    ),
                    equal_strategies=tuple(
                        a for j, a in enumerate(strategies) if look.is_equal_to_leader[i, j]
                    ),
                )
            )
            self._copy_state_of_comparison(i)

    def _copy_state_of_comparison(self, comparison_index: int) -> None:
        """Update the state of a comparison in `states` from the results of the analysis.

        The state has the active and the dropped strategies, and whether the comparison is open.
        """
        state = self.states[comparison_index]
        state.active_strategies = [
            a
            for j, a in enumerate(state.comparison.strategies)
            if self._analysis.active[comparison_index, j]
        ]
        state.is_open = bool(self._analysis.open[comparison_index])
        # A strategy that was dropped as slower is active again if its leader at that time is excluded.
        state.dropped_strategies = [
            drop
            for drop in state.dropped_strategies
            if drop.strategy not in state.active_strategies
        ]

    def _find_failure_status(self, state: ComparisonState, strategy: str, num_blocks: int) -> str:
        seen = self.evidence.list_blocks_of_comparison(state.comparison.comparison_key)[:num_blocks]
        return next(
            filter(None, (block.find_failure_status(strategy) for block in seen)), "missing"
        )

    def _request_full_runs(self, round_result: judging.InterimResult) -> None:
        """Request full runs of strategies that would lead, but whose scores are unknown.

        After the first round, also request one full run per group of strategies with equal arithmetic.
        """
        for comparison, strategy in np.argwhere(self._analysis.mask_of_leaders_without_score):
            state = self.states[comparison]
            if state.comparison.has_scored_full_runs:
                self.requested_runs.setdefault(
                    self.evidence.make_full_run_cell(
                        state.comparison, state.comparison.strategies[strategy]
                    )
                )
        if self.round == 1:
            for state, strategy in self._iter_reference_strategies(round_result.look):
                self.requested_runs.setdefault(
                    self.evidence.make_full_run_cell(state.comparison, strategy)
                )

    def _iter_reference_strategies(
        self, look: judging.InterimAnalysis
    ) -> Iterator[tuple[ComparisonState, str]]:
        """Yield the strategies whose full runs give the reference scores, with their comparisons.

        Strategies whose arithmetic equals DDP's share a score. From each group that shares a score,
        the fastest strategy in the comparison with the fewest workers is yielded.
        """
        seen = set()
        for i, state in sorted(
            enumerate(self.states), key=lambda s: s[1].comparison.comparison_key.gpus
        ):
            comparison = state.comparison
            if (
                not comparison.has_scored_full_runs
                or not state.looks
                or comparison.shared_score_key in seen
            ):
                continue
            leader = int(look.leader[i])
            equal = [
                j
                for j in range(len(comparison.strategies))
                if comparison.equals_ddp[j] and self._analysis.active[i, j]
            ]
            if equal:
                seen.add(comparison.shared_score_key)
                fastest = min(equal, key=lambda j: (j != leader, look.mean[i, j]))
                yield state, comparison.strategies[fastest]

    def _apply_full_run_scores(self) -> None:
        """Remove strategies with bad scores in full runs, and let those with good scores lead."""
        good, bad = np.zeros_like(self._analysis.active), np.zeros_like(self._analysis.active)
        for i, state in enumerate(self.states):
            for j, strategy in enumerate(state.comparison.strategies):
                if not self._analysis.active[i, j]:
                    continue
                if not state.comparison.has_scored_full_runs:
                    good[i, j] = True
                elif self.scores.list_requested_full_runs(state.comparison, strategy):
                    reason = self.scores.find_exclusion_reason(state.comparison, strategy)
                    good[i, j], bad[i, j] = reason is None, reason is not None
                    if reason is not None:
                        blocks = int(self._analysis.blocks[i])
                        state.dropped_strategies.append(
                            DroppedStrategy(strategy, blocks, "score", reason)
                        )
        self._analysis.apply_scores(good, bad)
        for i in range(len(self.states)):
            self._copy_state_of_comparison(i)

    def _request_leader_runs_if_uncertain(self) -> bool:
        """Request a full run of each leader whose score or time is uncertain.

        Each further full run of a leader has another seed.

        Returns:
            Whether any full run was requested.
        """
        before = len(self.requested_runs)
        for state in self.states:
            if (
                not state.latest_analysis
                or not state.comparison.has_scored_full_runs
                or state.num_compared_strategies < 2
            ):
                continue
            comparison, leader = state.comparison, state.latest_analysis.leader
            if leader not in state.active_strategies:
                continue
            runs = len(self.scores.list_requested_full_runs(comparison, leader))
            correction, deviations = (
                self.find_full_run_correction(state),
                self.compute_full_run_deviations(state),
            )
            mean = {strategy: statistics.fmean(logs) for strategy, logs in deviations.items()}
            own = mean.pop(leader, 0.0)
            equal = comparison.equals_ddp[comparison.strategies.index(leader)]
            loss = None if equal else self.scores.estimate_score_loss(comparison, leader)
            near = correction is None and own <= MAX_LOG_DEVIATION / 2
            certain = near and (loss is None or loss.is_within_tolerance)
            if not runs or (not certain and runs < MATRIX_REPEATS):
                self.requested_runs.setdefault(
                    self.evidence.make_full_run_cell(comparison, leader, runs)
                )
            # If the leader's full runs are slower than predicted, those of the nearest alternative may
            # be, too.
            rival = max(mean, key=mean.__getitem__, default=None)
            if correction and (correction.nearest_rival in mean or not mean):
                rival = correction.nearest_rival
            done = len(deviations.get(rival, ()))
            if rival and (correction or own > MAX_LOG_DEVIATION) and done < MATRIX_REPEATS:
                self.requested_runs.setdefault(
                    self.evidence.make_full_run_cell(comparison, rival, done)
                )
        return len(self.requested_runs) > before

    def compute_full_run_deviations(self, state: ComparisonState) -> dict[str, list[float]]:
        """Return log(measured / predicted time) of each full run of a comparison, by strategy."""
        blocks = self.evidence.list_blocks_of_comparison(state.comparison.comparison_key)[
            : state.latest_analysis.num_blocks if state.latest_analysis else None
        ]
        return checks.compute_full_run_deviations(self.evidence, state.comparison, blocks)

    def is_leader_confirmed_by_full_runs(self, state: ComparisonState) -> bool:
        """Return whether the leader has enough full runs to check its step time to MAX_LOG_DEVIATION."""
        runs = (
            len(self.compute_full_run_deviations(state).get(state.latest_analysis.leader, ()))
            if state.latest_analysis
            else 0
        )
        return (
            runs > 0
            and checks.estimate_full_run_deviation_sd(
                runs, state.latest_analysis.num_blocks, self._level
            )
            <= MAX_LOG_DEVIATION
        )

    def find_full_run_correction(self, state: ComparisonState) -> checks.FullRunCorrection | None:
        """Return the correction of a comparison's conclusion, or None if full runs and blocks agree."""
        last = state.latest_analysis
        if last is None or last.leader not in state.active_strategies:
            return None
        bounds = {
            strategy: ratio.bound for strategy, ratio in last.log_time_ratios_to_leader.items()
        }
        for drop in state.dropped_strategies:
            if drop.log_time_ratio_to_leader is not None:
                bound = (
                    drop.log_time_ratio_to_leader.bound
                    if drop.drop_kind == "slower"
                    else math.log(moderated.SCREEN)
                )
                bounds[drop.strategy] = bound
        deviations = self.compute_full_run_deviations(state)
        return checks.correct_conclusion_by_full_runs(
            deviations, last.leader, bounds, last.num_blocks, self._level
        )

    def get_corrected_analysis(self, state: ComparisonState) -> ComparisonAnalysis | None:
        """Return a comparison's latest analysis, corrected if full runs contradict the blocks."""
        last, correction = state.latest_analysis, self.find_full_run_correction(state)
        if last is None or correction is None:
            return last
        bound = max(last.max_log_advantage_over_leader, correction.max_log_advantage_over_leader)
        return replace(
            last,
            max_log_advantage_over_leader=bound,
            is_leader_fastest=last.is_leader_fastest and correction.is_leader_fastest,
        )


#: Reason why a strategy left its comparison, by the status of its failed segment.
FAILURES = {
    "oom": "does not fit: out of memory",
    "timeout": "did not end within its time limit",
    "diverged": "training diverged",
    "unsupported": "cannot train the network",
    "missing": "has no segment in a block",
}
