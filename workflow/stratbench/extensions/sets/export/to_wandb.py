"""Weights & Biases: an offline run per record, which users can upload by `wandb sync`.

Nothing about the machine that writes them is recorded, only the records' content.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import wandb

from stratbench.extensions.sets.export.runs import ExportedRun, runs_of
from stratbench.extensions.sets.reading import ResultSet

OF_RECORDS = True


def settings_for(folder: Path) -> wandb.Settings:
    """Return settings for offline runs without host, user, program, packages, git or console."""
    return wandb.Settings(
        mode="offline",
        root_dir=str(folder),
        silent=True,
        console="off",
        disable_git=True,
        save_code=False,
        host="",
        username="",
        program="",
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
    )


def write(result_set: ResultSet, folder: Path) -> None:
    """Write wandb/offline-run-*, a folder for each run."""
    for run in runs_of(result_set):
        write_run(run, folder)


def write_run(run: ExportedRun, folder: Path) -> None:
    """Write one run: its epochs as history, the measurements of the whole cell as summary."""
    # By this id, a run that is uploaded twice is one run.
    identity = hashlib.sha256(f"{run.cell.study}/{run.cell.path}/{run.started_s}".encode())
    offline = wandb.init(
        project=run.cell.study,
        group=f"{run.cell.experiment}/{run.cell.strategy}",
        name=run.cell.path,
        id=identity.hexdigest()[:16],
        config=run.parameters | {f"tags.{name}": text for name, text in run.tags.items()},
        tags=[run.tags["status"]],
        dir=str(folder),
        settings=settings_for(folder),
    )
    try:
        for epoch in run.epochs:
            timed = epoch.metrics | {"train_time_s": epoch.end_s}
            offline.log({f"epoch/{name}": value for name, value in timed.items()}, epoch.number)
        offline.summary.update(run.metrics)
    finally:
        offline.finish(exit_code=0 if run.is_ok else 1)
