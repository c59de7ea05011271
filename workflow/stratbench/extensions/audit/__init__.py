"""The extension `audit`: finds measured values that should not be trusted."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="which figures not to believe",
    rule_files=("audit.smk",),
    report_additions="stratbench.extensions.audit.section:READING",
)
