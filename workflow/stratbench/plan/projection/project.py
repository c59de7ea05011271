"""A study's projection: by the replay where it has skill, else by counts; within limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from stratbench.cell.text.words import short_time
from stratbench.plan.projection import naive, population
from stratbench.plan.projection.limits import refusal
from stratbench.plan.projection.naive import Measured, Rule, Scaling, Skill
from stratbench.plan.projection.population import Interval, Stated
from stratbench.plan.projection.replay import NEAR_HOST
from stratbench.plan.projection.servers import Queue

#: A replay says less than counts where one doubling has an interval of more than this, high over low.
MOST_SPREAD = 4.0
#: With fewer measured counts one alone is held out, and the best of three naive rules is near it by luck.
LEAST_TO_GIVE_WAY = 4
#: Of ln times: no interval is narrower than a repeat of the same measurement.
LEAST_SD = 0.01
BY_COUNTS, BY_LINKS = "counts and published losses", "replay on measured links"

#: A step's seconds on so many workers with so many seconds of computing.
Replayed = Callable[[int, float], float]


@dataclass(frozen=True)
class Projection:
    """What is said of a count: an interval by `rule`, or why nothing (`refused`), beside the naive rules.

    `skill`: of `rule` on the measured counts, over the best naive rule there. `host_s`: in which the host
    issues a step, where that is the limit; else 0.
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
    stated: Stated,
    targets: Sequence[tuple[int, int | None]],
    replayed: Replayed | None = None,
    slowed: Replayed | None = None,
    measured_levels: Collection[str] = (),
    queue: Callable[[int], Queue] | None = None,
    unsuited: Callable[[int], str | None] = lambda workers: None,
    repeats_reach: float = 0.0,
    host_s: float = 0.0,
) -> list[Projection]:
    """A projection for each of `targets` (workers, nodes), from at least one measured count.

    `replayed`: the traced step on measured links (`replay`), where there are any; `slowed`: the same with
    each link as much slower as its times were off their fit, which widens the interval. `unsuited`: why a
    count cannot be trained at all. `repeats_reach`: how far repeats lie apart (`Evidence`), which widens the
    interval, too. `host_s`: in which the host issues a step on any count, by the replay the least that one
    takes; 0: not known. A replay that does worse than the best naive rule on two counts or more gives way to
    the counts, and so does one that was so far off counts left out that its interval says nothing. Where what
    is left has no skill, either, the naive rule's time is in the interval, and the sentence names it. It does
    not replace the projection: on published series it was the worse one then (docs/projection.md).
    """
    points = sorted(points, key=lambda p: p.workers)
    scaling = stated.scaling
    name, rule = BY_COUNTS, by_counts(stated)
    skill = naive.skill_of(rule, points, scaling)
    if replayed is not None:
        by_replay = on_links(replayed, host_s=host_s)
        its_skill = naive.skill_of(by_replay, points, scaling)
        reach = _reach(by_replay, points, scaling, 1.0)
        held = its_skill.has_any or len(points) < LEAST_TO_GIVE_WAY
        if held and 2 * reach <= math.log(MOST_SPREAD):
            name, rule, skill = BY_LINKS, by_replay, its_skill
    if name == BY_COUNTS:
        intervals = population.projected(points, stated, targets)
    else:
        more = on_links(replayed, slowed, host_s) if slowed else rule
        intervals = [
            _about(rule, points, scaling, workers, _apart(more, rule, points, scaling, workers))
            for workers, _ in targets
        ]
    found = []
    for (workers, nodes), interval in zip(targets, intervals, strict=True):
        why = unsuited(workers) or refusal(
            points, workers, nodes, measured_levels, queue, name == BY_LINKS, stated.servers
        )
        beside = {key: f(points, scaling, workers) for key, f in naive.RULES.items()}
        limit_s = host_s if name == BY_LINKS and interval.middle_s <= host_s else 0.0
        interval = _widened(interval, repeats_reach)
        if not skill.has_any:
            interval = _holding(interval, beside[skill.best])
        found.append(
            Projection(workers, nodes, why, None if why else interval, name, beside, skill, limit_s)
        )
    return found


def _widened(interval: Interval, reach: float) -> Interval:
    """The interval of one more repeat: what is not known of the middle one, and how far repeats lie apart."""
    if not reach or not interval.low_s:
        return interval
    low, middle, high = (math.log(t) for t in (interval.low_s, interval.middle_s, interval.high_s))
    return Interval(
        math.exp(middle - math.hypot(middle - low, reach)),
        interval.middle_s,
        math.exp(middle + math.hypot(high - middle, reach)),
    )


def _holding(interval: Interval, step_s: float) -> Interval:
    """The interval, made as wide as holds a time; one that is not above zero says nothing."""
    if step_s <= 0:
        return interval
    return Interval(min(interval.low_s, step_s), interval.middle_s, max(interval.high_s, step_s))


def by_counts(stated: Stated) -> Rule:
    """The projection from counts alone as a rule."""

    def rule(points: Sequence[Measured], _scaling: Scaling, workers: int) -> float:
        # Nodes of a count that was left out: as the last of the others fill theirs.
        last = points[-1]
        nodes = last.nodes and max(1, math.ceil(workers * last.nodes / last.workers))
        return population.projected(points, stated, [(workers, nodes)])[0].middle_s

    return rule


def _apart(
    one: Rule, other: Rule, points: Sequence[Measured], scaling: Scaling, workers: int
) -> float:
    """ln of the ratio of what two rules say."""
    return naive.log_error(one(points, scaling, workers), other(points, scaling, workers))


def on_links(replayed: Replayed, shown: Replayed | None = None, host_s: float = 0.0) -> Rule:
    """A rule that takes the communication from the replay, and only the computing from the counts.

    Each measured step gives its computing, as the replay needs it to come to the measured time. In weak
    scaling that is the same at all counts, in strong scaling it goes as a + b/N. `shown`: replays the wanted
    count, if not `replayed`. A step takes at least `host_s`: the host issues one after the other, and as it
    waits for none of them, the device's steps follow one another in the longer of both times.
    """

    def rule(points: Sequence[Measured], scaling: Scaling, workers: int) -> float:
        compute_s = computing_at(replayed, points, scaling, host_s)(workers)
        return max(host_s, (shown or replayed)(workers, compute_s))

    return rule


def computing_at(
    replayed: Replayed, points: Sequence[Measured], scaling: Scaling, host_s: float = 0.0
) -> Callable[[int], float]:
    """Seconds of computing on any count, as the measured steps have it.

    A step that the host may limit shows only that computing takes less than that. It is left out if there
    are others.
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
    """Seconds of computing with which the replay takes `step_s`; 0 if its collectives alone take longer."""
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
    """Each count projected from all others: ln(projected / measured), and the doublings between it and the
    nearest of them."""
    found = []
    for i, point in enumerate(points):
        others = [*points[:i], *points[i + 1 :]]
        if not others:
            continue
        distance = min(abs(math.log2(point.workers / p.workers)) for p in others)
        projected_s = rule(others, scaling, point.workers)
        found.append((naive.log_error(projected_s, point.step_s), distance))
    return found


def _about(
    rule: Rule, points: Sequence[Measured], scaling: Scaling, workers: int, more_sd: float
) -> Interval:
    """The rule's time with an interval of 80 % from its errors at counts that were left out."""
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
    """How far, in ln, the step's time lies from what the rule says in 80 of 100 cases; infinite for one.

    An error is taken to grow as the root of the doublings (a random walk). With few counts Student's t
    says how little is known.
    """
    from scipy.special import stdtrit

    errors = left_out_errors(rule, points, scaling)
    if not errors:
        return math.inf
    mean_square = sum(e * e / max(d, 1.0) for e, d in errors) / len(errors)
    sd = math.sqrt((mean_square + LEAST_SD**2) * doublings + more_sd**2)
    return float(stdtrit(len(errors), 0.9)) * sd


def basis_of(found: Projection, points: Sequence[Measured]) -> str:
    """From what it was projected, in words: the measured counts, and by what."""
    *some, last = [str(p.workers) for p in points]
    counts = f"{', '.join(some)} and {last}" if some else last
    told = f"steps measured on {counts} workers, by {_by(found)}"
    if found.skill.value is None:
        told += "; fewer than three measured counts cannot show its skill"
    elif not found.skill.has_any:
        told += f", though {found.skill.best} did better on the measured counts"
    return told


def _by(found: Projection) -> str:
    """The rule, and the host where it is the limit."""
    if not found.host_s:
        return found.rule
    return (
        f"{found.rule}, limited by the host, which takes {short_time(found.host_s)} to issue a step"
    )


def sentence(found: Projection, unit: str = "GPUs") -> str:
    """What is known of a count, in words."""
    if found.refused:
        return f"{found.workers} {unit}: not projected: {found.refused}."
    low, middle, high = (
        short_time(t)
        for t in (found.interval.low_s, found.interval.middle_s, found.interval.high_s)
    )
    said = f"{found.workers} {unit}: {middle} a step (80 %: {low} to {high}), by {_by(found)}"
    if found.skill.value is None:
        return f"{said}; fewer than three measured counts cannot show its skill."
    best = found.skill.best
    if found.skill.has_any:
        ratio = f"{1 - found.skill.value:.2f} times that of {best}"
        return f"{said}; on the measured counts its error is {ratio}."
    naive_s = found.naive_s[best]
    told = short_time(naive_s) if naive_s > 0 else "less than nothing here"
    return f"{said}. On the measured counts it has no skill: {best} did better there, which says {told}."
