"""Decides, before Snakemake starts training, which existing records are kept and which are made again."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratbench.cell import record
from stratbench.cell.settings import Settings
from stratbench.study import snakemake_internals as internals

#: Names of data sets on which `retrain_results_of_changed_data` has already printed its message.
_told: set[str] = set()


def report_finished_jobs(workflow: Any, jobs: Sequence[Any]) -> None:
    """Tell Snakemake which jobs have finished without its knowledge, and restart Snakemake if needed.

    If Snakemake was killed while a cell trained, it regards the cell's record as incomplete and would delete
    it, although a record is always complete. Snakemake does not know the settings of a cell that finished on
    SLURM in the meantime, and would keep its record if they change. The function returns at once if Snakemake
    knows all finished jobs. `workflow` and the jobs are Snakemake's.
    """
    must_restart = False
    for job in jobs:
        if not all(Path(path).exists() for path in job.output):
            continue
        planned = internals.is_planned_job(workflow, job)
        # The job finished after Snakemake had planned it, so Snakemake must plan anew.
        must_restart |= planned and internals.had_missing_output(workflow, job)
        cut_off = planned and internals.has_incomplete_files(workflow, job)
        unknown = not planned and not internals.has_metadata(workflow, job)
        if (cut_off or unknown) and record.is_valid_record_of_cell(
            job.output.record, job.params.cell, job.params.settings
        ):
            internals.mark_job_finished(workflow, job)
            if cut_off:
                must_restart = True
                print(
                    f"{job.output.record} is complete, although snakemake was killed; it is kept",
                    file=sys.stderr,
                )
    if must_restart:
        internals.restart_snakemake(workflow)


def retrain_results_of_changed_data(workflow: Any, path: Path, settings: Settings) -> None:
    """Make Snakemake replace a result if it was trained on data other than `settings` describes.

    Snakemake replaces the result by itself if it remembers the settings of the
    file. Snakemake does not remember them in a copy of the folder, or if Snakemake in another folder has
    made the file since. The function is called when the job is planned, also in a dry run.

    Args:
        workflow: Snakemake's workflow.
        path: The record or the block's result.
        settings: Settings of the config.
    """
    if settings.data_spec is None or internals.is_forced_file(workflow, str(path)):
        return
    try:
        made = json.loads(path.read_bytes())
        trained = made["trained"].values() if "trained" in made else [made["settings"]]
        others = any(s["data_spec"] != settings.data_spec for s in trained)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # a missing or unreadable file is reported by the code that uses it
    if others:
        internals.force_file(workflow, str(path))
        if settings.dataset not in _told:
            _told.add(settings.dataset)
            print(
                f"{path} was trained on other data than {settings.dataset!r} now is, or does not say on "
                "which; this and all other such results are made again",
                file=sys.stderr,
            )
