"""A study's projection: by the replay where it has skill, else by counts; within limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from stratbench.plan.projection import naive, population
from stratbench.plan.projection.limits import refusal
from stratbench.plan.projection.naive import Measured, Rule, Scaling, Skill
from stratbench.plan.projection.population import Interval, Stated
from stratbench.plan.projection.servers import Queue

#: A replay says less than counts where one doubling has an interval of more than this, high over low.
MOST_SPREAD = 4.0
#: Of ln times: no interval is narrower than a repeat of the same measurement.
LEAST_SD = 0.01
BY_COUNTS, BY_LINKS = "counts and published losses", "replay on measured links"

#: A step's seconds on so many workers with so many seconds of computing.
Replayed = Callable[[int, float], float]


@dataclass(frozen=True)
class Projection:
    """What is said of a count: an interval by `rule`, or why nothing (`refused`), beside the naive rules.

    `skill`: of `rule` on the measured counts, over the best naive rule there.
    """

    workers: int
    nodes: int | None
    refused: str | None
    interval: Interval | None
    rule: str
    naive_s: dict[str, float]
    skill: Skill


def project(
    points: Sequence[Measured],
    stated: Stated,
    targets: Sequence[tuple[int, int | None]],
    replayed: Replayed | None = None,
    slowed: Replayed | None = None,
    measured_levels: Collection[str] = (),
    queue: Queue | None = None,
    unsuited: Callable[[int], str | None] = lambda workers: None,
    repeats_reach: float = 0.0,
) -> list[Projection]:
    """A projection for each of `targets` (workers, nodes), from at least one measured count.

    `replayed`: the traced step on measured links (`replay`), where there are any; `slowed`: the same with
    each link as much slower as its times were off their fit, which widens the interval. `unsuited`: why a
    count cannot be trained at all. `repeats_reach`: how far repeats lie apart (`Evidence`), which widens the
    interval, too. A replay that does worse than the best naive rule on the study's own counts gives way to
    the counts, and so does one that was so far off counts left out that its interval says nothing. Where the
    counts have no skill, either, the naive rule's time is in the interval, and the sentence names it. It does
    not replace the projection: on published series it was the worse one then (docs/projection.md).
    """
    points = sorted(points, key=lambda p: p.workers)
    scaling = stated.scaling
    name, rule = BY_COUNTS, by_counts(stated)
    skill = naive.skill_of(rule, points, scaling)
    if replayed is not None:
        by_links = naive.skill_of(on_links(replayed), points, scaling)
        reach = _reach(on_links(replayed), points, scaling, 1.0)
        if by_links.has_any and 2 * reach <= math.log(MOST_SPREAD):
            name, rule, skill = BY_LINKS, on_links(replayed), by_links
    if name == BY_COUNTS:
        intervals = population.projected(points, stated, targets)
    else:
        more = on_links(replayed, slowed) if slowed else rule
        intervals = [
            _about(rule, points, scaling, workers, _apart(more, rule, points, scaling, workers))
            for workers, _ in targets
        ]
    found = []
    for (workers, nodes), interval in zip(targets, intervals, strict=True):
        why = unsuited(workers) or refusal(points, workers, nodes, measured_levels, queue)
        beside = {key: f(points, scaling, workers) for key, f in naive.RULES.items()}
        interval = _widened(interval, repeats_reach)
        if not skill.has_any:
            interval = _holding(interval, beside[skill.best])
        found.append(
            Projection(workers, nodes, why, None if why else interval, name, beside, skill)
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


def on_links(replayed: Replayed, shown: Replayed | None = None) -> Rule:
    """A rule that takes the communication from the replay, and only the computing from the counts.

    Each measured step gives its computing, as the replay needs it to come to the measured time. In weak
    scaling that is the same at all counts, in strong scaling it goes as a + b/N. `shown`: replays the wanted
    count, if not `replayed`.
    """

    def rule(points: Sequence[Measured], scaling: Scaling, workers: int) -> float:
        computing = [
            Measured(p.workers, computing_of(replayed, p.workers, p.step_s), p.nodes)
            for p in points
        ]
        if scaling == "weak":
            compute_s = sum(p.step_s for p in computing) / len(computing)
        else:
            compute_s = max(0.0, naive.a_plus_b_over_n(computing, scaling, workers))
        return (shown or replayed)(workers, compute_s)

    return rule


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
    told = f"steps measured on {counts} workers, by {found.rule}"
    if found.skill.value is None:
        told += "; fewer than three measured counts cannot show its skill"
    elif not found.skill.has_any:
        told += f", though {found.skill.best} did better on the measured counts"
    return told


def sentence(found: Projection, unit: str = "GPUs") -> str:
    """What is known of a count, in words."""
    if found.refused:
        return f"{found.workers} {unit}: not projected: {found.refused}."
    low, middle, high = (
        found.interval.low_s * 1e3, found.interval.middle_s * 1e3, found.interval.high_s * 1e3,
    )  # fmt: skip
    said = f"{found.workers} {unit}: {middle:.3g} ms a step (80 %: {low:.3g} to {high:.3g}), by {found.rule}"
    if found.skill.value is None:
        return f"{said}; fewer than three measured counts cannot show its skill."
    best = found.skill.best
    if found.skill.has_any:
        ratio = f"{1 - found.skill.value:.2f} times that of {best}"
        return f"{said}; on the measured counts its error is {ratio}."
    return (
        f"{said}. On the measured counts it has no skill: {best} did better there, which says "
        f"{found.naive_s[best] * 1e3:.3g} ms."
    )
