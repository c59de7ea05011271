"""Holds projections to published measurements: step times on a few counts, projected to larger ones.

    PYTHONPATH=workflow python benchmarks/prediction/projection.py FILE.csv [--fit 2] [--out FOLDER]

FILE.csv has a row for each series and count of GPUs: `gpus` and `throughput` (or `step_time_s`), and as far
as known `series`, `source`, `scaling` (weak or strong; where it is not stated, constant batches tell it),
`nodes`, `per_gpu_batch`, `global_batch`, `strategy`, `trust` (C is left out), `throughput_unit` (of all GPUs
together, if it does not say per GPU or per worker; steps or iterations are whole batches; what counts for a
node is left out). Where a series' step times contradict its throughput, the step times count. Where a count
of a series has several placements, the one on the fewest nodes counts.
The smallest counts of each series are fitted (`--fit` says how many), and every count that is exactly 2, 4 or
8 times the largest fitted one is projected. No collective is measured in such a file, so that the rule is
a + b/N (`extensions/projection/project.py`). Numbers beyond 1e-30 and 1e30, and counts above a million,
are taken for mistakes.

Prints, by source and by factor: median, 90th percentile and signed error, how often the interval of 80 %
holds the measured time, the median errors of the other naive rules, and how many cells were refused.
"""

from __future__ import annotations

import argparse
import lzma
import os
import sys
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

WORKFLOW = Path(__file__).parents[2] / "workflow"
sys.path.insert(0, str(WORKFLOW))

from stratbench.extensions.projection.naive import MeasuredStep, Scaling  # noqa: E402
from stratbench.extensions.projection.project import project_step_times  # noqa: E402

FACTORS = (2, 4, 8)
#: A source discriminates where a + b/N is off by more than this at x2 (or, without such cells, at all).
EASY_PERCENT = 2.0
NUMBERS = (
    "gpus", "nodes", "throughput", "step_time_s", "per_gpu_batch", "global_batch",
)  # fmt: skip
TEXTS = ("source", "series", "scaling", "trust", "strategy", "throughput_unit")
#: Units of throughput, in small letters with blanks for _ and -: for one GPU, for one node, and batches.
PER_GPU = (
    r"(?:/|\bper|[*·])\s*"
    r"(?:gpu|device|accelerator|chip|card|worker|rank|gcd|tpu|npu|xpu|hpu|process|replica)(?:s|es)?\b"
)
PER_NODE = r"(?:/|\bper|[*·])\s*(?:node|host|machine|server|instance)s?\b"
BATCHES = (
    r"^(?:(?:global|optimi[sz]er|train|training)\s*)*"
    r"(?:steps?|iterations?|iters?|its?|(?:mini\s*)?batch(?:es)?)\b"
)
#: A throughput in seconds is none.
SECONDS = r"^(?:[mµu]?s|(?:milli|micro)?sec(?:ond)?s?)\b"
#: Throughput and step times of a series contradict each other where their ratio changes by more than this.
CONTRADICTS = 1.2
#: What is beyond these is a mistake.
MAX_GPUS, MINIMUM, MAXIMUM = 10**6, 1e-30, 1e30
NOT_UTF_8 = "must be UTF-8 (save it again with this encoding)"
#: What makes a series where the file does not name them.
SERIES = ("source", "cluster", "gpu", "model", "strategy", "scaling", "precision")


def read(path: Path) -> tuple[pd.DataFrame, dict[str, int]]:
    """The usable rows, with every column there, and how many rows were left out for what.

    `time`: of a step up to a constant of its series. Raises ValueError for a file without what is needed.
    """
    rows = _text(path)
    rows.columns = [str(c).strip().lower() for c in rows.columns]
    if any("\0" in c for c in rows.columns):
        raise ValueError(NOT_UTF_8)
    if "gpus" not in rows or not {"throughput", "step_time_s"} & set(rows.columns):
        raise ValueError(
            f"needs the columns gpus, and throughput or step_time_s; it has {', '.join(rows.columns)}"
        )
    if twice := sorted(set(rows.columns[rows.columns.duplicated()])):
        raise ValueError(f"has the column {', '.join(twice)} twice")
    if rows.empty:
        raise ValueError("has no rows")
    left_out: dict[str, int] = {}

    def keep(good: pd.Series, reason: str) -> None:
        nonlocal rows
        if n := int((~good).sum()):
            left_out[reason] = n
        rows = rows[good]

    for column in NUMBERS:
        text = rows[column] if column in rows else pd.Series(np.nan, rows.index, dtype=object)
        in_thousands = text.str.fullmatch(r"\s*\d{1,3}(,\d{3})+(\.\d*)?\s*", na=False)
        text = text.where(~in_thousands, text.str.replace(",", ""))
        rows[column] = pd.to_numeric(text, errors="coerce")
        rows.loc[~rows[column].between(MINIMUM, MAXIMUM), column] = np.nan
    named = _named(rows)
    rows["series"] = rows["series"].fillna(named) if "series" in rows else named
    for column in TEXTS:
        rows[column] = rows[column].fillna("").str.strip() if column in rows else ""
    rows["source"] = rows.source.where(rows.source != "", "not stated")
    keep((rows.gpus % 1 == 0) & (rows.gpus <= MAX_GPUS), "no count of GPUs")
    rows.loc[_units(rows).str.contains(SECONDS), "throughput"] = np.nan
    # How many GPUs share a node's rate is not known for sure; nor is whose steps are counted per GPU.
    for patterns, reason in (
        ([PER_NODE], "throughput of a node, not of a GPU or of all"),
        ([PER_GPU, BATCHES], "steps per GPU, an unclear unit"),
    ):
        unclear = np.logical_and.reduce([_units(rows).str.contains(p) for p in patterns])
        rows.loc[unclear, "throughput"] = np.nan
        keep(~unclear | rows.step_time_s.notna(), reason)
    keep(rows.throughput.notna() | rows.step_time_s.notna(), "neither throughput nor step time")
    keep(rows.trust.str.upper() != "C", "trust C")
    fewest = rows.groupby(["source", "series", "gpus"]).nodes
    keep(
        (fewest.transform("nunique") < 2) | (rows.nodes == fewest.transform("min")),
        "another placement of a count (that on the fewest nodes is kept)",
    )
    # From here on a series is judged as a whole.
    of = rows.groupby(["source", "series"])
    rows["scaling"] = _word(rows.scaling).where(rows.scaling != "", _by_batches(of))
    keep(
        rows.scaling.isin(["weak", "strong"]),
        "neither weak nor strong scaling (state it, or constant batches that tell it)",
    )
    of = rows.groupby(["source", "series"])
    alike = (of.scaling.transform("nunique") == 1) & (of.throughput_unit.transform("nunique") == 1)
    keep(alike, "of a series that changes its scaling or its unit")
    rows = rows.assign(**_times(rows))
    keep(rows.time.notna(), "of a series that states throughput and step times by turns")
    return rows, left_out


def _text(path: Path) -> pd.DataFrame:
    """The file as text. Raises ValueError for what is no table, with what to do."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            # No column is an index: a comma at the end of each row would shift all columns.
            return pd.read_csv(path, dtype=str, encoding="utf-8-sig", index_col=False)
    except pd.errors.ParserWarning:
        raise ValueError("has rows with more fields than the first line names") from None
    except UnicodeError:
        raise ValueError(NOT_UTF_8) from None
    except ImportError as error:  # zstandard
        raise ValueError(f"cannot be unpacked here: {error} Or unpack it first.") from None
    except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise ValueError(f"is compressed, and cut off or damaged: {error}") from None


def _named(rows: pd.DataFrame) -> pd.Series:
    """A name of the series of each row, where the file has none: what is the same, with the batch that is."""
    keys = [c for c in SERIES if c in rows]
    named = pd.Series("all", rows.index)
    if keys:
        named = rows[keys].fillna("").agg("|".join, axis=1)
    batches = {
        "weak": rows.per_gpu_batch.fillna(rows.global_batch / rows.gpus),
        "strong": rows.global_batch.fillna(rows.per_gpu_batch * rows.gpus),
    }
    values = {kind: batch.groupby(named).transform("nunique") for kind, batch in batches.items()}
    # Where the scaling is not stated, the batch that has fewer values is the one that is kept.
    fewer = values["strong"] < values["weak"]
    strong = fewer.where(values["strong"] != values["weak"], False)
    if "scaling" in rows:
        stated = _word(rows.scaling.fillna("").str.strip())
        strong = (stated == "strong") | (strong & (stated != "weak"))
    kept = batches["weak"].where(~strong, batches["strong"])
    several = kept.groupby(named).transform("nunique") > 1
    of = strong.map({True: "|global batch ", False: "|batch per GPU "})
    return named + (of + kept.map("{:g}".format)).where(several, "")


def _units(rows: pd.DataFrame) -> pd.Series:
    """The units of throughput as the patterns have them."""
    return rows.throughput_unit.str.lower().str.replace(r"[_-]", " ", regex=True)


def _word(scaling: pd.Series) -> pd.Series:
    """weak or strong out of `Weak scaling` and the like; else the text."""
    return scaling.str.lower().str.replace(r"[\s_-]*scaling$", "", regex=True)


def _by_batches(of: Any) -> pd.Series:
    """The scaling that constant batches of a series tell; empty where they tell none."""
    fixed = {
        name: (of[column].transform("nunique") == 1)
        & (of[column].transform("count") == of[column].transform("size"))
        for name, column in (("strong", "global_batch"), ("weak", "per_gpu_batch"))
    }
    only = fixed["strong"] != fixed["weak"]
    return fixed["strong"].map({True: "strong", False: "weak"}).where(only, "")


def _times(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """`time`: by throughput where all rows of a series have one, else by step times where all do, else none.

    1/throughput in strong scaling, GPUs/throughput in weak: the batch is a constant. `contradicts`: the step
    times say something else, and are taken instead, as far as they are there.
    """
    units = _units(rows)
    rate = rows.throughput.where(~units.str.contains(PER_GPU), rows.throughput * rows.gpus)
    samples = rows.gpus.where((rows.scaling == "weak") & ~units.str.contains(BATCHES), 1.0)
    keys = [rows.source, rows.series]
    by_throughput = rows.throughput.notna().groupby(keys).transform("all")
    by_step = rows.step_time_s.notna().groupby(keys).transform("all")
    ratio = (samples / rate / rows.step_time_s).groupby(keys)
    contradicts = ratio.transform("max") > CONTRADICTS * ratio.transform("min")
    time = (samples / rate).where(
        by_throughput & ~contradicts, rows.step_time_s.where(by_step | contradicts)
    )
    return {"time": time, "contradicts": contradicts}


def series_of(rows: pd.DataFrame) -> Iterator[tuple[str, str, Scaling, bool, list[MeasuredStep]]]:
    """Source, name, scaling, whether it has servers, and the counts in ascending order, of each series."""
    for (source, name), group in rows.groupby(["source", "series"], sort=True):
        scaling = group.scaling.iloc[0]
        served = str(group.strategy.iloc[0]).lower().startswith("ps")
        # A count that is there twice (another placement, a repeat) counts with its median.
        group = group.groupby("gpus", as_index=False).agg({"time": "median", "nodes": "max"})
        points = [
            MeasuredStep(int(r.gpus), float(r.time), None if pd.isna(r.nodes) else int(r.nodes))
            for r in group.itertuples()
        ]
        yield source, name, scaling, served, points


def cells_of(rows: pd.DataFrame, fit: int) -> pd.DataFrame:
    """A row for each projected count: errors in percent of the measured time, ours and the naive rules'.

    Errors of refused cells are missing.
    """
    found: list[dict[str, Any]] = []
    for source, name, scaling, served, points in series_of(rows):
        fitted = points[:fit]
        targets = [p for p in points[fit:] if p.workers / fitted[-1].workers in FACTORS]
        places = [(t.workers, t.nodes) for t in targets]
        made = project_step_times(fitted, scaling, places, has_servers=served) if targets else []
        for target, p in zip(targets, made, strict=True):
            i, t = p.interval, target.step_s
            seconds = {"error": i.middle_s, "low": i.low_s, "high": i.high_s} if i else {}
            found.append(
                {
                    "source": source,
                    "series": name,
                    "scaling": scaling,
                    "fitted": " ".join(str(p.workers) for p in fitted),
                    "gpus": target.workers,
                    "factor": target.workers // fitted[-1].workers,
                    "better_naive": None
                    if p.skill.matches_best_naive_rule
                    else p.skill.best_naive_rule,
                    "refused": bool(p.refusal_reason),
                    "nodes_unknown": any(p.nodes is None for p in (*fitted, target)),
                }
                | {
                    f"{key}_percent": 100 * (seconds[key] / t - 1) if i else np.nan
                    for key in ("error", "low", "high")
                }
                | {
                    rule: 100 * (s / t - 1) if i else np.nan
                    for rule, s in p.step_s_by_naive_rule.items()
                }
            )
    return pd.DataFrame(found)


def without_skill(cells: pd.DataFrame) -> str:
    """How the naive rule that did better on the fitted counts does further on, beside a + b/N."""
    some = cells[cells.better_naive.notna() & ~cells.refused]
    if some.empty:
        return ""
    naive_errors = [abs(row[row.better_naive]) for _, row in some.iterrows()]
    figures = summary(some)
    return (
        f"On {len(some)} cells another naive rule did better on the fitted counts. There its median error "
        f"is {np.median(naive_errors):.1f} %, that of a + b/N {figures['median_percent']:.1f} %, with "
        f"{figures['coverage_percent']:.0f} % in its interval"
    )


def summary(cells: pd.DataFrame) -> dict[str, Any]:
    """The figures of some cells."""
    answered = cells[~cells.refused]
    errors = answered.error_percent.abs()
    inside = (answered.low_percent <= 0) & (answered.high_percent >= 0)
    return {
        "cells": len(answered),
        "median_percent": errors.median(),
        "p90_percent": errors.quantile(0.9),
        "signed_percent": answered.error_percent.median(),
        "coverage_percent": 100 * inside.mean(),
        "perfect_median_percent": answered["perfect"].abs().median(),
        "same_loss_median_percent": answered["same loss per doubling"].abs().median(),
        "refused": len(cells) - len(answered),
    }


def discriminating(cells: pd.DataFrame) -> list[str]:
    """The sources that tell rules apart."""
    found = []
    for source, group in cells.groupby("source"):
        at_two = group[group.factor == 2]
        of = at_two if len(at_two) else group
        if of.error_percent.abs().median() > EASY_PERCENT:
            found.append(source)
    return found


def tables(cells: pd.DataFrame) -> pd.DataFrame:
    """A row for each source and factor, then the pooled ones."""
    hard = cells.source.isin(discriminating(cells))
    pools = {
        "all sources": cells,
        "all sources, weak": cells[cells.scaling == "weak"],
        "all sources, strong": cells[cells.scaling == "strong"],
        "discriminating sources": cells[hard],
        "discriminating, weak": cells[hard & (cells.scaling == "weak")],
        "discriminating, strong": cells[hard & (cells.scaling == "strong")],
    }
    # A source may have the name of a pool.
    named = [(f"source {n}" if n in pools else n, group) for n, group in cells.groupby("source")]
    groups = [*named, *pools.items()]
    return pd.DataFrame(
        [
            {"source": name, "factor": f"x{factor}"} | summary(part)
            for name, group in groups
            for factor, part in group.groupby("factor")
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--fit", type=int, default=2, help="smallest counts that are fitted (2)")
    parser.add_argument("--out", type=Path, help="folder for projection.csv and the cells")
    args = parser.parse_args(argv)
    if args.fit < 2:
        parser.error(f"--fit {args.fit}: expected 2 or more")
    try:
        rows, left_out = read(args.file)
    except (OSError, ValueError) as error:
        print(f"error: {args.file}: {error}", file=sys.stderr)
        return 1
    for reason, n in left_out.items():
        print(f"left out: {n} rows, {reason}")
    if n := rows[rows.contradicts].groupby(["source", "series"]).ngroups:
        print(f"step times taken: {n} series, whose throughput contradicts them")
    cells = cells_of(rows, args.fit)
    if cells.empty:
        print(
            f"error: {args.file}: no series has {args.fit} counts and one 2, 4 or 8 times the last; it has "
            f"{rows.groupby(['source', 'series']).ngroups} series in {len(rows)} usable rows",
            file=sys.stderr,
        )
        return 1
    made = tables(cells)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        made.round(3).to_csv(args.out / "projection.csv", index=False)
    with pd.option_context(
        "display.width", 250, "display.max_rows", None, "display.max_columns", None
    ):
        print(made.round(2).to_string(index=False))
    print(f"Discriminating (a + b/N off by more than {EASY_PERCENT:g} % at x2): "
          f"{', '.join(discriminating(cells)) or 'none'}")  # fmt: skip
    if told := without_skill(cells):
        print(told)
    if n := int((cells.nodes_unknown & ~cells.refused).sum()):
        print(f"node boundary unknown: {n} cells, answered all the same")
    return 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
