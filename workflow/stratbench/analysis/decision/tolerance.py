"""Excludes candidates whose score is worse than allowed, and bounds how much worse the others may be.

Scores vary between repeats and by the finite test set. A candidate is excluded if its difference from the
best exceeds the tolerance significantly. If the difference only may exceed the tolerance, the answer says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from stratbench.statistics import moderated

if TYPE_CHECKING:
    from stratbench.analysis.decision.candidate import Candidate
    from stratbench.analysis.decision.constraints import Constraints

#: Kind of exclusion of a candidate with a record that the audit calls unusable.
UNUSABLE = "unusable record"
#: Kinds of exclusion after which a candidate's score cannot count as the best one.
NO_MEASURE = (UNUSABLE, "does not learn")


def exclude_by_score_tolerance(candidates: Sequence[Candidate], constraints: Constraints) -> None:
    """Exclude candidates whose score is worse than tolerated. Set the maximum score loss of all others.

    Scores are compared with the best class of candidates. Candidates with equal arithmetic have the same
    expected score, so candidates with the same global batch form a class with one mean. With BatchNorm, or
    a loss that does not add up, there is one class per number of workers. Any other candidate is a class of
    its own. Cells without evaluation are assumed equal, which the confidence states.
    """
    unknown = [
        c
        for c in candidates
        if c.mean_score is None and not c.exclusion_kind and not c.skips_evaluation
    ]
    known = [c for c in candidates if c.mean_score is not None and not c.has_projected_time]
    usable = [c for c in known if c.exclusion_kind not in NO_MEASURE]
    for c in unknown:
        if not any(have_equal_training_arithmetic(c, other) for other in usable):
            c.caveats.append(f"its {c.score.name} was not recorded")
    if not usable:
        return
    score = usable[0].score
    tolerance = constraints.find_score_tolerance(score)
    classes = group_by_training_arithmetic(usable, tolerance)
    names = [" and ".join(f"{c.strategy} on {c.gpus}" for c in members[:2]) for members in classes]
    series = [pd.concat([c.scores for c in m], axis=1).mean(axis=1) for m in classes]
    best = max(range(len(classes)), key=lambda i: score.higher_is_better_sign * series[i].mean())
    repeats = sorted(set().union(*(own.index for own in series)))
    values = np.array([own.reindex(repeats).to_numpy(dtype=float) for own in series])
    widths = compute_score_loss_interval_half_widths(values, np.array(best))
    for members, own, width in zip(classes, series, widths, strict=True):
        lost = score.higher_is_better_sign * float(series[best].mean() - own.mean())
        if not np.isfinite(width):
            width = compute_score_difference_by_chance(members[0], classes[best][0])
        for c in members:
            c.max_score_loss, c.best_scoring_candidates_text = lost + width, names[best]
            if lost - width > tolerance:
                chance = f", {width:.{score.shown_decimals}f} may be chance" if width else ""
                c.exclude_from_decision(
                    "worse score",
                    f"{score.format_score(own.mean())}, {score.format_difference(lost)} "
                    f"{score.word_for_worse} than "
                    f"{names[best]} ({tolerance:g} allowed{chance})",
                )
    for c in unknown:
        like = next((k for k in usable if have_equal_training_arithmetic(c, k)), None)
        if like is not None:
            c.max_score_loss, c.best_scoring_candidates_text = (
                like.max_score_loss,
                like.best_scoring_candidates_text,
            )
    for c in candidates:
        if c.has_projected_time:
            for like in (k for k in usable if k.scores is c.scores):
                c.max_score_loss, c.best_scoring_candidates_text = (
                    like.max_score_loss,
                    like.best_scoring_candidates_text,
                )
                if like.exclusion_kind:
                    c.exclude_from_decision(like.exclusion_kind, like.exclusion_reason)


def have_equal_training_arithmetic(candidate: Candidate, other: Candidate) -> bool:
    """Return whether two candidates compute the same updates, so that scores differ only by chance."""
    if not (candidate.traits.equals_ddp and other.traits.equals_ddp):
        return False
    return candidate.gpus == other.gpus if other.score_depends_on_worker_count else True


def group_by_training_arithmetic(
    usable: Sequence[Candidate], tolerance: float
) -> list[list[Candidate]]:
    """Return classes of candidates that compute the same updates, so that scores differ by chance.

    A candidate whose score differs from the median of its class by more than tolerance and chance becomes
    a class of its own. It gets a caveat, since either it or the rest of the class is wrong.
    """
    classes: dict[tuple[object, ...], list[Candidate]] = {}
    for c in usable:
        alone = ("alone", c.strategy, c.gpus)
        equal = ("equal", c.gpus if c.score_depends_on_worker_count else None, c.global_batch)
        classes.setdefault(equal if c.traits.equals_ddp else alone, []).append(c)
    result = []
    for members in classes.values():
        middle = float(np.median([c.mean_score for c in members]))
        odd = []
        for c in members:
            deviation = ((c.mean_score or 0.0) - middle) * (2 if len(members) == 2 else 1)
            if abs(deviation) > tolerance + compute_score_difference_by_chance(c, c):
                odd.append(c)
                c.caveats.append(
                    f"its {c.score.name} differs by {c.score.format_difference(abs(deviation))} from "
                    "that of equal "
                    "arithmetic"
                )
        rest = [c for c in members if c not in odd]
        result += ([rest] if rest else []) + [[c] for c in odd]
    return result


def compute_score_loss_interval_half_widths(
    scores: np.ndarray, best_class_index: np.ndarray
) -> np.ndarray:
    """Return the half-width of each class's interval for its score loss against the best class.

    The intervals are one-sided with 95 % confidence. They hold simultaneously for all
    classes, by moderated t on paired differences.

    Args:
        scores: Scores in the shown unit, shape [..., classes, repeats], NaN for a missing repeat.
        best_class_index: Index of the best class, shape [...].

    Returns:
        The half-widths, shape [..., classes]: infinite without two repeats, 0 for the best class.
    """
    first = np.take_along_axis(scores, best_class_index[..., None, None], axis=-2)
    itself = np.arange(scores.shape[-2]) == best_class_index[..., None]
    differences = moderated.compute_paired_differences(scores, first)
    differences = differences._replace(repeats=np.where(itself, 0, differences.repeats))
    groups = moderated.compute_variances_between_repeats(scores)
    against = best_class_index[..., None] + np.zeros(itself.shape, dtype=int)
    variance, dof = moderated.shrink_variances_by_groups(
        differences, groups, np.array(False), against
    )
    tail = moderated.ALPHA / max(1, scores.shape[-2] - 1)
    half = moderated.compute_interval_half_widths(variance, dof, differences.repeats, tail)
    return np.where(itself, 0.0, half)


def compute_score_difference_by_chance(candidate: Candidate, other: Candidate) -> float:
    """Return by how much the scores of two equally good models may differ by chance.

    This is half the 95 % interval of the difference of two means, in the shown unit. It is conservative,
    since testing both models on the same samples narrows the interval. 0 if a standard error is unknown.
    """
    errors = [estimate_score_standard_error(candidate), estimate_score_standard_error(other)]
    return 0.0 if None in errors else 1.96 * math.hypot(*errors)


def estimate_score_standard_error(candidate: Candidate) -> float | None:
    """Return a score's standard error in the shown unit, as recorded or binomial."""
    score_error, test_samples = candidate.score_standard_error, candidate.test_samples
    if score_error is not None or not candidate.score.is_unit_fraction or not test_samples:
        return score_error
    share = (candidate.mean_score or 0.0) / 100
    return 100 * math.sqrt(share * (1 - share) / test_samples)
