"""docs/extending.md, followed to the letter: each section's changes alone, and what they add works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launching import LIMIT_S, WORKFLOW, settings

ROOT = WORKFLOW.parent
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
#: The page's sections that add something, with their text.
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
#: A change: of which file; whether it is new, added to at its end, or changed as a diff says; the text.
CHANGE = re.compile(
    r"^`([^`\n]+)`(?: \((new)\)|, (at the end)|, for epochs.csv)?:\n\n```(?:python|diff)\n(.*?)^```",
    re.M | re.S,
)

pytestmark = pytest.mark.timeout(300)


def changes_of(title: str) -> list[tuple[str, str, str, str]]:
    return CHANGE.findall(SECTIONS[title])


def function_of(title: str) -> str:
    """The name of the section's function in `extended.py`."""
    return title.lower().replace(" ", "_")


def copy_with(titles: list[str], root: Path) -> Path:
    """A copy of the workflow with the changes of some sections; returns its folder."""
    shutil.copytree(WORKFLOW, root / "workflow", ignore=shutil.ignore_patterns("*.pyc.*"))
    for title in titles:
        for file, new, at_end, text in changes_of(title):
            path = root / file
            assert path.exists() == (not new), file
            before = "" if new else path.read_text(encoding="utf-8")
            after = before + text if new or at_end else patched(before, text)
            path.write_text(after, encoding="utf-8")
    return root / "workflow"


def patched(before: str, diff: str) -> str:
    """A file's text after a change that a diff shows: one line of the file, and what comes after it."""
    context, *added = diff.splitlines(keepends=True)
    assert context[0] == " "
    assert {line[0] for line in added} == {"+"}
    assert before.count(f"\n{context[1:]}") == 1, f"not once in the file: {context[1:]}"
    return before.replace(context[1:], context[1:] + "".join(line[1:] for line in added), 1)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, str | None]:
    """Of each section what went wrong with what it adds."""
    folder = tmp_path_factory.mktemp("extended")
    copies = {function_of(t): str(copy_with([t], folder / function_of(t))) for t in SECTIONS}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("extended.py")), json.dumps(copies)],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("title", SECTIONS)
def test_what_a_section_adds_works(outcomes, title):
    fault = outcomes[function_of(title)]
    assert fault is None, fault


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_says_how_many_files_it_takes(title):
    files = {file for file, *_ in changes_of(title)}
    assert files
    stated = re.search(r"^(\d+) files?[:,. ]", SECTIONS[title], re.M)
    assert int(stated[1]) == len(files)
    in_table = re.search(rf"\]\(#{title.lower().replace(' ', '-')}\) \| (\d+)", PAGE)
    assert int(in_table[1]) == len(files)


@pytest.mark.parametrize("title", SECTIONS)
def test_no_example_is_left_out(title):
    """A block of Python that is not applied would be one that nobody tries."""
    blocks = re.findall("^```(python|diff)$", SECTIONS[title], re.M)
    assert len(blocks) == len(changes_of(title))


def test_options_need_no_torch(tmp_path):
    code = (
        "import sys; from stratbench.strategies import get_strategy_class as s;"
        "s('pairs').Options(), s('ps-clipped').Options(); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(copy_with(["A strategy", "A policy"], tmp_path))},
        text=True,
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_a_cell_trains_with_a_strategy_and_a_metric_of_ones_own(tmp_path, start_cell):
    launched = start_cell(
        # The strategy exists in the copy alone; here its settings are those of any other.
        replace(
            settings(model="resnet-compact", epochs=2), strategy="pairs", options={"period": 3}
        ),
        workflow=copy_with(["A strategy", "A metric"], tmp_path),
    )
    launched.finish_with(0)
    found = launched.read_record()
    assert found["status"] == "ok"
    assert found["strategy"]["name"] == "pairs"
    assert found["strategy"]["options"] == {"period": 3}
    assert found["batch"]["updates_applied"] == 8
    assert found["score"]["evaluated_on"] == "the workers' mean weights and BatchNorm statistics"
    assert all(entry["train_loss_std"] > 0 for entry in found["score"]["per_epoch"])
