"""Projects step times to other worker counts, by measured links or a + b/N.

The replay is used where it has skill over naive rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from stratbench.cell.text.words import format_short_time
from stratbench.extensions.projection import naive
from stratbench.extensions.projection.limits import (
    projection_refusal_reason,
    two_count_fit_refusal_reason,
)
from stratbench.extensions.projection.naive import MeasuredStep, Rule, Scaling, Skill
from stratbench.extensions.projection.replay import NEAR_HOST
from stratbench.extensions.projection.servers import ServerQueue

#: Maximum ratio of high to low of an informative interval, for one doubling of workers.
MAX_SPREAD = 4.0
#: Minimum number of measured counts for a naive rule to replace the replay. With fewer, only one count is
#: left out, and one of three naive rules is close to it by chance.
MIN_TO_GIVE_WAY = 4
#: Minimum standard deviation of ln times, so that no interval is narrower than the spread of repeats.
MIN_SD = 0.01
BY_COUNTS, BY_LINKS = "a + b/N", "replay on measured links"

#: Returns the seconds of a step, for a worker count and its seconds of computation.
StepReplay = Callable[[int, float], float]


@dataclass(frozen=True)
class Interval:
    """Interval of the step's time with 80 % coverage; `middle_s` is the projected time."""

    low_s: float
    middle_s: float
    high_s: float


@dataclass(frozen=True)
class Projection:
    """Projection of the step time to a worker count, or the reason why there is none.

    Attributes:
        workers: Number of workers.
        nodes: Number of nodes, if known.
        refusal_reason: Why there is no projection, or None.
        interval: Projected time with its interval.
        rule: Name of the rule that projects.
        step_s_by_naive_rule: Seconds that each naive rule projects.
        skill: Skill of the rule on the measured counts, over the best naive rule there.
        host_issue_s: Seconds in which the host issues a step, if that is the limit; else 0.
    """

    workers: int
    nodes: int | None
    refusal_reason: str | None
    interval: Interval | None
    rule: str
    step_s_by_naive_rule: dict[str, float]
    skill: Skill
    host_issue_s: float = 0.0


def project_step_times(
    points: Sequence[MeasuredStep],
    scaling: Scaling,
    targets: Sequence[tuple[int, int | None]],
    replayed: StepReplay | None = None,
    slowed: StepReplay | None = None,
    measured_levels: Collection[str] = (),
    queue: Callable[[int], ServerQueue] | None = None,
    unsuited: Callable[[int], str | None] = lambda workers: None,
    repeat_half_width_ln: float = 0.0,
    host_s: float = 0.0,
    served: bool = False,
) -> list[Projection]:
    """Project the time of a step to other worker counts.

    The rule is the replay, if there is one with skill, else a + b/N of the measured counts. The replay is not
    used if it was worse than the best naive rule on two counts or more, or if its interval is not
    informative. If a + b/N has no skill either, the interval is widened to contain the time of the better
    naive rule.

    Args:
        points: Measured step times on at least two worker counts.
        scaling: Strong if all measured counts have the same global batch, weak if the same batch per worker.
        targets: Number of workers and of nodes (None if unknown) of each wanted projection.
        replayed: Replay of the traced step on measured links; None without links.
        slowed: Replay with each link slower by the error of its fit; widens the interval.
        measured_levels: Levels of the measured links, "within" and "between" nodes.
        queue: Returns the servers' queue for a worker count, if push and pull were measured.
        unsuited: Returns why a worker count cannot be trained, or None.
        repeat_half_width_ln: Half-width of the repeats' spread (`ProjectionInputs`); widens the interval.
        host_s: Seconds in which the host issues a step on any count, a lower bound of replayed steps;
            0 if unknown.
        served: Whether servers exchange the gradients.

    Returns:
        A projection for each target, in their order.
    """
    points = sorted(points, key=lambda p: p.workers)
    name, rule = BY_COUNTS, naive.project_by_a_plus_b_over_n
    skill = naive.measure_skill(rule, points, scaling)
    if replayed is not None:
        by_replay = make_link_rule(replayed, host_s=host_s)
        its_skill = naive.measure_skill(by_replay, points, scaling)
        held = its_skill.matches_naive or len(points) < MIN_TO_GIVE_WAY
        if held and _has_informative_interval(by_replay, points, scaling):
            name, rule, skill = BY_LINKS, by_replay, its_skill
    by_links = name == BY_LINKS
    more = make_link_rule(replayed, slowed, host_s) if by_links and slowed else rule
    projections = []
    for workers, nodes in targets:
        naive_s = {key: f(points, scaling, workers) for key, f in naive.RULES.items()}
        reason = unsuited(workers) or projection_refusal_reason(
            points, workers, nodes, measured_levels, queue, by_links, served
        )
        if not (reason or by_links):
            reason = _count_fit_refusal_reason(points, scaling, workers)
        interval, limit_s = None, 0.0
        if not reason:
            apart = _compute_log_ratio(more, rule, points, scaling, workers)
            interval = _compute_interval(rule, points, scaling, workers, apart)
            limit_s = host_s if by_links and interval.middle_s <= host_s else 0.0
            interval = _widen_for_repeats(interval, repeat_half_width_ln)
            if not skill.matches_naive:
                interval = _widen_to_contain(interval, naive_s[skill.best_naive_rule])
        projections.append(
            Projection(workers, nodes, reason, interval, name, naive_s, skill, limit_s)
        )
    return projections


def _has_informative_interval(rule: Rule, points: Sequence[MeasuredStep], scaling: Scaling) -> bool:
    """Return whether the interval for twice the workers is narrow enough to be informative."""
    return 2 * _compute_half_width_ln(rule, points, scaling, 1.0) <= math.log(MAX_SPREAD)


def _count_fit_refusal_reason(
    points: Sequence[MeasuredStep], scaling: Scaling, workers: int
) -> str | None:
    """Return why a + b/N of the measured counts allows no projection to `workers`.

    The result is None if the projection is possible.
    """
    if reason := two_count_fit_refusal_reason(points, scaling, workers):
        return reason
    if not _has_informative_interval(naive.project_by_a_plus_b_over_n, points, scaling):
        return (
            "a + b/N fits the measured counts so badly that the interval for twice as many workers spans "
            f"more than a factor of {MAX_SPREAD:g}: measure links, or steps on more counts"
        )
    if naive.project_by_a_plus_b_over_n(points, scaling, workers) <= 0:
        return f"a + b/N is below zero at {workers} workers: measure links, or steps on more counts"
    return None


def _widen_for_repeats(interval: Interval, reach: float) -> Interval:
    """Return the interval for a single repeat, wider than the interval for the middle repeat."""
    if not reach:
        return interval
    low, middle, high = (math.log(t) for t in (interval.low_s, interval.middle_s, interval.high_s))
    return Interval(
        math.exp(middle - math.hypot(middle - low, reach)),
        interval.middle_s,
        math.exp(middle + math.hypot(high - middle, reach)),
    )


def _widen_to_contain(interval: Interval, step_s: float) -> Interval:
    """Return the interval, widened so that it contains `step_s`. It is unchanged if `step_s` is 0."""
    if step_s <= 0:
        return interval
    return Interval(min(interval.low_s, step_s), interval.middle_s, max(interval.high_s, step_s))


def _compute_log_ratio(
    one: Rule, other: Rule, points: Sequence[MeasuredStep], scaling: Scaling, workers: int
) -> float:
    """Return ln of the ratio of two rules' times for a worker count."""
    return naive.compute_log_error(one(points, scaling, workers), other(points, scaling, workers))


def make_link_rule(
    replayed: StepReplay, shown: StepReplay | None = None, host_s: float = 0.0
) -> Rule:
    """Return a rule that replays communication, and fits computation to the measured counts.

    The computation of each measured step is the one for which the replay gives the measured time. In weak
    scaling it is equal at all counts, in strong scaling it is a + b/N. A step takes at least `host_s`,
    since the host issues steps asynchronously and the longer of both times sets the pace.

    Args:
        replayed: Replays a step on measured counts.
        shown: Replays a step on the projected count, if not `replayed`.
        host_s: Seconds in which the host issues a step.
    """

    def project_step_time(points: Sequence[MeasuredStep], scaling: Scaling, workers: int) -> float:
        compute_s = fit_computation_s(replayed, points, scaling, host_s)(workers)
        return max(host_s, (shown or replayed)(workers, compute_s))

    return project_step_time


def fit_computation_s(
    replayed: StepReplay, points: Sequence[MeasuredStep], scaling: Scaling, host_s: float = 0.0
) -> Callable[[int], float]:
    """Return a function for the seconds of computation on any worker count.

    The function is fitted to measured steps. A step that the host may limit gives only an upper bound. It is
    left out if there are others.

    Args:
        replayed: Replays a step.
        points: Measured step times.
        scaling: Weak or strong scaling.
        host_s: Seconds in which the host issues a step.
    """
    full = [p for p in points if p.step_s > NEAR_HOST * host_s] or points
    computing = [
        MeasuredStep(p.workers, solve_computation_s(replayed, p.workers, p.step_s), p.nodes)
        for p in full
    ]
    if scaling == "weak":
        compute_s = sum(p.step_s for p in computing) / len(computing)
        return lambda workers: compute_s
    return lambda workers: max(0.0, naive.project_by_a_plus_b_over_n(computing, scaling, workers))


def solve_computation_s(replayed: StepReplay, workers: int, step_s: float) -> float:
    """Return the seconds of computation for which the replay takes `step_s`, at least 0.

    Args:
        replayed: Replays a step.
        workers: Number of workers.
        step_s: Seconds of the step.
    """
    low, high = 0.0, step_s
    if replayed(workers, low) >= step_s:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if replayed(workers, middle) < step_s else (low, middle)
    return (low + high) / 2


def compute_left_out_errors(
    rule: Rule, points: Sequence[MeasuredStep], scaling: Scaling
) -> list[tuple[float, float]]:
    """Return the log error of each count when projected from the others, with the distance.

    Args:
        rule: The rule.
        points: Measured step times.
        scaling: Weak or strong scaling.

    Returns:
        Pairs of ln(projected / measured) and the distance to the nearest other count, in doublings.
    """
    errors = []
    for i, point in enumerate(points):
        others = [*points[:i], *points[i + 1 :]]
        if not others:
            continue
        distance = min(abs(math.log2(point.workers / p.workers)) for p in others)
        projected_s = rule(others, scaling, point.workers)
        errors.append((naive.compute_log_error(projected_s, point.step_s), distance))
    return errors


def _compute_interval(
    rule: Rule, points: Sequence[MeasuredStep], scaling: Scaling, workers: int, more_sd: float
) -> Interval:
    """Return the projected time with its 80 % interval.

    The interval comes from the rule's errors at left-out counts.
    """
    middle_s = rule(points, scaling, workers)
    doublings = max(1.0, math.log2(workers / points[-1].workers))
    reach = _compute_half_width_ln(rule, points, scaling, doublings, more_sd)
    return Interval(middle_s * math.exp(-reach), middle_s, middle_s * math.exp(reach))


def _compute_half_width_ln(
    rule: Rule,
    points: Sequence[MeasuredStep],
    scaling: Scaling,
    doublings: float,
    more_sd: float = 0.0,
) -> float:
    """Return the half-width, in ln, of the 80 % interval around the rule's time.

    Errors are assumed to grow as the root of the doublings, as in a random walk. With few counts Student's
    t widens the interval. It is infinite for one count.
    """
    from scipy.special import stdtrit

    errors = compute_left_out_errors(rule, points, scaling)
    if not errors:
        return math.inf
    mean_square = sum(e * e / max(d, 1.0) for e, d in errors) / len(errors)
    sd = math.sqrt((mean_square + MIN_SD**2) * doublings + more_sd**2)
    return float(stdtrit(len(errors), 0.9)) * sd


def describe_projection_basis(projection: Projection, points: Sequence[MeasuredStep]) -> str:
    """Return a text on the basis of a projection: the measured counts and the rule."""
    *some, last = [str(p.workers) for p in points]
    counts = f"{', '.join(some)} and {last}" if some else last
    text = f"steps measured on {counts} workers, by {_describe_rule(projection)}"
    if projection.skill.error_reduction is None:
        text += "; fewer than three measured counts cannot test this rule"
    elif not projection.skill.matches_naive:
        text += (
            f", though {projection.skill.best_naive_rule} had smaller errors on the measured counts"
        )
    return text


def _describe_rule(projection: Projection) -> str:
    """Return the name of the rule, and a note if the host limits the step."""
    if not projection.host_issue_s:
        return projection.rule
    host = format_short_time(projection.host_issue_s)
    return f"{projection.rule}, limited by the host, which needs {host} to issue a step"


def describe_projected_count(projection: Projection, unit: str = "GPUs") -> str:
    """Return a sentence on the projected time on a worker count, or on its absence."""
    if projection.refusal_reason:
        return f"{projection.workers} {unit}: not projected: {projection.refusal_reason}."
    low, middle, high = (
        format_short_time(t)
        for t in (
            projection.interval.low_s,
            projection.interval.middle_s,
            projection.interval.high_s,
        )
    )
    rule = _describe_rule(projection)
    text = f"{projection.workers} {unit}: {middle} per step (80 %: {low} to {high}), by {rule}"
    if projection.skill.error_reduction is None:
        return f"{text}; fewer than three measured counts cannot test this rule."
    best = projection.skill.best_naive_rule
    if projection.skill.matches_naive and projection.rule == BY_COUNTS:
        return f"{text}; no naive rule had smaller errors on the measured counts."
    if projection.skill.matches_naive:
        ratio = f"{1 - projection.skill.error_reduction:.2f} times that of {best}"
        return f"{text}; on the measured counts the rule's error is {ratio}."
    naive_s = projection.step_s_by_naive_rule[best]
    naive = format_short_time(naive_s) if naive_s > 0 else "a time below zero here"
    return f"{text}. On the measured counts {best} had smaller errors; it projects {naive}."
