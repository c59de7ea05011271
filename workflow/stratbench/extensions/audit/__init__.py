"""The extension `audit`: finds measured values that should not be trusted."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="which figures not to believe",
    rules=("audit.smk",),
    reading="stratbench.extensions.audit.section:READING",
)
