"""Compares the parameter-server policies on the virtual clock: accuracy lost and time gained.

A compact CNN on scikit-learn's digits, with and without a 3x straggler, three learning rates: every
policy at four workers, and those that shall keep the accuracy at 8 and 16. The policies are the server's
own objects; only time is simulated.
Several seeds (initial weights and sample order) run side by side in one flat vector: every policy
works weight by weight, so they do not see each other.

    nice python benchmarks/statistics/staleness.py            writes benchmarks/results/staleness.{csv,md}

One process a core; the whole takes an hour and a half of a core. The clock is virtual and the seeds are
fixed: after a change of one policy `--only NAME` trains that one again and keeps the others' rows, and
`--only` without a name goes on with a run that was stopped.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow"))

from stratbench.extensions.servers.policies.policies import (
    POLICIES,
    make_policy,
    parse_policy_options,
)
from stratbench.extensions.servers.policies.policy import Hyper
from stratbench.extensions.servers.ps.tickets import Ticket, TicketPlan
from virtual_clock import Timing, Trace, simulate

WORKERS = 4
MORE_WORKERS = (8, 16)
GLOBAL_BATCH = 64
MOMENTUM = 0.9
TRAIN_SAMPLES = 1347
LEARNING_RATES = (0.01, 0.05, 0.1)
STRAGGLERS = (1.0, 3.0)
#: What is tried on more workers, with its options.
ON_MORE_WORKERS = (
    ("ps-sync", ""),
    ("ps-async", "lr_scale=1/N"),
    ("ps-dana", "lr_scale=1/N"),
    ("ps-ormo", "look_ahead=false"),
    ("ps-ormo", "look_ahead=true"),
)
#: The default mitigation, and how many points it may be above sync at the least.
MITIGATION, AIM = ("ps-ormo", "look_ahead=true"), -0.3
OTHER_MITIGATION, SYNC = ("ps-dana", "lr_scale=1/N"), ("ps-sync", "")
#: Virtual seconds. A global batch takes 1 (a worker's part of it so much less), a transfer 0.05, the server
#: 0.01 for each push.
CLOCK = {
    "push_s": 0.05,
    "pull_s": 0.05,
    "apply_s": 0.01,
    "compute_spread": 0.15,
}
COLUMNS = [
    "strategy",
    "options",
    "lr",
    "straggler",
    "workers",
    "runs",
    "accuracy_mean",
    "accuracy_std",
    "accuracy_min",
    "time_s",
    "time_vs_sync",
    "throughput_vs_sync",
    "throughput_vs_async",
    "staleness_mean",
    "staleness_max",
    "worker_0_share",
    "dropped_share",
]


class Key(NamedTuple):
    """One line of the CSV: a policy, its option as text ("" where there is none), and the conditions."""

    strategy: str
    options: str
    lr: float
    straggler: float
    workers: int

    def of(self, strategy: str, options: str) -> Key:
        """Another policy under the same conditions."""
        return self._replace(strategy=strategy, options=options)


def parsed(options: str) -> dict[str, str | bool]:
    """A policy's options from their text in the CSV."""
    if not options:
        return {}
    name, value = options.split("=")
    return {name: {"true": True, "false": False}.get(value, value)}


def variants(name: str) -> Iterator[str]:
    """The texts of a policy's options that are compared."""
    for option, values in (("lr_scale", ("full", "1/N")), ("look_ahead", ("false", "true"))):
        if hasattr(parse_policy_options(name), option):
            yield from (f"{option}={value}" for value in values)
            return
    yield ""


def keys() -> list[Key]:
    """All that is trained: by SGD, so without those that refuse it."""
    names = [name for name in POLICIES if not parse_policy_options(name).refusal("sgd")]
    few = [(name, options, WORKERS) for name in names for options in variants(name)]
    more = [(*variant, n) for n in MORE_WORKERS for variant in ON_MORE_WORKERS]
    return [
        Key(name, options, lr, straggler, workers)
        for straggler in STRAGGLERS
        for lr in LEARNING_RATES
        for name, options, workers in few + more
    ]


def compact_cnn() -> nn.Module:
    """38,282 parameters, no BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class FlatNetwork:
    """A network as a function of its flat weights, of which several rows can lie side by side."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make, self._model = make, make()
        self._shapes = [(name, p.shape) for name, p in self._model.named_parameters()]
        self._counts = [shape.numel() for _, shape in self._shapes]
        self.numel = sum(self._counts)

    def __call__(self, weights: Tensor, x: Tensor) -> Tensor:
        """The network's outputs, of one row of weights, [parameters]."""
        pieces = zip(self._shapes, weights.split(self._counts), strict=True)
        named = {name: piece.view(shape) for (name, shape), piece in pieces}
        return functional_call(self._model, named, (x,))

    def initial_weights(self, seeds: int) -> Tensor:
        """Flat weights of all seeds, one after the other, [seeds * parameters]."""
        rows = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            rows += [p.detach().flatten() for p in self._make().parameters()]
        return torch.cat(rows)


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """scikit-learn's digits, [N, 64] from 0 to 1, with their labels: for training, for testing."""
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1234))
    train, test = order[:TRAIN_SAMPLES], order[TRAIN_SAMPLES:]
    return (images[train], labels[train]), (images[test], labels[test])


class Digits:
    """The data, the model and `seeds` trainings of it that share nothing but the schedule."""

    def __init__(self, seeds: int, epochs: int) -> None:
        (images, self.labels), (test_images, self.test_labels) = digits()
        self.images, self.test_images = images.view(-1, 1, 8, 8), test_images.view(-1, 1, 8, 8)
        self.network, self.seeds = FlatNetwork(compact_cnn), seeds
        self.epochs = epochs
        self.order = [[self._shuffled(s, e) for s in range(seeds)] for e in range(epochs)]
        self._gradients = vmap(grad(self._loss))

    def _shuffled(self, seed: int, epoch: int) -> Tensor:
        draw = torch.Generator().manual_seed(1000 * seed + epoch)
        return torch.randperm(TRAIN_SAMPLES, generator=draw)

    def _loss(self, weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(weights, images), labels)

    def plan(self, workers: int) -> TicketPlan:
        """The batches of a run, each global one in a part for each worker."""
        return TicketPlan(self.epochs, TRAIN_SAMPLES // GLOBAL_BATCH, workers)

    def gradient(self, workers: int, parts: int):
        """The driver's gradient function for tickets pushed in `parts` sub-batches."""
        batch = GLOBAL_BATCH // workers
        size = batch // parts

        def of_ticket(ticket: Ticket, part: int, weights: Tensor) -> Tensor:
            first = ticket.step * GLOBAL_BATCH + ticket.slice * batch + part * size
            picked = torch.stack([o[first : first + size] for o in self.order[ticket.epoch]])
            rows = weights.view(self.seeds, -1)
            return self._gradients(rows, self.images[picked], self.labels[picked]).flatten()

        return of_ticket

    @torch.no_grad()
    def accuracies(self, weights: Tensor) -> Tensor:
        """Test accuracy of each seed, %, [seeds]."""
        rows = weights.view(self.seeds, -1)
        outputs = torch.stack([self.network(row, self.test_images) for row in rows])
        return (outputs.argmax(-1) == self.test_labels).float().mean(1) * 100


@dataclass
class Result:
    """One strategy under one learning rate and straggler, over all seeds and clocks."""

    accuracies: Tensor
    traces: list[Trace]

    @property
    def time_s(self) -> float:
        return sum(t.time_s for t in self.traces) / len(self.traces)

    @property
    def used_share(self) -> float:
        """Share of the pushes that were not dropped."""
        pushes = sum(sum(t.pushes) for t in self.traces)
        return 1 - sum(sum(t.dropped) for t in self.traces) / pushes


def train(task: Digits, key: Key, clocks: int) -> Result:
    """Train every seed under `clocks` different schedules."""
    accuracies, traces = [], []
    for clock in range(clocks):
        hyper = Hyper(lr=key.lr, momentum=MOMENTUM, workers=key.workers)
        policy = make_policy(
            key.strategy, task.network.initial_weights(task.seeds), hyper, parsed(key.options)
        )
        timing = Timing(1 / key.workers, **CLOCK, slowdown=(key.straggler,), seed=clock)
        gradient = task.gradient(key.workers, policy.options.pushes_per_ticket)
        traces.append(simulate([policy], task.plan(key.workers), gradient, timing))
        accuracies.append(task.accuracies(policy.weights))
    return Result(torch.cat(accuracies), traces)


def row(key: Key, result: Result) -> dict[str, object]:
    """One line of the CSV, without what compares it with others (`compared`)."""
    taus = [(tau, n) for t in result.traces for tau, n in t.staleness[0].items()]
    pushes = [sum(by_worker) for by_worker in zip(*(t.pushes for t in result.traces), strict=True)]
    found = dict(zip(Key._fields, key, strict=True)) | {
        "runs": len(result.accuracies),
        "accuracy_mean": result.accuracies.mean().item(),
        "accuracy_std": result.accuracies.std().item(),
        "accuracy_min": result.accuracies.min().item(),
        "time_s": result.time_s,
        "staleness_mean": sum(tau * n for tau, n in taus) / sum(n for _, n in taus),
        "staleness_max": max(tau for tau, _ in taus),
        "worker_0_share": pushes[0] / sum(pushes),
        "dropped_share": 1 - result.used_share,
    }
    return {key: round(v, 4) if isinstance(v, float) else v for key, v in found.items()}


def compared(rows: dict[Key, dict]) -> dict[Key, dict]:
    """The rows in their order, with what compares each with ps-sync and ps-async where these are there."""

    def throughput(row: dict) -> float:
        return (1 - row["dropped_share"]) / row["time_s"]

    found = {}
    for key in [key for key in keys() if key in rows]:
        line = found[key] = dict.fromkeys(COLUMNS) | rows[key]
        if sync := rows.get(key.of("ps-sync", "")):
            line["time_vs_sync"] = round(line["time_s"] / sync["time_s"], 4)
            line["throughput_vs_sync"] = round(throughput(line) / throughput(sync), 4)
        scale = "full" if key.workers == WORKERS else "1/N"
        if plain := rows.get(key.of("ps-async", f"lr_scale={scale}")):
            line["throughput_vs_async"] = round(throughput(line) / throughput(plain), 4)
    return found


def markdown(rows: dict[Key, dict], arguments: argparse.Namespace) -> str:
    """The tables, and whether the mitigations reach what they should."""
    lines = [
        "# Staleness policies on the virtual clock",
        "",
        f"Compact CNN (38,282 parameters) on scikit-learn's digits, global batch {GLOBAL_BATCH}, momentum "
        f"{MOMENTUM}, {arguments.epochs} epochs; test accuracy in %, mean ± standard deviation of "
        f"{arguments.seeds * arguments.clocks} runs ({arguments.seeds} seeds of weights and sample order x "
        f"{arguments.clocks} schedules; more than {WORKERS} workers: as many seeds, one schedule). "
        f"torch {torch.__version__} on CPU. Time is virtual: of N workers one "
        f"takes 1 / N for its batch (log-normal, {CLOCK['compute_spread']}), a push or pull "
        f"{CLOCK['push_s']}, an update {CLOCK['apply_s']} of the server. Throughput counts pushes "
        "that were not dropped. Buffers: weight-sized tensors that the server keeps beside the weights. "
        "Made by `nice python benchmarks/statistics/staleness.py`.",
    ]
    if missing := len(keys()) - len(rows):
        lines += [
            "",
            f"**{missing} of {len(keys())} rows are not trained yet (–)**; "
            "`nice python benchmarks/statistics/staleness.py --only` goes on with them.",
        ]
    lines += ["", *aims(rows)]
    for workers in (WORKERS, *MORE_WORKERS):
        for straggler in STRAGGLERS:
            slow = "no straggler" if straggler == 1 else f"worker 0 is {straggler:g}x slower"
            here = {
                k: r for k, r in rows.items() if (k.straggler, k.workers) == (straggler, workers)
            }
            lines += ["", f"## {workers} workers, {slow}", "", *table(here)]
    titles = [f"{name} as it is by default" for name in ("ps-dana", "ps-ormo")]
    return "\n".join(
        [
            *lines, "", f"## {titles[0]}", "", *reached(rows, OTHER_MITIGATION),
            "", f"## {titles[1]}", "", *reached(rows, MITIGATION), "", *against_sync(rows), "",
        ]
    )  # fmt: skip


def table(rows: dict[Key, dict]) -> list[str]:
    """A line a policy and option, of rows that differ in these and in the learning rate."""
    rates = " | ".join(f"lr {lr:g}" for lr in LEARNING_RATES)
    lines = [
        f"| strategy | options | {rates} | time / sync | throughput / sync | throughput / async "
        "| mean staleness | buffers |",
        "|---|---|" + "---|" * (len(LEARNING_RATES) + 5),
    ]
    for name, options in dict.fromkeys(key[:2] for key in rows):
        same = {k: r for k, r in rows.items() if k[:2] == (name, options)}
        key, first = next(iter(same.items()))
        by_lr = [same.get(key._replace(lr=lr)) for lr in LEARNING_RATES]
        cells = [f"{r['accuracy_mean']:.1f} ± {r['accuracy_std']:.1f}" if r else "–" for r in by_lr]
        ratios = ("time_vs_sync", "throughput_vs_sync", "throughput_vs_async", "staleness_mean")
        cells += [
            *("–" if first[c] in (None, "") else f"{first[c]:.2f}" for c in ratios),
            str(parse_policy_options(name, parsed(options)).optimizer_buffers(key.workers)),
        ]
        default = options and parse_policy_options(name, parsed(options)) == parse_policy_options(
            name
        )
        shown = f"{options} (default)" if default else options or "–"
        lines.append(f"| {name} | {shown} | " + " | ".join(cells) + " |")
    return lines


def reached(rows: dict[Key, dict], mitigation: tuple[str, str]) -> list[str]:
    """What a mitigation must reach at four workers, what it reached, and whether that is enough."""
    lines = ["| condition | measured | met |", "|---|---|---|"]

    def check(condition: str, measured: float, met: bool, unit: str = "") -> None:
        lines.append(f"| {condition} | {measured:.2f}{unit} | {'yes' if met else 'NO'} |")

    plain, slow = (rows[Key(*mitigation, LEARNING_RATES[0], x, WORKERS)] for x in STRAGGLERS)
    value = plain["time_vs_sync"]
    check("no straggler: time at most sync's", value, value <= 1)
    value = slow["throughput_vs_sync"]
    check("3x straggler: throughput at least 2x sync's", value, value >= 2)
    value = slow["throughput_vs_async"]
    check("3x straggler: throughput at least 0.95 of plain async's", value, value >= 0.95)
    for lr in LEARNING_RATES:
        value, _ = difference(rows, Key(*mitigation, lr, 3.0, WORKERS), SYNC)
        check(
            f"3x straggler, lr {lr:g}: accuracy at least sync's - 0.5", value, value >= -0.5, " pt"
        )
    return lines


def against_sync(rows: dict[Key, dict]) -> list[str]:
    """Points above or below sync of all that is compared on more workers."""
    compared = [variant for variant in ON_MORE_WORKERS if variant[0] != "ps-sync"]
    lines = [
        "Points of accuracy above sync; the standard error of a difference of two means is in brackets.",
        "",
        "| workers | straggler | lr | " + " | ".join(" ".join(v).strip() for v in compared) + " |",
        "|---" * (3 + len(compared)) + "|",
    ]
    conditions = dict.fromkeys(k[2:] for k in rows)
    for lr, straggler, workers in sorted(conditions, key=lambda c: (c[2], c[1], c[0])):
        cells = []
        for variant in compared:
            found = difference(rows, Key(*variant, lr, straggler, workers), SYNC)
            cells.append(f"{found[0]:+.2f} ({found[1]:.2f})" if found else "–")
        slow = "–" if straggler == 1 else f"{straggler:g}x"
        lines.append(f"| {workers} | {slow} | {lr:g} | " + " | ".join(cells) + " |")
    return lines


def difference(
    rows: dict[Key, dict], key: Key, other: tuple[str, str]
) -> tuple[float, float] | None:
    """Points of accuracy above another policy under the same conditions, and their standard error.

    The error is that of a difference of two means; None where one of the two is not trained.
    """
    pair = [rows.get(key), rows.get(key.of(*other))]
    if None in pair:
        return None
    error = sum(r["accuracy_std"] ** 2 / r["runs"] for r in pair) ** 0.5
    return pair[0]["accuracy_mean"] - pair[1]["accuracy_mean"], error


def aims(rows: dict[Key, dict]) -> list[str]:
    """Whether the mitigation keeps sync's accuracy everywhere, and how it stands beside the other one."""
    mine = [key for key in rows if key[:2] == MITIGATION]
    found = {key: d for key in mine if (d := difference(rows, key, SYNC))}
    missed = {key: d for key, d in found.items() if d[0] < AIM}
    name, other = (" ".join(policy) for policy in (MITIGATION, OTHER_MITIGATION))
    lines = [
        f"**Aim: `{name}` never more than {-AIM:g} points below sync: missed under {len(missed)} of the "
        f"{len(found)} conditions in which both are trained.**",
    ]
    for key, (points, error) in missed.items():
        there = difference(rows, key.of(*OTHER_MITIGATION), SYNC)
        beside = f"; `{other}` there: {there[0]:+.2f} ± {there[1]:.2f}" if there else ""
        lines.append(
            f"Missed at {key.workers} workers, straggler {key.straggler:g}x, lr {key.lr:g}: {points:+.2f} ± "
            f"{error:.2f} (standard error){beside}."
        )
    pairs = [d for key in mine if (d := difference(rows, key, OTHER_MITIGATION))]
    if pairs:
        above = sum(points > 0 for points, _ in pairs)
        lines.append(
            f"Against `{other}`: above it under {above} of the {len(pairs)} conditions in which both are "
            f"trained, from {min(pairs)[0]:+.2f} to {max(pairs)[0]:+.2f} points."
        )
    return lines


def importance(key: Key) -> tuple[int, bool, float]:
    """Sorts what decides first: the mitigation, sync, its rivals; the straggler, the higher learning rate."""
    first = [MITIGATION, SYNC, OTHER_MITIGATION]
    rank = first.index(key[:2]) if key[:2] in first else len(first)
    return rank, key.straggler == 1, -key.lr


def prepare(seeds: int, clocks: int, epochs: int) -> None:
    """Make this process ready for `train_key`."""
    global few, many, schedules
    torch.set_num_threads(1)
    schedules = clocks
    few, many = Digits(seeds, epochs), Digits(seeds * clocks, epochs)


def train_key(key: Key) -> Result:
    """All runs of one key. More workers have more seeds and one schedule: their steps are small ones."""
    return train(few, key, schedules) if key.workers == WORKERS else train(many, key, 1)


def kept_rows(path: Path, only: list[str]) -> dict[Key, dict]:
    """The rows of an earlier run of all policies but `only`."""
    with open(path, newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    found = {}
    for line in lines:
        numbers = {c: float(line[c]) for c in COLUMNS[2:] if line[c]}
        for whole in ("workers", "runs", "staleness_max"):
            numbers[whole] = int(numbers[whole])
        if line["strategy"] not in only:
            row = line | numbers
            found[Key(*(row[c] for c in Key._fields))] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="seeds of weights and sample order")
    parser.add_argument("--clocks", type=int, default=2, help="different schedules of each")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--only",
        nargs="*",
        choices=POLICIES,
        help="train these policies anew and what is missing; keep the other rows (none named: all)",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    kept = {}
    if arguments.only is not None:
        kept = kept_rows(arguments.out / "staleness.csv", arguments.only)
    new = [key for key in keys() if key not in kept]
    new.sort(key=importance)  # so that a run that is stopped has what decides
    context = multiprocessing.get_context("spawn")
    prepared = (arguments.seeds, arguments.clocks, arguments.epochs)
    with ProcessPoolExecutor(os.cpu_count(), context, prepare, prepared) as pool:
        results = tqdm(pool.map(train_key, new), total=len(new), unit="run")
        for key, result in zip(new, results, strict=True):
            kept[key] = row(key, result)
            write(arguments, compared(kept))  # what is trained is not lost when this is stopped
    print(write(arguments, compared(kept)))


def write(arguments: argparse.Namespace, rows: dict[Key, dict]) -> str:
    """Write the CSV and the page; returns the page."""
    with open(arguments.out / "staleness.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())
    text = markdown(rows, arguments)
    (arguments.out / "staleness.md").write_text(text, encoding="utf-8")
    return text


if __name__ == "__main__":
    main()
