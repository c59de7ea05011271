"""Sequential analysis: evaluates each comparison after every few blocks, and decides when it ends.

A comparison is an experiment, model and number of workers, with several strategies. All arrays have the axes
[..., comparisons, strategies, blocks], or without the last one or two of these. Further axes in front let a
simulation run the same functions as a study. Times are natural logarithms of seconds per step. A *look* is an
evaluation of the blocks so far.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratbench.extensions.verdict.paired import dependence
from stratbench.statistics import moderated

#: Numbers of blocks after which a comparison is evaluated (looks).
LOOKS = (1, 2, 3, 4, 5, 6, 8, 10)
#: Fewest blocks for a decision: in general, and if the blocks ran repeatedly on the same few nodes.
MIN_BLOCKS, MIN_ALIKE = 3, 6
#: Fewest node sets that count as independent repeats, so that a conclusion is about all nodes of their kind.
MIN_SETS = 3
#: Two strategies are called equal if their interval is within this share, slower or faster.
EQUAL = 0.03


class Look(NamedTuple):
    """Evaluation of all comparisons at one interim analysis, as arrays.

    Ratios to the leader are logarithms. They are NaN or infinite if unknown.

    Fields from `mean` to `rivals` have shape [..., comparisons, strategies], the others [..., comparisons].
    """

    leader: np.ndarray  # index of the fastest strategy that may be chosen
    blocks: np.ndarray  # number of blocks that contain all strategies in the comparison
    sets: np.ndarray  # number of node sets that these blocks ran on
    # Whether the blocks have fewer than MIN_SETS node sets, one of them repeatedly.
    reuses_few_nodes: np.ndarray
    # Standard deviations by which neighbouring blocks are too similar.
    excess_similarity_sds: np.ndarray
    mean: np.ndarray
    bound: np.ndarray  # lower bound of the strategy's ratio, on which decisions are based
    low: np.ndarray  # lower end of the reported interval of the ratio
    high: np.ndarray
    slower: np.ndarray  # strategies shown to be slower than the leader
    rivals: np.ndarray  # strategies in the comparison, except the leader
    # Upper bound on the log ratio by which any strategy may be faster than the leader.
    at_most: np.ndarray
    decided: np.ndarray

    @property
    def fastest(self) -> np.ndarray:
        """Whether every alternative is shown to be slower than the leader, shape [..., comparisons]."""
        return ~(self.rivals & ~self.slower).any(-1)

    @property
    def equal(self) -> np.ndarray:
        """Whether a strategy's whole interval is within the share EQUAL of the leader's time."""
        near = np.log1p(EQUAL)
        return self.rivals & (self.low >= -near) & (self.high <= near)


def find_fastest_index(means: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Return the index of the lowest mean among strategies of the mask `among`.

    The result has shape [...]. The index is 0 if no strategy is in the mask.
    """
    return np.argmin(np.where(among & np.isfinite(means), means, np.inf), axis=-1)


def select_by_index(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return each comparison's value of the strategy at `index`, shape [..., comparisons]."""
    return np.take_along_axis(values, index[..., None], -1)[..., 0]


def mask_incomplete_blocks(logs: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Return the log times of blocks that contain all active strategies.

    Allocation effects cancel in such blocks. The log times of other blocks are NaN. Only a strategy that has
    come back to the comparison lacks blocks that others have.
    """
    whole = (np.isfinite(logs) | ~active[..., None]).all(-2, keepdims=True)
    return np.where(whole & active[..., None], logs, np.nan)


def average_log_times(logs: np.ndarray) -> np.ndarray:
    """Return the mean log time of each strategy over its blocks, shape [..., comparisons, strategies].

    The mean is NaN for a strategy without blocks.
    """
    is_present = np.isfinite(logs)
    with np.errstate(invalid="ignore"):
        return np.where(is_present, logs, 0.0).sum(-1) / is_present.sum(-1)


def group_by_node_set(
    logs: np.ndarray, nodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Average blocks on the same nodes if there are enough node sets.

    The node sets then count as repeats. Ratios of strategies differ by several percent between nodes. So
    blocks on the same nodes are not independent repeats of a conclusion about other nodes. With fewer than
    MIN_SETS node sets, blocks are not averaged, and the conclusion is about their nodes alone.

    Args:
        logs: Log step times, shape [..., comparisons, strategies, blocks].
        nodes: Index of each block's node set, shape [..., comparisons, blocks].

    Returns:
        The mean per node set or the blocks, the number of node sets, and whether few sets ran several blocks.
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
    """Evaluate the comparisons selected by the mask `judged`, by their blocks so far.

    If the same few nodes ran all blocks, a block may depend on its predecessor. Then a decision takes
    MIN_ALIKE blocks, only strategies beyond the margin count as slower, and intervals are widened
    (dependence.py).

    Args:
        logs: Log step times; NaN where a strategy was not in a block.
        active: Strategies that are still in the comparison.
        admissible: Strategies that may lead, because the strategies' scores are known to be good enough.
        served: Strategies with a parameter server.
        started: Number of strategies with which the comparison began.
        judged: Comparisons to evaluate.
        margin: A comparison is decided when nothing may be faster than its leader by more than this
            fraction.
        screen: Log ratio above which a single block shows that a strategy is slower.
        nodes: Node set of each block (group_by_node_set).
        doubtful: Strategies with a block that contradicts their full run. Doubtful strategies are not called
            slower.
    """
    logs = mask_incomplete_blocks(logs, active)
    blocks = np.isfinite(logs).any(-2).sum(-1)
    logs, sets, reused = group_by_node_set(logs, nodes)
    means = average_log_times(logs)
    ahead = find_fastest_index(means, active)  # the fastest, even if its score does not let it lead
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
    waits = reused & ((blocks < MIN_ALIKE) | ((unlike > dependence.SUSPECT) & (blocks < LOOKS[-1])))
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
    """Return variances moderated over all comparisons of a study, and their degrees of freedom."""
    shape = differences.mean.shape
    flat = (*shape[:-2], -1)
    joined = moderated.Differences(*(part.reshape(flat) for part in differences))
    variance, dof = moderated.moderate_variances(joined, kinds.reshape(flat))
    return variance.reshape(shape), dof.reshape(shape)


def compute_reported_tail(started: np.ndarray) -> np.ndarray:
    """Return the error probability on each side of a reported interval.

    All intervals of a comparison that began with `started` strategies hold jointly with 95 % at all looks,
    including those of dropped strategies. Every pair of strategies counts, because the same blocks chose the
    leader.
    """
    return moderated.ALPHA / (moderated.REPEATED_LOOKS * np.maximum(2, started * (started - 1)))


def mask_dropped_strategies(look: Look, decided: np.ndarray) -> np.ndarray:
    """Return a mask of strategies that leave the comparison after an interim analysis.

    Strategies leave because they are slower. A decided comparison keeps them, so that their intervals are
    reported. Below MIN_BLOCKS blocks the fastest alternative stays, so that the next blocks still compare two
    strategies.
    """
    near = find_fastest_index(look.mean, look.rivals)
    alone = (look.rivals & ~look.slower).sum(-1) == 0
    nearest = (look.blocks < MIN_BLOCKS) & alone
    stays = nearest[..., None] & (np.arange(look.mean.shape[-1]) == near[..., None])
    return look.slower & ~stays & ~decided[..., None]


def get_blocks_at_next_look(blocks: int) -> int | None:
    """Return the number of blocks at the interim analysis after the one at `blocks`.

    Return None after the last look.
    """
    return next((n for n in LOOKS if n > blocks), None)


class InterimResult(NamedTuple):
    """Result of one round: evaluations of open comparisons, and what has ended."""

    look: Look
    judged: np.ndarray  # comparisons that were open, shape [..., comparisons]
    # strategies shown to be slower, which left the comparison, shape [..., comparisons, strategies]
    dropped: np.ndarray
    failed: np.ndarray  # strategies with a failed segment, shape [..., comparisons, strategies]
    ended: np.ndarray  # comparisons that ended, shape [..., comparisons]


class SequentialAnalysis:
    """The state of all comparisons of a study between rounds; each round adds blocks."""

    def __init__(
        self, served: np.ndarray, equal: np.ndarray, there: np.ndarray, margin: float
    ) -> None:
        """Start a sequential analysis without blocks.

        All arrays have shape [..., comparisons, strategies].

        Args:
            served: Strategies with a parameter server.
            equal: Strategies whose arithmetic equals DDP's.
            there: Mask of a comparison's strategies; other places only pad the array.
            margin: As in `judge_comparisons`.
        """
        self.served, self.margin = served, margin
        self.active = there.copy()
        self.admissible = equal & there
        self.started = there.sum(-1)
        self.open = self.started > 1
        #: Comparisons that a score has reopened; they are evaluated again on the blocks so far.
        self.again = np.zeros(self.open.shape, dtype=bool)
        self.logs = np.empty((*there.shape, 0))
        self.nodes = np.empty((*self.open.shape, 0), dtype=int)
        #: Number of blocks so far, and index of the leader at the last look, shape [..., comparisons].
        self.blocks, self.leader = np.zeros((2, *self.open.shape), dtype=int)
        #: Index of the leader that a dropped strategy was slower than, else -1, shape [..., comparisons,
        #: strategies].
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
            values: Shape [..., comparisons, strategies, blocks]; NaN beyond the `new` blocks of a
                comparison, and where a strategy has no value: that strategy then leaves the comparison.
            new: Number of new blocks of each comparison.
            nodes: Node set of each of these blocks, shape [..., comparisons, blocks], with the same
                number for the same nodes in all calls.
            disagreement: Difference above which two segments of a strategy in a first block disagree; no
                screen is below it.
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
        """Remove strategies from the comparison, and return a mask of the strategies that come back.

        A strategy comes back if it was dropped for being slower than a strategy that is now removed.
        """
        beaten = (self.against >= 0) & np.take_along_axis(
            strategies, np.maximum(self.against, 0), -1
        )
        self.active = (self.active & ~strategies) | beaten
        self.against = np.where(beaten, -1, self.against)
        return beaten

    @property
    def leaders_without_score(self) -> np.ndarray:
        """Mask of the fastest strategies of open comparisons, where their scores are unknown.

        A full run of it may change the answer.
        """
        means = average_log_times(mask_incomplete_blocks(self.logs, self.active))
        ahead = np.arange(means.shape[-1]) == find_fastest_index(means, self.active)[..., None]
        known = np.isfinite(means) & self.active
        return ahead & known & ~self.admissible & self.open[..., None]

    def apply_scores(self, good: np.ndarray, bad: np.ndarray) -> None:
        """Apply scores, as masks of shape [..., comparisons, strategies]: `bad` strategies are removed."""
        self.admissible = (self.admissible | good) & ~bad
        changed = self._remove_strategies(bad).any(-1) | select_by_index(bad, self.leader)
        self.again = ~self.open & (self.blocks > 0) & changed & self.active.any(-1)
        self.open |= self.again
