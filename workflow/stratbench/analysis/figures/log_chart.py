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
    import numpy as np

    from stratbench.analysis.figures import axes as shared
    from stratbench.analysis.figures import curves, sheet

    with plt.rc_context(sheet.RC):
        axes = shared.new_axes(HEIGHT)
        points = [p for s in series for p in (*s.dots, *s.full, *s.dashed)]
        points += [(x, y) for s in series for x, *ends in s.fan for y in ends]
        across, up = np.array(points).T
        x_limits = shared.limits_of([*across, *x_ticks], curves.ROOM, True)
        shared.set_ticks(axes.xaxis, x_limits, True, at=x_ticks, text_of=text_of_x)
        y_limits = shared.limits_of(up, curves.ROOM, True)
        shared.set_ticks(axes.yaxis, y_limits, True, text_of=text_of_y)
        axes.set(xlabel=x_title, ylabel=y_title)
        colours = {name: light for light, (name, _) in sheet.both_themes().items()}
        names = []
        for s in series:
            colour = colours[s.colour]
            x, low, high = np.array(s.fan).reshape(-1, 3).T
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
            for line, dash in ((s.full, ""), (s.dashed, "5 4")):
                style = {"linewidth": 1.6 * sheet.PX, "linestyle": curves.dashes(dash)}
                axes.plot(*np.array(line).reshape(-1, 2).T, color=colour, **style)
            dots = np.array(s.dots).reshape(-1, 2).T
            if s.mark:
                shared.put_mark(axes, dots[0], dots[1], s.mark, True, SIZE)
            else:
                axes.plot(*dots, ".", color=colour, markersize=SIZE * sheet.PX, zorder=3)
            if ends := [*s.dots, *s.full, *s.dashed] if s.name else []:
                names.append((shared.shortened(s.name), colour, True, max(ends)))
        curves.put_names(axes, names)
        svg = base64.b64encode(sheet.svg_of(shared.figure_of(axes)).encode()).decode()
    image = '<img src="data:image/svg+xml;base64,{}" alt="{}">'
    return Markup(image).format(svg, label)
