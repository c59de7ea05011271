"""Writes an offline run of Weights & Biases per record, which `wandb sync` uploads.

The runs contain the records' content, and nothing about the machine that writes them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import wandb

from stratbench.extensions.sets.export.runs import ExportedRun, iter_exported_runs
from stratbench.extensions.sets.reading import ResultSet

NEEDS_RECORDS = True


def make_offline_settings(folder: Path) -> wandb.Settings:
    """Return settings of offline W&B runs. They store nothing about the machine, user and code."""
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


def write_export(result_set: ResultSet, folder: Path) -> None:
    """Write an offline run of Weights & Biases for each record, as a folder wandb/offline-run-*."""
    for run in iter_exported_runs(result_set):
        write_wandb_run(run, folder)


def write_wandb_run(run: ExportedRun, folder: Path) -> None:
    """Write one offline run, with its epochs as history and the cell's metrics as summary."""
    # The id depends on the record alone, so a second upload of a record replaces the first.
    identity = hashlib.sha256(f"{run.cell.study}/{run.cell.path}/{run.started_unix_s}".encode())
    offline = wandb.init(
        project=run.cell.study,
        group=f"{run.cell.experiment}/{run.cell.strategy}",
        name=run.cell.path,
        id=identity.hexdigest()[:16],
        config=run.parameters_by_name
        | {f"tags.{name}": text for name, text in run.tags_by_name.items()},
        tags=[run.tags_by_name["status"]],
        dir=str(folder),
        settings=make_offline_settings(folder),
    )
    try:
        for epoch in run.epochs:
            timed = epoch.metrics_by_name | {"train_time_s": epoch.end_train_time_s}
            offline.log(
                {f"epoch/{name}": value for name, value in timed.items()}, epoch.epoch_number
            )
        offline.summary.update(run.metrics_by_name)
    finally:
        offline.finish(exit_code=0 if run.has_ok_status else 1)
