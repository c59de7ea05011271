"""The extension `links`: how fast links between workers are, measured."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="how fast links between workers are, measured",
    rules=("links.smk",),
)
