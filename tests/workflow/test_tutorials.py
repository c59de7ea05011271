"""The tutorials, followed to the letter, but for what varies in what their commands print."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tutorial import ROOT, Follower, expected_output, read_steps

from stratbench.analysis.decision.short import KINDS, ShortAnswer, format_summary_line
from stratbench.analysis.report.brief import iter_study_summary_lines
from stratbench.cell.coordinates import Cell
from stratbench.study.order import compute_job_priority


@pytest.mark.parametrize(
    ("lines", "output", "holds"),
    [
        (["a … s"], "before\na 1.5 s\nafter\n", True),
        (["a … s"], "a 1.5 min\n", False),
        (["  a … s and b"], "  a 1.5 s\n    and b\n", True),
        (["  a … s and b"], "  a 1.5 s\n    or b\n", False),
        (["a", "b"], "a\nx\nb\n", False),
        (["a", "…", "b"], "a\nx\ny\nb\n", True),
        (["a", "…", "b"], "b\na\n", False),
    ],
)
def test_output_is_compared_but_for_what_varies(lines, output, holds):
    assert bool(expected_output(lines).search(output)) == holds


def test_steps_of_a_page_are_read():
    page = "Write `a.yaml`:\n\n```yaml\nx: 1\n```\n\n```console\n$ cat a.yaml\nx: 1\n```\n"
    written, command = read_steps(page)
    assert (written.file, written.content) == ("a.yaml", "x: 1\n")
    assert (command.command, command.printed) == ("cat a.yaml", ["x: 1"])


def test_a_file_without_a_name_would_not_be_written():
    page = "Write this:\n\n```yaml\nx: 1\n```\n\n```console\n$ cat a.yaml\nx: 1\n```\n"
    with pytest.raises(AssertionError, match="x: 1"):
        read_steps(page)


def test_what_a_command_prints_otherwise_is_a_failure(tmp_path: Path):
    follower = Follower(tmp_path)
    [step] = read_steps("```console\n$ echo one\ntwo\n```\n")
    with pytest.raises(AssertionError, match="one"):
        follower.follow(step)


@pytest.mark.parametrize("page", ["tutorials/demo.md", "tutorials/transformers.md"])
@pytest.mark.parametrize("notes", [0, 1, 2])
@pytest.mark.parametrize("kind", ["sure", *KINDS])
def test_pages_hold_for_every_outcome_of_a_study(tmp_path: Path, page: str, kind: str, notes: int):
    """Two short repeats may be significant or not, and may have any number of findings."""
    short = ShortAnswer("ddp", 2, "Fastest.", kind, "1.75 s")
    decided = {"lead": format_summary_line([("small", short)]), "answers": []}
    (tmp_path / "answers.json").write_text(json.dumps(decided), encoding="utf-8")
    findings = ["warning"] * notes + ["note"] * notes
    (tmp_path / "audit.csv").write_text("\n".join(["severity", *findings]) + "\n", encoding="utf-8")
    (tmp_path / "cells.csv").write_text("start_skew_ms\n", encoding="utf-8")
    printed = list(iter_study_summary_lines(tmp_path))
    [step] = [
        step
        for step in read_steps((ROOT / "docs" / page).read_text(encoding="utf-8"))
        if step.command == "stratbench run"
    ]
    lead, findings_line = (
        [line for line in step.printed if line.startswith(start)]
        for start in ("One ", "Audit findings: ")
    )
    assert expected_output([*lead, *findings_line]).search("\n".join(printed) + "\n"), printed


def follow_page(page: str, folder: Path) -> Path:
    """Follow a page's steps in a folder; returns where they have led."""
    follower = Follower(folder)
    for step in read_steps((ROOT / "docs" / page).read_text(encoding="utf-8")):
        follower.follow(step)
    return follower.folder


with_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="pip install transformers"
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "page",
    ["decision.md", pytest.param("tutorials/transformers.md", marks=with_transformers)],
)
def test_a_page_shows_what_its_commands_print(tmp_path: Path, page: str):
    follow_page(page, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_shows_what_its_commands_print_and_trains_repeat_after_repeat(tmp_path: Path):
    study = follow_page("tutorials/demo.md", tmp_path)
    log = min((study / ".snakemake/log").iterdir())  # of the run; its name begins with its time
    begun = re.findall(
        r"train mine/first: (\S+), (\S+), workers: (\d), repeat (\d); log", log.read_text()
    )
    cells = [
        Cell("mine", "first", strategy, model, "digits", int(gpus), int(repeat))
        for strategy, model, gpus, repeat in begun
    ]
    assert [cell.repeat for cell in cells] == [0] * 5 + [1] * 5
    assert cells == sorted(cells, key=compute_job_priority, reverse=True)
