"""Paired comparisons from a few repeats: moderated t on logarithms.

A few repeats give a poor estimate of their own variance. So the variances of a study's comparisons are
pooled as far as they are similar: Smyth, "Linear models and empirical Bayes methods for assessing
differential expression", 2004. All functions work on arrays, so that a simulation can run them a hundred
thousand times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

#: The allowed rate of false claims.
ALPHA = 0.05
#: Divisor of ALPHA if results are analysed repeatedly, after 2, 3, 4, 5, 6, 8 and 10 repeats. By simulation
#: it must be 3.8 to 5.6.
REPEATED_LOOKS = 4.5
#: If the ratio of times is at least this, a single common repeat is enough to call a candidate slower.
SCREEN = 1.5
#: If an alternative may be faster than the choice by more than this fraction, the confidence is low.
ROUGH = 0.10
#: Minimum number of variances for the estimate of a prior (common variance).
MIN_VARIANCES = 6
#: A prior from at least this many variances has no maximum of its degrees of freedom.
ENOUGH_VARIANCES = 10
#: Maximum degrees of freedom of a prior from fewer than ENOUGH_VARIANCES variances.
FEW_DOF = 2.0
#: Minimum number of groups of repeats for the estimate of a prior from their variances.
MIN_GROUPS = 2
#: Maximum degrees of freedom of a prior from fewer than ENOUGH_VARIANCES groups.
FEW_DOF_OF_GROUPS = 4.0

#: Variances and their degrees of freedom, as arrays of equal shape.
VariancesAndDof = tuple[np.ndarray, np.ndarray]


class Differences(NamedTuple):
    """Mean, variance (divisor n - 1) and number n of paired differences, as arrays of equal shape."""

    mean: np.ndarray
    variance: np.ndarray
    repeats: np.ndarray

    @property
    def dof(self) -> np.ndarray:
        """Degrees of freedom of each difference's variance."""
        return self.repeats - 1


def compute_paired_differences(logs: np.ndarray, other_logs: np.ndarray) -> Differences:
    """Return the differences between two arrays of logarithms, paired by repeat (the last axis).

    NaN in an input marks a missing repeat. The mean is NaN without a common repeat, and the variance is NaN
    with fewer than two.

    Args:
        logs: Logarithms, shape [..., repeats].
        other_logs: Logarithms to subtract, of a shape that broadcasts to that of `logs`.
    """
    d = np.asarray(logs, dtype=float) - np.asarray(other_logs, dtype=float)
    is_present = np.isfinite(d)
    n = is_present.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(is_present, d, 0.0).sum(-1) / np.where(n > 0, n, np.nan)
        squares = np.where(is_present, (d - mean[..., None]) ** 2, 0.0).sum(-1)
        variance = squares / np.where(n > 1, n - 1, np.nan)
    return Differences(mean, variance, n)


class Prior(NamedTuple):
    """A prior to which variances are shrunk: a common variance with its degrees of freedom."""

    dof: np.ndarray
    variance: np.ndarray


def estimate_common_variance_prior(
    variances: np.ndarray,
    dof: np.ndarray,
    is_used: np.ndarray,
    min_variances: int = MIN_VARIANCES,
    max_dof_of_few: float = FEW_DOF,
) -> Prior:
    """Return the prior that variances have in common, as arrays of shape [...].

    Its `dof` is infinite if the variances differ no more than estimates of a common variance would. It is at
    most `max_dof_of_few` for fewer than ENOUGH_VARIANCES variances, and 0 for fewer than `min_variances`.

    Args:
        variances: Variances, shape [..., G].
        dof: Degrees of freedom of the variances, shape [..., G].
        is_used: Mask of the variances to use, shape [..., G].
        min_variances: Minimum number of variances for a prior.
        max_dof_of_few: Maximum degrees of freedom from few variances.
    """
    count = is_used.sum(-1)
    if np.all(count < min_variances):
        return Prior(np.zeros(count.shape), np.zeros(count.shape))
    from scipy.special import digamma  # the import of scipy takes 0.2 s

    # Many variances have the same degrees of freedom, so digamma is computed once per distinct value.
    several, place = np.unique(np.where(is_used, dof, 1.0), return_inverse=True)
    place, half = place.reshape(is_used.shape), several / 2
    logs = np.log(np.where(is_used, variances, 1.0))
    e = np.where(is_used, logs - digamma(half)[place] + np.log(half)[place], 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = e.sum(-1) / count
        scatter = np.where(is_used, (e - mean[..., None]) ** 2, 0.0).sum(-1) / (count - 1)
        excess = scatter - np.where(is_used, compute_trigamma(half)[place], 0.0).sum(-1) / count
    spread = excess > 1e-8
    d0 = np.where(spread, 2 * compute_trigamma_inverse(np.where(spread, excess, 1.0)), np.inf)
    finite = np.where(spread, d0, 2.0)
    correction = np.where(spread, digamma(finite / 2) - np.log(finite / 2), 0.0)
    d0 = np.where(count < ENOUGH_VARIANCES, np.minimum(d0, max_dof_of_few), d0)
    d0 = np.where(count < min_variances, 0.0, d0)
    return Prior(d0, np.where(d0 > 0, np.exp(mean + correction), 0.0))


def compute_trigamma(x: np.ndarray) -> np.ndarray:
    """Return the trigamma function (second derivative of log gamma), computed faster than by scipy."""
    from scipy.special import zeta  # the import of scipy takes 0.2 s

    return zeta(2, x)


def compute_trigamma_inverse(y: np.ndarray) -> np.ndarray:
    """Return the inverse of the trigamma function for values above 0.

    It is computed by Newton's method (Smyth 2004, appendix).
    """
    from scipy.special import zeta  # the import of scipy takes 0.2 s

    x = 0.5 + 1.0 / np.asarray(y, dtype=float)
    for _ in range(50):
        value, slope = compute_trigamma(x), -2 * zeta(3, x)
        step = value * (1 - value / y) / slope
        x = x + step
        if np.all(np.abs(step) <= 1e-9 * x):
            break
    return x


def shrink_variances_by_kind(differences: Differences, has_servers: np.ndarray) -> VariancesAndDof:
    """Return variances shrunk to a prior per kind of strategy, and their degrees of freedom.

    Both have the shape [..., G]. A kind with too few variances uses the prior of all kinds. Variances of 0
    are not used for the prior. Without a variance the result is NaN with 0 degrees of freedom.

    Args:
        differences: Paired differences.
        has_servers: Whether parameter servers take part, since their variances differ; shape [G] or [..., G].
    """
    own_dof = np.maximum(differences.dof, 0)
    known = (own_dof > 0) & (np.nan_to_num(differences.variance) > 0)
    prior = estimate_prior_by_kind(differences.variance, own_dof, known, has_servers)
    return shrink_variances_to_prior(
        prior._replace(dof=np.minimum(prior.dof, 2 * own_dof + 4)), differences
    )


def estimate_prior_by_kind(
    variances: np.ndarray, dof: np.ndarray, is_used: np.ndarray, kinds: np.ndarray, **limits: Any
) -> Prior:
    """Return a prior for each variance, from all variances of the same kind.

    A kind with too few variances uses those of all kinds. All arrays have the shape [..., G].

    Args:
        variances: The variances.
        dof: Degrees of freedom of the variances.
        is_used: Mask of the variances to use.
        kinds: Kind of each variance.
        limits: Further arguments of `estimate_common_variance_prior`.
    """
    kinds = np.broadcast_to(kinds, is_used.shape)
    d0, s0 = np.zeros(is_used.shape), np.zeros(is_used.shape)
    for kind in np.unique(kinds):
        same_kind = is_used & (kinds == kind)
        enough = same_kind.sum(-1, keepdims=True) >= ENOUGH_VARIANCES
        prior = estimate_common_variance_prior(
            variances, dof, np.where(enough, same_kind, is_used), **limits
        )
        d0 = np.where(kinds == kind, prior.dof[..., None], d0)
        s0 = np.where(kinds == kind, prior.variance[..., None], s0)
    return Prior(d0, s0)


def shrink_variances_to_prior(prior: Prior, differences: Differences) -> VariancesAndDof:
    """Return variances shrunk towards their prior, and their degrees of freedom.

    Without two repeats the variance is NaN with 0 degrees of freedom.
    """
    own_dof = np.maximum(differences.dof, 0)
    dof = np.where(own_dof > 0, prior.dof + own_dof, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = (prior.dof * prior.variance + own_dof * differences.variance) / dof
    return variance, dof


class GroupScatter(NamedTuple):
    """The variance between the repeats of each group, with degrees of freedom (may be fractions)."""

    variance: np.ndarray
    dof: np.ndarray

    @property
    def pooled_variance(self) -> np.ndarray:
        """Mean variance of all groups, weighted by degrees of freedom. NaN without degrees of freedom."""
        with np.errstate(invalid="ignore", divide="ignore"):
            squares = np.where(self.dof > 0, self.variance * self.dof, 0.0).sum(-1)
            return squares / self.dof.sum(-1)


def compute_variances_between_repeats(logs: np.ndarray) -> GroupScatter:
    """Return the variance between the repeats of each group, shape [..., groups].

    It does not depend on the group that it is compared with. Effects that all groups of a repeat share (an
    allocation, a drift) are subtracted first, as the median over groups, which is robust to a noisy group.

    Args:
        logs: Logarithms of times, shape [..., groups, repeats], with NaN for a missing repeat.
    """
    is_present = np.isfinite(logs)
    n, groups = is_present.sum(-1), is_present.sum(-2)

    def subtract_mean_over_repeats(x: np.ndarray) -> np.ndarray:
        return x - (np.where(is_present, x, 0.0).sum(-1) / n)[..., None]

    with np.errstate(invalid="ignore", divide="ignore"):
        apart = subtract_mean_over_repeats(logs)
        common = np.median(apart, -2) if is_present.all() else compute_nanmedian_over_groups(apart)
        rest = subtract_mean_over_repeats(apart - common[..., None, :])
        squares = np.where(is_present, rest**2, 0.0).sum(-1)
        share = np.where(is_present, (1 - 1 / groups)[..., None, :], 0.0).sum(-1)
        dof = np.where(n > 1, share * (n - 1) / n, 0.0)
        return GroupScatter(squares / dof, dof)


def compute_nanmedian_over_groups(values_of_groups: np.ndarray) -> np.ndarray:
    """Return the median over the second-last axis without NaN. Return 0 if all values are NaN."""
    known = np.isfinite(values_of_groups)
    return np.nanmedian(np.where(known | known.any(-2, keepdims=True), values_of_groups, 0.0), -2)


def shrink_variances_by_groups(
    differences: Differences,
    group_variances: GroupScatter,
    has_servers: np.ndarray,
    subtracted_group: np.ndarray,
) -> VariancesAndDof:
    """Return variances of differences between groups, shrunk to the variances within the groups.

    All arrays have the shape [..., G]. The prior of a difference is the sum of the priors of its two groups.
    The prior's degrees of freedom are limited by those of the other groups, and are few for two repeats.

    Args:
        differences: Differences of group i from group `subtracted_group`[i].
        group_variances: Variances of the groups.
        has_servers: Mask of the groups with parameter servers.
        subtracted_group: Index of the group that is subtracted, on the last axis.

    Returns:
        The shrunk variances and their degrees of freedom.
    """
    known = (group_variances.dof > 0) & (np.nan_to_num(group_variances.variance) > 0)
    prior = estimate_prior_by_kind(
        group_variances.variance,
        group_variances.dof,
        known,
        has_servers,
        min_variances=MIN_GROUPS,
        max_dof_of_few=FEW_DOF_OF_GROUPS,
    )
    d0, s0 = (np.stack([part, np.take_along_axis(part, subtracted_group, -1)]) for part in prior)
    own_dof = np.maximum(differences.dof, 0)
    others = np.maximum(group_variances.dof.sum(-1, keepdims=True) - own_dof, 0.0)
    most = np.minimum(others, np.maximum(0, 4 * own_dof - 2))
    return shrink_variances_to_prior(Prior(np.minimum(d0.min(0), most), s0.sum(0)), differences)


def compute_interval_half_widths(
    variances: np.ndarray, dof: np.ndarray, repeats: np.ndarray, tail_probability: Any
) -> np.ndarray:
    """Return the half-widths of t intervals of mean differences. Infinite with 0 degrees of freedom.

    Args:
        variances: Variances of the differences.
        dof: Degrees of freedom of the variances.
        repeats: Numbers of repeats.
        tail_probability: Probability beyond each end of an interval.
    """
    known = dof > 0
    if not known.any():
        return np.full(np.broadcast(variances, dof, repeats, tail_probability).shape, np.inf)
    from scipy.special import stdtrit  # the import of scipy takes 0.2 s

    known, dof, tail_probability = np.broadcast_arrays(known, dof, tail_probability)
    quantile = np.full(known.shape, np.inf)
    quantile[known] = -stdtrit(dof[known], tail_probability[known])
    with np.errstate(invalid="ignore", divide="ignore"):
        half = quantile * np.sqrt(variances / np.where(known, repeats, 1))
    return np.where(known, half, np.inf)


def compute_alternatives_tail_probability(num_rivals: int | np.ndarray) -> np.ndarray:
    """Return the tail probability of each interval when a leader is compared with its rivals.

    The allowed rate of false conclusions is divided among the alternatives and the interim analyses. A
    conclusion uses one end of each interval. At least two alternatives count, because the same repeats
    also selected the candidate to compare with.
    """
    return ALPHA / (REPEATED_LOOKS * np.maximum(2, num_rivals))


def compute_decision_tail_probability(
    num_candidates: int | np.ndarray, interim_looks_divisor: float = 1.0
) -> np.ndarray:
    """Return the tail probability of each interval in a decision among candidates.

    Every pair of candidates counts with both ends, because the same repeats also selected the candidate to
    compare with.

    Args:
        num_candidates: Number of candidates.
        interim_looks_divisor: 1 if the number of repeats was fixed in advance, else REPEATED_LOOKS.
    """
    return ALPHA / (interim_looks_divisor * np.square(np.maximum(2, num_candidates), dtype=float))
