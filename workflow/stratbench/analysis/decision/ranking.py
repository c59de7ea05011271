"""Ranks candidates, and computes which differences from the choice are significant.

The arithmetic works on arrays, so that a simulation can run it a hundred thousand times. Arrays have the
shape [..., candidates, repeats], with NaN for a missing repeat.
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
#: Fraction of studies that may fail to detect a real difference: one minus the power of the test.
MISSED = 0.2


class Standings(NamedTuple):
    """How all candidates compare with the chosen one, as arrays of shape [..., candidates].

    Ratios are logarithms. `low` and `high` are infinite if there is no interval.
    """

    chosen: np.ndarray  # the index of the chosen candidate, shape [...]
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    repeats: np.ndarray
    slower: np.ndarray  # whether the interval excludes equal times and the ratio exceeds the margin
    # Logarithm of the ratio by which a candidate may be faster than the chosen one, shape [...].
    max_log_lead: np.ndarray


def find_choice_index(
    log_values: np.ndarray, preference_ranks: np.ndarray, margin: float
) -> np.ndarray:
    """Return the index of the most preferred candidate within `margin` of the fastest.

    Among equally preferred candidates the fastest is chosen.

    Args:
        log_values: Logarithms of time or cost, shape [..., candidates].
        preference_ranks: The same shape or [candidates]; the lowest value is preferred.
        margin: Fraction by which a candidate may be slower.
    """
    behind = log_values - np.nanmin(log_values, axis=-1, keepdims=True)
    near = behind <= np.log1p(margin) + 1e-12
    order = preference_ranks + np.nan_to_num(behind) / (1 + np.log1p(margin))
    return np.argmin(np.where(near, order, np.inf), axis=-1)


def compute_differences_from_choice(
    log_values: np.ndarray, chosen_index: np.ndarray
) -> moderated.Differences:
    """Return the differences of all candidates from the chosen one, paired by repeat, in logarithms.

    The chosen candidate's difference from itself has no degrees of freedom.
    """
    first = np.take_along_axis(log_values, chosen_index[..., None, None], axis=-2)
    differences = moderated.compute_paired_differences(log_values, first)
    itself = np.arange(log_values.shape[-2]) == chosen_index[..., None]
    return differences._replace(repeats=np.where(itself, 0, differences.repeats))


def compare_with_choice(
    differences: moderated.Differences,
    chosen_index: np.ndarray,
    mean_logs: np.ndarray,
    variances: np.ndarray,
    dof: np.ndarray,
    tail_probability: float | np.ndarray,
    margin: float,
) -> Standings:
    """Return how all candidates compare with the chosen one, with simultaneous intervals.

    Args:
        differences: Differences from the chosen candidate.
        chosen_index: Index of the chosen candidate.
        mean_logs: Mean logarithms, for candidates without a common repeat.
        variances: Moderated variances of the differences.
        dof: Degrees of freedom of the variances.
        tail_probability: Probability beyond each end of an interval.
        margin: Fraction within which candidates are equal.
    """
    itself = np.arange(mean_logs.shape[-1]) == chosen_index[..., None]
    first = np.take_along_axis(mean_logs, chosen_index[..., None], axis=-1)
    mean = np.where(np.isfinite(differences.mean) & ~itself, differences.mean, mean_logs - first)
    half = moderated.compute_interval_half_widths(
        variances, dof, differences.repeats, tail_probability
    )
    low, high = mean - half, mean + half
    beyond = mean > np.log1p(margin) + 1e-12
    screened = (differences.repeats == 1) & (mean >= np.log(moderated.SCREEN)) & (dof == 0)
    with_others = (differences.repeats.max(-1, keepdims=True) > 1) & screened
    slower = beyond & ((low > 0) | with_others) & ~itself
    may_lead = np.where(itself | with_others, np.inf, low)
    max_lead = np.maximum(0.0, -may_lead.min(-1))
    return Standings(chosen_index, mean, low, high, differences.repeats, slower, max_lead)


# ---------------------------------------------------------------- ranking of Candidate objects


@dataclass(frozen=True)
class ComparisonWithChoice:
    """How an alternative compares with the choice: ratio of times (or costs), and its significance."""

    alternative: Candidate
    ratio: IntervalEstimate
    repeats: int
    #: `slower`, `tied` (within the margin, or not significantly different), or `unknown`.
    status: str


@dataclass(frozen=True)
class RankingNoise:
    """How much the repeats of a candidate differ, to compute how many a study needs."""

    #: Standard deviation of the logarithm of a time (or cost) between repeats.
    log_time_sd: float
    num_ranked_candidates: int
    #: Degrees of freedom that the other candidates add to a variance, per repeat beyond the first.
    prior_dof_per_repeat: float

    def compute_needed_repeats(self, difference: float) -> int | None:
        """Return the number of repeats that detects a relative difference with 80 % power.

        Args:
            difference: How much slower the alternative is, as a fraction.

        Returns:
            The number if it is fixed in advance; None if it exceeds MAX_REPEATS.
        """
        from scipy.special import nctdtr, stdtrit  # the import of scipy takes 0.2 s

        n = np.arange(3, MAX_REPEATS + 1)
        # Half of the maximum is assumed, since other candidates often add fewer degrees of freedom.
        dof = (
            n - 1 + np.minimum(moderated.FEW_DOF_OF_GROUPS, self.prior_dof_per_repeat * (n - 1)) / 2
        )
        needed = -stdtrit(
            dof, float(moderated.compute_decision_tail_probability(self.num_ranked_candidates))
        )
        apart = np.log1p(difference) / np.sqrt(2 * self.log_time_sd**2 / n)
        enough = n[nctdtr(dof, apart, needed) <= MISSED]
        return int(enough[0]) if len(enough) else None


@dataclass(frozen=True)
class Ranking:
    """The chosen candidate, and its comparison with each alternative, best alternative first."""

    chosen_candidate: Candidate
    comparisons: tuple[ComparisonWithChoice, ...]
    #: The fraction by which an alternative may be faster (or cheaper) than the choice; None if unknown.
    max_alternative_lead_fraction: float | None
    #: Noise of the repeats; None if unknown.
    repeat_noise: RankingNoise | None
    #: Whether intervals are wider because the number of repeats was not fixed in advance.
    corrects_for_interim_analyses: bool

    @property
    def alternatives_tied_with_choice(self) -> list[Candidate]:
        """The alternatives without a significant difference from the choice."""
        return [c.alternative for c in self.comparisons if c.status == "tied"]

    @property
    def comparisons_with_nearest(self) -> list[ComparisonWithChoice]:
        """Comparisons with the best alternative, and with the best one of another strategy."""
        others = (
            c for c in self.comparisons if c.alternative.strategy != self.chosen_candidate.strategy
        )
        other = next(others, None)
        return [c for c in self.comparisons if c is self.comparisons[0] or c is other]

    @property
    def is_choice_clearly_fastest(self) -> bool:
        """Whether every alternative is clearly slower than the choice."""
        return all(c.status == "slower" for c in self.comparisons)

    @property
    def min_num_compared_repeats(self) -> int:
        """Smallest number of repeats of a comparison with an interval.

        If no comparison has an interval, it is the number of the choice's repeats.
        """
        with_interval = [
            c.repeats
            for c in self.comparisons
            if c.ratio.low is not None and not c.alternative.has_projected_time
        ]
        return min(with_interval, default=len(self.chosen_candidate.times))

    @property
    def reason_ranking_may_be_chance(self) -> str | None:
        """Why the ranking may be due to chance. None with enough repeats, or nothing to compare."""
        if not self.comparisons or self.chosen_candidate.has_projected_time:
            return None
        if len(self.chosen_candidate.times) < 2:
            return f"measured in one {self.chosen_candidate.repetition_noun}"
        if any(c.ratio.low is None and c.status != "slower" for c in self.comparisons):
            return "some rivals were measured once, or not at all"
        return None


def rank_candidates_by_model(
    candidates_by_model: Sequence[Sequence[Candidate]], margin: float
) -> list[Ranking | None]:
    """Return, for each model, a ranking of the candidates that are not excluded.

    The variances of all groups of a study are pooled, so all models are ranked together.

    Returns:
        A ranking per model, or None for a model whose candidates are all excluded.
    """
    comparisons = [RankedGroup.from_candidates(same, margin) for same in candidates_by_model]
    if not any(comparison.remaining_indices for comparison in comparisons):
        return [None] * len(comparisons)
    groups = moderated.GroupScatter(
        *map(np.concatenate, zip(*(b.variances_between_repeats for b in comparisons), strict=True))
    )
    differences = moderated.Differences(
        *map(np.concatenate, zip(*(b.differences_from_choice for b in comparisons), strict=True))
    )
    served = np.array(
        [c.has_servers for comparison in comparisons for c in comparison.candidates], dtype=bool
    )
    sizes = [len(comparison.candidates) for comparison in comparisons]
    starts = np.cumsum([0, *sizes[:-1]])
    first = np.repeat(starts + [comparison.chosen_index for comparison in comparisons], sizes)
    variance, dof = moderated.shrink_variances_by_groups(differences, groups, served, first)
    return [
        comparison.build_ranking(variance[start:][:size], dof[start:][:size], margin)
        if comparison.remaining_indices
        else None
        for comparison, start, size in zip(comparisons, starts, sizes, strict=True)
    ]


@dataclass(frozen=True)
class RankedGroup:
    """The candidates of one model, with their differences from the chosen candidate as arrays."""

    candidates: Sequence[Candidate]
    #: Indices of the candidates that are not excluded.
    remaining_indices: list[int]
    #: The index of the chosen candidate; 0 if there is none.
    chosen_index: int
    #: Differences of the remaining candidates from the chosen one.
    differences_from_choice: moderated.Differences
    variances_between_repeats: moderated.GroupScatter

    @classmethod
    def from_candidates(cls, candidates: Sequence[Candidate], margin: float) -> RankedGroup:
        """Return the candidates of one model with the chosen one and their differences from it.

        Unusable records do not contribute to the noise.
        """
        left = [i for i, c in enumerate(candidates) if not c.exclusion_kind]
        times = [c.times if c.exclusion_kind != UNUSABLE else c.times[:0] for c in candidates]
        logs = compute_logs_of_cost_or_time_by_repeat(candidates, times)
        chosen = 0
        if left:
            comparison = [candidates[i] for i in left]
            among = find_choice_index(
                compute_logs_of_cost_or_time(comparison),
                rank_by_gpus_and_memory(comparison),
                margin,
            )
            chosen = left[int(among)]
        differences = compute_differences_from_choice(logs, np.array(chosen))
        out = np.array([bool(c.exclusion_kind) for c in candidates], dtype=bool)
        differences = differences._replace(repeats=np.where(out, 0, differences.repeats))
        return cls(
            candidates, left, chosen, differences, moderated.compute_variances_between_repeats(logs)
        )

    def build_ranking(self, variances: np.ndarray, dof: np.ndarray, margin: float) -> Ranking:
        """Return the ranking of the group's candidates, from moderated variances of differences.

        Args:
            variances: Moderated variances.
            dof: Degrees of freedom of the variances.
            margin: Fraction within which candidates are equal.
        """
        comparison = [self.candidates[i] for i in self.remaining_indices]
        fixed = all(c.has_planned_repeats for c in comparison)
        stood = compare_with_choice(
            moderated.Differences(
                *(part[self.remaining_indices] for part in self.differences_from_choice)
            ),
            np.array(self.remaining_indices.index(self.chosen_index)),
            compute_logs_of_cost_or_time(comparison),
            variances[self.remaining_indices],
            dof[self.remaining_indices],
            moderated.compute_decision_tail_probability(
                len(comparison), 1.0 if fixed else moderated.REPEATED_LOOKS
            ),
            margin,
        )
        return Ranking(
            chosen_candidate=self.candidates[self.chosen_index],
            comparisons=tuple(iter_comparisons(comparison, stood, margin)),
            max_alternative_lead_fraction=float(np.expm1(stood.max_log_lead))
            if np.isfinite(stood.max_log_lead)
            else None,
            repeat_noise=self.repeat_noise,
            corrects_for_interim_analyses=bool(not fixed and stood.repeats.max() > 1),
        )

    @property
    def repeat_noise(self) -> RankingNoise | None:
        """The noise of the group's repeats, or None if every candidate has one repeat."""
        groups = moderated.GroupScatter(
            *(part[self.remaining_indices] for part in self.variances_between_repeats)
        )
        if not groups.pooled_variance > 0:  # also true for NaN, the variance without repeats
            return None
        others = float(groups.dof.sum()) / (max(len(c.times) for c in self.candidates) - 1) - 1
        return RankingNoise(
            math.sqrt(groups.pooled_variance), len(self.remaining_indices), max(0.0, others)
        )


def compute_logs_of_cost_or_time(candidates: Sequence[Candidate]) -> np.ndarray:
    """Return the logarithm of each candidate's cost, or of its training time without a price."""
    return np.log([c.cost_or_time for c in candidates])


def compute_logs_of_cost_or_time_by_repeat(
    candidates: Sequence[Candidate], times_s: Sequence[pd.Series]
) -> np.ndarray:
    """Return the logarithm of each candidate's cost or time in each repeat, shape [candidates, repeats].

    Args:
        candidates: Candidates.
        times_s: Times in s of each candidate. Repeats are paired by index, so a verdict's block is not paired
            with a cell's repeat.
    """
    repeats = list(dict.fromkeys(repeat for series in times_s for repeat in series.index))
    per_second = [c.cost_or_time / c.time_s if c.time_s else np.nan for c in candidates]
    values = np.array([series.reindex(repeats).to_numpy(dtype=float) for series in times_s])
    return np.log(values.reshape(len(candidates), -1) * np.array(per_second)[:, None])


def rank_by_gpus_and_memory(candidates: Sequence[Candidate]) -> np.ndarray:
    """Return each candidate's place in the order of preference: fewest GPUs, then least memory."""
    # Peaks are rounded to steps of 3 %, since smaller differences count as equal.
    held = [c.peak_memory_bytes_unless_doubted for c in candidates]
    steps = [round(np.log(n_bytes) / 0.03) if n_bytes else np.inf for n_bytes in held]
    keys = [(c.gpus, step) for c, step in zip(candidates, steps, strict=True)]
    places = {key: place for place, key in enumerate(sorted(set(keys)))}
    return np.array([places[key] for key in keys], dtype=float)


def iter_comparisons(
    candidates: Sequence[Candidate], standings: Standings, margin: float
) -> Iterator[ComparisonWithChoice]:
    """Yield the comparison of each alternative with the choice, best alternative first.

    Args:
        candidates: Candidates.
        standings: Comparisons of the candidates with the choice.
        margin: Fraction within which candidates are equal.
    """
    for i in sorted(
        range(len(candidates)), key=lambda i: (candidates[i].cost_or_time, candidates[i].gpus)
    ):
        if i == int(standings.chosen):
            continue
        if candidates[i].has_projected_time or candidates[int(standings.chosen)].has_projected_time:
            yield compare_projected_with_choice(
                candidates[i], candidates[int(standings.chosen)], float(standings.mean[i]), margin
            )
            continue
        known = bool(np.isfinite(standings.low[i]))
        near = standings.mean[i] <= np.log1p(margin) + 1e-12
        stand = "slower" if standings.slower[i] else "tied" if near or known else "unknown"
        log = IntervalEstimate(
            standings.mean[i], *((standings.low[i], standings.high[i]) if known else ())
        )
        ratio = log.map_value_and_ends(lambda x: float(np.exp(x)))
        yield ComparisonWithChoice(candidates[i], ratio, int(standings.repeats[i]), stand)


def compare_projected_with_choice(
    alternative: Candidate, choice: Candidate, log_ratio: float, margin: float
) -> ComparisonWithChoice:
    """Return the comparison of an alternative with the choice, of which one time is projected.

    The two intervals are regarded as independent: the times differ if the intervals do not overlap.

    Args:
        alternative: The alternative.
        choice: The chosen candidate.
        log_ratio: Logarithm of the ratio of their times, or of their costs if a price is set.
        margin: Fraction within which candidates are equal.
    """
    ratio = float(np.exp(log_ratio))
    # This factor converts a ratio of times to one of costs; it is 1 without a price.
    cost_factor = ratio * (choice.time_s or 1.0) / (alternative.time_s or 1.0)
    (low_s, high_s), (own_low_s, own_high_s) = (
        alternative.training_time_range_s,
        choice.training_time_range_s,
    )
    low, high = cost_factor * low_s / own_high_s, cost_factor * high_s / own_low_s
    is_slower = low > 1 and ratio > 1 + margin
    return ComparisonWithChoice(
        alternative, IntervalEstimate(ratio, low, high), 0, "slower" if is_slower else "tied"
    )
