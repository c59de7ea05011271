"""What a sample of elastic workers is worth: DDP's samples to a target score over a server's.

    nice python benchmarks/elastic_worth.py      writes benchmarks/results/elastic/worth.{csv,md}

Workers join and leave at random while the server trains a compact CNN on scikit-learn's digits; the
policies are the server's own objects, only time is simulated (as in staleness.py). A place is empty about
half of the time, and each of its workers is lost in the middle of a batch. DDP's arithmetic does not depend
on who is there, so it is trained once for each seed, by one worker on the global batch. A run ends at the
target: at the first evaluation, one every five global batches, that reaches it.

A schedule of joins and losses has seeds (initial weights, sample order) of its own. Two seeds ride under
each, and an interval is over schedules. What was measured stays in the CSV: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import random
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))

import staleness
from staleness import GLOBAL_BATCH, TRAIN_SAMPLES, parsed

from stratbench.plan.queue.virtual_clock import Timing, simulate
from stratbench.ps.policies.policies import make_policy
from stratbench.ps.policies.policy import Hyper

#: Policies by optimizer, with their options as text.
POLICIES = {
    "sgd": (
        ("ps-async", "lr_scale=1/N"),
        ("ps-ssp", ""),
        ("ps-backup", ""),
        ("ps-dana", ""),
        ("ps-ormo", ""),
    ),
    "adamw": (("ps-async", "lr_scale=1/N"), ("ps-preview", "")),
}
HYPER = {
    "sgd": {"momentum": 0.9},
    "adamw": {"optimizer": "adamw", "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
}
LEARNING_RATES = {"sgd": (0.05, 0.1), "adamw": (0.003, 0.006)}
PLACES = (16, 4)
#: How much slower the worker at place 0 is.
STRAGGLERS = (1.0, 3.0)
TARGET = 96.0  # test accuracy, %
EVALUATE_EVERY = 5  # global batches
SEEDS = 2  # of each schedule
#: Batches of a worker for which it stays, and for which its place is empty, on average (exponential).
STAYS, AWAY = 20.0, 20.0
DDP = ("ddp", "")


class Key(NamedTuple):
    """What is trained side by side: one schedule's seeds. The schedule of DDP only names its seeds."""

    optimizer: str
    policy: str
    options: str
    lr: float
    places: int
    straggler: float
    schedule: int


COLUMNS = [*Key._fields, "seed", "samples", "present"]


def keys(schedules: int) -> Iterator[Key]:
    """All that is trained, in order of importance: DDP, then most places first."""
    trained = [(optimizer, lr) for optimizer in POLICIES for lr in LEARNING_RATES[optimizer]]
    for (optimizer, lr), schedule in product(trained, range(schedules)):
        yield Key(optimizer, *DDP, lr, 1, 1.0, schedule)
    for places, slow, schedule in product(PLACES, STRAGGLERS, range(schedules)):
        for optimizer, lr in trained:
            for policy in POLICIES[optimizer]:
                yield Key(optimizer, *policy, lr, places, slow, schedule)


def changes(key: Key, until_s: float) -> list[tuple[float, int, str]]:
    """When the worker of each place is lost, and when another one takes the place.

    Times in virtual seconds; at the end all places are taken, so that every run ends.
    """
    batch_s, found = 1 / key.places, []
    for place in range(key.places):
        draw = random.Random(f"{key.places}/{key.schedule}/{place}")
        present, now_s = draw.random() < STAYS / (STAYS + AWAY), 0.0
        if not present:
            found.append((0.0, place, "leave"))
        while now_s < until_s:
            now_s += batch_s * draw.expovariate(1 / (STAYS if present else AWAY))
            present = not present
            found.append((now_s, place, "join" if present else "leave"))
        if not present:
            found.append((now_s, place, "join"))
    return found


def mean_present(key: Key, ended_s: float) -> float:
    """Places that are taken, on average over the run's time."""
    events = sorted(c for c in changes(key, ended_s) if c[0] < ended_s)
    count, last_s, area = key.places, 0.0, 0.0
    for now_s, _, what in events:
        area += count * (now_s - last_s)
        count, last_s = count + (1 if what == "join" else -1), now_s
    return (area + count * (ended_s - last_s)) / ended_s


def train(key: Key, epochs: int) -> list[dict[str, object]]:
    """Train the seeds of one schedule; a row of the CSV for each."""
    torch.set_num_threads(1)
    task = staleness.Digits(SEEDS, epochs)
    first_seed = key.schedule * SEEDS
    task.order = [
        [task._shuffled(first_seed + k, epoch) for k in range(SEEDS)] for epoch in range(epochs)
    ]
    initial = task.network.initial_weights(first_seed + SEEDS)
    initial = initial[first_seed * task.network.numel :].clone()
    hyper = Hyper(lr=key.lr, workers=key.places, **HYPER[key.optimizer])
    name = "ps-sync" if key.policy == DDP[0] else key.policy
    policy = make_policy(name, initial, hyper, parsed(key.options))
    reached: list[int | None] = [None] * SEEDS
    every = EVALUATE_EVERY * key.places * policy.options.pushes_per_ticket

    def evaluate(pushes: int) -> float:
        """Called with the pushes taken, the present one included, before that one is applied."""
        done = pushes - 1
        if done and done % every == 0 and None in reached:
            samples = done // every * EVALUATE_EVERY * GLOBAL_BATCH
            for k, accuracy in enumerate(task.accuracies(policy.weights).tolist()):
                if reached[k] is None and accuracy >= TARGET:
                    reached[k] = samples
        return 1.0

    gradient = stopping(task.gradient(key.places, policy.options.pushes_per_ticket), reached)
    timing = Timing(1 / key.places, **staleness.CLOCK, slowdown=(key.straggler,), seed=key.schedule)
    longest_s = 20.0 * epochs * (TRAIN_SAMPLES // GLOBAL_BATCH)
    come_and_go = changes(key, longest_s) if key.policy != DDP[0] else ()
    trace = simulate(
        [policy], task.plan(key.places), gradient, timing, come_and_go, lr_share=evaluate
    )
    present = mean_present(key, trace.time_s) if come_and_go else 1.0
    return [
        {
            **key._asdict(),
            "seed": first_seed + k,
            "samples": "" if reached[k] is None else reached[k],
            "present": round(present, 2),
        }
        for k in range(SEEDS)
    ]


def stopping(gradient, reached: list[int | None]):
    """The gradient function, which computes nothing more once all seeds have reached the target."""

    def of_ticket(ticket, part: int, weights: Tensor) -> Tensor:
        return gradient(ticket, part, weights) if None in reached else torch.zeros_like(weights)

    return of_ticket


# ---- the page


def worth(
    rows: Iterable[dict], ddp: dict[tuple, float | None], best: float | None
) -> tuple[float, float, float] | None:
    """Geometric mean of DDP's samples over the rows', with its 95 % interval by t over schedules.

    `ddp`: DDP's samples by learning rate and seed. `best`: DDP's learning rate; None: each row's own.
    None where a run has not reached the target: its worth has no value.
    """
    by_schedule: dict[int, list[float]] = {}
    for row in rows:
        base = ddp[best if best is not None else row["lr"], row["seed"]]
        if base is None or row["samples"] is None:
            return None
        by_schedule.setdefault(row["schedule"], []).append(math.log(base / row["samples"]))
    means = np.array([np.mean(logs) for logs in by_schedule.values()])
    half = stats.t.ppf(0.975, len(means) - 1) * stats.sem(means) if len(means) > 1 else math.nan
    middle = means.mean()
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def text_of(found: tuple[float, float, float] | None, rows: list[dict]) -> str:
    if found is None:
        missed = sum(row["samples"] is None for row in rows)
        return f"{missed} of {len(rows)} runs did not arrive" if missed else "DDP did not arrive"
    value, low, high = found
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def best_rate(rows: Iterable[dict]) -> float | None:
    """The learning rate at which the mean of samples is lowest, of those at which all runs arrived."""
    by_rate: dict[float, list] = {}
    for row in rows:
        by_rate.setdefault(row["lr"], []).append(row["samples"])
    means = {lr: np.mean(s) for lr, s in by_rate.items() if None not in s}
    return min(means, key=means.get, default=None)


def page(rows: list[dict], epochs: int) -> str:
    schedules = len({row["schedule"] for row in rows})
    rows = finished(rows, schedules)
    lines = [
        "# What a sample of elastic workers is worth", "",
        f"DDP's samples to {TARGET:g} % test accuracy over a policy's: 1 is as good as DDP, 0.8 needs a "
        f"quarter more samples. Compact CNN (38,282 parameters) on scikit-learn's digits, global batch "
        f"{GLOBAL_BATCH}, at most {epochs} epochs. Of W places each is empty for about half of the time: a "
        f"worker stays for {STAYS:g} of its batches on average and is lost, the next comes after {AWAY:g} "
        f"(both exponential). Geometric mean of {schedules * SEEDS} seeds under {schedules} schedules; 95 % "
        "interval over schedules. Samples are those that were pushed, dropped ones included. torch "
        f"{torch.__version__} on CPU, virtual time. Made by `nice python benchmarks/elastic_worth.py`.",
        "",
        "A learning rate is that of a global batch. In the last column each side has the one of the two at "
        "which it needs the fewest samples; that choice is made on the same runs.",
    ]  # fmt: skip
    for optimizer, policies in POLICIES.items():
        mine = [row for row in rows if row["optimizer"] == optimizer]
        alone = [row for row in mine if row["policy"] == DDP[0]]
        ddp = {(row["lr"], row["seed"]): row["samples"] for row in alone}
        best = best_rate(alone)
        rates = LEARNING_RATES[optimizer]
        lines += ["", f"## {optimizer}", "", *samples_of_ddp(alone, rates), ""]
        heads = " | ".join(f"lr {lr:g}" for lr in rates)
        lines += [
            f"| W | slow worker | policy | {heads} | each at its best |",
            "|--:|---|---|" + "---|" * (len(rates) + 1),
        ]
        for places, slow, policy in product(PLACES, STRAGGLERS, policies):
            here = [
                row
                for row in mine
                if (row["places"], row["straggler"]) == (places, slow)
                and (row["policy"], row["options"]) == policy
            ]
            cells = []
            for lr in rates:
                at = [row for row in here if row["lr"] == lr]
                cells.append(text_of(worth(at, ddp, None), at) if at else "–")
            own = best_rate(here)
            at = [row for row in here if row["lr"] == own]
            cells.append("–" if own is None or best is None else text_of(worth(at, ddp, best), at))
            if set(cells) == {"–"}:
                continue  # not measured yet
            name = " ".join(policy).strip()
            slow_text = "–" if slow == 1 else f"{slow:g}x"
            lines.append(f"| {places} | {slow_text} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def finished(rows: list[dict], schedules: int) -> list[dict]:
    """The rows of what was trained under all schedules: fewer have no interval."""
    seen: dict[tuple, set[int]] = {}
    for row in rows:
        seen.setdefault(tuple(row[c] for c in Key._fields[:-1]), set()).add(row["schedule"])
    return [r for r in rows if len(seen[tuple(r[c] for c in Key._fields[:-1])]) == schedules]


def samples_of_ddp(alone: list[dict], rates: Iterable[float]) -> list[str]:
    """How many samples DDP needed, in one line."""
    parts = []
    for lr in rates:
        samples = [row["samples"] for row in alone if row["lr"] == lr]
        arrived = [s for s in samples if s is not None]
        late = f" ({len(samples) - len(arrived)} did not arrive)" if None in samples else ""
        if arrived:
            parts.append(f"lr {lr:g}: {np.mean(arrived):,.0f}{late}")
    return [f"DDP's samples, mean: {'; '.join(parts)}."]


def read(path: Path) -> list[dict]:
    """The rows of an earlier run, with their numbers as numbers."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for column in ("places", "schedule", "seed"):
            row[column] = int(row[column])
        for column in ("lr", "straggler", "present"):
            row[column] = float(row[column])
        row["samples"] = int(row["samples"]) if row["samples"] else None
    return rows


def write(folder: Path, rows: list[dict], epochs: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "worth.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (folder / "worth.md").write_text(page(read(folder / "worth.csv"), epochs), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12, help="at most")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/elastic")
    arguments = parser.parse_args()
    rows = read(arguments.out / "worth.csv")
    done = {tuple(row[c] for c in Key._fields) for row in rows}
    new = [key for key in keys(arguments.schedules) if key not in done]
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        trained = pool.map(train, new, [arguments.epochs] * len(new))
        for found in tqdm(trained, total=len(new), unit="run"):
            rows += found
            write(arguments.out, rows, arguments.epochs)
    write(arguments.out, rows, arguments.epochs)


if __name__ == "__main__":
    main()
