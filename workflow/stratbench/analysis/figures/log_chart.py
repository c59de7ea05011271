"""A small chart on logarithmic axes as an image in a page: lines, fans and marks, with names beside them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from stratbench.analysis.figures.marks import Mark

#: The height of a chart in pixels, and the width of its marks.
HEIGHT, SIZE = 270, 8


@dataclass(frozen=True)
class ChartSeries:
    """What is drawn of one name; all values above zero. `fan`: (x, low, high), in the order of x.

    `colour`: of a figure, by its variable without dashes before it. `mark` None: small dots.
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
    """The chart as an image element. `label`: what it shows, for readers who cannot see it."""
    # Here, so that a report without such a chart needs no time for it.
    import matplotlib.pyplot as plt

    from stratbench.analysis.figures.axes import (
        figure_of,
        limits_of,
        new_axes,
        put_mark,
        set_ticks,
        shortened,
    )
    from stratbench.analysis.figures.curves import ROOM, dashes, put_names
    from stratbench.analysis.figures.sheet import PX, RC, both_themes, svg_of

    with plt.rc_context(RC):
        axes = new_axes(HEIGHT)
        points = [p for s in series for p in (*s.dots, *s.full, *s.dashed)]
        points += [(x, y) for s in series for x, *ends in s.fan for y in ends]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        across = limits_of([*xs, *x_ticks], ROOM, True)
        set_ticks(axes.xaxis, across, True, at=x_ticks, text_of=text_of_x)
        set_ticks(axes.yaxis, limits_of(ys, ROOM, True), True, text_of=text_of_y)
        axes.set(xlabel=x_title, ylabel=y_title)
        colours = {name: light for light, (name, _) in both_themes().items()}
        names = []
        for s in series:
            colour = colours[s.colour]
            if s.fan:
                axes.fill_between(*zip(*s.fan, strict=True), color=colour, alpha=0.16, linewidth=0)
            for line, dash in ((s.full, ""), (s.dashed, "5 4")):
                x, y = [x for x, _ in line], [y for _, y in line]
                axes.plot(x, y, color=colour, linewidth=1.6 * PX, linestyle=dashes(dash))
            for x, y in s.dots:
                if s.mark:
                    put_mark(axes, x, y, s.mark, True, SIZE)
                else:
                    axes.plot([x], [y], ".", color=colour, markersize=SIZE * PX, zorder=3)
            if s.name and (s.dots or s.full or s.dashed):
                end = max([*s.dots, *s.full, *s.dashed])
                names.append((shortened(s.name), colour, True, end))
        put_names(axes, names)
        svg = base64.b64encode(svg_of(figure_of(axes)).encode()).decode()
    return Markup('<img class="log-chart" src="data:image/svg+xml;base64,{}" alt="{}">').format(
        svg, label
    )
