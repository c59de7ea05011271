"""The extension `compression`: gradients sent in fewer bytes."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="gradients sent in fewer bytes",
)
