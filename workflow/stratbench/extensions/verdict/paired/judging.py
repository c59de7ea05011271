"""Sequential analysis: evaluates each comparison after every few blocks, and decides when it ends.

A comparison has several strategies on one experiment, model and number of workers. All arrays have the shape
[..., comparisons, strategies, blocks], [..., comparisons, strategies] or [..., comparisons]. The axes in
front are those of a simulation of many studies. Times are natural logarithms of seconds per step. A *look* is
an evaluation of the blocks so far (an interim analysis).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratbench.extensions.verdict.paired import dependence
from stratbench.statistics import moderated

#: Numbers of blocks after which a comparison is evaluated.
LOOKS = (1, 2, 3, 4, 5, 6, 8, 10)
#: Fewest blocks for a decision: in general, and if fewer than MIN_SETS sets of nodes ran the blocks.
MIN_BLOCKS, MIN_BLOCKS_ON_FEW_NODES = 3, 6
#: Fewest sets of nodes from which a conclusion is about all nodes of their kind, not only about these nodes.
MIN_SETS = 3
#: Two strategies are equal if the interval of their time ratio is between 1 / (1 + EQUAL) and 1 + EQUAL.
EQUAL = 0.03


class Look(NamedTuple):
    """Evaluation of all comparisons at one interim analysis, as arrays.

    A log ratio is log(strategy's time / leader's time). It is NaN or infinite if unknown. Fields from `mean`
    to `rivals` have shape [..., comparisons, strategies], the others [..., comparisons].
    """

    #: Index of the leader, the fastest strategy whose score is good enough.
    leader: np.ndarray
    #: Number of blocks that contain all strategies in the comparison.
    blocks: np.ndarray
    #: Number of sets of nodes on which these blocks ran.
    sets: np.ndarray
    #: Whether fewer than MIN_SETS sets of nodes ran the blocks, so that a set ran several blocks.
    reuses_few_nodes: np.ndarray
    #: Distance of von Neumann's ratio below 1, in standard deviations: how similar successive blocks are.
    excess_similarity_sds: np.ndarray
    mean: np.ndarray
    #: Lower bound of the log ratio, from which decisions follow.
    bound: np.ndarray
    #: Lower end of the reported interval of the log ratio.
    low: np.ndarray
    high: np.ndarray
    #: Mask of the strategies that are shown to be slower than the leader.
    slower: np.ndarray
    #: Mask of the strategies in the comparison, without the leader.
    rivals: np.ndarray
    #: Upper bound on log(leader's time / rival's time), for any rival.
    at_most: np.ndarray
    decided: np.ndarray

    @property
    def fastest(self) -> np.ndarray:
        """Whether every rival is shown to be slower than the leader, shape [..., comparisons]."""
        return ~(self.rivals & ~self.slower).any(-1)

    @property
    def equal(self) -> np.ndarray:
        """Mask of the rivals whose time differs from the leader's by at most EQUAL, with 95 % confidence."""
        near = np.log1p(EQUAL)
        return self.rivals & (self.low >= -near) & (self.high <= near)


def find_fastest_index(means: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the index of the strategy with the lowest mean, of those in a mask.

    The result has shape [..., comparisons]. The index is 0 if no strategy is in the mask.

    Args:
        means: Mean log time of each strategy, shape [..., comparisons, strategies].
        mask: Strategies to choose from, of the same shape.
    """
    return np.argmin(np.where(mask & np.isfinite(means), means, np.inf), axis=-1)


def select_by_index(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the value of one strategy per comparison, shape [..., comparisons].

    Args:
        values: Value of each strategy, shape [..., comparisons, strategies].
        index: Index of a strategy, shape [..., comparisons].
    """
    return np.take_along_axis(values, index[..., None], -1)[..., 0]


def mask_incomplete_blocks(logs: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Return the log times with NaN in all blocks that lack a strategy in the comparison.

    Effects of an allocation cancel only in a block with all strategies. A strategy lacks a block if it was
    dropped before, and has returned to the comparison since.

    Args:
        logs: Log step times, shape [..., comparisons, strategies, blocks].
        active: Mask of the strategies in the comparison, shape [..., comparisons, strategies].
    """
    whole = (np.isfinite(logs) | ~active[..., None]).all(-2, keepdims=True)
    return np.where(whole & active[..., None], logs, np.nan)


def average_log_times(logs: np.ndarray) -> np.ndarray:
    """Return the mean log step time of each strategy over its blocks.

    The result has shape [..., comparisons, strategies]. It is NaN for a strategy without blocks.
    """
    is_present = np.isfinite(logs)
    with np.errstate(invalid="ignore"):
        return np.where(is_present, logs, 0.0).sum(-1) / is_present.sum(-1)


def group_by_node_set(
    logs: np.ndarray, nodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean log times per set of nodes if there are enough sets, else those per block.

    Time ratios of strategies differ by several percent between nodes. So blocks on the same nodes are no
    independent repeats for a conclusion about other nodes. With fewer than MIN_SETS sets of nodes, the
    conclusion is about these nodes alone, and each block counts.

    Args:
        logs: Log step times, shape [..., comparisons, strategies, blocks].
        nodes: Index of each block's set of nodes, shape [..., comparisons, blocks].

    Returns:
        The log times, the number of sets of nodes, and whether fewer than MIN_SETS sets ran several blocks.
    """
    is_present = np.isfinite(logs).any(-2)
    nodes = np.where(is_present, nodes, -1)
    labels = np.arange(max(nodes.max(initial=0) + 1, logs.shape[-1]))
    inside = nodes[..., None] == labels  # shape [..., comparisons, blocks, sets]
    sets = inside.any(-2).sum(-1)
    again = sets < is_present.sum(-1)
    many = again & (sets >= MIN_SETS)
    if not many.any():
        return logs, sets, again
    count = np.isfinite(logs).astype(float) @ inside
    with np.errstate(invalid="ignore"):
        means = (np.where(np.isfinite(logs), logs, 0.0) @ inside) / count
    blocks = np.pad(logs, [(0, 0)] * (logs.ndim - 1) + [(0, len(labels) - logs.shape[-1])],
                    constant_values=np.nan)  # fmt: skip
    return np.where(many[..., None, None], means, blocks), sets, again & ~many


def judge_comparisons(
    logs: np.ndarray,
    active: np.ndarray,
    admissible: np.ndarray,
    served: np.ndarray,
    started: np.ndarray,
    judged: np.ndarray,
    margin: float,
    screen: np.ndarray | float,
    nodes: np.ndarray,
    doubtful: np.ndarray | bool = False,
) -> Look:
    """Return the evaluation of some comparisons by their blocks so far.

    If few nodes ran all blocks, a block may depend on the block before it. Then a decision takes
    MIN_BLOCKS_ON_FEW_NODES blocks, a strategy is slower only if its bound exceeds the margin, and intervals
    are widened (dependence.py).

    Args:
        logs: Log step times, shape [..., comparisons, strategies, blocks]; NaN if a block lacks a strategy.
        active: Mask of the strategies that are still in the comparison.
        admissible: Mask of the strategies that may lead, because their scores are good enough.
        served: Mask of the strategies with parameter servers.
        started: Number of strategies with which each comparison began.
        judged: Mask of the comparisons to evaluate.
        margin: Share by which a rival may still be faster than the leader of a decided comparison.
        screen: Log time ratio above which a single block shows that a strategy is slower.
        nodes: Index of each block's set of nodes, shape [..., comparisons, blocks].
        doubtful: Mask of the strategies with a block that contradicts their full run. Doubtful strategies are
            never called slower.
    """
    logs = mask_incomplete_blocks(logs, active)
    blocks = np.isfinite(logs).any(-2).sum(-1)
    logs, sets, reused = group_by_node_set(logs, nodes)
    means = average_log_times(logs)
    # The fastest strategy, even if its score is not good enough to lead.
    ahead = find_fastest_index(means, active)
    may_lead = active & admissible
    leader = np.where(may_lead.any(-1), find_fastest_index(means, may_lead), ahead)
    rivals = active & (np.arange(logs.shape[-2]) != leader[..., None])
    first = np.take_along_axis(logs, leader[..., None, None], axis=-2)
    differences = moderated.compute_paired_differences(logs, first)
    mean = np.where(rivals, differences.mean, np.nan)
    counted = rivals & judged[..., None]
    differences = differences._replace(repeats=np.where(counted, differences.repeats, 0))
    variance, dof = _moderate_variances(
        differences, served | select_by_index(served, leader)[..., None]
    )
    ratio, unlike = dependence.compute_neumann_ratio(logs, active)
    wider = np.where(reused, dependence.compute_interval_widening(ratio, blocks), 1.0)[..., None]
    tails = (
        moderated.compute_alternatives_tail(rivals.sum(-1))[..., None],
        compute_reported_tail(started)[..., None],
    )
    half, reported = (
        wider * moderated.compute_half_widths(variance, dof, differences.repeats, tail)
        for tail in tails
    )
    bound = np.where(rivals, mean - half, np.inf)
    waits = reused & (
        (blocks < MIN_BLOCKS_ON_FEW_NODES)
        | ((unlike > dependence.SUSPECT_SDS) & (blocks < LOOKS[-1]))
    )
    screened = (blocks == 1)[..., None] & (mean > screen)
    least = np.where(waits, np.inf, np.where(reused, np.log1p(margin), 0.0))[..., None]
    slower = rivals & ((bound > least) | screened) & ~np.asarray(doubtful)
    at_most = np.maximum(0.0, -np.where(rivals & ~slower, bound, np.inf).min(-1))
    decided = (
        (blocks >= MIN_BLOCKS)
        & ~waits
        & (at_most <= np.log1p(margin) + 1e-12)
        & select_by_index(admissible, leader)
        & select_by_index(admissible, ahead)
    )
    low, high = mean - reported, mean + reported
    return Look(
        leader, blocks, sets, reused, unlike, mean, bound, low, high, slower, rivals, at_most, decided
    )  # fmt: skip


def _moderate_variances(
    differences: moderated.Differences, kinds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return moderated variances of paired differences, and their degrees of freedom.

    The variances of all comparisons of a study are moderated together.

    Args:
        differences: Paired differences of log times to the leader, per comparison and strategy.
        kinds: Whether parameter servers take part in each difference. The two kinds have different priors.
    """
    shape = differences.mean.shape
    flat = (*shape[:-2], -1)
    joined = moderated.Differences(*(part.reshape(flat) for part in differences))
    variance, dof = moderated.moderate_variances(joined, kinds.reshape(flat))
    return variance.reshape(shape), dof.reshape(shape)


def compute_reported_tail(started: np.ndarray) -> np.ndarray:
    """Return the error probability on each side of a reported interval.

    All intervals of a comparison hold together with 95 % confidence, at all looks and for dropped strategies
    too. The correction is for every pair of strategies, because the same blocks choose the leader.

    Args:
        started: Number of strategies with which each comparison began.
    """
    return moderated.ALPHA / (moderated.REPEATED_LOOKS * np.maximum(2, started * (started - 1)))


def mask_dropped_strategies(look: Look, decided: np.ndarray) -> np.ndarray:
    """Return the mask of the strategies that leave the comparison, because they are slower.

    A decided comparison keeps them, so that their intervals are reported. Before MIN_BLOCKS blocks the
    fastest rival stays, so that the next block still compares two strategies.

    Args:
        look: The interim analysis.
        decided: Mask of the comparisons that have ended.
    """
    near = find_fastest_index(look.mean, look.rivals)
    alone = (look.rivals & ~look.slower).sum(-1) == 0
    nearest = (look.blocks < MIN_BLOCKS) & alone
    stays = nearest[..., None] & (np.arange(look.mean.shape[-1]) == near[..., None])
    return look.slower & ~stays & ~decided[..., None]


def get_blocks_at_next_look(blocks: int) -> int | None:
    """Return the number of blocks at the first interim analysis with more than `blocks` blocks.

    Return None after the last interim analysis.
    """
    return next((n for n in LOOKS if n > blocks), None)


class InterimResult(NamedTuple):
    """Result of one round: the evaluation of open comparisons, dropped strategies and ended comparisons.

    `dropped` and `failed` have shape [..., comparisons, strategies]. `judged` and `ended` have shape
    [..., comparisons].
    """

    look: Look
    #: Mask of the comparisons that were open before the round.
    judged: np.ndarray
    #: Mask of the strategies that left a comparison because they were slower.
    dropped: np.ndarray
    #: Mask of the strategies that left a comparison because a segment failed.
    failed: np.ndarray
    #: Mask of the comparisons that ended in this round.
    ended: np.ndarray


class SequentialAnalysis:
    """Sequential analysis of all comparisons of a study: each round adds blocks, and evaluates them."""

    def __init__(
        self, served: np.ndarray, equal: np.ndarray, there: np.ndarray, margin: float
    ) -> None:
        """Start a sequential analysis without blocks.

        All arrays have shape [..., comparisons, strategies].

        Args:
            served: Mask of the strategies with parameter servers.
            equal: Mask of the strategies whose arithmetic equals DDP's.
            there: Mask of the strategies that exist. A comparison with fewer strategies is padded by False.
            margin: As in `judge_comparisons`.
        """
        self.served, self.margin = served, margin
        self.active = there.copy()
        self.admissible = equal & there
        self.started = there.sum(-1)
        self.open = self.started > 1
        #: Mask of the ended comparisons that a new score has opened again. They need no new block.
        self.again = np.zeros(self.open.shape, dtype=bool)
        self.logs = np.empty((*there.shape, 0))
        self.nodes = np.empty((*self.open.shape, 0), dtype=int)
        #: Number of blocks so far, and index of the leader at the latest look; both [..., comparisons].
        self.blocks, self.leader = np.zeros((2, *self.open.shape), dtype=int)
        #: For a strategy dropped as slower, index of the leader at that time; else -1. The shape is
        #: [..., comparisons, strategies].
        self.against = np.full(there.shape, -1)

    def advance(
        self,
        values: np.ndarray,
        new: np.ndarray,
        nodes: np.ndarray,
        disagreement: np.ndarray | float = 0.0,
        doubtful: np.ndarray | bool = False,
    ) -> InterimResult:
        """Add new blocks to the open comparisons, and evaluate these comparisons.

        Args:
            values: Log step times of the new blocks, shape [..., comparisons, strategies, blocks]. Blocks
                beyond a comparison's number of new blocks are NaN. A strategy with NaN in a new block leaves
                the comparison.
            new: Number of new blocks of each comparison.
            nodes: Index of each new block's set of nodes, shape [..., comparisons, blocks]. The same nodes
                have the same index in all calls.
            disagreement: Log ratio above which two segments of a strategy in the first block disagree. A
                strategy is not dropped after one block if its log time ratio is smaller.
            doubtful: As in `judge_comparisons`.
        """
        judged = self.open.copy()
        count = np.isfinite(values).sum(-1)
        failed = self.active & (count < new[..., None]) & judged[..., None]
        self.blocks = self.blocks + new
        self._remove_strategies(failed)
        if not self.logs.shape[-1]:
            self.started = self.active.sum(-1)
        self.logs = np.concatenate([self.logs, values], axis=-1)
        self.nodes = np.concatenate(
            [self.nodes, np.broadcast_to(nodes, (*self.open.shape, values.shape[-1]))], axis=-1
        )
        screen = np.maximum(np.log(moderated.SCREEN), disagreement)
        look = judge_comparisons(
            self.logs, self.active, self.admissible, self.served, self.started, judged, self.margin,
            screen, self.nodes, doubtful,
        )  # fmt: skip
        alone = self.active.sum(-1) <= 1
        ended = judged & (look.decided | (self.blocks >= LOOKS[-1]) | alone)
        left = mask_dropped_strategies(look, ended) & judged[..., None]
        self.leader = np.where(judged, look.leader, self.leader)
        self.against = np.where(left, look.leader[..., None], self.against)
        self.active &= ~left
        self.open &= ~ended
        self.again &= False
        return InterimResult(look, judged, left, failed, ended)

    def _remove_strategies(self, strategies: np.ndarray) -> np.ndarray:
        """Remove strategies from their comparisons, and return a mask of the strategies that return.

        A strategy returns if it was dropped as slower than a strategy that is now removed.

        Args:
            strategies: Mask of the strategies to remove, shape [..., comparisons, strategies].
        """
        beaten = (self.against >= 0) & np.take_along_axis(
            strategies, np.maximum(self.against, 0), -1
        )
        self.active = (self.active & ~strategies) | beaten
        self.against = np.where(beaten, -1, self.against)
        return beaten

    @property
    def leaders_without_score(self) -> np.ndarray:
        """Mask of the strategies that would lead an open comparison, but whose scores are unknown.

        A full run of such a strategy may change the conclusion.
        """
        means = average_log_times(mask_incomplete_blocks(self.logs, self.active))
        ahead = np.arange(means.shape[-1]) == find_fastest_index(means, self.active)[..., None]
        known = np.isfinite(means) & self.active
        return ahead & known & ~self.admissible & self.open[..., None]

    def apply_scores(self, good: np.ndarray, bad: np.ndarray) -> None:
        """Let strategies with good scores lead, and remove those with bad scores.

        A comparison that has ended is opened again if its leader is removed, or if a strategy returns.

        Args:
            good: Mask of the strategies whose scores are good enough, shape [..., comparisons, strategies].
            bad: Mask of the strategies whose scores are not, of the same shape.
        """
        self.admissible = (self.admissible | good) & ~bad
        changed = self._remove_strategies(bad).any(-1) | select_by_index(bad, self.leader)
        self.again = ~self.open & (self.blocks > 0) & changed & self.active.any(-1)
        self.open |= self.again
