"""The extension `commands`: trains cells by a command of the user, as a strategy."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="a trainer of the user's own as a strategy",
    needs=("audit",),
    strategies={
        "command": "stratbench.extensions.commands.strategy:Command",
    },
    runner="stratbench.extensions.commands.runner:CommandRunner",
    judge="stratbench.extensions.commands.same_work:judge_same_work",
    audited=("stratbench.extensions.commands.audit_rules",),
    reading="stratbench.extensions.commands.same_work:READING",
    columns="stratbench.extensions.commands.columns:COLUMNS",
)
