"""Cells of a user's command are ranked only where they did the work of those beside them."""

from __future__ import annotations

import copy

import pandas as pd
import planted
import pytest

from stratbench.analysis.decision.candidates import build_decision_candidates
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.records.columns import COLUMNS
from stratbench.analysis.records.measures import format_status_as_value
from stratbench.extensions.audit.audit import audit_cells
from stratbench.extensions.commands.same_work import (
    INCOMPARABLE,
    iter_command_notices,
    set_same_work_column,
)

DDP = ("main", "ddp", 2, 0)


def rows(change=lambda record: None, of=planted.STRATEGIES):
    """Rows of a sound study, and of a command beside it that `change` has made another."""
    found = [
        dict.fromkeys(COLUMNS) | planted.sound_row("cuda", place)
        for place in planted.sound("cuda")
        if place[0] == "main" and place[1] in of
    ]
    record = copy.deepcopy(planted.sound("cuda")[DDP])
    planted.by_command(record)
    record["cell"]["strategy"] = "mine"
    change(record)
    mine = dict.fromkeys(COLUMNS) | planted.row(record)
    set_same_work_column([*found, mine])
    return [*found, mine]


def fewer_samples(record):
    record["batch"]["samples_seen"] //= 2


def smaller_batch(record):
    record["program"]["self_reported"]["batch"] //= 2


def larger_network(record):
    record["model"]["parameters"] += 1


def untold_network(record):
    record["model"]["parameters"] = None


def other_workers(record):
    record["program"]["self_reported"]["workers"] = 4


def worse(record):
    record["score"]["final"] -= 0.1


def unscored(record):
    record["score"]["final"] = None


def test_equal_work_is_ranked_beside_the_others():
    *others, mine = rows()
    assert (mine["status"], mine["same_work"]) == ("ok", "yes")
    assert {row["same_work"] for row in others} == {None}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (fewer_samples, "it has 149,760 samples, but compared cells have 299,520"),
        (smaller_batch, "it has 64 samples per step, but compared cells have 128"),
        (larger_network, "parameters, but"),
        (untold_network, "does not report its number of parameters"),
        (other_workers, "it reports 4 processes, but the cell has 2"),
        (worse, "its accuracy is"),
        (unscored, "it reports no accuracy"),
    ],
)
def test_other_work_stands_with_its_reason_and_is_not_ranked(change, words):
    table = rows(change)
    mine = table[-1]
    assert mine["status"] == INCOMPARABLE
    assert words in mine["same_work"]
    assert words in mine["reason"]
    assert format_status_as_value(mine["status"], None) == "other work"
    frame = pd.DataFrame(table, columns=list(COLUMNS))
    found = {
        c.strategy: c for c in build_decision_candidates(frame, [], Constraints()) if c.gpus == 2
    }
    assert found["mine"].exclusion_kind == "other work"
    assert words in found["mine"].exclusion_reason
    assert found["ddp"].exclusion_kind != "other work"


def test_a_command_alone_is_compared_with_nothing():
    assert rows(of=())[-1]["same_work"] == "no: there is nothing to compare it with"


def test_commands_alone_are_held_to_each_other():
    first, second = rows(of=())[-1], rows(of=())[-1]
    second["strategy"] = "another"
    for row in (first, second):
        row["status"] = "ok"
    set_same_work_column([first, second])
    assert {first["same_work"], second["same_work"]} == {"yes"}


def test_a_chance_of_the_test_set_is_no_other_work():
    def slightly_worse(record):
        record["score"]["final"] -= 0.011  # a point is allowed, and a thousandth is chance

    assert rows(slightly_worse)[-1]["same_work"] == "yes"


def test_no_rule_of_our_own_loop_judges_a_command():
    """An honest one beside an honest study has no finding more than the study."""
    sound = dict(planted.sound("cuda"))
    frame = pd.DataFrame([planted.sound_row("cuda", p) for p in sound], columns=list(COLUMNS))
    without = audit_cells(frame, list(sound.values()))
    record = copy.deepcopy(sound[DDP])
    planted.by_command(record)
    record["cell"]["strategy"] = "mine"
    both = pd.concat([frame, pd.DataFrame([planted.row(record)], columns=list(COLUMNS))])
    assert audit_cells(both, [*sound.values(), record]) == without


def test_the_report_says_whose_word_a_commands_figures_are():
    frame = pd.DataFrame(rows(), columns=list(COLUMNS))
    told = list(iter_command_notices(frame, []))
    assert len(told) == 1
    assert "1 of 1 cell trained the same" in told[0]
    frame = pd.DataFrame(rows(smaller_batch), columns=list(COLUMNS))
    told = list(iter_command_notices(frame, []))
    assert told[1] == (
        "Not ranked, because of other work: mine on 2: "
        "it has 64 samples per step, but compared cells have 128."
    )
    ours = pd.DataFrame(rows()[:-1], columns=list(COLUMNS))
    assert not list(iter_command_notices(ours, []))
