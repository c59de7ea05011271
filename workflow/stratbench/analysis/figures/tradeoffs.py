"""Figures that combine measures: time and score, the phases of a step, staleness of pushes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from stratbench.analysis.figures.curves import (
    TOP,
    Curve,
    Curves,
    frame,
    left_of,
)
from stratbench.analysis.figures.figure_data import FigureData
from stratbench.analysis.figures.measured import Drawn, by_end, named_curves, score_curves
from stratbench.analysis.figures.rows import ROW, name_column, put_name
from stratbench.analysis.figures.scales import Scale, padded
from stratbench.analysis.figures.sheet import (
    INK,
    LINE_HEIGHT,
    MUTED,
    PAPER,
    RULE,
    THEME,
    WIDTH,
    box,
    colour_of,
    new_sheet,
    put_mark,
    shortened,
    stroke,
    text_width,
    write,
)
from stratbench.analysis.records.measures import ALONE, DOUBT, format_number
from stratbench.cell.text.words import names_text

#: What is drawn of a step, in order of time: words, the colour, whether filled, and the phases in it.
PARTS = (
    ("forward", "work-1", True, ("forward",)),
    ("backward", "work-2", True, ("backward",)),
    ("communication", "send", True, ("communication", "exposed_communication", "push")),
    ("waiting", "wait", False, ("server_wait", "bubble")),
    ("slowed on purpose", "bad", True, ("slowdown",)),
)
#: What no other part has.
REST = ("rest", "muted", False)
#: The most points of a scatter chart that are named.
MAX_NAMED = 7
#: The height of the scatter chart's plot.
SCATTER = 210
#: How far above its point a name stands.
ABOVE = 13
#: The height of a name.
NAME = 12


def breakdown_figure(data: FigureData) -> Drawn:
    """A bar for each strategy: the mean step by its phases, on one number of workers."""
    known = data.cells[data.cells["breakdown_ms"].notna()]
    known = known[known["gpus"] == data.shown_count]
    phases = pd.DataFrame([json.loads(t) for t in known["breakdown_ms"]], index=known.index)
    steps = phases.groupby(known["strategy"]).median().fillna(0.0).clip(lower=0.0)
    parts = parts_of(steps)
    order = steps.sum(axis=1).sort_values().index
    drawn = [part for part in (*(p[:3] for p in PARTS), REST) if parts[part[0]].gt(0).any()]
    words = list(wrapped_words([part[0] for part in drawn]))
    top = LINE_HEIGHT * (1 + max((line for line, _, _ in words), default=0)) + 6
    axes = new_sheet(top + ROW * len(order) + 4)
    for (line, left, text), (_, colour, filled) in zip(words, drawn, strict=True):
        y = LINE_HEIGHT * (line + 0.5)
        part_box(axes, left, y - 5, 10, 10, colour, filled)
        write(axes, left + 14, y, text, MUTED)
    start = name_column((str(name), data.is_chosen(str(name))) for name in order)
    scale = padded(steps.sum(axis=1), start, WIDTH - 66, 0, False)
    for i, name in enumerate(order):
        middle, chosen = top + ROW * (i + 0.5), data.is_chosen(str(name))
        mark = data.marks[str(name)]
        put_name(axes, str(name), mark, chosen, middle, start)
        done = 0.0
        for part, colour, filled in drawn:
            width = float(parts.loc[name, part])
            left, right = scale.at(done), scale.at(done + width)
            part_box(axes, left, middle - 7, right - left, 14, colour, filled)
            done += width
        full = colour_of(mark, True) if chosen else MUTED
        text = f"{format_number(done, None)} ms"
        write(axes, scale.at(done) + 6, middle, text, full, bold=chosen)
    return Drawn(axes.figure, " ".join(breakdown_caption(data, parts)))


def parts_of(steps: pd.DataFrame) -> pd.DataFrame:
    """The milliseconds of each part of PARTS and of the rest, by strategy."""
    named = {
        part: steps[[phase for phase in phases if phase in steps]].sum(axis=1)
        for part, _, _, phases in PARTS
    }
    parts = pd.DataFrame(named, index=steps.index)
    return parts.assign(rest=steps.sum(axis=1) - parts.sum(axis=1)).clip(lower=0.0)


def wrapped_words(words: list[str]) -> Iterator[tuple[int, float, str]]:
    """The line and the place of each word of the key above the bars."""
    line, left = 0, 0.0
    for word in words:
        wide = 14 + text_width(word)
        if left + wide > WIDTH:
            line, left = line + 1, 0.0
        yield line, left, word
        left += wide + 10


def part_box(
    axes: Axes, left: float, top: float, width: float, height: float, name: str, filled: bool
) -> None:
    """Draw a part of a step: filled, or as an outline."""
    colour = THEME[name][0]
    if filled or width < 3:
        box(axes, left, top, max(0.0, width - 0.75), height, colour, zorder=3)
        return
    inner = {"edgecolor": colour, "linewidth": 1.1, "zorder": 3}
    box(axes, left + 0.75, top + 0.75, width - 2.25, height - 1.5, PAPER, **inner)


def breakdown_caption(data: FigureData, parts: pd.DataFrame) -> Iterator[str]:
    """What the bars are, and whose communication they cannot show."""
    yield f"Mean step of all workers on {data.workers(data.shown_count)}."
    hidden = [str(name) for name in parts.index if parts.loc[name, "communication"] == 0]
    if data.shown_count > 1 and hidden:
        sent = names_text(hidden, 3)
        yield f"What {sent} send{'s' if len(hidden) == 1 else ''} is part of forward and backward."


def score_over_time_figure(data: FigureData) -> Drawn:
    """The score after each epoch over the training time so far, on one number of workers."""
    epochs, score, count = data.epochs, data.score, data.shown_count
    rows = epochs[epochs["gpus"] == count]
    alone = epochs[(epochs["strategy"] == ALONE) & (epochs["gpus"] != count)]
    curves = []
    for name, found in pd.concat([rows, alone]).groupby("strategy", sort=False):
        middle = found.groupby("epoch")[["train_time_s", "score"]].median()
        values = (middle["score"] * score.factor).tolist()
        chosen = data.is_chosen(str(name))
        curves.append(Curve(str(name), middle["train_time_s"].tolist(), values, chosen=chosen))
    sentences = [f"{score.name.capitalize()}, {score.shown_unit}, on {data.workers(count)}."]
    if len(alone):
        sentences.append(f"{ALONE} is on one.")
    if (rows.groupby(["strategy", "epoch"]).size() > 1).any():
        sentences.append("Medians of the repeats.")
    return score_curves(data, curves, count, sentences, x_name="training time", x_unit="s")


def tradeoff_figure(data: FigureData) -> Drawn:
    """Every strategy and number of workers by time and score, and a line of those that none beats in both."""
    measured = [
        data.rows(name).set_index(["strategy", "gpus"])["value"].rename(name)
        for name in ("training_time", "score")
    ]
    points = pd.concat(measured, axis=1).dropna()
    times, scores = (points[name].to_numpy(dtype=float) for name in points)
    scores = scores.round(data.score.decimals)  # what rounding makes equal beats nothing
    axes = new_sheet(TOP + SCATTER + 36)
    # Differences far below the tolerance would look like a lot.
    room = max(0.06 * np.ptp(scores) if len(scores) else 0.0, data.score.tolerance / 2)
    y = Scale(min(scores, default=0) - room, max(scores, default=1) + room, TOP + SCATTER, TOP)
    x = padded(times, left_of(y), WIDTH - 8, 12, True)
    frame(axes, x, y, x.labelled(x.ticks(), "s"), "training time")
    front = are_unbeaten(times, data.score.sign * scores)
    order = [i for i in np.argsort(times) if front[i]]
    joined = [[scale.at(v[i]) for i in order] for scale, v in ((x, times), (y, scores))]
    stroke(axes, *joined, RULE, width=1.5, zorder=2)
    flags = {(r.strategy, r.gpus): r.flags for r in data.rows("score").itertuples()}
    named = []
    for i, (strategy, gpus) in enumerate(points.index):
        chosen = data.choice == (strategy, gpus)
        at = x.at(times[i]), y.at(scores[i])
        put_mark(axes, *at, data.marks[strategy], chosen, 11 if chosen else 7, 5 if chosen else 4)
        if chosen or (front[i] and len(named) < MAX_NAMED):
            doubt = DOUBT if flags.get((strategy, gpus)) else ""
            named.append((*at, f"{strategy} × {gpus}{doubt}", strategy, chosen))
    marks = [(x.at(t) - 5, y.at(v) - 5, 10.0, 10.0) for t, v in zip(times, scores, strict=True)]
    for across, down, text, strategy, chosen in sorted(named, key=lambda name: not name[-1]):
        text = shortened(text, max(across, WIDTH - across) - 2, chosen)
        left, top = free_place((across, down), text_width(text, chosen), marks)
        marks.append((left, top, text_width(text, chosen), NAME))
        if abs(top + NAME / 2 - down) > ABOVE:
            stroke(axes, [across, across], [down, top + NAME / 2], RULE, zorder=3)
        colour = colour_of(data.marks[strategy], True) if chosen else INK
        write(axes, left, top + NAME / 2, text, colour, bold=chosen, zorder=6)
    unit = data.score.shown_unit
    caption = [
        f"{data.score.name.capitalize()} after the last epoch, {unit}, against the training time.",
        "The line joins those that no other beats in both.",
        *data.doubt_note(flags.values()),
    ]
    return Drawn(axes.figure, " ".join(caption))


def free_place(
    at: tuple[float, float], width: float, taken: Sequence[tuple[float, float, float, float]]
) -> tuple[float, float]:
    """The left and top of a name near its point that lies over nothing, or else over the least.

    `taken`: left, top, width and height of what is there. All in pixels.
    """
    found = []
    for step in range(1, 5):
        for middle in (at[1] - step * ABOVE, at[1] + step * ABOVE):
            for left in (at[0] - 4, at[0] + 4 - width):
                top = middle - NAME / 2
                if 0 <= left <= WIDTH - width and TOP - ABOVE <= top <= TOP + SCATTER - NAME:
                    over = sum(
                        max(0.0, min(left + width, x + w) - max(left, x))
                        * max(0.0, min(top + NAME, y + h) - max(top, y))
                        for x, y, w, h in taken
                    )
                    found.append((over, len(found), left, top))
    return min(found, default=(0, 0, at[0] - 4, at[1] - ABOVE - NAME / 2))[2:]


def are_unbeaten(times: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The mask of unbeaten points: a point beats another if it is no worse in both and better in one."""
    beaten = [
        np.any((times <= t) & (scores >= s) & ((times < t) | (scores > s)))
        for t, s in zip(times, scores, strict=True)
    ]
    return ~np.array(beaten, dtype=bool)


def staleness_figure(data: FigureData) -> Drawn:
    """The share of pushes by staleness, on one number of workers, over all repeats."""
    known = data.cells[data.cells["staleness"].notna()]
    rows = known[known["gpus"] == data.shown_count]
    curves = []
    for name, found in rows.groupby("strategy", sort=False):
        shares = shares_by_value([json.loads(text) for text in found["staleness"]])
        places = [float(i) for i in range(len(shares))]
        chosen = data.is_chosen(str(name))
        curves.append(Curve(str(name), places, (100 * shares).tolist(), chosen=chosen))
    shown = Curves(
        curves,
        data.marks,
        "updates that a push is behind",
        x_whole=True,
        named_first=by_end(curves, True),
    )
    return named_curves(shown, [f"Share of the pushes, %, on {data.workers(data.shown_count)}."])


def shares_by_value(counts: list[list[int]]) -> np.ndarray:
    """Shares by value, from the sum of all counts; cut off where less than 0.1 % is left."""
    total = np.zeros(max(len(c) for c in counts))
    for c in counts:
        total[: len(c)] += c
    shares = total / max(1.0, total.sum())
    needed = int(np.searchsorted(np.cumsum(shares), 0.999)) + 1
    return shares[:needed]
