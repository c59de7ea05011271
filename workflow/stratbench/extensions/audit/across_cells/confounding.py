"""Rules of the audit on other causes of a difference between strategies: time of day and host."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from stratbench.analysis.records.derived import format_device_names, get_field_by_path
from stratbench.analysis.records.groups import Group
from stratbench.cell.record import Record
from stratbench.extensions.audit.rule import AuditData, Case, rule

#: Largest ratio of two training times that the time of day or the node may explain. Nodes with a slow GPU or
#: a hot room differ by 10 to 20 %.
MAX_EXPLAINED_RATIO = 1.25
#: Probability of a false finding per experiment, and the smallest relative change of times that is reported.
FALSE_FINDING_PROBABILITY, MIN_CHANGE = 0.001, 0.03
#: Minimum number of a strategy's runs on a host of its own. With fewer, the finding may be chance.
MIN_RUNS_ON_OWN_HOST = 3
#: Smallest correlation between the times of successive runs that is reported, in standard errors of
#: independent runs.
MIN_CORRELATION = 3.3


class TimedRun(NamedTuple):
    """One repeat of a cell. Start and end are in seconds since 1970, or None if not recorded.

    `log_train_time` is the logarithm of its training time, and `device` the names of its GPUs or processors.
    """

    repeat: int
    began_unix_s: float | None
    ended_unix_s: float | None
    hosts: str
    log_train_time: float
    device: str


class UnalternatedGroup(NamedTuple):
    """A group of repeats that did not alternate in time with most groups that are about as fast.

    `run_order` is a text on the order of the runs. `order_may_matter` says whether the order may explain
    differences between the training times.
    """

    group: Group
    run_order: str
    order_may_matter: bool


@lru_cache(maxsize=1)
def list_timed_runs_by_group(evidence: AuditData) -> dict[Group, list[TimedRun]]:
    """Return the repeats that ended well, by their group.

    Groups with fewer than two such repeats are left out.
    """
    by_group: defaultdict[Group, list[TimedRun]] = defaultdict(list)
    for record in evidence.records:
        cell, time_s = record["cell"], get_field_by_path(record, "time.train_time_s")
        if record["status"] == "ok" and time_s is not None and time_s > 0:
            group = Group(cell["experiment"], cell["strategy"], cell["model"], cell["gpus"])
            ends = (parse_recorded_time_s(record, end) for end in ("started", "finished"))
            place = join_host_names(record), math.log(time_s), format_device_names(record) or ""
            by_group[group].append(TimedRun(cell["repeat"], *ends, *place))
    return {group: runs for group, runs in by_group.items() if len(runs) > 1}


def parse_recorded_time_s(record: Record, date_field: str) -> float | None:
    """Return a date in a record's provenance as seconds since 1970.

    The result is None if the date is missing.
    """
    text = get_field_by_path(record, f"provenance.{date_field}")
    return datetime.fromisoformat(text).timestamp() if text else None


def join_host_names(record: Record) -> str:
    """Return the names of a record's hosts as one text.

    The text is empty if they are not recorded.
    """
    names = {get_field_by_path(worker["provenance"], "host.name") for worker in record["workers"]}
    return ", ".join(sorted(names - {None}))


def iter_groups_with_similarly_fast_rivals(
    evidence: AuditData, on_equal_worker_counts: bool
) -> Iterator[tuple[Group, list[Group]]]:
    """Yield each group of repeats with its rivals, which are about as fast.

    Times are similar if their ratio is below MAX_EXPLAINED_RATIO.
    """
    runs = list_timed_runs_by_group(evidence)
    means = {
        group: float(np.mean([run.log_train_time for run in own])) for group, own in runs.items()
    }
    compared: defaultdict[tuple[object, ...], list[Group]] = defaultdict(list)
    for group in runs:
        compared[(*group.experiment_and_model, group.gpus if on_equal_worker_counts else 0)].append(
            group
        )
    for members in compared.values():
        for group in members:
            yield (
                group,
                [
                    other
                    for other in members
                    if other != group
                    and abs(means[other] - means[group]) < math.log(MAX_EXPLAINED_RATIO)
                ],
            )


@rule("confounded-order", "warning", "time")
def find_strategies_trained_at_another_time(evidence: AuditData) -> Iterator[Case]:
    """The strategy was trained at another time than most strategies that are about as fast. It ran entirely
    before or after them, or times in this study depend on the order of the runs. A machine that changed
    meanwhile would cause the same difference. Train all of these strategies again as one study.
    """
    yield from (
        (entry.group, entry.run_order)
        for entry in list_groups_run_without_alternation(evidence)
        if entry.order_may_matter
    )


@rule("not-in-turns", "note", "time")
def find_strategies_run_without_alternation(evidence: AuditData) -> Iterator[Case]:
    """The strategy did not alternate with most strategies that are about as fast, for example because a
    scheduler fills gaps with small jobs. There is no sign that the machine changed meanwhile.
    """
    yield from (
        (entry.group, entry.run_order)
        for entry in list_groups_run_without_alternation(evidence)
        if not entry.order_may_matter
    )


@lru_cache(maxsize=1)
def list_groups_run_without_alternation(evidence: AuditData) -> list[UnalternatedGroup]:
    """Return the groups whose runs did not alternate in time with those of most rivals."""
    groups, drifting = [], describe_trends_by_experiment(evidence)
    timed = {
        group: {run.repeat: run for run in runs if None not in (run.began_unix_s, run.ended_unix_s)}
        for group, runs in list_timed_runs_by_group(evidence).items()
    }
    for group, rivals in iter_groups_with_similarly_fast_rivals(
        evidence, on_equal_worker_counts=False
    ):
        named: defaultdict[str, list[str]] = defaultdict(list)
        wholly = 0
        for other in rivals:
            if how := describe_run_order(timed[group], timed[other]):
                named[how].append(f"{other.strategy} on {other.gpus}")
                wholly += have_disjoint_times(timed[group].values(), timed[other].values())
        # The order must be clear for most rivals. If one strategy was added to a study later, only this
        # strategy is reported, and not each of its rivals.
        if 2 * sum(map(len, named.values())) > len(rivals):
            text = " and ".join(f"{how} {', '.join(names)}" for how, names in named.items())
            order_may_matter = 2 * wholly > len(rivals) or group.experiment in drifting
            run_order = f"trained {text}, not alternately"
            groups.append(UnalternatedGroup(group, run_order, order_may_matter))
    return groups


def have_disjoint_times(own: Iterable[TimedRun], others: Iterable[TimedRun]) -> bool:
    """Return whether one group's runs all ended before the other's began, in either order."""
    (begun, ended), (from_s, to_s) = (
        (min(run.began_unix_s for run in runs), max(run.ended_unix_s for run in runs))
        for runs in map(list, (own, others))
    )
    return ended <= from_s or to_s <= begun


def describe_run_order(
    runs_by_repeat: dict[int, TimedRun], other_runs_by_repeat: dict[int, TimedRun]
) -> str:
    """Return `before` or `after`, the order of two groups, or "" without a clear order.

    The order is clear if most pairs of equal repeats have it, with another repeat of the groups between.
    """
    pairs = [
        (run, other_runs_by_repeat[repeat])
        for repeat, run in runs_by_repeat.items()
        if repeat in other_runs_by_repeat
    ]
    if len(pairs) < 2:
        return ""
    both = [*runs_by_repeat.values(), *other_runs_by_repeat.values()]
    ahead = sum(compare_run_order(one, other, both) for one, other in pairs) / len(pairs)
    return "" if abs(ahead) <= 0.5 else "before" if ahead > 0 else "after"


def compare_run_order(
    one: TimedRun, other: TimedRun, runs: Sequence[TimedRun]
) -> Literal[-1, 0, 1]:
    """Return 1 if `one` clearly ran before `other`, -1 if after, else 0.

    The order is clear only if another run came between both runs.

    Args:
        one: A run.
        other: Another run.
        runs: All runs.
    """
    first, last = (one, other) if one.began_unix_s <= other.began_unix_s else (other, one)
    from_s, to_s = first.ended_unix_s, last.began_unix_s
    between = from_s < to_s and any(
        from_s <= r.began_unix_s and r.ended_unix_s <= to_s for r in runs
    )
    return 0 if not between else 1 if first is one else -1


@rule("confounded-host", "warning", "time")
def find_strategies_trained_on_another_host(evidence: AuditData) -> Iterator[Case]:
    """All repeats of the strategy ran on one host, and a strategy that is about as fast ran on others: the
    difference may come from the hosts. Spread repeats over hosts, or train all strategies on the same host.
    """
    homes: defaultdict[tuple[str, int], defaultdict[str, list[str]]]
    homes = defaultdict(lambda: defaultdict(list))
    for group, runs in list_timed_runs_by_group(evidence).items():
        homes[group.experiment, group.gpus][group.strategy] += [run.hosts for run in runs]
    for group, rivals in iter_groups_with_similarly_fast_rivals(
        evidence, on_equal_worker_counts=True
    ):
        hosts = homes[group.experiment, group.gpus]
        own = hosts[group.strategy]
        elsewhere = [r.strategy for r in rivals if own[0] not in hosts[r.strategy]]
        if len(set(own)) > 1 or not own[0] or not elsewhere:
            continue
        others = [theirs for name, theirs in hosts.items() if name != group.strategy]
        if len(own) >= MIN_RUNS_ON_OWN_HOST and not any(own[0] in theirs for theirs in others):
            reason = "where no other strategy ran"
        elif all(len(set(theirs)) == 1 for theirs in others):
            reason = "as each strategy on one host"
        else:
            continue
        yield group, f"all {len(own)} runs on {own[0]}, {reason}; elsewhere: {', '.join(elsewhere)}"


@rule("times-follow-time", "warning", "time")
def find_training_times_with_trend(evidence: AuditData) -> Iterator[Case]:
    """Training times depend on when a cell ran: the machine became slower or faster during the study. A
    comparison of strategies that alternated is fair. Single times, and comparisons with other studies, are
    not reliable.
    """
    for experiment, trend in describe_trends_by_experiment(evidence).items():
        yield {"experiment": experiment}, trend


@lru_cache(maxsize=1)
def describe_trends_by_experiment(evidence: AuditData) -> dict[str, str]:
    """Return a text on each experiment whose training times depend on the cells' order."""
    experiments: defaultdict[str, list[list[TimedRun]]] = defaultdict(list)
    for group, runs in list_timed_runs_by_group(evidence).items():
        timed = [run for run in runs if run.began_unix_s is not None]
        if len(timed) > 1:
            experiments[group.experiment].append(timed)
    return {
        name: trend
        for name, groups in experiments.items()
        if (trend := describe_time_trend(groups))
    }


def describe_time_trend(groups: Sequence[Sequence[TimedRun]]) -> str:
    """Describe how training times depend on the order in which cells ran.

    The text is empty if the dependence may be chance. Log times less their group's mean are regressed on the
    position in the order. A correlation of successive runs also counts, which detects a slow hour. Positions
    are relative to the group's mean, so that the order of strategies does not matter.
    """
    runs = sorted((run.began_unix_s, i, run) for i, own in enumerate(groups) for run in own)
    total, dof = len(runs), len(runs) - len(groups) - 1
    if dof < 3:
        return ""
    group = np.array([i for _, i, _ in runs])
    x = subtract_group_means(np.arange(total) / (total - 1), group)
    y = subtract_group_means(np.array([run.log_train_time for *_, run in runs]), group)
    if slope := compute_significant_slope(x, y, dof, FALSE_FINDING_PROBABILITY):
        return f"{math.expm1(slope):+.1%} from the first of {total} runs to the last"
    squares, products = float(y @ y), sum(a * b for a, b in pairwise(y))
    if squares > 0 and products / squares * math.sqrt(total) > MIN_CORRELATION:
        common = math.sqrt(products / dof)
        if common > math.log1p(MIN_CHANGE) / 2:
            return f"in {total} runs, successive runs share a deviation of {common:.1%}"
    return ""


def subtract_group_means(values: np.ndarray, group_indices: np.ndarray) -> np.ndarray:
    """Return each value less the mean of its group."""
    means = np.bincount(group_indices, values) / np.bincount(group_indices)
    return values - means[group_indices]


def compute_significant_slope(
    x: np.ndarray, y: np.ndarray, dof: int, significance_level: float
) -> float:
    """Return the slope of a linear regression, or 0 if it is not significant.

    The result is also 0 if the slope is smaller than MIN_CHANGE.

    Args:
        x: Positions, with mean 0 in each group.
        y: Values, with mean 0 in each group.
        dof: Degrees of freedom.
        significance_level: Largest probability of such a slope by chance.
    """
    width = float(x @ x)
    slope = float(x @ y) / width if width else 0.0
    if abs(slope) <= math.log1p(MIN_CHANGE):
        return 0.0
    # Few studies need SciPy, which is slow to import.
    from scipy.special import stdtr

    error = math.sqrt(max(0.0, float(y @ y) - slope * slope * width) / dof / width)
    is_significant = not error or 2 * stdtr(dof, -abs(slope) / error) < significance_level
    return slope if is_significant else 0.0


@rule("slow-host", "warning", "time")
def find_slow_hosts(evidence: AuditData) -> Iterator[Case]:
    """Cells took longer on one host than their repeats did on other hosts with the same devices: the host has
    another load, cooling or configuration. Exclude the host, or repair it.
    """
    experiments: defaultdict[tuple[str, str], list[tuple[int, TimedRun]]] = defaultdict(list)
    for i, (group, runs) in enumerate(list_timed_runs_by_group(evidence).items()):
        for run in runs:
            experiments[group.experiment, run.device].append((i, run))
    for (experiment, _), entries in experiments.items():
        hosts = sorted({host for _, run in entries for host in run.hosts.split(", ") if host})
        _, group = np.unique([i for i, _ in entries], return_inverse=True)
        dof = len(entries) - len(set(group)) - 1
        if len(hosts) < 2 or dof < 3:
            continue
        y = subtract_group_means(np.array([run.log_train_time for _, run in entries]), group)
        for host in hosts:
            on_host = np.array([float(host in run.hosts.split(", ")) for _, run in entries])
            slope = compute_significant_slope(
                subtract_group_means(on_host, group), y, dof, FALSE_FINDING_PROBABILITY / len(hosts)
            )
            if slope > 0:
                figures = f"{math.expm1(slope):+.1%} in {on_host.sum():.0f} of {len(entries)} runs"
                yield {"experiment": experiment}, f"{host}: {figures}"
