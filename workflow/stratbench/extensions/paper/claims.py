"""Judges whether the paper's claims hold in our records and in the paper's own tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from stratbench.analysis.records.groups import Repeats
from stratbench.extensions.paper import published
from stratbench.extensions.paper.metrics import METRICS, ClaimValue
from stratbench.statistics.intervals import IntervalEstimate, compute_paired_ratios

CLAIM_COLUMNS = (
    *("id", "version", "where", "claim", "metric", "model", "low", "high", "holds", "figures"),
    *("elsewhere", "in_the_paper", "explanation", "rule"),
)
HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "cannot be said from these records"


def add_intervals_to_ratios(values: Sequence[ClaimValue]) -> list[ClaimValue]:
    """Return the values of a claim, with confidence intervals for those that are ratios.

    A claim fails if one of its values fails. So all intervals hold together with 95 % confidence. The
    variances of the ratios are pooled.
    """
    paired = [value for value in values if value.paired_values is not None]
    ratios = iter(
        compute_paired_ratios(
            [value.paired_values for value in paired],
            [value.uses_servers for value in paired],
            len(paired),
        )
    )
    return [
        value if value.paired_values is None else value.copy_with_interval(next(ratios))
        for value in values
    ]


def judge_claim_values(values: Sequence[ClaimValue], claimed_min: float, claimed_max: float) -> str:
    """Return whether a claim holds: HOLDS, FAILS or UNKNOWN.

    A claim holds if the intervals of all its values are within its limits. It fails if an interval is
    completely outside. Otherwise the result is UNKNOWN.

    Args:
        values: Values of the claim's metric, with their intervals.
        claimed_min: Lowest value that the claim allows; NaN without a limit.
        claimed_max: Highest value that the claim allows; NaN without a limit.
    """
    claimed_min = -np.inf if pd.isna(claimed_min) else claimed_min
    claimed_max = np.inf if pd.isna(claimed_max) else claimed_max
    if not values:
        return UNKNOWN
    # The claims in the text are rounded: 1.999 does not contradict "at least 2", nor 30.4 "30".
    rounding = 0.5 if claimed_min == claimed_max else 0.005
    ends = [
        (v.value, v.value) if v.range_low is None else (v.range_low, v.range_high) for v in values
    ]
    if any(end < claimed_min - rounding or start > claimed_max + rounding for start, end in ends):
        return FAILS
    is_inside = all(
        start >= claimed_min - rounding and end <= claimed_max + rounding for start, end in ends
    )
    return HOLDS if is_inside else UNKNOWN


def describe_claim_values(values: Sequence[ClaimValue]) -> str:
    """Return the lowest and the highest value of a claim as text, with their cells."""
    if not values:
        return ""
    least, most = (pick(values, key=lambda v: v.value) for pick in (min, max))
    lowest, highest = (f"{describe_claim_value(v)} ({v.cells_label})" for v in (least, most))
    return lowest if len(values) == 1 else f"{lowest} to {highest}, {len(values)} values"


def describe_values_from_one_repeat(values: Sequence[ClaimValue]) -> str:
    """Return a remark if values come from a single repeat, else an empty text."""
    single = sum(value.range_low is None and value.range_kind != "exact" for value in values)
    which = "" if len(values) == 1 else "all " if single == len(values) else f"{single} "
    return f"; {which}from one repeat, so that it may be chance" if single else ""


def describe_claim_value(value: ClaimValue) -> str:
    """Return a value as text, with its interval, range or bound.

    The forms are `1.23 [1.10, 1.31]` for an interval, `1.23 (1.10 to 1.31)` for a range, and `at least 1.23`
    for a bound.
    """
    match value.range_kind:
        case "bound":
            return f"{'at most' if np.isfinite(value.range_high) else 'at least'} {value.value:.2f}"
        case "range" if value.range_low is not None:
            return f"{value.value:.2f} ({value.range_low:.2f} to {value.range_high:.2f})"
    return IntervalEstimate(
        value.value, value.range_low, value.range_high
    ).format_value_and_interval("{:.2f}".format)


def is_value_of_claimed_model(claim: dict[str, Any], value: ClaimValue) -> bool:
    """Return whether a value is of the model that the claim names. Most claims are about every model."""
    return pd.isna(claim["model"]) or claim["model"] in value.cells_label


def judge_claims(cells: pd.DataFrame, findings: pd.DataFrame) -> pd.DataFrame:
    """Return a row per claim of the paper. It says whether the claim holds in our cells.

    Only cells that the paper also has decide. The column `elsewhere` has the values of other models and of
    CPU processes. The column `in_the_paper` says whether the paper's own tables agree with the claim, and
    which of their values are weak evidence: it is in claims.csv, because it depends on no record of ours.

    Args:
        cells: Rows of cells.csv.
        findings: Rows of audit.csv.
    """
    is_ours = published.mask_cells_in_paper(cells)
    listed = findings.to_dict("records")
    ours, others = Repeats(cells[is_ours], listed), Repeats(cells[~is_ours], listed)
    notes = published.read_explanations().set_index("about").to_dict("index")
    rows = []
    for claim in published.read_published_claims().to_dict("records"):
        metric = METRICS[claim["metric"]]
        on_gpus, elsewhere = (
            add_intervals_to_ratios(
                [value for value in metric(groups) if is_value_of_claimed_model(claim, value)]
            )
            for groups in (ours, others)
        )
        agrees = judge_claim_values(on_gpus, claim["low"], claim["high"])
        note, in_the_paper = notes.get(claim["id"]), claim["in_the_paper"]
        if in_the_paper.startswith(HOLDS) and note:
            in_the_paper += f". But: {note['explanation']}"
        texts = {
            "holds": agrees,
            "figures": describe_claim_values(on_gpus) + describe_values_from_one_repeat(on_gpus),
            "elsewhere": describe_claim_values(elsewhere),
            "in_the_paper": in_the_paper,
        }
        rows.append(claim | texts | (note if note and agrees == FAILS else {}))
    return pd.DataFrame(rows, columns=list(CLAIM_COLUMNS))
