"""Computes the metrics of the paper's claims from records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from stratbench.analysis.records.groups import Group, Repeats
from stratbench.statistics.intervals import IntervalEstimate, compute_geometric_mean_ratio

#: Name in claims.csv of the metric on memory.
MEMORY_RATIO = "memory of ddp / memory of fsdp"
#: Names in claims.csv of the metrics on the size of VGG16, each with the factor by which the number of
#: parameters is multiplied.
VGG16_SIZE_METRICS = {
    "parameters of vgg16 in fp32 (MB)": 4e-6,
    "parameters of vgg16 / 4 (millions)": 1e-6 / 4,
}


@dataclass(frozen=True)
class ClaimValue:
    """A value of a claim's metric, with its cells and its interval or range."""

    #: Name of the cells, such as `vgg16 on 4`.
    cells_label: str
    value: float
    range_low: float | None = None
    range_high: float | None = None
    #: Meaning of `range_low` and `range_high`. `interval`: a confidence interval (95 %, for all values of a
    #: claim together). `range`: the lowest and the highest repeat. `bound`: one end is known, since a
    #: training reached its time limit. `exact`: there are no ends.
    range_kind: Literal["interval", "range", "bound", "exact"] = "interval"
    #: Values of two groups, paired by repeat, from which an interval is computed; shape [2, repeats].
    paired_values: np.ndarray | None = None
    #: Converts the mean ratio of the paired values to `value`.
    convert_ratio: Callable[[float], float] = float
    #: Whether a group trains with parameter servers.
    uses_servers: bool = False

    def copy_with_interval(self, ratio: IntervalEstimate) -> ClaimValue:
        """Return a copy with the interval of a ratio. Without an interval, return this value itself."""
        if ratio.low is None:
            return self
        low, high = sorted(map(self.convert_ratio, ratio[1:]))
        return replace(self, range_low=low, range_high=high)


#: A function from the groups of all cells to the values of a claim.
ClaimMetric = Callable[[Repeats], Iterator[ClaimValue]]
#: A function from a group to the two groups whose ratio is computed; None if the group has no such pair.
PairSelector = Callable[[Group], tuple[Group, Group] | None]


def compute_ratio_of_groups(
    groups: Repeats,
    numerator: Group,
    denominator: Group,
    column: str,
    audited_kind: str,
    cells_label: str,
    convert_ratio: Callable[[float], float] = float,
) -> ClaimValue | None:
    """Return the mean ratio of the values of two groups, over their common repeats.

    A group is all repeats of a cell. The ratio is a bound if one of the groups reached its time limit. The
    result is None if a group has no values.

    Args:
        groups: All groups.
        numerator: Group of the numerator.
        denominator: Group of the denominator.
        column: Column of cells.csv with the values.
        audited_kind: Kind of values. A repeat does not count if the audit rejects its values of this kind.
        cells_label: Name of the cells.
        convert_ratio: Converts the ratio to the claim's unit.
    """
    pair = groups.read_values_of_common_repeats((numerator, denominator), column, audited_kind)
    if pair.size:
        served = groups.has_parameter_servers((numerator, denominator))
        return ClaimValue(
            cells_label,
            convert_ratio(compute_geometric_mean_ratio(*pair)),
            paired_values=pair,
            convert_ratio=convert_ratio,
            uses_servers=served,
        )
    if column != "train_time_s":
        return None
    for stopped, ended, upward in ((numerator, denominator, True), (denominator, numerator, False)):
        least_s = estimate_min_train_time_s(groups, stopped, ended)
        ended_s = groups.compute_median_of_repeats(ended, column, audited_kind)
        if least_s is None or least_s <= 0 or ended_s is None:
            continue
        ratio = least_s / ended_s
        ends = (ratio, np.inf) if upward else (0.0, 1 / ratio)
        low, high = sorted(convert_ratio(end) for end in ends)
        return ClaimValue(
            cells_label, convert_ratio(ratio if upward else 1 / ratio), low, high, "bound"
        )
    return None


def find_reached_time_limit_s(groups: Repeats, group: Group) -> float | None:
    """Return a group's time limit in seconds if the group reached the limit, else None."""
    if group in groups.ok or group not in groups.all:
        return None
    rows = groups.all[group]
    limits = rows.loc[rows["status"] == "timeout", "time_limit_s"].dropna()
    return float(limits.min()) if len(limits) else None


def estimate_min_train_time_s(groups: Repeats, group: Group, finished: Group) -> float | None:
    """Return a lower bound in seconds on a timed-out group's training time.

    The bound is the time limit without the time for start-up and evaluation. The latter is estimated from
    another group.

    Args:
        groups: All groups.
        group: Group that reached its time limit.
        finished: Group whose training finished.
    """
    limit = find_reached_time_limit_s(groups, group)
    if limit is None or finished not in groups.ok:
        return None
    rest = groups.ok[finished][["setup_s", "data_s", "warmup_s", "eval_s"]].median().sum()
    return limit - float(rest)


def make_ratio_metric(
    select_pair: PairSelector,
    label: str = "{model} on {gpus}",
    column: str = "train_time_s",
    audited_kind: str = "time",
    scale: Callable[[float, int], float] = lambda ratio, gpus: ratio,
) -> ClaimMetric:
    """Return a metric that yields the ratios of pairs of groups.

    Args:
        select_pair: Returns the numerator and the denominator for a group, or None.
        label: Name of the cells, as a format string with the fields of a group.
        column: Column of cells.csv with the values.
        audited_kind: Kind of values. A repeat does not count if the audit rejects its values of this kind.
        scale: Converts a ratio to the claim's unit, given the group's number of GPUs.
    """

    def iter_ratios(groups: Repeats) -> Iterator[ClaimValue]:
        limited = (
            group for group in groups.all if find_reached_time_limit_s(groups, group) is not None
        )
        for group in (*groups.ok, *limited):
            if (pair := select_pair(group)) is None:
                continue
            value = compute_ratio_of_groups(
                groups, *pair, column, audited_kind, label.format(**group._asdict()),
                lambda ratio, gpus=group.gpus: scale(ratio, gpus),
            )  # fmt: skip
            if value is not None:
                yield value

    return iter_ratios


def make_strategy_pair_selector(numerator_strategy: str, denominator_strategy: str) -> PairSelector:
    """Return a function that pairs a group of one strategy with another strategy's group.

    The two groups differ only in strategy. The function returns both groups, or None for a group of any
    other strategy.

    Args:
        numerator_strategy: Strategy of the first group.
        denominator_strategy: Strategy of the second group.
    """
    return lambda group: (
        (group, group.copy_with_strategy(denominator_strategy))
        if group.strategy == numerator_strategy
        else None
    )


def iter_accuracy_differences(groups: Repeats) -> Iterator[ClaimValue]:
    """Yield the accuracy of ps-sync minus that of ps-async, by model and number of GPUs.

    A difference is in percentage points. Its range is from the lowest to the highest difference of the
    repeats.
    """
    for group in groups.ok:
        if group.strategy != "ps-sync":
            continue
        for rival in iter_groups_with_same_work(groups, group, "ps-async"):
            pair = groups.read_values_of_common_repeats((group, rival), "score_final", "score")
            if pair.size:
                yield compute_median_over_repeats(group, 100 * (pair[0] - pair[1]))


def iter_recovered_accuracy_shares(groups: Repeats) -> Iterator[ClaimValue]:
    """Yield the share of the lost accuracy that the strategy ps-async-modified recovers.

    The loss is the accuracy of ps-sync minus that of ps-async. A share is the median over the repeats that
    all three strategies have. Repeats without a loss do not count.
    """
    for group in groups.ok:
        if group.strategy != "ps-async-modified":
            continue
        others = [
            next(iter_groups_with_same_work(groups, group, n), None)
            for n in ("ps-sync", "ps-async")
        ]
        if None in others:
            continue
        sync, lossy, mine = groups.read_values_of_common_repeats(
            (*others, group), "score_final", "score"
        )
        shares = (mine - lossy)[sync > lossy] / (sync - lossy)[sync > lossy]
        if shares.size:
            yield compute_median_over_repeats(group, shares)


def compute_median_over_repeats(group: Group, values: np.ndarray) -> ClaimValue:
    """Return the median of values over a group's repeats. Several values also have a range."""
    ends = (float(values.min()), float(values.max())) if values.size > 1 else (None, None)
    return ClaimValue(f"{group.model} on {group.gpus}", float(np.median(values)), *ends, "range")


def iter_groups_with_same_work(groups: Repeats, group: Group, strategy: str) -> Iterator[Group]:
    """Yield the groups of another strategy with the same model, number of GPUs and work.

    Args:
        groups: All groups.
        group: A group.
        strategy: The other strategy.
    """
    for experiment in dict.fromkeys(other.experiment for other in groups.ok):
        other = group._replace(experiment=experiment, strategy=strategy)
        if other in groups.ok and has_same_work(groups, group, other):
            yield other


def has_same_work(groups: Repeats, one: Group, other: Group) -> bool:
    """Return whether two groups have the same data set, epochs, global batch and precision.

    Args:
        groups: All groups.
        one: A group.
        other: Another group.
    """
    columns = ["dataset", "global_batch", "epochs", "precision"]
    first, second = (groups.ok[key].iloc[0][columns].fillna("") for key in (one, other))
    return bool((first == second).all())


def make_vgg16_size_metric(parameter_count_factor: float) -> ClaimMetric:
    """Return a metric: the number of parameters of our VGG16, times `parameter_count_factor`."""

    def iter_vgg16_sizes(groups: Repeats) -> Iterator[ClaimValue]:
        for (_, _, model, _), rows in groups.ok.items():
            counts = rows["model_parameters"].dropna()
            if model == "vgg16" and len(counts):
                yield ClaimValue(
                    "vgg16", float(counts.iloc[0]) * parameter_count_factor, range_kind="exact"
                )
                return

    return iter_vgg16_sizes


#: Name of the cells of a value, as a format string, for metrics of any strategy.
_ANY_STRATEGY_LABEL = "{strategy}, {model} on {gpus}"

METRICS: dict[str, ClaimMetric] = {
    MEMORY_RATIO: make_ratio_metric(
        # On one GPU, FSDP shards nothing, so it needs as much memory as DDP.
        lambda group: make_strategy_pair_selector("ddp", "fsdp")(group) if group.gpus > 1 else None,
        column="peak_memory_bytes",
        audited_kind="memory",
    ),
    "training time of fsdp / of ddp": make_ratio_metric(make_strategy_pair_selector("fsdp", "ddp")),
    "time saved by ps-async against ps-sync (%)": make_ratio_metric(
        make_strategy_pair_selector("ps-async", "ps-sync"),
        scale=lambda ratio, gpus: 100 * (1 - ratio),
    ),
    "accuracy of ps-sync - of ps-async (points)": iter_accuracy_differences,
    "share of the lost accuracy that ps-async-modified recovers": iter_recovered_accuracy_shares,
    "speedup at N workers / N": make_ratio_metric(
        lambda group: (group.copy_with_gpu_count(1), group) if group.gpus > 1 else None,
        _ANY_STRATEGY_LABEL,
        scale=lambda ratio, gpus: ratio / gpus,
    ),
    "time at 2 GPUs / time at 4 GPUs": make_ratio_metric(
        lambda group: (
            (group, group.copy_with_gpu_count(4))
            if (group.strategy, group.gpus) == ("ps-async-modified", 2)
            else None
        ),
        "{model}",
    ),
    "training time of any strategy / of ddp": make_ratio_metric(
        lambda group: (group, group.copy_with_strategy("ddp")) if group.strategy != "ddp" else None,
        _ANY_STRATEGY_LABEL,
    ),
    **{name: make_vgg16_size_metric(scale) for name, scale in VGG16_SIZE_METRICS.items()},
}
