"""Renders a small chart with logarithmic axes as an image element of a page."""

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
    """A series of points and lines in a chart. All values are above 0.

    Attributes:
        name: Name next to the series; empty for none.
        colour: CSS variable of a figure's colour, without leading dashes.
        marked_points: Points that are drawn as marks.
        solid_line_points: Points of a solid line.
        dashed_line_points: Points of a dashed line.
        band_points: (x, low, high) of a shaded band, in the order of x.
        mark: Mark of the points; small dots if None.
    """

    name: str
    colour: str
    marked_points: Sequence[tuple[float, float]] = ()
    solid_line_points: Sequence[tuple[float, float]] = ()
    dashed_line_points: Sequence[tuple[float, float]] = ()
    band_x_low_high_points: Sequence[tuple[float, float, float]] = ()
    mark: Mark | None = None


def render_log_chart(
    series: Sequence[ChartSeries],
    x_title: str,
    y_title: str,
    x_ticks: Sequence[float],
    format_x_tick: Callable[[float], str],
    format_y_tick: Callable[[float], str],
    alternative_text: str,
) -> Markup:
    """Return a chart with logarithmic axes as an HTML image element.

    Args:
        series: Series to draw.
        x_title: Label of the horizontal axis.
        y_title: Label of the vertical axis.
        x_ticks: Ticks of the horizontal axis.
        format_x_tick: Formats a tick of the horizontal axis.
        format_y_tick: Formats a tick of the vertical axis.
        alternative_text: Description for screen readers.
    """
    # These imports are slow, and reports without such a chart do not need them.
    import matplotlib.pyplot as plt
    import numpy as np

    from stratbench.analysis.figures import axes as shared
    from stratbench.analysis.figures import curves, sheet

    with plt.rc_context(sheet.RC):
        axes = shared.create_figure_axes(HEIGHT)
        points = [
            p
            for s in series
            for p in (*s.marked_points, *s.solid_line_points, *s.dashed_line_points)
        ]
        points += [(x, y) for s in series for x, *ends in s.band_x_low_high_points for y in ends]
        across, up = np.array(points).T
        x_limits = shared.compute_axis_limits([*across, *x_ticks], curves.ROOM, True)
        shared.set_ticks(
            axes.xaxis, x_limits, True, tick_values=x_ticks, format_value=format_x_tick
        )
        y_limits = shared.compute_axis_limits(up, curves.ROOM, True)
        shared.set_ticks(axes.yaxis, y_limits, True, format_value=format_y_tick)
        axes.set(xlabel=x_title, ylabel=y_title)
        colours = {
            name: light
            for light, (name, _) in sheet.map_light_colours_to_variable_and_dark().items()
        }
        names = []
        for s in series:
            colour = colours[s.colour]
            x, low, high = np.array(s.band_x_low_high_points).reshape(-1, 3).T
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
            for line, dash in ((s.solid_line_points, ""), (s.dashed_line_points, "5 4")):
                style = {"linewidth": 1.6 * sheet.PX, "linestyle": curves.parse_dash_pattern(dash)}
                axes.plot(*np.array(line).reshape(-1, 2).T, color=colour, **style)
            dots = np.array(s.marked_points).reshape(-1, 2).T
            if s.mark:
                shared.draw_mark(axes, dots[0], dots[1], s.mark, True, SIZE)
            else:
                axes.plot(*dots, ".", color=colour, markersize=SIZE * sheet.PX, zorder=3)
            if (
                ends := [*s.marked_points, *s.solid_line_points, *s.dashed_line_points]
                if s.name
                else []
            ):
                names.append(curves.LineName(shared.shorten_name(s.name), colour, True, max(ends)))
        curves.write_line_names(axes, names)
        svg = base64.b64encode(sheet.render_svg(shared.find_root_figure(axes)).encode()).decode()
    image = '<img src="data:image/svg+xml;base64,{}" alt="{}">'
    return Markup(image).format(svg, alternative_text)
