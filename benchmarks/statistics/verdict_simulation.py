"""Synthetic studies for the verdict's own functions: true times, noise, and what is claimed of them.

Noise of a segment's log time: allocation + strategy x allocation + drift + start of the process + within the
segment + bursts; the profiles say how much of each. `verdict.py` makes the table of error
rates, tests/extensions/verdict/test_verdict_rates.py holds its most telling rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from stratbench.extensions.verdict.block_rules import (
    compute_segment_disagreement_limit,
    count_discarded_steps,
)
from stratbench.extensions.verdict.paired import judging
from stratbench.statistics import moderated

MARGIN = 0.03


class Noise(NamedTuple):
    """Standard deviations on the log scale, and bursts."""

    allocation: float
    strategy_in_allocation: float
    process: float
    within: float
    drift: float = 0.0  # autoregressive
    trend: float = 0.0  # linear over a block
    burst: float = 0.0  # chance that one starts in a slot
    size: tuple[float, float] = (0.0, 0.0)


PROFILES = {
    "dedicated": Noise(0.02, 0.003, 0.004, 0.003, 0.002, 0.005, 0.002, (0.05, 0.3)),
    "quiet": Noise(0.04, 0.005, 0.006, 0.005, 0.005, 0.010, 0.010, (0.05, 0.3)),
    "shared": Noise(0.06, 0.010, 0.010, 0.008, 0.020, 0.030, 0.030, (0.1, 0.5)),
}


def normal_noise(percent: float) -> Noise:
    """Normal noise alone, the least conservative case, of so many percent a block value."""
    each = percent * 0.007
    return Noise(0.04, each, each, each)


#: Slots over which drift forgets, and that a burst lasts.
DRIFT_SLOTS, BURST_SLOTS = 10.0, 2.0


@dataclass
class Studies:
    """Many synthetic studies; arrays of shape [studies, comparisons, strategies], `gpus` and so on
    [comparisons].
    """

    mu: np.ndarray  # true log times
    there: np.ndarray  # strategies that fit in memory
    equal: np.ndarray  # arithmetic equals DDP's
    good: np.ndarray  # the score passes
    served: np.ndarray
    gpus: np.ndarray
    step_s: np.ndarray  # of the fastest strategy, shape [comparisons]
    scatter: np.ndarray = field(
        default_factory=lambda: np.ones(1)
    )  # a strategy's noise over the profile's

    @property
    def usable(self) -> np.ndarray:
        """Strategies that may rightly be called the fastest."""
        return self.there & self.good


def studies(
    rng: np.random.Generator,
    n: int,
    k: int,
    truth: str,
    comparisons: int = 9,
    scatter: float = 0.3,
    base_s: tuple[float, ...] = (0.125, 0.43, 0.46),
) -> Studies:
    """`n` studies of 1, 3, 6 or 9 comparisons (models x 1, 2, 4 GPUs) with `k` strategies each.

    `truth`: `all equal`, `two best equal`, `at the margin` (rivals slower by just over it), `realistic`.
    """
    shape = (n, comparisons, k)
    gpus = np.tile([1, 2, 4], 3)[:comparisons]
    base = np.repeat(base_s, 3)[:comparisons] / gpus**0.8
    served = np.broadcast_to(np.arange(k) >= k // 2, shape)
    mu = np.zeros(shape)
    everywhere = np.ones(shape, dtype=bool)
    equal, good, there = everywhere, everywhere, everywhere
    if truth == "two best equal":
        mu[..., 2:] = rng.uniform(0.1, 0.6, mu[..., 2:].shape)
    elif truth == "at the margin":
        mu[..., 1:] = np.log1p(MARGIN) + 1e-6
    elif truth == "realistic":
        mu, equal, good, there, served = _realistic(rng, shape, gpus)
    elif truth != "all equal":
        raise ValueError(truth)
    factor = np.where(served, 1.8, 1.0) * np.exp(rng.normal(0, scatter, shape))
    return Studies(mu, there, equal, good, served, gpus, base, factor)


def _realistic(rng: np.random.Generator, shape: tuple[int, ...], gpus: np.ndarray):
    """Collectives of equal arithmetic, servers about as fast as one another, one outlier of each."""
    n, comparisons, k = shape
    collectives = 4 if k >= 10 else 3
    equal = np.zeros(shape, dtype=bool)
    equal[..., :collectives] = True
    served = ~equal
    mu = np.zeros(shape)
    mu[..., 1] = rng.uniform(0.02, 0.5, (n, comparisons))
    mu[..., 2] = rng.uniform(0, 0.3, (n, comparisons))
    if collectives > 3:
        mu[..., 3] = rng.normal(0.01, 0.01, (n, comparisons))
    common = rng.uniform(-0.12, 0.10, (n, comparisons, 1))
    mu[..., collectives:] = common + rng.normal(0, 0.015, (n, comparisons, k - collectives))
    mu[..., k - 1] = rng.uniform(0.5, 1.5, (n, comparisons))
    if k > 5:  # a synchronous server
        mu[..., k - 2] = rng.uniform(0.05, 0.6, (n, comparisons))
        equal[..., k - 2] = True
    if k >= 10:
        mu[..., k - 4 : k - 2] = common + rng.uniform(0, 0.2, (n, comparisons, 2))
    alone = gpus == 1
    mu[:, alone, : k - 1] = rng.normal(0.01, 0.02, (n, alone.sum(), k - 1))
    equal[:, alone] = True
    passes = np.select([gpus == 1, gpus == 2], [1.0, 0.7], 0.45)[:, None]
    good = equal | (rng.random(shape) < passes)
    there = (rng.random(shape) >= 0.05) | (np.arange(k) == 0)
    return mu, equal, good, there, served


def block_of_segments(
    rng: np.random.Generator, s: Studies, noise: Noise, node: np.ndarray | None = None
) -> np.ndarray:
    """One block of every comparison: log times of three segments, shape [studies, comparisons, strategies,
    3].

    The third comes after the mirror, in the same allocation. `node`: what an allocation does to each
    strategy, the same in every block (all blocks on one node); None: drawn anew.
    """
    n, comparisons, k = s.mu.shape
    places = rng.permuted(np.broadcast_to(np.arange(k), s.mu.shape), axis=-1)
    slots = np.stack([places, 2 * k - 1 - places, 2 * k + places % 2], axis=-1)
    state = _environment(rng, noise, (n, comparisons), 2 * k + 2)
    between = (
        s.scatter * rng.normal(0, noise.strategy_in_allocation, s.mu.shape)
        if node is None
        else node
    )
    own = np.hypot(noise.process, noise.within)
    return (
        (s.mu + between)[..., None]
        + rng.normal(0, noise.allocation, (n, comparisons, 1, 1))
        + np.take_along_axis(state, slots.reshape(n, comparisons, -1), -1).reshape(*slots.shape)
        + s.scatter[..., None] * rng.normal(0, own, slots.shape)
    )


def _environment(
    rng: np.random.Generator, noise: Noise, shape: tuple[int, ...], slots: int
) -> np.ndarray:
    """Drift and bursts over the slots of an allocation, shape [*shape, slots]."""
    state = np.zeros((*shape, slots))
    if not (noise.drift or noise.trend or noise.burst):
        return state
    keep = np.exp(-1 / DRIFT_SLOTS)
    drift, on, size = rng.normal(0, noise.drift, shape), np.zeros(shape, bool), np.zeros(shape)
    for t in range(slots):
        drift = keep * drift + rng.normal(0, noise.drift * np.sqrt(1 - keep**2), shape)
        starts = ~on & (rng.random(shape) < noise.burst)
        size = np.where(starts, rng.uniform(*noise.size, shape), size)
        on = on | starts
        state[..., t] = drift + on * size
        on = on & (rng.random(shape) > 1 / BURST_SLOTS)
    return state + rng.normal(0, noise.trend, (*shape, 1)) * np.linspace(-1, 1, slots)


@dataclass(frozen=True)
class Costs:
    """Seconds that full cells, segments and jobs take, of `steps` and `segment` steps."""

    steps: int = 3900
    segment: int = 50
    start_full: float = 20.0
    start_segment: float = 6.0
    job: float = 30.0
    evaluations: float = 15.0

    def full(self, s: Studies) -> np.ndarray:
        """GPU-seconds of a full cell, shape [studies, comparisons, strategies]."""
        step = s.step_s[:, None] * np.exp(s.mu)
        return s.gpus[:, None] * (self.start_full + self.evaluations + self.steps * step)

    def short(self, s: Studies) -> np.ndarray:
        """GPU-seconds of a segment, the same shape."""
        step = s.step_s[:, None] * np.exp(s.mu)
        steps = self.segment + count_discarded_steps(self.segment)
        return s.gpus[:, None] * (self.start_segment + steps * step)


@dataclass
class Outcome:
    """What the verdict claimed of every comparison; shape [studies, comparisons] but for `share`
    [studies].
    """

    leader: np.ndarray
    fastest: np.ndarray
    within: np.ndarray
    at_most: np.ndarray
    covered: np.ndarray  # all intervals hold, those of dropped strategies included
    blocks: np.ndarray
    time_share: np.ndarray  # of the cost of the matrix with three repeats
    share: np.ndarray


def run(
    rng: np.random.Generator,
    s: Studies,
    noise: Noise,
    costs: Costs | None = None,
    one_node: bool = False,
    segments_as_units: bool = False,
) -> Outcome:
    """Races every study to its end, through `judging.SequentialAnalysis`. `segments_as_units`: the known
    mistake.
    """
    costs = costs or Costs()
    full, short = costs.full(s), costs.short(s)
    course = judging.SequentialAnalysis(s.served, s.equal, s.there, MARGIN)
    comparisons = course.open.shape
    node = s.scatter * rng.normal(0, noise.strategy_in_allocation, s.mu.shape) if one_node else None
    timing, training = np.zeros(comparisons), np.zeros(comparisons)
    timing += (~s.there).sum(-1) * s.gpus * costs.start_segment
    apart: list[np.ndarray] = []  # |differences| of two segments, shape [studies, ...]
    first_limits = None  # of disagreement, by the first blocks
    covered = np.ones(comparisons, dtype=bool)
    result: dict[str, np.ndarray] = {}
    while course.open.any():
        judged = course.open.copy()
        blocks = int(course.blocks.max())
        target = judging.get_block_count_at_next_analysis(blocks)
        new, began = [], course.logs.shape[-1]
        for _ in range(target - blocks):
            logs = block_of_segments(rng, s, noise, node)
            ran = course.active & judged[..., None]
            difference = np.where(ran, np.abs(logs[..., 0] - logs[..., 1]), np.nan)
            apart.append(difference.reshape(len(difference), -1))
            limits = limits_of(apart)
            first_limits = limits if first_limits is None else first_limits
            third = difference > limits[:, None, None]
            logs[..., 2] = np.where(third, logs[..., 2], np.nan)
            timing += (ran * short * (2 + third)).sum(-1)
            timing += judged * (s.gpus * costs.job + short[..., 0])
            if segments_as_units:
                new += [np.where(ran, logs[..., i], np.nan) for i in (0, 1)]
            else:
                new.append(np.where(ran, values_of_segments(logs), np.nan))
        nodes = np.arange(began, began + len(new))  # a node a block, or taken for one
        step = course.add_blocks(
            np.stack(new, -1), judged * len(new), nodes, first_limits[:, None, None]
        )
        look = step.look
        gaps = s.mu - judging.select_value_of_strategy(s.mu, look.leader)[..., None]
        holds = ~look.rivals | ((look.low <= gaps) & (gaps <= look.high))
        said = step.dropped | step.ended[..., None]
        covered &= (holds | ~said | ~np.isfinite(look.low)).all(-1)
        for name in ("leader", "is_leader_fastest", "at_most"):
            value = getattr(look, name)
            result[name] = np.where(step.ended, value, result.get(name, np.zeros_like(value)))
        wanted = course.mask_of_leaders_without_score
        training += (wanted * full).sum(-1)
        course.apply_scores(wanted & s.good, wanted & ~s.good)
    reference = np.where(
        np.arange(comparisons[1]) // 3 % 2 == 0, True, s.gpus == 1
    )  # BatchNorm: each count
    training = training + reference * full[..., 0]
    # A leader of equal arithmetic is trained, too, to check its steps; others have been, for their scores.
    own = judging.select_value_of_strategy(s.equal, result["leader"]) & ~(
        reference & (result["leader"] == 0)
    )
    training = training + own * judging.select_value_of_strategy(full, result["leader"])
    total = 3 * (full * s.there).sum((-1, -2))
    within = (result["at_most"] <= np.log1p(MARGIN) + 1e-9) & judging.select_value_of_strategy(
        course.admissible, result["leader"]
    )
    return Outcome(
        leader=result["leader"],
        fastest=result["is_leader_fastest"],
        within=within,
        at_most=result["at_most"],
        covered=covered,
        blocks=course.blocks,
        time_share=timing.sum(-1) / total,
        share=(timing + training).sum(-1) / total,
    )


@contextmanager
def _with(what: Any, **values: Any) -> Iterator[None]:
    """In the block `what` has other attributes."""
    kept = {name: getattr(what, name) for name in values}
    try:
        for name, value in values.items():
            setattr(what, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(what, name, value)


def uncorrected():
    """The known mistake of looking again and again at an interval made for one look and one rival."""
    alpha = moderated.ALPHA
    return _with(
        moderated,
        REPEATED_LOOKS=1.0,
        compute_alternatives_tail_probability=lambda rivals: np.full(np.shape(rivals), alpha),
    )


def screening_whatever_the_noise():
    """The known mistake of dropping strategies after one block without a look at how it scatters."""
    add_blocks = judging.SequentialAnalysis.add_blocks
    return _with(judging.SequentialAnalysis, add_blocks=lambda self, *of: add_blocks(self, *of[:3]))


def intervals_of_a_leader_known_before():
    """The known mistake of reporting intervals as if the same blocks had not chosen the leader."""
    tail = judging.compute_tail_of_reported_interval
    return _with(
        judging, compute_tail_of_reported_interval=lambda k: tail(k) * np.maximum(2, k) / 2
    )


def values_of_segments(logs: np.ndarray) -> np.ndarray:
    """`block_rules.compute_block_log_step_time` of many strategies; NaN for a third segment without a run."""
    two = logs[..., :2].mean(-1)
    return np.where(np.isnan(logs[..., 2]), two, np.median(logs, axis=-1))


def limits_of(apart: list[np.ndarray]) -> np.ndarray:
    """From which difference a third segment is asked for, of each study."""
    joined = np.concatenate(apart, axis=-1)
    return np.array(
        [compute_segment_disagreement_limit(row[np.isfinite(row)].tolist()) for row in joined]
    )


def rates(s: Studies, found: Outcome) -> dict[str, float]:
    """Rates in percent over all comparisons: claims, wrong ones, and what they cost."""
    best = np.where(s.usable, s.mu, np.inf).min(-1)
    gap = judging.select_value_of_strategy(s.mu, found.leader) - best
    tied = (s.usable & (s.mu <= best[..., None] + 1e-12)).sum(-1) > 1
    wrong_fastest = found.fastest & ((gap > 1e-12) | tied)
    wrong_within = found.within & (gap > np.log1p(MARGIN) + 1e-9)
    beyond = gap > found.at_most + 1e-9
    return {
        "claims": 100 * found.within.mean(),
        "fastest": 100 * found.fastest.mean(),
        "wrong": 100 * (wrong_fastest | wrong_within | beyond).mean(),
        "covered": 100 * found.covered.mean(),
        "bound": 100 * float(np.median(np.expm1(found.at_most))),
        "blocks": float(found.blocks.mean()),
        "time": 100 * found.time_share.mean(),
        "cost": 100 * found.share.mean(),
    }
