"""Reads the figures of a study for a page, with their captions and embedded files."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stratbench.analysis.figures.figure_list import INDEX


def build_data_uri(svg: bytes) -> str:
    """Return an SVG as a data URI. An image from a data URI can neither load nor run anything."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def iter_shown_figures(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the entry of each figure in a folder. Its `uri` is the figure itself as a data URI."""
    index = folder / INDEX
    if not index.exists():
        return
    for figure in json.loads(index.read_text(encoding="utf-8")):
        path = folder / figure["file"]
        if path.exists():
            yield figure | {"uri": build_data_uri(path.read_bytes())}
