"""The tutorials, followed to the letter, but for what varies in what their commands print."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from tutorial import ROOT, Follower, expected_output, read_steps


@pytest.mark.parametrize(
    ("lines", "output", "holds"),
    [
        (["a … s"], "before\na 1.5 s\nafter\n", True),
        (["a … s"], "a 1.5 min\n", False),
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


def test_what_a_command_prints_otherwise_is_a_failure(tmp_path: Path):
    follower = Follower(tmp_path)
    [step] = read_steps("```console\n$ echo one\ntwo\n```\n")
    with pytest.raises(AssertionError, match="one"):
        follower.follow(step)


with_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="pip install transformers"
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "page",
    [
        "decision.md",
        "tutorials/demo.md",
        pytest.param("tutorials/transformers.md", marks=with_transformers),
    ],
)
def test_a_page_shows_what_its_commands_print(tmp_path: Path, page: str):
    follower = Follower(tmp_path)
    for step in read_steps((ROOT / "docs" / page).read_text(encoding="utf-8")):
        follower.follow(step)
