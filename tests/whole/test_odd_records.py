"""One odd record, failure or timeline never stops what is made of the others, at any stage.

Every cell is damaged in a way of its own, generated from a seed, but the last repeat of each. All stages
then run as the workflow runs them, in this process.
"""

from __future__ import annotations

import csv
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fixture_records as fixture
import pytest

from stratbench.analysis.decision import decide
from stratbench.analysis.figures import plots
from stratbench.analysis.records import collect
from stratbench.analysis.report import report
from stratbench.analysis.tables import tables
from stratbench.cell import record
from stratbench.cell.coordinates import CELL_PATTERN, Cell
from stratbench.extensions.audit import audit
from stratbench.extensions.paper import against
from stratbench.study import plan_file

SEED = 20261122
REPEATS = 6
#: JSON texts that are put in a value's place. The first lines are no ordinary JSON.
ODD = (
    *("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "9" * 30, '"\\ud800"'),
    *("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000),
    *("null", "true", "0", "-1", "0.0", "1.5", "1e308", "1e-300", str(2**62)),
    *(
        '""',
        '"text"',
        '"\\u0000"',
        '"\\u001b[31m\\n,;\\"|"',
        '"<script>"',
        '"' + "x" * 300_000 + '"',
    ),
    *("[]", "{}", '["a"]', "[[1]]", '{"a": 1}', '[{"workers": 3}]', '{"0": 5}'),
)
#: Faults that were once found to stop a stage: the value's place, and what stood there.
FOUND = (
    *(("provenance", "[1]"), ("provenance.busy_at_start", "5"), ("provenance.git", '"x"')),
    *(("workers.0.provenance", "7"), ("workers.0.provenance.host", "[]")),
    *(("workers.0.provenance.host.affinity", "3"), ("workers", '[{"rank": 0}]')),
    *(("server", '{"servers": [{"workers": [{"bytes_in": "a"}]}]}'), ("server", '{"servers": 4}')),
    ("server", '{"servers": [{"staleness_all_shards": ["a", null]}]}'),
    *(("settings.slowdown", '"x"'), ("settings.slowdown", '{"workers": [0]}')),
    *(("settings", '{"epochs": "many", "precision": 16}'), ("batch.global_batch", "0")),
    *(("time.train_time_s", "NaN"), ("time.train_time_s", "0"), ("score.final", "NaN")),
    *(("score.per_epoch.0.score", "NaN"), ("time.breakdown_ms", '{"data": Infinity}')),
    *(
        ("time.breakdown_ms", '{"forward": "1"}'),
        ("memory.model_states", '{"parameters_bytes": "1"}'),
    ),
)
#: Whole files.
FILES = (
    b"", b"{", b"[]", b"null", b"\xff\xfe", b"\0" * 100, b'{"cell": {}}', b"[" * 200_000, b"9" * 5000,
    "fifo", "folder", "loop", "device",
)  # fmt: skip


def places(value: Any, where: tuple = ()) -> Iterator[tuple]:
    """Every place in a record that holds something."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*where, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*where, key))


def damaged(rec: dict[str, Any], where: tuple, odd: str) -> str:
    """The record's JSON with `odd` in the place of what is at `where`."""
    *parents, last = where
    block = rec
    for key in parents:
        block = block[key]
    block[last] = "@@odd@@"
    return json.dumps(rec).replace('"@@odd@@"', odd)


def place_file(path: Path, content: bytes | str) -> None:
    """Put a damaged file, or what is none, in a file's place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "fifo":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if content == "device" else path.name)


@dataclass
class Odd:
    """A study with damaged cells, and what was damaged in each (by the cell's path)."""

    study_dir: Path
    cells: list[Cell]
    damage: dict[str, str]
    rows: dict[str, dict[str, str]]


def damage_all(root: Path, cells: list[Cell]) -> Iterator[tuple[str, str]]:
    """Damage all but the last repeats below `root`; yields a cell's path and what was done to it."""
    chosen = random.Random(SEED)
    known = list(FOUND)
    files = [(kind, content) for content in FILES for kind in ("record", "failure", "timeline")]
    for cell in [cell for cell in cells if cell.repeat < REPEATS - 1]:
        path = cell.record_path(root)
        rec = json.loads(path.read_text())
        if known and (known[-1][0] != "server" or rec["server"]):
            dotted, odd = known.pop()
            where = tuple(int(k) if k.isdigit() else k for k in dotted.split("."))
            path.write_text(damaged(rec, where, odd))
        elif files and chosen.random() < 0.4:
            kind, content = files.pop(chosen.randrange(len(files)))
            if kind == "failure":
                path.unlink()
                path = cell.log_dir(root) / record.FAILURE_FILE
            elif kind == "timeline":
                path = path.with_name("timeline.csv")
            place_file(path, content)
            yield cell.path, f"{kind} file: {content[:20]!r}"
            continue
        else:
            where, odd = chosen.choice(list(places(rec))), chosen.choice(ODD)
            path.write_text(damaged(rec, where, odd))
        yield cell.path, f"{'.'.join(map(str, where))} = {odd[:60]}"
    assert not known


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Odd:
    root = tmp_path_factory.mktemp("odd")
    strategies = ("single", "ddp", "fsdp", "fsdp-zero2", "ps-sync", "ps-async", "ps-dana")
    cells = fixture.expand(strategies, ("vgg16",), (1, 2), repeats=REPEATS)
    study_dir = fixture.write_study(root, cells, timelines=True)
    damage = dict(damage_all(root, cells))
    assert len(damage) >= 60
    out = {name: str(study_dir / f"{name}.csv") for name in ("cells", "epochs", "audit", "summary")}
    collect.main(
        ["--expected", str(study_dir / "cells.json"), "--records-root", str(study_dir / "cells"),
         "--out", out["cells"], "--epochs-out", out["epochs"], "--partial"]
    )  # fmt: skip
    with open(out["cells"], newline="") as f:
        rows = {CELL_PATTERN.format(**row): row for row in csv.DictReader(f)}
    return Odd(study_dir, cells, damage, rows)


def test_every_cell_has_its_row_and_an_odd_record_is_named(odd: Odd) -> None:
    assert list(odd.rows) == [cell.path for cell in odd.cells]
    for cell in odd.cells:
        row = odd.rows[cell.path]
        if cell.repeat == REPEATS - 1:
            assert row["status"] == "ok", row["reason"]
            continue
        damage = odd.damage[cell.path]
        assert row["status"] in ("ok", "oom", "timeout", "diverged", "error"), damage
        if row["status"] == "error":
            named = record.FAILURE_FILE if damage.startswith("failure") else "record.json"
            assert named in row["reason"], (damage, row["reason"])
            where = (
                row["record_path"] or row["reason"]
            )  # without a record the failure is named whole
            assert cell.path in where, (damage, where)
            assert len(row["reason"]) <= 1000
            assert row["reason"].isprintable()
    errors = sum(row["status"] == "error" for row in odd.rows.values())
    assert errors > len(odd.damage) / 2, errors


@pytest.mark.slow
def test_every_later_stage_goes_through(odd: Odd) -> None:
    here = odd.study_dir
    cells, findings, summary = (str(here / f"{n}.csv") for n in ("cells", "audit", "summary"))
    both = ["--cells", cells, "--audit", findings]
    assert audit.main(["--cells", cells, "--out", findings]) == 0
    assert tables.main([*both, "--summary-out", summary, "--out-dir", str(here / "tables")]) == 0
    outs = ["--out", str(here / "decision.csv"), "--answers-out", str(here / "answers.json")]
    assert decide.main([*both, *outs]) == 0
    drawn = ["--cells", cells, "--epochs", str(here / "epochs.csv"), "--summary", summary]
    drawn += ["--answers", str(here / "answers.json"), "--study-dir", str(here)]
    assert plots.main([*drawn, "--out-dir", str(here / "plots")]) == 0
    outs = ["--cells-out", str(here / "against_cells.csv")]
    outs += ["--claims-out", str(here / "against_claims.csv")]
    outs += ["--summary", summary, "--tables-out", str(here / "paper_tables")]
    assert against.main([*both, *outs]) == 0
    folders = ["--folder", str(here), "--study-dir", str(here)]
    assert report.main([*folders, "--audit", findings, "--partial"]) == 0
    text = (here / "report.html").read_text()
    assert "record.json" in text


@pytest.mark.parametrize("odd_file", FILES, ids=range(len(FILES)))
def test_a_plan_that_cannot_be_read_is_no_plan(tmp_path: Path, odd_file: bytes | str) -> None:
    place_file(tmp_path / "plan.json", odd_file)
    cell = fixture.expand()[0]
    plan = plan_file.PlanFile(tmp_path / "plan.json")
    assert plan.get_host_mem_mib(cell) == 0
    assert plan.cells == {}


@pytest.mark.parametrize("value", ["1e999", "-5", '"much"', "[]", "NaN", "true", "1.5"])
def test_a_plan_with_odd_figures_is_no_plan(tmp_path: Path, value: str) -> None:
    cell = fixture.expand()[0]
    planned = f'{{"settings": "", "host_mem_mib": {value}, "cell_time_high_s": {value}}}'
    path = tmp_path / "plan.json"
    path.write_text(f'{{"gpu": null, "cells": {{"{cell.path}": {planned}}}}}')
    plan = plan_file.PlanFile(path)
    assert plan.get_host_mem_mib(cell) == 0
    assert plan.cells == {}
