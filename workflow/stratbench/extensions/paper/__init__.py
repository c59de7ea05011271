"""The extension `paper`: the published tables and claims beside a study's own."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="the published tables and claims beside a study's own",
    needs=("audit",),
    rules=("paper.smk",),
    reading="stratbench.extensions.paper.section:READING",
)
