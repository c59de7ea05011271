"""`tune`: which combinations there are, and what its sieves drop."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from synthetic_files import Files
from synthetic_paired import World
from test_plan_footprint import describe_gpt

from stratbench.extensions.plan.needs import make_cell_to_plan
from stratbench.extensions.tune import sieves, space, subcommand
from stratbench.extensions.tune.__main__ import main
from stratbench.extensions.tune.differences import KINDS, Margin
from stratbench.extensions.tune.sieves import (
    LATER,
    MEASURED,
    OUT_OF_MEMORY,
    TOO_LARGE,
    TOO_SLOW,
    UNSUPPORTED,
    FilterResult,
    _filter_combination_by_plan,
    drop_slow_combinations,
    filter_combinations,
)
from stratbench.extensions.tune.space import Combination, list_combinations, list_strategies_to_try
from stratbench.extensions.verdict.blocks import hash_trained_settings
from stratbench.strategies import REGISTRY, get_option_defaults, get_strategy_class
from stratbench.study.config.config import load_config

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
    found = list_strategies_to_try(4, TUNE)
    assert {"ddp", "fsdp", "zero1", "tensor", "pipeline"} <= set(found)
    assert not {"single", "command", "local-sgd", "ps-async"} & set(found)
    assert list_strategies_to_try(4, TUNE | {"exclude": ["tensor"]}) == [
        n for n in found if n != "tensor"
    ]
    assert list_strategies_to_try(4, TUNE | {"include": ["ps-async"]}) == ["ps-async"]


def test_combinations_follow_from_what_options_and_settings_say():
    values = values_of(config_of())
    found = list_combinations(values, 2, TUNE | {"include": ["fsdp"]})
    options = {json.dumps(dict(c.options)) for c in found}
    assert options == {
        "{}",
        '{"reshard_after_forward": "never"}',
        '{"shard_group_size": "node"}',
        '{"offload": "cpu"}',
    }
    # parts of four samples
    assert {c.settings.get("gradient_accumulation_steps", 1) for c in found} == {1, 2, 4}
    assert {c.settings.get("activation_checkpointing", False) for c in found} == {
        False,
        True,
        "selective",
    }
    assert len({c.name for c in found}) == len(found) == 4 * 3 * 3
    compiled = list_combinations(values, 2, TUNE | {"include": ["fsdp"], "compile": True})
    assert len(compiled) == 2 * len(found)


@pytest.mark.parametrize("strategy", REGISTRY)
def test_what_is_tried_of_an_option_is_another_value_that_it_takes(strategy):
    for options in list(space._iter_options_to_try(strategy, 16))[1:]:
        ((key, value),) = options.items()
        assert get_option_defaults(strategy)[key] != value
        get_strategy_class(strategy).Options(**options)


def test_only_what_is_planned_far_slower_than_the_fastest_is_dropped():
    def each(name: str, time_s: float | None, fate: str = MEASURED) -> FilterResult:
        return FilterResult(Combination(name), fate, "", time_s)

    given = [
        each("ddp", 20.0),
        each("zero1", 10.0),
        each("fsdp", 13.0),
        each("tensor", 13.1),
        each("pipeline", None),
        each("deepspeed", 1.0, UNSUPPORTED),
    ]
    by_name = {s.combination.name: s for s in given}
    drop_slow_combinations(by_name, "ddp", 1.3, {})
    fates = {name: s.outcome for name, s in by_name.items()}
    assert fates == {
        "ddp": MEASURED,  # the baseline, whatever it takes
        "zero1": MEASURED,
        "fsdp": MEASURED,
        "tensor": TOO_SLOW,
        "pipeline": MEASURED,  # nothing is known of it
        "deepspeed": UNSUPPORTED,
    }
    assert by_name["tensor"].reason == "planned 1.31 times as long as zero1 (kept up to 1.30)"


PLAIN = dict.fromkeys(KINDS, 1.0)
CHECKPOINTED = {"activation_checkpointing": True}


def test_what_is_dropped_by_time_follows_from_what_it_differs_in():
    def each(c: Combination, time_s: float, **amounts: float) -> FilterResult:
        return FilterResult(c, MEASURED, "", time_s, None, PLAIN | amounts)

    bucket = {"bucket_cap_mb": 100}
    given = [
        each(Combination("ddp"), 10.0),
        each(Combination("ddp", {}, CHECKPOINTED), 12.1, checkpointing=2.0),
        each(Combination("ddp", bucket), 9.0),  # an option of no known kind: not comparable
        each(Combination("ddp", bucket, CHECKPOINTED), 10.9, checkpointing=2.0),
        each(Combination("fsdp"), 50.0, sharding=3.0),  # no evidence
    ]
    by_name = {s.combination.name: s for s in given}
    drop_slow_combinations(by_name, "zero1", None, {("checkpointing", True): Margin(1.2, 9, 4)})
    dropped = {name: s.reason for name, s in by_name.items() if s.outcome == TOO_SLOW}
    assert dropped == {
        "ddp_checkpointing": "planned 1.21 times as long as ddp (kept up to 1.20)",
        "ddp_bucket-cap-mb-100_checkpointing": (
            "planned 1.21 times as long as ddp_bucket-cap-mb-100 (kept up to 1.20)"
        ),
    }
    by_name = {s.combination.name: s for s in given}
    drop_slow_combinations(
        by_name, "ddp_checkpointing", None, {("checkpointing", True): Margin(1.2, 9, 4)}
    )
    assert by_name["ddp_checkpointing"].outcome == MEASURED  # the baseline


@pytest.mark.parametrize(
    ("strategy", "options", "settings", "amounts"),
    [
        ("ddp", {}, {"gradient_accumulation_steps": 4}, {"micro-batch": 1}),
        ("ddp", {}, {"activation_checkpointing": "selective"}, {"checkpointing": 0.4}),
        ("zero1", {}, {}, {"sharding": 1}),
        (
            "fsdp",
            {},
            {"activation_checkpointing": "every-2"},
            {"sharding": 3, "checkpointing": 0.5},
        ),
        ("fsdp", {"reshard_after_forward": "never"}, {}, {"sharding": 2}),
        (
            "fsdp",
            {"offload": "cpu"},
            {"compile": True},
            {"sharding": 3, "offload": 1, "compile": 1},
        ),
        ("tensor", {"tensor_parallel_size": 2}, {}, {"sharding": 3, "tensor": 2}),
        (
            "tensor",
            {"data_parallel": "ddp"},
            {"gradient_accumulation_steps": 2},
            {"micro-batch": 2, "tensor": 4},
        ),
        (
            "pipeline",
            {"pipeline_parallel_size": 2, "microbatches": 4},
            {},
            {"micro-batch": 2, "pipeline": 2},
        ),
    ],
)
def test_a_cell_says_what_it_has_of_each_kind(strategy, options, settings, amounts):
    config = config_of()
    combination = Combination(strategy, options, settings)
    config["studies"]["s"]["experiments"]["first"] |= {"global_batch": 16, "device": "cuda"}
    whole, study = load_config(
        sieves.add_tuning_study(config, "first", 4, "gpt-compact", [combination])
    )
    (cell,) = study.cells
    plain = dict.fromkeys(KINDS, 0) | {"micro-batch": 4, "tensor": 1, "pipeline": 1}
    assert (
        sieves.compute_difference_amounts(make_cell_to_plan(whole, study, cell)) == plain | amounts
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_sieves_say_why_and_write_a_study_that_can_be_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = config_of(include=["ddp", "tensor"]) | {"models": {"small": describe_gpt(1, 64)}}
    # A sample per worker has no micro-batches, whose combinations each take a second to plan.
    config["studies"]["s"]["experiments"]["first"] |= {"global_batch": 2, "models": ["small"]}
    assert main(["--config", json.dumps(config)]) == 0
    told = capsys.readouterr().out
    with open("results/s/tune/tune.csv", newline="") as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert "\nModel small of the experiment first on 2 workers:\n" in told
    assert f"{len(rows)} combinations: " in told
    assert rows["ddp"]["fate"] == MEASURED
    assert all(row["reason"] for row in rows.values())
    tuned = yaml.safe_load((tmp_path / "results/s/tune/config.yaml").read_text())
    whole, study = load_config(config | tuned)
    assert study.name == "s-tune"
    kept = [name for name, row in rows.items() if row["fate"] == MEASURED]
    assert [cell.strategy for cell in study.cells] == kept
    assert whole["studies"]["s-tune"]["experiments"]["first"]["global_batch"] == 2


def test_what_the_config_refuses_is_not_measured():
    found = [
        Combination("ddp", {}, {"gradient_accumulation_steps": 3}),
        Combination("ps-sync", {}, {"gradient_accumulation_steps": 2}),
    ]
    sieved = filter_combinations(config_of(), "first", 2, "gpt-compact", found, "ddp")
    assert [s.outcome for s in sieved] == [UNSUPPORTED, UNSUPPORTED]
    assert "cannot be divided" in sieved[0].reason
    assert sieved[1].reason.startswith("gradient_accumulation_steps = 2: ")
    # The user named no such strategy, and may have a hundred of them: equal reasons are told once.
    assert "remove" not in sieved[1].reason


@pytest.mark.parametrize(("needed_bytes", "fate"), [(150, MEASURED), (151, TOO_LARGE)])
def test_half_again_a_workers_memory_is_tried(needed_bytes, fate):
    fit = SimpleNamespace(
        room_bytes=80.0,
        needed_bytes=needed_bytes,
        memory_verdict="tight",
        device="a GPU",
        usual_s=None,
    )
    on_cpus = SimpleNamespace(request=SimpleNamespace(is_on_cuda=False))
    planned = SimpleNamespace(state="to do", fit=fit, subject=on_cpus)
    assert (
        _filter_combination_by_plan(Combination("ddp"), planned, memory_margin=0.25).outcome == fate
    )


def test_what_ran_out_of_memory_leaves_its_place_to_what_it_was_faster_than(tmp_path):
    files = Files(tmp_path, World(steps_s={"ddp": 0.1, "fsdp": 0.2}, scores={}, oom=["ddp"]))
    files.run(files.next_round())
    failed = sieves.read_out_of_memory_combinations(str(tmp_path), "demo")
    cells = [cell for cell in files.study.cells if cell.strategy == "ddp"]
    assert failed == {("ddp", hash_trained_settings(files.study.settings(cell))) for cell in cells}

    def fates(of_first: str) -> dict[str, str]:
        given = [
            FilterResult(Combination("ddp"), of_first, "", 1.0, None, PLAIN),
            FilterResult(
                Combination("ddp", {}, CHECKPOINTED),
                MEASURED,
                "",
                1.5,
                None,
                PLAIN | {"checkpointing": 2},
            ),
        ]
        by_name = {s.combination.name: s for s in given}
        drop_slow_combinations(by_name, "fsdp", None, {("checkpointing", True): Margin(1.2, 9, 4)})
        return {name: s.outcome for name, s in by_name.items()}

    assert fates(MEASURED) == {"ddp": MEASURED, "ddp_checkpointing": TOO_SLOW}
    assert fates(OUT_OF_MEMORY) == {"ddp": OUT_OF_MEMORY, "ddp_checkpointing": MEASURED}


def test_a_budget_puts_off_the_planned_slowest_and_a_larger_one_measures_them():
    def measured(budget_gpu_hours: float | None) -> list[str]:
        # 7.5 segments of each: half an hour
        costs = {"planned_segment_gpu_s": 240.0, "planned_training_gpu_s": 3600.0}
        given = [
            FilterResult(Combination(name), MEASURED, "", time_s, **costs)
            for name, time_s in (("ddp", 9.0), ("zero1", 3.0), ("fsdp", 2.0), ("tensor", 4.0))
        ] + [FilterResult(Combination("pipeline"), MEASURED)]
        by_name = {s.combination.name: s for s in given}
        sieves.postpone_combinations_beyond_budget(by_name, "ddp", budget_gpu_hours)
        later = [s for s in by_name.values() if s.outcome == LATER]
        assert all("a larger budget measures it" in s.reason for s in later)
        return [name for name, s in by_name.items() if s.outcome == MEASURED]

    assert measured(0.1) == ["ddp", "fsdp", "pipeline"]
    assert measured(2.5) == ["ddp", "zero1", "fsdp", "pipeline"]
    assert measured(3.0) == measured(None) == ["ddp", "zero1", "fsdp", "tensor", "pipeline"]


def test_rounds_are_followed_by_a_sieve_until_it_leaves_the_study_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("study: s\n")
    tuned, ran = tmp_path / "results" / "s" / "tune" / "config.yaml", []
    tuned.parent.mkdir(parents=True)
    contents = iter(["first", "second", "second"])

    def run(command: list[str], check: bool) -> SimpleNamespace:
        ran.append(next(rule for rule in ("tune", "verdict") if rule in command))
        if ran[-1] == "tune":
            tuned.write_text(next(contents))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subcommand.subprocess, "run", run)
    given = SimpleNamespace(profile="local", sieve_only=False, study=None, config=[], set=[])
    monkeypatch.setattr("stratbench.command.subcommands.list_config_pairs", lambda given: [])
    assert subcommand.run_tune(given, []) == 0
    assert ran == ["tune", "verdict", "tune", "verdict", "tune"]


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ({"experiment": "second"}, "tune.experiment = 'second': is not an experiment of s"),
        ({"model": "vgg16"}, "tune.model = 'vgg16': is not a model of first"),
        ({"include": ["fdsp"]}, "tune.include = 'fdsp': is not a strategy. Did you mean 'fsdp'?"),
        ({"baseline": "dpp"}, "tune.baseline = 'dpp': is not a strategy. Did you mean 'ddp'?"),
        ({"exclude": ["ddp", "fsdp"]}, "no strategy is left after `include` and `exclude`"),
    ],
)
def test_a_mistake_in_its_block_is_one_sentence(tmp_path, monkeypatch, capsys, tune, message):
    monkeypatch.chdir(tmp_path)
    assert main(["--config", json.dumps(config_of(**tune))]) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")
