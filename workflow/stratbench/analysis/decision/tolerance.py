"""Excludes candidates whose score is worse than allowed, and bounds the loss of the others.

Repeats of a cell differ a little, and the finite test set adds chance. So a candidate is excluded if its loss
exceeds the tolerance beyond chance; a loss that only may exceed it is stated.
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

#: Excludes a candidate whose record is no measurement.
UNUSABLE = "unusable record"
#: Kinds of exclusion whose scores are no reference: training that does not work.
NO_MEASURE = (UNUSABLE, "does not learn")


def judge_scores(candidates: Sequence[Candidate], constraints: Constraints) -> None:
    """Exclude candidates that lose more than tolerated; set `score_loss_upper` of the others.

    The loss is against the best class of candidates. Candidates of equal arithmetic have the same score
    except for chance, so those of one global batch form one class with one mean. With BatchNorm, or a loss
    that does not add up, there is one class per number of workers. Any other candidate is a class of its own.
    Cells that were not evaluated are assumed equal; the confidence says so.
    """
    unknown = [c for c in candidates if c.mean_score is None and not c.kind and not c.unscored]
    known = [c for c in candidates if c.mean_score is not None and not c.projected]
    usable = [c for c in known if c.kind not in NO_MEASURE]
    for c in unknown:
        if not any(shares_score(c, other) for other in usable):
            c.doubts.append(f"its {c.score.name} was not recorded")
    if not usable:
        return
    score = usable[0].score
    tolerance = constraints.tolerance_of(score)
    classes = classes_of(usable, tolerance)
    names = [" and ".join(f"{c.strategy} on {c.gpus}" for c in members[:2]) for members in classes]
    series = [pd.concat([c.scores for c in m], axis=1).mean(axis=1) for m in classes]
    best = max(range(len(classes)), key=lambda i: score.sign * series[i].mean())
    repeats = sorted(set().union(*(own.index for own in series)))
    values = np.array([own.reindex(repeats).to_numpy(dtype=float) for own in series])
    widths = loss_widths(values, np.array(best))
    for members, own, width in zip(classes, series, widths, strict=True):
        lost = score.sign * float(series[best].mean() - own.mean())
        if not np.isfinite(width):
            width = chance_difference(members[0], classes[best][0])
        for c in members:
            c.score_loss_upper, c.best_score = lost + width, names[best]
            if lost - width > tolerance:
                chance = f", {width:.{score.decimals}f} may be chance" if width else ""
                c.exclude(
                    "worse score",
                    f"{score.text(own.mean())}, {score.difference(lost)} {score.worse_word} than "
                    f"{names[best]} ({tolerance:g} allowed{chance})",
                )
    for c in unknown:
        like = next((k for k in usable if shares_score(c, k)), None)
        if like is not None:
            c.score_loss_upper, c.best_score = like.score_loss_upper, like.best_score
    for c in candidates:
        if c.projected:
            for like in (k for k in usable if k.scores is c.scores):
                c.score_loss_upper, c.best_score = like.score_loss_upper, like.best_score
                if like.kind:
                    c.exclude(like.kind, like.reason)


def shares_score(c: Candidate, other: Candidate) -> bool:
    """Return whether two candidates have equal arithmetic, so that their scores differ only by chance."""
    if not (c.traits.equals_ddp and other.traits.equals_ddp):
        return False
    return c.gpus == other.gpus if other.counts_apart else True


def classes_of(usable: Sequence[Candidate], tolerance: float) -> list[list[Candidate]]:
    """Return classes of candidates with equal arithmetic.

    A candidate that is too far from the median of its class, by tolerance and chance, is a class by itself.
    It has a caveat, because it is wrong, or the others are.
    """
    classes: dict[tuple[object, ...], list[Candidate]] = {}
    for c in usable:
        alone = ("alone", c.strategy, c.gpus)
        equal = ("equal", c.gpus if c.counts_apart else None, c.global_batch)
        classes.setdefault(equal if c.traits.equals_ddp else alone, []).append(c)
    result = []
    for members in classes.values():
        middle = float(np.median([c.mean_score for c in members]))
        odd = []
        for c in members:
            deviation = ((c.mean_score or 0.0) - middle) * (2 if len(members) == 2 else 1)
            if abs(deviation) > tolerance + chance_difference(c, c):
                odd.append(c)
                c.doubts.append(
                    f"its {c.score.name} differs by {c.score.difference(abs(deviation))} from that of equal "
                    "arithmetic"
                )
        rest = [c for c in members if c not in odd]
        result += ([rest] if rest else []) + [[c] for c in odd]
    return result


def loss_widths(values: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Return how much of each class's loss may be chance, shape [..., classes].

    95 %, one side, for all classes together. `values`: scores as shown, shape [..., classes, repeats], NaN
    for a missing repeat; `best`: the index of the best class, shape [...]. By moderated t on differences
    paired by repeat; infinite without two repeats, 0 for the best class.
    """
    first = np.take_along_axis(values, best[..., None, None], axis=-2)
    itself = np.arange(values.shape[-2]) == best[..., None]
    differences = moderated.paired_differences(values, first)
    differences = differences._replace(repeats=np.where(itself, 0, differences.repeats))
    groups = moderated.scatter_of_groups(values)
    against = best[..., None] + np.zeros(itself.shape, dtype=int)
    variance, dof = moderated.moderated_by_groups(differences, groups, np.array(False), against)
    tail = moderated.ALPHA / max(1, values.shape[-2] - 1)
    half = moderated.half_widths(variance, dof, differences.repeats, tail)
    return np.where(itself, 0.0, half)


def chance_difference(one: Candidate, other: Candidate) -> float:
    """Return the chance difference of two equally good models on a finite test set, as shown.

    It is half the 95 % interval of the difference of two means. That both are tested on the same samples
    narrows it, so this is the cautious side. 0 if a standard error is not known.
    """
    errors = [standard_error(one), standard_error(other)]
    return 0.0 if None in errors else 1.96 * math.hypot(*errors)


def standard_error(c: Candidate) -> float | None:
    """Return the standard error of a score, as shown, recorded or from its binomial variance."""
    if c.score_error is not None or not c.score.is_share or not c.test_samples:
        return c.score_error
    share = (c.mean_score or 0.0) / 100
    return 100 * math.sqrt(share * (1 - share) / c.test_samples)
