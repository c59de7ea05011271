"""Writes a run per record to mlflow.db, the SQLite store that MLflow opens without a server.

    mlflow ui --backend-store-uri sqlite:///mlflow.db

New versions of MLflow no longer write its older store of plain files.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import alembic  # noqa: F401  MLflow's store imports it, but mlflow-skinny does not install it
from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from stratbench.extensions.sets.export.runs import ExportedRun, iter_exported_runs
from stratbench.extensions.sets.reading import ResultSet

NEEDS_RECORDS = True
#: Largest numbers of metrics, and of parameters or tags, that MLflow accepts in one call.
MAX_METRICS, MAX_OTHERS = 1000, 100


def list_mlflow_metrics(run: ExportedRun) -> list[Metric]:
    """Return a run's metrics for MLflow, both per epoch and for the whole cell.

    The metrics of an epoch have the time at which it ended.
    """
    metrics = [
        Metric(
            f"epoch/{name}",
            value,
            int(1000 * (run.started_unix_s + epoch.end_train_time_s)),
            epoch.epoch_number,
        )
        for epoch in run.epochs
        for name, value in (
            epoch.metrics_by_name | {"train_time_s": epoch.end_train_time_s}
        ).items()
    ]
    at_ms = int(1000 * run.finished_unix_s)
    return metrics + [Metric(name, value, at_ms, 0) for name, value in run.metrics_by_name.items()]


def write_export(result_set: ResultSet, folder: Path) -> None:
    """Write mlflow.db, which has an MLflow experiment for each experiment of the study."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    client = MlflowClient(tracking_uri=f"sqlite:///{folder.resolve() / 'mlflow.db'}")
    experiments: dict[str, str] = {}
    for run in iter_exported_runs(result_set):
        name = f"{run.cell.study}/{run.cell.experiment}"
        if name not in experiments:
            # With this scheme, an MLflow server stores the files itself. A plain path would be a folder on
            # this machine.
            place = f"mlflow-artifacts:/{name}"
            experiments[name] = client.create_experiment(name, artifact_location=place)
        write_mlflow_run(client, experiments[name], run)


def write_mlflow_run(client: MlflowClient, experiment_id: str, run: ExportedRun) -> None:
    """Write one run to MLflow.

    Its status in MLflow is `FINISHED` if the cell has the status `ok`, else `FAILED`.

    Args:
        client: Client of MLflow.
        experiment_id: Id of the MLflow experiment.
        run: The run.
    """
    created = client.create_run(
        experiment_id, start_time=int(1000 * run.started_unix_s), run_name=run.cell.path
    )
    run_id = created.info.run_id
    parameters = [Param(name, str(value)) for name, value in run.parameters_by_name.items()]
    tags = [RunTag(f"stratbench.{name}", value) for name, value in run.tags_by_name.items()]
    metrics = list_mlflow_metrics(run)
    for start in range(0, len(metrics), MAX_METRICS):
        client.log_batch(run_id, metrics=metrics[start : start + MAX_METRICS])
    for start in range(0, len(parameters), MAX_OTHERS):
        client.log_batch(run_id, params=parameters[start : start + MAX_OTHERS])
    client.log_batch(run_id, tags=tags)
    status = "FINISHED" if run.has_ok_status else "FAILED"
    client.set_terminated(run_id, status, end_time=int(1000 * run.finished_unix_s))
