"""The metrics of the paper's claims: the figures that a set of records gives for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stratbench.analysis.groups import Group
from stratbench.analysis.stats import mean_ratio
from stratbench.analysis.usable import UsableGroups

#: Names of metrics, as claims.csv has them, that the paper's own audit judges too: of memory, and of
#: the model's size with the factor from its number of parameters.
MEMORY_RATIO = "memory of ddp / memory of fsdp"
SIZES = {
    "parameters of vgg16 in fp32 (MB)": 4e-6,
    "parameters of vgg16 / 4 (millions)": 1e-6 / 4,
}


@dataclass(frozen=True)
class ClaimFigure:
    """One value of a claim's metric: where from, and what it may be instead.

    `ends` says what `low` and `high` are: a 95 % `interval`, of all of a claim's together; the lowest
    and the highest of the repeats, a `range`; or what a time limit leaves open, a `bound`. Nothing
    else can be in place of an `exact` value.
    """

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    ends: Literal["interval", "range", "bound", "exact"] = "interval"
    #: What the intervals are made of: `value` is `scale` of the mean ratio of `pair`, shape
    #: [2, repeats]; `served` by parameter servers.
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
    """scale(one / other) over the repeats of both; a bound where one was stopped at its time limit."""
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

    Of memory on several GPUs: on one there is nothing to shard.
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

    Its ends are the lowest and the highest repeat's difference: a range.
    """

    def figures(groups: UsableGroups) -> Iterator[ClaimFigure]:
        for group in groups.groups:
            for rival in counterparts(groups, group, other) if group.strategy == one else ():
                pair = groups.common_repeats((group, rival), "score_final", "score")
                if pair is not None:
                    yield median_figure(group, 100 * (pair[0] - pair[1]))

    return figures


def share_recovered(groups: UsableGroups) -> Iterator[ClaimFigure]:
    """Of the accuracy that ps-async loses against ps-sync, the share that modified async regains.

    The median of the repeats that all three have, with their range; where nothing is lost there is
    nothing to recover.
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
    """The median of a value of each repeat, with the range of several."""
    ends = (float(values.min()), float(values.max())) if values.size > 1 else (None, None)
    return ClaimFigure(f"{group.model} on {group.gpus}", float(np.median(values)), *ends, "range")


def counterparts(groups: UsableGroups, group: Group, strategy: str) -> Iterator[Group]:
    """Groups of any experiment that another strategy trained on the same work, model and GPUs."""
    for experiment in dict.fromkeys(other.experiment for other in groups.groups):
        other = group._replace(experiment=experiment, strategy=strategy)
        if other in groups.groups and same_work(groups, group, other):
            yield other


def same_work(groups: UsableGroups, one: Group, other: Group) -> bool:
    """Whether both trained as long, on the same data with the same batch."""
    columns = ["dataset", "global_batch", "epochs", "precision"]
    first, second = (groups.groups[key].iloc[0][columns].fillna("") for key in (one, other))
    return bool((first == second).all())


def scaling_efficiencies(groups: UsableGroups) -> Iterator[ClaimFigure]:
    """Speedup over one worker of the same strategy, divided by N."""
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
    """Time on 2 over time on 4 GPUs of modified async."""
    for group in groups.with_time():
        if group.strategy == "ps-async-modified" and group.gpus == 2:
            four = group.with_gpus(4)
            figure = ratio_figure(groups, group, four, "train_time_s", "time", group.model)
            if figure is not None:
                yield figure


def parameters_of_vgg16(scale: float) -> Callable[[UsableGroups], Iterator[ClaimFigure]]:
    """Parameters of VGG16 as built, times `scale`."""

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
