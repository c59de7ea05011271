"""The extension `commands`: trains cells by a command of the user, as a strategy."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="a trainer of the user's own as a strategy",
    required_extensions=("audit",),
    strategies={
        "command": "stratbench.extensions.commands.strategy:Command",
    },
    runner_class="stratbench.extensions.commands.runner:CommandRunner",
    modify_cell_rows="stratbench.extensions.commands.same_work:set_same_work_column",
    audit_modules=("stratbench.extensions.commands.audit_rules",),
    report_additions="stratbench.extensions.commands.same_work:READING",
    columns="stratbench.extensions.commands.columns:COLUMNS",
)
