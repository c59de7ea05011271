"""A set in the formats of other tools, read back by those tools where they are installed."""

from __future__ import annotations

import json
import re
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fixture_records as fixture
import numpy as np
import pytest

from stratbench.analysis.records.columns import BY_NAME, EPOCH_BY_NAME
from stratbench.cell.options import build_json_schemas_of_fields
from stratbench.extensions.sets.__main__ import main
from stratbench.extensions.sets.export import EXPORTS, REQUIREMENTS, export_set
from stratbench.extensions.sets.export.runs import iter_exported_runs
from stratbench.extensions.sets.folders import MARK
from stratbench.extensions.sets.keys import Sets
from stratbench.extensions.sets.reading import read_set

ROOT = Path(__file__).parents[3]
STATUSES = {("fsdp", "vgg16", 2): "oom", ("ps-async", "vgg16", 2): "diverged"}
NEEDS = f"is in {REQUIREMENTS} and not installed here"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A set of twelve records, of which two are out of memory and two diverged, and two cells without any."""
    cells = fixture.expand(("ddp", "fsdp", "ps-async"), ("vgg16",), (1, 2), repeats=2)
    cells += fixture.expand(("single",), ("vgg16",), (1,), repeats=2)
    missing = {("single", "vgg16", 1): "missing"}
    root = tmp_path_factory.mktemp("export")
    return read_set(str(fixture.write_study(root, cells, STATUSES | missing)))


def nothing_of_this_machine(folder: Path) -> None:
    for path in folder.rglob("*"):
        told = str(path.relative_to(folder)).encode() + (
            path.read_bytes() if path.is_file() else b""
        )
        for name in (socket.gethostname(), str(Path.home()), str(folder.resolve())):
            # As a word: a host's short name may be a part of a random id.
            word = rb"(?<![0-9A-Za-z])" + re.escape(name.encode()) + rb"(?![0-9A-Za-z])"
            assert not re.search(word, told), (path, name)


def test_the_config_names_the_formats_that_there_are():
    assert build_json_schemas_of_fields(Sets)["export"]["items"]["enum"] == list(EXPORTS)


def test_a_format_without_its_package_is_one_sentence_and_writes_nothing(
    study, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "stratbench.extensions.sets.export.to_wandb", raising=False)
    out = tmp_path / "out"
    assert main(["export", study.source, "--to", "wandb", "parquet", "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "wandb, which is not installed" in told
    assert f"pip install -r {REQUIREMENTS}" in told
    assert (ROOT / REQUIREMENTS).exists()
    assert not out.exists()


def test_an_export_replaces_its_own_folders_and_nobody_elses(study, tmp_path, monkeypatch, capsys):
    def write(found, folder):
        (folder / "written").touch()

    writer = SimpleNamespace(OF_RECORDS=False, write_export=write)
    monkeypatch.setattr(
        "stratbench.extensions.sets.export._import_format_module", lambda name: writer
    )
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    kept = theirs / "parquet" / "kept"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert main(["export", study.source, "--to", "parquet", "--out", str(theirs)]) == 2
    assert "was not written by stratbench" in capsys.readouterr().err
    assert [*theirs.rglob("*")] == [kept.parent, kept]
    for _ in range(2):
        assert main(["export", study.source, "--to", "parquet", "--out", str(ours)]) == 0
        assert (ours / "parquet" / "written").exists()


def test_an_interrupted_export_leaves_nothing_that_looks_whole(study, tmp_path, monkeypatch):
    parts, out = ("cells", "epochs"), tmp_path / "out"

    def export(version, ends_after=None):
        def write(found, folder):
            for part in parts:
                (folder / part).write_text(version)
                if part == ends_after:
                    raise KeyboardInterrupt

        writer = SimpleNamespace(OF_RECORDS=False, write_export=write)
        monkeypatch.setattr(
            "stratbench.extensions.sets.export._import_format_module", lambda name: writer
        )
        export_set(study, ["parquet"], out)

    def written():
        return {path.name: path.read_text() for path in (out / "parquet").iterdir()}

    export("old")
    with pytest.raises(KeyboardInterrupt):
        export("new", ends_after="cells")
    assert written() == dict.fromkeys(parts, "old")
    assert {path.name for path in out.iterdir()} == {MARK, "parquet"}

    def remove_half(path, **_):
        if (Path(path) / "cells").exists():
            (Path(path) / "cells").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as interrupting:
        interrupting.setattr("shutil.rmtree", remove_half)
        with pytest.raises(KeyboardInterrupt):
            export("new")
    assert written() == dict.fromkeys(parts, "new")
    export("newer")
    assert {path.name for path in out.iterdir()} == {MARK, "parquet"}


def test_a_run_has_its_settings_results_and_epochs(study):
    runs = list(iter_exported_runs(study))
    assert len(runs) == len(study.records) == 12
    run = runs[0]
    assert run.parameters_by_name["strategy"] == "ddp"
    assert run.parameters_by_name["lr"] == 0.01
    assert any(name.startswith("options.") for name in run.parameters_by_name)
    assert run.metrics_by_name["train_time_s"] == study.cells["train_time_s"].iloc[0]
    assert not run.metrics_by_name.keys() & {"gpus", "repeat", "epochs"}
    assert [epoch.epoch_number for epoch in run.epochs] == list(range(1, fixture.EPOCHS + 1))
    assert run.finished_unix_s > run.started_unix_s > 0
    assert {run.tags_by_name["status"] for run in runs} == {"ok", "oom", "diverged"}


def test_parquet_is_typed_and_says_what_its_columns_mean(study, tmp_path):
    pytest.importorskip("pyarrow", reason=NEEDS)
    import pyarrow.parquet as pq

    export_set(study, ["parquet"], tmp_path)
    cells = pq.read_table(tmp_path / "parquet/cells.parquet")
    assert cells.schema.names == list(BY_NAME)
    types = {name: str(cells.schema.field(name).type) for name in cells.schema.names}
    assert types["gpus"] == types["peak_memory_bytes"] == types["epochs"] == "int64"
    assert types["train_time_s"] == types["sent_bytes_per_step"] == "double"
    assert types["batchnorm"] == "bool"
    assert types["status"] == types["breakdown_ms"] == "string"
    told = cells.schema.field("train_time_s").metadata
    assert told[b"unit"] == b"s"
    assert told[b"definition"].decode() == BY_NAME["train_time_s"].definition
    assert cells.schema.metadata[b"stratbench.study"] == b"constructed"
    assert cells["status"].to_pylist() == list(study.cells["status"])
    times = np.array(cells["train_time_s"].to_pylist(), float)
    np.testing.assert_array_equal(times, study.cells["train_time_s"])
    epochs = pq.read_table(tmp_path / "parquet/epochs.parquet")
    assert epochs.schema.names == list(EPOCH_BY_NAME)
    assert epochs.num_rows == len(study.epochs)
    targets = ["--targets", json.dumps({"main": 0.3})]
    assert main(["export", study.source, *targets, "--out", str(tmp_path)]) == 0
    reached = pq.read_table(tmp_path / "parquet/cells.parquet")["time_to_target_s"]
    assert reached.null_count < len(study.cells)
    paper = read_set("paper:v2")
    export_set(paper, ["parquet"], tmp_path)
    assert pq.read_table(tmp_path / "parquet/cells.parquet").num_rows == len(paper.cells)
    assert {path.name for path in tmp_path.iterdir()} == {MARK, "parquet"}


def test_tensorboard_reads_epochs_results_and_settings(study, tmp_path):
    pytest.importorskip("tensorboard", reason=NEEDS)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    export_set(study, ["tensorboard"], tmp_path)
    run = next(iter_exported_runs(study))
    folder = tmp_path / "tensorboard"
    assert len(list(folder.rglob("events.*"))) == len(study.records)
    read = EventAccumulator(str(folder / run.cell.path)).Reload()
    losses = read.Scalars("epoch/train_loss")
    assert [event.step for event in losses] == [epoch.epoch_number for epoch in run.epochs]
    assert losses[0].value == pytest.approx(run.epochs[0].metrics_by_name["train_loss"])
    assert losses[1].wall_time == pytest.approx(run.started_unix_s + run.epochs[1].end_train_time_s)
    assert read.Scalars("cell/train_time_s")[0].value == pytest.approx(
        run.metrics_by_name["train_time_s"]
    )
    content = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["strategy"].string_value == "ddp"
    assert settings["lr"].number_value == 0.01
    assert settings["status"].string_value == "ok"
    nothing_of_this_machine(folder)


@pytest.mark.timeout(300)
def test_mlflow_opens_the_store_without_a_server(study, tmp_path):
    pytest.importorskip("mlflow", reason=NEEDS)
    pytest.importorskip("alembic", reason=NEEDS)
    from mlflow.tracking import MlflowClient

    export_set(study, ["mlflow"], tmp_path)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("constructed/main")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    ours = {run.cell.path: run for run in iter_exported_runs(study)}
    assert runs.keys() == ours.keys()
    for path, run in ours.items():
        assert runs[path].data.tags["stratbench.status"] == run.tags_by_name["status"]
        assert runs[path].info.status == ("FINISHED" if run.has_ok_status else "FAILED")
        assert run.metrics_by_name.items() <= runs[path].data.metrics.items()
    path, run = next(iter(ours.items()))
    assert runs[path].data.params["lr"] == "0.01"
    assert runs[path].info.start_time == int(1000 * run.started_unix_s)
    history = client.get_metric_history(runs[path].info.run_id, "epoch/train_loss")
    assert sorted((m.step, m.value) for m in history) == [
        (epoch.epoch_number, epoch.metrics_by_name["train_loss"]) for epoch in run.epochs
    ]
    nothing_of_this_machine(tmp_path / "mlflow")


def entries_of(store: bytes) -> Iterator[bytes]:
    """The entries of a .wandb file: LevelDB's log format, blocks of 32 KiB after seven bytes."""
    assert store.startswith(b":W&B")
    at, parts = 7, b""
    while at + 7 <= len(store):
        if (left := -at % 32768) < 7 and left:
            at += left
            continue
        length, kind = struct.unpack("<HB", store[at + 4 : at + 7])
        parts += store[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.timeout(300)
def test_wandb_gets_offline_runs_that_say_nothing_of_this_machine(study, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason=NEEDS)
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "online")  # whatever else its user has set
    export_set(study, ["wandb"], tmp_path)
    stores = sorted((tmp_path / "wandb").rglob("*.wandb"))
    assert len(stores) == len(study.records)
    names, keys = set(), set()
    for path in stores:
        for data in entries_of(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            names.add(record.run.display_name)
            keys |= {item.key or ".".join(item.nested_key) for item in record.history.item}
    assert {run.cell.path for run in iter_exported_runs(study)} <= names
    assert {"epoch/train_loss", "epoch/score"} <= keys
    assert not (tmp_path / "wandb").is_symlink()
    nothing_of_this_machine(tmp_path / "wandb")
