"""Checks whether a user's command trained the same as the cells it is compared with.

The command reports its values itself. The cell is ranked with others if samples, batch, parameters and score
agree. Otherwise its status becomes `incomparable`, with the reason, and no table or decision ranks it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stratbench.analysis.records.columns import Row
from stratbench.analysis.records.reading import Reading
from stratbench.cell.coordinates import INCOMPARABLE
from stratbench.cell.text.words import format_count

if TYPE_CHECKING:
    import pandas as pd

#: Value of the column `same_work` if the command did the same work as the compared cells.
YES = "yes"
#: Compared counts: column of a command's cell, column of another cell, and name in messages.
_COUNTS = (
    ("samples_seen", "samples_seen", "samples"),
    ("command_batch", "global_batch", "samples per step"),
    ("model_parameters", "model_parameters", "parameters"),
)


def set_same_work_column(rows: Sequence[Row]) -> None:
    """Set `same_work`: whether a user's command did the same work as the compared cells.

    A cell that did other work gets the status `incomparable`.
    """
    by_model: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["status"] == "ok":
            by_model[row["experiment"], row["model"]].append(row)
    verdicts = [
        (row, next(iter_work_differences(row, select_compared_rows(row, candidates)), None))
        for candidates in by_model.values()
        for row in candidates
        if row["strategy_kind"] == "own"
    ]
    for row, reason in verdicts:
        row["same_work"] = f"no: {reason}" if reason else YES
        if reason:
            row["status"], row["reason"] = INCOMPARABLE, f"other work: {reason}"


def select_compared_rows(row: Row, candidates: Sequence[Row]) -> list[Row]:
    """Return the rows of the cells with which a command's cell is compared.

    Cells of stratbench's loop with DDP's arithmetic have precedence, then its other cells, then cells of
    other commands. Among these, cells with the same number of workers have precedence.
    """
    others = [r for r in candidates if r["strategy"] != row["strategy"]]
    ours = [r for r in others if r["strategy_kind"] != "own"]
    for chosen in ([r for r in ours if r["equals_ddp"]], ours, others):
        if chosen:
            return [r for r in chosen if r["gpus"] == row["gpus"]] or chosen
    return []


def iter_work_differences(row: Row, compared_rows: Sequence[Row]) -> Iterator[str]:
    """Yield a text for each difference between a command's training and that of compared cells."""
    if row["command_workers"] != row["gpus"]:
        yield f"it reports {row['command_workers']} processes, but the cell has {row['gpus']}"
    if not compared_rows:
        yield "there is nothing to compare it with"
        return
    for own, theirs, what in _COUNTS:
        expected = {r[own if r["strategy_kind"] == "own" else theirs] for r in compared_rows} - {
            None
        }
        if row[own] is None:
            yield f"it does not report its number of {what}"
        elif expected and row[own] not in expected:
            others = " or ".join(f"{value:,}" for value in sorted(expected))
            yield f"it has {row[own]:,} {what}, but compared cells have {others}"
    yield from iter_score_difference(row, compared_rows)


def iter_score_difference(row: Row, compared_rows: Sequence[Row]) -> Iterator[str]:
    """Yield a text if a command's score differs too much from compared cells' scores.

    A difference is too large if it exceeds the score's tolerance plus the sampling error.
    """
    known = [r for r in compared_rows if r["score_final"] is not None]
    if not known:
        return
    if row["score_final"] is None:
        yield f"it reports no {row['score_name']}"
        return
    factor = 100.0 if row["score_unit"] == "share" else 1.0
    scores = [r["score_final"] for r in known]
    chance = max(
        1.96 * math.hypot(compute_standard_error(row), compute_standard_error(r)) for r in known
    )
    slack = (row["score_tolerance"] or 0.0) / factor + chance
    if not min(scores) - slack <= row["score_final"] <= max(scores) + slack:
        beside = (
            f"{min(scores):.4g} to {max(scores):.4g}" if len(scores) > 1 else f"{scores[0]:.4g}"
        )
        yield f"its {row['score_name']} is {row['score_final']:.4g}, but that of compared cells is {beside}"


def compute_standard_error(row: Row) -> float:
    """Return the standard error of a cell's score.

    Without a recorded standard error, that of a share follows from the number of test samples. For other
    scores it is 0.
    """
    if row["score_error"] is not None:
        return row["score_error"]
    if row["score_unit"] != "share" or not row["test_samples"]:
        return 0.0
    return math.sqrt(max(0.0, row["score_final"] * (1 - row["score_final"])) / row["test_samples"])


def iter_command_notices(cells: pd.DataFrame, findings: Sequence[Row]) -> Iterator[str]:
    """Yield the report's notices on cells that users' commands trained.

    They say that commands measure themselves, and how many of the cells are ranked.
    """
    rows = cells[cells["same_work"].notna()]
    if not len(rows):
        return
    names = ", ".join(dict.fromkeys(rows["strategy"]))
    same = (rows["same_work"] == YES).sum()
    yield (
        f"{names}: trained by users' commands, which report their times and scores themselves. The audit "
        f"checks these against external measurements. {same} of {format_count(len(rows), 'cell')} trained "
        "the same as the cells beside them; the rest is not ranked."
    )
    for reason, other in rows[rows["same_work"] != YES].groupby("same_work", sort=False):
        where = ", ".join(dict.fromkeys(f"{r.strategy} on {r.gpus}" for r in other.itertuples()))
        yield f"Not ranked, because of other work: {where}: {str(reason).removeprefix('no: ')}."


READING = Reading(list_notices=iter_command_notices)
