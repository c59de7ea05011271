"""Marks of strategies: a family has a hue and a shape, and its members differ by filling and dashes.

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
    """The mark's shape for a strategy family, and its (full, quiet) colours on light and dark pages."""

    shape: str
    light_theme_colours: tuple[str, str]
    dark_theme_colours: tuple[str, str]


@dataclass(frozen=True)
class Mark:
    """A strategy's mark. The family determines hue and shape, the member's number filling and dashes."""

    family: str
    index: int

    @property
    def shape(self) -> str:
        return FAMILIES[self.family].shape

    @property
    def fill(self) -> str:
        """Filling of the mark in figures with names and dashes: `full`, `open` or `half`."""
        return list(FILLS)[self.index % 3]

    @property
    def dash_pattern(self) -> str:
        """Lengths of dashes and gaps in SVG's notation; empty for a solid line."""
        return DASHES[self.index % len(DASHES)]

    @property
    def standalone_style(self) -> str:
        """Shape and filling of a mark without a name or line next to it."""
        return f"{self.shape} {list(FILLS)[self.index % len(FILLS)]}"

    @property
    def css_variable(self) -> str:
        """The CSS variable of the family's colour, without leading dashes."""
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
#: Boxes (left, top, width, height) of a shape that are filled, for a mark of radius 1 around 0.
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
#: Dashes of lines. Member i of a family has filling i % 3 and DASHES[i % 5], so fifteen members differ.
DASHES = ("", "6 3", "2 2.5", "9 3 2 3", "12 4")


def create_mark(family: str, index: int) -> Mark:
    """Return the mark of the `index`-th strategy of a family; an unknown family becomes `other`."""
    known = family if family in FAMILIES else "other"
    return Mark(known, index)


@cache
def number_family_members() -> dict[str, dict[str, int]]:
    """Return the number of each registered strategy in its family.

    A strategy without a declared number gets the next free one.
    """
    members: dict[str, dict[str, int]] = {}
    for name in sorted(REGISTRY, key=lambda name: get_strategy_class(name).mark is None):
        kind = get_strategy_class(name)
        family = members.setdefault(kind.family, {})
        family[name] = find_next_free_number(family) if kind.mark is None else kind.mark
    return members


def find_next_free_number(family: dict[str, int]) -> int:
    """Return the smallest number above all numbers of a family."""
    return max(family.values(), default=-1) + 1


def assign_marks_by_strategy(names: Iterable[tuple[str, str | None]]) -> dict[str, Mark]:
    """Return the mark of every strategy of a study.

    Registered strategies have the same mark in every study. Variants are further members of their base
    strategy's family, in alphabetical order, or of `other` if the base strategy is unknown.

    Args:
        names: Pairs of a strategy or variant and its base strategy.
    """
    taken = {
        family: find_next_free_number(members)
        for family, members in number_family_members().items()
    }
    marks = {}
    for name, base in sorted(dict(names).items()):
        if name in REGISTRY:
            family = get_strategy_class(name).family
            marks[name] = create_mark(family, number_family_members()[family][name])
        else:
            family = get_strategy_class(base).family if base in REGISTRY else "other"
            marks[name] = create_mark(family, taken.get(family, 0))
            taken[family] = taken.get(family, 0) + 1
    return marks


#: Corners of each polygon of radius 1 around 0.
_CORNERS = {
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "diamond": ((0, -1.2), (1.1, 0), (0, 1.2), (-1.1, 0)),
    "up": ((0, -1.1), (1.1, 0.85), (-1.1, 0.85)),
    "down": ((0, 1.1), (1.1, -0.85), (-1.1, -0.85)),
    "right": ((1.2, 0), (-0.8, 1.1), (-0.8, -1.1)),
}
#: Shapes with corners on a ring: the number of corners, and their alternating distances from the centre.
_RINGS = {"hexagon": (6, (1.1, 1.1)), "star": (10, (1.35, 0.58)), "cross": (8, (1.25, 0.55))}


def compute_shape_corners(shape: str) -> list[tuple[float, float]]:
    """Return the corners of a shape of radius 1 around 0, with y downwards. None for a circle."""
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


def format_css_variables(dark: bool) -> str:
    """Return the colours of all families as CSS variables: `--replicas` (full) and `--replicas-q` (quiet)."""
    declarations = []
    for name, hue in FAMILIES.items():
        variable = f"--{name.replace(' ', '-')}"
        full, quiet = hue.dark_theme_colours if dark else hue.light_theme_colours
        declarations += [f"{variable}: {full};", f"{variable}-q: {quiet};"]
    return " ".join(declarations)
