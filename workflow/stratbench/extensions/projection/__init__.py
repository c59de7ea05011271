"""The extension `projection`: step times on counts of workers that nobody has measured."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="step times on counts of workers that nobody has measured",
    needs=("plan", "links"),
    rules=("projection.smk",),
)
