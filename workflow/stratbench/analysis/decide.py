"""Which strategy to choose for each model: ranked from the records under a person's constraints.

Writes decision.csv, the matrix of all strategies and worker counts with a verdict and a reason each,
and prints the decisions. Where there is no usable record the rules of `theory` answer, and say so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis import theory
from stratbench.analysis.audit import read_audit
from stratbench.analysis.candidates import Candidate, candidates
from stratbench.analysis.constraints import Constraints
from stratbench.analysis.measures import MIB, number
from stratbench.analysis.stats import ratio_intervals, ratio_of_medians
from stratbench.analysis.summary import read_cells
from stratbench.analysis.tables import counted, worker_noun

MATRIX = (
    *("experiment", "dataset", "model", "strategy", "gpus", "verdict", "rank", "why", "basis"),
    *("repeats", "time_s", "cost", "memory_mib", "accuracy_percent"),
    *("ratio_to_first", "low95", "high95", "doubts"),
)


@dataclass(frozen=True)
class Comparison:
    """How much more of the objective `slower` takes than `faster`; the interval needs repeats."""

    ratio: float
    low: float | None
    high: float | None
    repeats: int

    @property
    def tells_apart(self) -> bool | None:
        """Whether the interval excludes 1; None without an interval."""
        return None if self.low is None or self.high is None else not self.low <= 1 <= self.high


@dataclass(frozen=True)
class Decision:
    """The answer for one model in one experiment (`experiment` is empty for theory alone)."""

    experiment: str
    dataset: str
    model: str
    #: `records` or `theory`.
    source: str
    choice: Candidate | None
    headline: str
    reason: str
    #: `high`, `medium`, `low` or `none`, and why.
    confidence: str
    confidence_why: str
    changes: tuple[str, ...]
    #: (strategy, why), the strategies no count of which can be chosen.
    excluded: tuple[tuple[str, str], ...]
    matrix: tuple[dict[str, Any], ...]


def compare(slower: Candidate, faster: Candidate) -> Comparison:
    """The ratio of their objectives, with a bootstrap interval paired by repeat."""
    pairs = pd.concat([slower.times, faster.times], axis=1, join="inner").to_numpy().T
    weight = 1.0 if slower.price_per_gpu_hour is None else slower.gpus / faster.gpus
    if not pairs.size or slower.basis != "measured" or faster.basis != "measured":
        return Comparison(slower.objective / faster.objective, None, None, 0)
    ratio = weight * float(ratio_of_medians(pairs[0], pairs[1]))
    interval = ratio_intervals(weight * pairs[:1], pairs[1:])
    low, high = (None, None) if interval is None else (float(end) for end in interval[0])
    return Comparison(ratio, low, high, pairs.shape[1])


def decisions(
    cells: pd.DataFrame, findings: pd.DataFrame, constraints: Constraints
) -> list[Decision]:
    """One for each experiment and model, in the order of the config."""
    if constraints.model is not None:
        cells = cells[cells["model"] == constraints.model]
        if cells.empty:
            return [from_theory("", "", constraints.model, constraints, [])]
    listed = findings.to_dict("records")
    return [
        decide(rows, listed, constraints)
        for _, rows in cells.groupby(["experiment", "model"], sort=False)
    ]


def decide(rows: pd.DataFrame, findings: list[dict[str, Any]], given: Constraints) -> Decision:
    """The decision on one experiment and model (rows of cells.csv)."""
    experiment, dataset, model = (str(rows.iloc[0][n]) for n in ("experiment", "dataset", "model"))
    found = candidates(rows, findings, given)
    if all(c.kind in ("not measured", "failed") for c in found):
        return from_theory(experiment, dataset, model, given, found)
    ranked = sorted((c for c in found if not c.kind), key=lambda c: c.order)
    matrix = matrix_rows((experiment, dataset, model), found, ranked)
    out = tuple(excluded(found, {c.strategy for c in ranked}))
    common = {"experiment": experiment, "dataset": dataset, "model": model, "source": "records"}
    if not ranked:
        return Decision(
            **common,
            choice=None,
            headline="No strategy can be recommended from these records.",
            reason=f"All {len({c.strategy for c in found})} are excluded; see why below.",
            confidence="none",
            confidence_why="Nothing is left to rank.",
            changes=tuple(lifted(found, None)),
            excluded=out,
            matrix=matrix,
        )
    first, noun = ranked[0], worker_noun(rows)
    rivals = rivals_of(ranked)
    compared = [compare(rival, first) for rival in rivals]
    first.tied = [
        r.strategy
        for r, c in zip(rivals, compared, strict=True)
        if c.tells_apart is False or c.ratio == 1
    ]
    headline = f"{first.strategy} on {counted(first.gpus, noun)}"
    if first.tied:
        headline = f"No clear winner: {headline}, or {' or '.join(first.tied)}"
    level, why = confidence(rows, first, rivals[:1], compared, given)
    return Decision(
        **common,
        choice=first,
        headline=headline + ".",
        reason=reason(first, rivals, compared, noun),
        confidence=level,
        confidence_why=why,
        changes=tuple(changes(found, ranked, compared[0] if compared else None, given)),
        excluded=out,
        matrix=matrix,
    )


def rivals_of(ranked: list[Candidate]) -> list[Candidate]:
    """The best candidate of each other strategy than the first's, in order."""
    best: dict[str, Candidate] = {}
    for candidate in ranked:
        best.setdefault(candidate.strategy, candidate)
    return list(best.values())[1:]


def reason(first: Candidate, rivals: list[Candidate], compared: list[Comparison], noun: str) -> str:
    """One sentence with the numbers that decided."""
    text = f"It trains in {amount(first)}"
    if rivals:
        second, found = rivals[0], compared[0]
        price = "the time" if first.price_per_gpu_hour is None else "the cost"
        interval = f" [{found.low:.2f}, {found.high:.2f}]" if found.low is not None else ""
        on = counted(second.gpus, noun)
        if found.ratio == 1:
            text += f", exactly as {second.strategy} on {on} does"
        else:
            text += (
                f"; the next, {second.strategy} on {on}, takes {number(found.ratio, 2)}{interval} "
                f"times {price} ({amount(second)})"
            )
    else:
        text += ", and no other strategy is left to compare with"
    if first.accuracy_percent is not None:
        text += f"; it reaches {first.accuracy_percent:.2f} % accuracy"
    if first.memory_bytes is not None:
        above = " above its base" if first.on_cpu else ""
        text += f" with a peak of {first.memory_bytes / MIB:.0f} MiB a worker{above}"
    return text + "."


def amount(candidate: Candidate) -> str:
    """Its training time, and its cost where there is a price."""
    seconds = f"{number(candidate.time_s or 0.0, None)} s"
    return seconds if candidate.cost is None else f"{seconds} at a cost of {candidate.cost:.3g}"


def confidence(
    rows: pd.DataFrame,
    first: Candidate,
    rivals: list[Candidate],
    compared: list[Comparison],
    given: Constraints,
) -> tuple[str, str]:
    """`high`, `medium` or `low`, and the sentences that say why."""
    told = [f"{first.basis[0].upper()}{first.basis[1:]}."]
    if given.gpus is not None and given.gpus not in set(rows["gpus"]) and first.gpus != given.gpus:
        told.append(f"Nothing is known of {given.gpus} workers: too few counts were measured.")
    level = 2 if first.basis == "measured" and len(first.times) > 1 else 0
    if len(first.times) == 1:
        told.append("One repeat: no interval exists, and small differences mean nothing.")
    found = compared[0] if compared else None
    if found is None:
        level = min(level, 1)
    elif found.low is None:
        level = 0
    else:
        side = "excludes" if found.tells_apart else "includes"
        told.append(
            f"Over {found.repeats} repeats the 95 % interval of the ratio to the next, "
            f"{found.low:.2f} to {found.high:.2f}, {side} 1."
        )
        level = min(level, 0 if not found.tells_apart else 1 if found.repeats < 3 else 2)
    if first.doubts:
        level = min(level, 1)
        told.append(f"Doubts: {', '.join(first.doubts)}.")
    for rival in rivals:
        others = [doubt for doubt in rival.doubts if doubt not in first.doubts]
        if others:
            level = min(level, 1)
            told.append(f"Doubts on {rival.strategy}: {', '.join(others)}.")
    if first.on_cpu:
        level = min(level, 1)
        told.append("It holds for CPU processes on this machine and says nothing of GPUs.")
    slowed = sorted(set(rows["slowdown"].dropna()))
    if slowed and given.homogeneous:
        level = min(level, 0)
        told.append(
            f"Workers were slowed on purpose ({'; '.join(slowed)}); yours are said to be equal."
        )
    if not slowed and not given.homogeneous:
        level = min(level, 0)
        told.append("Measured on equally fast workers; yours are said to differ.")
    return ("low", "medium", "high")[level], " ".join(told)


def changes(
    found: list[Candidate], ranked: list[Candidate], against: Comparison | None, given: Constraints
) -> Iterator[str]:
    """What would lead to another answer, from the nearest alternatives."""
    first = ranked[0]
    if against is not None and (against.low is None or not against.tells_apart):
        yield "More repeats: they would say whether this order holds."
    yield from lifted(found, first)
    smaller = [c for c in ranked if smaller_than(c, first)]
    if smaller and first.memory_bytes:
        yield (
            f"GPUs with less memory than {first.memory_bytes / MIB:.0f} MiB: then "
            f"{smaller[0].strategy} on {smaller[0].gpus} ({smaller[0].memory_bytes / MIB:.0f} MiB)."
        )
    if first.traits.waits_for_slowest and given.price_per_gpu_hour is None:
        yield from break_even(first, ranked)


def smaller_than(candidate: Candidate, first: Candidate) -> bool:
    """Whether it needs clearly less memory, of records that compare."""
    both = candidate.memory_bytes is not None and first.memory_bytes is not None
    return both and not first.on_cpu and candidate.memory_bytes < 0.95 * first.memory_bytes


def lifted(found: list[Candidate], first: Candidate | None) -> Iterator[str]:
    """For each constraint the best that it keeps out, where that is better than the first."""
    lift = {
        "does not fit": "More memory",
        "too slow": "A later deadline",
        "loses accuracy": "Less accuracy wanted",
        "needs all workers": "Workers that stay until the end",
        "needs more GPUs": "More GPUs",
    }
    for kind, words in lift.items():
        kept_out = [c for c in found if c.kind == kind and c.time_s is not None]
        best = min(kept_out, key=lambda c: c.order, default=None)
        if best and (first is None or best.objective < first.objective):
            yield f"{words}: then {best.strategy} on {best.gpus} ({amount(best)}; {best.why})."


def break_even(first: Candidate, ranked: list[Candidate]) -> Iterator[str]:
    """From how slow a worker on the next strategy that does not wait wins, by theory.

    With one of N workers f times slower a strategy that waits takes f times as long, one that does
    not N / (N - 1 + 1/f) times. Equal at f = (N r - 1) / (N - 1), r the ratio of their times.
    """
    n = first.gpus
    free = [c for c in ranked if not c.traits.waits_for_slowest and c.gpus == n]
    if n > 1 and free and first.time_s and free[0].time_s:
        factor = (n * free[0].time_s / first.time_s - 1) / (n - 1)
        if factor > 1:
            yield (
                f"Workers of unequal speed: with one of {n} more than {factor:.2f} times slower than "
                f"the rest, {free[0].strategy} would win (by theory: it does not wait)."
            )


def excluded(found: list[Candidate], usable: set[str]) -> Iterator[tuple[str, str]]:
    """Each strategy that no worker count of is left, with why at the largest count."""
    for name in dict.fromkeys(c.strategy for c in found):
        if name not in usable:
            line = sorted((c for c in found if c.strategy == name), key=lambda c: c.gpus)
            told: dict[str, list[str]] = {}
            for c in line:
                told.setdefault(f"{c.kind}: {c.why}", []).append(str(c.gpus))
            yield name, "; ".join(f"on {', '.join(on)} {why}" for why, on in told.items())


def matrix_rows(
    where: tuple[str, str, str], found: list[Candidate], ranked: list[Candidate]
) -> tuple[dict[str, Any], ...]:
    """A row of MATRIX for each candidate."""
    rows = []
    for c in found:
        rank = ranked.index(c) + 1 if c in ranked else None
        against = compare(c, ranked[0]) if rank else None
        tie = against is not None and (against.tells_apart is False or against.ratio == 1)
        verdict = "recommended" if rank == 1 else "tied" if tie else "possible" if rank else c.kind
        rows.append(
            dict(
                zip(
                    MATRIX,
                    (*where, c.strategy, c.gpus, verdict, rank, c.why, c.basis),
                    strict=False,
                )
            )
            | {
                "repeats": len(c.times),
                "time_s": c.time_s,
                "cost": c.cost,
                "memory_mib": c.memory_bytes and c.memory_bytes / MIB,
                "accuracy_percent": c.accuracy_percent,
                "ratio_to_first": against and against.ratio,
                "low95": against and against.low,
                "high95": against and against.high,
                "doubts": "; ".join(c.doubts),
            }
        )
    return tuple(rows)


def from_theory(
    experiment: str, dataset: str, model: str, given: Constraints, found: list[Candidate]
) -> Decision:
    """The decision where nothing was measured."""
    name, reasons = theory.choice(model, given)
    return Decision(
        experiment=experiment,
        dataset=dataset,
        model=model,
        source="theory",
        choice=None,
        headline=f"{name or 'No strategy'}, by theory: nothing was measured.",
        reason=" ".join(reasons),
        confidence="none",
        confidence_why="These are rules from theory; no record of this model is usable.",
        changes=("Records: train the study's cells of this model, and decide again.",),
        excluded=tuple(excluded(found, set())),
        matrix=matrix_rows((experiment, dataset, model), found, []),
    )


def across(findings: pd.DataFrame) -> list[str]:
    """What the audit says of the study as a whole that no decision can go beyond."""
    places = ["experiment", "strategy", "model", "gpus", "repeat"]
    whole = findings[findings[places].isna().all(axis=1) & (findings["severity"] == "unusable")]
    return [f"{row.explanation} ({row.figures})" for row in whole.itertuples()]


def as_text(found: Sequence[Decision], notes: Sequence[str], given: Constraints) -> str:
    """The decisions for a terminal."""
    lines = [f"Constraints: {'; '.join(given.sentences())}.", *notes, ""]
    for d in found:
        where = f"{d.model} ({d.experiment}, {d.dataset})" if d.experiment else d.model
        lines += [f"{where}: {d.headline}", f"  {d.reason}"]
        lines.append(f"  Confidence: {d.confidence}. {d.confidence_why}")
        lines += [f"  What would change it: {change}" for change in d.changes]
        lines += [f"  Excluded: {name}: {why}" for name, why in d.excluded]
        lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="stratbench.analysis.decide", description=__doc__)
    parser.add_argument("--cells", type=Path, required=True, help="cells.csv")
    parser.add_argument("--audit", type=Path, required=True, help="audit.csv")
    parser.add_argument("--constraints", default="{}", help="`decide` of config.yaml, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="the decision matrix (CSV)")
    args = parser.parse_args(argv)
    given = Constraints.from_json(args.constraints)
    findings = read_audit(args.audit)
    found = decisions(read_cells(args.cells), findings, given)
    rows = [row for decision in found for row in decision.matrix]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=list(MATRIX)).to_csv(args.out, index=False)
    print(as_text(found, across(findings), given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
