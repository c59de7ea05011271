"""What a machine that changes while a study runs makes the decision say, by the order of its cells.

    PYTHONPATH=workflow python benchmarks/order_of_execution.py > benchmarks/results/order-of-execution.md

By simulation through the product's own functions: the order is that of the workflow's priorities, the
decision ranks the candidates, the audit judges the records. All strategies are equal. About ten minutes
of one core. Seeds are fixed, so that the page comes out the same again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd

from stratbench.analysis.audit.across_cells import confounding
from stratbench.analysis.audit.rule import Evidence
from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.ranking import rankings_of_bouts
from stratbench.analysis.records.columns import COLUMNS
from stratbench.cell.coordinates import Cell, expand
from stratbench.study.order import priority

MARGIN = 0.03
RULES = (confounding.confounded_order, confounding.times_follow_time)
#: Strategies and repeats of a study.
SIZES = ((3, 3), (3, 5), (3, 10), (5, 3), (5, 5), (10, 3), (10, 5))
STUDIES = 400

Order = Callable[[list[Cell], np.random.Generator], list[Cell]]
ORDERS: dict[str, Order] = {
    "strategy by strategy": lambda cells, rng: cells,
    "by chance": lambda cells, rng: [cells[i] for i in rng.permutation(len(cells))],
    "repeat by repeat, in one order": lambda cells, rng: sorted(cells, key=lambda c: c.repeat),
    "the workflow's": lambda cells, rng: sorted(cells, key=priority, reverse=True),
}
#: What a machine's change multiplies a time by, as a logarithm, by the share of the study that is over.
Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]
CHANGES: dict[str, Change] = {
    "nothing changes": lambda at, rng: 0 * at,
    "slower by 10 %, steadily": lambda at, rng: math.log(1.1) * at,
    "slower by 10 % from some moment on": lambda at, rng: math.log(1.1) * (at > rng.random()),
    "up and down by 10 %, twice": lambda at, rng: (
        math.log(1.1) / 2 * np.sin(4 * np.pi * at + 2 * np.pi * rng.random())
    ),
}


def main() -> None:
    print(*page(), sep="\n")


def page() -> Iterator[str]:
    yield "# The order of execution, and a machine that changes"
    yield ""
    yield (
        f"Made by `benchmarks/order_of_execution.py`: {STUDIES} simulated studies a row and size, worst "
        "over sizes of 3 to 10 strategies and 3 to 10 repeats. All strategies are equal. *False*: some "
        "strategy is called slower; *winner*: all but one are. *Unsaid*: a false statement without "
        "a doubt of the audit about the order or the time. *Doubted*: studies with such a doubt."
    )
    for noise in (0.01, 0.03):
        yield ""
        yield f"## Noise of {noise:.0%}"
        yield ""
        yield (
            "| the machine | order | false, % (worst; 3 / 5 / 10 strategies at 3 repeats) "
            "| winner, % (worst) | unsaid, % (worst) | doubted, % (least to most) |"
        )
        yield "|---|---|---:|---:|---:|---:|"
        for what, change in CHANGES.items():
            for name, order in ORDERS.items():
                found = {size: rates(*size, order, change, noise) for size in SIZES}
                worst = {key: max(r[key] for r in found.values()) for key in ("winner", "unsaid")}
                false = max(r["false"] for r in found.values())
                three = " / ".join(f"{found[n, 3]['false']:.1f}" for n in (3, 5, 10))
                doubted = [r["doubted"] for r in found.values()]
                yield (
                    f"| {what} | {name} | {false:.1f}; {three} | {worst['winner']:.1f} "
                    f"| {worst['unsaid']:.1f} | {min(doubted):.1f} to {max(doubted):.1f} |"
                )
    yield ""
    yield "## A strategy or a repeat that is added later, to a machine that is 10 % slower by then"
    yield ""
    yield "| added | noise | false, % (worst) | unsaid, % (worst) | doubted, % (least to most) |"
    yield "|---|---:|---:|---:|---:|"
    for what, order in ADDED.items():
        for noise in (0.01, 0.03):
            rows = [rates(*size, order, later(what, size), noise) for size in SIZES if size[0] < 10]
            doubted = [r["doubted"] for r in rows]
            yield (
                f"| {what} | {noise:.0%} | {max(r['false'] for r in rows):.1f} | "
                f"{max(r['unsaid'] for r in rows):.1f} | {min(doubted):.1f} to {max(doubted):.1f} |"
            )


def workflows(cells: Sequence[Cell]) -> list[Cell]:
    return sorted(cells, key=priority, reverse=True)


ADDED: dict[str, Order] = {
    "a strategy": lambda cells, rng: [
        *workflows([c for c in cells if c.strategy != "s0"]),
        *workflows([c for c in cells if c.strategy == "s0"]),
    ],
    "the last repeat": lambda cells, rng: workflows(cells),
    "a strategy, and the last repeat of all": lambda cells, rng: [
        *workflows([c for c in cells if c.strategy != "s0" and c.repeat < last(cells)]),
        *workflows([c for c in cells if c.strategy == "s0" or c.repeat == last(cells)]),
    ],
}


def last(cells: Sequence[Cell]) -> int:
    return max(cell.repeat for cell in cells)


def later(what: str, size: tuple[int, int]) -> Change:
    """10 % slower for what is added."""
    strategies, repeats = size
    n = {"a strategy": repeats, "the last repeat": strategies}.get(what, repeats + strategies - 1)
    return lambda at, rng: math.log(1.1) * (np.arange(len(at)) >= len(at) - n)


def rates(
    strategies: int, repeats: int, order: Order, change: Change, noise: float
) -> dict[str, float]:
    """Rates in percent over studies of equal strategies."""
    rng = np.random.default_rng([strategies, repeats])
    named = [(f"s{i}", None) for i in range(strategies)]
    found = [
        judged(
            order(list(expand(f"study{i}", "e", "d", named, ["m"], [2], repeats)), rng),
            change,
            noise,
            rng,
        )
        for i in range(STUDIES)
    ]
    return {key: 100 * float(np.mean([one[key] for one in found])) for key in found[0]}


def judged(
    cells: Sequence[Cell], change: Change, noise: float, rng: np.random.Generator
) -> dict[str, bool]:
    """What the decision and the audit say of cells that ran one after another in this order."""
    at = np.arange(len(cells)) / (len(cells) - 1)
    times = 600 * np.exp(change(at, rng) + noise * rng.normal(size=len(cells)))
    # The rules look at the order alone, not at how long nothing ran.
    starts = [datetime(2000, 1, 1, tzinfo=UTC) + timedelta(hours=i) for i in range(len(cells))]
    by_strategy: dict[str, dict[int, float]] = {}
    records = []
    for cell, time_s, start in zip(cells, times, starts, strict=True):
        by_strategy.setdefault(cell.strategy, {})[cell.repeat] = time_s
        end = start + timedelta(minutes=50)
        moments = {"started": start.isoformat(), "finished": end.isoformat()}
        records.append(
            {
                "cell": cell.as_dict(),
                "status": "ok",
                "strategy": {"kind": "collective"},
                "time": {"train_time_s": time_s},
                "provenance": moments,
                "workers": [],
            }
        )
    bout = [
        Candidate(name, 2, times=(own := pd.Series(repeats).sort_index()), time_s=geometric(own))
        for name, repeats in by_strategy.items()
    ]
    (ranking,) = rankings_of_bouts([bout], MARGIN)
    evidence = Evidence(pd.DataFrame(columns=list(COLUMNS)), records)
    doubted = any(any(rule.check(evidence)) for rule in RULES)
    false = any(c.stand == "slower" for c in ranking.compared)
    return {
        "false": false,
        "winner": ranking.is_clear,
        "unsaid": false and not doubted,
        "doubted": doubted,
    }


def geometric(times: pd.Series) -> float:
    return float(np.exp(np.log(times).mean()))


if __name__ == "__main__":
    main()
