"""The extension `queue`: time to a result with the cluster's queue in it."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="time to a result with the cluster's queue in it",
    keys={"decide": "stratbench.extensions.queue.request:DecideQueue"},
    rules=("queue.smk",),
    reading="stratbench.extensions.queue.evidence:READING",
)
