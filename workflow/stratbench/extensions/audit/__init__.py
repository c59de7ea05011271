"""The extension `audit`: which figures not to believe."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="which figures not to believe",
    rules=("audit.smk",),
    reading="stratbench.extensions.audit.section:READING",
)
