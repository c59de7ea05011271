"""Cells: how a matrix expands, where files lie, and the list of records by status."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from stratbench.cell.__main__ import main
from stratbench.cell.coordinates import STATUSES, Cell, expand_cells
from stratbench.cell.record import SCHEMA_PATH as RECORD_SCHEMA


def matrix(**changes) -> list[Cell]:
    arguments = {
        "study": "s", "experiment": "e", "dataset": "digits",
        "strategies": [("single", 1), ("ddp", None)], "models": ["a", "b"], "gpus": [1, 2],
        "repeats": 2,
    }  # fmt: skip
    return list(expand_cells(**(arguments | changes)))


def test_every_point_of_the_matrix_is_a_cell():
    found = matrix(strategies=[("ddp", None), ("fsdp", None)])
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2
    assert found[0] == Cell("s", "e", "ddp", "a", "digits", 1, 0)
    assert [c.repeat for c in found[:4]] == [0, 1, 0, 1]


def test_a_strategy_is_left_out_where_it_cannot_use_the_workers():
    assert [c.gpus for c in matrix() if c.strategy == "single"] == [1, 1, 1, 1]
    assert {c.gpus for c in matrix() if c.strategy == "ddp"} == {1, 2}


def test_paths_have_the_coordinates_and_differ():
    cell = Cell("s", "e", "ddp", "m", "digits", 2, 1)
    assert cell.record_path("results") == Path("results/s/cells/e/ddp/m/2gpu/rep1/record.json")
    assert cell.log_dir("results") == Path("results/s/logs/e/ddp/m/2gpu/rep1")
    assert len({c.path for c in matrix()}) == len(matrix())


def test_a_cell_names_itself():
    assert str(Cell("s", "e", "ddp", "m", "digits", 1, 0)) == "s/e: ddp, m, 1 worker, repeat 0"
    assert "4 workers" in str(Cell("s", "e", "ddp", "m", "digits", 4, 0))


def test_statuses_are_those_of_the_schema():
    assert list(STATUSES) == json.loads(RECORD_SCHEMA.read_text())["properties"]["status"]["enum"]


# ---------------------------------------------------------------- python -m stratbench.cell


def write_records(results: Path, statuses: dict[Cell, str]) -> None:
    for cell, status in statuses.items():
        path = cell.record_path(results)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"status": status}))


@pytest.fixture
def results(tmp_path) -> Path:
    one, two, three, four = matrix(strategies=[("ddp", None)], repeats=1)
    other = Cell("t", "e", "ddp", "a", "digits", 1, 0)
    write_records(
        tmp_path, {one: "ok", two: "oom", three: "timeout", four: "diverged", other: "oom"}
    )
    (tmp_path / "s" / "logs").mkdir()
    (tmp_path / "s" / "logs" / "record.json").write_text("no record of a cell")
    return tmp_path


def listed(capsys, *arguments: str) -> list[str]:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


def test_records_are_listed_by_status(results, capsys):
    expected = [
        "s/cells/e/ddp/a/2gpu/rep0",
        "s/cells/e/ddp/b/1gpu/rep0",
        "t/cells/e/ddp/a/1gpu/rep0",
    ]
    assert listed(capsys, "--status", "oom,timeout", "--results", str(results)) == [
        str(results / path / "record.json") for path in expected
    ]


def test_paths_are_those_of_the_rules(results, capsys, monkeypatch):
    """Snakemake knows a file by the very text of its path."""
    monkeypatch.chdir(results.parent)
    results.rename("results")
    cell = Cell("t", "e", "ddp", "a", "digits", 1, 0)
    assert listed(capsys, "--status", "oom", "--study", "t") == [str(cell.record_path("results"))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--status", "omm"], "'omm' is not a status; choose among ok, oom, timeout, diverged"),
        (["--status", "error"], "'error' is not a status"),
        (["--status", ""], "'' is not a status"),
        ([], "--status"),
        (["--status", "ok", "--study", "nosuch"], "no results of study 'nosuch'"),
        (["--status", "ok", "--results", "/no/where"], "/no/where is not a folder"),
    ],
)
def test_mistakes_are_told(results, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(["--results", str(results), *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "3"])
def test_a_damaged_record_is_named(results, capsys, content):
    path = results / "s/cells/e/ddp/a/1gpu/rep0/record.json"
    path.write_text(content)
    assert main(["--status", "oom", "--results", str(results)]) == 1
    assert f"{path} is not a record" in capsys.readouterr().err


@pytest.mark.slow
def test_ten_thousand_records_are_listed_about_as_fast_as_read(tmp_path, capsys):
    many = matrix(models=[f"m{i}" for i in range(50)], gpus=[1, 2, 4, 8], repeats=50)
    many = [c for c in many if c.strategy == "ddp"]
    assert len(many) == 10_000
    padding = {"status": "ok", "filler": ["x" * 100] * 50}  # 5 kB each, as real ones
    for cell in many:
        path = cell.record_path(tmp_path)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(padding))
    ratios = []
    while not ratios or (ratios[-1] > 5 and len(ratios) < 5):  # its speed may change meanwhile
        begun = time.process_time()
        for cell in many:
            json.loads(cell.record_path(tmp_path).read_text())
        parsed = time.process_time()
        assert len(listed(capsys, "--status", "ok", "--results", str(tmp_path))) == 10_000
        ratios.append((time.process_time() - parsed) / (parsed - begun))
    assert ratios[-1] < 5, ratios
