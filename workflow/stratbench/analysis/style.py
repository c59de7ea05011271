"""The style of each strategy in all figures: a colour, a marker and a hatch, fixed by its name.

The colours are Okabe and Ito's, which people with colour-blindness can tell apart; marker and hatch
carry the same information in black and white.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.colors import to_hex, to_rgb


@dataclass(frozen=True)
class Style:
    """Colour (hex), marker, hatch and line style of one strategy."""

    colour: str
    marker: str
    hatch: str
    line: str = "-"


GREY, BLACK = "#6b6b6b", "#000000"
ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILLION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"

KNOWN_STYLES = {
    "single": Style(GREY, "X", ""),
    "ddp": Style(BLUE, "o", ""),
    "fsdp": Style(VERMILLION, "s", "////"),
    "ps-sync": Style(GREEN, "^", ""),
    "ps-async": Style(ORANGE, "v", "\\\\\\\\"),
    "ps-async-modified": Style(PURPLE, "D", "xxxx"),
    "ps-dana": Style(SKY, "P", ".."),
    "ps-ormo": Style(BLUE, "H", "oooo", "--"),
    "ps-ssp": Style(YELLOW, "<", ""),
    "ps-backup": Style(GREEN, ">", "////", "--"),
    "ps-kbatch": Style(ORANGE, "p", "----", "--"),
    "ps-dcasgd": Style(SKY, "h", "xxxx", "--"),
    "ps-gap-aware": Style(PURPLE, "*", "||||", "--"),
    "ps-staleness-lr": Style(YELLOW, "d", "\\\\\\\\", "--"),
}

#: Colours of what is not a strategy (phases of a step, workers of a cell): muted, none of the above.
TEAL, DEEP_TEAL, PETROL = "#b5d3cf", "#5f9a94", "#1f4e52"
ROSE, WINE, BROWN, SAND, PALE = "#d9a5b3", "#7d2b4b", "#6b4a2b", "#d2bf9b", "#dcdcdc"

_MARKERS = "d<>ph*8HPX^vDso"
_HATCHES = ("..", "xxxx", "----", "||||", "++++", "oooo", "\\\\\\\\", "////")
_LINES = ("--", ":", "-.")


def lightened(colour: str, share: float) -> str:
    """`colour` mixed with white; `share` 0 leaves it, 1 is white."""
    return to_hex([c + (1 - c) * share for c in to_rgb(colour)])


def variant_style(base: Style, index: int) -> Style:
    """Style of a strategy's `index`-th variant: its colour lightened, with other marks."""
    return Style(
        lightened(base.colour, (0.45, 0.25, 0.6)[index % 3]),
        _MARKERS[index % len(_MARKERS)],
        _HATCHES[index % len(_HATCHES)],
        _LINES[index % len(_LINES)],
    )


def styles_by_strategy(names: Iterable[tuple[str, str | None]]) -> dict[str, Style]:
    """The style of every strategy of a study, from pairs of its name and the strategy it is one of.

    Known names look the same in every study. Others take the colour of what they are a variant of
    (black where unknown) and the next free marks, in alphabetical order.
    """
    bases = dict(sorted(names))
    found = {name: KNOWN_STYLES[name] for name in bases if name in KNOWN_STYLES}
    used: dict[str | None, int] = {}
    for name, base in bases.items():
        if name in KNOWN_STYLES:
            continue
        index = used.get(base, 0)
        used[base] = index + 1
        found[name] = variant_style(KNOWN_STYLES.get(base or "", Style(BLACK, "o", "")), index)
    return found


#: Matplotlib settings of every figure. Fixed hash salt and no date: the same records, the same
#: file.
RC: dict[str, Any] = {
    "svg.hashsalt": "stratbench",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "text.parse_math": False,  # names from records are no formulas
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
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
    "figure.dpi": 160,  # as saved: text is not exactly as wide at another resolution
    "savefig.dpi": 160,
}
