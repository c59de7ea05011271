"""The naive rules that every projection is held to, and how much better than the best of them it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

#: `weak`: a worker's batch stays; `strong`: the global batch stays.
Scaling = Literal["weak", "strong"]


@dataclass(frozen=True)
class Measured:
    """A step's time on a count of workers. `nodes`: over how many nodes; None: not stated."""

    workers: int
    step_s: float
    nodes: int | None = None


#: Takes the measured counts in ascending order, the scaling and the wanted count; gives seconds.
Rule = Callable[[Sequence[Measured], Scaling, int], float]


def ideal(point: Measured, scaling: Scaling, workers: int) -> float:
    """Return seconds of a step on `workers` if nothing is lost from `point` on."""
    return point.step_s * (point.workers / workers if scaling == "strong" else 1.0)


def perfect(points: Sequence[Measured], scaling: Scaling, workers: int) -> float:
    """Return nothing is lost beyond the largest count."""
    return ideal(points[-1], scaling, workers)


def same_loss_per_doubling(points: Sequence[Measured], scaling: Scaling, workers: int) -> float:
    """Return each doubling loses the share that was lost between the two largest counts."""
    if len(points) < 2:
        return perfect(points, scaling, workers)
    before, last = points[-2:]
    lost = last.step_s / ideal(before, scaling, last.workers)
    doublings = math.log2(workers / last.workers) / math.log2(last.workers / before.workers)
    return perfect(points, scaling, workers) * lost**doublings


def a_plus_b_over_n(points: Sequence[Measured], scaling: Scaling, workers: int) -> float:
    """T = a + b/N by least squares of relative errors.

    Through both points where there are two.

    In strong scaling this is Amdahl's law, in weak scaling the volume of a ring, (N-1)/N. The result may be
    negative far beyond the counts.
    """
    if len(points) < 2:
        return perfect(points, scaling, workers)
    import numpy as np  # takes 0.1 s: not for those who project nothing

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
    """Errors at each count from the third on, projected from the smaller ones alone: count -> ln ratio."""
    return {
        points[k].workers: log_error(rule(points[:k], scaling, points[k].workers), points[k].step_s)
        for k in range(2, len(points))
    }


@dataclass(frozen=True)
class Skill:
    """How a rule did on the study's own counts beside the best naive one.

    `value`: 1 is no error at all, 0 as good as the best naive rule, below 0 worse; None where fewer than
    three counts leave nothing to hold it to.
    """

    value: float | None
    best: str
    errors: dict[str, float]  # mean |ln ratio| by naive rule

    @property
    def has_any(self) -> bool:
        """Whether it is no worse than the best naive rule, as far as that is known."""
        return self.value is None or self.value >= 0


def skill_of(rule: Rule, points: Sequence[Measured], scaling: Scaling) -> Skill:
    """Return the skill of `rule` over the best of RULES, by `forward_errors`."""
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
