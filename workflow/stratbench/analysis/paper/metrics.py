"""The metrics of the paper's claims: the figures that a set of records gives for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stratbench.analysis.records.groups import Group
from stratbench.analysis.tables.usable import UsableGroups
from stratbench.statistics.intervals import mean_ratio

#: Metrics of claims.csv that the paper's own audit judges too: of memory, and of the model's size with
#: the factor from its number of parameters.
MEMORY_RATIO = "memory of ddp / memory of fsdp"
SIZES = {
    "parameters of vgg16 in fp32 (MB)": 4e-6,
    "parameters of vgg16 / 4 (millions)": 1e-6 / 4,
}


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


def ratio_figure(
    groups: UsableGroups,
    one: Group,
    other: Group,
    column: str,
    concerns: str,
    label: str,
    scale: Callable[[float], float] = float,
) -> ClaimFigure | None:
    """scale(one / other) over the repeats of both; a bound if one hit its time limit; None without data."""
    pair = groups.common_repeats((one, other), column, concerns)
    if pair is not None:
        served = any(
            (groups.groups[key]["strategy_kind"] == "server").any() for key in (one, other)
        )
        value = scale(mean_ratio(pair[0], pair[1]))
        return ClaimFigure(label, value, pair=pair, scale=scale, served=served)
    if column != "train_time_s":
        return None
    for stopped, ended, upward in ((one, other, True), (other, one, False)):
        least_s = groups.least_time_s(stopped, ended)
        values = groups.values(ended, column, concerns)
        if least_s is None or least_s <= 0 or not values:
            continue
        ratio = least_s / float(np.median(list(values.values())))
        ends = (ratio, np.inf) if upward else (0.0, 1 / ratio)
        low, high = sorted(scale(end) for end in ends)
        return ClaimFigure(label, scale(ratio if upward else 1 / ratio), low, high, "bound")
    return None


def ratios_of(
    one: str, other: str, column: str, concerns: str, scale: Callable[[float], float] = float
) -> Callable[[UsableGroups], Iterator[ClaimFigure]]:
    """The metric `one` / `other` on the same experiment, model and GPUs; `any` is every strategy.

    Memory is compared on several GPUs only: on one there is nothing to shard.
    """

    def figures(groups: UsableGroups) -> Iterator[ClaimFigure]:
        for group in groups.with_time():
            strategy, model, gpus = group.strategy, group.model, group.gpus
            if strategy == other or (strategy != one and one != "any"):
                continue
            if concerns == "memory" and gpus == 1:
                continue
            name = f"{strategy}, {model} on {gpus}" if one == "any" else f"{model} on {gpus}"
            figure = ratio_figure(
                groups, group, group.with_strategy(other), column, concerns, name, scale
            )
            if figure is not None:
                yield figure

    return figures


def points_between(one: str, other: str) -> Callable[[UsableGroups], Iterator[ClaimFigure]]:
    """Accuracy of `one` minus that of `other`, in points, on the same model and GPUs.

    The ends are a range: the lowest and the highest difference of the repeats.
    """

    def figures(groups: UsableGroups) -> Iterator[ClaimFigure]:
        for group in groups.groups:
            for rival in counterparts(groups, group, other) if group.strategy == one else ():
                pair = groups.common_repeats((group, rival), "score_final", "score")
                if pair is not None:
                    yield median_figure(group, 100 * (pair[0] - pair[1]))

    return figures


def share_recovered(groups: UsableGroups) -> Iterator[ClaimFigure]:
    """The share of the accuracy lost by ps-async against ps-sync that modified async regains.

    It is the median over the repeats that all three have, with their range. If nothing is lost, there
    is nothing to recover, and no figure.
    """
    for group in groups.groups:
        if group.strategy != "ps-async-modified":
            continue
        others = [next(counterparts(groups, group, n), None) for n in ("ps-sync", "ps-async")]
        if None in others:
            continue
        found = groups.common_repeats((*others, group), "score_final", "score")
        if found is None:
            continue
        sync, lossy, mine = found
        shares = (mine - lossy)[sync > lossy] / (sync - lossy)[sync > lossy]
        if shares.size:
            yield median_figure(group, shares)


def median_figure(group: Group, values: np.ndarray) -> ClaimFigure:
    """The median over repeats; with their range if there are several."""
    ends = (float(values.min()), float(values.max())) if values.size > 1 else (None, None)
    return ClaimFigure(f"{group.model} on {group.gpus}", float(np.median(values)), *ends, "range")


def counterparts(groups: UsableGroups, group: Group, strategy: str) -> Iterator[Group]:
    """Groups of any experiment in which `strategy` did the same work on the same model and GPUs."""
    for experiment in dict.fromkeys(other.experiment for other in groups.groups):
        other = group._replace(experiment=experiment, strategy=strategy)
        if other in groups.groups and same_work(groups, group, other):
            yield other


def same_work(groups: UsableGroups, one: Group, other: Group) -> bool:
    """Whether both trained equally long, on the same data with the same batch."""
    columns = ["dataset", "global_batch", "epochs", "precision"]
    first, second = (groups.groups[key].iloc[0][columns].fillna("") for key in (one, other))
    return bool((first == second).all())


def scaling_efficiencies(groups: UsableGroups) -> Iterator[ClaimFigure]:
    """The speedups over one worker of the same strategy, divided by N."""
    for group in groups.with_time():
        if group.gpus == 1:
            continue
        name = f"{group.strategy}, {group.model} on {group.gpus}"
        figure = ratio_figure(
            groups, group.with_gpus(1), group, "train_time_s", "time", name,
            lambda ratio, n=group.gpus: ratio / n,
        )  # fmt: skip
        if figure is not None:
            yield figure


def times_from_two_to_four(groups: UsableGroups) -> Iterator[ClaimFigure]:
    """The time of modified async on 2 GPUs, divided by its time on 4."""
    for group in groups.with_time():
        if group.strategy == "ps-async-modified" and group.gpus == 2:
            four = group.with_gpus(4)
            figure = ratio_figure(groups, group, four, "train_time_s", "time", group.model)
            if figure is not None:
                yield figure


def parameters_of_vgg16(scale: float) -> Callable[[UsableGroups], Iterator[ClaimFigure]]:
    """The number of parameters of VGG16 as built, times `scale`."""

    def figures(groups: UsableGroups) -> Iterator[ClaimFigure]:
        for (_, _, model, _), rows in groups.groups.items():
            counts = rows["model_parameters"].dropna()
            if model == "vgg16" and len(counts):
                yield ClaimFigure("vgg16", float(counts.iloc[0]) * scale, ends="exact")
                return

    return figures


METRICS: dict[str, Callable[[UsableGroups], Iterator[ClaimFigure]]] = {
    MEMORY_RATIO: ratios_of("ddp", "fsdp", "peak_memory_bytes", "memory"),
    "training time of fsdp / of ddp": ratios_of("fsdp", "ddp", "train_time_s", "time"),
    "time saved by ps-async against ps-sync (%)": ratios_of(
        "ps-async", "ps-sync", "train_time_s", "time", lambda ratio: 100 * (1 - ratio)
    ),
    "accuracy of ps-sync - of ps-async (points)": points_between("ps-sync", "ps-async"),
    "share of the lost accuracy that ps-async-modified recovers": share_recovered,
    "speedup at N workers / N": scaling_efficiencies,
    "time at 2 GPUs / time at 4 GPUs": times_from_two_to_four,
    "training time of any strategy / of ddp": ratios_of("any", "ddp", "train_time_s", "time"),
    **{name: parameters_of_vgg16(scale) for name, scale in SIZES.items()},
}
