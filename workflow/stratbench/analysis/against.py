"""A study beside the paper: every published cell with ours, and whether its claims hold in our records.

Hardware differs, so absolute times do not compare; ratios between strategies and between GPU counts
do. Writes against_cells.csv and against_claims.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from stratbench.analysis import paper
from stratbench.analysis.audit import audit, read_audit
from stratbench.analysis.stats import mean_ratio, ratio_intervals
from stratbench.analysis.summary import GROUP, findings_by_group, read_cells

#: Column of cells.csv, and factor to the published unit, of each published measure.
COLUMNS_OF = {
    "training_time_s": ("train_time_s", 1.0),
    "accuracy_percent": ("accuracy_final", 100.0),
}
#: The strategy that others of its kind are divided by.
REFERENCES = {"fsdp": "ddp", "ps-async": "ps-sync", "ps-async-modified": "ps-sync"}
CELL_COLUMNS = (
    *("version", "table", "row", "strategy", "model", "dataset", "gpus", "measure"),
    *("published", "ours", "experiment", "kind"),
    *("against_strategy", "published_to_strategy", "our_to_strategy", "ratio_to_strategy"),
    *("against_gpus", "published_to_gpus", "our_to_gpus", "ratio_to_gpus"),
)
CLAIM_COLUMNS = (
    *("id", "version", "where", "claim", "metric", "model", "low", "high", "verdict", "figures"),
    *("elsewhere", "in_the_paper", "explanation", "rule"),
)
HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "cannot be said from these records"

Key = tuple[str, str, str, int]


@dataclass(frozen=True)
class Figure:
    """One value of a claim's metric: where from, and what it may be instead.

    `ends` says what `low` and `high` are: a 95 % `interval`, of all of a claim's together; the lowest
    and the highest of the repeats, a `range`; or what a time limit leaves open, a `bound`. Nothing
    else can be in place of an `exact` value.
    """

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    ends: Literal["interval", "range", "bound", "exact"] = "interval"
    #: What the intervals are made of: `value` is `scale` of the mean ratio of `pair`, shape
    #: [2, repeats]; `served` by parameter servers.
    pair: np.ndarray | None = None
    scale: Callable[[float], float] = float
    served: bool = False


class Groups:
    """Repeats by (experiment, strategy, model, gpus) that are ok, without what the audit rejects."""

    def __init__(self, cells: pd.DataFrame, findings: Sequence[dict[str, Any]] = ()) -> None:
        ok = cells[cells["status"] == "ok"]
        groups = dict(iter(ok.groupby(GROUP, sort=False)))
        #: What the audit calls unusable of each group: time, memory, accuracy or all.
        self.rejected = {
            key: {f["affects"] for f in found if f["severity"] == "unusable"}
            for key, found in findings_by_group(findings, groups)
        }
        self.groups: dict[Key, pd.DataFrame] = groups
        #: Time limits of groups that reached theirs: they took longer.
        self.limits: dict[Key, float] = {
            key: float(rows["time_limit_s"].min())
            for key, rows in cells[cells["status"] == "timeout"].groupby(GROUP, sort=False)
            if key not in groups and rows["time_limit_s"].notna().any()
        }

    def values(self, key: Key, column: str, concerns: str) -> pd.Series:
        """A column by repeat; empty where there is none or the audit rejects it."""
        if key not in self.groups or self.rejected[key] & {concerns, "all"}:
            return pd.Series(dtype=float)
        rows = self.groups[key]
        values = pd.Series(rows[column].to_numpy(dtype=float), index=rows["repeat"])
        return values.dropna()

    def pair(self, one: Key, other: Key, column: str, concerns: str) -> np.ndarray | None:
        """Values [2, repeats] of two groups for the repeats that both have."""
        columns = [self.values(key, column, concerns) for key in (one, other)]
        found = pd.concat(columns, axis=1, join="inner").to_numpy().T
        return found if found.size else None

    def timed(self) -> list[Key]:
        """All groups with a result or a limit that they reached."""
        return [*self.groups, *self.limits]

    def least_s(self, key: Key, beside: Key) -> float | None:
        """The training time that a group at its limit took at least, going by another's start-up."""
        if key not in self.limits or beside not in self.groups:
            return None
        rest = self.groups[beside][["setup_s", "data_s", "warmup_s", "eval_s"]].median().sum()
        return self.limits[key] - float(rest)


# ---------------------------------------------------------------- claims


def compared(
    groups: Groups,
    one: Key,
    other: Key,
    column: str,
    concerns: str,
    label: str,
    scale: Callable[[float], float] = float,
) -> Figure | None:
    """scale(one / other) over the repeats of both; a bound where one was stopped at its time limit."""
    pair = groups.pair(one, other, column, concerns)
    if pair is not None:
        served = any(
            (groups.groups[key]["strategy_kind"] == "server").any() for key in (one, other)
        )
        value = scale(mean_ratio(pair[0], pair[1]))
        return Figure(label, value, pair=pair, scale=scale, served=served)
    if column != "train_time_s":
        return None
    for stopped, ended, upward in ((one, other, True), (other, one, False)):
        least_s, values = groups.least_s(stopped, ended), groups.values(ended, column, concerns)
        if least_s is None or least_s <= 0 or values.empty:
            continue
        ratio = least_s / float(values.median())
        ends = (ratio, np.inf) if upward else (0.0, 1 / ratio)
        low, high = sorted(scale(end) for end in ends)
        return Figure(label, scale(ratio if upward else 1 / ratio), low, high, "bound")
    return None


def ratios(
    one: str, other: str, column: str, concerns: str, scale: Callable[[float], float] = float
) -> Callable[[Groups], Iterator[Figure]]:
    """The metric `one` / `other` on the same experiment, model and GPUs; `any` is every strategy.

    Of memory on several GPUs: on one there is nothing to shard.
    """

    def figures(groups: Groups) -> Iterator[Figure]:
        for key in groups.timed():
            experiment, strategy, model, gpus = key
            if strategy == other or (strategy != one and one != "any"):
                continue
            if concerns == "memory" and gpus == 1:
                continue
            name = f"{strategy}, {model} on {gpus}" if one == "any" else f"{model} on {gpus}"
            reference = (experiment, other, model, gpus)
            figure = compared(groups, key, reference, column, concerns, name, scale)
            if figure is not None:
                yield figure

    return figures


def with_intervals(figures: Sequence[Figure]) -> list[Figure]:
    """The figures of a claim, those of ratios with their intervals.

    A claim fails where one of its figures does, so that the allowed rate is shared by all of them, and
    their variances are pooled.
    """
    paired = [figure for figure in figures if figure.pair is not None]
    if not paired:
        return list(figures)
    most = max(figure.pair.shape[1] for figure in paired)
    values = np.full((2, len(paired), most), np.nan)
    for i, figure in enumerate(paired):
        values[:, i, : figure.pair.shape[1]] = figure.pair
    served = np.array([figure.served for figure in paired])
    intervals = ratio_intervals(values[0], values[1], served, together=len(paired))
    if intervals is None:
        return list(figures)
    ends = {
        id(figure): sorted(figure.scale(float(end)) for end in interval)
        for figure, interval in zip(paired, intervals, strict=True)
        if figure.pair.shape[1] > 1
    }
    return [
        replace(figure, low=ends[id(figure)][0], high=ends[id(figure)][1])
        if id(figure) in ends
        else figure
        for figure in figures
    ]


def points(one: str, other: str) -> Callable[[Groups], Iterator[Figure]]:
    """Accuracy of `one` minus that of `other`, in points, on the same model and GPUs.

    Its ends are the lowest and the highest repeat's difference: a range.
    """

    def figures(groups: Groups) -> Iterator[Figure]:
        for experiment, strategy, model, gpus in groups.groups:
            for other_experiment in dict.fromkeys(key[0] for key in groups.groups):
                keys = ((experiment, one, model, gpus), (other_experiment, other, model, gpus))
                if strategy != one or not same_data(groups, *keys):
                    continue
                pair = groups.pair(*keys, "accuracy_final", "accuracy")
                if pair is not None:
                    lost = 100 * (pair[0] - pair[1])
                    ends = (float(lost.min()), float(lost.max())) if lost.size > 1 else (None, None)
                    yield Figure(f"{model} on {gpus}", float(np.median(lost)), *ends, "range")

    return figures


def recovered(groups: Groups) -> Iterator[Figure]:
    """Of the accuracy that ps-async loses against ps-sync, the share that modified async regains.

    The median of the repeats that all three have, with their range; where nothing is lost there is
    nothing to recover.
    """
    for key in groups.groups:
        _, strategy, model, gpus = key
        if strategy != "ps-async-modified":
            continue
        found = []
        for name in ("ps-sync", "ps-async"):
            for other_experiment in dict.fromkeys(k[0] for k in groups.groups):
                other = (other_experiment, name, model, gpus)
                if same_data(groups, key, other):
                    found.append(groups.values(other, "accuracy_final", "accuracy"))
                    break
        found.append(groups.values(key, "accuracy_final", "accuracy"))
        if len(found) < 3:
            continue
        sync, lossy, mine = pd.concat(found, axis=1, join="inner").to_numpy().T
        shares = (mine - lossy)[sync > lossy] / (sync - lossy)[sync > lossy]
        if shares.size:
            ends = (float(shares.min()), float(shares.max())) if shares.size > 1 else (None, None)
            yield Figure(f"{model} on {gpus}", float(np.median(shares)), *ends, "range")


def same_data(groups: Groups, one: Key, other: Key) -> bool:
    """Whether both exist and trained as long, on the same data with the same batch."""
    if one not in groups.groups or other not in groups.groups:
        return False
    columns = ["dataset", "global_batch", "epochs", "precision"]
    first, second = (groups.groups[key].iloc[0][columns].fillna("") for key in (one, other))
    return bool((first == second).all())


def efficiency(groups: Groups) -> Iterator[Figure]:
    """Speedup over one worker of the same strategy, divided by N."""
    for key in groups.timed():
        experiment, strategy, model, gpus = key
        if gpus == 1:
            continue
        alone, name = (experiment, strategy, model, 1), f"{strategy}, {model} on {gpus}"
        figure = compared(
            groups, alone, key, "train_time_s", "time", name, lambda ratio, n=gpus: ratio / n
        )
        if figure is not None:
            yield figure


def from_two_to_four(groups: Groups) -> Iterator[Figure]:
    """Time on 2 over time on 4 GPUs of modified async."""
    for key in groups.timed():
        experiment, strategy, model, gpus = key
        if strategy == "ps-async-modified" and gpus == 2:
            four = (experiment, strategy, model, 4)
            figure = compared(groups, key, four, "train_time_s", "time", model)
            if figure is not None:
                yield figure


def parameters(scale: float) -> Callable[[Groups], Iterator[Figure]]:
    """Parameters of VGG16 as built, times `scale`."""

    def figures(groups: Groups) -> Iterator[Figure]:
        for (_, _, model, _), rows in groups.groups.items():
            counts = rows["model_parameters"].dropna()
            if model == "vgg16" and len(counts):
                yield Figure("vgg16", float(counts.iloc[0]) * scale, ends="exact")
                return

    return figures


METRICS: dict[str, Callable[[Groups], Iterator[Figure]]] = {
    "memory of ddp / memory of fsdp": ratios("ddp", "fsdp", "peak_memory_bytes", "memory"),
    "training time of fsdp / of ddp": ratios("fsdp", "ddp", "train_time_s", "time"),
    "time saved by ps-async against ps-sync (%)": ratios(
        "ps-async", "ps-sync", "train_time_s", "time", lambda ratio: 100 * (1 - ratio)
    ),
    "accuracy of ps-sync - of ps-async (points)": points("ps-sync", "ps-async"),
    "share of the lost accuracy that ps-async-modified recovers": recovered,
    "speedup at N workers / N": efficiency,
    "time at 2 GPUs / time at 4 GPUs": from_two_to_four,
    "training time of any strategy / of ddp": ratios("any", "ddp", "train_time_s", "time"),
    "parameters of vgg16 in fp32 (MB)": parameters(4e-6),
    "parameters of vgg16 / 4 (millions)": parameters(1e-6 / 4),
}


def verdict(figures: Sequence[Figure], low: float, high: float) -> str:
    """Whether every figure lies in [low, high]; one with an interval is out only if all of it is."""
    low, high = (-np.inf if pd.isna(low) else low), (np.inf if pd.isna(high) else high)
    if not figures:
        return UNKNOWN
    # No more digits than the claims are printed with: 1.999 is no counterexample to 2, nor 30.4 to 30.
    slack = 0.5 if low == high else 0.005
    ends = [(f.value, f.value) if f.low is None else (f.low, f.high) for f in figures]
    if any(end < low - slack or start > high + slack for start, end in ends):
        return FAILS
    inside = all(start >= low - slack and end <= high + slack for start, end in ends)
    return HOLDS if inside else UNKNOWN


def told(figures: Sequence[Figure]) -> str:
    """The range of the figures and where its ends are."""
    if not figures:
        return ""
    least, most = (pick(figures, key=lambda f: f.value) for pick in (min, max))
    if len(figures) == 1:
        return f"{interval(least)} ({least.label})"
    return (
        f"{interval(least)} ({least.label}) to {interval(most)} ({most.label}), "
        f"{len(figures)} figures"
    )


def once(figures: Sequence[Figure]) -> str:
    """Says so where figures come from one repeat."""
    single = sum(f.low is None and f.ends != "exact" for f in figures)
    which = "" if len(figures) == 1 else "all " if single == len(figures) else f"{single} "
    return f"; {which}from one repeat, so that it may be chance" if single else ""


def interval(figure: Figure) -> str:
    """`1.23 [1.10, 1.31]` for an interval, `1.23 (1.10 to 1.31)` for a range, or `at least 1.23`."""
    match figure.ends:
        case "bound":
            return f"{'at most' if np.isfinite(figure.high) else 'at least'} {figure.value:.2f}"
        case "range":
            spread = "" if figure.low is None else f" ({figure.low:.2f} to {figure.high:.2f})"
        case "interval" | "exact":
            spread = "" if figure.low is None else f" [{figure.low:.2f}, {figure.high:.2f}]"
    return f"{figure.value:.2f}{spread}"


def about(claim: dict[str, Any], figure: Figure) -> bool:
    """Whether the claim is on the figure's model; most are on every model."""
    return pd.isna(claim["model"]) or claim["model"] in figure.label


def corresponds(cells: pd.DataFrame) -> pd.Series:
    """Which rows stand for a cell of the paper: its strategy, data set, model and count, on GPUs.

    Not `single`, no variant under another name or with other options, and nothing slowed on purpose.
    """
    place = ["strategy", "model", "dataset", "gpus"]
    published = set(paper.published_tables()[place].itertuples(index=False, name=None))
    there = [row in published for row in cells[place].itertuples(index=False, name=None)]
    plain = (cells["strategy"] == cells["strategy_base"]) & cells["slowdown"].isna()
    return pd.Series(there, index=cells.index) & plain & (cells["device_kind"] == "cuda")


@cache
def published(version: str) -> tuple[Groups, Groups]:
    """The paper's own cells, as printed and without the times that the audit calls copies."""
    cells = paper.as_cells(version)
    copied = [f for f in audit(cells) if f["rule"] == "same-value-twice"]
    return Groups(cells), Groups(cells, [dict.fromkeys(GROUP) | finding for finding in copied])


def rests_on(metric: Callable[[Groups], Iterator[Figure]], claim: dict[str, Any]) -> str:
    """In words, which of the paper's own figures behind a claim are copied, or bounds at a limit."""
    printed, believed = (
        {f.label: f for f in metric(groups) if about(claim, f)}
        for groups in published(claim["version"])
    )
    parts = []
    if lost := [label for label in printed if label not in believed]:
        parts.append(f"{', '.join(lost)}: from a time that stands for two cells")
    if bounds := [label for label, figure in printed.items() if figure.ends == "bound"]:
        parts.append(f"{', '.join(bounds)}: from a time above its limit, so a bound")
    return "; ".join(parts)


def claims(cells: pd.DataFrame, findings: pd.DataFrame) -> pd.DataFrame:
    """Every claim of the text with its verdict; only the paper's models on GPUs are evidence.

    `elsewhere` has the figures of other models and of CPU processes, which prove nothing;
    `in_the_paper` the verdict of the paper's own tables, defects included.
    """
    is_counterpart = corresponds(cells)
    listed = findings.to_dict("records")
    ours, others = Groups(cells[is_counterpart], listed), Groups(cells[~is_counterpart], listed)
    # Without the audit: here the question is what the paper prints, whether or not to believe it.
    own = {version: published(version)[0] for version in ("v1", "v2")}
    notes = paper.explanations().set_index("about")
    rows = []
    for claim in paper.published_claims().to_dict("records"):
        metric = METRICS[claim["metric"]]
        found, elsewhere, theirs = (
            with_intervals([figure for figure in metric(groups) if about(claim, figure)])
            for groups in (ours, others, own[claim["version"]])
        )
        limits = (claim["low"], claim["high"])
        agrees = verdict(found, *limits)
        note = notes.loc[claim["id"]] if agrees == FAILS and claim["id"] in notes.index else None
        in_the_paper = f"{verdict(theirs, *limits)}: {told(theirs)}" if theirs else ""
        if rest := rests_on(metric, claim) if theirs else "":
            in_the_paper += f" ({rest})"
        if verdict(theirs, *limits) == HOLDS and claim["id"] in notes.index:
            in_the_paper += f". But: {notes.loc[claim['id'], 'explanation']}"
        rows.append(
            claim
            | {
                "verdict": agrees,
                "figures": told(found) + once(found),
                "elsewhere": told(elsewhere),
            }
            | {"in_the_paper": in_the_paper}
            | ({} if note is None else {"explanation": note["explanation"], "rule": note["rule"]})
        )
    return pd.DataFrame(rows, columns=list(CLAIM_COLUMNS))


# ---------------------------------------------------------------- cells


def published_cells(cells: pd.DataFrame, findings: pd.DataFrame) -> pd.DataFrame:
    """Every published cell with ours (NaN where we have none), and how their ratios compare.

    A ratio of ratios is ours over the published one: 1 where both say the same. For accuracies the
    differences in points stand in place of ratios (`kind` is `difference`).
    """
    groups = Groups(cells[corresponds(cells)], findings.to_dict("records"))
    ours: dict[tuple[Any, ...], tuple[float, str]] = {}
    for key, rows in groups.groups.items():
        experiment, strategy, model, gpus = key
        for measure, (column, scale) in COLUMNS_OF.items():
            values = groups.values(key, column, "time" if scale == 1.0 else "accuracy")
            if len(values):
                place = (measure, rows["dataset"].iloc[0], model, strategy, gpus)
                ours.setdefault(place, (scale * float(values.median()), experiment))
    tables = paper.published_tables()
    theirs = {
        (r.version, r.table, r.measure, r.dataset, r.model, r.strategy, r.gpus): r.value
        for r in tables.itertuples()
    }
    return pd.DataFrame(
        [beside(row, theirs, ours) for row in tables.itertuples()], columns=list(CELL_COLUMNS)
    )


def beside(
    row: Any, theirs: dict[Any, float], ours: dict[Any, tuple[float, str]]
) -> dict[str, Any]:
    """One published cell, ours, and both against the reference strategy and the fewest GPUs."""
    place = (row.measure, row.dataset, row.model)
    counts = [
        key[-1] for key in theirs if key[:-1] == (row.version, row.table, *place, row.strategy)
    ]
    mine, experiment = ours.get((*place, row.strategy, row.gpus), (np.nan, ""))
    kind = "difference" if row.measure == "accuracy_percent" else "ratio"
    found = {name: getattr(row, name) for name in CELL_COLUMNS[:8]}
    found |= {"published": row.value, "ours": mine, "experiment": experiment, "kind": kind}
    fewest = next((n for n in sorted(counts) if n < row.gpus and known(theirs, row, n)), None)
    for name, against in (
        ("strategy", (REFERENCES.get(row.strategy), row.gpus)),
        ("gpus", (row.strategy, fewest)),
    ):
        if None in against:
            continue
        reference = theirs.get((row.version, row.table, *place, *against), np.nan)
        my_reference = ours.get((*place, *against), (np.nan, ""))[0]
        pair = [relative(kind, row.value, reference), relative(kind, mine, my_reference)]
        found[f"against_{name}"] = against[0] if name == "strategy" else against[1]
        found |= {f"published_to_{name}": pair[0], f"our_to_{name}": pair[1]}
        found[f"ratio_to_{name}"] = relative(kind, pair[1], pair[0])
    return found


def known(theirs: dict[Any, float], row: Any, gpus: int) -> bool:
    """Whether the same row of the table has a number at `gpus`."""
    key = (row.version, row.table, row.measure, row.dataset, row.model, row.strategy, gpus)
    return not np.isnan(theirs.get(key, np.nan))


def relative(kind: str, one: float, other: float) -> float:
    """one / other, or one - other for a difference."""
    return one - other if kind == "difference" else one / other


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="stratbench.analysis.against", description=__doc__)
    parser.add_argument("--cells", type=Path, required=True, help="cells.csv")
    parser.add_argument("--audit", type=Path, required=True, help="audit.csv")
    parser.add_argument("--cells-out", type=Path, required=True, help="published cells (CSV)")
    parser.add_argument("--claims-out", type=Path, required=True, help="claims (CSV)")
    args = parser.parse_args(argv)
    cells, findings = read_cells(args.cells), read_audit(args.audit)
    beside_ours, judged = published_cells(cells, findings), claims(cells, findings)
    beside_ours.to_csv(args.cells_out, index=False)
    judged.to_csv(args.claims_out, index=False)
    counts = ", ".join(f"{n} {name}" for name, n in judged["verdict"].value_counts().items())
    print(
        f"{beside_ours['ours'].notna().sum()} of {len(beside_ours)} published cells have a counterpart"
    )
    print(f"claims: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
