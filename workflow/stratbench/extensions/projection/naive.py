"""Naive projection rules as a baseline, and the skill of a rule over the best of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

#: `weak`: a worker's batch stays; `strong`: the global batch stays.
Scaling = Literal["weak", "strong"]


@dataclass(frozen=True)
class Measured:
    """A step's time on a worker count. `nodes`: number of nodes, or None if unknown."""

    workers: int
    step_s: float
    nodes: int | None = None


#: Takes the measured counts in ascending order, the scaling and the wanted count; gives seconds.
Rule = Callable[[Sequence[Measured], Scaling, int], float]


def ideal(point: Measured, scaling: Scaling, workers: int) -> float:
    """Return seconds of a step on `workers` with perfect scaling from `point`.

    Args:
        point: Measured count.
        scaling: Weak or strong scaling.
        workers: Worker count.
    """
    return point.step_s * (point.workers / workers if scaling == "strong" else 1.0)


def perfect(points: Sequence[Measured], scaling: Scaling, workers: int) -> float:
    """Return the step time with perfect scaling from the largest count.

    Args:
        points: Measured counts.
        scaling: Weak or strong scaling.
        workers: Worker count.
    """
    return ideal(points[-1], scaling, workers)


def same_loss_per_doubling(points: Sequence[Measured], scaling: Scaling, workers: int) -> float:
    """Return the step time if each doubling loses as much as that of the two largest counts.

    Args:
        points: Measured counts.
        scaling: Weak or strong scaling.
        workers: Worker count.
    """
    if len(points) < 2:
        return perfect(points, scaling, workers)
    before, last = points[-2:]
    lost = last.step_s / ideal(before, scaling, last.workers)
    doublings = math.log2(workers / last.workers) / math.log2(last.workers / before.workers)
    return perfect(points, scaling, workers) * lost**doublings


def a_plus_b_over_n(points: Sequence[Measured], scaling: Scaling, workers: int) -> float:
    """Return T = a + b/N by least squares of relative errors, exact for two points.

    In strong scaling this is Amdahl's law, in weak scaling the volume of a ring, (N-1)/N. The result may be
    negative far beyond the counts.

    Args:
        points: Measured counts.
        scaling: Weak or strong scaling.
        workers: Worker count.
    """
    if len(points) < 2:
        return perfect(points, scaling, workers)
    import numpy as np  # takes 0.1 s, only needed for projections

    times = np.array([p.step_s for p in points])
    inverse = np.array([1 / p.workers for p in points])
    design = np.stack([np.ones(len(points)), inverse], axis=1) / times[:, None]
    a, b = np.linalg.lstsq(design, np.ones(len(points)), rcond=None)[0]
    return float(a + b / workers)


RULES: dict[str, Rule] = {
    "perfect": perfect,
    "same loss per doubling": same_loss_per_doubling,
    "a + b/N": a_plus_b_over_n,
}


def log_error(projected_s: float, measured_s: float) -> float:
    """ln(projected / measured).

    A time that is not above zero counts as a thousandth of the measured.
    """
    return math.log(max(projected_s / measured_s, 1e-3))


def forward_errors(rule: Rule, points: Sequence[Measured], scaling: Scaling) -> dict[int, float]:
    """Return the log error at each count from the third on, projected from the smaller ones.

    Args:
        rule: The rule.
        points: Measured counts.
        scaling: Weak or strong scaling.
    """
    return {
        points[k].workers: log_error(rule(points[:k], scaling, points[k].workers), points[k].step_s)
        for k in range(2, len(points))
    }


@dataclass(frozen=True)
class Skill:
    """Skill of a rule on the study's own counts over the best naive one.

    `value`: 1 is no error at all, 0 as good as the best naive rule, below 0 worse. It is None for fewer than
    three counts, which cannot test it.
    """

    value: float | None
    best: str
    errors: dict[str, float]  # mean |ln ratio| by naive rule

    @property
    def has_any(self) -> bool:
        """Whether it is no worse than the best naive rule, as far as known."""
        return self.value is None or self.value >= 0


def skill_of(rule: Rule, points: Sequence[Measured], scaling: Scaling) -> Skill:
    """Return the skill of `rule` over the best of RULES, by `forward_errors`.

    Args:
        rule: The rule.
        points: Measured counts.
        scaling: Weak or strong scaling.
    """
    if len(points) < 3:
        return Skill(None, "a + b/N", {})
    errors = {name: _mean(forward_errors(r, points, scaling)) for name, r in RULES.items()}
    best = min(errors, key=errors.__getitem__)
    own = _mean(forward_errors(rule, points, scaling))
    if errors[best] == 0:
        return Skill(0.0 if own == 0 else -math.inf, best, errors)
    return Skill(1 - own / errors[best], best, errors)


def _mean(errors: dict[int, float]) -> float:
    return sum(map(abs, errors.values())) / len(errors)
