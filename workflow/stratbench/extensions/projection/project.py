"""A study's projection: by the replay where it has skill, else by counts; within limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from stratbench.cell.text.words import short_time
from stratbench.extensions.projection import naive
from stratbench.extensions.projection.limits import refusal, refusal_of_two
from stratbench.extensions.projection.naive import Measured, Rule, Scaling, Skill
from stratbench.extensions.projection.replay import NEAR_HOST
from stratbench.extensions.projection.servers import ServerQueue

#: An interval of one doubling that is wider than this, high over low, is not informative.
MAX_SPREAD = 4.0
#: With fewer measured counts one alone is held out, and the best of three naive rules is near it by luck.
MIN_TO_GIVE_WAY = 4
#: Minimum standard deviation of ln times: no interval is narrower than a repeat.
MIN_SD = 0.01
BY_COUNTS, BY_LINKS = "a + b/N", "replay on measured links"

#: A step's seconds on so many workers with so many seconds of computing.
Replayed = Callable[[int, float], float]


@dataclass(frozen=True)
class Interval:
    """Interval of the step's time with 80 % coverage; `middle_s` is the projection."""

    low_s: float
    middle_s: float
    high_s: float


@dataclass(frozen=True)
class Projection:
    """The projection to a count: an interval by `rule`, or why there is none (`refused`).

    `skill`: that of `rule` on the measured counts, over the best naive rule there. `host_s`: time in which
    the host issues a step, if that is the limit; else 0.
    """

    workers: int
    nodes: int | None
    refused: str | None
    interval: Interval | None
    rule: str
    naive_s: dict[str, float]
    skill: Skill
    host_s: float = 0.0


def project(
    points: Sequence[Measured],
    scaling: Scaling,
    targets: Sequence[tuple[int, int | None]],
    replayed: Replayed | None = None,
    slowed: Replayed | None = None,
    measured_levels: Collection[str] = (),
    queue: Callable[[int], ServerQueue] | None = None,
    unsuited: Callable[[int], str | None] = lambda workers: None,
    repeats_reach: float = 0.0,
    host_s: float = 0.0,
    served: bool = False,
) -> list[Projection]:
    """Project the step's time to other counts of workers.

    The rule is the replay, if there is one with skill, else a + b/N of the measured counts. A replay gives
    way if it did worse than the best naive rule on two counts or more, or if its interval says nothing.
    Where a + b/N has no skill, either, the better naive rule's time is in the interval, and the sentence
    names it.

    Args:
        points: Step times on at least two counts.
        scaling: What the measured counts have in common: the global batch, or a worker's batch.
        targets: Workers and nodes (None: unknown) of each wanted count.
        replayed: The traced step on measured links (`replay`); None without them.
        slowed: The same with each link as much slower as its times were off their fit; widens the interval.
        measured_levels: Levels of the measured links, "within" and "between" nodes.
        queue: The servers' queue by workers, if their push and pull was measured.
        unsuited: Why a count cannot be trained at all; None if it can.
        repeats_reach: How far repeats lie apart (`Evidence`); widens the interval.
        host_s: Seconds in which the host issues a step on any count, the least that a replayed step takes;
            0 if unknown.
        served: Whether servers exchange the gradients.

    Returns:
        A projection for each target, in their order.
    """
    points = sorted(points, key=lambda p: p.workers)
    name, rule = BY_COUNTS, naive.a_plus_b_over_n
    skill = naive.skill_of(rule, points, scaling)
    if replayed is not None:
        by_replay = on_links(replayed, host_s=host_s)
        its_skill = naive.skill_of(by_replay, points, scaling)
        held = its_skill.has_any or len(points) < MIN_TO_GIVE_WAY
        if held and _is_telling(by_replay, points, scaling):
            name, rule, skill = BY_LINKS, by_replay, its_skill
    by_links = name == BY_LINKS
    more = on_links(replayed, slowed, host_s) if by_links and slowed else rule
    projections = []
    for workers, nodes in targets:
        beside = {key: f(points, scaling, workers) for key, f in naive.RULES.items()}
        reason = unsuited(workers) or refusal(
            points, workers, nodes, measured_levels, queue, by_links, served
        )
        if not (reason or by_links):
            reason = _why_not_by_counts(points, scaling, workers)
        interval, limit_s = None, 0.0
        if not reason:
            apart = _apart(more, rule, points, scaling, workers)
            interval = _about(rule, points, scaling, workers, apart)
            limit_s = host_s if by_links and interval.middle_s <= host_s else 0.0
            interval = _widened(interval, repeats_reach)
            if not skill.has_any:
                interval = _holding(interval, beside[skill.best])
        projections.append(
            Projection(workers, nodes, reason, interval, name, beside, skill, limit_s)
        )
    return projections


def _is_telling(rule: Rule, points: Sequence[Measured], scaling: Scaling) -> bool:
    """Return whether the interval of the next doubling is informative."""
    return 2 * _reach(rule, points, scaling, 1.0) <= math.log(MAX_SPREAD)


def _why_not_by_counts(points: Sequence[Measured], scaling: Scaling, workers: int) -> str | None:
    """Return why a + b/N of the measured counts gives nothing for `workers`, or None."""
    if reason := refusal_of_two(points, scaling, workers):
        return reason
    if not _is_telling(naive.a_plus_b_over_n, points, scaling):
        return (
            "a + b/N is so far off the measured counts that the interval of the next doubling spans more "
            f"than a factor of {MAX_SPREAD:g}: measure links, or steps on more counts"
        )
    if naive.a_plus_b_over_n(points, scaling, workers) <= 0:
        return "a + b/N falls below zero there: measure links, or steps on more counts"
    return None


def _widened(interval: Interval, reach: float) -> Interval:
    """Return the interval of a single repeat: the middle one's uncertainty, and that of repeats."""
    if not reach:
        return interval
    low, middle, high = (math.log(t) for t in (interval.low_s, interval.middle_s, interval.high_s))
    return Interval(
        math.exp(middle - math.hypot(middle - low, reach)),
        interval.middle_s,
        math.exp(middle + math.hypot(high - middle, reach)),
    )


def _holding(interval: Interval, step_s: float) -> Interval:
    """Return the interval, widened to contain a time above zero."""
    if step_s <= 0:
        return interval
    return Interval(min(interval.low_s, step_s), interval.middle_s, max(interval.high_s, step_s))


def _apart(
    one: Rule, other: Rule, points: Sequence[Measured], scaling: Scaling, workers: int
) -> float:
    """Return the log ratio of two rules' times."""
    return naive.log_error(one(points, scaling, workers), other(points, scaling, workers))


def on_links(replayed: Replayed, shown: Replayed | None = None, host_s: float = 0.0) -> Rule:
    """Return a rule with communication from the replay, and only computation from the counts.

    Each measured step gives its computation, such that the replay gives the measured time. In weak scaling
    that is the same at all counts, in strong scaling it is a + b/N. A step takes at least `host_s`: the host
    issues steps asynchronously, so that the device's steps follow one another in the longer of both times.

    Args:
        replayed: Replays a count.
        shown: Replays the wanted count, if not `replayed`.
        host_s: Time in which the host issues a step.
    """

    def rule(points: Sequence[Measured], scaling: Scaling, workers: int) -> float:
        compute_s = computing_at(replayed, points, scaling, host_s)(workers)
        return max(host_s, (shown or replayed)(workers, compute_s))

    return rule


def computing_at(
    replayed: Replayed, points: Sequence[Measured], scaling: Scaling, host_s: float = 0.0
) -> Callable[[int], float]:
    """Return a function for seconds of computation on any count, from the measured steps.

    A step that the host may limit gives only an upper bound. It is left out if there are others.

    Args:
        replayed: Replays a count.
        points: Measured counts.
        scaling: Weak or strong scaling.
        host_s: Time in which the host issues a step.
    """
    full = [p for p in points if p.step_s > NEAR_HOST * host_s] or points
    computing = [
        Measured(p.workers, computing_of(replayed, p.workers, p.step_s), p.nodes) for p in full
    ]
    if scaling == "weak":
        compute_s = sum(p.step_s for p in computing) / len(computing)
        return lambda workers: compute_s
    return lambda workers: max(0.0, naive.a_plus_b_over_n(computing, scaling, workers))


def computing_of(replayed: Replayed, workers: int, step_s: float) -> float:
    """Return seconds of computation with which the replay takes `step_s`, at least 0.

    Args:
        replayed: Replays a count.
        workers: Worker count.
        step_s: Time of a step.
    """
    low, high = 0.0, step_s
    if replayed(workers, low) >= step_s:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if replayed(workers, middle) < step_s else (low, middle)
    return (low + high) / 2


def left_out_errors(
    rule: Rule, points: Sequence[Measured], scaling: Scaling
) -> list[tuple[float, float]]:
    """Return the log error of each count projected from all others, and its distance in doublings.

    Args:
        rule: The rule.
        points: Measured counts.
        scaling: Weak or strong scaling.
    """
    errors = []
    for i, point in enumerate(points):
        others = [*points[:i], *points[i + 1 :]]
        if not others:
            continue
        distance = min(abs(math.log2(point.workers / p.workers)) for p in others)
        projected_s = rule(others, scaling, point.workers)
        errors.append((naive.log_error(projected_s, point.step_s), distance))
    return errors


def _about(
    rule: Rule, points: Sequence[Measured], scaling: Scaling, workers: int, more_sd: float
) -> Interval:
    """Return the rule's time with an 80 % interval from its errors at left-out counts."""
    middle_s = rule(points, scaling, workers)
    doublings = max(1.0, math.log2(workers / points[-1].workers))
    reach = _reach(rule, points, scaling, doublings, more_sd)
    return Interval(middle_s * math.exp(-reach), middle_s, middle_s * math.exp(reach))


def _reach(
    rule: Rule,
    points: Sequence[Measured],
    scaling: Scaling,
    doublings: float,
    more_sd: float = 0.0,
) -> float:
    """Return the 80 % half-width, in ln, of the step's time around the rule's.

    Infinite for one count.

    Errors are assumed to grow as the root of the doublings (a random walk). Few counts widen it by Student's
    t.
    """
    from scipy.special import stdtrit

    errors = left_out_errors(rule, points, scaling)
    if not errors:
        return math.inf
    mean_square = sum(e * e / max(d, 1.0) for e, d in errors) / len(errors)
    sd = math.sqrt((mean_square + MIN_SD**2) * doublings + more_sd**2)
    return float(stdtrit(len(errors), 0.9)) * sd


def basis_of(projection: Projection, points: Sequence[Measured]) -> str:
    """Return a text on the basis of a projection: the measured counts, and the rule."""
    *some, last = [str(p.workers) for p in points]
    counts = f"{', '.join(some)} and {last}" if some else last
    text = f"steps measured on {counts} workers, by {_by(projection)}"
    if projection.skill.value is None:
        text += "; fewer than three measured counts cannot show its skill"
    elif not projection.skill.has_any:
        text += f", though {projection.skill.best} did better on the measured counts"
    return text


def _by(projection: Projection) -> str:
    """Return the rule, and the host where it is the limit."""
    if not projection.host_s:
        return projection.rule
    host = short_time(projection.host_s)
    return f"{projection.rule}, limited by the host, which takes {host} to issue a step"


def sentence(projection: Projection, unit: str = "GPUs") -> str:
    """Return a sentence on a count."""
    if projection.refused:
        return f"{projection.workers} {unit}: not projected: {projection.refused}."
    low, middle, high = (
        short_time(t)
        for t in (
            projection.interval.low_s,
            projection.interval.middle_s,
            projection.interval.high_s,
        )
    )
    text = f"{projection.workers} {unit}: {middle} per step (80 %: {low} to {high}), by {_by(projection)}"
    if projection.skill.value is None:
        return f"{text}; fewer than three measured counts cannot show its skill."
    best = projection.skill.best
    if projection.skill.has_any and projection.rule == BY_COUNTS:
        return f"{text}; no naive rule did better on the measured counts."
    if projection.skill.has_any:
        ratio = f"{1 - projection.skill.value:.2f} times that of {best}"
        return f"{text}; on the measured counts its error is {ratio}."
    naive_s = projection.naive_s[best]
    naive = short_time(naive_s) if naive_s > 0 else "less than nothing here"
    return f"{text}. On the measured counts it has no skill: {best} did better there, which says {naive}."
