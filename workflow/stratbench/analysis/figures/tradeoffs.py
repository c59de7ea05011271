"""Draws figures that combine measures: time and score, phases of a step, staleness of pushes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox, BboxBase

from stratbench.analysis.figures.axes import (
    apply_layout,
    compute_axis_limits,
    create_figure_axes,
    create_shifted_transform,
    draw_mark,
    draw_row_name,
    draw_text,
    find_root_figure,
    set_ticks,
    shorten_name,
)
from stratbench.analysis.figures.curves import Curve, CurveChart, draw_curves
from stratbench.analysis.figures.figure_data import FigureData
from stratbench.analysis.figures.measured import CaptionedFigure, draw_score_curves
from stratbench.analysis.figures.rows import ROW
from stratbench.analysis.figures.sheet import (
    INK,
    LINE_HEIGHT,
    MUTED,
    PAPER,
    PX,
    RULE,
    THEME,
    choose_mark_colour,
)  # fmt: skip
from stratbench.analysis.records.measures import ALONE, DOUBT, format_number
from stratbench.cell.text.words import format_names

#: Parts of the bar of a step, in the order of time: label, colour, whether filled, and summed phases.
PARTS = (
    ("forward", "work-1", True, ("forward",)),
    ("backward", "work-2", True, ("backward",)),
    ("communication", "send", True, ("communication", "exposed_communication", "push")),
    ("waiting", "wait", False, ("server_wait", "bubble")),
    ("slowed on purpose", "bad", True, ("slowdown",)),
)
#: Label, colour and filling of the last part, which is the rest of a step's time.
REST = ("rest", "muted", False)
#: Maximum number of points with names in the scatter chart.
MAX_NAMED = 7
#: Number of columns in the legend above the bars.
KEY_COLUMNS = 3
#: Height of the scatter chart in pixels.
SCATTER = 258
#: Vertical distance in pixels between a point and the middle of its name, and the name's height.
ABOVE, NAME = 13, 12


def draw_step_breakdown_figure(data: FigureData) -> CaptionedFigure:
    """Draw a bar per strategy that divides its mean step time into phases."""
    known = data.cells[data.cells["breakdown_ms"].notna()]
    known = known[known["gpus"] == data.shown_worker_count]
    phases = pd.DataFrame([json.loads(t) for t in known["breakdown_ms"]], index=known.index)
    steps = phases.groupby(known["strategy"]).median().fillna(0.0).clip(lower=0.0)
    parts = sum_phase_times_by_bar_segment(steps)
    parts = parts.loc[parts.sum(axis=1).sort_values().index]
    return CaptionedFigure(
        draw_step_time_bars(data, parts), " ".join(iter_breakdown_caption_sentences(data, parts))
    )


def draw_step_time_bars(data: FigureData, parts: pd.DataFrame) -> Figure:
    """Draw a bar per strategy that stacks the parts of a step's time in ms.

    The sum is written next to the bar.
    """
    drawn = [part for part in (*(p[:3] for p in PARTS), REST) if parts[part[0]].gt(0).any()]
    axes = create_figure_axes(LINE_HEIGHT * -(-len(drawn) // KEY_COLUMNS) + 8 + ROW * len(parts))
    axes.set_axis_off()
    axes.set(ylim=(len(parts) - 0.5, -0.5), xlim=compute_axis_limits(parts.sum(axis=1), 0, False))
    done = pd.Series(0.0, index=parts.index)
    for part, name, filled in drawn:
        colour = THEME[name][0]
        edge, px = (PAPER, 0.75) if filled else (colour, 1.1)
        axes.barh(
            range(len(parts)), parts[part], 0.58, done, label=part, linewidth=px * PX,
            color=colour if filled else PAPER, edgecolor=edge,
        )  # fmt: skip
        done += parts[part]
    for y, (name, width) in enumerate(done.items()):
        chosen, mark = data.is_chosen_strategy(str(name)), data.marks_by_strategy[str(name)]
        draw_row_name(axes, y, str(name), mark, chosen)
        full = choose_mark_colour(mark, True) if chosen else MUTED
        place = create_shifted_transform(axes, 6, transform=axes.transData)
        text = f"{format_number(width, None)} ms"
        draw_text(axes, width, y, text, full, bold=chosen, transform=place)
    bars = axes.get_legend_handles_labels()[0]
    key = [bar for column in range(KEY_COLUMNS) for bar in bars[column::KEY_COLUMNS]]
    find_root_figure(axes).legend(handles=key, loc="outside upper left", ncols=KEY_COLUMNS)
    return apply_layout(axes)


def sum_phase_times_by_bar_segment(steps: pd.DataFrame) -> pd.DataFrame:
    """Return each strategy's time per step in ms, split into PARTS and the rest."""
    named = {
        part: steps[[phase for phase in phases if phase in steps]].sum(axis=1)
        for part, _, _, phases in PARTS
    }
    parts = pd.DataFrame(named, index=steps.index)
    return parts.assign(rest=steps.sum(axis=1) - parts.sum(axis=1)).clip(lower=0.0)


def iter_breakdown_caption_sentences(data: FigureData, parts: pd.DataFrame) -> Iterator[str]:
    """Yield the caption's sentences, also on strategies that do not separate communication."""
    workers = data.format_workers(data.shown_worker_count)
    yield f"Mean duration of a step over all workers, on {workers}."
    hidden = [str(name) for name in parts.index if parts.loc[name, "communication"] == 0]
    if data.shown_worker_count > 1 and hidden:
        strategies = format_names(hidden, 3)
        yield f"Forward and backward include the communication of {strategies}."


def draw_score_over_time_figure(data: FigureData) -> CaptionedFigure:
    """Draw the score after each epoch over the training time up to that epoch."""
    epochs, score, count = data.epochs, data.score, data.shown_worker_count
    rows = epochs[epochs["gpus"] == count]
    alone = epochs[(epochs["strategy"] == ALONE) & (epochs["gpus"] != count)]
    curves = []
    for name, found in pd.concat([rows, alone]).groupby("strategy", sort=False):
        middle = found.groupby("epoch")[["train_time_s", "score"]].median()
        values = (middle["score"] * score.display_factor).tolist()
        chosen = data.is_chosen_strategy(str(name))
        curves.append(
            Curve(str(name), middle["train_time_s"].tolist(), values, is_chosen_strategy=chosen)
        )
    sentences = [f"{score.name.capitalize()}, {score.shown_unit}, on {data.format_workers(count)}."]
    if len(alone):
        sentences.append(f"{ALONE} is on one.")
    if (rows.groupby(["strategy", "epoch"]).size() > 1).any():
        sentences.append("Medians of the repeats.")
    return draw_score_curves(data, curves, count, sentences, x_label="training time", x_unit="s")


def draw_tradeoff_figure(data: FigureData) -> CaptionedFigure:
    """Draw a point of time and score per strategy and number of workers.

    A line joins the points of the Pareto front.
    """
    measured = [
        data.select_summary_rows(name).set_index(["strategy", "gpus"])["value"].rename(name)
        for name in ("training_time", "score")
    ]
    points = pd.concat(measured, axis=1).dropna()
    # Points with the same shown score count as equally good.
    points["score"] = points["score"].round(data.score.shown_decimals)
    points["unbeaten"] = find_pareto_optimal_mask(
        *points.to_numpy(dtype=float).T * [[1], [data.score.higher_is_better_sign]]
    )
    flags = data.select_summary_rows("score").set_index(["strategy", "gpus"])["flags"].to_dict()
    unit = data.score.shown_unit
    caption = [
        f"{data.score.name.capitalize()} after the last epoch, {unit}, against the training time.",
        "The line joins the Pareto-optimal points: no other point is better in time and score.",
        *data.iter_dagger_notes(flags.values()),
    ]
    return CaptionedFigure(
        draw_tradeoff(data, points.sort_values("training_time"), flags), " ".join(caption)
    )


def draw_tradeoff(
    data: FigureData, points: pd.DataFrame, flags: Mapping[tuple[str, int], str]
) -> Figure:
    """Draw a scatter chart of times and scores. The choice and Pareto-optimal points have names."""
    axes = create_figure_axes(SCATTER)
    scores = points["score"]
    # Without a span of at least the tolerance, tiny differences would fill the axis.
    room = max(0.06 * np.ptp(scores) if len(scores) else 0.0, data.score.tolerance / 2)
    low, high = scores.min(), scores.max()
    set_ticks(axes.yaxis, (low - room, high + room) if len(scores) else (-room, 1 + room), False)
    set_ticks(axes.xaxis, compute_axis_limits(points["training_time"], 0.04, True), True, unit="s")
    axes.set_xlabel("training time")
    front = points[points["unbeaten"]]
    axes.plot(front["training_time"], front["score"], color=RULE, linewidth=1.5 * PX, zorder=2)
    for key, (time, score, _) in points.iterrows():
        chosen = data.chosen_strategy_and_gpus == key
        size, over = (11, 5) if chosen else (7, 4)
        draw_mark(axes, time, score, data.marks_by_strategy[key[0]], chosen, size, zorder=over)
    apply_layout(axes)
    to_values = axes.transData.inverted().transform
    at = axes.transData.transform(points[["training_time", "score"]].to_numpy(float))
    places = dict(zip(points.index, at, strict=True))
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in at]
    labels = (axes.xaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels())
    taken += [label.get_window_extent() for label in labels if label.get_text()]
    rivals = [key for key in front.index if key != data.chosen_strategy_and_gpus][:MAX_NAMED]
    for key in [
        *([data.chosen_strategy_and_gpus] if data.chosen_strategy_and_gpus in places else []),
        *rivals,
    ]:
        chosen, doubt = key == data.chosen_strategy_and_gpus, DOUBT if flags.get(key) else ""
        colour = choose_mark_colour(data.marks_by_strategy[key[0]], True) if chosen else INK
        text = f"{shorten_name(key[0])} × {key[1]}{doubt}"
        name = draw_text(axes, 0, 0, text, colour, bold=chosen, zorder=6)
        box = find_free_box_for_name(
            places[key], name.get_window_extent().width + 6, taken, find_root_figure(axes).bbox
        )
        taken.append(box)
        x, y = places[key]
        left, middle = to_values((box.x0, (box.y0 + box.y1) / 2))
        name.set_position((left, middle))
        if abs((box.y0 + box.y1) / 2 - y) > ABOVE + 1:
            leader = to_values([(x, y), (x, box.y0 if box.y0 > y else box.y1)])
            axes.plot(*leader.T, color=RULE, zorder=3)
    return find_root_figure(axes)


def find_free_box_for_name(
    point: Sequence[float], name_width: float, taken_boxes: Sequence[Bbox], figure_box: BboxBase
) -> Bbox:
    """Return the box for a point's name that overlaps least with other boxes.

    Args:
        point: Position of the point.
        name_width: Width of the name.
        taken_boxes: Boxes that should not be covered.
        figure_box: Box in which the name must be.
    """
    places: list[tuple[float, int, Bbox]] = []
    lefts = (point[0] - 4, point[0] + 4 - name_width)
    for step, side, left in product(range(1, 5), (1, -1), lefts):
        bottom = point[1] + side * step * ABOVE - NAME / 2
        x0 = min(max(left, figure_box.x0), figure_box.x1 - name_width)
        box = Bbox.from_bounds(x0, bottom, name_width, NAME)
        if figure_box.y0 <= box.y0 and box.y1 <= figure_box.y1:
            shared = (Bbox.intersection(box, other) for other in taken_boxes)
            places.append((sum(s.width * s.height for s in shared if s), len(places), box))
    return min(places)[2]


def find_pareto_optimal_mask(times: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return a boolean mask of the Pareto-optimal pairs of time and score.

    A point is beaten by another that is no worse in time and score, and better in one of them.
    """
    beaten = [
        np.any((times <= t) & (scores >= s) & ((times < t) | (scores > s)))
        for t, s in zip(times, scores, strict=True)
    ]
    return ~np.array(beaten, dtype=bool)


def draw_staleness_figure(data: FigureData) -> CaptionedFigure:
    """Draw a line per strategy with the share of its pushes that have each staleness."""
    known = data.cells[data.cells["staleness"].notna()]
    rows = known[known["gpus"] == data.shown_worker_count]
    curves = []
    for name, found in rows.groupby("strategy", sort=False):
        shares = compute_staleness_shares([json.loads(text) for text in found["staleness"]])
        places = [float(i) for i in range(len(shares))]
        chosen = data.is_chosen_strategy(str(name))
        curves.append(Curve(str(name), places, (100 * shares).tolist(), is_chosen_strategy=chosen))
    shown = CurveChart(
        curves,
        data.marks_by_strategy,
        "updates that a push is behind",
        has_whole_x_ticks=True,
    )
    workers = data.format_workers(data.shown_worker_count)
    caption = f"Share of the pushes with each staleness, in %, on {workers}."
    return CaptionedFigure(draw_curves(shown), caption)


def compute_staleness_shares(counts_by_repeat: list[list[int]]) -> np.ndarray:
    """Return the share of pushes with each staleness. The last 0.1 % of all pushes are left out.

    Args:
        counts_by_repeat: Numbers of pushes; the index in a list is the staleness.
    """
    total = np.zeros(max(len(counts) for counts in counts_by_repeat))
    for counts in counts_by_repeat:
        total[: len(counts)] += counts
    shares = total / max(1.0, total.sum())
    needed = int(np.searchsorted(np.cumsum(shares), 0.999)) + 1
    return shares[:needed]
