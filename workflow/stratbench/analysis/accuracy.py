"""Excludes candidates that lose more accuracy than allowed, and says how much the others may lose.

Repeats of a cell differ by a few tenths of a point, and a test set leaves something to chance. So a
loss is excluded where it exceeds the tolerance beyond chance, and stated where it only may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from stratbench.analysis import stats

if TYPE_CHECKING:
    from stratbench.analysis.candidates import Candidate

#: What is not compared with: training that does not work is no measure.
NO_MEASURE = ("unusable record", "does not learn")


def judge_accuracy(found: Sequence[Candidate], tolerance: float) -> None:
    """Exclude what loses more than `tolerance` points; give the others `may_lose`.

    The loss is against the most accurate class of candidates: those of equal arithmetic have the
    same accuracy but for chance, so those of one global batch are one class with one mean (with
    BatchNorm, for each number of workers), and any other is a class of its own.
    """
    for c in found:
        if c.accuracy_percent is None and not c.kind:
            c.doubts.append("its accuracy was not recorded")
    known = [c for c in found if c.accuracy_percent is not None and c.basis == "measured"]
    usable = [c for c in known if c.kind not in NO_MEASURE]
    if not usable:
        return
    classes = classes_of(usable, tolerance)
    names = [" and ".join(f"{c.strategy} on {c.gpus}" for c in members[:2]) for members in classes]
    series = [pd.concat([c.accuracies for c in m], axis=1).mean(axis=1) for m in classes]
    best = max(range(len(classes)), key=lambda i: series[i].mean())
    widths = loss_uncertainties(series, series[best])
    for members, own, width in zip(classes, series, widths, strict=True):
        lost = float(series[best].mean() - own.mean())
        if own is series[best]:
            width = 0.0
        elif not np.isfinite(width):
            width = chance_points(members[0], classes[best][0])
        for c in members:
            c.may_lose = lost + width
            if lost - width > tolerance:
                c.exclude(
                    "loses accuracy",
                    f"{own.mean():.2f} %, {lost:.2f} points less than {names[best]} "
                    f"({tolerance:g} allowed{f', {width:.2f} may be chance' if width else ''})",
                )
    for c in found:
        if c.basis != "measured":
            for like in (k for k in usable if k.accuracies is c.accuracies):
                c.may_lose = like.may_lose
                if like.kind:
                    c.exclude(like.kind, like.why)


def classes_of(usable: Sequence[Candidate], tolerance: float) -> list[list[Candidate]]:
    """Candidates of equal arithmetic together.

    One that is farther from the median of its class (of two, from the other) than tolerance and
    chance explain stands by itself, with a doubt: something is wrong with it, or with the others.
    """
    classes: dict[tuple[object, ...], list[Candidate]] = {}
    for c in usable:
        alone = ("alone", c.strategy, c.gpus)
        equal = ("equal", c.gpus if c.batchnorm else None, c.global_batch)
        classes.setdefault(equal if c.traits.equals_ddp else alone, []).append(c)
    result = []
    for members in classes.values():
        middle = float(np.median([c.accuracy_percent for c in members]))
        odd = []
        for c in members:
            off = ((c.accuracy_percent or 0.0) - middle) * (2 if len(members) == 2 else 1)
            if abs(off) > tolerance + chance_points(c, c):
                odd.append(c)
                c.doubts.append(
                    f"its accuracy differs by {abs(off):.2f} points from that of equal arithmetic"
                )
        rest = [c for c in members if c not in odd]
        result += ([rest] if rest else []) + [[c] for c in odd]
    return result


def loss_uncertainties(series: Sequence[pd.Series], best: pd.Series) -> np.ndarray:
    """How far each class's mean loss may be from its true one (95 %, one side), by the repeats.

    In points, by moderated t on differences paired by repeat; infinite without two repeats.
    """
    repeats = sorted(set(best.index).union(*(s.index for s in series)))
    values = np.array([s.reindex(repeats).to_numpy(dtype=float) for s in series])
    found = stats.paired_differences(values, best.reindex(repeats).to_numpy(dtype=float))
    itself = np.array([s is best for s in series])
    found = found._replace(repeats=np.where(itself, 0, found.repeats))
    variance, dof = stats.moderated_variances(found, np.zeros(len(series), dtype=bool))
    return stats.half_widths(variance, dof, found.repeats, stats.ALPHA)


def chance_points(one: Candidate, other: Candidate) -> float:
    """By how many points of accuracy two equally good models may differ on a finite test set.

    Half the 95 % interval of the difference of two binomial proportions, in points; that both are
    tested on the same samples narrows it, so this is the cautious side. 0 where the number of
    samples is not known.
    """
    if not one.test_samples or not other.test_samples:
        return 0.0
    shares = [(c.accuracy_percent or 0.0) / 100 for c in (one, other)]
    variances = (
        share * (1 - share) / c.test_samples for share, c in zip(shares, (one, other), strict=True)
    )
    return 100 * 1.96 * sum(variances) ** 0.5
