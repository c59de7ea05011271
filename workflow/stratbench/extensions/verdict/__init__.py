"""The extension `verdict`: which strategy is fastest, by paired blocks."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="which strategy is fastest, by paired blocks",
    needs=("audit", "plan"),
    rules=("verdict.smk",),
)
