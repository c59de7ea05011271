"""Rules on other reasons for a difference between strategies: the hour, or the host."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stratbench.analysis.records.derived import device_name, value_at
from stratbench.analysis.records.groups import Group
from stratbench.cell.record import Record
from stratbench.extensions.audit.rule import AuditData, Case, rule

#: A ratio of times that another hour or another node of the same kind explains. Nodes with one slow GPU and
#: machines that get hot differ by 10 to 20 %.
EXPLAINED = 1.25
#: The rule fires by chance in one experiment of a thousand, and a lesser change does not matter.
CHANCE, CHANGE = 0.001, 0.03
#: Runs on a host where no other strategy ran, from which that is no chance.
ALONE = 3
#: Residuals of runs that follow one another: standard deviations of their correlation by chance.
NEIGHBOURS = 3.3


class Run(NamedTuple):
    """One repeat: start and end in s since 1970 (None: not recorded), hosts, log of its time.

    `device`: the names of its GPUs or processors.
    """

    repeat: int
    begun_s: float | None
    ended_s: float | None
    hosts: str
    log_s: float
    device: str


@lru_cache(maxsize=1)
def runs_of(evidence: AuditData) -> dict[Group, list[Run]]:
    """Return the repeats that ended well, of groups with at least two of them."""
    by_group: defaultdict[Group, list[Run]] = defaultdict(list)
    for record in evidence.records:
        cell, time_s = record["cell"], value_at(record, "time.train_time_s")
        if record["status"] == "ok" and time_s is not None and time_s > 0:
            group = Group(cell["experiment"], cell["strategy"], cell["model"], cell["gpus"])
            ends = (moment_of(record, name) for name in ("started", "finished"))
            place = hosts_of(record), math.log(time_s), device_name(record) or ""
            by_group[group].append(Run(cell["repeat"], *ends, *place))
    return {group: runs for group, runs in by_group.items() if len(runs) > 1}


def moment_of(record: Record, name: str) -> float | None:
    """Return a date in the record's provenance, in s since 1970."""
    text = value_at(record, f"provenance.{name}")
    return datetime.fromisoformat(text).timestamp() if text else None


def hosts_of(record: Record) -> str:
    """Return the hosts of a record's workers as one text.

    Empty if they are not recorded.
    """
    names = {value_at(worker["provenance"], "host.name") for worker in record["workers"]}
    return ", ".join(sorted(names - {None}))


def rivals_by_group(
    evidence: AuditData, on_equal_counts: bool
) -> Iterator[tuple[Group, list[Group]]]:
    """Yield each group with the compared groups of similar time, within EXPLAINED."""
    runs = runs_of(evidence)
    means = {group: float(np.mean([run.log_s for run in own])) for group, own in runs.items()}
    compared: defaultdict[tuple[object, ...], list[Group]] = defaultdict(list)
    for group in runs:
        compared[(*group.comparison, group.gpus if on_equal_counts else 0)].append(group)
    for members in compared.values():
        for group in members:
            yield (
                group,
                [
                    other
                    for other in members
                    if other != group and abs(means[other] - means[group]) < math.log(EXPLAINED)
                ],
            )


@rule("confounded-order", "warning", "time")
def confounded_order(evidence: AuditData) -> Iterator[Case]:
    """The strategy was trained at another time than most that are about as fast: all of it before or after
    them, or in a study whose times follow the order. A machine that changed meanwhile makes such a
    difference.
    Train all of them anew, as one study.
    """
    yield from ((group, how) for group, how, doubtful in out_of_turn(evidence) if doubtful)


@rule("not-in-turns", "note", "time")
def not_in_turns(evidence: AuditData) -> Iterator[Case]:
    """The strategy took no turns with most that are about as fast, as in a queue that fills gaps with small
    jobs; nothing tells that the machine changed meanwhile.
    """
    yield from ((group, how) for group, how, doubtful in out_of_turn(evidence) if not doubtful)


@lru_cache(maxsize=1)
def out_of_turn(evidence: AuditData) -> list[tuple[Group, str, bool]]:
    """Return the groups that were not interleaved with most alternatives, and how."""
    groups, drifting = [], trends(evidence)
    timed = {
        group: {run.repeat: run for run in runs if None not in (run.begun_s, run.ended_s)}
        for group, runs in runs_of(evidence).items()
    }
    for group, rivals in rivals_by_group(evidence, on_equal_counts=False):
        named: defaultdict[str, list[str]] = defaultdict(list)
        wholly = 0
        for other in rivals:
            if how := order_apart(timed[group], timed[other]):
                named[how].append(f"{other.strategy} on {other.gpus}")
                wholly += are_apart(timed[group].values(), timed[other].values())
        # One that was added later is apart from all others, and each of those from it alone.
        if 2 * sum(map(len, named.values())) > len(rivals):
            text = " and ".join(f"{how} {', '.join(names)}" for how, names in named.items())
            is_doubtful = 2 * wholly > len(rivals) or group.experiment in drifting
            groups.append((group, f"trained {text}, not in turns", is_doubtful))
    return groups


def are_apart(own: Iterable[Run], others: Iterable[Run]) -> bool:
    """Return whether all of some runs ended before the others began, or vice versa."""
    (begun, ended), (from_s, to_s) = (
        (min(run.begun_s for run in runs), max(run.ended_s for run in runs))
        for runs in map(list, (own, others))
    )
    return ended <= from_s or to_s <= begun


def order_apart(own: dict[int, Run], others: dict[int, Run]) -> str:
    """Return `before` or `after` if most pairs of equal repeats were not interleaved.

    They are not interleaved if other repeats of the two ran in between.
    """
    pairs = [(run, others[repeat]) for repeat, run in own.items() if repeat in others]
    if len(pairs) < 2:
        return ""
    both = [*own.values(), *others.values()]
    ahead = sum(ahead_of(one, other, both) for one, other in pairs) / len(pairs)
    return "" if abs(ahead) <= 0.5 else "before" if ahead > 0 else "after"


def ahead_of(one: Run, other: Run, runs: Sequence[Run]) -> int:
    """Return 1 if `one` ended before `other` began, or -1 vice versa, with another run between.

    Args:
        one: A run.
        other: Another run.
        runs: All runs.
    """
    first, last = (one, other) if one.begun_s <= other.begun_s else (other, one)
    from_s, to_s = first.ended_s, last.begun_s
    between = from_s < to_s and any(from_s <= r.begun_s and r.ended_s <= to_s for r in runs)
    return 0 if not between else 1 if first is one else -1


@rule("confounded-host", "warning", "time")
def confounded_host(evidence: AuditData) -> Iterator[Case]:
    """The strategy is known by its host, and one that is about as fast ran elsewhere: what differs may be the
    hosts. Spread repeats over hosts, or train all strategies on the same.
    """
    homes: defaultdict[tuple[str, int], defaultdict[str, list[str]]]
    homes = defaultdict(lambda: defaultdict(list))
    for group, runs in runs_of(evidence).items():
        homes[group.experiment, group.gpus][group.strategy] += [run.hosts for run in runs]
    for group, rivals in rivals_by_group(evidence, on_equal_counts=True):
        hosts = homes[group.experiment, group.gpus]
        own = hosts[group.strategy]
        elsewhere = [r.strategy for r in rivals if own[0] not in hosts[r.strategy]]
        if len(set(own)) > 1 or not own[0] or not elsewhere:
            continue
        # Two runs often share a host by chance; three seldom do if the cluster has no other users.
        others = [theirs for name, theirs in hosts.items() if name != group.strategy]
        if len(own) >= ALONE and not any(own[0] in theirs for theirs in others):
            reason = "where no other strategy ran"
        elif all(len(set(theirs)) == 1 for theirs in others):
            reason = "as each strategy on one host"
        else:
            continue
        yield group, f"all {len(own)} runs on {own[0]}, {reason}; elsewhere: {', '.join(elsewhere)}"


@rule("times-follow-time", "warning", "time")
def times_follow_time(evidence: AuditData) -> Iterator[Case]:
    """How long a cell trained depends on when it ran: the machine got slower or faster during the study.
    Strategies that took turns are compared fairly; a single time, or one beside another study's, is not.
    """
    for experiment, trend in trends(evidence).items():
        yield {"experiment": experiment}, trend


@lru_cache(maxsize=1)
def trends(evidence: AuditData) -> dict[str, str]:
    """Return how times follow the order of execution, by the experiments in which they do."""
    experiments: defaultdict[str, list[list[Run]]] = defaultdict(list)
    for group, runs in runs_of(evidence).items():
        timed = [run for run in runs if run.begun_s is not None]
        if len(timed) > 1:
            experiments[group.experiment].append(timed)
    return {name: trend for name, groups in experiments.items() if (trend := trend_in(groups))}


def trend_in(groups: Sequence[Sequence[Run]]) -> str:
    """Return how log times, less their group's mean, depend on the order of execution.

    It is a regression on the position in the order, or a correlation with the next in the order, which
    detects a slow hour. Positions count within groups, so that the order of strategies does not matter. Empty
    if it may be chance.
    """
    runs = sorted((run.begun_s, i, run) for i, own in enumerate(groups) for run in own)
    total, dof = len(runs), len(runs) - len(groups) - 1
    if dof < 3:
        return ""
    group = np.array([i for _, i, _ in runs])
    x = less_means(np.arange(total) / (total - 1), group)
    y = less_means(np.array([run.log_s for *_, run in runs]), group)
    if slope := slope_beyond_chance(x, y, dof, CHANCE):
        return f"{math.expm1(slope):+.1%} from the first of {total} runs to the last"
    squares, products = float(y @ y), sum(a * b for a, b in pairwise(y))
    if squares > 0 and products / squares * math.sqrt(total) > NEIGHBOURS:
        common = math.sqrt(products / dof)
        if common > math.log1p(CHANGE) / 2:
            return f"{total} runs: neighbours in time share a deviation of {common:.1%}"
    return ""


def less_means(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return values less the mean of their group; `group` has the number of each value's."""
    return values - (np.bincount(group, values) / np.bincount(group))[group]


def slope_beyond_chance(x: np.ndarray, y: np.ndarray, dof: int, chance: float) -> float:
    """Return the slope of `y` over `x`.

    Return 0 where it is less than CHANGE or chance explains it.

    Args:
        x: Positions.
        y: Values.
        dof: Degrees of freedom.
        chance: Allowed probability of chance.
    """
    width = float(x @ x)
    slope = float(x @ y) / width if width else 0.0
    if abs(slope) <= math.log1p(CHANGE):
        return 0.0
    from scipy.special import stdtr  # takes 0.2 s, and few studies need it

    error = math.sqrt(max(0.0, float(y @ y) - slope * slope * width) / dof / width)
    return slope if not error or 2 * stdtr(dof, -abs(slope) / error) < chance else 0.0


@rule("slow-host", "warning", "time")
def slow_host(evidence: AuditData) -> Iterator[Case]:
    """Cells trained longer on one host than their repeats did on others with the same devices: it has another
    load, cooling or set-up. Repeats that ran there say less of a strategy; leave the host out, or mend it.
    """
    experiments: defaultdict[tuple[str, str], list[tuple[int, Run]]] = defaultdict(list)
    for i, (group, runs) in enumerate(runs_of(evidence).items()):
        for run in runs:
            experiments[group.experiment, run.device].append((i, run))
    for (experiment, _), entries in experiments.items():
        hosts = sorted({host for _, run in entries for host in run.hosts.split(", ") if host})
        _, group = np.unique([i for i, _ in entries], return_inverse=True)
        dof = len(entries) - len(set(group)) - 1
        if len(hosts) < 2 or dof < 3:
            continue
        y = less_means(np.array([run.log_s for _, run in entries]), group)
        for host in hosts:
            on_host = np.array([float(host in run.hosts.split(", ")) for _, run in entries])
            slope = slope_beyond_chance(less_means(on_host, group), y, dof, CHANCE / len(hosts))
            if slope > 0:
                figures = f"{math.expm1(slope):+.1%} in {on_host.sum():.0f} of {len(entries)} runs"
                yield {"experiment": experiment}, f"{host}: {figures}"
