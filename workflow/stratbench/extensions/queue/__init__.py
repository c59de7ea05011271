"""The extension `queue`: predicts the time to a result including the wait in the cluster's queue."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="time to a result with the cluster's queue in it",
    keys={"decide": "stratbench.extensions.queue.request:DecideQueue"},
    rules=("queue.smk",),
    reading="stratbench.extensions.queue.evidence:READING",
)
