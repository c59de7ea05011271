"""Before Snakemake starts cells: what has finished without its notice stays."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratbench import record


def keep_finished(workflow: Any, planned: Sequence[Any]) -> None:
    """Where `planned` cells have finished, have Snakemake note it, and start it again.

    It takes the record of a cell during which it was killed for cut off, and would delete it; but a
    record is there whole or not at all. What has finished since it was planned need not be planned.
    Does nothing, and returns, where there is neither. `workflow` and the jobs are Snakemake's.
    """
    there = [job for job in planned if all(Path(path).exists() for path in job.output)]
    late = [job for job in there if workflow.dag.reason(job).missing_output]
    kept = [
        job
        for job in there
        if workflow.async_run(workflow.persistence.incomplete(job))
        and is_record_of(job.output.record, job.params.cell, job.params.settings)
    ]
    for job in kept:
        workflow.async_run(workflow.persistence.finished(job))
        print(f"finished when snakemake was killed, and kept: {job.output.record}", file=sys.stderr)
    if kept or late:
        restart(workflow)


def is_record_of(path: str | Path, cell: str, settings: str) -> bool:
    """Whether there is a valid record of this cell by these settings, both as JSON."""
    try:
        found = record.read(path)
    except (OSError, record.RecordError):
        return False
    return found["cell"] == json.loads(cell) and found["settings"] == json.loads(settings)


def restart(workflow: Any) -> None:
    """Start Snakemake again in this process's place: it plans by what is there now."""
    workflow.persistence.unlock()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "snakemake", *sys.argv[1:]])
