"""The metrics of the paper's claims: the values of each for a set of records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from stratbench.analysis.records.groups import Group, Repeats
from stratbench.statistics.intervals import IntervalEstimate, mean_ratio

#: Metrics of claims.csv: of memory, and of the model's size with the factor from its number of parameters.
MEMORY_RATIO = "memory of ddp / memory of fsdp"
SIZES = {"parameters of vgg16 in fp32 (MB)": 4e-6, "parameters of vgg16 / 4 (millions)": 1e-6 / 4}


@dataclass(frozen=True)
class ClaimFigure:
    """One value of a claim's metric: its origin, and its possible range.

    `ends` is the kind of `low` and `high`: a 95 % `interval`, which holds for all figures of a claim
    together; the `range` from the lowest to the highest repeat; or the `bound` that a time limit
    leaves. An `exact` value has no ends.
    """

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    ends: Literal["interval", "range", "bound", "exact"] = "interval"
    #: The data of an interval: `value` is `scale` of the mean ratio of `pair`, shape [2, repeats];
    #: `served`: whether parameter servers take part.
    pair: np.ndarray | None = None
    scale: Callable[[float], float] = float
    served: bool = False

    def with_ends(self, ratio: IntervalEstimate) -> ClaimFigure:
        """Return the figure with the interval of its ratio, if that has one."""
        if ratio.low is None:
            return self
        low, high = sorted(map(self.scale, ratio[1:]))
        return replace(self, low=low, high=high)


def ratio_figure(
    groups: Repeats,
    one: Group,
    other: Group,
    column: str,
    concerns: str,
    label: str,
    scale: Callable[[float], float] = float,
) -> ClaimFigure | None:
    """Return scale(one / other) over the repeats of both, or None without data.

    It is a bound if one reached its time limit.

    Args:
        groups: All repeats.
        one: A group.
        other: Another group.
        column: Column of the values.
        concerns: Concern of audit findings.
        label: Label of the value.
        scale: Converts the ratio.
    """
    pair = groups.common((one, other), column, concerns)
    if pair.size:
        served = groups.are_served((one, other))
        return ClaimFigure(label, scale(mean_ratio(*pair)), pair=pair, scale=scale, served=served)
    if column != "train_time_s":
        return None
    for stopped, ended, upward in ((one, other, True), (other, one, False)):
        least_s = least_time_s(groups, stopped, ended)
        ended_s = groups.median(ended, column, concerns)
        if least_s is None or least_s <= 0 or ended_s is None:
            continue
        ratio = least_s / ended_s
        ends = (ratio, np.inf) if upward else (0.0, 1 / ratio)
        low, high = sorted(scale(end) for end in ends)
        return ClaimFigure(label, scale(ratio if upward else 1 / ratio), low, high, "bound")
    return None


def limit_s(groups: Repeats, group: Group) -> float | None:
    """Return the time limit of a group that reached its own, and so took longer.

    Return None of any other.
    """
    if group in groups.ok or group not in groups.all:
        return None
    rows = groups.all[group]
    limits = rows.loc[rows["status"] == "timeout", "time_limit_s"].dropna()
    return float(limits.min()) if len(limits) else None


def least_time_s(groups: Repeats, group: Group, beside: Group) -> float | None:
    """Return a lower bound on a group's training time at its limit, using another's start-up.

    Args:
        groups: All repeats.
        group: A group.
        beside: The other group.
    """
    limit = limit_s(groups, group)
    if limit is None or beside not in groups.ok:
        return None
    rest = groups.ok[beside][["setup_s", "data_s", "warmup_s", "eval_s"]].median().sum()
    return limit - float(rest)


def ratios(
    pair_of: Callable[[Group], tuple[Group, Group] | None],
    label: str = "{model} on {gpus}",
    column: str = "train_time_s",
    concerns: str = "time",
    scale: Callable[[float, int], float] = lambda ratio, gpus: ratio,
) -> Callable[[Repeats], Iterator[ClaimFigure]]:
    """Return the metric of the ratios of pairs of groups.

    Args:
        pair_of: Returns the pair for a group with a time, if any.
        label: Label of a value, with its coordinates.
        column: Column of the values.
        concerns: Concern of audit findings.
        scale: Converts a ratio and the group's number of GPUs.
    """

    def figures(groups: Repeats) -> Iterator[ClaimFigure]:
        limited = (group for group in groups.all if limit_s(groups, group) is not None)
        for group in (*groups.ok, *limited):
            if (pair := pair_of(group)) is None:
                continue
            figure = ratio_figure(
                groups, *pair, column, concerns, label.format(**group._asdict()),
                lambda ratio, gpus=group.gpus: scale(ratio, gpus),
            )  # fmt: skip
            if figure is not None:
                yield figure

    return figures


def pairs_of(one: str, other: str) -> Callable[[Group], tuple[Group, Group] | None]:
    """Return the pairs of two strategies, on the same experiment, model and GPUs."""
    return lambda group: (group, group.with_strategy(other)) if group.strategy == one else None


def points_between(one: str, other: str) -> Callable[[Repeats], Iterator[ClaimFigure]]:
    """Accuracy of `one` minus that of `other`, in points, on the same model and GPUs.

    The ends are a range: the lowest and the highest difference of the repeats.
    """

    def figures(groups: Repeats) -> Iterator[ClaimFigure]:
        for group in groups.ok:
            for rival in counterparts(groups, group, other) if group.strategy == one else ():
                pair = groups.common((group, rival), "score_final", "score")
                if pair.size:
                    yield median_figure(group, 100 * (pair[0] - pair[1]))

    return figures


def share_recovered(groups: Repeats) -> Iterator[ClaimFigure]:
    """Yield the share of the accuracy lost by ps-async against ps-sync that modified async regains.

    It is the median over the repeats that all three have, with their range. If nothing is lost, there
    is nothing to recover, and no figure.
    """
    for group in groups.ok:
        if group.strategy != "ps-async-modified":
            continue
        others = [next(counterparts(groups, group, n), None) for n in ("ps-sync", "ps-async")]
        if None in others:
            continue
        sync, lossy, mine = groups.common((*others, group), "score_final", "score")
        shares = (mine - lossy)[sync > lossy] / (sync - lossy)[sync > lossy]
        if shares.size:
            yield median_figure(group, shares)


def median_figure(group: Group, values: np.ndarray) -> ClaimFigure:
    """Return the median over repeats; with their range if there are several."""
    ends = (float(values.min()), float(values.max())) if values.size > 1 else (None, None)
    return ClaimFigure(f"{group.model} on {group.gpus}", float(np.median(values)), *ends, "range")


def counterparts(groups: Repeats, group: Group, strategy: str) -> Iterator[Group]:
    """Yield groups in which `strategy` did the same work on the same model and GPUs.

    Args:
        groups: All repeats.
        group: A group.
        strategy: The other strategy.
    """
    for experiment in dict.fromkeys(other.experiment for other in groups.ok):
        other = group._replace(experiment=experiment, strategy=strategy)
        if other in groups.ok and same_work(groups, group, other):
            yield other


def same_work(groups: Repeats, one: Group, other: Group) -> bool:
    """Return whether both trained equally long, on the same data with the same batch.

    Args:
        groups: All repeats.
        one: A group.
        other: Another group.
    """
    columns = ["dataset", "global_batch", "epochs", "precision"]
    first, second = (groups.ok[key].iloc[0][columns].fillna("") for key in (one, other))
    return bool((first == second).all())


def parameters_of_vgg16(scale: float) -> Callable[[Repeats], Iterator[ClaimFigure]]:
    """Return the number of parameters of VGG16 as built, times `scale`."""

    def figures(groups: Repeats) -> Iterator[ClaimFigure]:
        for (_, _, model, _), rows in groups.ok.items():
            counts = rows["model_parameters"].dropna()
            if model == "vgg16" and len(counts):
                yield ClaimFigure("vgg16", float(counts.iloc[0]) * scale, ends="exact")
                return

    return figures


#: The label of a figure of any strategy.
_ANY = "{strategy}, {model} on {gpus}"

METRICS: dict[str, Callable[[Repeats], Iterator[ClaimFigure]]] = {
    MEMORY_RATIO: ratios(
        # On one GPU there is nothing to shard.
        lambda group: pairs_of("ddp", "fsdp")(group) if group.gpus > 1 else None,
        column="peak_memory_bytes",
        concerns="memory",
    ),
    "training time of fsdp / of ddp": ratios(pairs_of("fsdp", "ddp")),
    "time saved by ps-async against ps-sync (%)": ratios(
        pairs_of("ps-async", "ps-sync"), scale=lambda ratio, gpus: 100 * (1 - ratio)
    ),
    "accuracy of ps-sync - of ps-async (points)": points_between("ps-sync", "ps-async"),
    "share of the lost accuracy that ps-async-modified recovers": share_recovered,
    "speedup at N workers / N": ratios(
        lambda group: (group.with_gpus(1), group) if group.gpus > 1 else None,
        _ANY,
        scale=lambda ratio, gpus: ratio / gpus,
    ),
    "time at 2 GPUs / time at 4 GPUs": ratios(
        lambda group: (
            (group, group.with_gpus(4))
            if (group.strategy, group.gpus) == ("ps-async-modified", 2)
            else None
        ),
        "{model}",
    ),
    "training time of any strategy / of ddp": ratios(
        lambda group: (group, group.with_strategy("ddp")) if group.strategy != "ddp" else None, _ANY
    ),
    **{name: parameters_of_vgg16(scale) for name, scale in SIZES.items()},
}
