"""The extension `explore`: an interactive page on which to browse cells."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="a page to browse cells",
    rules=("explore.smk",),
    reading="stratbench.extensions.explore.explore:READING",
)
