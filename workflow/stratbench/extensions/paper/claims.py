"""Judges the claims of the paper's text by our records and by the paper's own tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from stratbench.analysis.records.groups import GROUP, Repeats
from stratbench.extensions.audit.audit import audit_cells
from stratbench.extensions.paper import published
from stratbench.extensions.paper.metrics import METRICS, ClaimFigure
from stratbench.statistics.intervals import IntervalEstimate, compute_paired_ratios

CLAIM_COLUMNS = (
    *("id", "version", "where", "claim", "metric", "model", "low", "high", "holds", "figures"),
    *("elsewhere", "in_the_paper", "explanation", "rule"),
)
HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "cannot be said from these records"


def add_intervals(figures: Sequence[ClaimFigure]) -> list[ClaimFigure]:
    """Return the figures of a claim, and add confidence intervals to those that are ratios.

    A claim fails if one of its figures fails. So its intervals hold for all figures together, and the
    variances of the figures are pooled.
    """
    paired = [figure for figure in figures if figure.paired_values is not None]
    ratios = iter(
        compute_paired_ratios(
            [f.paired_values for f in paired], [f.has_servers for f in paired], len(paired)
        )
    )
    return [
        figure if figure.paired_values is None else figure.with_interval(next(ratios))
        for figure in figures
    ]


def judge_figures(figures: Sequence[ClaimFigure], low: float, high: float) -> str:
    """Return HOLDS, FAILS or UNKNOWN for a claim's intervals and limits.

    A claim holds if all intervals are in [low, high], and fails if one has no value in it.

    Args:
        figures: Figures of a claim, with their intervals.
        low: Lowest value that the claim allows; NaN for any.
        high: Highest value that the claim allows; NaN for any.
    """
    low, high = (-np.inf if pd.isna(low) else low), (np.inf if pd.isna(high) else high)
    if not figures:
        return UNKNOWN
    # Claims are printed with few digits, so 1.999 does not contradict 2, and 30.4 does not contradict 30.
    slack = 0.5 if low == high else 0.005
    ends = [(f.value, f.value) if f.low is None else (f.low, f.high) for f in figures]
    if any(end < low - slack or start > high + slack for start, end in ends):
        return FAILS
    inside = all(start >= low - slack and end <= high + slack for start, end in ends)
    return HOLDS if inside else UNKNOWN


def describe_figures(figures: Sequence[ClaimFigure]) -> str:
    """Return the range of the figures as text, and name the cells at both ends."""
    if not figures:
        return ""
    least, most = (pick(figures, key=lambda f: f.value) for pick in (min, max))
    if len(figures) == 1:
        return f"{describe_figure(least)} ({least.label})"
    return (
        f"{describe_figure(least)} ({least.label}) to {describe_figure(most)} ({most.label}), "
        f"{len(figures)} figures"
    )


def describe_single_repeats(figures: Sequence[ClaimFigure]) -> str:
    """Return a remark if figures come from one repeat, else an empty text."""
    single = sum(f.low is None and f.range_kind != "exact" for f in figures)
    which = "" if len(figures) == 1 else "all " if single == len(figures) else f"{single} "
    return f"; {which}from one repeat, so that it may be chance" if single else ""


def describe_figure(figure: ClaimFigure) -> str:
    """Return a figure as text, with its interval, range or bound.

    The forms are `1.23 [1.10, 1.31]` for an interval, `1.23 (1.10 to 1.31)` for a range, and `at least 1.23`
    for a bound.
    """
    match figure.range_kind:
        case "bound":
            return f"{'at most' if np.isfinite(figure.high) else 'at least'} {figure.value:.2f}"
        case "range" if figure.low is not None:
            return f"{figure.value:.2f} ({figure.low:.2f} to {figure.high:.2f})"
    return IntervalEstimate(figure.value, figure.low, figure.high).format_text("{:.2f}".format)


def concerns_model(claim: dict[str, Any], figure: ClaimFigure) -> bool:
    """Return whether the claim concerns the figure's model; most claims concern every model."""
    return pd.isna(claim["model"]) or claim["model"] in figure.label


@cache
def read_published_groups(version: str) -> tuple[Repeats, Repeats]:
    """Return the paper's cells twice: as printed, and without times that two cells share.

    The audit finds the shared times.
    """
    cells = published.make_cells_of_version(version)
    copied = [f for f in audit_cells(cells) if f["rule"] == "same-value-twice"]
    return Repeats(cells), Repeats(cells, [dict.fromkeys(GROUP) | finding for finding in copied])


def describe_weak_figures(
    metric: Callable[[Repeats], Iterator[ClaimFigure]], claim: dict[str, Any]
) -> str:
    """Return a text on the paper's values for a claim that are weak evidence.

    A weak value is from a time in two cells, or is a bound from a time limit.
    """
    printed, believed = (
        {f.label: f for f in metric(groups) if concerns_model(claim, f)}
        for groups in read_published_groups(claim["version"])
    )
    parts = []
    if lost := [label for label in printed if label not in believed]:
        parts.append(f"{', '.join(lost)}: from a time that is printed for two cells")
    if bounds := [label for label, figure in printed.items() if figure.range_kind == "bound"]:
        parts.append(f"{', '.join(bounds)}: from a time above its limit, so a bound")
    return "; ".join(parts)


def judge_claims(cells: pd.DataFrame, findings: pd.DataFrame) -> pd.DataFrame:
    """Return each claim of the paper, and whether the claim holds in measured cells.

    Our cells are those of the paper's models on GPUs. The column `elsewhere` has the values of other models
    and of CPU processes, which do not decide. `in_the_paper` tells whether the paper's own tables agree, and
    which of their values are doubtful.
    """
    is_ours = published.mask_counterparts(cells)
    listed = findings.to_dict("records")
    ours, others = Repeats(cells[is_ours], listed), Repeats(cells[~is_ours], listed)
    # The audit is not applied, because the question here is what the paper prints, right or wrong.
    own = {version: read_published_groups(version)[0] for version in ("v1", "v2")}
    notes = published.read_explanations().set_index("about").to_dict("index")
    rows = []
    for claim in published.read_published_claims().to_dict("records"):
        metric = METRICS[claim["metric"]]
        on_gpus, elsewhere, theirs = (
            add_intervals([figure for figure in metric(groups) if concerns_model(claim, figure)])
            for groups in (ours, others, own[claim["version"]])
        )
        limits = (claim["low"], claim["high"])
        agrees, theirs_agree = judge_figures(on_gpus, *limits), judge_figures(theirs, *limits)
        note = notes.get(claim["id"])
        in_the_paper = f"{theirs_agree}: {describe_figures(theirs)}" if theirs else ""
        if rest := describe_weak_figures(metric, claim) if theirs else "":
            in_the_paper += f" ({rest})"
        if theirs_agree == HOLDS and note:
            in_the_paper += f". But: {note['explanation']}"
        texts = {
            "holds": agrees,
            "figures": describe_figures(on_gpus) + describe_single_repeats(on_gpus),
            "elsewhere": describe_figures(elsewhere),
            "in_the_paper": in_the_paper,
        }
        rows.append(claim | texts | (note if note and agrees == FAILS else {}))
    return pd.DataFrame(rows, columns=list(CLAIM_COLUMNS))
