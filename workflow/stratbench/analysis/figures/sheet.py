"""The common style of all figures: width, fonts and colours, and how figures are saved.

A figure has no title, legend or footer, which the page or the paper adds. It is drawn in the colours of the
light theme. The SVG uses a CSS variable with two values per colour, so that the file follows the reader's
theme. PNG and PDF are for print.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from fontTools import subset
from matplotlib.figure import Figure

from stratbench.analysis.figures.marks import DARK_PAPER, FAMILIES, LIGHT_PAPER, Mark
from stratbench.cell.files import replace_file_atomically

# The backend Agg draws without a display.
matplotlib.use("Agg")
#: The width of every figure in CSS pixels of 1/96 inch; a page shows three in a row.
WIDTH = 372
#: The size of a CSS pixel in points.
PX = 72 / 96
#: Font size and line height in pixels.
TEXT, LINE_HEIGHT = 12, 15

#: The colours of texts and lines by name, in the light and in the dark theme.
THEME = {
    "paper": (LIGHT_PAPER, DARK_PAPER),
    "ink": ("#17191c", "#e8eaed"),
    "muted": ("#5a626b", "#a3acb6"),
    "line": ("#e6e9ec", "#2a3037"),
    "rule": ("#c9ced4", "#454d57"),
    "band": ("#dfe8f3", "#24344a"),
    "bad": ("#b3261e", "#f28b82"),
    # Colours of the phases of a step; a deliberate slowdown has the colour `bad`.
    "work-1": ("#8a9199", "#727a82"),
    "work-2": ("#565f68", "#a2aab2"),
    "send": ("#1966c1", "#528be6"),
    "wait": ("#b96f0c", "#d9983a"),
}
INK, MUTED, LINE, RULE, BAND, BAD, PAPER = (
    THEME[name][0] for name in ("ink", "muted", "line", "rule", "band", "bad", "paper")
)

#: The style of every figure. A fixed salt for ids and no date make files reproducible.
RC: Any = {
    "svg.hashsalt": "stratbench",
    "svg.fonttype": "none",  # keeps text as text, shown in the reader's font
    "pdf.fonttype": 42,  # embeds TrueType fonts, which publishers require
    "font.family": "DejaVu Sans",
    "font.size": TEXT * PX,
    "text.color": INK,
    "text.parse_math": False,  # a `$` in a name must not start a formula
    "lines.scale_dashes": False,
    "lines.solid_capstyle": "butt",
    "lines.solid_joinstyle": "round",
    "lines.dash_capstyle": "butt",
    "lines.linewidth": PX,
    "figure.dpi": 96,
    "figure.facecolor": "none",
    "savefig.dpi": 192,
    "axes.facecolor": "none",
    "axes.edgecolor": RULE,
    "axes.linewidth": PX,
    "axes.labelcolor": MUTED,
    "axes.labelsize": TEXT * PX,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": PX,
    "xtick.color": RULE,
    "xtick.labelcolor": MUTED,
    "xtick.labelsize": TEXT * PX,
    "xtick.major.size": 4 * PX,
    "xtick.major.width": PX,
    "ytick.labelcolor": MUTED,
    "ytick.labelsize": TEXT * PX,
    "ytick.left": False,
    "legend.frameon": False,
    "legend.labelcolor": MUTED,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0,
    "legend.columnspacing": 1,
    "legend.handleheight": 0.9,
    "legend.handlelength": 0.9,
    "legend.handletextpad": 0.4,
    "legend.labelspacing": 0.25,
}
#: Matplotlib markers by the shape of a family.
MARKERS = {
    "circle": "o", "square": "s", "diamond": "D", "up": "^", "down": "v", "right": ">",
    "hexagon": "h", "star": "*", "cross": "X",
}  # fmt: skip


def choose_mark_colour(mark: Mark, is_chosen: bool) -> str:
    """Return the colour of a strategy's mark: full if the strategy is chosen, else quiet."""
    return FAMILIES[mark.family].full_and_quiet_light_colours[0 if is_chosen else 1]


def map_light_colours_to_variable_and_dark() -> dict[str, tuple[str, str]]:
    """Return the CSS variable and the dark-theme colour for each light-theme colour of figures."""
    known = {light: (name, dark) for name, (light, dark) in THEME.items()}
    for name, hue in FAMILIES.items():
        variable = name.replace(" ", "-")
        known[hue.full_and_quiet_light_colours[0]] = variable, hue.full_and_quiet_dark_colours[0]
        known[hue.full_and_quiet_light_colours[1]] = (
            f"{variable}-q",
            hue.full_and_quiet_dark_colours[1],
        )
    return known


def apply_theme_variables(svg: str) -> str:
    """Return an SVG with a size in pixels. Its colours follow the page's theme."""
    known = map_light_colours_to_variable_and_dark()
    used = sorted({c for c in re.findall(r"#[0-9a-f]{6}\b", svg) if c in known})
    svg = re.sub(
        r"#[0-9a-f]{6}\b", lambda m: f"var(--{known[m[0]][0]})" if m[0] in known else m[0], svg
    )
    svg = re.sub(
        r'(width|height)="([\d.]+)pt"', lambda m: f'{m[1]}="{float(m[2]) / PX:g}"', svg, count=2
    )
    light = "".join(f"--{known[c][0]}:{c};" for c in used)
    dark = "".join(f"--{known[c][0]}:{known[c][1]};" for c in used)
    style = (
        f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,"
        "sans-serif!important;font-variant-numeric:tabular-nums}</style>"
    )
    return re.sub(r"(<svg[^>]*>)", lambda m: m[1] + style, svg, count=1)


#: File formats of a figure, with metadata to omit so that equal figures have equal bytes.
FORMATS: dict[str, dict[str, None]] = {
    ".svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Producer": None},
}


#: Tables of a font by which programs arrange text. A PDF has the place of each glyph, and needs none of them.
LAYOUT_TABLES = ("GDEF", "GPOS", "GSUB")


@contextmanager
def embed_fonts_without_layout() -> Iterator[None]:
    """Have Matplotlib embed fonts in PDFs without their LAYOUT_TABLES.

    Reducing these tables to the used glyphs would take a third of the time of a figure.
    """
    load_font = subset.load_font

    def load_font_without_layout(*args: Any, **kwargs: Any) -> Any:
        font = load_font(*args, **kwargs)
        for table in LAYOUT_TABLES:
            if table in font:
                del font[table]
        return font

    subset.load_font = load_font_without_layout
    try:
        yield
    finally:
        subset.load_font = load_font


def save_figure(figure: Figure, stem: Path) -> None:
    """Save the figure in all FORMATS, and close it. The SVG has both themes; other formats are white."""
    for suffix, metadata in FORMATS.items():
        saved = replace_file_atomically(stem.with_suffix(suffix))
        with embed_fonts_without_layout(), saved as unfinished:
            if suffix == ".svg":
                Path(unfinished).write_text(render_svg(figure), encoding="utf-8")
            else:
                figure.savefig(unfinished, metadata=metadata, facecolor=PAPER, format=suffix[1:])
    plt.close(figure)


def render_svg(figure: Figure) -> str:
    """Return the figure as a transparent SVG that follows the reader's theme; close the figure."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata=FORMATS[".svg"], transparent=True)
    plt.close(figure)
    return shorten_svg(apply_theme_variables(out.getvalue()))


def shorten_svg(svg: str) -> str:
    """Return a shorter SVG: without comments, and with at most two decimals in coordinates."""
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]+>", lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), svg)
    return re.sub(r"\s+", " ", svg)
