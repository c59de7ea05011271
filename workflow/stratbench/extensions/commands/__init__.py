"""The extension `commands`: a trainer of the user's own as a strategy."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="a trainer of the user's own as a strategy",
    needs=("audit",),
    strategies={
        "command": "stratbench.strategies.command:Command",
    },
    runner="stratbench.train.commands.runner:CommandRunner",
    judge="stratbench.analysis.records.same_work:judge_same_work",
    audited=("stratbench.analysis.audit.commands",),
    reading="stratbench.analysis.records.same_work:READING",
)
