"""The verdict: evaluates the strategies of a comparison by its blocks, and stops it.

A comparison is an experiment, model and number of workers, with several strategies. All arrays have the axes
[..., comparisons, strategies, blocks], [..., comparisons, strategies] or [..., comparisons], so that a
simulation runs the same functions as a study. Times are natural logarithms of seconds per step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratbench.extensions.verdict.paired import dependence
from stratbench.statistics import moderated

#: Numbers of blocks at which a comparison is evaluated; nothing is decided at others.
LOOKS = (1, 2, 3, 4, 5, 6, 8, 10)
#: No comparison is decided with fewer blocks, nor with fewer of those on nodes that come again.
MIN_BLOCKS, MIN_ALIKE = 3, 6
#: From so many node sets on they are the unit that repeats, and a claim is about all nodes of their kind.
MIN_SETS = 3
#: Two strategies are called equal if the reported interval lies within this share either way.
EQUAL = 0.03


class Look(NamedTuple):
    """A judgement of every comparison. Ratios to the leader are logarithms, NaN or infinite where unknown.

    Shape [..., comparisons, strategies] from `mean` to `rivals`, [..., comparisons] of the others.
    """

    leader: np.ndarray  # index of the fastest strategy that may be chosen
    blocks: np.ndarray  # number of blocks that count: all strategies in the comparison are in them
    sets: np.ndarray  # number of node sets that they ran on
    alike: np.ndarray  # whether they are on fewer than MIN_SETS, and one of these came again
    unlike: np.ndarray  # standard deviations by which neighbouring blocks are too similar
    mean: np.ndarray
    bound: np.ndarray  # lower bound of the strategy's ratio, which decides
    low: np.ndarray  # of the interval that is reported
    high: np.ndarray
    slower: np.ndarray  # strategies shown to be slower than the leader
    rivals: np.ndarray  # strategies in the comparison, except the leader
    at_most: np.ndarray  # upper bound on how much faster than the leader something may be
    decided: np.ndarray

    @property
    def fastest(self) -> np.ndarray:
        """Whether every alternative is slower than the leader, shape [..., comparisons]."""
        return ~(self.rivals & ~self.slower).any(-1)

    @property
    def equal(self) -> np.ndarray:
        """Whether a strategy takes as long as the leader, within EQUAL either way."""
        near = np.log1p(EQUAL)
        return self.rivals & (self.low >= -near) & (self.high <= near)


def index_of_fastest(means: np.ndarray, among: np.ndarray) -> np.ndarray:
    """The index of the lowest mean among the strategies of the mask, shape [...].

    0 if there is none.
    """
    return np.argmin(np.where(among & np.isfinite(means), means, np.inf), axis=-1)


def at(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the value of one strategy in each comparison, shape [..., comparisons]."""
    return np.take_along_axis(values, index[..., None], -1)[..., 0]


def in_common(logs: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Return the logs of the blocks that contain all active strategies; NaN elsewhere.

    Allocation effects cancel in such blocks. Only a strategy that has come back to the comparison lacks
    blocks that others have.
    """
    whole = (np.isfinite(logs) | ~active[..., None]).all(-2, keepdims=True)
    return np.where(whole & active[..., None], logs, np.nan)


def mean_logs(logs: np.ndarray) -> np.ndarray:
    """The mean of each strategy over its blocks, shape [..., comparisons, strategies].

    NaN for a strategy without blocks.
    """
    is_present = np.isfinite(logs)
    with np.errstate(invalid="ignore"):
        return np.where(is_present, logs, 0.0).sum(-1) / is_present.sum(-1)


def by_node_set(logs: np.ndarray, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the repeated values, the number of node sets, and whether few were reused.

    Strategies differ by several percent between nodes, so blocks on the same nodes are no two repeats of a
    conclusion about others. From MIN_SETS node sets on, the values are the means of each. With fewer, they
    are the blocks, and the conclusion is about their nodes alone. `nodes`, shape [..., comparisons, blocks]:
    a number from 0 for each node set.
    """
    is_present = np.isfinite(logs).any(-2)
    nodes = np.where(is_present, nodes, -1)
    labels = np.arange(max(nodes.max(initial=0) + 1, logs.shape[-1]))
    inside = nodes[..., None] == labels  # [..., comparisons, blocks, sets]
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


def judge(
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
    """Evaluate every comparison of the mask `judged` by its blocks so far.

    If few nodes were reused, blocks may depend on their predecessor, and a conclusion is about these nodes
    and hours. So it takes MIN_ALIKE blocks, only strategies beyond the margin are distinguished, and
    intervals are widened according to the dependence (dependence.py).

    Args:
        logs: NaN where a strategy was not in a block.
        active: Strategies in the comparison.
        admissible: Strategies that may lead because their score is known to be good.
        served: Strategies with a parameter server.
        started: Number of strategies with which the comparison began.
        judged: Comparisons to evaluate.
        margin: A comparison is decided when nothing may be faster than its leader by more than this
            fraction.
        screen: Log ratio from which one block shows a strategy slower.
        nodes: Node set of each block (by_node_set).
        doubtful: Strategies with a suspect block, which are not called slower.
    """
    logs = in_common(logs, active)
    blocks = np.isfinite(logs).any(-2).sum(-1)
    logs, sets, reused = by_node_set(logs, nodes)
    means = mean_logs(logs)
    ahead = index_of_fastest(means, active)  # whether or not it may be chosen
    may_lead = active & admissible
    leader = np.where(may_lead.any(-1), index_of_fastest(means, may_lead), ahead)
    rivals = active & (np.arange(logs.shape[-2]) != leader[..., None])
    first = np.take_along_axis(logs, leader[..., None, None], axis=-2)
    differences = moderated.paired_differences(logs, first)
    mean = np.where(rivals, differences.mean, np.nan)
    counted = rivals & judged[..., None]
    differences = differences._replace(repeats=np.where(counted, differences.repeats, 0))
    variance, dof = _moderated(differences, served | at(served, leader)[..., None])
    ratio, unlike = dependence.neumann_ratio(logs, active)
    wider = np.where(reused, dependence.widening(ratio, blocks), 1.0)[..., None]
    tails = moderated.tail_of(rivals.sum(-1))[..., None], reported_tail(started)[..., None]
    half, reported = (
        wider * moderated.half_widths(variance, dof, differences.repeats, tail) for tail in tails
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
        & at(admissible, leader)
        & at(admissible, ahead)
    )
    low, high = mean - reported, mean + reported
    return Look(
        leader, blocks, sets, reused, unlike, mean, bound, low, high, slower, rivals, at_most, decided
    )  # fmt: skip


def _moderated(
    differences: moderated.Differences, kinds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Variances moderated over all comparisons of a study, and their degrees of freedom."""
    shape = differences.mean.shape
    flat = (*shape[:-2], -1)
    joined = moderated.Differences(*(part.reshape(flat) for part in differences))
    variance, dof = moderated.moderated_variances(joined, kinds.reshape(flat))
    return variance.reshape(shape), dof.reshape(shape)


def reported_tail(started: np.ndarray) -> np.ndarray:
    """Return the probability that the reported intervals of a comparison leave out on each side.

    All intervals of a comparison that began with `started` strategies hold together with 95 %, at all looks,
    including those of dropped strategies. The same blocks chose the leader, so every pair of strategies
    counts.
    """
    return moderated.ALPHA / (moderated.REPEATED_LOOKS * np.maximum(2, started * (started - 1)))


def dropped(look: Look, decided: np.ndarray) -> np.ndarray:
    """Return the strategies that leave the comparison after a look, because they are slower.

    A decided comparison keeps them, for their intervals. Below MIN_BLOCKS the nearest alternative stays, so
    that the next blocks still have something to compare.
    """
    near = index_of_fastest(look.mean, look.rivals)
    alone = (look.rivals & ~look.slower).sum(-1) == 0
    nearest = (look.blocks < MIN_BLOCKS) & alone
    stays = nearest[..., None] & (np.arange(look.mean.shape[-1]) == near[..., None])
    return look.slower & ~stays & ~decided[..., None]


def next_look(blocks: int) -> int | None:
    """Return the number of blocks at the look after the one at `blocks`.

    Return None after the last.
    """
    return next((n for n in LOOKS if n > blocks), None)


class InterimResult(NamedTuple):
    """The result of one round: a look at each open comparison, and its consequences."""

    look: Look
    judged: np.ndarray  # comparisons that were open, shape [..., comparisons]
    # strategies shown to be slower, which left the comparison, shape [..., comparisons, strategies]
    dropped: np.ndarray
    failed: np.ndarray  # strategies that did not end a segment, the same shape
    ended: np.ndarray  # comparisons that ended, shape [..., comparisons]


class SequentialAnalysis:
    """The state of a study's comparisons between rounds, each of which adds blocks."""

    def __init__(
        self, served: np.ndarray, equal: np.ndarray, there: np.ndarray, margin: float
    ) -> None:
        """Start without blocks.

        All arrays have shape [..., comparisons, strategies].

        Args:
            served: Strategies with a parameter server.
            equal: Strategies whose arithmetic equals DDP's.
            there: Strategies of the comparison; others only pad the array.
            margin: See `judge`.
        """
        self.served, self.margin = served, margin
        self.active = there.copy()
        self.admissible = equal & there
        self.started = there.sum(-1)
        self.open = self.started > 1
        #: Comparisons reopened by a score; they are evaluated on the blocks already collected.
        self.again = np.zeros(self.open.shape, dtype=bool)
        self.logs = np.empty((*there.shape, 0))
        self.nodes = np.empty((*self.open.shape, 0), dtype=int)
        #: Blocks so far, and the leader at the last look, shape [..., comparisons].
        self.blocks, self.leader = np.zeros((2, *self.open.shape), dtype=int)
        #: The leader that a strategy was dropped against, -1 for none, shape [..., comparisons, strategies].
        self.against = np.full(there.shape, -1)

    def advance(
        self,
        values: np.ndarray,
        new: np.ndarray,
        nodes: np.ndarray,
        disagreement: np.ndarray | float = 0.0,
        doubtful: np.ndarray | bool = False,
    ) -> InterimResult:
        """Evaluate the open comparisons after their next blocks.

        Args:
            values: Shape [..., comparisons, strategies, blocks]; NaN beyond the `new` blocks of a
                comparison, and where a strategy has no value: that strategy then leaves the comparison.
            new: Number of new blocks of each comparison.
            nodes: Node set of each of these blocks, shape [..., comparisons, blocks], with the same
                number for the same nodes in all calls.
            disagreement: Difference from which two segments of one strategy in a first block disagree; no
                screen is below it.
            doubtful: As in `judge`.
        """
        judged = self.open.copy()
        count = np.isfinite(values).sum(-1)
        failed = self.active & (count < new[..., None]) & judged[..., None]
        self.blocks = self.blocks + new
        self._put_out(failed)
        if not self.logs.shape[-1]:
            self.started = self.active.sum(-1)
        self.logs = np.concatenate([self.logs, values], axis=-1)
        self.nodes = np.concatenate(
            [self.nodes, np.broadcast_to(nodes, (*self.open.shape, values.shape[-1]))], axis=-1
        )
        screen = np.maximum(np.log(moderated.SCREEN), disagreement)
        look = judge(
            self.logs, self.active, self.admissible, self.served, self.started, judged, self.margin,
            screen, self.nodes, doubtful,
        )  # fmt: skip
        alone = self.active.sum(-1) <= 1
        ended = judged & (look.decided | (self.blocks >= LOOKS[-1]) | alone)
        left = dropped(look, ended) & judged[..., None]
        self.leader = np.where(judged, look.leader, self.leader)
        self.against = np.where(left, look.leader[..., None], self.against)
        self.active &= ~left
        self.open &= ~ended
        self.again &= False
        return InterimResult(look, judged, left, failed, ended)

    def _put_out(self, strategies: np.ndarray) -> np.ndarray:
        """Takes strategies out of the comparison, and returns the strategies that come back.

        A strategy comes back if it was dropped for being slower than one of those taken out.
        """
        beaten = (self.against >= 0) & np.take_along_axis(
            strategies, np.maximum(self.against, 0), -1
        )
        self.active = (self.active & ~strategies) | beaten
        self.against = np.where(beaten, -1, self.against)
        return beaten

    @property
    def unknown(self) -> np.ndarray:
        """The fastest strategy of each open comparison, if its score is unknown.

        Its score may change the answer.
        """
        means = mean_logs(in_common(self.logs, self.active))
        ahead = np.arange(means.shape[-1]) == index_of_fastest(means, self.active)[..., None]
        known = np.isfinite(means) & self.active
        return ahead & known & ~self.admissible & self.open[..., None]

    def learn(self, good: np.ndarray, bad: np.ndarray) -> None:
        """Records scores: strategies that lose too much are out; shape [..., comparisons, strategies]."""
        self.admissible = (self.admissible | good) & ~bad
        changed = self._put_out(bad).any(-1) | at(bad, self.leader)
        self.again = ~self.open & (self.blocks > 0) & changed & self.active.any(-1)
        self.open |= self.again
