"""The audit's checks: each gets the study and a limit, and yields what exceeds it, with the figures.

What a record does not say cannot trip a check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pandas as pd

GROUP = ["experiment", "model", "strategy", "gpus"]
#: Accuracy that any working training reaches within a few epochs, by data set.
ACCURACY_FLOORS = {"digits": 0.70, "mnist": 0.95, "cifar10": 0.40}
#: More bytes a second than hardware moves. Collectives: what one GPU sends over NVLink 5. Servers: all
#: traffic of one server node, of which its memory moves a multiple.
MOST_BYTES_PER_S = {"collective": 900e9, "server": 200e9}


@dataclass(frozen=True)
class Found:
    """What tripped a rule: the coordinates it is about, and the figures."""

    where: dict[str, Any]
    figures: str


class Study:
    """The cells with a result, and medians over their repeats."""

    def __init__(self, cells: pd.DataFrame) -> None:
        self.ok = cells[cells["status"] == "ok"]
        self.groups = dict(iter(self.ok.groupby(GROUP, sort=False)))
        #: Fewest workers of each (experiment, model, strategy).
        self.fewest = self.ok.groupby(GROUP[:3])["gpus"].min().to_dict()

    def median(self, key: tuple[Any, ...], column: str) -> float | None:
        """Median of a column over the repeats of (experiment, model, strategy, gpus)."""
        rows = self.groups.get(key)
        values = pd.Series(dtype=float) if rows is None else rows[column].dropna()
        return float(values.median()) if len(values) else None

    def base(self, key: tuple[Any, ...]) -> str:
        """The strategy behind a group's name."""
        return str(self.groups[key]["strategy_base"].iloc[0])

    def comparisons(self, column: str) -> Iterator[tuple[tuple[str, str], pd.DataFrame]]:
        """Cells of an experiment and model that state `column`: what a reader compares."""
        stated = self.ok.dropna(subset=[column])
        yield from stated.groupby(["experiment", "model"], sort=False)


def at(key: tuple[Any, ...]) -> dict[str, Any]:
    """Coordinates of a group of repeats."""
    return dict(zip(GROUP, key, strict=True))


def without_count(key: tuple[Any, ...]) -> dict[str, Any]:
    """Coordinates of a strategy: what is wrong on one worker is wrong on any number of them."""
    return {name: value for name, value in at(key).items() if name != "gpus"}


def of(row: Any) -> dict[str, Any]:
    """Coordinates of one cell."""
    return {name: getattr(row, name) for name in (*GROUP, "repeat")}


def sharding_slow_alone(study: Study, limit: float) -> Iterator[Found]:
    for key in study.groups:
        experiment, model, strategy, gpus = key
        if gpus != 1 or study.base(key) != "fsdp":
            continue
        fsdp_s = study.median(key, "train_time_s")
        ddp_s = study.median((experiment, model, "ddp", 1), "train_time_s")
        if fsdp_s and ddp_s and fsdp_s / ddp_s > limit:
            figures = f"{strategy} {fsdp_s:.4g} s, ddp {ddp_s:.4g} s: {fsdp_s / ddp_s:.2f} times"
            yield Found(without_count(key), f"on one worker: {figures}")


def superlinear(study: Study, limit: float) -> Iterator[Found]:
    for key in study.groups:
        experiment, model, strategy, gpus = key
        fewest = study.fewest[key[:3]]
        base = study.median((experiment, model, strategy, fewest), "throughput_samples_per_s")
        here = study.median(key, "throughput_samples_per_s")
        if gpus > fewest and base and here and here / base > limit * gpus / fewest:
            yield Found(at(key), f"{here / base:.2f} times as fast on {gpus} as on {fewest}")


def memory_reduced_too_much(study: Study, limit: float) -> Iterator[Found]:
    columns = {"model_states_bytes": "model states", "peak_memory_bytes": "peak memory"}
    for key in study.groups:
        experiment, model, strategy, gpus = key
        if (study.groups[key]["strategy_kind"] == "server").any():
            continue  # its servers hold the rest
        for column, name in columns.items():
            # A CPU's resident set holds more than the tensors: only its model states compare.
            on_cpu = (study.groups[key]["device_kind"] == "cpu").any()
            whole = study.median((experiment, model, "ddp", gpus), column)
            held = study.median(key, column)
            if not whole or not held or (on_cpu and column != "model_states_bytes"):
                continue
            if whole / held > limit * gpus:
                figures = f"{name}: ddp {whole / 2**20:.4g} MiB, {strategy} {held / 2**20:.4g} MiB"
                yield Found(at(key), f"{figures}: {whole / held:.2f} times on {gpus}")


def implied_bytes_per_s(row: Any) -> float | None:
    """The traffic that a cell's training implies, in bytes a second: what it counted, or the least.

    Collectives: of a rank; servers: of the busiest one. The least counts where it is more, and for
    records that count nothing, such as the paper's.
    """
    is_served = row.strategy_kind == "server"
    counted = getattr(row, "busiest_server_bytes_per_s" if is_served else "implied_bytes_per_s")
    known = [v for v in (counted, least_bytes_per_s(row)) if v is not None and not pd.isna(v)]
    return max(known, default=None)


def least_bytes_per_s(row: Any) -> float | None:
    """The least traffic that a cell's training needs, in bytes a second.

    Collectives, what one rank sends: a ring moves 2(W-1)/W of the parameters to all-reduce, 3(W-1)/W
    to gather twice and reduce-scatter. Servers, an equal share of all workers' traffic: the gradients
    in and the parameters out for every batch. Two bytes a parameter in mixed precision, else four.
    """
    needed = (row.model_parameters, row.samples_seen, row.global_batch, row.train_time_s)
    if any(pd.isna(value) for value in needed) or not row.train_time_s:
        return None
    width = 2 if row.precision in ("fp16", "bf16") else 4
    one_copy = row.model_parameters * width * row.samples_seen / row.global_batch
    if row.strategy_kind == "server":
        servers = 1 if pd.isna(row.servers) else row.servers
        return float(2 * row.gpus * one_copy / servers / row.train_time_s)
    share = (row.gpus - 1) / row.gpus
    return float(
        {"ddp": 2, "fsdp": 3}.get(row.strategy_base, 0) * share * one_copy / row.train_time_s
    )


def bandwidth_impossible(study: Study, limit: float) -> Iterator[Found]:
    for row in study.ok.itertuples():
        implied = implied_bytes_per_s(row)
        most = MOST_BYTES_PER_S.get(row.strategy_kind, float("inf"))
        if implied and implied > limit * most:
            where = {name: getattr(row, name) for name in (*GROUP, "repeat")}
            yield Found(
                where, f"{implied / 1e9:.0f} GB/s implied, {most / 1e9:.0f} thought possible"
            )


def accuracy_below_floor(study: Study, limit: float) -> Iterator[Found]:
    for row in study.ok.itertuples():
        floor = ACCURACY_FLOORS.get(row.dataset)
        if floor and row.accuracy_final < limit * floor:
            yield Found(of(row), f"{row.accuracy_final:.1%}; working training reaches {floor:.0%}")


def async_alone_unlike_sync(study: Study, limit: float) -> Iterator[Found]:
    for key in study.groups:
        experiment, model, _, gpus = key
        base = study.base(key)
        if gpus != 1 or not base.startswith("ps-") or base == "ps-sync":
            continue
        sync = (experiment, model, "ps-sync", 1)
        mine, its = (study.median(k, "accuracy_final") for k in (key, sync))
        if mine is not None and its is not None and abs(mine - its) > limit:
            yield Found(
                without_count(key), f"on one worker: accuracy {mine:.1%}, ps-sync {its:.1%}"
            )


def same_value_twice(study: Study, limit: float) -> Iterator[Found]:
    timed = study.ok.dropna(subset=["train_time_s"])
    for value, rows in timed.groupby("train_time_s", sort=False):
        if len(rows) >= limit and len(str(value).replace(".", "").strip("0")) >= 4:
            cells = [f"{r.strategy} {r.model} on {r.gpus}" for r in rows.itertuples()]
            for row in rows.itertuples():
                yield Found(of(row), f"{value} s in {' and in '.join(cells)}")


def unequal_samples(study: Study, limit: float) -> Iterator[Found]:
    for (experiment, model), rows in study.comparisons("samples_seen"):
        low, high = rows["samples_seen"].min(), rows["samples_seen"].max()
        if high > limit * low:
            where = {"experiment": experiment, "model": model}
            yield Found(where, f"{low:.0f} to {high:.0f} samples")


def unequal_start(study: Study, limit: float) -> Iterator[Found]:
    for (experiment, model), rows in study.comparisons("initial_weights_sha256"):
        for repeat, same in rows.groupby("repeat", sort=False):
            hashes = same["initial_weights_sha256"]
            if hashes.nunique() > limit:
                usual = hashes.mode().iloc[0]
                others = ", ".join(sorted(set(same.loc[hashes != usual, "strategy"])))
                where = {"experiment": experiment, "model": model, "repeat": repeat}
                yield Found(
                    where, f"{hashes.nunique()} different initial weights; not as most: {others}"
                )


def mixed(column: str) -> Callable[[Study, float], Iterator[Found]]:
    """A check that the compared cells have the same value in `column`."""

    def check(study: Study, limit: float) -> Iterator[Found]:
        for (experiment, model), rows in study.comparisons(column):
            values = sorted(set(rows[column].astype(str)))
            if len(values) > limit:
                where = {"experiment": experiment, "model": model}
                yield Found(where, f"{column}: {', '.join(values)}")

    return check


def above(column: str, text: str) -> Callable[[Study, float], Iterator[Found]]:
    """A check that no cell's `column` exceeds the limit; `text` formats the value."""

    def check(study: Study, limit: float) -> Iterator[Found]:
        for row in study.ok[study.ok[column] > limit].itertuples():
            yield Found(of(row), text.format(getattr(row, column)))

    return check


def steps_uneven(study: Study, limit: float) -> Iterator[Found]:
    for row in study.ok.itertuples():
        if row.step_p99_ms > limit * row.step_p50_ms:
            figures = f"99th percentile {row.step_p99_ms:.4g} ms, median {row.step_p50_ms:.4g} ms"
            yield Found(of(row), figures)


def repeats_uneven(study: Study, limit: float) -> Iterator[Found]:
    for key, rows in study.groups.items():
        times = rows["train_time_s"].dropna()
        if len(times) > 1 and times.max() - times.min() > limit * times.median():
            yield Found(
                at(key), f"{times.min():.4g} to {times.max():.4g} s over {len(times)} repeats"
            )


def input_bound(study: Study, limit: float) -> Iterator[Found]:
    for row in study.ok.itertuples():
        if row.data_ms > limit * row.step_mean_ms:
            yield Found(
                of(row), f"data {row.data_ms:.4g} ms of a step of {row.step_mean_ms:.4g} ms"
            )


def synthetic_unlike_real(study: Study, limit: float) -> Iterator[Found]:
    same = ["model", "strategy", "gpus", "global_batch", "precision"]
    column = "throughput_samples_per_s"
    for _, rows in study.ok.groupby(same, sort=False):
        is_synthetic = rows["synthetic_data"].astype(str) == "True"
        made, real = (
            rows.loc[is_synthetic, column].median(),
            rows.loc[~is_synthetic, column].median(),
        )
        if max(made, real) > limit * min(made, real):
            figures = f"{made:.4g} samples/s on generated data, {real:.4g} on real"
            yield Found({k: rows[k].iloc[0] for k in ("model", "strategy", "gpus")}, figures)


def processes_share_cores(study: Study, limit: float) -> Iterator[Found]:
    for experiment, rows in study.ok.groupby("experiment", sort=False):
        cpu = rows[(rows["device_kind"] == "cpu") & (rows["gpus"] > limit * rows["cpu_cores"])]
        for gpus, crowded in cpu.groupby("gpus", sort=False):
            cores = crowded["cpu_cores"].max()
            where = {"experiment": experiment, "gpus": gpus}
            yield Found(where, f"{gpus} processes on {cores:g} cores")


def workers_are_processes(study: Study, limit: float) -> Iterator[Found]:
    for experiment, rows in study.ok.groupby("experiment", sort=False):
        cpu = rows[rows["device_kind"] == "cpu"]
        if len(cpu) >= limit:
            cores = " or ".join(f"{n:g}" for n in sorted(set(cpu["cpu_cores"].dropna())))
            hosts = ", ".join(sorted(set(cpu["host"].dropna())))
            yield Found(
                {"experiment": experiment}, f"CPU processes sharing {cores} cores of {hosts}"
            )


def no_common_cell(study: Study, limit: float) -> Iterator[Found]:
    kinds = study.ok.groupby(["experiment", "model"])["strategy_kind"].agg(set)
    all_kinds = set().union(*kinds) if len(kinds) else set()
    for one, other in combinations(sorted(all_kinds), 2):
        if sum({one, other} <= found for found in kinds) < limit:
            yield Found({}, f"no experiment and model has strategies of both kinds: {one}, {other}")
