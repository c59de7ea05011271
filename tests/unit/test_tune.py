"""`tune`: which combinations there are, and what its sieves drop."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import pytest
import yaml

from stratbench.strategies import REGISTRY, option_defaults, strategy_class
from stratbench.study.config.config import load_config
from stratbench.tune import space
from stratbench.tune.__main__ import main
from stratbench.tune.sieves import (
    MEASURED,
    REFUSED,
    TOO_LARGE,
    TOO_SLOW,
    Sieved,
    _planned,
    drop_slow,
    sieve,
)
from stratbench.tune.space import Combination, combinations_of, strategies_of

TUNE = {"include": [], "exclude": [], "compile": False}
EXPERIMENT = {
    "dataset": "text",
    "strategies": ["ddp"],
    "models": ["gpt-compact"],
    "gpus": [2],
    "epochs": 1,
    "global_batch": 8,
    "lr": 0.01,
}


def config_of(**tune) -> dict:
    text = {"source": "markov-text", "train_samples": 64, "test_samples": 32}
    return {
        "study": "s",
        "datasets": {"text": text | {"vocabulary": 64, "sequence": 16}},
        "studies": {"s": {"experiments": {"first": dict(EXPERIMENT)}}},
        "cluster": {"gpu": "A10G 24GB"},
        "tune": {"include": ["ddp", "fsdp"]} | tune,
    }


def values_of(config: dict) -> dict:
    return load_config(config)[0]["studies"]["s"]["experiments"]["first"]


def test_all_strategies_that_train_as_ddp_does_are_looked_at():
    found = strategies_of(4, TUNE)
    assert {"ddp", "fsdp", "zero1", "tensor", "pipeline"} <= set(found)
    assert not {"single", "command", "local-sgd", "ps-async"} & set(found)
    assert strategies_of(4, TUNE | {"exclude": ["tensor"]}) == [n for n in found if n != "tensor"]
    assert strategies_of(4, TUNE | {"include": ["ps-async"]}) == ["ps-async"]


def test_combinations_follow_from_what_options_and_settings_say():
    values = values_of(config_of())
    found = combinations_of(values, 2, TUNE | {"include": ["fsdp"]})
    options = {json.dumps(dict(c.options)) for c in found}
    assert options == {
        "{}",
        '{"reshard_after_forward": "never"}',
        '{"shard_workers": "node"}',
        '{"offload": "cpu"}',
    }
    assert {c.settings.get("accumulate", 1) for c in found} == {1, 2, 4}  # parts of four samples
    assert {c.settings.get("activation_checkpointing", False) for c in found} == {
        False,
        True,
        "selective",
    }
    assert len({c.name for c in found}) == len(found) == 4 * 3 * 3
    compiled = combinations_of(values, 2, TUNE | {"include": ["fsdp"], "compile": True})
    assert len(compiled) == 2 * len(found)


@pytest.mark.parametrize("strategy", REGISTRY)
def test_what_is_tried_of_an_option_is_another_value_that_it_takes(strategy):
    for options in list(space._options_of(strategy, 16))[1:]:
        ((key, value),) = options.items()
        assert option_defaults(strategy)[key] != value
        strategy_class(strategy).Options(**options)


def test_only_what_is_planned_far_slower_than_the_fastest_is_dropped():
    def each(name: str, time_s: float | None, fate: str = MEASURED) -> Sieved:
        return Sieved(Combination(name), fate, "", time_s)

    given = [
        each("ddp", 20.0),
        each("zero1", 10.0),
        each("fsdp", 13.0),
        each("tensor", 13.1),
        each("pipeline", None),
        each("deepspeed", 1.0, REFUSED),
    ]
    by_name = {s.combination.name: s for s in given}
    drop_slow(by_name, "ddp", 1.3)
    fates = {name: s.fate for name, s in by_name.items()}
    assert fates == {
        "ddp": MEASURED,  # the baseline, whatever it takes
        "zero1": MEASURED,
        "fsdp": MEASURED,
        "tensor": TOO_SLOW,
        "pipeline": MEASURED,  # nothing is known of it
        "deepspeed": REFUSED,
    }
    assert by_name["tensor"].why == "planned 1.31 times as long as the fastest (kept up to 1.3)"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_sieves_say_why_and_write_a_study_that_can_be_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = config_of(include=["ddp", "tensor"])
    assert main(["--config", json.dumps(config)]) == 0
    told = capsys.readouterr().out
    with open("results/s/tune/tune.csv", newline="") as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert f"{len(rows)} combinations: " in told
    assert rows["ddp"]["fate"] == MEASURED
    assert all(row["why"] for row in rows.values())
    tuned = yaml.safe_load((tmp_path / "results/s/tune/config.yaml").read_text())
    whole, study = load_config(config | tuned)
    assert study.name == "s-tune"
    kept = [name for name, row in rows.items() if row["fate"] == MEASURED]
    assert [cell.strategy for cell in study.cells] == kept
    assert whole["studies"]["s-tune"]["experiments"]["first"]["global_batch"] == 8


def test_what_the_config_refuses_is_not_measured():
    found = [
        Combination("ddp", {}, {"accumulate": 3}),
        Combination("ps-sync", {}, {"accumulate": 2}),
    ]
    sieved = sieve(config_of(), "first", 2, "gpt-compact", found, "ddp")
    assert [s.fate for s in sieved] == [REFUSED, REFUSED]
    assert "cannot be divided" in sieved[0].why
    assert "ps-sync" in sieved[1].why


@pytest.mark.parametrize(("needed_bytes", "fate"), [(150, MEASURED), (151, TOO_LARGE)])
def test_half_again_a_workers_memory_is_tried(needed_bytes, fate):
    fit = SimpleNamespace(
        room_bytes=80.0, needed_bytes=needed_bytes, verdict="tight", device="a GPU", usual_s=1.0
    )
    planned = SimpleNamespace(state="to do", fit=fit)
    assert _planned(Combination("ddp"), planned, memory_margin=0.25).fate == fate


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ({"experiment": "second"}, "tune.experiment = 'second': is not an experiment of s"),
        ({"model": "vgg16"}, "tune.model = 'vgg16': is not a model of first"),
        ({"include": ["fdsp"]}, "tune.include = 'fdsp': is not a strategy. Did you mean 'fsdp'?"),
        ({"baseline": "dpp"}, "tune.baseline = 'dpp': is not a strategy. Did you mean 'ddp'?"),
        ({"exclude": ["ddp", "fsdp"]}, "tune: no strategy is left"),
    ],
)
def test_a_mistake_in_its_block_is_one_sentence(tmp_path, monkeypatch, capsys, tune, message):
    monkeypatch.chdir(tmp_path)
    assert main(["--config", json.dumps(config_of(**tune))]) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")
