"""Extensions as cells see them: settings that only their studies give, who runs a cell, families."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_config import settings_of, study

from launching import settings
from stratbench.analysis.figures.marks import FAMILIES
from stratbench.cell.settings import Settings
from stratbench.extensions.checkpoints.keys import Checkpoints
from stratbench.extensions.elastic.keys import Elastic
from stratbench.strategies import REGISTRY, get_strategy_class
from stratbench.train.running.runner import create_runner


@pytest.mark.parametrize(("given", "kept"), [({}, {}), (None, {}), (7, {"checkpoint_every": 7})])
def test_settings_hold_of_an_extension_only_what_a_study_gives(given, kept):
    """So that a record and a job's parameters say nothing of one that is not used, or was deleted."""
    change = {} if given == {} else {"checkpoint_every": given}
    (s, *_) = settings_of(study(strategies=["ddp"], **change))
    assert s.more == ({"checkpoints": kept} if kept else {})
    assert ("more" in s.as_dict()) == bool(kept)
    assert s.get_extension_keys(Checkpoints).checkpoint_every == kept.get("checkpoint_every")
    assert Settings.from_json(s.as_json()) == s


@pytest.mark.parametrize("target", [None, 0.5])
def test_a_target_score_is_a_setting_of_elastic_cells_alone(target):
    (rigid, *_) = settings_of(study(strategies=["ddp"], target_score=target))
    (elastic, *_) = settings_of(study(strategies=["ddp"], target_score=target, elastic=True))
    assert rigid.more == {}
    assert replace(elastic, more={}) == rigid
    assert elastic.get_extension_keys(Elastic) == Elastic(elastic=True, ends_at=target)
    assert elastic.more == {"elastic": {"elastic": True} | ({"ends_at": target} if target else {})}


@pytest.mark.parametrize(
    ("changes", "section"),
    [
        ({}, None),
        ({"strategy": "ps-async"}, None),
        ({"strategy": "command"}, "program"),
        ({"more": {"elastic": {"elastic": True}}}, "elastic"),
        ({"strategy": "ps-async", "more": {"elastic": {"elastic": True}}}, "elastic"),
        ({"more": {"checkpoints": {"checkpoint_every": 10}}}, "restarts"),
    ],
)
def test_who_runs_a_cell_fills_a_part_of_its_record_of_its_own(changes, section):
    assert create_runner(settings(**changes)).section == section


def test_every_hue_of_a_family_has_a_strategy():
    """`other` is for unknown strategies."""
    assert {get_strategy_class(name).family for name in REGISTRY} | {"other"} == set(FAMILIES)
