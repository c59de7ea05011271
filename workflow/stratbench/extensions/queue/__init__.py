"""The extension `queue`: predicts a training's time including its wait in the cluster's queue."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="time to a result with the cluster's queue in it",
    keys={"decide": "stratbench.extensions.queue.request:DecideQueue"},
    rule_files=("queue.smk",),
    report_additions="stratbench.extensions.queue.evidence:READING",
)
