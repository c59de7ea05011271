"""Marks of strategies: each family has its hue and shape, and its members differ by filling and dashes.

The `full` colour is for the chosen strategy and for names. The `quiet` colour of all others has the same hue
at half the chroma. A test checks that the contrast with the background is at least 4.5 : 1 for full colours
and 3 : 1 for quiet ones, in both themes. It also checks that colour-blind readers can distinguish the hues.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from stratbench.strategies import REGISTRY, get_strategy_class


@dataclass(frozen=True)
class Hue:
    """Shape and colours of a strategy family's marks.

    Attributes:
        shape: Shape of the marks.
        full_and_quiet_light_colours: Colours on light pages: for the chosen strategy, and for all others.
        full_and_quiet_dark_colours: The same on dark pages.
    """

    shape: str
    full_and_quiet_light_colours: tuple[str, str]
    full_and_quiet_dark_colours: tuple[str, str]


@dataclass(frozen=True)
class Mark:
    """A strategy's mark: hue and shape follow from its family, filling and dashes from its number in it."""

    family: str
    index: int

    @property
    def family_shape(self) -> str:
        return FAMILIES[self.family].shape

    @property
    def mark_filling(self) -> str:
        """Filling of a mark next to a name or dashes: `full`, `open` or `half`.

        Three fillings suffice there, because the name or the dashes also tell strategies apart.
        """
        return list(FILLS)[self.index % 3]

    @property
    def line_dash_pattern(self) -> str:
        """Dash pattern of the strategy's lines in SVG's notation. Empty for a solid line."""
        return DASHES[self.index % len(DASHES)]

    @property
    def shape_and_filling(self) -> str:
        """Shape and filling of the mark if nothing else tells strategies apart: `square open`."""
        return f"{self.family_shape} {list(FILLS)[self.index % len(FILLS)]}"

    @property
    def colour_css_variable(self) -> str:
        """Name of the CSS variable of the family's colour, without leading dashes."""
        return self.family.replace(" ", "-")


#: Background colours of the light and the dark theme.
LIGHT_PAPER, DARK_PAPER = "#ffffff", "#15181d"
FAMILIES = {
    "alone": Hue("circle", ("#71777e", "#8a8e91"), ("#9e9e9e", "#6b6b6a")),
    "replicas": Hue("square", ("#1966c1", "#6d8fbe"), ("#528be6", "#516c96")),
    "shards": Hue("diamond", ("#c13815", "#c17c6b"), ("#cc6a38", "#8e604a")),
    "splits": Hue("up", ("#511c72", "#9c84b1"), ("#a9a9fa", "#67678c")),
    "own weights": Hue("hexagon", ("#8e3889", "#ac7fa7"), ("#ad68a9", "#81607e")),
    "averaging servers": Hue("down", ("#03783f", "#6d9779"), ("#8dc067", "#5a714a")),
    "servers": Hue("right", ("#653500", "#a48873"), ("#f7d96d", "#766a3c")),
    "engines": Hue("star", ("#185451", "#789290"), ("#8dcecf", "#537070")),
    "other": Hue("cross", ("#272622", "#8e8d8b"), ("#eae8e2", "#6b6b68")),
}
#: The filled part of a mark of radius 1 around 0, by filling, as boxes (left, top, width, height).
FILLS = {
    "full": ((-2, -2, 4, 4),),
    "open": (),
    "half": ((-2, -2, 2, 4),),
    "bar": ((-0.3, -2, 0.6, 4),),
    "sides": ((-2, -2, 1.65, 4), (0.35, -2, 1.65, 4)),
    "upper": ((-2, -2, 4, 2),),
    "right": ((0, -2, 2, 4),),
    "lower": ((-2, 0, 4, 2),),
    "dot": ((-0.4, -0.4, 0.8, 0.8),),
}
#: Dash patterns of lines. Member i of a family has filling i % 3 and pattern i % 5, so fifteen differ.
DASHES = ("", "6 3", "2 2.5", "9 3 2 3", "12 4")


def create_mark(family: str, number_in_family: int) -> Mark:
    """Return the mark of a family's strategy with a number. An unknown family becomes `other`."""
    known = family if family in FAMILIES else "other"
    return Mark(known, number_in_family)


@cache
def number_strategies_in_each_family() -> dict[str, dict[str, int]]:
    """Return the number of each registered strategy in its family, by family and strategy.

    A strategy without a declared number gets the next free one.
    """
    members: dict[str, dict[str, int]] = {}
    for name in sorted(REGISTRY, key=lambda name: get_strategy_class(name).mark is None):
        kind = get_strategy_class(name)
        family = members.setdefault(kind.family, {})
        family[name] = find_next_member_number(family) if kind.mark is None else kind.mark
    return members


def find_next_member_number(family: dict[str, int]) -> int:
    """Return the smallest number above the numbers of all strategies of a family."""
    return max(family.values(), default=-1) + 1


def assign_marks_by_strategy(names: Iterable[tuple[str, str | None]]) -> dict[str, Mark]:
    """Return the mark of every strategy of a study, by strategy.

    Registered strategies have the same mark in every study. Variants are further members of their base
    strategy's family, in alphabetical order, or of `other` if the base strategy is unknown.

    Args:
        names: Pairs of a strategy or variant and its base strategy.
    """
    taken = {
        family: find_next_member_number(members)
        for family, members in number_strategies_in_each_family().items()
    }
    marks = {}
    for name, base in sorted(dict(names).items()):
        if name in REGISTRY:
            family = get_strategy_class(name).family
            marks[name] = create_mark(family, number_strategies_in_each_family()[family][name])
        else:
            family = get_strategy_class(base).family if base in REGISTRY else "other"
            marks[name] = create_mark(family, taken.get(family, 0))
            taken[family] = taken.get(family, 0) + 1
    return marks


#: Corners of marks that are polygons, for radius 1 around 0.
_CORNERS = {
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "diamond": ((0, -1.2), (1.1, 0), (0, 1.2), (-1.1, 0)),
    "up": ((0, -1.1), (1.1, 0.85), (-1.1, 0.85)),
    "down": ((0, 1.1), (1.1, -0.85), (-1.1, -0.85)),
    "right": ((1.2, 0), (-0.8, 1.1), (-0.8, -1.1)),
}
#: Marks with corners around a centre: number of corners, and their alternating distances from the centre.
_RINGS = {"hexagon": (6, (1.1, 1.1)), "star": (10, (1.35, 0.58)), "cross": (8, (1.25, 0.55))}


def compute_shape_corners(shape: str) -> list[tuple[float, float]]:
    """Return the corners of a shape of radius 1 around 0, with y downwards. Empty for a circle."""
    if shape in _RINGS:
        count, far = _RINGS[shape]
        turn = math.pi / 4 if shape == "cross" else 0.0
        angles = [2 * math.pi * i / count + turn for i in range(count)]
        return [
            (far[i % 2] * math.sin(angle), -far[i % 2] * math.cos(angle))
            for i, angle in enumerate(angles)
        ]
    return list(_CORNERS.get(shape, ()))


def build_svg_outline_path(shape: str, x: float, y: float, radius: float) -> str:
    """Return the `d` attribute of an SVG path that draws a shape around (x, y)."""
    if shape == "circle":
        r, across = f"{radius:.1f}", f"{2 * radius:.1f}"
        return f"M{x - radius:.1f},{y:.1f}a{r},{r} 0 1,0 {across},0a{r},{r} 0 1,0 -{across},0Z"
    points = (
        f"{x + dx * radius:.1f},{y + dy * radius:.1f}" for dx, dy in compute_shape_corners(shape)
    )
    return f"M{'L'.join(points)}Z"


def format_family_css_variables(for_dark_pages: bool) -> str:
    """Return the families' colours as CSS variables: `--replicas` (full) and `--replicas-q` (quiet)."""
    declarations = []
    for name, hue in FAMILIES.items():
        variable = f"--{name.replace(' ', '-')}"
        full, quiet = (
            hue.full_and_quiet_dark_colours if for_dark_pages else hue.full_and_quiet_light_colours
        )
        declarations += [f"{variable}: {full};", f"{variable}-q: {quiet};"]
    return " ".join(declarations)
