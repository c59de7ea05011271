"""Compares the parameter-server policies on the virtual clock: accuracy lost and time gained.

A compact CNN on scikit-learn's digits, four workers with and without a 3x straggler, three
learning rates, every policy. The policies are the server's own objects; only time is simulated.
Several seeds (initial weights and sample order) run side by side in one flat vector: every policy
works weight by weight, so they do not see each other.

    nice python benchmarks/staleness.py            writes benchmarks/results/staleness.{csv,md}

One process a core; the whole takes half an hour of a core. The clock is virtual and the seeds are
fixed: after a change of one policy `--only NAME` trains that one again and keeps the others' rows.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))

from stratbench.ps.policies import POLICIES, make_policy, parse_options
from stratbench.ps.policy import Hyper
from stratbench.ps.tickets import Ticket, TicketPlan
from stratbench.ps.virtual import Timing, Trace, simulate

WORKERS = 4
GLOBAL_BATCH = 64
SLICE = GLOBAL_BATCH // WORKERS
MOMENTUM = 0.9
TRAIN_SAMPLES = 1347
LEARNING_RATES = (0.01, 0.05, 0.1)
STRAGGLERS = (1.0, 3.0)
#: Virtual seconds. A worker's batch takes 0.25, a transfer 0.05, the server 0.01 for each push.
CLOCK = {
    "compute_s": 0.25,
    "push_s": 0.05,
    "pull_s": 0.05,
    "apply_s": 0.01,
    "compute_spread": 0.15,
}
COLUMNS = [
    "strategy",
    "lr_scale",
    "lr",
    "straggler",
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


class Digits:
    """The data, the model and `seeds` trainings of it that share nothing but the schedule."""

    def __init__(self, seeds: int, epochs: int) -> None:
        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        labels = torch.tensor(digits.target)
        split = torch.randperm(len(images), generator=torch.Generator().manual_seed(1234))
        train, test = split[:TRAIN_SAMPLES], split[TRAIN_SAMPLES:]
        self.images, self.labels = images[train], labels[train]
        self.test_images, self.test_labels = images[test], labels[test]
        self.model, self.seeds = compact_cnn(), seeds
        self.shapes = [(n, p.shape, p.numel()) for n, p in self.model.named_parameters()]
        self.plan = TicketPlan(epochs, TRAIN_SAMPLES // GLOBAL_BATCH, WORKERS)
        self.order = [[self._shuffled(s, e) for s in range(seeds)] for e in range(epochs)]
        self._gradients = vmap(grad(self._loss))

    def _shuffled(self, seed: int, epoch: int) -> Tensor:
        draw = torch.Generator().manual_seed(1000 * seed + epoch)
        return torch.randperm(TRAIN_SAMPLES, generator=draw)

    def initial_weights(self) -> Tensor:
        """Flat weights of all seeds, one after the other, [seeds * parameters]."""
        rows = []
        for seed in range(self.seeds):
            torch.manual_seed(seed)
            rows += [p.detach().flatten() for p in compact_cnn().parameters()]
        return torch.cat(rows)

    def _outputs(self, weights: Tensor, images: Tensor) -> Tensor:
        named, start = {}, 0
        for name, shape, count in self.shapes:
            named[name] = weights[start : start + count].view(shape)
            start += count
        return functional_call(self.model, named, (images,))

    def _loss(self, weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self._outputs(weights, images), labels)

    def gradient(self, parts: int):
        """The driver's gradient function for tickets pushed in `parts` sub-batches."""
        size = SLICE // parts

        def of_ticket(ticket: Ticket, part: int, weights: Tensor) -> Tensor:
            first = ticket.step * GLOBAL_BATCH + ticket.slice * SLICE + part * size
            picked = torch.stack([o[first : first + size] for o in self.order[ticket.epoch]])
            rows = weights.view(self.seeds, -1)
            return self._gradients(rows, self.images[picked], self.labels[picked]).flatten()

        return of_ticket

    @torch.no_grad()
    def accuracies(self, weights: Tensor) -> Tensor:
        """Test accuracy of each seed, %, [seeds]."""
        rows = weights.view(self.seeds, -1)
        outputs = torch.stack([self._outputs(row, self.test_images) for row in rows])
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

    @property
    def throughput(self) -> float:
        """Pushes used per virtual second, in units of one run's budget."""
        return self.used_share / self.time_s


def train(
    task: Digits, strategy: str, options: dict, lr: float, straggler: float, clocks: int
) -> Result:
    """Train every seed under `clocks` different schedules."""
    accuracies, traces = [], []
    for clock in range(clocks):
        hyper = Hyper(lr=lr, momentum=MOMENTUM, workers=WORKERS)
        policy = make_policy(strategy, task.initial_weights(), hyper, options)
        timing = Timing(**CLOCK, slowdown=(straggler,), seed=clock)
        gradient = task.gradient(policy.options.pushes_per_ticket)
        traces.append(simulate([policy], task.plan, gradient, timing))
        accuracies.append(task.accuracies(policy.weights))
    return Result(torch.cat(accuracies), traces)


@dataclass
class Kept:
    """What other rows are compared with, of a row that an earlier run wrote."""

    time_s: float
    throughput: float

    @classmethod
    def of(cls, row: dict) -> Kept:
        return cls(row["time_s"], (1 - row["dropped_share"]) / row["time_s"])


def row(key: tuple, result: Result, sync: Result | Kept, plain: Result | Kept) -> dict[str, object]:
    """One line of the CSV; `sync` and `plain`: ps-sync and ps-async under the same conditions."""
    strategy, lr_scale, lr, straggler = key
    taus = [(tau, n) for t in result.traces for tau, n in t.staleness[0].items()]
    pushes = [sum(by_worker) for by_worker in zip(*(t.pushes for t in result.traces), strict=True)]
    values = (
        strategy,
        lr_scale,
        lr,
        straggler,
        len(result.accuracies),
        result.accuracies.mean().item(),
        result.accuracies.std().item(),
        result.accuracies.min().item(),
        result.time_s,
        result.time_s / sync.time_s,
        result.throughput / sync.throughput,
        result.throughput / plain.throughput,
        sum(tau * n for tau, n in taus) / sum(n for _, n in taus),
        max(tau for tau, _ in taus),
        pushes[0] / sum(pushes),
        1 - result.used_share,
    )
    rounded = (round(v, 4) if isinstance(v, float) else v for v in values)
    return dict(zip(COLUMNS, rounded, strict=True))


def markdown(rows: list[dict], arguments: argparse.Namespace) -> str:
    """The tables, and whether the default mitigation reaches what it should."""
    lines = [
        "# Staleness policies on the virtual clock",
        "",
        f"Compact CNN (38,282 parameters) on scikit-learn's digits, {WORKERS} workers, global "
        f"batch {GLOBAL_BATCH}, momentum {MOMENTUM}, {arguments.epochs} epochs; test accuracy in %, mean "
        f"± standard deviation of {rows[0]['runs']} runs ({arguments.seeds} seeds of weights and "
        f"sample order x {arguments.clocks} schedules). torch {torch.__version__} on CPU. Time is "
        "virtual: one batch of a worker takes "
        f"{CLOCK['compute_s']} (log-normal, {CLOCK['compute_spread']}), a push or pull "
        f"{CLOCK['push_s']}, an update {CLOCK['apply_s']} of the server. Throughput counts pushes "
        "that were not dropped. Made by `benchmarks/staleness.py`.",
    ]
    for straggler in STRAGGLERS:
        title = "No straggler" if straggler == 1 else f"Worker 0 is {straggler:g}x slower"
        rates = " | ".join(f"lr {lr:g}" for lr in LEARNING_RATES)
        lines += [
            "",
            f"## {title}",
            "",
            f"| strategy | lr_scale | {rates} | time / sync | throughput / sync "
            "| throughput / async | mean staleness |",
            "|---|---|" + "---|" * (len(LEARNING_RATES) + 4),
        ]
        here = [r for r in rows if r["straggler"] == straggler]
        for name, scale in dict.fromkeys((r["strategy"], r["lr_scale"]) for r in here):
            same = [r for r in here if (r["strategy"], r["lr_scale"]) == (name, scale)]
            cells = [f"{r['accuracy_mean']:.1f} ± {r['accuracy_std']:.1f}" for r in same]
            first = same[0]
            cells += [
                f"{first['time_vs_sync']:.2f}",
                f"{first['throughput_vs_sync']:.2f}",
                f"{first['throughput_vs_async']:.2f}",
                f"{first['staleness_mean']:.2f}",
            ]
            default = getattr(parse_options(name), "lr_scale", "") == scale and scale
            shown = f"{scale} (default)" if default else scale or "–"
            lines.append(f"| {name} | {shown} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "## ps-dana as it is by default", "", *verdicts(rows), ""])


def verdicts(rows: list[dict]) -> list[str]:
    """What ps-dana must reach, what it reached, and whether that is enough."""
    find = {(r["strategy"], r["lr_scale"], r["lr"], r["straggler"]): r for r in rows}
    scale = parse_options("ps-dana").lr_scale
    lines = ["| condition | measured | met |", "|---|---|---|"]

    def check(condition: str, measured: float, met: bool, unit: str = "") -> None:
        lines.append(f"| {condition} | {measured:.2f}{unit} | {'yes' if met else 'NO'} |")

    lr = LEARNING_RATES[0]
    value = find["ps-dana", scale, lr, 1.0]["time_vs_sync"]
    check("no straggler: time at most sync's", value, value <= 1)
    straggled = find["ps-dana", scale, lr, 3.0]
    value = straggled["throughput_vs_sync"]
    check("3x straggler: throughput at least 2x sync's", value, value >= 2)
    value = straggled["throughput_vs_async"]
    check("3x straggler: throughput at least 0.95 of plain async's", value, value >= 0.95)
    for lr in LEARNING_RATES:
        dana = find["ps-dana", scale, lr, 3.0]["accuracy_mean"]
        value = dana - find["ps-sync", "", lr, 3.0]["accuracy_mean"]
        check(
            f"3x straggler, lr {lr:g}: accuracy at least sync's - 0.5", value, value >= -0.5, " pt"
        )
    return lines


def prepare(seeds: int, epochs: int) -> None:
    """Make this process ready for `train_key`."""
    global task
    torch.set_num_threads(1)
    task = Digits(seeds, epochs)


def train_key(clocks: int, key: tuple[str, str, float, float]) -> Result:
    """All runs of one policy, lr_scale, learning rate and straggler."""
    name, scale, lr, straggler = key
    return train(task, name, {"lr_scale": scale} if scale else {}, lr, straggler, clocks)


def kept_rows(path: Path, only: list[str]) -> dict[tuple, dict]:
    """The rows of an earlier run, by key, of all policies but `only`."""
    with open(path, newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    found = {}
    for line in lines:
        numbers = {c: float(line[c]) for c in COLUMNS[2:]}
        for whole in ("runs", "staleness_max"):
            numbers[whole] = int(numbers[whole])
        if line["strategy"] not in only:
            key = (line["strategy"], line["lr_scale"], numbers["lr"], numbers["straggler"])
            found[key] = line | numbers
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="seeds of weights and sample order")
    parser.add_argument("--clocks", type=int, default=2, help="different schedules of each")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=POLICIES, help="keep the other policies' rows")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    variants = [
        (name, scale)
        for name in POLICIES
        for scale in (("full", "1/N") if hasattr(parse_options(name), "lr_scale") else ("",))
    ]
    keys = [(*v, lr, s) for s in STRAGGLERS for lr in LEARNING_RATES for v in variants]
    kept = kept_rows(arguments.out / "staleness.csv", arguments.only) if arguments.only else {}
    new = [key for key in keys if key not in kept]
    context = multiprocessing.get_context("spawn")
    prepared = (arguments.seeds, arguments.epochs)
    with ProcessPoolExecutor(os.cpu_count(), context, prepare, prepared) as pool:
        trained = pool.map(partial(train_key, arguments.clocks), new)
        results = dict(zip(new, tqdm(trained, total=len(new), unit="run"), strict=True))
    bases = {key: Kept.of(line) for key, line in kept.items()} | results
    rows = [
        kept[k]
        if k in kept
        else row(k, results[k], bases["ps-sync", "", *k[2:]], bases["ps-async", "full", *k[2:]])
        for k in keys
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    with open(arguments.out / "staleness.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    table = markdown(rows, arguments)
    (arguments.out / "staleness.md").write_text(table, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
