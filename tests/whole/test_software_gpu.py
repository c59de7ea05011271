"""Records of the software GPU are no measurements: they enter no table, no figure, no answer and no set."""

from __future__ import annotations

import json
import re
import zipfile

import fixture_records as fixture
import pandas as pd
import pytest
from synthetic_files import Files
from test_analysis_report import Page, write_page

from stratbench.analysis.figures.timelines import read_cell_timeline
from stratbench.cell import software_gpu
from stratbench.extensions.sets.archive import SetError
from stratbench.extensions.sets.bundle import write_bundle
from stratbench.extensions.sets.reading import read_set

CELLS = fixture.expand(strategies=("single", "ddp", "ps-async"), models=("vgg16",), gpus=(1, 2))
#: A training time that no other figure is made of.
SECONDS = 4321.987


def told_by_launcher(cell, record):
    """What a launcher writes whose cell no worker has survived."""
    record["provenance"]["software_gpu"] = True
    return record


def told_by_uuid(cell, record):
    """The worker's GPU is one, whatever the launcher has seen."""
    record["workers"][0]["provenance"]["gpu"]["uuid"] = f"GPU-a7c4e1fe{software_gpu.UUID_MARK}"
    return record


def only_ddp(mark):
    def change(cell, record):
        if cell.strategy != "ddp":
            return record
        record["time"]["train_time_s"] = SECONDS
        return mark(cell, record)

    return change


@pytest.mark.parametrize("status", ["ok", "oom", "timeout", "diverged"])
def test_a_record_says_itself_that_it_is_no_measurement(status):
    record = fixture.make_record(CELLS[1], status)
    assert not software_gpu.was_trained_on_software_gpu(record)
    assert software_gpu.was_trained_on_software_gpu(told_by_launcher(None, record))
    worker = fixture.make_record(CELLS[1], "ok")
    assert software_gpu.was_trained_on_software_gpu(told_by_uuid(None, worker))


def test_an_environment_has_it_where_its_libraries_are(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert not software_gpu.is_software_gpu_installed()
    (tmp_path / software_gpu.FOLDER).mkdir()
    assert software_gpu.is_software_gpu_installed()


@pytest.mark.slow
def test_its_records_are_used_nowhere_and_the_others_are(tmp_path):
    change = only_ddp(told_by_uuid)
    page = write_page(tmp_path, CELLS, change=change, timelines=True, options=["--partial"])
    folder = page.parent
    cells = pd.read_csv(folder / "cells.csv")
    ddp, others = cells[cells["strategy"] == "ddp"], cells[cells["strategy"] != "ddp"]
    assert set(ddp["status"]) == {"error"}
    assert ddp["reason"].str.contains(software_gpu.WHY, regex=False).all()
    assert set(others["status"]) == {"ok"}
    coordinates = {"study", "experiment", "model", "dataset", "strategy", "gpus", "repeat"}
    filled = set(ddp.columns[ddp.notna().any()])
    assert filled == coordinates | {"status", "reason", "record_path", "log_path"}
    assert "ddp" not in set(pd.read_csv(folder / "epochs.csv")["strategy"])
    drawn = [
        row["strategy"]
        for _, row in cells.iterrows()
        if read_cell_timeline(folder.parent, row) is not None
    ]
    assert set(drawn) == {"single", "ps-async"}
    assert "ddp" not in set(pd.read_csv(folder / "audit.csv")["strategy"])
    summary = pd.read_csv(folder / "summary.csv")
    assert summary.loc[summary["strategy"] == "ddp", "value"].isna().all()
    assert summary.loc[summary["strategy"] == "single", "value"].notna().any()
    decided = pd.read_csv(folder / "decision.csv")
    ddp = decided[decided["strategy"] == "ddp"]
    assert ddp["reason"].str.contains(software_gpu.WHY, regex=False).all()
    assert ddp["rank"].isna().all()
    for path in folder.rglob("*"):
        if path.suffix in (".csv", ".md", ".tex", ".html", ".json") and path.name != "record.json":
            assert not re.search(r"(?<![\d.])432[12](?!\d)", path.read_text()), path
    assert software_gpu.WHY in " ".join(Page(page.read_text()).text)


def test_no_bundle_takes_one_and_none_that_has_one_is_read(tmp_path):
    folder = fixture.write_study(tmp_path, CELLS)
    honest, _ = write_bundle(folder, {}, out=tmp_path / "honest.stratbench.zip")
    assert set(read_set(str(honest)).cells["status"]) == {"ok"}
    path = CELLS[1].record_path(tmp_path)
    path.write_text(json.dumps(told_by_launcher(None, json.loads(path.read_text()))))
    with pytest.raises(SetError, match=r"record.json was trained on the software GPU.*delete it"):
        write_bundle(folder, {})
    found = read_set(str(folder))  # a folder of results is the user's own: it is read, and says so
    assert list(found.cells["status"]).count("error") == 1
    assert software_gpu.WHY in found.cells["reason"].dropna().item()


def test_a_bundle_that_somebody_made_by_hand_is_refused(tmp_path, monkeypatch):
    folder = fixture.write_study(tmp_path, CELLS[:2], change=lambda c, r: told_by_launcher(c, r))
    with monkeypatch.context() as patch:
        patch.setattr(software_gpu, "was_trained_on_software_gpu", lambda found: False)
        forged, _ = write_bundle(folder, {}, out=tmp_path / "forged.stratbench.zip")
    assert zipfile.is_zipfile(forged)
    with pytest.raises(SetError, match=r"record.json was trained on the software GPU"):
        read_set(str(forged))


def test_its_blocks_and_full_runs_are_no_evidence_of_a_verdict(tmp_path, capsys):
    files = Files(tmp_path)
    asked = files.next_round()
    block, *_ = (files.write_block(entry) for entry in asked["comparisons"])
    block.write_text(json.dumps(json.loads(block.read_text()) | {"software_gpu": True}))
    assert [b["gpus"] for b in files.next_round()["comparisons"]] == [
        asked["comparisons"][0]["gpus"]
    ]  # anew
    files.command("tell")
    assert f"was {software_gpu.WHY}" in capsys.readouterr().out
    files = Files(tmp_path / "runs")
    files.run(files.next_round())
    wanted = files.next_round()["full_runs"]
    (cell,) = (c for c in files.study.cells if c.as_dict() == wanted[0])
    path = files.write_record(cell)
    path.write_text(json.dumps(told_by_launcher(None, json.loads(path.read_text()))))
    assert wanted[0] in files.next_round()["full_runs"]
