"""Rules of the audit on times of cells, repeats and steps that are impossible or unreliable."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np

from stratbench.analysis.records.facts import Facts
from stratbench.analysis.records.groups import GROUP, Group, map_rows_by_group
from stratbench.analysis.records.measures import ALONE
from stratbench.extensions.audit.across_cells.machines import flag_cells_on_busy_hosts
from stratbench.extensions.audit.rule import (
    AuditData,
    Case,
    get_coordinates_of_strategy,
    record_rule,
    rule,
)

#: Ratios above which a value is suspicious: of training times on one worker, of a speedup to the number of
#: workers, of the 99th percentile of step times to their median, of throughputs on generated and real data.
SLOW_ALONE, SUPERLINEAR, UNEVEN_STEPS, SYNTHETIC = 1.15, 1.03, 2.0, 1.05
#: Ratio above which a strategy on one worker is suspiciously faster than `single`.
MAX_SPEEDUP_ALONE = 1.15
#: Largest CPU time of sharding per step in milliseconds that is not suspicious.
MAX_SHARDING_MS = 5.0
#: Minimum number of digits of two equal training times that cannot be equal by chance.
MIN_EQUAL_DIGITS = 4
#: Largest tolerated shares: of waiting for data in a step, and of late starts in the training time.
MAX_DATA_SHARE, MAX_SKEW_SHARE = 0.10, 0.02
#: Relative standard deviation that undisturbed repeats usually have, and a number N. The limit is such that
#: only one of N undisturbed cells exceeds it by chance: it is 10 % with two repeats, and 5 % with ten.
USUAL_DEVIATION, BY_CHANCE = 0.03, 1000


@rule("sharding-slow-alone", "warning", "time")
def find_slow_sharding_on_one_worker(evidence: AuditData) -> Iterator[Case]:
    """On one worker a sharded strategy is slower than unsharded training, although there is nothing to
    communicate. Check the precision, wrap groups and the optimizer.
    """
    for group in evidence.groups:
        other = evidence.find_unsharded_rival(group)
        if (
            group.gpus != 1
            or other is None
            or not evidence.get_common_value(group, "shards_states")
        ):
            continue
        its_s, other_s = (evidence.compute_median(k, "train_time_s") for k in (group, other))
        if not its_s or not other_s or its_s / other_s <= SLOW_ALONE:
            continue
        # In small models the CPU's fixed time per sharded group of layers may explain the difference.
        steps = evidence.compute_median(group, "steps") or evidence.multiply_medians(
            group, "steps_per_epoch", "epochs"
        )
        busy = any(is_host_mostly_busy(evidence, k) for k in (group, other))
        if busy or (steps and 1e3 * (its_s - other_s) / steps < MAX_SHARDING_MS):
            continue
        times = f"{group.strategy} {its_s:.4g} s, {other.strategy} {other_s:.4g} s"
        yield (
            get_coordinates_of_strategy(group),
            f"on one worker: {times}: {its_s / other_s:.2f} times",
        )


def is_host_mostly_busy(evidence: AuditData, group: Group) -> bool:
    """Return whether other processes used the machine when most repeats of a group started."""
    return bool(flag_cells_on_busy_hosts(evidence.groups[group]).median() > 0.5)


@rule("superlinear", "warning", "time")
def find_superlinear_speedup(evidence: AuditData) -> Iterator[Case]:
    """N workers are more than N times as fast as one, which is implausible. Check the baseline: a batch that
    is too large for one worker's cache or memory, other settings, or a busy machine.
    """
    column, cells = "throughput_samples_per_s", evidence.cells
    limited = cells[(cells["status"] == "timeout") & cells["time_limit_s"].notna()]
    stopped: defaultdict[Group, list[tuple[int, float]]] = defaultdict(list)
    for group, rows in map_rows_by_group(limited).items():
        stopped[group.copy_with_gpu_count(0)].append(
            (group.gpus, float(rows["time_limit_s"].min()))
        )
    for group in evidence.groups:
        strategy, gpus = group.strategy, group.gpus
        alone = group.copy_with_strategy(ALONE).copy_with_gpu_count(1)
        here = evidence.compute_median(group, column)
        if not here:
            continue
        own = [k for k in evidence.list_groups_with_any_worker_count(group) if k.gpus < gpus]
        bases = [min(own, key=lambda k: k.gpus)] if own else []
        if strategy != ALONE and alone in evidence.groups:
            bases.append(alone)
        for base in bases:
            base_time, times = evidence.compute_median(base, column), gpus / base.gpus
            if times == 1 and any(is_host_mostly_busy(evidence, k) for k in (group, base)):
                continue  # the rule busy-machine reports this
            limit = (SUPERLINEAR if times > 1 else MAX_SPEEDUP_ALONE) * times
            if base_time and here / base_time > limit:
                name = "" if base.strategy == strategy else f"{base.strategy} "
                text = f"{here / base_time:.2f} times as fast on {gpus} as {name}on {base.gpus}"
                yield group, text
        yield from iter_superlinear_speedups_over_stopped_cells(
            evidence, group, stopped[group.copy_with_gpu_count(0)]
        )


def iter_superlinear_speedups_over_stopped_cells(
    evidence: AuditData, group: Group, workers_and_limit_s: Iterable[tuple[int, float]]
) -> Iterator[Case]:
    """Yield speedups that are superlinear over a cell which was stopped at its time limit.

    Args:
        evidence: Data of the audit.
        group: A group on more workers.
        workers_and_limit_s: Numbers of workers on which the strategy was stopped, each with its shortest
            limit.
    """
    time_s = evidence.compute_median(group, "train_time_s")
    few, limit_s = max((s for s in workers_and_limit_s if s[0] < group.gpus), default=(0, 0.0))
    if not time_s or not few:
        return
    # The time limit includes phases besides training. They are assumed to take as long as in `group`.
    rest_s = sum(
        evidence.compute_median(group, f"{part}_s") or 0.0
        for part in ("setup", "data", "warmup", "eval")
    )
    least_s = limit_s - rest_s
    if least_s / time_s > SUPERLINEAR * group.gpus / few:
        text = f"at least {least_s / time_s:.1f} times as fast on {group.gpus} as on {few}"
        yield group, f"{text}, which was stopped: {time_s:.6g} s, more than {least_s:.6g} s"


@rule("same-value-twice", "unusable", "time")
def find_copied_training_times(evidence: AuditData) -> Iterator[Case]:
    """Two training times are equal to the last digit, so that one must be a copy, for example of a folder."""
    for value, rows in evidence.ok.groupby("train_time_s", sort=False):
        if len(rows) > 1 and len(f"{value!r}".replace(".", "").strip("0")) >= MIN_EQUAL_DIGITS:
            cells = [f"{r.strategy} {r.model} on {r.gpus}" for r in rows.itertuples()]
            for row in rows.itertuples():
                yield row, f"train_time_s {value!r} in {' and in '.join(cells)}"


@rule("steps-uneven", "note", "time")
def find_uneven_step_times(evidence: AuditData) -> Iterator[Case]:
    """Some steps take much longer than most: because of a straggler, a busy machine, or waits at a server."""
    columns = [*GROUP, "repeat", "step_p50_ms", "step_p99_ms"]  # iterating over all columns is slow
    for row in evidence.of_any_loop[columns].itertuples():
        if row.step_p99_ms > UNEVEN_STEPS * row.step_p50_ms:
            figures = f"99th percentile {row.step_p99_ms:.4g} ms, median {row.step_p50_ms:.4g} ms"
            yield row, figures


@rule("repeats-uneven", "warning", "time")
def find_uneven_times_of_repeats(evidence: AuditData) -> Iterator[Case]:
    """The repeats vary more than usual, so that small differences between strategies mean little. Look for
    other processes on the machine.
    """
    for group, rows in evidence.groups.items():
        times = rows["train_time_s"].dropna().to_numpy(dtype=float)
        if len(times) < 2 or not times.min() > 0:
            continue
        deviation = float(np.std(np.log(times), ddof=1))
        if deviation > USUAL_DEVIATION and deviation > compute_max_chance_deviation(len(times)):
            yield (
                group,
                f"standard deviation {deviation:.1%}: {times.min():.4g} to {times.max():.4g} s over "
                f"{len(times)} repeats",
            )


@cache
def compute_max_chance_deviation(num_repeats: int) -> float:
    """Return the largest standard deviation that chance explains for undisturbed repeats."""
    # Few studies need SciPy, which is slow to import.
    from scipy.special import chdtri

    return USUAL_DEVIATION * math.sqrt(chdtri(num_repeats - 1, 1 / BY_CHANCE) / (num_repeats - 1))


@record_rule("late-start", "warning", "time")
def find_workers_that_start_late(facts: Facts) -> Iterator[str]:
    """The workers did not start the epochs at the same time. The slowest worker's time counts, so that the
    strategy's time contains the wait for the late start.
    """
    if facts.status != "ok" or facts("strategy.kind") != "collective":
        return  # with servers, the training time starts when all workers are ready
    together_s = sum(facts("time.start_skew_ms") or ()) / 1e3
    train_s = facts("time.train_time_s")
    if together_s > MAX_SKEW_SHARE * train_s:
        yield f"{together_s:.4g} s of start skew in {train_s:.4g} s of training"


@record_rule("recompiled", "warning", "time")
def find_recompilations(facts: Facts) -> Iterator[str]:
    """torch.compile compiled again during the timed training, so that steps contain seconds of compilation.
    Find what changes between steps, or train with more warmup_steps.
    """
    if count := facts("time.recompilations"):
        yield f"{count} compilations after the warm-up"


@rule("input-bound", "warning", "time")
def find_input_bound_cells(evidence: AuditData) -> Iterator[Case]:
    """The workers wait for data, so that the times say little about the strategy."""
    for row in evidence.finished_rows:
        if row.data_ms > MAX_DATA_SHARE * row.step_mean_ms:
            yield row, f"data {row.data_ms:.4g} ms of a step of {row.step_mean_ms:.4g} ms"


@rule("synthetic-unlike-real", "warning", "time")
def find_unequal_speed_on_real_and_synthetic_data(evidence: AuditData) -> Iterator[Case]:
    """Training is not equally fast on real and on generated data: the times include reading the data."""
    same = ["model", "strategy", "gpus", "global_batch", "precision"]
    column = "throughput_samples_per_s"
    if not evidence.ok["synthetic_data"].astype(str).eq("True").any():
        return
    for _, rows in evidence.ok.groupby(same, sort=False):
        is_synthetic = rows["synthetic_data"].astype(str) == "True"
        made, real = (
            rows.loc[is_synthetic, column].median(),
            rows.loc[~is_synthetic, column].median(),
        )
        if max(made, real) > SYNTHETIC * min(made, real):
            figures = f"{made:.4g} samples/s on generated data, {real:.4g} on real"
            yield {k: rows[k].iloc[0] for k in ("model", "strategy", "gpus")}, figures
