"""Builds the rows of answers on a page's first screen, each with a drawn scale of the alternatives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from stratbench.analysis.figures.marks import (
    FAMILIES,
    Mark,
    assign_marks_by_strategy,
    build_svg_outline_path,
    create_mark,
    format_family_css_variables,
)

#: Pixels on the scale of alternatives: its width, and the positions of ratio 1 and of the largest ratio.
WIDTH, ONE, END = 236, 40, 222
#: Assumed width of a letter of the label, in pixels.
LETTER = 6.8
#: The largest ratio on the scale, and the ratios that have a tick.
FARTHEST, TICKS = 3.0, (1.0, 1.5, 2.0, 3.0)
#: Vertical middle of the scale in pixels, and the offsets from it for marks that would overlap.
MIDDLE, LANES = 24, (0, -9, 9)
#: Radii in pixels of the marks of the choice, of the nearest alternative and of the others.
CHOICE, NEAREST, OTHER = 7.0, 5.0, 3.6
#: Distance in pixels below which two marks overlap.
APART = 8.0
#: Number of filled dots (of three) that show a confidence.
DOTS = {"high": 3, "medium": 2, "low": 1, "none": 0}


@dataclass(frozen=True)
class DrawnMark:
    """A mark on a scale of alternatives: SVG path, CSS colours of outline and filling, and tooltip."""

    path: str
    colour: str
    fill_colour: str
    title: str
    width: float


def compute_ratio_position_px(ratio: float) -> float:
    """Return the horizontal position of a ratio on the logarithmic scale, in pixels."""
    return ONE + (END - ONE) * math.log(ratio) / math.log(FARTHEST)


def build_drawn_mark(
    mark: Mark, x: float, y: float, radius: float, title: str, in_full_colour: bool
) -> DrawnMark:
    """Return a strategy's mark as an SVG path with colours, centred at (x, y).

    Args:
        mark: The strategy's mark.
        x: Horizontal position.
        y: Vertical position.
        radius: Radius in pixels.
        title: Text for a tooltip.
        in_full_colour: Whether the mark has its family's full colour instead of the quiet one.
    """
    quiet = "" if in_full_colour else "-q"
    colour = f"var(--{mark.colour_css_variable}{quiet})"
    half = f"url(#half-{mark.colour_css_variable}{quiet})"
    inside = {"full": colour, "open": "var(--paper)", "half": half}[mark.mark_filling]
    return DrawnMark(
        build_svg_outline_path(mark.family_shape, x, y, radius),
        colour,
        inside,
        title,
        2.2 if radius > 5 else 1.5,
    )


def build_mark_icon(mark: Mark) -> DrawnMark:
    """Return a strategy's mark as an icon, centred in 18 x 18 pixels."""
    return build_drawn_mark(mark, 9, 9, 6, "", in_full_colour=True)


def build_scale_values(
    short_answer: Mapping[str, Any], marks: Mapping[str, Mark], equivalence_margin: float
) -> dict[str, Any] | None:
    """Return what the template draws on the scale of an answer's alternatives. None without any.

    It has marks, intervals, and the band of values that count as equal.

    Args:
        short_answer: The short answer of answers.json.
        marks: Marks by strategy.
        equivalence_margin: Fraction within which strategies are equal.
    """
    others: Sequence[Mapping[str, Any]] = short_answer["others"]
    if short_answer["strategy"] is None or not others:
        return None
    nearest = others[0]
    inside = [o for o in others if 1 / 1.15 <= o["ratio"] <= FARTHEST]
    beyond = len(others) - len(inside)
    # The nearest alternative is always drawn, if need be at the end of the scale.
    inside = inside if nearest in inside else [nearest, *inside]
    taken: list[tuple[float, int]] = [
        (compute_ratio_position_px(1.0), 0),
        (compute_ratio_position_px(1.0) + CHOICE, 0),
    ]
    shown, lines = [], []
    for other in inside:
        x, first = (
            compute_ratio_position_px(min(max(other["ratio"], 1 / 1.15), FARTHEST)),
            other is nearest,
        )
        lane = next(
            (n for n in range(len(LANES)) if all(k != n or abs(p - x) >= APART for p, k in taken)),
            0,
        )
        taken.append((x, lane))
        y = MIDDLE + LANES[lane]
        name = format_alternative_ratio(other)
        shown.append(
            build_drawn_mark(
                marks[other["strategy"]],
                x,
                y,
                NEAREST if first else OTHER,
                name,
                in_full_colour=first,
            )
        )
        if other["low"] is not None:
            low, high = (min(max(other[end], 1 / 1.2), FARTHEST * 1.06) for end in ("low", "high"))
            lines.append(
                {
                    "from": compute_ratio_position_px(low),
                    "to": compute_ratio_position_px(high),
                    "y": y,
                    "colour": shown[-1].colour,
                    "width": 2 if first else 1,
                    "open": other["high"] > FARTHEST * 1.06,
                }
            )
    choice = build_drawn_mark(
        marks[short_answer["strategy"]],
        compute_ratio_position_px(1.0),
        MIDDLE,
        CHOICE,
        "",
        in_full_colour=True,
    )
    label = format_alternative_label(nearest)
    # The label is centred below its mark, or moved just enough to stay on the scale.
    half = min(LETTER * len(label) / 2, WIDTH / 2)
    x = min(max(compute_ratio_position_px(min(nearest["ratio"], FARTHEST)), half), WIDTH - half)
    return {
        "marks": [*reversed(shown), choice],
        "lines": lines,
        "ticks": [compute_ratio_position_px(t) for t in TICKS],
        "band": {
            "x": compute_ratio_position_px(1 / (1 + equivalence_margin)),
            "width": compute_ratio_position_px(1 + equivalence_margin)
            - compute_ratio_position_px(1 / (1 + equivalence_margin)),
        },
        "beyond": beyond,
        "label": label,
        "label_x": x,
        "alt": "; ".join(format_alternative_ratio(other) for other in others),
    }


def format_alternative_label(alternative: Mapping[str, Any]) -> str:
    """Return the label of the nearest alternative: `zero1 × 8: 1.09× [1.06–1.12]`."""
    interval = ""
    if alternative["low"] is not None:
        high = alternative["high"]
        interval = f" [{alternative['low']:.2f}–{f'{high:.2f}' if high < 100 else '∞'}]"
    return f"{format_alternative_ratio(alternative)}{interval}"


def format_alternative_ratio(alternative: Mapping[str, Any]) -> str:
    """Return an alternative and its ratio to the choice as text: `zero1 × 8: 1.09×`."""
    return f"{alternative['strategy']} × {alternative['gpus']}: {alternative['ratio']:.2f}×"


def iter_answer_row_values(
    answers: Sequence[Mapping[str, Any]],
    base_strategies: Mapping[str, str | None],
    equivalence_margin: float,
) -> Iterator[dict[str, Any]]:
    """Yield, for each answer in answers.json, the values that the template shows in a row.

    Args:
        answers: The answers.
        base_strategies: Base strategy of each strategy or variant.
        equivalence_margin: Fraction within which strategies are equal.
    """
    listed = {a["short"]["strategy"] for a in answers if a["short"]["strategy"]}
    listed |= {o["strategy"] for a in answers for o in a["short"]["others"]}
    marks = assign_marks_by_strategy(
        ({name: name for name in listed} | dict(base_strategies)).items()
    )
    for answer in answers:
        short = answer["short"]
        name = short["strategy"]
        yield {
            **answer,
            "icon": build_mark_icon(marks[name]) if name in marks else None,
            "scale": build_scale_values(short, marks, equivalence_margin),
            "dots": DOTS[answer["confidence"]],
            "families": sorted({marks[n].family for n in list_drawn_strategies(short)}),
        }


def list_drawn_strategies(short_answer: Mapping[str, Any]) -> list[str]:
    """Return the strategies that the row of an answer shows: choice and alternatives."""
    own = [short_answer["strategy"]] if short_answer["strategy"] else []
    return [*own, *(other["strategy"] for other in short_answer["others"])]


def build_first_screen_values(
    base_strategies: Mapping[str, str | None], answers_json: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the template's values for the first screen: answers and colours of marks.

    Args:
        base_strategies: Base strategy of each strategy or variant.
        answers_json: Content of answers.json.
    """
    margin = answers_json["equivalence_margin"]
    rows = list(iter_answer_row_values(answers_json["answers"], base_strategies, margin))
    shown = {family for row in rows for family in row["families"]}
    of = "Cost" if answers_json["by_cost"] else "Time"
    return {
        "decided": answers_json,
        "answers": rows,
        "any_open": any(row["short"]["score_open"] for row in rows),
        "ticks": [{"x": compute_ratio_position_px(t), "text": f"{t:g}×"} for t in TICKS],
        "value_name": "Cost" if answers_json["by_cost"] else "Training time",
        "others_name": f"{of} of the others, as a multiple",
        "families": [
            {
                "name": name,
                "variable": create_mark(name, 0).colour_css_variable,
                "path": build_svg_outline_path(hue.shape, 7, 7, 4.5),
                "shown": name in shown,
            }
            for name, hue in FAMILIES.items()
        ],
        "light_marks": Markup(format_family_css_variables(for_dark_pages=False)),
        "dark_marks": Markup(format_family_css_variables(for_dark_pages=True)),
    }
