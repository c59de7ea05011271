"""Defines simple (naive) rules that project step times, and compares other rules with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

#: `weak`: the batch per worker is equal on all worker counts. `strong`: the global batch is equal.
Scaling = Literal["weak", "strong"]


@dataclass(frozen=True)
class MeasuredStep:
    """Measured time of a training step on a number of workers.

    Attributes:
        workers: Number of workers.
        step_s: Seconds per global batch.
        nodes: Number of nodes, or None if unknown.
    """

    workers: int
    step_s: float
    nodes: int | None = None


#: Function of measured steps (in ascending order of workers), the scaling and a worker count. It returns the
#: projected seconds of a step.
Rule = Callable[[Sequence[MeasuredStep], Scaling, int], float]


def scale_step_time_perfectly(measured: MeasuredStep, scaling: Scaling, workers: int) -> float:
    """Return the seconds of a step by perfect scaling from a measured step.

    Args:
        measured: Measured step time.
        scaling: Weak or strong scaling.
        workers: Number of workers.
    """
    return measured.step_s * (measured.workers / workers if scaling == "strong" else 1.0)


def project_by_perfect_scaling(
    measured_steps: Sequence[MeasuredStep], scaling: Scaling, workers: int
) -> float:
    """Return the seconds of a step by perfect scaling from the largest measured worker count.

    Args:
        measured_steps: Measured step times.
        scaling: Weak or strong scaling.
        workers: Number of workers.
    """
    return scale_step_time_perfectly(measured_steps[-1], scaling, workers)


def project_by_constant_loss(
    measured_steps: Sequence[MeasuredStep], scaling: Scaling, workers: int
) -> float:
    """Return a step's seconds if each doubling of workers loses an equal share of efficiency.

    This loss of efficiency, which is no training loss, is that between the two largest measured counts.

    Args:
        measured_steps: Measured step times.
        scaling: Weak or strong scaling.
        workers: Number of workers.
    """
    if len(measured_steps) < 2:
        return project_by_perfect_scaling(measured_steps, scaling, workers)
    before, last = measured_steps[-2:]
    lost = last.step_s / scale_step_time_perfectly(before, scaling, last.workers)
    doublings = math.log2(workers / last.workers) / math.log2(last.workers / before.workers)
    return project_by_perfect_scaling(measured_steps, scaling, workers) * lost**doublings


def project_by_a_plus_b_over_n(
    measured_steps: Sequence[MeasuredStep], scaling: Scaling, workers: int
) -> float:
    """Return the seconds of a step on N workers by fitting a + b/N.

    The fit is by least squares of relative errors. In strong scaling the formula is Amdahl's law. In weak
    scaling it describes the bytes of a ring, which grow as (N - 1)/N. Far beyond the measured counts the
    result may be negative.

    Args:
        measured_steps: Measured step times.
        scaling: Weak or strong scaling.
        workers: Number of workers.
    """
    if len(measured_steps) < 2:
        return project_by_perfect_scaling(measured_steps, scaling, workers)
    import numpy as np  # imported here, because the import takes 0.1 s and few commands need it

    times = np.array([p.step_s for p in measured_steps])
    inverse = np.array([1 / p.workers for p in measured_steps])
    design = np.stack([np.ones(len(measured_steps)), inverse], axis=1) / times[:, None]
    a, b = np.linalg.lstsq(design, np.ones(len(measured_steps)), rcond=None)[0]
    return float(a + b / workers)


RULES: dict[str, Rule] = {
    "perfect": project_by_perfect_scaling,
    "same loss per doubling": project_by_constant_loss,
    "a + b/N": project_by_a_plus_b_over_n,
}


def compute_ln_error(projected_s: float, measured_s: float) -> float:
    """Return the error of a projected time, as ln(projected / measured).

    A projected time of zero or less counts as a thousandth of the measured one.
    """
    return math.log(max(projected_s / measured_s, 1e-3))


def compute_ln_error_by_worker_count(
    rule: Rule, measured_steps: Sequence[MeasuredStep], scaling: Scaling
) -> dict[int, float]:
    """Return the log error of each measured count that is projected from smaller counts.

    The first two counts have none, because a projection needs two. The result is by worker count.

    Args:
        rule: The rule.
        measured_steps: Measured step times.
        scaling: Weak or strong scaling.
    """
    return {
        measured_steps[k].workers: compute_ln_error(
            rule(measured_steps[:k], scaling, measured_steps[k].workers), measured_steps[k].step_s
        )
        for k in range(2, len(measured_steps))
    }


@dataclass(frozen=True)
class Skill:
    """Skill of a rule: how much smaller its errors are than those of naive rules.

    Attributes:
        relative_error_reduction: 1 minus the ratio of the rule's mean error to that of the best naive rule.
            It is 1 without an error, and below 0 for a worse rule. None for fewer than three measured counts.
        best_naive_rule: Name of the naive rule with the smallest mean error.
    """

    relative_error_reduction: float | None
    best_naive_rule: str

    @property
    def matches_best_naive_rule(self) -> bool:
        """Whether the rule's errors are not larger than those of the best naive rule. True if unknown."""
        return self.relative_error_reduction is None or self.relative_error_reduction >= 0


def compute_skill(rule: Rule, measured_steps: Sequence[MeasuredStep], scaling: Scaling) -> Skill:
    """Return the skill of a rule relative to the best naive rule.

    Args:
        rule: The rule.
        measured_steps: Measured step times.
        scaling: Weak or strong scaling.
    """
    if len(measured_steps) < 3:
        return Skill(None, "a + b/N")
    errors = {
        name: _average_absolute_errors(compute_ln_error_by_worker_count(r, measured_steps, scaling))
        for name, r in RULES.items()
    }
    best = min(errors, key=errors.__getitem__)
    own = _average_absolute_errors(compute_ln_error_by_worker_count(rule, measured_steps, scaling))
    if errors[best] == 0:
        return Skill(0.0 if own == 0 else -math.inf, best)
    return Skill(1 - own / errors[best], best)


def _average_absolute_errors(errors: dict[int, float]) -> float:
    return sum(map(abs, errors.values())) / len(errors)
