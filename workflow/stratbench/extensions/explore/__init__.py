"""The extension `explore`: an interactive page on which to browse cells."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="a page to browse cells",
    rule_files=("explore.smk",),
    report_additions="stratbench.extensions.explore.explore:READING",
)
