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
#: Fewest blocks for a decision. The second number applies if the blocks ran on few nodes (see MIN_SETS),
#: since a disturbance of these nodes may last for several blocks.
MIN_BLOCKS, MIN_BLOCKS_ON_FEW_NODES = 3, 6
#: Each block runs on a set of nodes. With fewer different sets than this, a conclusion is only about these
#: nodes, and not about all nodes of their kind.
MIN_SETS = 3
#: Two strategies are equal if the interval of their time ratio is between 1 / (1 + EQUAL) and 1 + EQUAL.
EQUAL = 0.03


class InterimAnalysis(NamedTuple):
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
    #: Whether the blocks ran on fewer than MIN_SETS sets of nodes, with several blocks on one of them.
    reuses_few_nodes: np.ndarray
    #: How similar successive blocks are: 1 minus von Neumann's ratio, in standard deviations of this ratio.
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
    #: Upper bound on log(leader's time / alternative's time), over all alternatives.
    at_most: np.ndarray
    decided: np.ndarray

    @property
    def is_leader_fastest(self) -> np.ndarray:
        """Whether every alternative is shown to be slower than the leader, shape [..., comparisons]."""
        return ~(self.rivals & ~self.slower).any(-1)

    @property
    def is_equal_to_leader(self) -> np.ndarray:
        """Mask of the alternatives that are as fast as the leader, within the share EQUAL.

        The whole interval of the time ratio is within this share.
        """
        near = np.log1p(EQUAL)
        return self.rivals & (self.low >= -near) & (self.high <= near)


def find_index_of_lowest_mean(means: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the index of the strategy with the lowest mean, of those in a mask.

    The result has shape [..., comparisons]. The index is 0 if no strategy is in the mask.

    Args:
        means: Mean log time of each strategy, shape [..., comparisons, strategies].
        mask: Strategies to choose from, of the same shape.
    """
    return np.argmin(np.where(mask & np.isfinite(means), means, np.inf), axis=-1)


def select_value_of_strategy(values: np.ndarray, strategy_index: np.ndarray) -> np.ndarray:
    """Return the value of one strategy per comparison, shape [..., comparisons].

    Args:
        values: Value of each strategy, shape [..., comparisons, strategies].
        strategy_index: Index of a strategy, shape [..., comparisons].
    """
    return np.take_along_axis(values, strategy_index[..., None], -1)[..., 0]


def mask_incomplete_blocks(log_times: np.ndarray, is_active: np.ndarray) -> np.ndarray:
    """Return log times with NaN in all blocks that lack a strategy in the comparison.

    Effects of an allocation cancel only in a block with all strategies. A strategy lacks a block if it was
    dropped before, and has returned to the comparison since.

    Args:
        log_times: Log step times, shape [..., comparisons, strategies, blocks].
        is_active: Mask of the strategies in the comparison, shape [..., comparisons, strategies].
    """
    whole = (np.isfinite(log_times) | ~is_active[..., None]).all(-2, keepdims=True)
    return np.where(whole & is_active[..., None], log_times, np.nan)


def average_log_times(log_times: np.ndarray) -> np.ndarray:
    """Return the mean log step time of each strategy over its blocks.

    The result has shape [..., comparisons, strategies]. It is NaN for a strategy without blocks.
    """
    is_present = np.isfinite(log_times)
    with np.errstate(invalid="ignore"):
        return np.where(is_present, log_times, 0.0).sum(-1) / is_present.sum(-1)


class NodeSetAverages(NamedTuple):
    """Log times after blocks on the same nodes were averaged, if there are enough sets of nodes."""

    log_times: np.ndarray
    num_node_sets: np.ndarray
    reuses_few_nodes: np.ndarray


def average_by_node_set(log_times: np.ndarray, node_set_indices: np.ndarray) -> NodeSetAverages:
    """Average log times of blocks on the same nodes, if there are enough node sets.

    Time ratios of strategies differ by several percent between nodes. So blocks on the same nodes are no
    independent repeats for a conclusion about other nodes. With fewer than MIN_SETS sets of nodes, the
    conclusion is about these nodes alone, and each block counts.

    Args:
        log_times: Log step times, shape [..., comparisons, strategies, blocks].
        node_set_indices: Index of each block's set of nodes, shape [..., comparisons, blocks].

    Returns:
        The log times, the number of sets of nodes, and whether fewer than MIN_SETS sets ran several blocks.
    """
    is_present = np.isfinite(log_times).any(-2)
    node_set_indices = np.where(is_present, node_set_indices, -1)
    labels = np.arange(max(node_set_indices.max(initial=0) + 1, log_times.shape[-1]))
    inside = node_set_indices[..., None] == labels  # shape [..., comparisons, blocks, sets]
    sets = inside.any(-2).sum(-1)
    again = sets < is_present.sum(-1)
    many = again & (sets >= MIN_SETS)
    if not many.any():
        return NodeSetAverages(log_times, sets, again)
    count = np.isfinite(log_times).astype(float) @ inside
    with np.errstate(invalid="ignore"):
        means = (np.where(np.isfinite(log_times), log_times, 0.0) @ inside) / count
    blocks = np.pad(log_times, [(0, 0)] * (log_times.ndim - 1) + [(0, len(labels) - log_times.shape[-1])],
                    constant_values=np.nan)  # fmt: skip
    return NodeSetAverages(np.where(many[..., None, None], means, blocks), sets, again & ~many)


def judge_comparisons(
    log_times: np.ndarray,
    is_active: np.ndarray,
    has_good_score: np.ndarray,
    uses_servers: np.ndarray,
    num_started_strategies: np.ndarray,
    is_judged: np.ndarray,
    margin: float,
    min_dropped_log_ratio: np.ndarray | float,
    node_set_indices: np.ndarray,
    is_doubtful: np.ndarray | bool = False,
) -> InterimAnalysis:
    """Return the evaluation of some comparisons by their blocks so far.

    If few nodes ran all blocks, a block may depend on the block before it. Then a decision takes
    MIN_BLOCKS_ON_FEW_NODES blocks, a strategy is slower only if its bound exceeds the margin, and intervals
    are widened (dependence.py).

    Args:
        log_times: Log step times, shape [..., comparisons, strategies, blocks]; NaN if a block lacks the
            strategy.
        is_active: Mask of the strategies that are still in the comparison.
        has_good_score: Mask of the strategies that may lead, because their scores are good enough.
        uses_servers: Mask of the strategies with parameter servers.
        num_started_strategies: Number of strategies with which each comparison began.
        is_judged: Mask of the comparisons to evaluate.
        margin: Share by which an alternative may still be faster than the leader of a decided comparison.
        min_dropped_log_ratio: Log time ratio above which a single block shows that a strategy is slower.
        node_set_indices: Index of each block's set of nodes, shape [..., comparisons, blocks].
        is_doubtful: Mask of the strategies with a block that contradicts their full run. Doubtful strategies
            are never called slower.
    """
    log_times = mask_incomplete_blocks(log_times, is_active)
    blocks = np.isfinite(log_times).any(-2).sum(-1)
    log_times, sets, reused = average_by_node_set(log_times, node_set_indices)
    means = average_log_times(log_times)
    # The fastest strategy, even if its score is not good enough to lead.
    ahead = find_index_of_lowest_mean(means, is_active)
    may_lead = is_active & has_good_score
    leader = np.where(may_lead.any(-1), find_index_of_lowest_mean(means, may_lead), ahead)
    rivals = is_active & (np.arange(log_times.shape[-2]) != leader[..., None])
    first = np.take_along_axis(log_times, leader[..., None, None], axis=-2)
    differences = moderated.compute_paired_differences(log_times, first)
    mean = np.where(rivals, differences.mean, np.nan)
    counted = rivals & is_judged[..., None]
    differences = differences._replace(repeats=np.where(counted, differences.repeats, 0))
    variance, dof = _moderate_variances(
        differences, uses_servers | select_value_of_strategy(uses_servers, leader)[..., None]
    )
    ratio, unlike = dependence.compute_neumann_ratio_and_distance(log_times, is_active)
    wider = np.where(reused, dependence.compute_interval_widening_factor(ratio, blocks), 1.0)[
        ..., None
    ]
    tails = (
        moderated.compute_alternatives_tail_probability(rivals.sum(-1))[..., None],
        compute_tail_of_reported_interval(num_started_strategies)[..., None],
    )
    half, reported = (
        wider * moderated.compute_interval_half_widths(variance, dof, differences.repeats, tail)
        for tail in tails
    )
    bound = np.where(rivals, mean - half, np.inf)
    waits = reused & (
        (blocks < MIN_BLOCKS_ON_FEW_NODES)
        | ((unlike > dependence.SUSPECT_SDS) & (blocks < LOOKS[-1]))
    )
    screened = (blocks == 1)[..., None] & (mean > min_dropped_log_ratio)
    least = np.where(waits, np.inf, np.where(reused, np.log1p(margin), 0.0))[..., None]
    slower = rivals & ((bound > least) | screened) & ~np.asarray(is_doubtful)
    at_most = np.maximum(0.0, -np.where(rivals & ~slower, bound, np.inf).min(-1))
    decided = (
        (blocks >= MIN_BLOCKS)
        & ~waits
        & (at_most <= np.log1p(margin) + 1e-12)
        & select_value_of_strategy(has_good_score, leader)
        & select_value_of_strategy(has_good_score, ahead)
    )
    low, high = mean - reported, mean + reported
    return InterimAnalysis(
        leader, blocks, sets, reused, unlike, mean, bound, low, high, slower, rivals, at_most, decided
    )  # fmt: skip


def _moderate_variances(
    differences: moderated.Differences, kinds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return moderated variances of paired differences, and their degrees of freedom.

    Moderation shrinks the variances of all comparisons of a study together, each towards its kind's prior.

    Args:
        differences: Paired differences of log times to the leader, per comparison and strategy.
        kinds: Mask of the differences in which parameter servers take part. They have another prior.
    """
    shape = differences.mean.shape
    flat = (*shape[:-2], -1)
    joined = moderated.Differences(*(part.reshape(flat) for part in differences))
    variance, dof = moderated.shrink_variances_by_kind(joined, kinds.reshape(flat))
    return variance.reshape(shape), dof.reshape(shape)


def compute_tail_of_reported_interval(num_started_strategies: np.ndarray) -> np.ndarray:
    """Return the error probability on each side of a reported interval.

    All intervals of a comparison hold together with 95 % confidence, at all looks and for dropped strategies
    too. The correction is for every pair of strategies, because the same blocks choose the leader.

    Args:
        num_started_strategies: Number of strategies with which each comparison began.
    """
    return moderated.ALPHA / (
        moderated.REPEATED_LOOKS
        * np.maximum(2, num_started_strategies * (num_started_strategies - 1))
    )


def mask_dropped_strategies(look: InterimAnalysis, has_ended: np.ndarray) -> np.ndarray:
    """Return the mask of the strategies that leave the comparison, because they are slower.

    A decided comparison keeps them, so that their intervals are reported. Before MIN_BLOCKS blocks the
    fastest alternative stays, so that the next block still compares two strategies.

    Args:
        look: The interim analysis.
        has_ended: Mask of the comparisons that have ended.
    """
    near = find_index_of_lowest_mean(look.mean, look.rivals)
    alone = (look.rivals & ~look.slower).sum(-1) == 0
    nearest = (look.blocks < MIN_BLOCKS) & alone
    stays = nearest[..., None] & (np.arange(look.mean.shape[-1]) == near[..., None])
    return look.slower & ~stays & ~has_ended[..., None]


def get_block_count_at_next_analysis(num_blocks: int) -> int | None:
    """Return the number of blocks at the first interim analysis with more than `num_blocks` blocks.

    Return None after the last interim analysis.
    """
    return next((n for n in LOOKS if n > num_blocks), None)


class InterimResult(NamedTuple):
    """Result of one round: the evaluation of open comparisons, dropped strategies and ended comparisons.

    `dropped` and `failed` have shape [..., comparisons, strategies]. `judged` and `ended` have shape
    [..., comparisons].
    """

    look: InterimAnalysis
    #: Mask of the comparisons that this round evaluates: those that were open before it.
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
        self,
        uses_servers: np.ndarray,
        equals_ddp: np.ndarray,
        is_present: np.ndarray,
        margin: float,
    ) -> None:
        """Start a sequential analysis without blocks.

        All arrays have shape [..., comparisons, strategies].

        Args:
            uses_servers: Mask of the strategies with parameter servers.
            equals_ddp: Mask of the strategies whose arithmetic equals DDP's.
            is_present: Mask of the strategies that exist. A comparison with fewer strategies than others is
                padded by False.
            margin: As in `judge_comparisons`.
        """
        self.served, self.margin = uses_servers, margin
        self.active = is_present.copy()
        self.admissible = equals_ddp & is_present
        self.started = is_present.sum(-1)
        self.open = self.started > 1
        #: Mask of the ended comparisons that a new score has opened again. They need no new block.
        self.again = np.zeros(self.open.shape, dtype=bool)
        self.logs = np.empty((*is_present.shape, 0))
        self.nodes = np.empty((*self.open.shape, 0), dtype=int)
        #: Number of blocks, and index of the leader at the latest look; both have shape [..., comparisons].
        self.blocks, self.leader = np.zeros((2, *self.open.shape), dtype=int)
        #: For a strategy dropped as slower, index of the leader at that time; else -1. The shape is
        #: [..., comparisons, strategies].
        self.against = np.full(is_present.shape, -1)

    def add_blocks(
        self,
        log_step_times: np.ndarray,
        num_new_blocks: np.ndarray,
        node_set_indices: np.ndarray,
        disagreement_limit: np.ndarray | float = 0.0,
        is_doubtful: np.ndarray | bool = False,
    ) -> InterimResult:
        """Add new blocks to the open comparisons, and evaluate these comparisons.

        Args:
            log_step_times: Log step times of the new blocks, shape [..., comparisons, strategies, blocks].
                Blocks beyond a comparison's number of new blocks are NaN. A strategy with NaN in a new block
                leaves the comparison.
            num_new_blocks: Number of new blocks of each comparison.
            node_set_indices: Index of each new block's set of nodes, shape [..., comparisons, blocks]. The
                same nodes have the same index in all calls.
            disagreement_limit: Log ratio above which two segments of a strategy in the first block disagree.
                A strategy is not dropped after one block if its log time ratio is smaller.
            is_doubtful: As in `judge_comparisons`.
        """
        judged = self.open.copy()
        count = np.isfinite(log_step_times).sum(-1)
        failed = self.active & (count < num_new_blocks[..., None]) & judged[..., None]
        self.blocks = self.blocks + num_new_blocks
        self._remove_strategies_from_comparisons(failed)
        if not self.logs.shape[-1]:
            self.started = self.active.sum(-1)
        self.logs = np.concatenate([self.logs, log_step_times], axis=-1)
        self.nodes = np.concatenate(
            [
                self.nodes,
                np.broadcast_to(node_set_indices, (*self.open.shape, log_step_times.shape[-1])),
            ],
            axis=-1,
        )
        screen = np.maximum(np.log(moderated.SCREEN), disagreement_limit)
        look = judge_comparisons(
            self.logs, self.active, self.admissible, self.served, self.started, judged, self.margin,
            screen, self.nodes, is_doubtful,
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

    def _remove_strategies_from_comparisons(self, is_removed: np.ndarray) -> np.ndarray:
        """Remove strategies from their comparisons, and return a mask of the strategies that return.

        A strategy returns if it was dropped as slower than a strategy that is now removed.

        Args:
            is_removed: Mask of the strategies to remove, shape [..., comparisons, strategies].
        """
        beaten = (self.against >= 0) & np.take_along_axis(
            is_removed, np.maximum(self.against, 0), -1
        )
        self.active = (self.active & ~is_removed) | beaten
        self.against = np.where(beaten, -1, self.against)
        return beaten

    @property
    def mask_of_leaders_without_score(self) -> np.ndarray:
        """Mask of the strategies that would lead an open comparison, but whose scores are unknown.

        A full run of such a strategy may change the conclusion.
        """
        means = average_log_times(mask_incomplete_blocks(self.logs, self.active))
        ahead = (
            np.arange(means.shape[-1]) == find_index_of_lowest_mean(means, self.active)[..., None]
        )
        known = np.isfinite(means) & self.active
        return ahead & known & ~self.admissible & self.open[..., None]

    def apply_scores(self, has_good_score: np.ndarray, has_bad_score: np.ndarray) -> None:
        """Let strategies with good scores lead, and remove those with bad scores.

        A comparison that has ended is opened again if its leader is removed, or if a strategy returns.

        Args:
            has_good_score: Mask of the strategies whose scores are good enough, shape [..., comparisons,
                strategies].
            has_bad_score: Mask of the strategies whose scores are not, of the same shape.
        """
        self.admissible = (self.admissible | has_good_score) & ~has_bad_score
        changed = self._remove_strategies_from_comparisons(has_bad_score).any(
            -1
        ) | select_value_of_strategy(has_bad_score, self.leader)
        self.again = ~self.open & (self.blocks > 0) & changed & self.active.any(-1)
        self.open |= self.again
