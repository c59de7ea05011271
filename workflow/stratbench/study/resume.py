"""Before Snakemake starts cells: keeps records that are finished, and not those of other data."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratbench.cell import record
from stratbench.cell.settings import Settings
from stratbench.study import snakemake_internals as internals

#: The data sets that `forget_other_data` has reported.
_told: set[str] = set()


def keep_finished(workflow: Any, jobs: Sequence[Any]) -> None:
    """Make Snakemake record the finished training `jobs`, or restart it.

    If Snakemake was killed while a cell trained, it regards the cell's record as incomplete and would delete
    it. But a record is always written completely. Snakemake does not know the settings of a cell that
    finished on SLURM meanwhile, and would keep it when they change. If all is recorded, this does nothing and
    returns. `workflow` and the jobs are Snakemake's.
    """
    again = False
    for job in jobs:
        if not all(Path(path).exists() for path in job.output):
            continue
        planned = internals.is_planned(workflow, job)
        # Finished since it was planned: whatever it is, it need not be planned.
        again |= planned and internals.lacks_output(workflow, job)
        cut_off = planned and internals.is_cut_off(workflow, job)
        unknown = not planned and not internals.is_known(workflow, job)
        if (cut_off or unknown) and record.is_of(
            job.output.record, job.params.cell, job.params.settings
        ):
            internals.note_finished(workflow, job)
            if cut_off:
                again = True
                print(f"finished as snakemake was killed: {job.output.record}", file=sys.stderr)
    if again:
        internals.restart(workflow)


def forget_other_data(workflow: Any, path: Path, wanted: Settings) -> None:
    """Have Snakemake make a file again if its data differ from `wanted`.

    Snakemake does so by itself if it remembers the settings. It does not in a copy of the folder, or if
    another folder with the same results has made the file since. Called as it plans the job, also in a dry
    run.

    Args:
        workflow: Snakemake's.
        path: The record or the block's result.
        wanted: Settings of the config.
    """
    if wanted.data_spec is None or internals.is_forced(workflow, str(path)):
        return
    try:
        made = json.loads(path.read_bytes())
        trained = made["trained"].values() if "trained" in made else [made["settings"]]
        others = any(s["data_spec"] != wanted.data_spec for s in trained)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # missing or unreadable, which its reader reports
    if others:
        internals.force(workflow, str(path))
        if wanted.dataset not in _told:
            _told.add(wanted.dataset)
            print(
                f"{path}, and what else was not trained on what the config now calls {wanted.dataset!r}, or "
                "does not say on what, is made again",
                file=sys.stderr,
            )
