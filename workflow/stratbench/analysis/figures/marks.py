"""The mark of each strategy: a family has a hue and a shape, its members differ by filling and dash.

`full` is for the chosen strategy and for names, `quiet` for all others: the same hue at half its chroma.
A test computes that full colours have a contrast of 4.5 : 1 with the paper and quiet ones 3 : 1, in both
themes, and that readers with colour-blindness can tell the families' hues apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from stratbench.strategies import REGISTRY, strategy_class


@dataclass(frozen=True)
class Hue:
    """A family's shape and colours (hex): (full, quiet) on light paper and on dark paper."""

    shape: str
    light: tuple[str, str]
    dark: tuple[str, str]


@dataclass(frozen=True)
class Mark:
    """How a strategy is drawn: its family's hue and shape, and by its number in it its filling and dash."""

    family: str
    index: int

    @property
    def shape(self) -> str:
        return FAMILIES[self.family].shape

    @property
    def fill(self) -> str:
        """`full`, `open` or `half`, for figures, in which dashes and names tell, too."""
        return list(FILLS)[self.index % 3]

    @property
    def dash(self) -> str:
        """Lengths of dashes and gaps, as SVG takes them; empty: a full line."""
        return DASHES[self.index % len(DASHES)]

    @property
    def alone(self) -> str:
        """Shape and filling, one of FILLS, for where a mark is all that there is of a strategy."""
        return f"{self.shape} {list(FILLS)[self.index % len(FILLS)]}"

    @property
    def variable(self) -> str:
        """The name of the family's colour in a page's style, without dashes before it."""
        return self.family.replace(" ", "-")


#: The papers that the colours are made for.
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
#: Fillings: the boxes (left, top, width, height; of a mark of radius 1 around 0) that are painted of a shape.
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
#: Member i of a family has in figures filling i % 3 and DASHES[i % 5]: fifteen differ.
DASHES = ("", "6 3", "2 2.5", "9 3 2 3", "12 4")


def mark_of(family: str, index: int) -> Mark:
    """The mark of the `index`-th strategy of a family; an unknown family is drawn as `other`."""
    known = family if family in FAMILIES else "other"
    return Mark(known, index)


@cache
def _members() -> dict[str, dict[str, int]]:
    """The numbers of registered strategies in each family: stated ones, then the next that are free."""
    members: dict[str, dict[str, int]] = {}
    for name in sorted(REGISTRY, key=lambda name: strategy_class(name).mark is None):
        kind = strategy_class(name)
        family = members.setdefault(kind.family, {})
        family[name] = _next_free(family) if kind.mark is None else kind.mark
    return members


def _next_free(family: dict[str, int]) -> int:
    """Return the first number behind those of a family."""
    return max(family.values(), default=-1) + 1


def marks_by_strategy(names: Iterable[tuple[str, str | None]]) -> dict[str, Mark]:
    """The mark of every strategy of a study, from pairs of its name and its base strategy.

    Registered strategies look the same in every study. Variants are further members of their strategy's
    family (`other` if that is unknown), in alphabetical order.
    """
    taken = {family: _next_free(members) for family, members in _members().items()}
    marks = {}
    for name, base in sorted(dict(names).items()):
        if name in REGISTRY:
            family = strategy_class(name).family
            marks[name] = mark_of(family, _members()[family][name])
        else:
            family = strategy_class(base).family if base in REGISTRY else "other"
            marks[name] = mark_of(family, taken.get(family, 0))
            taken[family] = taken.get(family, 0) + 1
    return marks


#: Corners of each shape, for a mark of radius 1 around 0; a circle and the rings have none.
_CORNERS = {
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "diamond": ((0, -1.2), (1.1, 0), (0, 1.2), (-1.1, 0)),
    "up": ((0, -1.1), (1.1, 0.85), (-1.1, 0.85)),
    "down": ((0, 1.1), (1.1, -0.85), (-1.1, -0.85)),
    "right": ((1.2, 0), (-0.8, 1.1), (-0.8, -1.1)),
}
#: Corners on a ring: how many, and their distances from the middle, in turn.
_RINGS = {"hexagon": (6, (1.1, 1.1)), "star": (10, (1.35, 0.58)), "cross": (8, (1.25, 0.55))}


def corners(shape: str) -> list[tuple[float, float]]:
    """The corners of a shape of radius 1 around 0, y downwards; none for a circle."""
    if shape in _RINGS:
        count, far = _RINGS[shape]
        turn = math.pi / 4 if shape == "cross" else 0.0
        angles = [2 * math.pi * i / count + turn for i in range(count)]
        return [
            (far[i % 2] * math.sin(angle), -far[i % 2] * math.cos(angle))
            for i, angle in enumerate(angles)
        ]
    return list(_CORNERS.get(shape, ()))


def outline(shape: str, x: float, y: float, radius: float) -> str:
    """The `d` of an SVG path that draws a shape around (x, y)."""
    if shape == "circle":
        r, across = f"{radius:.1f}", f"{2 * radius:.1f}"
        return f"M{x - radius:.1f},{y:.1f}a{r},{r} 0 1,0 {across},0a{r},{r} 0 1,0 -{across},0Z"
    points = (f"{x + dx * radius:.1f},{y + dy * radius:.1f}" for dx, dy in corners(shape))
    return f"M{'L'.join(points)}Z"


def css_variables(dark: bool) -> str:
    """The colours of all families as CSS variables: `--replicas` (full) and `--replicas-q` (quiet)."""
    return " ".join(
        f"--{name.replace(' ', '-')}: {full}; --{name.replace(' ', '-')}-q: {quiet};"
        for name, hue in FAMILIES.items()
        for full, quiet in (hue.dark if dark else hue.light,)
    )
