"""Settings of extensions: a cell holds only what its study gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_config import settings_of, study

from stratbench.cell.settings import Settings
from stratbench.extensions.checkpoints.keys import Checkpoints
from stratbench.extensions.elastic.keys import Elastic


@pytest.mark.parametrize(("given", "kept"), [({}, {}), (None, {}), (7, {"checkpoint_every": 7})])
def test_settings_hold_of_an_extension_only_what_a_study_gives(given, kept):
    """So that a record and a job's parameters say nothing of one that is not used, or was deleted."""
    change = {} if given == {} else {"checkpoint_every": given}
    (s, *_) = settings_of(study(strategies=["ddp"], **change))
    assert s.more == ({"checkpoints": kept} if kept else {})
    assert ("more" in s.as_dict()) == bool(kept)
    assert s.of(Checkpoints).checkpoint_every == kept.get("checkpoint_every")
    assert Settings.from_json(s.as_json()) == s


@pytest.mark.parametrize("target", [None, 0.5])
def test_a_target_score_is_a_setting_of_elastic_cells_alone(target):
    (rigid, *_) = settings_of(study(strategies=["ddp"], target_score=target))
    (elastic, *_) = settings_of(study(strategies=["ddp"], target_score=target, elastic=True))
    assert rigid.more == {}
    assert replace(elastic, more={}) == rigid
    assert elastic.of(Elastic) == Elastic(elastic=True, ends_at=target)
    assert elastic.more == {"elastic": {"elastic": True} | ({"ends_at": target} if target else {})}
