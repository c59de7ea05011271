"""Draws figures of a single measure: times and memory as rows, speedups and scores as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from stratbench.analysis.figures.curves import Curve, CurveChart, draw_curves, has_visible_intervals
from stratbench.analysis.figures.figure_data import FigureData
from stratbench.analysis.figures.rows import (
    FigureRow,
    Point,
    RowChart,
    draw_row_chart,
    has_any_point,
    has_visible_row_intervals,
)
from stratbench.analysis.records.measures import DOUBT, Measure, format_number
from stratbench.cell.text.words import GIB, choose_noun_for_workers, pluralize

#: Largest number of workers for which the axes of scaling figures are linear, not logarithmic.
LINEAR_UP_TO = 8
#: Times of at least this many seconds are drawn in hours.
HOURS_FROM_S = 7200
#: The GPU's memory is drawn as a line if it is at most this multiple of the highest peak memory.
FARTHEST_CARD = 4
#: Maximum number of epochs in a figure of scores that shows the range of repeats.
MAX_SPREAD = 20


@dataclass(frozen=True)
class CaptionedFigure:
    """A figure and its caption, which describes the drawn data."""

    figure: Figure
    caption: str


# ---------------------------------------------------------------- figures with a row per strategy


def draw_figure_with_strategy_rows(data: FigureData, measure: Measure) -> CaptionedFigure:
    """Draw a row per strategy, with the metric's value on each number of workers."""
    rows = data.select_summary_rows(measure.name)
    if measure.name == "utilisation":  # nearly equal for all numbers of workers
        rows = rows[rows["gpus"] == data.shown_worker_count]
    unit, factor = choose_axis_unit_and_factor(measure, rows["value"])
    of_time = measure.name == "training_time"
    reference = find_value_of_choice(data, rows)
    several = rows["gpus"].nunique() > 1
    points = {
        str(name): list(iter_strategy_points(data, str(name), found, factor, several))
        for name, found in rows.groupby("strategy", sort=False)
    }
    if measure.name == "memory" and not data.has_cpu_workers:
        points = {
            name: add_model_states_to_points(data, name, p, factor) for name, p in points.items()
        }
    lines = [
        FigureRow(
            name,
            points[name],
            describe_outcomes_of_strategy(found, several),
            format_row_value(data, measure, found, unit, factor, reference if of_time else None),
            is_chosen_strategy=data.is_chosen_strategy(name),
        )
        for name, found in rows.groupby("strategy", sort=False)
    ]
    lines.sort(key=lambda row: compute_row_sort_key(row, measure))
    card = find_gpu_memory_to_draw(data, measure, points, factor)
    band = None
    if of_time and reference:
        ends = reference / (1 + data.equivalence_margin), reference * (1 + data.equivalence_margin)
        band = ends[0] * factor, ends[1] * factor
    chart = RowChart(
        lines,
        data.marks_by_strategy,
        has_log_scale=of_time,
        unit=unit,
        equality_band=band,
        vertical_line_and_label=(card, "the card") if card else None,
        value_text_heading=("best" if of_time else f"on {data.shown_worker_count}")
        if several
        else "",
    )
    return CaptionedFigure(
        draw_row_chart(chart), " ".join(iter_rows_caption_sentences(data, measure, rows, chart))
    )


def choose_axis_unit_and_factor(measure: Measure, values: pd.Series) -> tuple[str, float]:
    """Return the unit of an axis. Also return the factor from the metric's unit to this unit."""
    if measure.unit == "s" and values.min() >= HOURS_FROM_S:
        return "h", 1 / 3600
    return measure.unit, 1.0


def find_value_of_choice(data: FigureData, summary_rows: pd.DataFrame) -> float | None:
    """Return the chosen candidate's value in summary.csv, or None if it is unknown."""
    if data.chosen_strategy_and_gpus is None:
        return None
    found = summary_rows[
        (summary_rows["strategy"] == data.chosen_strategy_and_gpus[0])
        & (summary_rows["gpus"] == data.chosen_strategy_and_gpus[1])
    ]["value"]
    return float(found.iloc[0]) if len(found) and found.notna().all() else None


def iter_strategy_points(
    data: FigureData,
    strategy: str,
    summary_rows: pd.DataFrame,
    unit_factor: float,
    has_several_worker_counts: bool,
) -> Iterator[Point]:
    """Yield a strategy's point for each number of workers with a value. Numbers of workers ascend."""
    known = summary_rows[summary_rows["value"].notna()].sort_values("gpus")
    for gpus, *values in known[["gpus", "value", "low", "high"]].to_numpy(dtype=float):
        value, low, high = (None if v != v else float(v) * unit_factor for v in values)
        chosen = data.chosen_strategy_and_gpus == (strategy, gpus)
        yield Point(
            value or 0.0, low, high, f"{gpus:.0f}" if has_several_worker_counts else "", chosen
        )


def add_model_states_to_points(
    data: FigureData, strategy: str, points: Sequence[Point], unit_factor: float
) -> list[Point]:
    """Return a strategy's points of peak memory, each with the part that model states take.

    Args:
        data: Data of the figure.
        strategy: Name of the strategy.
        points: Points of peak memory.
        unit_factor: Factor from bytes to the shown unit.
    """
    states = data.select_summary_rows("model_states")
    states = states[(states["strategy"] == strategy) & states["value"].notna()]
    by_count = dict(zip(states["gpus"].astype(str), states["value"] * unit_factor, strict=True))
    only = next(iter(by_count.values()), None)
    return [replace(p, model_states_value=by_count.get(p.workers_text, only)) for p in points]


def shorten_outcome(value_text: str) -> str:
    """Return a few words on why there is no value. They come from the text that replaces the value."""
    return value_text[5:-1] if value_text.startswith("n/a (") else value_text.partition(" (")[0]


def describe_outcomes_of_strategy(
    summary_rows: pd.DataFrame, has_several_worker_counts: bool
) -> str:
    """Return the outcomes of a strategy's cells without a value: `OOM on 2, 4` workers."""
    outcomes: dict[str, list[str]] = {}
    lost = summary_rows[
        summary_rows["value"].isna() | (summary_rows["ok"] < summary_rows["cells"])
    ].sort_values("gpus")
    for row in lost.to_dict("records") if len(lost) else ():
        if row["value"] != row["value"]:
            outcome = shorten_outcome(row["text"])
        else:
            outcome = (
                f"{row['cells'] - row['ok']} of {row['cells']} {row['outcome'].split(' × ')[-1]}"
            )
        outcomes.setdefault(outcome, []).append(str(row["gpus"]))
    if not has_several_worker_counts:
        return "; ".join(outcomes)
    return "; ".join(f"{what} on {', '.join(counts)}" for what, counts in outcomes.items())


def iter_notes_on_missing_values(summary_rows: pd.DataFrame) -> Iterator[str]:
    """Yield a note for each strategy with cells that have no value: `ddp: OOM`."""
    for name, found in summary_rows.groupby("strategy", sort=False):
        if words := describe_outcomes_of_strategy(found, False):
            yield f"{name}: {words}"


def format_row_value(
    data: FigureData,
    measure: Measure,
    strategy_rows: pd.DataFrame,
    unit: str,
    unit_factor: float,
    reference_value: float | None,
) -> str:
    """Return a strategy's best value as text, with its unit or as a multiple.

    The chosen strategy has its unit, and every other strategy is a multiple of `reference_value`. Without a
    reference, the value is that on the number of workers that the figure shows.
    """
    best, chosen = strategy_rows[strategy_rows["value"].notna()], data.chosen_strategy_and_gpus
    if reference_value is None and measure.name != "training_time":
        best = best[best["gpus"] == data.shown_worker_count]
    elif reference_value is not None and chosen and chosen[0] == strategy_rows["strategy"].iloc[0]:
        best = best[best["gpus"] == chosen[1]]
    if best.empty:
        return ""
    row = best.loc[best["value"].idxmin() if measure.better != "higher" else best["value"].idxmax()]
    mark = DOUBT if row["flags"] else ""
    if reference_value is None or data.is_chosen_strategy(str(row["strategy"])):
        return f"{format_number(row['value'] * unit_factor, None)} {unit}{mark}".replace(" %", "%")
    return f"{row['value'] / reference_value:.2f}×{mark}"


def compute_row_sort_key(row: FigureRow, measure: Measure) -> tuple[bool, float]:
    """Return the key by which rows are sorted: best value first, rows without values last."""
    sign = -1 if measure.better == "higher" else 1
    return not row.points, min((sign * p.value for p in row.points), default=0.0)


def find_gpu_memory_to_draw(
    data: FigureData,
    measure: Measure,
    points_by_strategy: dict[str, list[Point]],
    unit_factor: float,
) -> float | None:
    """Return the GPU's memory in the unit of the axis. None if no line is to show it.

    Only memory that is near enough to the peaks is drawn.
    """
    cards = data.cells["device_memory_bytes"].dropna()
    if measure.name != "memory" or data.has_cpu_workers or cards.empty:
        return None
    card = float(cards.min()) * measure.display_factor * unit_factor
    highest = max((p.value for points in points_by_strategy.values() for p in points), default=0.0)
    return card if card <= FARTHEST_CARD * highest else None


def iter_rows_caption_sentences(
    data: FigureData, measure: Measure, summary_rows: pd.DataFrame, chart: RowChart
) -> Iterator[str]:
    """Yield the sentences of the caption of a figure with a row per strategy."""
    noun = pluralize(choose_noun_for_workers(data.cells["device_kind"]))
    if not has_any_point(chart):
        yield f"No strategy has a value; the figure shows how its cells ended, by number of {noun}."
        return
    if measure.name == "memory":
        yield (
            "Peak of the worker that used most, above the memory of its process before training."
            if data.has_cpu_workers
            else "Peak of the worker that used most."
        )
    if summary_rows["gpus"].nunique() > 1:
        yield f"The number in a marker is the number of {noun}."
    elif len(summary_rows):
        yield f"On {data.format_workers(int(summary_rows['gpus'].iloc[0]))}."
    if measure.name == "training_time":
        yield "Logarithmic."
        if (summary_rows["cells"] > 1).any():
            yield "Markers are medians of the repeats; the answer compares geometric means."
    if chart.equality_band and data.chosen_strategy_and_gpus:
        percentage, choice = (
            f"{100 * data.equivalence_margin:g} %",
            " × ".join(map(str, data.chosen_strategy_and_gpus)),
        )
        yield f"The shaded band is within {percentage} of {choice}."
    if any(p.model_states_value is not None for row in chart.rows for p in row.points):
        yield "A short vertical line shows the part of the memory that model states take."
    cards = data.cells["device_memory_bytes"].dropna()
    if measure.name == "memory" and not data.has_cpu_workers and len(cards):
        yield f"The GPU has {cards.min() / GIB:.0f} GiB of memory."
    if has_visible_row_intervals(chart):
        yield from iter_interval_sentences(summary_rows, "Lines")
    yield from data.iter_dagger_notes(summary_rows.loc[summary_rows["value"].notna(), "flags"])


def iter_interval_sentences(summary_rows: pd.DataFrame, lines_or_bars: str) -> Iterator[str]:
    """Yield what drawn intervals mean, as in `Bars: 95 % intervals`."""
    kinds = {
        "interval": "95 % intervals",
        "range": "from the lowest to the highest repeat",
        "quartiles": "from the first to the third quartile of the repeats",
    }
    for kind in dict.fromkeys(summary_rows.loc[summary_rows["low"].notna(), "spread"]):
        yield f"{lines_or_bars}: {kinds.get(kind, kind)}."


# ---------------------------------------------------------------- figures with a line per strategy


def draw_scaling_figure(data: FigureData, measure: Measure) -> CaptionedFigure:
    """Draw a line per strategy over the number of workers. A speedup also has the ideal line."""
    rows = data.select_summary_rows(measure.name)
    is_ratio = measure.baseline is not None
    curves, notes = [], []
    for name, found in rows.groupby("strategy", sort=False):
        if is_ratio and set(found["gpus"]) == {1}:
            continue
        found = found.sort_values("gpus")
        if without := describe_outcomes_of_strategy(found, True):
            notes.append(f"{name}: {without}")
        if found["value"].notna().any():
            curves.append(
                Curve(
                    str(name),
                    found["gpus"].tolist(),
                    found["value"].tolist(),
                    found["low"].tolist(),
                    found["high"].tolist(),
                    data.is_chosen_strategy(str(name)),
                    DOUBT if (found["flags"] != "").any() else "",
                )
            )
    log = data.worker_counts[-1] > LINEAR_UP_TO
    chart = CurveChart(
        curves,
        data.marks_by_strategy,
        pluralize(choose_noun_for_workers(data.cells["device_kind"])),
        x_ticks=data.worker_counts,
        has_log_x=log,
        has_log_y=log,
        draws_ideal_line=is_ratio,
        notes=notes,
    )
    drawn = rows[rows["strategy"].isin([c.strategy for c in curves])]
    caption = [
        *iter_scaling_caption_sentences(measure, drawn, chart),
        *data.iter_dagger_notes(drawn["flags"]),
    ]
    return CaptionedFigure(draw_curves(chart), " ".join(caption))


def iter_scaling_caption_sentences(
    measure: Measure, drawn: pd.DataFrame, chart: CurveChart
) -> Iterator[str]:
    """Yield the sentences of the caption of a figure over numbers of workers.

    Args:
        measure: The metric.
        drawn: Rows of summary.csv behind the lines.
        chart: The chart.
    """
    if measure.baseline:
        baseline = (
            "the same strategy on one worker" if measure.baseline == "self" else measure.baseline
        )
        yield f"Training throughput divided by the throughput of {baseline}."
        best = max(chart.curves, key=lambda c: max(v for v in c.y_values if v == v), default=None)
        if best is not None:
            maximum, gpus = max(
                (b, a) for a, b in zip(best.x_values, best.y_values, strict=True) if b == b
            )
            yield f"The maximum is {maximum:.2f}, by {best.strategy} × {gpus}."
    if has_visible_intervals(chart):
        yield from iter_interval_sentences(drawn, "Bars")


def draw_score_figure(data: FigureData, measure: Measure, num_workers: int) -> CaptionedFigure:
    """Draw the score of each strategy after each epoch, on one number of workers."""
    score = data.score
    epochs = data.epochs[data.epochs["gpus"] == num_workers]
    rows = data.select_summary_rows(measure.name)
    rows = rows[rows["gpus"] == num_workers]
    flags = dict(zip(rows["strategy"], rows["flags"], strict=True))
    curves, repeats = [], 0
    for name, found in epochs.groupby("strategy", sort=False):
        by_epoch = (found["score"] * score.display_factor).groupby(found["epoch"])
        median, chosen = by_epoch.median(), data.is_chosen_strategy(str(name))
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
    if repeats and data.chosen_strategy_and_gpus:
        chosen_strategy = data.chosen_strategy_and_gpus[0]
        sentences.append(
            f"Lines are medians of the repeats; bars are the range of {chosen_strategy}'s repeats."
        )
    sentences += data.iter_dagger_notes(flags.values())
    return draw_score_curves(
        data, curves, num_workers, sentences, x_label="epoch", has_whole_x_ticks=True
    )


def draw_score_curves(
    data: FigureData,
    curves: Sequence[Curve],
    num_workers: int,
    caption_sentences: Sequence[str],
    **x_axis_fields: Any,
) -> CaptionedFigure:
    """Draw a line chart of scores, with a horizontal line at the lowest possible loss.

    Args:
        data: Data of the figure.
        curves: Lines of the strategies.
        num_workers: Number of workers.
        caption_sentences: Sentences of the caption.
        x_axis_fields: Fields of CurveChart for the horizontal axis.
    """
    least, rows = data.score.best_possible_score, data.select_summary_rows("score")
    chart = CurveChart(
        curves,
        data.marks_by_strategy,
        y_starts_at_zero=False,
        horizontal_line_and_label=None
        if least is None
        else (least, f"least possible: {least:.3g}"),
        notes=list(iter_notes_on_missing_values(rows[rows["gpus"] == num_workers])),
        **x_axis_fields,
    )
    return CaptionedFigure(draw_curves(chart), " ".join(caption_sentences))
