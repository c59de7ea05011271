"""The audit against whole lies: timelines, energy, tenants, load, scores and memory."""

from __future__ import annotations

import copy

import fixture_records as fixture
import pytest
import whole_lies
from whole_lies import DDP, HONEST, LIES, RULES_OF

from stratbench.analysis.records.samples import parse_timeline


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIES)
def test_whole_lies_are_found_by_rules_of_their_class(kind):
    found = {name: whole_lies.run_rule(lie) & RULES_OF[kind] for name, lie in LIES[kind].items()}
    assert [name for name, rules in found.items() if not rules] == []
    assert set().union(*found.values()) == RULES_OF[kind]


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_nothing_is_found_in_an_honest_study_that_is_not_so(name):
    assert whole_lies.false_findings(name) == {}


def sound(strategy="ddp", gpus=4):
    (cell,) = fixture.expand((strategy,), ("resnet50",), (gpus,))
    return copy.deepcopy(fixture.make_record(cell))


HEADER = fixture.timeline_text([]).strip()


def host_row(load):
    row = {"t_s": 0.1, "node": "n", "kind": "host", "id": "n", "load_1m": load}
    return fixture.timeline_text([row]).splitlines()[1]


def study(*records, **how):
    found = whole_lies.Study({}, {})
    for record in records:
        place = record["cell"]["strategy"], record["cell"]["gpus"], record["cell"]["repeat"]
        found.records[place] = record
        found.sample(place, **how)
    return found


def figures(found):
    return {f["rule"]: f["figures"] for f in whole_lies.findings(found)}


def test_a_gpu_that_did_nothing_is_named_with_what_others_did():
    found = study(sound(), period_s=1.0)
    whole_lies.idle_gpu(0)(found)
    assert "rank 2 was busy in 0 % of training, others" in figures(found)["idle-worker"]


@pytest.mark.parametrize("samples", [0, 3, 9])
def test_nobody_is_judged_by_few_samples_of_training(samples):
    found = study(sound(), period_s=1.0)
    whole_lies.idle_gpu(0)(found)
    trained = [row for row in found.samples[DDP] if row["phase"] == "train"]
    times = sorted({row["t_s"] for row in trained})[samples:]
    found.samples[DDP] = [row for row in found.samples[DDP] if row["t_s"] not in times]
    assert "idle-worker" not in figures(found)


def test_two_of_equal_arithmetic_that_differ_are_both_named():
    records = [sound("ddp"), sound("fsdp")]
    for entry in records[0]["score"]["per_epoch"]:
        entry["test_loss"] *= 1.4427
    found = [
        f["strategy"]
        for f in whole_lies.findings(study(*records, period_s=5.0))
        if f["rule"] == "equal-arithmetic-unequal-loss"
    ]
    assert set(found) == {"ddp", "fsdp"}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], None),
        (["a,b", "1,2"], None),
        (["t_s,kind,id", "0.1,host,x"], None),
        ([HEADER, host_row("0.1"), "0.2,n"], 1),
        ([HEADER, host_row("0.1").replace("host", "dragon")], 0),
    ],
)
def test_what_is_no_row_of_a_timeline_is_left_out(lines, expected):
    timeline = parse_timeline(lines)
    assert (timeline and len(timeline.series_by_source)) == expected


@pytest.mark.parametrize("value", ["nan", "inf", "many"])
def test_a_timeline_that_holds_no_numbers_is_none(value):
    with pytest.raises(ValueError, match=value):
        parse_timeline([HEADER, host_row(value)])
