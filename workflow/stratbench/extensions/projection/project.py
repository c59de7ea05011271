"""Projects step times to other worker counts, by replays on measured links or by fits.

The fit is that of a + b/N to the step times on N workers. A replay is used if its errors are not larger than
those of simple (naive) rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stratbench.cell.text.words import format_short_time
from stratbench.extensions.projection import naive
from stratbench.extensions.projection.limits import (
    find_projection_refusal_reason,
    find_two_count_fit_refusal_reason,
)
from stratbench.extensions.projection.naive import MeasuredStep, Rule, Scaling, Skill
from stratbench.extensions.projection.replay import NEAR_HOST
from stratbench.extensions.projection.servers import ServerQueue

#: An interval is informative if its ends differ by at most this factor, for twice the measured number of
#: workers.
MAX_SPREAD = 4.0
#: Minimum number of measured worker counts for the fit of a + b/N to replace a worse replay. With fewer,
#: an error is known for only one count, which one of the three naive rules may predict well by chance.
MIN_TO_GIVE_WAY = 4
#: Minimum standard deviation of errors in ln of time. Intervals are thus not narrower than usual spreads of
#: repeats.
MIN_SD = 0.01
BY_COUNTS, BY_LINKS = "a + b/N", "replay on measured links"

#: Function of a worker count and its seconds of computation. It returns the seconds of a step.
StepReplay = Callable[[int, float], float]


@dataclass(frozen=True)
class Interval:
    """Projected step time `middle_s`, with the ends of its 80 % interval."""

    low_s: float
    middle_s: float
    high_s: float


@dataclass(frozen=True)
class Projection:
    """Projected step time on a number of workers, or the reason why there is none.

    Attributes:
        workers: Number of workers.
        nodes: Number of nodes, if known.
        refusal_reason: Why there is no projection, or None.
        interval: Projected step time with its interval.
        rule: Name of the rule that projects.
        step_s_by_naive_rule: Step time that each naive rule projects, by name of the rule.
        skill: How much smaller the rule's errors are than those of the best naive rule.
        host_issue_s: Seconds in which the host issues a step, if they limit the step; else 0.
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
    measured_steps: Sequence[MeasuredStep],
    scaling: Scaling,
    targets: Sequence[tuple[int, int | None]],
    replay_step_s: StepReplay | None = None,
    replay_step_on_slower_links_s: StepReplay | None = None,
    measured_levels: Collection[str] = (),
    make_queue: Callable[[int], ServerQueue] | None = None,
    find_untrainable_reason: Callable[[int], str | None] = lambda workers: None,
    repeat_half_width_ln: float = 0.0,
    host_issue_s: float = 0.0,
    has_servers: bool = False,
) -> list[Projection]:
    """Project the time of a training step to other worker counts.

    The rule is the replay if there is one, else a fit of a + b/N. The replay is not used if its interval is
    not informative. It is also not used if, on two counts or more, its errors were larger than those of the
    best naive rule. If the used rule has larger errors than a naive rule, the interval is widened to contain
    the naive rule's time.

    Args:
        measured_steps: Measured step times on at least two worker counts.
        scaling: Strong if all measured counts have the same global batch, weak if the same batch per worker.
        targets: Number of workers, and of nodes (None if unknown), of each wanted projection.
        replay_step_s: Replay of the step on measured links; None without links.
        replay_step_on_slower_links_s: Replay with each link slower by the error of its fit, to widen the
            interval.
        measured_levels: Where links were measured: "within" and "between" nodes.
        make_queue: Returns the queue of the parameter servers for a worker count, if push and pull were
            measured.
        find_untrainable_reason: Returns why the strategy cannot train on a worker count, or None.
        repeat_half_width_ln: Half-width of the interval of repeats (`ProjectionInputs`); widens the interval.
        host_issue_s: Seconds in which the host issues a step on any count; 0 if unknown. A replayed step
            takes at least this time.
        has_servers: Whether the strategy has parameter servers.

    Returns:
        A projection for each target, in their order.
    """
    measured_steps = sorted(measured_steps, key=lambda p: p.workers)
    name, rule = BY_COUNTS, naive.project_by_a_plus_b_over_n
    skill = naive.compute_skill(rule, measured_steps, scaling)
    if replay_step_s is not None:
        by_replay = make_replay_rule(replay_step_s, host_issue_s=host_issue_s)
        replay_skill = naive.compute_skill(by_replay, measured_steps, scaling)
        is_good = replay_skill.matches_best_naive_rule or len(measured_steps) < MIN_TO_GIVE_WAY
        if is_good and _has_informative_interval(by_replay, measured_steps, scaling):
            name, rule, skill = BY_LINKS, by_replay, replay_skill
    by_links = name == BY_LINKS
    more = (
        make_replay_rule(replay_step_s, replay_step_on_slower_links_s, host_issue_s)
        if by_links and replay_step_on_slower_links_s
        else rule
    )
    projections = []
    for workers, nodes in targets:
        naive_s = {key: f(measured_steps, scaling, workers) for key, f in naive.RULES.items()}
        reason = find_untrainable_reason(workers) or find_projection_refusal_reason(
            measured_steps, workers, nodes, measured_levels, make_queue, by_links, has_servers
        )
        if not (reason or by_links):
            reason = _find_fit_refusal_reason(measured_steps, scaling, workers)
        interval, limit_s = None, 0.0
        if not reason:
            apart = naive.compute_ln_error(
                more(measured_steps, scaling, workers), rule(measured_steps, scaling, workers)
            )
            interval = _compute_projected_interval(rule, measured_steps, scaling, workers, apart)
            limit_s = host_issue_s if by_links and interval.middle_s <= host_issue_s else 0.0
            interval = _widen_interval_for_repeats(interval, repeat_half_width_ln)
            if not skill.matches_best_naive_rule:
                interval = _widen_interval_to_contain(interval, naive_s[skill.best_naive_rule])
        projections.append(
            Projection(workers, nodes, reason, interval, name, naive_s, skill, limit_s)
        )
    return projections


def _has_informative_interval(
    rule: Rule, measured_steps: Sequence[MeasuredStep], scaling: Scaling
) -> bool:
    """Return whether the interval for twice the measured workers is narrow enough."""
    return 2 * _compute_interval_half_width_ln(rule, measured_steps, scaling, 1.0) <= math.log(
        MAX_SPREAD
    )


def _find_fit_refusal_reason(
    measured_steps: Sequence[MeasuredStep], scaling: Scaling, workers: int
) -> str | None:
    """Return why a fit of a + b/N cannot project to `workers`, or None."""
    if reason := find_two_count_fit_refusal_reason(measured_steps, scaling, workers):
        return reason
    if not _has_informative_interval(naive.project_by_a_plus_b_over_n, measured_steps, scaling):
        return (
            "a + b/N fits the measured counts so badly that the interval for twice as many workers spans "
            f"more than a factor of {MAX_SPREAD:g}: measure links, or steps on more counts"
        )
    if naive.project_by_a_plus_b_over_n(measured_steps, scaling, workers) <= 0:
        return f"a + b/N is below zero at {workers} workers: measure links, or steps on more counts"
    return None


def _widen_interval_for_repeats(interval: Interval, repeat_half_width_ln: float) -> Interval:
    """Return an interval for any single repeat, which is wider than for the median."""
    if not repeat_half_width_ln:
        return interval
    low, middle, high = (math.log(t) for t in (interval.low_s, interval.middle_s, interval.high_s))
    return Interval(
        math.exp(middle - math.hypot(middle - low, repeat_half_width_ln)),
        interval.middle_s,
        math.exp(middle + math.hypot(high - middle, repeat_half_width_ln)),
    )


def _widen_interval_to_contain(interval: Interval, step_s: float) -> Interval:
    """Return the interval, widened to contain the step time `step_s` if this is above 0."""
    if step_s <= 0:
        return interval
    return Interval(min(interval.low_s, step_s), interval.middle_s, max(interval.high_s, step_s))


def make_replay_rule(
    replay_step_s: StepReplay,
    replay_projected_step_s: StepReplay | None = None,
    host_issue_s: float = 0.0,
) -> Rule:
    """Return a rule that replays a step with a fitted computation time.

    The computation time of a measured step is the one for which the replay gives the measured step time. In
    weak scaling it is equal on all worker counts, in strong scaling it is a + b/N. A step takes at least
    `host_issue_s`, because the host issues steps in advance, and the longer of both times limits the step.

    Args:
        replay_step_s: Replays a step on measured worker counts.
        replay_projected_step_s: Replays a step on the projected worker count, if not `replay_step_s`.
        host_issue_s: Seconds in which the host issues a step.
    """

    def project_step_time(
        measured_steps: Sequence[MeasuredStep], scaling: Scaling, workers: int
    ) -> float:
        compute_s = fit_computation_s(replay_step_s, measured_steps, scaling, host_issue_s)(workers)
        return max(host_issue_s, (replay_projected_step_s or replay_step_s)(workers, compute_s))

    return project_step_time


def fit_computation_s(
    replay_step_s: StepReplay,
    measured_steps: Sequence[MeasuredStep],
    scaling: Scaling,
    host_issue_s: float = 0.0,
) -> Callable[[int], float]:
    """Return a function that computes the computation time of a step on any worker count.

    It is fitted to measured steps. A step that the host may limit does not show its computation time. It is
    left out if there are others.

    Args:
        replay_step_s: Replays a step for a computation time.
        measured_steps: Measured step times.
        scaling: Weak or strong scaling.
        host_issue_s: Seconds in which the host issues a step.
    """
    full = [p for p in measured_steps if p.step_s > NEAR_HOST * host_issue_s] or measured_steps
    computing = [
        MeasuredStep(p.workers, solve_computation_s(replay_step_s, p.workers, p.step_s), p.nodes)
        for p in full
    ]
    if scaling == "weak":
        compute_s = sum(p.step_s for p in computing) / len(computing)
        return lambda workers: compute_s
    return lambda workers: max(0.0, naive.project_by_a_plus_b_over_n(computing, scaling, workers))


def solve_computation_s(replay_step_s: StepReplay, workers: int, step_s: float) -> float:
    """Return the computation time for which a replayed step takes `step_s`, at least 0.

    Args:
        replay_step_s: Replays a step for a computation time.
        workers: Number of workers.
        step_s: Seconds of the step.
    """
    low, high = 0.0, step_s
    if replay_step_s(workers, low) >= step_s:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if replay_step_s(workers, middle) < step_s else (low, middle)
    return (low + high) / 2


class LeftOutError(NamedTuple):
    """Error of a measured worker count that is projected from the other measured counts.

    Attributes:
        log_error: ln(projected / measured step time).
        doublings: Distance to the nearest other count, in doublings.
    """

    log_error: float
    doublings: float


def compute_leave_one_out_errors(
    rule: Rule, measured_steps: Sequence[MeasuredStep], scaling: Scaling
) -> list[LeftOutError]:
    """Return the error of each measured count, when it is projected from the other counts.

    Args:
        rule: The rule.
        measured_steps: Measured step times.
        scaling: Weak or strong scaling.
    """
    errors = []
    for i, point in enumerate(measured_steps):
        others = [*measured_steps[:i], *measured_steps[i + 1 :]]
        if not others:
            continue
        distance = min(abs(math.log2(point.workers / p.workers)) for p in others)
        projected_s = rule(others, scaling, point.workers)
        log_error = naive.compute_ln_error(projected_s, point.step_s)
        errors.append(LeftOutError(log_error, distance))
    return errors


def _compute_projected_interval(
    rule: Rule,
    measured_steps: Sequence[MeasuredStep],
    scaling: Scaling,
    workers: int,
    extra_sd_ln: float,
) -> Interval:
    """Return the step time that a rule projects, with its 80 % interval.

    The interval follows from the rule's errors on measured counts that are projected from the others.
    """
    middle_s = rule(measured_steps, scaling, workers)
    doublings = max(1.0, math.log2(workers / measured_steps[-1].workers))
    half_width_ln = _compute_interval_half_width_ln(
        rule, measured_steps, scaling, doublings, extra_sd_ln
    )
    low_s, high_s = middle_s * math.exp(-half_width_ln), middle_s * math.exp(half_width_ln)
    return Interval(low_s, middle_s, high_s)


def _compute_interval_half_width_ln(
    rule: Rule,
    measured_steps: Sequence[MeasuredStep],
    scaling: Scaling,
    doublings: float,
    extra_sd_ln: float = 0.0,
) -> float:
    """Return the half-width of a projected step time's 80 % interval, in ln of time.

    Errors are assumed to grow as the root of the number of doublings, as in a random walk. With few measured
    counts Student's t widens the interval. With one count it is infinite.
    """
    from scipy.special import stdtrit

    errors = compute_leave_one_out_errors(rule, measured_steps, scaling)
    if not errors:
        return math.inf
    mean_square = sum(e * e / max(d, 1.0) for e, d in errors) / len(errors)
    sd = math.sqrt((mean_square + MIN_SD**2) * doublings + extra_sd_ln**2)
    return float(stdtrit(len(errors), 0.9)) * sd


def describe_projection_basis(
    projection: Projection, measured_steps: Sequence[MeasuredStep]
) -> str:
    """Return a text on a projection's basis: the measured worker counts and the rule."""
    *some, last = [str(p.workers) for p in measured_steps]
    counts = f"{', '.join(some)} and {last}" if some else last
    text = f"steps measured on {counts} workers, by {_describe_rule(projection)}"
    if projection.skill.relative_error_reduction is None:
        text += "; fewer than three measured counts cannot test this rule"
    elif not projection.skill.matches_best_naive_rule:
        text += (
            f", though {projection.skill.best_naive_rule} had smaller errors on the measured counts"
        )
    return text


def _describe_rule(projection: Projection) -> str:
    """Return a projection's rule, with a note if the host limits the step."""
    if not projection.host_issue_s:
        return projection.rule
    host = format_short_time(projection.host_issue_s)
    return f"{projection.rule}, limited by the host, which needs {host} to issue a step"


def describe_projected_step_time(projection: Projection, unit: str = "GPUs") -> str:
    """Return a sentence on a projected step time, or on the reason without one."""
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
    if projection.skill.relative_error_reduction is None:
        return f"{text}; fewer than three measured counts cannot test this rule."
    best = projection.skill.best_naive_rule
    if projection.skill.matches_best_naive_rule and projection.rule == BY_COUNTS:
        return f"{text}; no naive rule had smaller errors on the measured counts."
    if projection.skill.matches_best_naive_rule:
        ratio = f"{1 - projection.skill.relative_error_reduction:.2f} times that of {best}"
        return f"{text}; on the measured counts the rule's error is {ratio}."
    naive_s = projection.step_s_by_naive_rule[best]
    naive = format_short_time(naive_s) if naive_s > 0 else "a time below zero here"
    return f"{text}. On the measured counts {best} had smaller errors; it projects {naive}."
