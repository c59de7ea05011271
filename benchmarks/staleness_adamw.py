"""Compares the servers that take AdamW, on the virtual clock: loss against synchronous AdamW, and time.

    nice python benchmarks/staleness_adamw.py                            digits and the Markov text
    STRATBENCH_DATA=... nice python benchmarks/staleness_adamw.py        Tiny Shakespeare, too

A perceptron on scikit-learn's digits, and the project's GPT, two layers of width 32, on texts; 4 to 64
workers, with and without one that is three times slower. Nobody waits under what is compared, so that the
order of events does not depend on the policy: all policies, learning rates and seeds of a condition ride side
by side under one schedule, and differences from `ps-sync` at the same learning rate and seed are paired. The
policies are the server's own objects; only time is simulated. Under `ps-sync` an update is AdamW's on the
global batch, whatever the number of workers: it is trained once, by one worker, and for each condition only
its time is simulated.

Conditions are trained in order of importance and written to benchmarks/results/staleness-adamw.csv one by
one, and the page beside it: a run that was stopped goes on with what is missing. `--only TASK` names the
tasks to train.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))

import staleness

from stratbench.cell.learning_rate import share_of_lr
from stratbench.plan.queue.virtual_clock import Timing, Trace, simulate
from stratbench.ps.policies.policies import make_policy
from stratbench.ps.policies.policy import Hyper, Outcome, Policy
from stratbench.ps.tickets import Ticket, TicketPlan
from stratbench.workload.data.generated import markov_text
from stratbench.workload.data.sources import ROOT_VARIABLE, Source, tinyshakespeare
from stratbench.workload.network.gpt import GPT

#: What is compared with ps-sync: a policy, and its options as text.
VARIANTS = (
    ("ps-preview", "look_ahead=2"),
    ("ps-preview", "look_ahead=1"),
    ("ps-kbatch", ""),
    ("ps-async", "lr_scale=1/N"),
)
MAIN = VARIANTS[0]
#: How much more than ps-sync's the loss may be, in nats, and how many points of accuracy may be lost.
AIM = {"loss": 0.02, "accuracy": 0.3}
#: Virtual seconds: a batch of one worker takes 1 on average, spread as a gamma distribution of shape 2 is.
SPREAD = math.sqrt(math.log(1.5))
CLOCK = {"push_s": 0.05, "pull_s": 0.05, "apply_s": 0.01, "compute_spread": SPREAD}
MEDIAN_S = math.exp(-(SPREAD**2) / 2)
COLUMNS = (
    "task", "workers", "straggler", "strategy", "options", "lr", "seed", "loss", "accuracy", "time_s",
    "time_vs_sync", "staleness_mean",
)  # fmt: skip
SEQUENCE, TEXT_BATCH = 32, 32


class Condition(NamedTuple):
    """What one schedule is: a task, how many workers, and how much slower the first one is."""

    task: str
    workers: int
    straggler: float


#: In order of importance. A text's global batch of 32 cannot be divided among 64 workers.
CONDITIONS = [
    Condition("digits", 16, 3.0),
    Condition("shakespeare", 16, 3.0),
    Condition("markov", 16, 3.0),
    *(Condition("digits", n, 3.0) for n in (4, 8, 32, 64)),
    Condition("shakespeare", 4, 3.0),
    Condition("shakespeare", 32, 3.0),
    *(Condition("digits", n, 1.0) for n in (4, 8, 16, 32, 64)),
    Condition("shakespeare", 16, 1.0),
    Condition("markov", 32, 3.0),
    Condition("markov", 4, 3.0),
    Condition("shakespeare", 8, 3.0),
    Condition("markov", 8, 3.0),
    *(Condition("shakespeare", n, 1.0) for n in (4, 8, 32)),
    *(Condition("markov", n, 1.0) for n in (4, 8, 16, 32)),
]


@dataclass(frozen=True)
class Recipe:
    """A network, its data and how it is trained."""

    network: Callable[[], nn.Module]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    batch: int
    steps: int
    rates: tuple[float, ...]
    betas: tuple[float, float]
    weight_decay: float
    schedule: str
    seeds: int
    variants: tuple[tuple[str, str], ...]

    def share(self, step: int) -> float:
        """What the learning rate is multiplied by in a step."""
        warmup = self.steps // 20 if self.schedule == "cosine" else 0
        return share_of_lr(self.schedule, step, self.steps, warmup, 0.1)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def digits() -> Recipe:
    return Recipe(
        perceptron, *staleness.digits(),
        batch=64, steps=210, rates=(0.0033, 0.01, 0.03), betas=(0.9, 0.999), weight_decay=0.01,
        schedule="constant", seeds=5, variants=VARIANTS,
    )  # fmt: skip


def text(source: Source, steps: int, rates: tuple[float, ...]) -> Recipe:
    """A small GPT on the first 512 test samples of a text."""
    train, test = (
        tuple(
            torch.cat([torch.tensor(piece).long() for piece in k])
            for k in zip(*part.chunks, strict=True)
        )
        for part in (source.train, source.test)
    )
    vocabulary = int(train[0].max()) + 1
    return Recipe(
        lambda: GPT(vocabulary, SEQUENCE, layers=2, heads=2, width=32),
        train, tuple(t[:512] for t in test),
        batch=TEXT_BATCH, steps=steps, rates=rates, betas=(0.9, 0.99), weight_decay=0.1,
        schedule="cosine", seeds=4, variants=(VARIANTS[0], *VARIANTS[2:]),
    )  # fmt: skip


def recipes(root: Path | None) -> dict[str, Callable[[], Recipe]]:
    """The tasks whose data are here."""
    found = {
        "digits": digits,
        "markov": lambda: text(markov_text(16384, 512, 64, SEQUENCE, 0), 200, (0.01, 0.03)),
    }
    if root is not None:
        found["shakespeare"] = lambda: text(
            tinyshakespeare(root, None, SEQUENCE), 300, (0.0033, 0.0055, 0.01)
        )
    return found


class Rows:
    """Copies of one network side by side: a row of flat weights for each learning rate and seed."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.network = recipe, staleness.FlatNetwork(recipe.network)
        self._gradients = vmap(grad(self._loss))
        self.orders = [self._order(seed) for seed in range(recipe.seeds)]

    def _order(self, seed: int) -> Tensor:
        """The samples in the order in which they are handed out."""
        draw = torch.Generator().manual_seed(7000 + seed)
        samples, needed = len(self.recipe.train[0]), self.recipe.steps * self.recipe.batch
        passes = [torch.randperm(samples, generator=draw) for _ in range(-(-needed // samples))]
        return torch.cat(passes)[:needed]

    def _outputs(self, weights: Tensor, x: Tensor) -> Tensor:
        return self.network(weights, x).flatten(0, -2)

    def _loss(self, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self._outputs(weights, x), y.flatten())

    def gradient(self, workers: int) -> Callable[[Ticket, int, Tensor], Tensor]:
        """The driver's gradient function; its weights are those of all rows, seeds changing fastest."""
        size = self.recipe.batch // workers
        x, y = self.recipe.train

        def of_ticket(ticket: Ticket, part: int, weights: Tensor) -> Tensor:
            first = ticket.step * self.recipe.batch + ticket.slice * size
            picked = torch.stack([order[first : first + size] for order in self.orders])
            rows = weights.view(-1, self.network.numel)
            picked = picked.repeat(len(rows) // len(picked), 1)
            return self._gradients(rows, x[picked], y[picked]).flatten()

        return of_ticket

    @torch.no_grad()
    def scores(self, weights: Tensor) -> list[tuple[float, float]]:
        """Test loss in nats and accuracy in %, of each row."""
        found = []
        x, y = self.recipe.test
        for row in weights.view(-1, self.network.numel):
            outputs = self._outputs(row, x)
            loss = F.cross_entropy(outputs, y.flatten()).item()
            found.append((loss, 100 * (outputs.argmax(-1) == y.flatten()).float().mean().item()))
        return found


class SideBySide(Policy):
    """Policies for which nobody waits, each on its part of the weights, under one schedule."""

    def __init__(self, policies: list[Policy]) -> None:
        super().__init__(torch.cat([p.weights for p in policies]), policies[0].hyper)
        self.policies = policies
        for policy, part in zip(policies, self._parts(self.weights), strict=True):
            policy.weights = part
        self._read = [[0] * len(policies) for _ in range(self.hyper.workers)]
        self.lateness = [0] * len(policies)  # updates between a read and its push, added up

    def _parts(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split([p.weights.numel() for p in self.policies])

    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        for k, (policy, part) in enumerate(zip(self.policies, self._parts(grad), strict=True)):
            policy.lr_share = self.lr_share
            self.lateness[k] += policy.version - self._read[worker][k]
            policy.on_push(worker, part, self._read[worker][k])
            assert policy.ready(worker)
        self.version += 1
        return Outcome.APPLIED

    def view(self, worker: int, out: Tensor) -> int:
        for k, (policy, part) in enumerate(zip(self.policies, self._parts(out), strict=True)):
            policy.lr_share = self.lr_share
            self._read[worker][k] = policy.view(worker, part)
        return self.version

    def on_leave(self, worker: int) -> None:
        for policy in self.policies:
            policy.on_leave(worker)

    def finish(self) -> None:
        for policy in self.policies:
            policy.finish()


def parsed(options: str) -> dict[str, str | float]:
    """A policy's options from their text in the CSV."""
    if not options:
        return {}
    name, value = options.split("=")
    return {name: value if name == "lr_scale" else float(value)}


def train(
    name: str, condition: Condition, recipe: Recipe, variants: Iterable[tuple[str, str]]
) -> Iterator[dict]:
    """Train all variants, learning rates and seeds of a condition; a row of the CSV for each."""
    rows, n = Rows(recipe), condition.workers
    keys = [(*variant, lr) for variant in variants for lr in recipe.rates]
    policies = []
    for strategy, options, lr in keys:
        hyper = Hyper(
            lr=lr, weight_decay=recipe.weight_decay, workers=n, optimizer="adamw",
            betas=recipe.betas, eps=1e-8,
        )  # fmt: skip
        initial = rows.network.initial_weights(recipe.seeds)
        policies.append(make_policy(strategy, initial, hyper, parsed(options)))
    together = SideBySide(policies)
    progress = tqdm(total=recipe.steps * n, desc=name, unit="push", mininterval=10)
    of_ticket = rows.gradient(n)

    def gradient(ticket: Ticket, part: int, weights: Tensor) -> Tensor:
        progress.update()
        return of_ticket(ticket, part, weights)

    trace = clocked(
        together, condition, recipe.steps, gradient, lambda pushes: recipe.share((pushes - 1) // n)
    )
    progress.close()
    sync_s = time_of_sync(condition, recipe.steps)
    for k, ((strategy, options, lr), policy) in enumerate(zip(keys, policies, strict=True)):
        for seed, (loss, accuracy) in enumerate(rows.scores(policy.weights)):
            yield {
                **condition._asdict(), "strategy": strategy, "options": options, "lr": lr,
                "seed": seed, "loss": round(loss, 5), "accuracy": round(accuracy, 3),
                "time_s": round(trace.time_s, 3), "time_vs_sync": round(trace.time_s / sync_s, 4),
                "staleness_mean": round(together.lateness[k] / sum(trace.pushes), 3),
            }  # fmt: skip


def clocked(policy: Policy, condition: Condition, steps: int, gradient, lr_share=None) -> Trace:
    timing = Timing(MEDIAN_S, **CLOCK, slowdown=(condition.straggler,))
    plan = TicketPlan(1, steps, condition.workers)
    return simulate([policy], plan, gradient, timing, lr_share=lr_share)


def time_of_sync(condition: Condition, steps: int) -> float:
    """Virtual seconds of ps-sync; what it trains does not matter."""
    policy = make_policy("ps-sync", torch.zeros(1), Hyper(lr=0.0, workers=condition.workers))
    return clocked(policy, condition, steps, lambda ticket, part, w: torch.zeros(1)).time_s


# ---- the page


def paired(rows: list[dict], sync: dict[tuple, dict], measure: str) -> tuple[float, float] | None:
    """Mean difference from ps-sync at the same learning rate and seed, and its standard error."""
    apart = [row[measure] - sync[row["task"], row["lr"], row["seed"]][measure] for row in rows]
    if not apart:
        return None
    spread = statistics.stdev(apart) if len(apart) > 1 else math.nan
    return statistics.mean(apart), spread / math.sqrt(len(apart))


def page(rows: list[dict]) -> str:
    """The tables, and where the aim is missed."""
    sync = {(r["task"], r["lr"], r["seed"]): r for r in rows if r["strategy"] == "ps-sync"}
    others = [r for r in rows if r["strategy"] != "ps-sync"]
    done = {Condition(r["task"], r["workers"], r["straggler"]) for r in others}
    missing = [c for c in CONDITIONS if c not in done]
    lines = [
        "# AdamW on parameter servers, on the virtual clock", "",
        "Of each policy the test loss (nats a token; digits: points of accuracy) minus that of "
        "synchronous AdamW at the same learning rate and seed: mean ± standard error over seeds, of one "
        "schedule. Below 0 nats, or above 0 points, is better than synchronous. Digits: a perceptron "
        "64-64-64-10, global batch 64, 210 steps, constant learning rate, betas 0.9 and 0.999, decay "
        "0.01. Texts: the project's GPT with 2 layers of width 32, 32 tokens, global batch 32, cosine "
        "with warm-up, betas 0.9 and 0.99, decay 0.1; Tiny Shakespeare 300 steps, Markov text 200. A "
        "worker's batch takes 1 virtual second on average (log-normal, with the spread of a gamma "
        "distribution of shape 2), a transfer 0.05, an update 0.01 of the server; the straggler is "
        "worker 0. "
        f"torch {torch.__version__} on CPU. Made by `nice python benchmarks/staleness_adamw.py`.", "",
        *verdict(others, sync),
    ]  # fmt: skip
    if missing:
        named = ", ".join(f"{c.task} {c.workers} x{c.straggler:g}" for c in missing)
        lines += ["", f"**Not measured yet** (task, workers, straggler): {named}."]
    for task in dict.fromkeys(c.task for c in CONDITIONS):
        mine = [r for r in others if r["task"] == task]
        if mine:
            lines += ["", f"## {task}", "", *table(task, mine, sync)]
    if others:
        lines += [
            "",
            "## Each at its best learning rate of those tried",
            "",
            *best_table(others, sync),
        ]
    return "\n".join(lines) + "\n"


def measure_of(task: str) -> str:
    return "accuracy" if task == "digits" else "loss"


def table(task: str, rows: list[dict], sync: dict[tuple, dict]) -> list[str]:
    measure = measure_of(task)
    digits = digits_of(measure)
    rates = sorted({r["lr"] for r in rows})
    variants = list(dict.fromkeys((r["strategy"], r["options"]) for r in rows))
    levels = []
    for lr in rates:
        values = [r[measure] for key, r in sync.items() if key[:2] == (task, lr)]
        levels.append(f"{statistics.mean(values):.{digits}f}")
    heads = [f"`{' '.join(v).strip()}`" for v in variants]
    lines = [
        f"`ps-sync` at lr {' / '.join(f'{lr:g}' for lr in rates)}: {' / '.join(levels)} ({measure}). "
        f"Learning rates in the cells are in this order; {len({r['seed'] for r in rows})} seeds.",
        "",
        "| workers | straggler | time / sync | " + " | ".join(heads) + " |",
        "|---" * (3 + len(heads)) + "|",
    ]
    for n, straggler in sorted({(r["workers"], r["straggler"]) for r in rows}):
        here = [r for r in rows if (r["workers"], r["straggler"]) == (n, straggler)]
        cells = []
        for variant in variants:
            parts = []
            for lr in rates:
                same = [r for r in here if (r["strategy"], r["options"], r["lr"]) == (*variant, lr)]
                found = paired(same, sync, measure)
                parts.append(f"{found[0]:+.{digits}f}±{found[1]:.{digits}f}" if found else "–")
            cells.append(" / ".join(parts))
        slow = "–" if straggler == 1 else f"{straggler:g}x"
        lines.append(
            f"| {n} | {slow} | {here[0]['time_vs_sync']:.2f} | " + " | ".join(cells) + " |"
        )
    return lines


def best_table(rows: list[dict], sync: dict[tuple, dict]) -> list[str]:
    """Each at the learning rate that is best for it, of those tried: the mean over seeds, and which."""
    names = list(dict.fromkeys((r["strategy"], r["options"]) for r in rows))
    heads = ["`ps-sync`", *(f"`{' '.join(name).strip()}`" for name in names)]
    lines = [
        "| task | workers | straggler | " + " | ".join(heads) + " |",
        "|---" * (3 + len(heads)) + "|",
    ]
    conditions = {Condition(r["task"], r["workers"], r["straggler"]) for r in rows}
    for condition in [c for c in CONDITIONS if c in conditions]:
        measure = measure_of(condition.task)
        of_sync = [r for r in sync.values() if r["task"] == condition.task]
        here = [r for r in rows if tuple(r[c] for c in COLUMNS[:3]) == condition]
        found = []
        for same in (
            of_sync,
            *([r for r in here if (r["strategy"], r["options"]) == n] for n in names),
        ):
            means = [
                (statistics.mean(r[measure] for r in same if r["lr"] == lr), lr)
                for lr in {r["lr"] for r in same}
            ]
            best, lr = (max if measure == "accuracy" else min)(means, default=(None, None))
            found.append("–" if best is None else f"{best:.{digits_of(measure)}f} ({lr:g})")
        slow = "–" if condition.straggler == 1 else f"{condition.straggler:g}x"
        lines.append(
            f"| {condition.task} | {condition.workers} | {slow} | " + " | ".join(found) + " |"
        )
    return lines


def digits_of(measure: str) -> int:
    """Behind the point."""
    return 1 if measure == "accuracy" else 3


def verdict(rows: list[dict], sync: dict[tuple, dict]) -> list[str]:
    """In how many cells of the tables each variant misses the aim, and in which the main one does."""
    lines = []
    for variant in dict.fromkeys((r["strategy"], r["options"]) for r in rows):
        mine = [r for r in rows if (r["strategy"], r["options"]) == variant]
        missed, conditions = [], sorted({tuple(r[c] for c in (*COLUMNS[:3], "lr")) for r in mine})
        for key in conditions:
            measure = measure_of(key[0])
            same = [r for r in mine if tuple(r[c] for c in (*COLUMNS[:3], "lr")) == key]
            mean, error = paired(same, sync, measure)
            worse = -mean if measure == "accuracy" else mean
            if worse > AIM[measure]:
                missed.append(
                    f"{key[0]} {key[1]} x{key[2]:g} lr {key[3]:g} ({mean:+.3f}±{error:.3f})"
                )
        text = (
            f"`{' '.join(variant).strip()}`: misses the aim in {len(missed)} of {len(conditions)}"
        )
        lines.append(f"- {text}{': ' + '; '.join(missed) if missed and variant == MAIN else ''}.")
    if not lines:
        return []
    aim = (
        f"Aim: the mean at most {AIM['loss']:g} nats, or {AIM['accuracy']:g} points, worse than synchronous "
        "AdamW at the same learning rate."
    )
    return [aim, "", *lines]


# ---- the run


def read(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for column in ("workers", "seed"):
            row[column] = int(row[column])
        for column in ("straggler", "lr", "loss", "accuracy", "time_s", "time_vs_sync"):
            row[column] = float(row[column])
    return rows


def write(folder: Path, rows: list[dict]) -> None:
    with open(folder / "staleness-adamw.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (folder / "staleness-adamw.md").write_text(page(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = os.environ.get(ROOT_VARIABLE)
    here = recipes(Path(root) if root else None)
    parser.add_argument("--only", nargs="*", choices=list(here), default=list(here))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = read(arguments.out / "staleness-adamw.csv")
    loaded: dict[str, Recipe] = {}
    for wanted in CONDITIONS:
        if wanted.task not in arguments.only:
            continue
        recipe = loaded.setdefault(wanted.task, None) or here[wanted.task]()
        loaded[wanted.task] = recipe
        alone = Condition(wanted.task, 1, 1.0)
        for condition, variants in ((alone, [("ps-sync", "")]), (wanted, recipe.variants)):
            if any(Condition(*(r[c] for c in COLUMNS[:3])) == condition for r in rows):
                continue
            name = f"{condition.task} {condition.workers} x{condition.straggler:g}"
            rows += train(name, condition, recipe, variants)
            write(arguments.out, rows)
    write(arguments.out, rows)


if __name__ == "__main__":
    main()
