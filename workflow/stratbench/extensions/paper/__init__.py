"""The extension `paper`: compares a study with the tables and claims of a published paper."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="a comparison of a study with the tables and claims of the paper",
    required_extensions=("audit",),
    rule_files=("paper.smk",),
    report_additions="stratbench.extensions.paper.section:READING",
)
