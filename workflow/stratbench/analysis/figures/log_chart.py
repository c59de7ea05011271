"""A small chart on logarithmic axes as SVG within a page: lines, fans and marks in the page's own colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from stratbench.analysis.figures.marks import Mark, outline

WIDTH, HEIGHT = 640, 360
#: Room beside the axes in pixels: left, right (for names), top, bottom.
LEFT, RIGHT, TOP, BOTTOM = 70, 130, 12, 42
RADIUS, LINE_HEIGHT = 4.5, 14
#: A character of a name takes at most so many pixels, in the mean.
CHARACTER = 7


@dataclass(frozen=True)
class ChartSeries:
    """What is drawn of one name; all values above zero. `fan`: (x, low, high), in the order of x.

    `colour`: a variable of the page's style, without dashes before it. `mark` None: small dots.
    """

    name: str
    colour: str
    dots: Sequence[tuple[float, float]] = ()
    full: Sequence[tuple[float, float]] = ()
    dashed: Sequence[tuple[float, float]] = ()
    fan: Sequence[tuple[float, float, float]] = ()
    mark: Mark | None = None


def log_chart(
    series: Sequence[ChartSeries],
    x_title: str,
    y_title: str,
    x_ticks: Sequence[float],
    text_of_x: Callable[[float], str],
    text_of_y: Callable[[float], str],
    label: str,
) -> Markup:
    """The chart as an SVG element. `label`: what it shows, for readers who cannot see it."""
    xs = [p[0] for s in series for p in (*s.dots, *s.full, *s.dashed, *s.fan)] + [*x_ticks]
    ys = [p[1] for s in series for p in (*s.dots, *s.full, *s.dashed)]
    ys += [y for s in series for p in s.fan for y in p[1:]]
    x_of = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_of = _scale(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    parts = [*_axes(x_of, y_of, x_ticks, _ticks(min(ys), max(ys)), text_of_x, text_of_y)]
    parts += [
        f'<text class="t" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" '
        f'text-anchor="middle">{escape(x_title)}</text>',
        f'<text class="t" transform="translate(11 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_title)}</text>',
    ]
    for s in series:
        parts += _fan(s, x_of, y_of)
    for s in series:
        parts += _lines(s, x_of, y_of)
    parts += _names(series, y_of)
    name_width = 8 + CHARACTER * max((len(s.name) for s in series), default=0)
    width = WIDTH + max(0, name_width - RIGHT)
    return Markup(
        f'<svg class="log-chart" viewBox="0 0 {width} {HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """From values to pixels, by logarithms, with some room at both ends."""
    span = math.log(high / low) or 1.0
    first, whole = math.log(low) - 0.03 * span, 1.06 * span
    return lambda value: start + (end - start) * (math.log(value) - first) / whole


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`: powers of ten, with 2 and 5 times them where there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [f * 10.0**d for d in decades for f in factors]
        ticks = [t for t in ticks if low * 0.97 <= t <= high * 1.03]
        if len(ticks) >= 4:
            break
    return ticks


def _axes(
    x_of: Callable[[float], float],
    y_of: Callable[[float], float],
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    text_of_x: Callable[[float], str],
    text_of_y: Callable[[float], str],
) -> Iterator[str]:
    for tick in y_ticks:
        y = y_of(tick)
        yield f'<path class="g" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>'
        yield (
            f'<text class="k" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{escape(text_of_y(tick))}</text>"
        )
    for tick in x_ticks:
        yield (
            f'<text class="k" x="{x_of(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{escape(text_of_x(tick))}</text>"
        )
    yield f'<path class="a" d="M{LEFT},{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'


def _fan(
    s: ChartSeries, x_of: Callable[[float], float], y_of: Callable[[float], float]
) -> Iterator[str]:
    if s.fan:
        there = [f"{x_of(x):.1f},{y_of(high):.1f}" for x, _, high in s.fan]
        back = [f"{x_of(x):.1f},{y_of(low):.1f}" for x, low, _ in reversed(s.fan)]
        yield (
            f'<path d="M{"L".join(there + back)}Z" fill="var(--{s.colour})" fill-opacity="0.16"/>'
        )


def _lines(
    s: ChartSeries, x_of: Callable[[float], float], y_of: Callable[[float], float]
) -> Iterator[str]:
    for points, dash in ((s.full, ""), (s.dashed, ' stroke-dasharray="5 4"')):
        if points:
            d = "L".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
            yield f'<path d="M{d}" fill="none" stroke="var(--{s.colour})" stroke-width="1.6"{dash}/>'
    for x, y in s.dots:
        if s.mark is None:
            yield f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.6" fill="var(--{s.colour})"/>'
            continue
        d = outline(s.mark.shape, x_of(x), y_of(y), RADIUS)
        fill = f"var(--{s.colour})" if s.mark.fill == "full" else "var(--paper)"
        yield f'<path d="{d}" fill="{fill}" stroke="var(--{s.colour})" stroke-width="1.4"/>'


def _names(series: Sequence[ChartSeries], y_of: Callable[[float], float]) -> Iterator[str]:
    """Each name beside the end of its lines, moved apart where they would overlap."""
    wanted = []
    for s in series:
        ends = [p for points in (s.dots, s.full, s.dashed) for p in points]
        if ends:
            wanted.append((y_of(max(ends)[1]), s))
    placed: list[float] = []
    for y, s in sorted(wanted, key=lambda w: w[0]):
        at = max(y, placed[-1] + LINE_HEIGHT if placed else -math.inf)
        placed.append(at)
        yield (
            f'<text class="n" x="{WIDTH - RIGHT + 8}" y="{at + 4:.1f}" fill="var(--{s.colour})">'
            f"{escape(s.name)}</text>"
        )
