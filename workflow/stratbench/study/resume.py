"""Before Snakemake starts cells: keeps records that it does not know to be finished."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratbench.cell import record


def keep_finished(workflow: Any, jobs: Sequence[Any]) -> None:
    """Makes Snakemake note the finished training `jobs`; starts it anew if it would train one again.

    If Snakemake was killed while a cell trained, it takes the cell's record for incomplete and would
    delete it; but a record is always written as a whole. A cell that finished on SLURM meanwhile counts
    as finished with unknown settings: Snakemake would keep it when the settings change. Does nothing,
    and returns, if all is noted. `workflow` and the jobs are Snakemake's.
    """
    dag, persistence = workflow.dag, workflow.persistence
    again = False
    for job in jobs:
        if not all(Path(path).exists() for path in job.output):
            continue
        planned = dag.needrun(job)
        # Finished since it was planned: whatever it is, it need not be planned.
        again |= planned and bool(dag.reason(job).missing_output)
        cut_off = planned and bool(workflow.async_run(persistence.incomplete(job)))
        unknown = not planned and not persistence.has_metadata(job)
        if (cut_off or unknown) and record.is_of(
            job.output.record, job.params.cell, job.params.settings
        ):
            workflow.async_run(persistence.finished(job))
            if cut_off:
                again = True
                print(f"finished as snakemake was killed: {job.output.record}", file=sys.stderr)
    if again:
        restart(workflow)


def restart(workflow: Any) -> None:
    """Starts Snakemake again in this process's place: it plans by the files that now exist."""
    workflow.persistence.unlock()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "snakemake", *sys.argv[1:]])
