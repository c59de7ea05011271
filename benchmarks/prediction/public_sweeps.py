"""Holds the plan and the sieves of `tune` to public sweeps: configurations of a network, measured by others.

    PYTHONPATH=workflow nice python benchmarks/prediction/public_sweeps.py [FILE.csv]

FILE.csv has the sweeps' rows (public_sweep_runs.py says which columns). What a config can say of them is
planned and written into workflow/reference/public_sweeps.csv, from which `tune` learns how far planned ratios
are off. Rows of that table are kept: remove it where the plan's rates have changed. Ctrl-C ends a run and
keeps what is planned. Prints benchmarks/results/public-sweeps.md from the table, without FILE.csv in seconds.
"""

from __future__ import annotations

import csv
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "workflow")]

from public_plans import Planner  # noqa: E402
from public_sweep_runs import MODELS, Run, equal_blocks, read_runs  # noqa: E402

from stratbench.cell.text.words import GIB  # noqa: E402
from stratbench.extensions.plan.device_rates import find_gpu_datasheet  # noqa: E402
from stratbench.extensions.plan.footprint.few_parts import FEW, MORE  # noqa: E402
from stratbench.extensions.plan.schedule import DOES_NOT_FIT, FITS, TIGHT  # noqa: E402
from stratbench.extensions.tune.differences import (  # noqa: E402
    KINDS,
    PUBLIC_SWEEPS,
    Margins,
    find_configurations_to_drop,
    fit_margins_to_sweeps,
    group_rows_by_sweep,
    read_public_sweeps,
)
from stratbench.extensions.tune.sieves import MEMORY_FACTOR  # noqa: E402

Row = Mapping[str, str]
#: Sources whose sweeps ran PyTorch's own DDP, FSDP and tensor parallelism.
PYTORCH = (
    "gpt2-large-h100-blog",
    "idris",
    "idris-parallelism",
    "kempnerforge",
    "rorqual-enoki",
    "torchtitan",
)
#: Times as long as this count as the winner's.
NEAR = 1.03
COLUMNS = ("sweep", "source", "url", "licence", "model", "gpu", "gpus", "strategy", *KINDS)
COLUMNS += ("measured", "planned", "need", "verdict")


def plan_run(planner: Planner, run: Run) -> dict[str, str]:
    """Return the row of a run: what was measured and what is planned, each for one sample.

    Raises:
        SystemExit: It is not predicted.
    """
    configurations = [run.configuration] if run.whole else [run.at(False), run.at(True)]
    planned = [planner.plan(c) for c in configurations]
    if planned[0].fit is None:
        raise SystemExit(f"{run.row['sweep']}: is not predicted: {planned[0].reason}")
    fit, times = planned[0].fit, [p.fit.usual_s for p in planned]
    planned_s = times[0] + (times[-1] - times[0]) * run.share
    memory_bytes = find_gpu_datasheet(run.configuration["cluster"]["gpu"]).memory_gib * GIB
    return row_of(run) | {
        "planned": f"{planned_s / run.configuration['experiment']['global_batch']:.5g}",
        "need": f"{fit.needed_bytes / memory_bytes:.3f}" if run.whole else "",
        "verdict": fit.memory_verdict if run.whole else "",
    }


def row_of(run: Run) -> dict[str, str]:
    """Return what the row of a run says of it without a plan."""
    return {
        **{key: run.row[key] for key in ("sweep", "source", "licence")},
        "url": re.sub(r"[;,] (the stored copy|in Chinese)[^)]*", "", run.row["url"]),
        "model": run.configuration["model"],
        "gpu": run.configuration["cluster"]["gpu"],
        "gpus": str(run.configuration["experiment"]["gpus"]),
        "strategy": run.row["strategy"],
        **{kind: f"{amount:g}" for kind, amount in run.kinds.items()},
        "measured": "" if run.cost is None else f"{run.cost:.5g}",
    }


def followed_steps(run: Run) -> int:
    """Return about how many micro-steps are followed to plan a run, each with all its collectives."""
    parts = run.configuration["experiment"]["gradient_accumulation_steps"]
    steps = min(parts, FEW + MORE) * (1 if run.whole else 2)
    if (stages := run.kinds["pipeline"]) > 1:
        return stages * min(run.configuration["variant"]["microbatches"], FEW + MORE)
    return steps * (2 if run.kinds["tensor"] > 1 else 1)


def plan_runs(runs: Sequence[Run], known: Sequence[Row]) -> list[Row]:
    """Return the known rows, and those of other runs, as far as they are planned when it is interrupted."""
    planner, rows = Planner(MODELS, equal_blocks), list(known)
    kept = {key_of(row) for row in known}
    left = [run for run in runs if key_of(row_of(run)) not in kept]
    try:
        for i, run in enumerate(left):
            rows.append(plan_run(planner, run))
            print(
                f"{i + 1} of {len(left)}: {time.process_time():.0f} s", file=sys.stderr, flush=True
            )
    except KeyboardInterrupt:
        print(f"{len(rows)} of {len(runs)} are planned", file=sys.stderr)
    return sorted(rows, key=lambda row: (row["source"], row["sweep"]))


def key_of(row: Row) -> tuple[str, ...]:
    """Return what tells a row from others: all but what is planned of it."""
    return tuple(row[column] for column in COLUMNS[: COLUMNS.index("planned")])


def write_table(rows: Sequence[Row]) -> None:
    """Write the table that `tune` reads."""
    with PUBLIC_SWEEPS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    read_public_sweeps.cache_clear()


class Sweep:
    """A sweep with two or more configurations that ran."""

    def __init__(self, rows: Sequence[Row]):
        self.rows = [row for row in rows if row["measured"]]
        self.source = rows[0]["source"]
        self.measured = [float(row["measured"]) for row in self.rows]
        self.planned = [float(row["planned"]) for row in self.rows]
        self.amounts = [{kind: float(row[kind]) for kind in KINDS} for row in self.rows]

    @property
    def indices(self) -> list[int]:
        """All configurations."""
        return list(range(len(self.rows)))

    @property
    def order(self) -> list[int]:
        """The configurations, planned fastest first."""
        return sorted(self.indices, key=self.planned.__getitem__)

    def regret(self, of: Sequence[int]) -> float:
        """Return the best of these configurations over the best of all."""
        return min((self.measured[i] for i in of), default=math.inf) / min(self.measured)

    @property
    def not_too_large(self) -> list[int]:
        """The configurations that the sieve of memory leaves."""
        needs = (row["need"] for row in self.rows)
        return [i for i, need in enumerate(needs) if not need or float(need) <= MEMORY_FACTOR]

    def left(self, margins: Margins) -> list[int]:
        """Return the configurations that the sieve of time leaves."""
        names = {str(i): i for i in self.indices}
        times = {name: self.planned[i] for name, i in names.items()}
        lost = find_configurations_to_drop(
            times, {name: self.amounts[i] for name, i in names.items()}, margins
        )
        return [i for name, i in names.items() if name not in lost]

    def within(self, factor: float) -> list[int]:
        """Return what is planned within so many times of the fastest."""
        return [i for i in self.indices if self.planned[i] <= factor * min(self.planned)]


def sieve_rows(sweeps: Sequence[Sweep], margins: Mapping[str, Margins]) -> Iterator[str]:
    """Yield the table of sieves; `margins`: by the source that is left out."""
    sieves: dict[str, Callable[[Sweep], list[int]]] = {
        "memory": lambda s: s.not_too_large,
        "memory, and by kind": lambda s: [
            i for i in s.left(margins[s.source]) if i in s.not_too_large
        ],
        "by kind, of other sources": lambda s: s.left(margins[s.source]),
        **{
            f"one factor, {factor:g}": lambda s, factor=factor: s.within(factor)
            for factor in (1.1, 1.15, 1.3, 1.5)
        },
        "the first three": lambda s: s.order[:3],
        "the first alone": lambda s: s.order[:1],
    }
    for name, group in groups(sweeps):
        for sieve, keep in sieves.items():
            kept = [keep(s) for s in group]
            regrets = [s.regret(left) for s, left in zip(group, kept, strict=True)]
            share = sum(map(len, kept)) / sum(len(s.rows) for s in group)
            yield (
                f"| {name} ({len(group)}) | {sieve} | {percent(share)} | "
                f"{percent(fmean(r <= 1 for r in regrets))} | "
                f"{percent(fmean(r <= NEAR for r in regrets))} | {max(regrets):.2f} |"
            )


def groups(sweeps: Sequence[Sweep]) -> Iterator[tuple[str, list[Sweep]]]:
    """Yield PyTorch's sweeps, the others, and all."""
    yield "PyTorch", [s for s in sweeps if s.source in PYTORCH]
    yield "others", [s for s in sweeps if s.source not in PYTORCH]
    yield "all", list(sweeps)


def kind_rows(sweeps: Sequence[Sweep], margins: Mapping[str, Margins]) -> Iterator[str]:
    """Yield the table by kind: pairs of a sweep that differ in one kind alone, judged by other sources."""
    whole = fit_margins_to_sweeps(row for s in sweeps for row in s.rows)
    for kind in KINDS:
        for more in (True, False):
            pairs = [p for s in sweeps for p in pairs_of(s, kind, more)]
            apart = [p for p in pairs if abs(math.log(p.measured)) > math.log(NEAR)]
            wrong = [p for p in apart if p.measured < 1]
            known = [p for p in pairs if (kind, more) in margins[p.source]]
            dropped = [p for p in known if p.planned > margins[p.source][kind, more].ratio]
            lost = sum(p in wrong for p in dropped)
            m = whole.get((kind, more))
            evidence = f"{m.sweeps} | {m.sources} | {m.ratio:.2f}" if m else "too little | | "
            others = [of[kind, more].ratio for of in margins.values() if (kind, more) in of]
            ends = dict.fromkeys(f"{end(others):.2f}" for end in (min, max) if others)
            yield (
                f"| {kind} | {'more' if more else 'less'} | {len(pairs)} | {len(wrong)} of {len(apart)} | "
                f"{evidence} | {' to '.join(ends)} | {len(dropped)} | {lost} |"
            )


class Pair(NamedTuple):
    """Ratios of the one that is planned slower to the other."""

    source: str
    planned: float
    measured: float


def pairs_of(s: Sweep, kind: str, more: bool) -> Iterator[Pair]:
    """Yield the pairs that differ in `kind` alone, the slower one with more (or less) of it."""
    for slower, faster in permutations(s.indices, 2):
        a, b = s.amounts[slower], s.amounts[faster]
        planned = s.planned[slower] / s.planned[faster]
        if (
            planned > 1
            and [k for k in KINDS if a[k] != b[k]] == [kind]
            and (a[kind] > b[kind]) == more
        ):
            yield Pair(s.source, planned, s.measured[slower] / s.measured[faster])


Rule = Callable[[Sweep], list[int]]


def least(kind: str) -> Rule:
    """Return the rule that takes what has least of a kind."""
    return lambda s: [i for i in s.indices if s.amounts[i][kind] == min(a[kind] for a in s.amounts)]


RULES: dict[str, Rule] = {
    "no tensor parallelism": least("tensor"),
    "the largest micro-batch": lambda s: [
        i
        for i in s.indices
        if s.amounts[i]["micro-batch"] == max(a["micro-batch"] for a in s.amounts)
    ],
    "no checkpointing where it fits": least("checkpointing"),
    "DDP where it fits": lambda s: [
        i for i in s.indices if s.rows[i]["strategy"] in ("ddp", "zero0")
    ],
}


def rule_rows(sweeps: Sequence[Sweep]) -> Iterator[str]:
    """Yield the table of rules of thumb, each on the sweeps in which it leaves some and drops others."""
    for name, rule in RULES.items():
        left = [(s, kept) for s in sweeps if 0 < len(kept := rule(s)) < len(s.rows)]
        for what, of in (
            ("the best that it leaves", lambda s, kept: s.regret(kept)),
            ("the mean of what it leaves", mean_regret),
            ("the plan's first choice", lambda s, kept: s.regret(s.order[:1])),
        ):
            regrets = [of(s, kept) for s, kept in left]
            near = percent(fmean(r <= NEAR for r in regrets))
            yield (
                f"| {name} ({len(left)}) | {what} | {near} | {median(regrets):.2f} | "
                f"{max(regrets):.2f} |"
            )


def mean_regret(s: Sweep, kept: Sequence[int]) -> float:
    """Return the mean of these configurations over the best of all."""
    return fmean(s.measured[i] for i in kept) / min(s.measured)


def percent(share: float) -> str:
    """Return a share as a whole number of percent."""
    return f"{100 * share:.0f}"


def verdict_rows(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of verdicts by source."""
    for source in (*dict.fromkeys(row["source"] for row in rows), "all"):
        mine = [r for r in rows if r["verdict"] and source in (r["source"], "all")]
        cells = (
            sum((r["measured"] != "", r["verdict"]) == (ran, verdict) for r in mine)
            for ran in (True, False)
            for verdict in (FITS, TIGHT, DOES_NOT_FIT)
        )
        over = sum(r["measured"] != "" and float(r["need"]) > MEMORY_FACTOR for r in mine)
        yield f"| {source} | {' | '.join(map(str, cells))} | {over} |"


PAGE = """# The plan and the sieves of `tune` beside public sweeps

`PYTHONPATH=workflow nice python benchmarks/prediction/public_sweeps.py [FILE.csv]`

{count} configurations of {sweeps} sweeps, each of one network on one kind and number of GPUs
(`workflow/reference/public_sweeps.csv` has source and licence of each). Every figure of the sieve by kind is
of margins from all other sources. PyTorch: sweeps of its own DDP, FSDP and tensor parallelism; others:
DeepSpeed, InternEvo and Megatron, of which only times are public. Cells are percent where no unit is said.
{pipelines} of the configurations are pipelines. Steps of several micro-batches are planned in part, the
cheapest first. Nothing on this page was timed here, so that the load of the machine does not matter.

## What the sieves leave

Left: configurations that are kept. Winner kept: sweeps in which the fastest is among them; near: it, or one
within 3 % of it. Worst: the best that is left, over the fastest, in the worst sweep. Memory: what `tune`
tries, up to 150 % of the GPU's memory by the plan. The others are sieves of time. By memory the winner of
{lost} of {sweeps} sweeps is lost (the best that is left, over it):

{names}

| sweeps | sieve | left | winner kept | near | worst |
|---|---|--:|--:|--:|--:|
{sieves}

## By kind of difference

Pairs of a sweep that differ in one kind alone, by whether the one that is planned slower has more of it.
Wrong: it was faster by more than 3 %, of the pairs whose times differ by so much. Kept up to: the planned
ratio from which `tune` drops the slower one, by all the sweeps and sources that are counted before it.
Without one: the same, from the least to the most, if one source is left out and the rest is enough. Dropped,
lost: by other sources; lost is what was faster by more than 3 %.

| kind | slower has | pairs | wrong | sweeps | sources | kept up to | without one | dropped | lost |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|
{kinds}

## Rules of thumb

Each on the sweeps in which it leaves some configurations and drops others (their number). Regret: over the
fastest of the sweep.

| rule | takes | within 3 % | median regret | worst |
|---|---|--:|--:|--:|
{rules}

## Verdicts on memory

The limits are 81 % of the GPU's memory (`fits`) and 103 % (`tight`); `tune` drops what needs more than 150 %.

| source | ran: fits | tight | does not fit | out of memory: fits | tight | does not fit | ran beyond 150 % |
|---|--:|--:|--:|--:|--:|--:|--:|
{verdicts}
"""


def page(rows: Sequence[Row]) -> str:
    """Return the page of these rows."""
    sweeps = [s for s in map(Sweep, group_rows_by_sweep(rows).values()) if len(s.rows) > 1]
    margins = {
        source: fit_margins_to_sweeps(row for s in sweeps if s.source != source for row in s.rows)
        for source in {s.source for s in sweeps}
    }
    lost = [s for s in sweeps if s.regret(s.not_too_large) > 1]
    names = [f"- `{s.rows[0]['sweep']}`: {s.regret(s.not_too_large):.2f}" for s in lost]
    return PAGE.format(
        lost=len(lost),
        names="\n".join(names),
        pipelines=sum(a["pipeline"] > 1 for s in sweeps for a in s.amounts) or "None",
        count=sum(len(s.rows) for s in sweeps),
        sweeps=len(sweeps),
        sieves="\n".join(sieve_rows(sweeps, margins)),
        kinds="\n".join(kind_rows(sweeps, margins)),
        rules="\n".join(rule_rows(sweeps)),
        verdicts="\n".join(verdict_rows(rows)),
    )


def main() -> None:
    """Plan the runs of the file, if there is one, and print the page."""
    if len(sys.argv) > 1:
        runs = sorted(read_runs(Path(sys.argv[1])), key=followed_steps)
        write_table(plan_runs(runs, read_public_sweeps() if PUBLIC_SWEEPS.exists() else []))
    print(page(read_public_sweeps()), end="")


if __name__ == "__main__":
    main()
