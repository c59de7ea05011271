"""Times that cannot be, or that say little: between cells, repeats and steps."""

from __future__ import annotations

from collections.abc import Iterator

from stratbench.analysis.audit.rule import Found, Study, at, of, rule, without_count

#: From where on a figure is suspicious, as a ratio.
SLOW_ALONE, SUPERLINEAR, UNEVEN_STEPS, SYNTHETIC = 1.15, 1.03, 2.0, 1.05
#: Shares of a training time, and of a step.
UNEVEN_REPEATS, INPUT = 0.10, 0.10


@rule(
    "sharding-slow-alone",
    "doubtful",
    "time",
    "With one worker there is nothing to communicate, so sharding cannot explain being slower than "
    "DDP. Look at precision, wrap groups and the optimizer.",
)
def sharding_slow_alone(study: Study) -> Iterator[Found]:
    for key in study.groups:
        experiment, model, strategy, gpus = key
        if gpus != 1 or study.says(key, "strategy_base") != "fsdp":
            continue
        fsdp_s = study.median(key, "train_time_s")
        ddp_s = study.median((experiment, model, "ddp", 1), "train_time_s")
        if fsdp_s and ddp_s and fsdp_s / ddp_s > SLOW_ALONE:
            figures = f"{strategy} {fsdp_s:.4g} s, ddp {ddp_s:.4g} s: {fsdp_s / ddp_s:.2f} times"
            yield Found(without_count(key), f"on one worker: {figures}")


@rule(
    "superlinear",
    "doubtful",
    "time",
    "N workers cannot do more than N times the work of one. Look at the baseline: a batch too large "
    "for one worker's cache or memory, other settings, or a busy machine.",
)
def superlinear(study: Study) -> Iterator[Found]:
    fewest = study.ok.groupby(["experiment", "model", "strategy"])["gpus"].min().to_dict()
    for key in study.groups:
        experiment, model, strategy, gpus = key
        few = fewest[key[:3]]
        base = study.median((experiment, model, strategy, few), "throughput_samples_per_s")
        here = study.median(key, "throughput_samples_per_s")
        if gpus > few and base and here and here / base > SUPERLINEAR * gpus / few:
            yield Found(at(key), f"{here / base:.2f} times as fast on {gpus} as on {few}")


@rule(
    "same-value-twice",
    "unusable",
    "time",
    "Two measured times never agree to the last digit: one is a copy.",
)
def same_value_twice(study: Study) -> Iterator[Found]:
    timed = study.ok.dropna(subset=["train_time_s"])
    for value, rows in timed.groupby("train_time_s", sort=False):
        if len(rows) > 1 and len(str(value).replace(".", "").strip("0")) >= 4:
            cells = [f"{r.strategy} {r.model} on {r.gpus}" for r in rows.itertuples()]
            for row in rows.itertuples():
                yield Found(of(row), f"{value} s in {' and in '.join(cells)}")


@rule(
    "steps-uneven",
    "note",
    "time",
    "Some steps take much longer than most: a straggler, a busy machine, or waits at a server.",
)
def steps_uneven(study: Study) -> Iterator[Found]:
    for row in study.ok.itertuples():
        if row.step_p99_ms > UNEVEN_STEPS * row.step_p50_ms:
            figures = f"99th percentile {row.step_p99_ms:.4g} ms, median {row.step_p50_ms:.4g} ms"
            yield Found(of(row), figures)


@rule(
    "repeats-uneven",
    "doubtful",
    "time",
    "The repeats differ so much that small differences between strategies mean nothing.",
)
def repeats_uneven(study: Study) -> Iterator[Found]:
    for key, rows in study.groups.items():
        times = rows["train_time_s"].dropna()
        if len(times) > 1 and times.max() - times.min() > UNEVEN_REPEATS * times.median():
            yield Found(
                at(key), f"{times.min():.4g} to {times.max():.4g} s over {len(times)} repeats"
            )


@rule(
    "input-bound",
    "doubtful",
    "time",
    "The workers wait for data: the times say little about the strategy.",
)
def input_bound(study: Study) -> Iterator[Found]:
    for row in study.ok.itertuples():
        if row.data_ms > INPUT * row.step_mean_ms:
            yield Found(
                of(row), f"data {row.data_ms:.4g} ms of a step of {row.step_mean_ms:.4g} ms"
            )


@rule(
    "synthetic-unlike-real",
    "doubtful",
    "time",
    "Real data should train as fast as generated data; where not, reading it is measured.",
)
def synthetic_unlike_real(study: Study) -> Iterator[Found]:
    same = ["model", "strategy", "gpus", "global_batch", "precision"]
    column = "throughput_samples_per_s"
    for _, rows in study.ok.groupby(same, sort=False):
        is_synthetic = rows["synthetic_data"].astype(str) == "True"
        made, real = (
            rows.loc[is_synthetic, column].median(),
            rows.loc[~is_synthetic, column].median(),
        )
        if max(made, real) > SYNTHETIC * min(made, real):
            figures = f"{made:.4g} samples/s on generated data, {real:.4g} on real"
            yield Found({k: rows[k].iloc[0] for k in ("model", "strategy", "gpus")}, figures)
