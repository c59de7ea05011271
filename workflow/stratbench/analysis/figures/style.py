"""The style of each strategy in all figures: a colour, a marker, a hatch and a line.

Each strategy states its family, and a family shares a hue. The hues are Okabe and Ito's, which people
with colour-blindness can distinguish. Within a family shades differ, and marker and hatch carry the same
information in black and white.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from stratbench.strategies import REGISTRY, strategy_class

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Style:
    """Colour (hex), marker, hatch and line style of one strategy."""

    colour: str
    marker: str
    hatch: str
    line: str = "-"


GREY, BLACK = "#6b6b6b", "#000000"
ORANGE, GREEN = "#e69f00", "#009e73"
BLUE, VERMILLION, PURPLE, INDIGO = "#0072b2", "#d55e00", "#cc79a7", "#4b0082"

#: The hue of each family, and the index at which its marks begin in the lists below: the first members of
#: two families have different markers.
FAMILIES = {
    "alone": (GREY, 13),
    "replicas": (BLUE, 0),
    "shards": (VERMILLION, 1),
    "splits": (INDIGO, 5),
    "own weights": (PURPLE, 8),
    "averaging servers": (GREEN, 2),
    "servers": (ORANGE, 3),
    "other": (BLACK, 10),
}

#: Muted colours for other things than strategies (phases of a step, workers of a cell).
TEAL, DEEP_TEAL, PETROL = "#a5c0bd", "#5f9a94", "#2b4a52"
ROSE, WINE, BROWN, SAND, PALE = "#e0a8a0", "#7d2b4b", "#6b4a2b", "#d2bf9b", "#dcdcdc"
#: Colours for the values of other columns than the strategy, used in turn.
FURTHER_COLOURS = (BLUE, ORANGE, GREEN, WINE, PURPLE, PETROL, VERMILLION, DEEP_TEAL, BROWN, GREY)

#: Used in turn: the lengths are such that two strategies of a family share at most one of these three.
MARKERS = "os^vXDP<>ph*dH8"
_HATCHES = ("", "////", "....", "xxxx", "----", "||||", "++++", "oooo", "\\\\\\\\", "**", "//..")
_LINES = ("-", "--", "-.", ":")
#: How far the members of a family are from its hue: above 0 towards white, below towards black.
_SHADES = (0.0, 0.45, -0.4, 0.7)


def _mixed(colour: str, other: float, share: float) -> str:
    """A colour (hex) with a share of black (`other` 0) or white (1)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return "#" + "".join(f"{round(255 * (c + (other - c) * share)):02x}" for c in parts)


def lightened(colour: str, share: float) -> str:
    """`colour` mixed with white; `share` 0 leaves it unchanged, 1 gives white."""
    return _mixed(colour, 1.0, share)


def shaded(colour: str, share: float) -> str:
    """`colour` mixed with white, or with black if `share` is below 0."""
    return lightened(colour, share) if share >= 0 else _mixed(colour, 0.0, -share)


def style_of(family: str, index: int) -> Style:
    """The style of the `index`-th strategy of a family."""
    hue, first = FAMILIES[family]
    return Style(
        shaded(hue, _SHADES[index % len(_SHADES)]),
        MARKERS[(first + index) % len(MARKERS)],
        _HATCHES[(first + index) % len(_HATCHES)],
        _LINES[index % len(_LINES)],
    )


@cache
def _families() -> dict[str, list[str]]:
    """The registered strategies of each family, in the registry's order."""
    found: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for name in REGISTRY:
        found[strategy_class(name).family].append(name)
    return found


def known_styles() -> dict[str, Style]:
    """The style of every registered strategy."""
    return {
        name: style_of(family, index)
        for family, names in _families().items()
        for index, name in enumerate(names)
    }


def styles_by_strategy(names: Iterable[tuple[str, str | None]]) -> dict[str, Style]:
    """The style of every strategy in a study, from pairs of its name and its base strategy.

    Registered strategies look the same in every study. Variants are further members of their strategy's
    family (`other` if that is unknown), in alphabetical order.
    """
    bases, known = dict(sorted(names)), known_styles()
    found = {name: known[name] for name in bases if name in known}
    used = {family: len(members) for family, members in _families().items()}
    for name, base in bases.items():
        if name not in known:
            family = strategy_class(base).family if base in REGISTRY else "other"
            found[name] = style_of(family, used[family])
            used[family] += 1
    return found


def styles_of(cells: pd.DataFrame, also: Iterable[str] = ()) -> dict[str, Style]:
    """The style of every strategy in rows of cells.csv, and of those in `also`."""
    bases = cells.groupby("strategy")["strategy_base"].first()
    known = {str(name): base for name, base in bases.items() if isinstance(base, str)}
    return styles_by_strategy((name, known.get(name)) for name in {*map(str, bases.index), *also})


#: Matplotlib settings of every figure. With a fixed hash salt and no date, the same records give the
#: same file.
RC: dict[str, Any] = {
    "svg.hashsalt": "stratbench",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "text.parse_math": False,  # names in records are not formulas
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titley": 1.0,  # where it is anyway: else Matplotlib looks in each drawing what it might hit
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.5,
    "figure.dpi": 160,  # the same as in saved files: the width of text depends on the resolution
    "savefig.dpi": 160,
}
