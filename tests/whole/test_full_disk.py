"""A write that fails in the middle, as on a full disk, leaves what was whole, and ends in one sentence."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fixture_records as fixture
import pytest

from stratbench.analysis.decision import decide
from stratbench.analysis.figures import plots
from stratbench.analysis.records import collect
from stratbench.analysis.report import report
from stratbench.analysis.tables import tables
from stratbench.cell import files
from stratbench.command.__main__ import main as command_main
from stratbench.extensions.audit import audit
from stratbench.extensions.paper import against
from stratbench.extensions.sets.__main__ import main as sets_main

#: The files have more bytes than this, so that the kernel refuses to write them whole.
FULL_AT_BYTES = 64


@contextmanager
def full_disk() -> Iterator[None]:
    """Every file ends at FULL_AT_BYTES: the write that would go on fails. Python ignores SIGXFSZ."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # it would be cut off
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = writes


def stages(study: Path, out: Path) -> dict[str, tuple]:
    """The stages of `snakemake partial`, with their arguments."""
    cells, findings, summary = (str(out / f"{n}.csv") for n in ("cells", "audit", "summary"))
    epochs, both = str(out / "epochs.csv"), ["--cells", cells, "--audit", findings]
    return {
        "collect": (collect.main, [
            "--expected", str(study / "cells.json"), "--records-root", str(study / "cells"),
            "--out", cells, "--epochs-out", epochs, "--partial",
        ]),
        "audit": (audit.main, ["--cells", cells, "--study-dir", str(study), "--out", findings]),
        "tables": (tables.main, [*both, "--summary-out", summary, "--out-dir", str(out / "tables")]),
        "plots": (plots.main, [
            "--cells", cells, "--epochs", epochs, "--summary", summary, "--out-dir", str(out / "plots"),
        ]),
        "decide": (decide.main, [
            *both, "--out", str(out / "decision.csv"), "--answers-out", str(out / "answers.json"),
        ]),
        "against": (against.main, [
            *both, "--cells-out", str(out / "against_cells.csv"), "--claims-out",
            str(out / "against_claims.csv"), "--summary", summary, "--tables-out", str(out / "paper_tables"),
        ]),
        "report": (report.main, [
            "--folder", str(out), "--study-dir", str(study), "--audit", findings, "--partial",
        ]),
    }  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cells = fixture.expand(("ddp", "fsdp"), ("vgg16",), (1, 2))
    return fixture.write_study(tmp_path_factory.mktemp("full"), cells)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_stage_tears_what_an_earlier_one_left(study: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(plots, "list_usable_cores", lambda: [0])  # drawn here, and not by a pool
    out = study / "partial"
    for main, arguments in stages(study, out).values():
        assert main(arguments) == 0
    whole = contents(out)
    assert {"report.html", "cells.csv", "decision.csv", "plots/main/vgg16/training_time.svg"} < set(
        whole
    )
    for name, (main, arguments) in stages(study, out).items():
        with full_disk(), pytest.raises(OSError, match="File too large") as told:
            main(arguments)
        assert str(told.value.filename).startswith(str(out)), name
        assert Path(told.value.filename).relative_to(out).as_posix() in whole
        assert contents(out) == whole, name


@pytest.mark.slow
def test_sets_keep_their_bundle_and_their_comparison(study: Path, tmp_path, capsys) -> None:
    bundle = ["bundle", "--study-dir", str(study), "--out", str(tmp_path / "x.stratbench.zip")]
    named = json.dumps({"a": "paper:v1", "b": "paper:v2"})
    compare = ["compare", "--sets", named, "--out", str(tmp_path)]
    for command in (bundle, compare):
        assert sets_main(command) == 0
        whole = contents(tmp_path)
        capsys.readouterr()
        with full_disk():
            assert sets_main(command) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: File too large: {tmp_path}/")
        assert contents(tmp_path) == whole


def test_a_rules_program_ends_in_one_sentence(study: Path, tmp_path) -> None:
    arguments = stages(study, tmp_path)["collect"][1]
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({FULL_AT_BYTES},) * 2)"
    code += "; import runpy; runpy.run_module('stratbench.study.program', run_name='__main__')"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            str(os.getpid()),
            "-m",
            "stratbench.analysis.records.collect",
            *arguments,
        ],
        env=os.environ
        | {"PYTHONPATH": str(Path(files.__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith(f"error: File too large: {tmp_path}/")
    assert not list(tmp_path.iterdir())


def test_a_study_that_cannot_be_laid_down_leaves_nothing(tmp_path, capsys):
    study = tmp_path / "study"
    with full_disk():
        assert command_main(["init", str(study)]) == 2
    assert capsys.readouterr().err == f"stratbench init: cannot write to {study}: File too large\n"
    assert command_main(["init", str(study)]) == 0
    assert (study / "config.yaml").is_file()
