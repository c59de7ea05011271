"""The figures of one measure: times and memory as rows, speed-ups and scores as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from stratbench.analysis.figures.curves import Curve, Curves, bars_show, draw_curves
from stratbench.analysis.figures.figure_data import FigureData
from stratbench.analysis.figures.rows import (
    FigureRow,
    Point,
    Rows,
    draw_rows,
    has_points,
    shows_intervals,
)
from stratbench.analysis.records.measures import DOUBT, Measure, format_number
from stratbench.cell.text.words import GIB, plural, worker_noun

#: Worker counts above this are drawn on logarithmic axes.
LINEAR_UP_TO = 8
#: From so many seconds on times are drawn in hours.
HOURS_FROM_S = 7200
#: A card of more than so many times the highest peak is told in words, and not drawn.
FARTHEST_CARD = 4
#: The most epochs at which the spread of repeats is drawn.
MAX_SPREAD = 20


@dataclass(frozen=True)
class Drawn:
    """A figure and what its reader must know of it, made of what is drawn."""

    figure: Figure
    caption: str


# ---------------------------------------------------------------- rows


def rows_figure(data: FigureData, measure: Measure) -> Drawn:
    """A row for each strategy with its value on each number of workers; times on a logarithmic scale."""
    rows = data.rows(measure.name)
    if measure.name == "utilisation":  # nearly the same on any count
        rows = rows[rows["gpus"] == data.shown_count]
    unit, factor = unit_of(measure, rows["value"])
    of_time = measure.name == "training_time"
    reference = chosen_value(data, rows)
    several = rows["gpus"].nunique() > 1
    points = {
        str(name): list(points_of(data, str(name), found, factor, several))
        for name, found in rows.groupby("strategy", sort=False)
    }
    if measure.name == "memory" and not data.on_cpu:
        points = {name: with_states(data, name, p, factor) for name, p in points.items()}
    lines = [
        FigureRow(
            name,
            points[name],
            words_of(found, several),
            told_of(data, measure, found, unit, factor, reference if of_time else None),
            chosen=data.is_chosen(name),
        )
        for name, found in rows.groupby("strategy", sort=False)
    ]
    lines.sort(key=lambda row: rank_of(row, measure))
    card = card_of(data, measure, points, factor)
    band = None
    if of_time and reference:
        ends = reference / (1 + data.margin), reference * (1 + data.margin)
        band = ends[0] * factor, ends[1] * factor
    shown = Rows(
        lines,
        data.marks,
        log=of_time,
        unit=unit,
        band=band,
        limit=(card, "the card") if card else None,
        head=("best" if of_time else f"on {data.shown_count}") if several else "",
    )
    return Drawn(draw_rows(shown), " ".join(rows_caption(data, measure, rows, shown)))


def unit_of(measure: Measure, values: pd.Series) -> tuple[str, float]:
    """The unit of an axis and the factor to it from the summary's."""
    if measure.unit == "s" and values.min() >= HOURS_FROM_S:
        return "h", 1 / 3600
    return measure.unit, 1.0


def chosen_value(data: FigureData, rows: pd.DataFrame) -> float | None:
    """The value of the chosen strategy on the chosen number of workers, in the summary's unit."""
    if data.choice is None:
        return None
    found = rows[(rows["strategy"] == data.choice[0]) & (rows["gpus"] == data.choice[1])]["value"]
    return float(found.iloc[0]) if len(found) and found.notna().all() else None


def points_of(
    data: FigureData, strategy: str, rows: pd.DataFrame, factor: float, several: bool
) -> Iterator[Point]:
    """The points of a strategy, in the order of worker counts."""
    known = rows[rows["value"].notna()].sort_values("gpus")
    for gpus, *values in known[["gpus", "value", "low", "high"]].to_numpy(dtype=float):
        value, low, high = (None if v != v else float(v) * factor for v in values)
        chosen = data.choice == (strategy, gpus)
        yield Point(value or 0.0, low, high, f"{gpus:.0f}" if several else "", chosen)


def with_states(
    data: FigureData, strategy: str, points: Sequence[Point], factor: float
) -> list[Point]:
    """The points of a peak on GPUs, each with the part that model states take."""
    states = data.rows("model_states")
    states = states[(states["strategy"] == strategy) & states["value"].notna()]
    by_count = dict(zip(states["gpus"].astype(str), states["value"] * factor, strict=True))
    only = next(iter(by_count.values()), None)
    return [
        Point(p.value, p.low, p.high, p.number, p.chosen, by_count.get(p.number, only))
        for p in points
    ]


def outcome_of(text: str) -> str:
    """Why a summary row has no value, in a few words."""
    return text[5:-1] if text.startswith("n/a (") else text.partition(" (")[0]


def words_of(rows: pd.DataFrame, several: bool) -> str:
    """How the cells of a strategy ended that have no value: `OOM on 2, 4`."""
    outcomes: dict[str, list[str]] = {}
    lost = rows[rows["value"].isna() | (rows["ok"] < rows["cells"])].sort_values("gpus")
    for row in lost.to_dict("records") if len(lost) else ():
        if row["value"] != row["value"]:
            outcome = outcome_of(row["text"])
        else:
            outcome = (
                f"{row['cells'] - row['ok']} of {row['cells']} {row['outcome'].split(' × ')[-1]}"
            )
        outcomes.setdefault(outcome, []).append(str(row["gpus"]))
    if not several:
        return "; ".join(outcomes)
    return "; ".join(f"{what} on {', '.join(counts)}" for what, counts in outcomes.items())


def notes_of(rows: pd.DataFrame) -> Iterator[str]:
    """A line for each strategy of which some repeats have no value, on one number of workers."""
    for name, found in rows.groupby("strategy", sort=False):
        if words := words_of(found, False):
            yield f"{name}: {words}"


def told_of(
    data: FigureData,
    measure: Measure,
    rows: pd.DataFrame,
    unit: str,
    factor: float,
    reference: float | None,
) -> str:
    """A strategy's value in words: the chosen one's with its unit, others' as multiples of `reference`.

    Without a reference it is the value on the count that the figure shows.
    """
    known = rows[rows["value"].notna()]
    if reference is None:
        on_shown = known[known["gpus"] == data.shown_count]
        best = on_shown if measure.name != "training_time" else known
    else:
        chosen = data.choice is not None and data.is_chosen(str(rows["strategy"].iloc[0]))
        best = known[known["gpus"] == data.choice[1]] if chosen and data.choice else known
    if best.empty:
        return ""
    row = best.loc[best["value"].idxmin() if measure.better != "higher" else best["value"].idxmax()]
    mark = DOUBT if row["flags"] else ""
    if reference is None or data.is_chosen(str(row["strategy"])):
        return f"{format_number(row['value'] * factor, None)} {unit}{mark}".replace(" %", "%")
    return f"{row['value'] / reference:.2f}×{mark}"


def rank_of(row: FigureRow, measure: Measure) -> tuple[bool, float]:
    """Where a row stands: the best first, those without a value last."""
    sign = -1 if measure.better == "higher" else 1
    return not row.points, min((sign * p.value for p in row.points), default=0.0)


def card_of(
    data: FigureData, measure: Measure, points: dict[str, list[Point]], factor: float
) -> float | None:
    """The card's memory in the axis' unit, if peaks come near enough to it to be drawn beside it."""
    cards = data.cells["device_memory_bytes"].dropna()
    if measure.name != "memory" or data.on_cpu or cards.empty:
        return None
    card = float(cards.min()) * measure.scale * factor
    highest = max((p.value for of in points.values() for p in of), default=0.0)
    return card if card <= FARTHEST_CARD * highest else None


def rows_caption(
    data: FigureData, measure: Measure, rows: pd.DataFrame, shown: Rows
) -> Iterator[str]:
    """What the figure of rows shows."""
    noun = plural(worker_noun(data.cells["device_kind"]))
    if not has_points(shown):
        yield f"No strategy has a value; the figure shows how its cells ended, by number of {noun}."
        return
    if measure.name == "memory":
        worker = "The worker with the highest peak"
        yield f"{worker}, above the base of its process." if data.on_cpu else f"{worker}."
    if rows["gpus"].nunique() > 1:
        yield f"The number in a marker is the number of {noun}."
    elif len(rows):
        yield f"On {data.workers(int(rows['gpus'].iloc[0]))}."
    if measure.name == "training_time":
        yield "Logarithmic."
        if (rows["cells"] > 1).any():
            yield "Markers are medians of the repeats; the answer compares geometric means."
    if shown.band and data.choice:
        yield f"The shaded band is within {100 * data.margin:g} % of {data.choice[0]} × {data.choice[1]}."
    if any(p.part is not None for row in shown.rows for p in row.points):
        yield "Strokes show the part of the memory that model states take."
    cards = data.cells["device_memory_bytes"].dropna()
    if measure.name == "memory" and not data.on_cpu and len(cards):
        yield f"The GPU has {cards.min() / GIB:.0f} GiB of memory."
    if shows_intervals(shown):
        yield from spread_words(rows, "Lines")
    yield from data.doubt_note(rows.loc[rows["value"].notna(), "flags"])


def spread_words(rows: pd.DataFrame, drawn: str) -> Iterator[str]:
    """What is `drawn` through points: `Lines`, or `Bars` where strategies are lines."""
    kinds = {
        "interval": "95 % intervals",
        "range": "from the lowest to the highest repeat",
        "quartiles": "from the first to the third quartile of the repeats",
    }
    for kind in dict.fromkeys(rows.loc[rows["low"].notna(), "spread"]):
        yield f"{drawn}: {kinds.get(kind, kind)}."


# ---------------------------------------------------------------- lines


def scaling_figure(data: FigureData, measure: Measure) -> Drawn:
    """Lines over the number of workers; a speed-up has the ideal line, as far as the data go."""
    rows = data.rows(measure.name)
    is_ratio = measure.baseline is not None
    curves, notes = [], []
    for name, found in rows.groupby("strategy", sort=False):
        if is_ratio and set(found["gpus"]) == {1}:
            continue
        found = found.sort_values("gpus")
        if without := words_of(found, True):
            notes.append(f"{name}: {without}")
        if found["value"].notna().any():
            curves.append(
                Curve(
                    str(name),
                    found["gpus"].tolist(),
                    found["value"].tolist(),
                    found["low"].tolist(),
                    found["high"].tolist(),
                    data.is_chosen(str(name)),
                    DOUBT if (found["flags"] != "").any() else "",
                )
            )
    log = data.counts[-1] > LINEAR_UP_TO
    shown = Curves(
        curves,
        data.marks,
        plural(worker_noun(data.cells["device_kind"])),
        x_ticks=data.counts,
        x_log=log,
        y_log=log,
        ideal=is_ratio,
        notes=notes,
    )
    drawn = rows[rows["strategy"].isin([c.strategy for c in curves])]
    caption = [*scaling_caption(measure, drawn, shown), *data.doubt_note(drawn["flags"])]
    return Drawn(draw_curves(shown), " ".join(caption))


def scaling_caption(measure: Measure, drawn: pd.DataFrame, shown: Curves) -> Iterator[str]:
    """What the figure of lines over worker counts shows; `drawn`: the summary rows behind the lines."""
    if measure.baseline:
        against = (
            "the same strategy on one worker" if measure.baseline == "self" else measure.baseline
        )
        yield f"Training throughput divided by the throughput of {against}."
        best = max(shown.curves, key=lambda c: max(v for v in c.y if v == v), default=None)
        if best is not None:
            value, count = max((b, a) for a, b in zip(best.x, best.y, strict=True) if b == b)
            yield f"The maximum is {value:.2f}, by {best.strategy} × {count}."
    if bars_show(shown):
        yield from spread_words(drawn, "Bars")


def score_figure(data: FigureData, measure: Measure, count: int) -> Drawn:
    """The score of each strategy after each epoch, on one number of workers."""
    score = data.score
    epochs = data.epochs[data.epochs["gpus"] == count]
    rows = data.rows(measure.name)
    rows = rows[rows["gpus"] == count]
    flags = dict(zip(rows["strategy"], rows["flags"], strict=True))
    curves, repeats = [], 0
    for name, found in epochs.groupby("strategy", sort=False):
        by_epoch = (found["score"] * score.factor).groupby(found["epoch"])
        median, chosen = by_epoch.median(), data.is_chosen(str(name))
        spread = chosen and by_epoch.size().max() > 1 and len(median) <= MAX_SPREAD
        repeats = int(by_epoch.size().max()) if spread else repeats
        curves.append(
            Curve(
                str(name),
                [float(e) for e in median.index],
                median.tolist(),
                by_epoch.min().tolist() if spread else (),
                by_epoch.max().tolist() if spread else (),
                chosen,
                DOUBT if flags.get(name) else "",
            )
        )
    sentences = [f"Score on the whole test set after each epoch, in {score.shown_unit}."]
    if repeats and data.choice:
        sentences.append(
            f"Lines are medians of the repeats; bars are the range of {data.choice[0]}'s repeats."
        )
    sentences += data.doubt_note(flags.values())
    return score_curves(data, curves, count, sentences, x_name="epoch", x_whole=True)


def score_curves(
    data: FigureData,
    curves: Sequence[Curve],
    count: int,
    sentences: Sequence[str],
    **axis: Any,
) -> Drawn:
    """A figure of scores on `count` workers, with the least possible one; `axis`: the horizontal one."""
    least, rows = data.score.least_possible, data.rows("score")
    shown = Curves(
        curves,
        data.marks,
        from_zero=False,
        level=None if least is None else (least, f"least possible: {least:.3g}"),
        notes=list(notes_of(rows[rows["gpus"] == count])),
        **axis,
    )
    return Drawn(draw_curves(shown), " ".join(sentences))
