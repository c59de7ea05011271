"""Gang or elastic: time to result by simulation, over load, width, length, slow nodes and preemption.

    PYTHONPATH=workflow nice python benchmarks/elastic_map.py map
    PYTHONPATH=workflow nice python benchmarks/elastic_map.py factors
    PYTHONPATH=workflow nice python benchmarks/elastic_map.py others
    PYTHONPATH=workflow python benchmarks/elastic_map.py docs

The map is workflow/reference/elastic_map.csv, from which reports quote; the others are
results/elastic/NAME.csv, and the last draws docs/elastic.svg: 15 minutes, half a minute and two of one
core. A cell that is there is not simulated again. 8 nodes of 8 GPUs, EASY, others' jobs as made by
plan/queue/background.py. All arms of a moment start from one copied state of the queue; intervals (95 %)
are by jackknife over the blocks, each with a queue of its own.

`map`: every combination; preemption without the longest trainings and with two of the slow nodes.
`factors`: one thing changed at a time. `others`: what a training costs everybody else.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))
from stratbench.plan.queue.background import REQUEST_FACTORS
from stratbench.plan.queue.break_even import (
    ARMS,
    ASYNCHRONOUS,
    GANG,
    SCATTERED,
    SYNCHRONOUS,
    WORTHS,
    Work,
    at_worth,
    paired_times,
    poisson_queue,
)
from stratbench.plan.queue.known_map import MAP
from stratbench.plan.queue.simulator import ALL, Rules

OUT = Path(__file__).parent / "results" / "elastic"
NODES, GPUS_PER_NODE = 8, 8
LOADS, WIDTHS, HOURS = (0.5, 0.7, 0.85), (4, 8, 16, 32), (0.5, 2.0, 8.0, 24.0)
#: The share of slow nodes, and how many times slower they are.
SLOW = ((0.0, 1.0), (0.1, 1.5), (0.1, 3.0), (0.3, 1.5))
#: Seconds that this project's split synchronous workers stop for, on a busy machine (elastic_pause.py).
OWN_PAUSE_S = 0.2
#: Blocks and moments of each: of the main table, and of all other rows.
MAIN, OTHER = (10, 6), (6, 4)
#: Of the figure's arms: a colour that is told apart with any kind of sight, and where the mark stands.
COLOURS = {
    SCATTERED: ("#E69F00", 0.95),
    SYNCHRONOUS: ("#0072B2", 1.0),
    ASYNCHRONOUS: ("#D55E00", 1.05),
}


@dataclass(frozen=True)
class Key:
    """One cell of the map."""

    load: float
    width: int
    hours: float = 2.0
    slow_nodes: float = 0.0
    slow_factor: float = 1.0
    preemptible: bool = False
    mtbf_days: float = math.inf
    pause_s: float = 60.0
    recovery: str = "checkpoint"
    factors: str = "-".join(f"{f:g}" for f in REQUEST_FACTORS)
    reserve: int = 1
    blocks: int = OTHER[0]
    moments: int = OTHER[1]


KEYS = tuple(spec.name for spec in fields(Key))
#: Of each arm its mean time and interval; of each but the gang the ratio to the gang.
COLUMNS = (
    *KEYS,
    "busy",
    *(f"{arm} {what}" for arm in ARMS for what in ("h", "h low", "h high")),
    *(f"{arm} / gang{what}" for arm in ARMS[1:] for what in ("", " low", " high")),
    *(f"even with {arm}{what}" for arm in (GANG, SCATTERED, SYNCHRONOUS) for what in ("", " low", " high")),
)  # fmt: skip


def map_keys() -> Iterator[Key]:
    """All combinations, a load at which the queue is not steady, and the pause of this project's workers."""
    rest = [
        *itertools.product(HOURS, SLOW, (False,)),
        *itertools.product(HOURS[:3], SLOW[::2], (True,)),
    ]
    rest.sort(
        key=lambda r: (r[0] != 2.0, r[1] != SLOW[0])
    )  # a run that is stopped has what decides
    for (hours, slow, preemptible), load, width in itertools.product(rest, LOADS, WIDTHS):
        main = hours == 2.0 and slow == SLOW[0] and not preemptible
        blocks, moments = MAIN if main else OTHER
        yield Key(load, width, hours, *slow, preemptible, blocks=blocks, moments=moments)
    own = [*itertools.product(HOURS[:3], SLOW[:1], (False, True)), (HOURS[3], SLOW[0], False)]
    own += [(2.0, slow, False) for slow in SLOW[1:]]
    own.sort(key=lambda o: o[0] != 2.0)
    for (hours, slow, preemptible), load, width in itertools.product(own, LOADS, WIDTHS):
        main = hours == 2.0 and slow == SLOW[0] and not preemptible
        blocks, moments = MAIN if main else OTHER
        stops = {"pause_s": OWN_PAUSE_S, "recovery": "peer"}
        yield Key(load, width, hours, *slow, preemptible, **stops, blocks=blocks, moments=moments)
    for width in WIDTHS[1:]:
        yield Key(0.95, width, blocks=MAIN[0], moments=MAIN[1])


def factor_keys() -> Iterator[Key]:
    """What else decides: failures, requested wall times, reservations, the pause."""
    for days in (math.inf, 100.0, 10.0, 3.0):
        yield Key(0.7, 16, 8.0, mtbf_days=days)
    for factors in ("1", "3", "10"):
        yield Key(0.7, 16, factors=factors)
    for reserve in (0, 1, ALL):
        yield Key(0.7, 16, reserve=reserve)
    for width, pause_s in itertools.product((16, 32), (10.0, 60.0, 180.0, 600.0)):
        yield Key(0.85, width, pause_s=pause_s)
    for width in (16, 32):
        yield Key(0.85, width, pause_s=OWN_PAUSE_S, recovery="peer")


def row_of(key: Key) -> dict[str, object]:
    """The simulated row of a cell."""
    rules = Rules(
        reserve=key.reserve,
        node_mtbf_s=key.mtbf_days * 86400,
        slow_share=key.slow_nodes,
        slow_factor=key.slow_factor,
    )
    factors = [float(f) for f in key.factors.split("-")]
    # Where others preempt it, a training takes several times as long.
    lasting_h = key.hours * (3 if key.preemptible else 1)
    shape = (NODES, GPUS_PER_NODE, rules, key.load, lasting_h, key.blocks, key.moments)
    stops = {"pause_s": key.pause_s, "from_peers": key.recovery == "peer"}
    work = Work(key.width, key.hours, preemptible=key.preemptible, **stops)
    times = paired_times(poisson_queue(*shape, factors=factors), work)
    row: dict[str, object] = dict(zip(KEYS, astuple(key), strict=True)) | {"busy": times.busy}
    for arm in ARMS:
        name = at_worth(WORTHS[0]) if arm == ASYNCHRONOUS else arm
        for what, value in zip(("h", "h low", "h high"), times.mean(name), strict=True):
            row[f"{arm} {what}"] = value
        if arm != GANG:
            for what, value in zip(("", " low", " high"), times.ratio(name, GANG), strict=True):
                row[f"{arm} / gang{what}"] = value
    for arm in (GANG, SCATTERED, SYNCHRONOUS):
        for what, value in zip(("", " low", " high"), times.break_even(arm), strict=True):
            beyond = {0.0: f"<{WORTHS[-1]:g}", math.inf: f">{WORTHS[0]:g}"}
            row[f"even with {arm}{what}"] = beyond.get(value, value)
    return row


def others_rows(key: Key) -> list[dict[str, object]]:
    """Job-hours that others wait longer within 48 hours, by arm, and the standard error."""
    rows = []
    rules = Rules(reserve=key.reserve)
    own = Work(key.width, key.hours, pause_s=OWN_PAUSE_S, from_peers=True, preemptible=True)
    asked = [
        (Work(key.width, key.hours), [*ARMS[:-1], at_worth(1.0)]),
        (own, [SYNCHRONOUS, at_worth(1.0)]),
    ]
    for work, arms in asked:
        queue = poisson_queue(NODES, GPUS_PER_NODE, rules, key.load, 12.0, key.blocks, key.moments)
        times = paired_times(queue, work, arms=arms, others_within_h=48.0)
        for arm, found in times.others_h.items():
            means = found.mean(axis=1)  # moments of one queue share its jobs
            error_h = means.std(ddof=1) / math.sqrt(len(means))
            if arm == GANG:
                gang = means
            less = gang - means  # over the same queues
            rows.append(
                {
                    "load": key.load,
                    "width": key.width,
                    "hours": key.hours,
                    "arm": arm,
                    "preemptible": work.preemptible,
                    "pause_s": work.pause_s,
                    "others_wait_h": f"{found.mean():.3g}",
                    "standard_error_h": f"{error_h:.2g}",
                    "less_than_gang_h": f"{less.mean():.3g}",
                    "its_standard_error_h": f"{less.std(ddof=1) / math.sqrt(len(less)):.2g}",
                }
            )
    return rows


def told(value: object) -> str:
    """A value of the CSV: three digits; empty where there is none."""
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def write(path: Path, rows: list[dict]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def kept_rows(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """The rows of an earlier run, by their keys as text."""
    if not path.exists():
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        return {tuple(r[name] for name in KEYS): r for r in csv.DictReader(file)}


def main_rows(
    rows: list[dict[str, str]], preemptible: bool = False, recovery: str = "checkpoint"
) -> list[dict[str, str]]:
    """The rows of trainings of 2 hours on equally fast nodes, at steady loads."""
    main = {
        "hours": "2",
        "slow_nodes": "0",
        "preemptible": str(preemptible),
        "recovery": recovery,
    }
    steady = [r for r in rows if float(r["load"]) <= max(LOADS)]
    return [r for r in steady if all(r[k] == v for k, v in main.items())]


def lines_of_docs(rows: list[dict[str, str]], others: Path) -> Iterator[str]:
    """The rows of the tables of docs/elastic.md."""
    for r, own in zip(main_rows(rows), main_rows(rows, recovery="peer"), strict=True):
        yield joined(
            f"{r['load']} ({r['busy']} in use)", r["width"], r["gang h"],
            *(ratio_text(r, arm) for arm in (SCATTERED, SYNCHRONOUS)),
            ratio_text(own, SYNCHRONOUS), ratio_text(r, ASYNCHRONOUS),
            worth_text(r[f"even with {GANG}"]), worth_text(r[f"even with {SYNCHRONOUS}"]),
            worth_text(own[f"even with {SYNCHRONOUS}"]),
        )  # fmt: skip
    changed = {"load": "0.7", "width": "16", "preemptible": "False"}
    asked = [r for r in rows if all(r[key] == value for key, value in changed.items())]
    owns = {
        (r["hours"], r["slow_nodes"], r["slow_factor"]): r for r in asked if r["recovery"] == "peer"
    }
    for r in asked:
        if r["recovery"] == "peer":
            continue
        change = f"{r['hours']} h of work" if r["slow_nodes"] == "0" else ""
        if r["hours"] == "2" and r["slow_nodes"] != "0":
            change = f"{float(r['slow_nodes']):.0%} of nodes {r['slow_factor']} times slower"
        if change:
            own = owns[r["hours"], r["slow_nodes"], r["slow_factor"]]
            yield joined(
                change, r["gang h"], *(ratio_text(of, SYNCHRONOUS) for of in (r, own)),
                ratio_text(r, ASYNCHRONOUS),
                *(worth_text(of[f"even with {SYNCHRONOUS}"]) for of in (r, own)),
            )  # fmt: skip
    owns = main_rows(rows, True, "peer")
    for r, own in zip(main_rows(rows, preemptible=True), owns, strict=True):
        if r["width"] != "4":
            yield joined(
                r["load"], r["width"], r[f"{GANG} h"], r[f"{SYNCHRONOUS} h"], own[f"{SYNCHRONOUS} h"],
                r[f"{ASYNCHRONOUS} h"], ratio_text(own, SYNCHRONOUS), ratio_text(r, ASYNCHRONOUS),
                worth_text(own[f"even with {SYNCHRONOUS}"]),
            )  # fmt: skip
    with open(others, newline="", encoding="utf-8") as file:
        cost = {(r["load"], r["arm"], r["preemptible"]): r for r in csv.DictReader(file)}
    for load in dict.fromkeys(key[0] for key in cost):
        asked = [(arm, "False") for arm in (GANG, SCATTERED, SYNCHRONOUS, at_worth(1.0))]
        preempted = [(SYNCHRONOUS, "True"), (at_worth(1.0), "True")]
        found = [cost[load, *key] for key in (*asked, *preempted)]
        yield joined(load, *(f"{r['others_wait_h']} ({r['standard_error_h']})" for r in found))


def joined(*cells: str) -> str:
    """A row of a table of Markdown."""
    return f"| {' | '.join(cells)} |"


def ratio_text(row: dict[str, str], arm: str) -> str:
    """The arm's ratio to the gang, with its interval."""
    value, low, high = (float(row[f"{arm} / gang{end}"]) for end in ("", " low", " high"))
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def worth_text(text: str) -> str:
    """A worth that breaks even: two digits, or beyond what was simulated."""
    return (
        text.replace("<", "below ").replace(">", "above ")
        if text[0] in "<>"
        else f"{float(text):.2f}"
    )


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """The main table: each arm's time over the gang's, by width and load, with intervals."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = main_rows(rows)
    with mpl.rc_context({"svg.hashsalt": "stratbench", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        panels = figure.subplots(1, len(LOADS), sharey=True)
        for axes, load in zip(panels, LOADS, strict=True):
            mine = [r for r in rows if r["load"] == told(load)]
            for arm, (colour, shift) in COLOURS.items():
                values, lows, highs = (
                    [float(r[f"{arm} / gang{end}"]) for r in mine] for end in ("", " low", " high")
                )
                axes.errorbar(
                    [int(r["width"]) * shift for r in mine],
                    values,
                    [
                        [v - low for v, low in zip(values, lows, strict=True)],
                        [high - v for v, high in zip(values, highs, strict=True)],
                    ],
                    fmt="o-",
                    markersize=4,
                    capsize=2,
                    color=colour,
                    label=arm,
                )
            axes.axhline(1.0, color="#999999", linewidth=1)
            axes.set_xscale("log", base=2)
            axes.set_xticks(WIDTHS, map(str, WIDTHS))
            axes.set_title(f"load {load:g}", fontsize="medium")
            axes.set_xlabel("GPUs of the training, of 64")
        panels[0].set_ylabel("time to result / a gang's")
        panels[0].legend(fontsize="small", loc="lower left")
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("map", "factors", "others", "docs"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = MAP if given.what == "map" else given.out / f"{given.what}.csv"
    if given.what == "docs":
        rows = list(kept_rows(MAP).values())
        draw(rows, Path(__file__).parents[1] / "docs" / "elastic.svg")
        print("\n".join(lines_of_docs(rows, given.out / "others.csv")))
        return
    with ProcessPoolExecutor(given.processes) as pool:
        if given.what == "others":
            asked = [Key(load, 16, blocks=12) for load in (0.7, 0.85)]
            write(path, list(itertools.chain(*pool.map(others_rows, asked))))
            return
        keys = list(map_keys() if given.what == "map" else factor_keys())
        texts = {key: tuple(map(told, astuple(key))) for key in keys}
        kept = kept_rows(path)
        new = [key for key in keys if texts[key] not in kept]
        for key, row in zip(new, tqdm(pool.map(row_of, new), total=len(new)), strict=True):
            kept[texts[key]] = {name: told(row[name]) for name in COLUMNS}
            write(path, [kept[texts[k]] for k in keys if texts[k] in kept])


if __name__ == "__main__":
    main()
