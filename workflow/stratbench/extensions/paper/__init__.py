"""The extension `paper`: compares a study with the tables and claims of the paper."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="a comparison of a study with the tables and claims of the paper",
    needs=("audit",),
    rules=("paper.smk",),
    reading="stratbench.extensions.paper.section:READING",
)
