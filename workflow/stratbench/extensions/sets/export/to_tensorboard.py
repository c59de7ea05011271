"""Writes a TensorBoard log per record: epochs as scalars, and settings as hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from stratbench.extensions.sets.export.runs import ExportedRun, iter_exported_runs
from stratbench.extensions.sets.reading import ResultSet

NEEDS_RECORDS = True


def iter_tensorboard_events(run: ExportedRun) -> Iterator[Event]:
    """Yield the events of a run for TensorBoard. Events of an epoch have the time at which it ended."""
    yield Event(wall_time=run.started_unix_s, file_version="brain.Event:2")
    parameters = run.parameters_by_name | {"status": run.tags_by_name["status"]}
    hyperparameters = hparams_pb(
        parameters, trial_id=run.cell.path, start_time_secs=run.started_unix_s
    )
    yield Event(wall_time=run.started_unix_s, summary=hyperparameters)
    for epoch in run.epochs:
        at_s = run.started_unix_s + epoch.end_train_time_s
        metrics = epoch.metrics_by_name | {"train_time_s": epoch.end_train_time_s}
        values = [Summary.Value(tag=f"epoch/{n}", simple_value=v) for n, v in metrics.items()]
        yield Event(wall_time=at_s, step=epoch.epoch_number, summary=Summary(value=values))
    values = [
        Summary.Value(tag=f"cell/{n}", simple_value=v) for n, v in run.metrics_by_name.items()
    ]
    last = run.epochs[-1].epoch_number if run.epochs else 0
    yield Event(wall_time=run.finished_unix_s, step=last, summary=Summary(value=values))


def write_export(result_set: ResultSet, folder: Path) -> None:
    """Write a TensorBoard log file per cell. Its name does not contain that of this host."""
    for run in iter_exported_runs(result_set):
        path = (
            folder
            / run.cell.path
            / f"events.out.tfevents.{int(run.started_unix_s):010d}.stratbench"
        )
        path.parent.mkdir(parents=True)
        with open(path, "wb") as file:
            writer = RecordWriter(file)
            for event in iter_tensorboard_events(run):
                writer.write(event.SerializeToString())
            writer.flush()
