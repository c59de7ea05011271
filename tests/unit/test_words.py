"""Numbers in words."""

from __future__ import annotations

import pytest

from stratbench.cell.text.words import counted, worker_noun


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (1, "GPU", "1 GPU"),
        (2, "GPU", "2 GPUs"),
        (0, "cell", "0 cells"),
        (1, "CPU process", "1 CPU process"),
        (4, "CPU process", "4 CPU processes"),
    ],
)
def test_a_count_and_its_noun_agree(count, noun, words):
    assert counted(count, noun) == words


@pytest.mark.parametrize(
    ("kinds", "noun"),
    [
        (["cuda", "cuda"], "GPU"),
        (["cpu", None, float("nan")], "CPU process"),
        (["cpu", "cuda"], "worker"),
        ([None], "worker"),
        ([], "worker"),
    ],
)
def test_workers_are_called_by_what_they_run_on(kinds, noun):
    assert worker_noun(kinds) == noun
