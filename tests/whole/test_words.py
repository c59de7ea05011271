"""Numbers in words."""

from __future__ import annotations

import pytest

from stratbench.cell.text.words import (
    choose_noun_for_workers,
    format_count,
    format_names,
    join_with_and,
)


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
    assert format_count(count, noun) == words


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
    assert choose_noun_for_workers(kinds) == noun


@pytest.mark.parametrize(
    ("names", "listed", "joined"),
    [
        ("a", "a", "a"),
        ("ab", "a, b", "a and b"),
        ("abc", "a, b, c", "a, b and c"),
        ("abcde", "a, b, c and 2 more", "a, b, c, d and e"),
    ],
)
def test_of_many_names_the_first_are_told_and_the_others_counted(names, listed, joined):
    assert format_names(list(names), 3) == listed
    assert join_with_and(names) == joined
