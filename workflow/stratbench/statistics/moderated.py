"""Paired comparisons from a few repeats: moderated t on logarithms.

A few repeats give a poor estimate of their own variance. So the variances of a study's comparisons are
pooled, as far as they are similar: Smyth, Linear models and empirical Bayes methods for assessing
differential expression, 2004. Everything works on arrays, so that a simulation can run it a hundred thousand
times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

#: The rate of false claims that is allowed.
ALPHA = 0.05
#: Divides ALPHA for repeated looks after further repeats, at 2, 3, 4, 5, 6, 8 and 10 of them. By simulation
#: it has to be 3.8 to 5.6.
REPEATED_LOOKS = 4.5
#: From this ratio of times on, a single common repeat is enough to call one slower.
SCREEN = 1.5
#: Something may be faster by this share before the confidence is low.
ROUGH = 0.10
#: Number of variances for a prior at all, and for full trust in it; most degrees of freedom in between.
MIN_VARIANCES, ENOUGH_VARIANCES, FEW_DOF = 6, 10, 2.0
#: The same for a prior from the variances of groups, which are there whatever is compared with what.
MIN_GROUPS, FEW_DOF_OF_GROUPS = 2, 4.0


class Differences(NamedTuple):
    """Paired differences as arrays of equal shape: mean, variance (divisor n - 1) and number n."""

    mean: np.ndarray
    variance: np.ndarray
    repeats: np.ndarray

    @property
    def dof(self) -> np.ndarray:
        """Degrees of freedom of the variances."""
        return self.repeats - 1


def paired_differences(logs: np.ndarray, others: np.ndarray) -> Differences:
    """Return the differences of `logs` from `others`, both shape [..., repeats] (broadcast).

    NaN in an input marks a repeat that is missing. The mean is NaN without a common repeat, the
    variance with fewer than two.
    """
    d = np.asarray(logs, dtype=float) - np.asarray(others, dtype=float)
    is_present = np.isfinite(d)
    n = is_present.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(is_present, d, 0.0).sum(-1) / np.where(n > 0, n, np.nan)
        squares = np.where(is_present, (d - mean[..., None]) ** 2, 0.0).sum(-1)
        variance = squares / np.where(n > 1, n - 1, np.nan)
    return Differences(mean, variance, n)


class Prior(NamedTuple):
    """A prior for variances: their common value, and its degrees of freedom."""

    dof: np.ndarray
    variance: np.ndarray


def estimate_variance_prior(
    variances: np.ndarray,
    dof: np.ndarray,
    known: np.ndarray,
    fewest: int = MIN_VARIANCES,
    few_dof: float = FEW_DOF,
) -> Prior:
    """Return the prior of variances, shape [...].

    Its `dof` is infinite if the variances differ no more than estimates of one common variance do. It is at
    most `few_dof` for fewer than ENOUGH_VARIANCES of them, and 0 for fewer than `fewest`.

    Args:
        variances: Shape [..., G].
        dof: Their degrees of freedom, shape [..., G].
        known: Mask of the variances to use, shape [..., G].
        fewest: Minimum number of variances for a prior.
        few_dof: Maximum degrees of freedom from few variances.
    """
    count = known.sum(-1)
    if np.all(count < fewest):
        return Prior(np.zeros(count.shape), np.zeros(count.shape))
    from scipy.special import digamma  # takes 0.2 s, only needed for comparisons

    # Degrees of freedom are a few different numbers: each is worked out once.
    several, place = np.unique(np.where(known, dof, 1.0), return_inverse=True)
    place, half = place.reshape(known.shape), several / 2
    logs = np.log(np.where(known, variances, 1.0))
    e = np.where(known, logs - digamma(half)[place] + np.log(half)[place], 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = e.sum(-1) / count
        scatter = np.where(known, (e - mean[..., None]) ** 2, 0.0).sum(-1) / (count - 1)
        excess = scatter - np.where(known, trigamma(half)[place], 0.0).sum(-1) / count
    spread = excess > 1e-8
    d0 = np.where(spread, 2 * trigamma_inverse(np.where(spread, excess, 1.0)), np.inf)
    finite = np.where(spread, d0, 2.0)
    correction = np.where(spread, digamma(finite / 2) - np.log(finite / 2), 0.0)
    d0 = np.where(count < ENOUGH_VARIANCES, np.minimum(d0, few_dof), d0)
    d0 = np.where(count < fewest, 0.0, d0)
    return Prior(d0, np.where(d0 > 0, np.exp(mean + correction), 0.0))


def trigamma(x: np.ndarray) -> np.ndarray:
    """Return the second derivative of log gamma; scipy's `polygamma` computes `digamma` as well."""
    from scipy.special import zeta  # as above

    return zeta(2, x)


def trigamma_inverse(y: np.ndarray) -> np.ndarray:
    """Return the x > 0 with trigamma(x) = y > 0, by Newton's method (Smyth 2004, appendix)."""
    from scipy.special import zeta  # as above

    x = 0.5 + 1.0 / np.asarray(y, dtype=float)
    for _ in range(50):
        value, slope = trigamma(x), -2 * zeta(3, x)
        step = value * (1 - value / y) / slope
        x = x + step
        if np.all(np.abs(step) <= 1e-9 * x):
            break
    return x


def moderated_variances(
    differences: Differences, kinds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return variances shrunk towards those of their kind, and their degrees of freedom.

    Both have the shape [..., G]. A kind with too few variances borrows from all kinds. Variances of 0 are not
    used for the prior. Where there is no variance the result is NaN, with 0 degrees.

    Args:
        differences: Differences of repeats.
        kinds: Whether a parameter server takes part, since servers have another variance; shape [G] or
            [..., G].
    """
    own_dof = np.maximum(differences.dof, 0)
    known = (own_dof > 0) & (np.nan_to_num(differences.variance) > 0)
    prior = estimate_prior_by_kind(differences.variance, own_dof, known, kinds)
    return shrink_variances(prior._replace(dof=np.minimum(prior.dof, 2 * own_dof + 4)), differences)


def estimate_prior_by_kind(
    variances: np.ndarray, dof: np.ndarray, known: np.ndarray, kinds: np.ndarray, **few: Any
) -> Prior:
    """Return the prior of each variance, from those of its kind, else of all kinds.

    All arrays have the shape [..., G].

    Args:
        variances: The variances.
        dof: Their degrees of freedom.
        known: Mask of the variances to use.
        kinds: Kind of each variance.
        few: Passed on to `estimate_variance_prior`.
    """
    kinds = np.broadcast_to(kinds, known.shape)
    d0, s0 = np.zeros(known.shape), np.zeros(known.shape)
    for kind in np.unique(kinds):
        same_kind = known & (kinds == kind)
        enough = same_kind.sum(-1, keepdims=True) >= ENOUGH_VARIANCES
        prior = estimate_variance_prior(variances, dof, np.where(enough, same_kind, known), **few)
        d0 = np.where(kinds == kind, prior.dof[..., None], d0)
        s0 = np.where(kinds == kind, prior.variance[..., None], s0)
    return Prior(d0, s0)


def shrink_variances(prior: Prior, differences: Differences) -> tuple[np.ndarray, np.ndarray]:
    """Variances drawn towards their `prior`, and their degrees of freedom: 0, and NaN, without repeats."""
    own_dof = np.maximum(differences.dof, 0)
    dof = np.where(own_dof > 0, prior.dof + own_dof, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = (prior.dof * prior.variance + own_dof * differences.variance) / dof
    return variance, dof


class GroupScatter(NamedTuple):
    """The variance of each group of repeats, and its degrees of freedom, which may be fractional."""

    variance: np.ndarray
    dof: np.ndarray

    @property
    def pooled_variance(self) -> np.ndarray:
        """The mean variance by degrees of freedom, shape [...], or NaN without any."""
        with np.errstate(invalid="ignore", divide="ignore"):
            squares = np.where(self.dof > 0, self.variance * self.dof, 0.0).sum(-1)
            return squares / self.dof.sum(-1)


def compute_group_scatter(logs: np.ndarray) -> GroupScatter:
    """Return the variance of each group of repeats around its mean, shape [..., groups].

    It does not depend on what the group is compared with. Effects that a repeat has in common (an allocation,
    a drift) are subtracted first, by the median of the groups, which is robust to one noisy group. `logs` has
    the shape [..., groups, repeats], with NaN for a missing repeat.
    """
    is_present = np.isfinite(logs)
    n, groups = is_present.sum(-1), is_present.sum(-2)

    def centred(x: np.ndarray) -> np.ndarray:
        return x - (np.where(is_present, x, 0.0).sum(-1) / n)[..., None]

    with np.errstate(invalid="ignore", divide="ignore"):
        apart = centred(logs)
        common = np.median(apart, -2) if is_present.all() else nanmedian_or_zero(apart)
        rest = centred(apart - common[..., None, :])
        squares = np.where(is_present, rest**2, 0.0).sum(-1)
        share = np.where(is_present, (1 - 1 / groups)[..., None, :], 0.0).sum(-1)
        dof = np.where(n > 1, share * (n - 1) / n, 0.0)
        return GroupScatter(squares / dof, dof)


def nanmedian_or_zero(values: np.ndarray) -> np.ndarray:
    """Return the median over the last axis but one, without NaN.

    Return 0 where all are.
    """
    known = np.isfinite(values)
    return np.nanmedian(np.where(known | known.any(-2, keepdims=True), values, 0.0), -2)


def moderate_variances_by_groups(
    differences: Differences, groups: GroupScatter, served: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return variances of differences shrunk towards those of the groups, and their degrees of freedom.

    All arrays have the shape [..., G]. The prior of a difference is the sum of its groups' priors. It counts
    no more than what the others know, and little if a difference has two repeats.

    Args:
        differences: Differences of group i from group `first`[i].
        groups: Variances of the groups.
        served: Groups with a parameter server.
        first: Index of the other group, on the last axis.
    """
    known = (groups.dof > 0) & (np.nan_to_num(groups.variance) > 0)
    prior = estimate_prior_by_kind(
        groups.variance, groups.dof, known, served, fewest=MIN_GROUPS, few_dof=FEW_DOF_OF_GROUPS
    )
    d0, s0 = (np.stack([part, np.take_along_axis(part, first, -1)]) for part in prior)
    own_dof = np.maximum(differences.dof, 0)
    others = np.maximum(groups.dof.sum(-1, keepdims=True) - own_dof, 0.0)
    most = np.minimum(others, np.maximum(0, 4 * own_dof - 2))
    return shrink_variances(Prior(np.minimum(d0.min(0), most), s0.sum(0)), differences)


def half_widths(
    variance: np.ndarray, dof: np.ndarray, repeats: np.ndarray, tail: Any
) -> np.ndarray:
    """Return half the width of t intervals; infinite with 0 degrees of freedom.

    Args:
        variance: Variances of the differences.
        dof: Their degrees of freedom.
        repeats: Numbers of repeats.
        tail: Probability beyond each end.
    """
    known = dof > 0
    if not known.any():
        return np.full(np.broadcast(variance, dof, repeats, tail).shape, np.inf)
    from scipy.special import stdtrit  # as above

    known, dof, tail = np.broadcast_arrays(known, dof, tail)
    quantile = np.full(known.shape, np.inf)
    quantile[known] = -stdtrit(dof[known], tail[known])
    with np.errstate(invalid="ignore", divide="ignore"):
        half = quantile * np.sqrt(variance / np.where(known, repeats, 1))
    return np.where(known, half, np.inf)


def tail_of(rivals: int | np.ndarray) -> np.ndarray:
    """Return the tail probability of an interval in a comparison with `rivals` alternatives.

    The allowed rate of false conclusions is divided between the alternatives and the interim analyses. A
    conclusion uses one end of each interval. But the same repeats also chose the candidate that the
    alternatives are compared with, so at least two alternatives count.
    """
    return ALPHA / (REPEATED_LOOKS * np.maximum(2, rivals))


def compute_decision_tail(candidates: int | np.ndarray, looks: float = 1.0) -> np.ndarray:
    """Return the tail probability of an interval in a decision among candidates.

    The repeats that decide chose the candidate to compare with as well, so every pair counts, at either end,
    and a little more. `looks`: 1 if the number of repeats was fixed before, else REPEATED_LOOKS.
    """
    return ALPHA / (looks * np.square(np.maximum(2, candidates), dtype=float))
