"""Ranks candidates: which comes first, and what the repeats allow to claim about it.

The arithmetic works on arrays, so that a simulation can run it a hundred thousand times. Axes are [...,
candidates, repeats], with NaN for a missing repeat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.tolerance import UNUSABLE
from stratbench.statistics import moderated
from stratbench.statistics.intervals import IntervalEstimate

#: Maximum number of repeats that a study is advised to have.
MAX_REPEATS = 40
#: The share of studies in which a difference may be missed.
MISSED = 0.2


class Standings(NamedTuple):
    """Every candidate against the chosen one; ratios as logarithms, shape [..., candidates].

    `low` and `high` are infinite if there is no interval.
    """

    chosen: np.ndarray  # the index of the chosen candidate, shape [...]
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    repeats: np.ndarray
    slower: np.ndarray  # clearly slower: the interval excludes equality, and it is no near tie
    at_most: np.ndarray  # log ratio by which something may be faster than the chosen, shape [...]


def index_of_choice(means: np.ndarray, preference: np.ndarray, margin: float) -> np.ndarray:
    """Return the index of the choice, the most preferred within `margin` of the fastest.

    Among equals the fastest is chosen.

    Args:
        means: Logarithms of time or cost, shape [..., candidates].
        preference: The same shape or [candidates]; the lowest value is preferred.
        margin: Fraction by which a candidate may be slower.
    """
    behind = means - np.nanmin(means, axis=-1, keepdims=True)
    near = behind <= np.log1p(margin) + 1e-12
    order = preference + np.nan_to_num(behind) / (1 + np.log1p(margin))
    return np.argmin(np.where(near, order, np.inf), axis=-1)


def differences_from_chosen(logs: np.ndarray, chosen: np.ndarray) -> moderated.Differences:
    """Return every candidate's paired difference from the chosen one.

    Its own has no degrees of freedom.
    """
    first = np.take_along_axis(logs, chosen[..., None, None], axis=-2)
    differences = moderated.paired_differences(logs, first)
    itself = np.arange(logs.shape[-2]) == chosen[..., None]
    return differences._replace(repeats=np.where(itself, 0, differences.repeats))


def standings_against_chosen(
    differences: moderated.Differences,
    chosen: np.ndarray,
    means: np.ndarray,
    variance: np.ndarray,
    dof: np.ndarray,
    tail: float | np.ndarray,
    margin: float,
) -> Standings:
    """Return the status of candidates from paired differences, with moderated variances.

    Args:
        differences: Differences from the chosen one.
        chosen: Index of the chosen one.
        means: Mean logarithms, used without a common repeat.
        variance: Moderated variances.
        dof: Their degrees of freedom.
        tail: Probability beyond each end of an interval.
        margin: Fraction within which candidates are equal.
    """
    itself = np.arange(means.shape[-1]) == chosen[..., None]
    first = np.take_along_axis(means, chosen[..., None], axis=-1)
    mean = np.where(np.isfinite(differences.mean) & ~itself, differences.mean, means - first)
    half = moderated.half_widths(variance, dof, differences.repeats, tail)
    low, high = mean - half, mean + half
    beyond = mean > np.log1p(margin) + 1e-12
    screened = (differences.repeats == 1) & (mean >= np.log(moderated.SCREEN)) & (dof == 0)
    with_others = (differences.repeats.max(-1, keepdims=True) > 1) & screened
    slower = beyond & ((low > 0) | with_others) & ~itself
    may_lead = np.where(itself | with_others, np.inf, low)
    at_most = np.maximum(0.0, -may_lead.min(-1))
    return Standings(chosen, mean, low, high, differences.repeats, slower, at_most)


# ---------------------------------------------------------------- of candidates


@dataclass(frozen=True)
class AgainstRival:
    """The ratio of the `rival`'s objective to that of the chosen, over so many repeats."""

    rival: Candidate
    ratio: IntervalEstimate
    repeats: int
    #: `slower`, `tied` (a near tie, or no clear difference), or `unknown`.
    stand: str


@dataclass(frozen=True)
class RankingNoise:
    """Noise of a comparison's repeats, and the repeats that a similar study needs."""

    #: Standard deviation of the logarithm of a time (cost), repeats paired.
    sd: float
    candidates: int
    #: Degrees of freedom behind each difference's prior, for each repeat beyond the first.
    others: float

    def repeats_for(self, difference: float) -> int | None:
        """Return the repeats to distinguish a slower alternative in four studies of five.

        The number of repeats is fixed before. None if that takes more than MAX_REPEATS.
        """
        from scipy.special import nctdtr, stdtrit  # takes 0.2 s

        n = np.arange(3, MAX_REPEATS + 1)
        # The weight of a prior is estimated, too, and is often less than allowed: half is counted.
        dof = n - 1 + np.minimum(moderated.FEW_DOF_OF_GROUPS, self.others * (n - 1)) / 2
        needed = -stdtrit(dof, float(moderated.tail_among(self.candidates)))
        apart = np.log1p(difference) / np.sqrt(2 * self.sd**2 / n)
        enough = n[nctdtr(dof, apart, needed) <= MISSED]
        return int(enough[0]) if len(enough) else None


@dataclass(frozen=True)
class Ranking:
    """The chosen candidate and every other against it, in the order of their objectives."""

    first: Candidate
    compared: tuple[AgainstRival, ...]
    #: The share by which something may be faster (cheaper) than the chosen; None: not known.
    at_most: float | None
    #: Noise of the comparison's repeats and its study's; None if unknown.
    noise: RankingNoise | None
    #: Whether the intervals pay for further looks: the number of repeats is not known to be planned.
    looked_again: bool

    @property
    def tied(self) -> list[Candidate]:
        """The candidates that the records cannot distinguish from the chosen one."""
        return [c.rival for c in self.compared if c.stand == "tied"]

    @property
    def nearest(self) -> list[AgainstRival]:
        """The next alternative, and the next of another strategy than the choice, maybe the same."""
        others = (c for c in self.compared if c.rival.strategy != self.first.strategy)
        other = next(others, None)
        return [c for c in self.compared if c is self.compared[0] or c is other]

    @property
    def is_clear(self) -> bool:
        """Whether every alternative is clearly slower."""
        return all(c.stand == "slower" for c in self.compared)

    @property
    def repeats(self) -> int:
        """Minimum number of repeats of an interval; without an alternative, those of the chosen one."""
        with_interval = [
            c.repeats for c in self.compared if c.ratio.low is not None and not c.rival.projected
        ]
        return min(with_interval, default=len(self.first.times))

    @property
    def chance(self) -> str | None:
        """Short text on why the order may be chance, or None if repeats decide or nothing is compared."""
        if not self.compared or self.first.projected:
            return None
        if len(self.first.times) < 2:
            return f"measured in one {self.first.unit}"
        if any(c.ratio.low is None and c.stand != "slower" for c in self.compared):
            return "some rivals were measured once, or not at all"
        return None


def rankings_of_comparisons(
    studied: Sequence[Sequence[Candidate]], margin: float
) -> list[Ranking | None]:
    """The ranking of each comparison: of those of its candidates that nothing excludes.

    None if all are.

    The variances of all groups of the study are pooled, so all comparisons of a study are ranked together.
    """
    comparisons = [RankedGroup.of(differences, margin) for differences in studied]
    if not any(comparison.left for comparison in comparisons):
        return [None] * len(comparisons)
    groups = moderated.Scatter(
        *map(np.concatenate, zip(*(b.groups for b in comparisons), strict=True))
    )
    differences = moderated.Differences(
        *map(np.concatenate, zip(*(b.found for b in comparisons), strict=True))
    )
    served = np.array([c.served for comparison in comparisons for c in comparison.all], dtype=bool)
    sizes = [len(comparison.all) for comparison in comparisons]
    starts = np.cumsum([0, *sizes[:-1]])
    first = np.repeat(starts + [comparison.chosen for comparison in comparisons], sizes)
    variance, dof = moderated.moderated_by_groups(differences, groups, served, first)
    return [
        comparison.ranking(variance[start:][:size], dof[start:][:size], margin)
        if comparison.left
        else None
        for comparison, start, size in zip(comparisons, starts, sizes, strict=True)
    ]


@dataclass(frozen=True)
class RankedGroup:
    """The candidates of one model with their differences from the chosen one; arrays by candidate."""

    all: Sequence[Candidate]
    #: Indices of those that nothing excludes.
    left: list[int]
    #: The index of the chosen one; 0 if there is none.
    chosen: int
    #: The differences of those that are left from the chosen one.
    found: moderated.Differences
    groups: moderated.Scatter

    @classmethod
    def of(cls, candidates: Sequence[Candidate], margin: float) -> RankedGroup:
        """Return the comparison of candidates. Unusable records are left out of the noise."""
        left = [i for i, c in enumerate(candidates) if not c.kind]
        times = [c.times if c.kind != UNUSABLE else c.times[:0] for c in candidates]
        logs = logs_by_repeat(candidates, times)
        chosen = 0
        if left:
            comparison = [candidates[i] for i in left]
            among = index_of_choice(
                log_objectives(comparison), preference_places(comparison), margin
            )
            chosen = left[int(among)]
        differences = differences_from_chosen(logs, np.array(chosen))
        out = np.array([bool(c.kind) for c in candidates], dtype=bool)
        differences = differences._replace(repeats=np.where(out, 0, differences.repeats))
        return cls(candidates, left, chosen, differences, moderated.scatter_of_groups(logs))

    def ranking(self, variance: np.ndarray, dof: np.ndarray, margin: float) -> Ranking:
        """Return the ranking, from moderated variances of the differences.

        Args:
            variance: Moderated variances.
            dof: Their degrees of freedom.
            margin: Fraction within which candidates are equal.
        """
        comparison = [self.all[i] for i in self.left]
        fixed = all(c.repeats_fixed for c in comparison)
        stood = standings_against_chosen(
            moderated.Differences(*(part[self.left] for part in self.found)),
            np.array(self.left.index(self.chosen)),
            log_objectives(comparison),
            variance[self.left],
            dof[self.left],
            moderated.tail_among(len(comparison), 1.0 if fixed else moderated.REPEATED_LOOKS),
            margin,
        )
        return Ranking(
            first=self.all[self.chosen],
            compared=tuple(comparisons(comparison, stood, margin)),
            at_most=float(np.expm1(stood.at_most)) if np.isfinite(stood.at_most) else None,
            noise=self.noise,
            looked_again=bool(not fixed and stood.repeats.max() > 1),
        )

    @property
    def noise(self) -> RankingNoise | None:
        """The noise of the comparison's own repeats, or None without two of a candidate."""
        groups = moderated.Scatter(*(part[self.left] for part in self.groups))
        if not groups.pooled > 0:  # nan without repeats
            return None
        others = float(groups.dof.sum()) / (max(len(c.times) for c in self.all) - 1) - 1
        return RankingNoise(math.sqrt(groups.pooled), len(self.left), max(0.0, others))


def log_objectives(comparison: Sequence[Candidate]) -> np.ndarray:
    """Return the logarithm of each candidate's objective."""
    return np.log([c.objective for c in comparison])


def logs_by_repeat(comparison: Sequence[Candidate], times: Sequence[pd.Series]) -> np.ndarray:
    """Return logarithms of the objective by repeat, shape [candidates, repeats], from times in s.

    Repeats are paired by name: a block of a verdict is not paired with a cell's repeat.
    """
    repeats = list(dict.fromkeys(repeat for series in times for repeat in series.index))
    per_second = [c.objective / c.time_s if c.time_s else np.nan for c in comparison]
    values = np.array([series.reindex(repeats).to_numpy(dtype=float) for series in times])
    return np.log(values.reshape(len(comparison), -1) * np.array(per_second)[:, None])


def preference_places(comparison: Sequence[Candidate]) -> np.ndarray:
    """Return the order of preference among equals: fewer GPUs first, then less memory."""
    # Peaks that differ by a percent or two count as equal: they are compared in steps of 3 %. A peak with a
    # finding of the audit is no reason for a preference.
    held = [c.sound_memory_bytes for c in comparison]
    steps = [round(np.log(n_bytes) / 0.03) if n_bytes else np.inf for n_bytes in held]
    keys = [(c.gpus, step) for c, step in zip(comparison, steps, strict=True)]
    places = {key: place for place, key in enumerate(sorted(set(keys)))}
    return np.array([places[key] for key in keys], dtype=float)


def comparisons(
    comparison: Sequence[Candidate], standings: Standings, margin: float
) -> Iterator[AgainstRival]:
    """Yield every alternative against the chosen one, the best first.

    Args:
        comparison: Candidates.
        standings: Their status.
        margin: Fraction within which candidates are equal.
    """
    for i in sorted(
        range(len(comparison)), key=lambda i: (comparison[i].objective, comparison[i].gpus)
    ):
        if i == int(standings.chosen):
            continue
        if comparison[i].projected or comparison[int(standings.chosen)].projected:
            yield projected_comparison(
                comparison[i], comparison[int(standings.chosen)], float(standings.mean[i]), margin
            )
            continue
        known = bool(np.isfinite(standings.low[i]))
        near = standings.mean[i] <= np.log1p(margin) + 1e-12
        stand = "slower" if standings.slower[i] else "tied" if near or known else "unknown"
        log = IntervalEstimate(
            standings.mean[i], *((standings.low[i], standings.high[i]) if known else ())
        )
        ratio = log.mapped(lambda x: float(np.exp(x)))
        yield AgainstRival(comparison[i], ratio, int(standings.repeats[i]), stand)


def projected_comparison(
    rival: Candidate, first: Candidate, mean: float, margin: float
) -> AgainstRival:
    """Return an alternative against the chosen one, if at least one of their times is projected.

    Their intervals are regarded as independent: they differ only if these do not overlap.

    Args:
        rival: The alternative.
        first: The chosen one.
        mean: Logarithm of the ratio of their objectives.
        margin: Fraction within which candidates are equal.
    """
    ratio = float(np.exp(mean))
    per_s = (
        ratio * (first.time_s or 1.0) / (rival.time_s or 1.0)
    )  # by cost it is the ratio of prices
    (low_s, high_s), (first_low_s, first_high_s) = rival.reach, first.reach
    low, high = per_s * low_s / first_high_s, per_s * high_s / first_low_s
    apart = low > 1 and ratio > 1 + margin
    return AgainstRival(rival, IntervalEstimate(ratio, low, high), 0, "slower" if apart else "tied")
