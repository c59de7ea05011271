"""config.yaml: what is refused and how it is said; what cells are trained with."""

from __future__ import annotations

import copy
import json
import math
import re
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from stratbench.cell import record
from stratbench.cell.extensions import iter_extension_keys
from stratbench.cell.settings import GIVEN, Settings
from stratbench.strategies import get_option_defaults
from stratbench.study.config import config, messages, schema, validation, yaml_traps
from stratbench.study.config.messages import ConfigError
from stratbench.study.config.removed_keys import REMOVED_KEYS
from stratbench.workload.data.datasets import SPECS

ROOT = Path(__file__).parents[2]
EXPERIMENT = "studies.demo.experiments.first"


def raw(**changes: Any) -> dict[str, Any]:
    """A valid config of one study and one experiment; `changes` replace keys of the experiment."""
    first = {
        "dataset": "digits",
        "strategies": ["single", "ddp", "fsdp"],
        "models": ["vgg-compact", "resnet-compact"],
        "gpus": [1, 2, 4],
        "epochs": 2,
        "global_batch": 64,
        "lr": 0.05,
    }
    first = {k: v for k, v in (first | changes).items() if v is not REMOVED}
    return {"study": "demo", "studies": {"demo": {"experiments": {"first": first}}}}


REMOVED = object()


def refusal(config_: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        validation.validate_config(config_)
    return str(refused.value)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(("variant", "is_refused"), [(76, False), (77, True)])
def test_names_that_make_too_long_a_folder_together_are_refused_with_the_longest(
    tmp_path, variant, is_refused
):
    """Each of them may have 100 letters; the SLURM plugin joins them."""
    names = {"study": "s" * 66, "experiment": "e" * 75, "variant": "v" * variant}
    given = raw(strategies=[names["variant"]])
    (block,) = given["studies"]["demo"]["experiments"].values()
    given["studies"] = {
        names["study"]: {
            "experiments": {names["experiment"]: block},
            "variants": {names["variant"]: {"strategy": "ddp"}},
        }
    }
    given["study"] = names["study"]
    if is_refused:
        said = refusal(given)
        assert "have 241 letters" in said
        assert f"choose a shorter name for the strategy '{names['variant']}'" in said
        return
    validation.validate_config(given)
    joined = "_".join([*names.values(), "resnet-compact", "4", "999"])
    assert len(joined) == 240
    (tmp_path / joined).mkdir()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # unknown names
        (
            {"epochss": 3},
            ["epochss = 3: unknown key 'epochss'", "Did you mean 'epochs'?", "Allowed: "],
        ),
        (
            {"strategies": ["dpp"]},
            ["strategies = 'dpp'", "Did you mean 'ddp'?", "single, ddp, "],
        ),
        ({"models": ["resnet-compakt"]}, ["models", "Did you mean 'resnet-compact'?", "vgg16"]),
        (
            {"dataset": "cifar-10"},
            ["dataset = 'cifar-10'", "Did you mean 'cifar10'?", "digits, mnist"],
        ),
        ({"precision": "f16"}, ["precision = 'f16'", "Did you mean 'fp16'?", "bf16"]),
        ({"device": "gpu"}, ["device = 'gpu'", "auto, cpu, cuda"]),
        # missing keys
        ({"lr": REMOVED}, ["'lr' is missing", "Learning rate"]),
        ({"dataset": REMOVED}, ["'dataset' is missing"]),
        # batches
        (
            {"gpus": [1, 3]},
            ["global_batch = 64: the batch cannot be split evenly over 3 workers", "[1, 3]"],
        ),
        ({"epochs": None}, ["either epochs or steps", "given: neither"]),
        (
            {"optimizer": "adamw", "betas": [0.9]},
            ["betas = [0.9]: must have at least 2 entries"],
        ),
        ({"optimizer": "adamw", "betas": [0.9, 0.9, 0.9]}, ["must have at most 2 entries"]),
        ({"gpus": [1], "global_batch": 10**9}, ["a step of 1 worker would"]),
        ({"per_worker_batch": 8}, ["either global_batch", "per_worker_batch = 8"]),
        ({"global_batch": REMOVED}, ["either global_batch", "given: neither"]),
        ({"global_batch": 1500, "gpus": [1]}, ["global_batch = 1500", "1437"]),
        (
            {"global_batch": REMOVED, "per_worker_batch": 500},
            ["per_worker_batch = 500", "4 workers"],
        ),
        ({"global_batch": 4}, ["global_batch = 4: each of 4 workers has a batch of one sample"]),
        ({"global_batch": 0}, ["global_batch = 0: must be at least 1"]),
        # ranges
        ({"gpus": [1, 0]}, ["gpus[1] = 0: must be at least 1"]),
        ({"gpus": [-2]}, ["gpus[0] = -2: must be at least 1"]),
        ({"epochs": 0}, ["epochs = 0: must be at least 1"]),
        ({"lr": 0}, ["lr = 0: must be greater than 0"]),
        ({"lr": -0.1}, ["lr = -0.1: must be greater than 0"]),
        ({"momentum": 1.0}, ["momentum = 1.0: must be less than 1"]),
        ({"warmup_steps": 0}, ["warmup_steps = 0: must be at least 1"]),
        ({"threads": 0}, ["threads = 0: must be at least 1"]),
        ({"time_limit_s": 0}, ["time_limit_s = 0: must be at least 1"]),
        ({"time_limit_s": 0.5}, ["time_limit_s = 0.5: must be a whole number or null"]),
        # duplicates and empty lists
        ({"gpus": [1, 2, 1]}, ["gpus = [1, 2, 1]: 1 is given twice"]),
        ({"models": ["vgg16", "vgg16"]}, ["'vgg16' is given twice"]),
        ({"strategies": ["ddp", "ddp"]}, ["'ddp' is given twice"]),
        ({"gpus": []}, ["gpus: must not be empty"]),
        ({"models": []}, ["models: must not be empty"]),
        ({"strategies": []}, ["strategies: must not be empty"]),
        # types
        ({"lr": "1e999"}, ["lr = inf: must be a finite number"]),
        ({"epochs": "2.0"}, ["epochs = '2.0': must be a whole number"]),
        ({"epochs": "9" * 5000}, ["epochs = '9999", "must be a whole number"]),
        ({"lr": "fast"}, ["lr = 'fast': must be a number. "]),
        ({"lr": True}, ["lr = true: must be a number"]),
        ({"lr": None}, ["lr = null: must be a number"]),
        ({"epochs": True}, ["epochs = true: must be a whole number"]),
        ({"epochs": 2.0}, ["epochs = 2.0: must be a whole number"]),
        ({"epochs": 2.5}, ["epochs = 2.5: must be a whole number"]),
        ({"gpus": [1.0]}, ["gpus[0] = 1.0: must be a whole number"]),
        ({"gpus": [True]}, ["gpus[0] = true: must be a whole number"]),
        ({"gpus": 2}, ["gpus = 2: must be a list; write [2]."]),
        ({"models": "vgg16"}, ["models = 'vgg16': must be a list; write [vgg16]."]),
        ({"strategies": [False]}, ["strategies[0] = false: must be text"]),
        ({"nesterov": "perhaps"}, ["nesterov = 'perhaps': must be true or false"]),
        ({"nesterov": 1}, ["nesterov = 1: must be true or false"]),
        ({"lr": math.nan}, ["lr = nan: must be a finite number"]),
        ({"lr": math.inf}, ["lr = inf: must be a finite number"]),
        ({"weight_decay": math.inf}, ["weight_decay = inf: must be a finite number"]),
        # one key against another
        ({"optimizer": "adam"}, ["optimizer = 'adam'", "adamw"]),
        ({"device": "gpu"}, ["device = 'gpu'", "Did you mean 'cuda'?"]),
        (
            {"optimizer": "adamw", "momentum": 0.9},
            ["momentum = 0.9: AdamW uses betas instead", "remove"],
        ),
        ({"optimizer": "adamw", "nesterov": True}, ["nesterov = true: AdamW uses betas instead"]),
        ({"betas": [0.9, 0.99]}, ["betas = [0.9, 0.99]: only AdamW", "optimizer: adamw"]),
        ({"eps": 1e-8}, ["eps = 1e-08: only AdamW"]),
        ({"optimizer": "adamw", "betas": [0.9, 1.0]}, ["betas", "less than 1"]),
        ({"schedule": "step"}, ["schedule = 'step'", "cosine"]),
        ({"final_lr": 0.001}, ["final_lr = 0.001: a constant schedule", "remove"]),
        ({"final_lr": 9.0, "schedule": "linear"}, ["final_lr = 9.0: is above lr"]),
        ({"lr_warmup_steps": 10**6}, ["lr_warmup_steps = 1000000", "use fewer"]),
        (
            {"gradient_accumulation_steps": 0},
            ["gradient_accumulation_steps = 0: must be at least 1"],
        ),
        (
            {"gradient_accumulation_steps": 3},
            ["gradient_accumulation_steps = 3: a batch of", "equal parts"],
        ),
        (
            {"activation_checkpointing": True, "models": ["vgg16"]},
            ["activation_checkpointing = true: vgg16", "a single layer", "set it to false"],
        ),
        (
            {"activation_checkpointing": "every-3", "models": ["vgg16"]},
            ["activation_checkpointing = 'every-3': vgg16", "a single layer"],
        ),
        (
            {"activation_checkpointing": "every-1"},
            ["activation_checkpointing = 'every-1': is not allowed", "`selective`", "`every-2`"],
        ),
        (
            {"activation_checkpointing": 2},
            ["activation_checkpointing = 2: must be true or false or text", "`every-2`"],
        ),
        (
            {"loss_chunks": 2},
            [
                "loss_chunks = 2: the data set",
                "is not a text for next-token; set it to 1",
            ],
        ),
        ({"max_grad_norm": 0}, ["max_grad_norm = 0: must be greater than 0"]),
        (
            {"optimizer_impl": "for-loop", "precision": "fp16", "strategies": ["ddp"]},
            ["optimizer_impl = 'for-loop': with precision: fp16", "use bf16"],
        ),
        ({"nesterov": True, "momentum": 0}, ["nesterov = true: needs momentum > 0"]),
        ({"strategies": ["single"], "gpus": [2, 4]}, ["gpus = [2, 4]", "single uses at most 1"]),
        ({"dataset": "synthetic", "augment": True}, ["augment = true", "no augmentation"]),
        ({"slowdown": {}}, ["slowdown = {}", "slows no worker"]),
        ({"slowdown": {"factor": 2}}, ["workers and factor need each other"]),
        ({"slowdown": {"workers": [1]}}, ["workers and factor need each other"]),
        ({"slowdown": {"workers": [], "factor": 2}}, ["slows no worker"]),
        ({"slowdown": {"workers": [4], "factor": 2}}, ["no cell has a worker of rank 4"]),
        (
            {"slowdown": {"workers": [0], "factor": 0.5}},
            ["slowdown.factor = 0.5: must be at least 1"],
        ),
        ({"slowdown": {"worker": [0]}}, ["Did you mean 'workers'?"]),
    ],
)
def test_a_mistake_in_an_experiment(changes, expected):
    check_mistake(changes, expected)


def check_mistake(changes: dict[str, Any], expected: list[str]) -> None:
    """AssertionError if changes of the experiment are not refused in one line with all that is expected."""
    message = refusal(raw(**changes))
    assert "\n" not in message
    assert message.startswith(f"config: {EXPERIMENT}")
    for part in expected:
        assert part in message, message


def changed(path: str, value: Any) -> dict[str, Any]:
    """The valid config with `path` (separated by blanks) set to `value`."""
    found = raw()
    *parents, last = path.split(" ")
    block = found
    for key in parents:
        block = block.setdefault(key, {})
    block[last] = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("study", "dem", ["study = 'dem'", "Did you mean 'demo'?"]),
        ("study", 3, ["study = 3: must be text"]),
        (
            "decide model",
            "vgg-compakt",
            ["decide.model = 'vgg-compakt': is not a model", "Did you mean 'vgg-compact'?"],
        ),
        ("resuls", "x", ["resuls = 'x'", "Did you mean 'results'?"]),
        ("results", "", ["results: must not be empty"]),
        ("studies", {}, ["studies: must not be empty"]),
        ("studies demo experiments", {"e" * 300: {}}, ["has 300 characters; must have at most 100"]),
        ("studies", [], ["studies = []: must be a mapping"]),
        ("studies a/b", {"experiments": {}}, ["studies: the name 'a/b' is part of paths"]),
        ("studies demo experiments ../x", {}, ["studies.demo.experiments: the name '../x'"]),
        ("studies demo experiments x\n", {}, ["the name 'x\\n'"]),
        ("studies demo experiments .x", {}, ["the name '.x'"]),
        ("studies demo experiments", {}, ["studies.demo.experiments: must not be empty"]),
        ("studies demo repeats", 0, ["studies.demo.repeats = 0: must be at least 1"]),
        ("studies demo seed", -1, ["studies.demo.seed = -1: must be at least 0"]),
        ("studies demo seed", "one", ["studies.demo.seed = 'one': must be a whole number"]),
        ("studies demo description", "x" * 2001, ["description = ", "has 2,001", "at most 2,000"]),
        ("studies demo description", "a\0b", ["description = 'a\\x00b': has '\\x00'", "remove it"]),
        ("studies demo description", "\x1b[31m", ["description = ", "has '\\x1b'"]),
        ("studies demo description", "\ud800", ["description = ", "has '\\ud800'"]),
        ("data root", "/a\0b", ["data.root = '/a\\x00b': has"]),
        ("decide model", "\x07", ["decide.model = ", "not a printable character"]),
        ("results", ".", ["results = '.': must be a folder for results alone", "write results"]),
        ("results", "a/..", ["results = 'a/..': must be a folder for results alone"]),
        ("results", "/", ["results = '/': must be a folder for results alone"]),
        ("results", "-rf", ["results = '-rf': begins with '-'", "rename it"]),
        ("results", "./-rf", ["results = './-rf': begins with '-'"]),
        ("results", "~nobody-of-that-name/x", ["begins with '~'", "rename it"]),
        ("results", "a{b}", ["results = 'a{b}': has the character '{'", "rename it"]),
        ("results", "a\nb", ["results = 'a\\nb': has the character '\\n'"]),
        ("results", "a\u2028b", ["results = 'a\\u2028b': has"]),
        ("results", "r" * 1001, ["results = ", "at most 1,000"]),
        ("studies data", {"experiments": {"e": raw()["studies"]["demo"]["experiments"]["first"]}},
         ["studies.data", "rename the study"]),
        ("studies demo variants ddp", {"strategy": "fsdp"}, ["variants.ddp: 'ddp' is a strategy"]),
        ("studies demo variants v", {"strategy": "fdsp"},
         ["studies.demo.variants.v.strategy = 'fdsp'", "Did you mean 'fsdp'?"]),
        ("studies demo variants v", {"reshard_after_forward": "never"}, ["'strategy' is missing"]),
        ("studies demo variants v", {"strategy": "fsdp", "reshard_after_foward": "never"},
         ["v.reshard_after_foward = 'never'", "is not an option of fsdp",
          "Did you mean 'reshard_after_forward'?"]),
        ("studies demo variants v", {"strategy": "fsdp", "reshard": "never"},
         ["v.reshard = 'never'", "Did you mean 'reshard_after_forward'?"]),
        ("studies demo variants v", {"strategy": "fsdp", "reshard_after_forward": "sometimes"},
         ["v.reshard_after_forward = 'sometimes': must be 'always' or 'never'"]),
        ("studies demo variants v", {"strategy": "fsdp", "reshard_after_forward": False},
         ["v.reshard_after_forward = false: must be 'always' or 'never'"]),
        ("studies demo variants v", {"strategy": "ddp", "bucket_cap_mb": "big"},
         ["v.bucket_cap_mb = 'big': must be"]),
        ("studies demo variants v", {"strategy": "ddp", "bucket_cap_mb": True},
         ["v.bucket_cap_mb = true: must be"]),
        ("studies demo variants v", {"strategy": "ddp", "bucket_cap_mb": 0},
         ["v.bucket_cap_mb = 0: must be at least 1"]),
        ("studies demo variants v", {"strategy": "single", "x": 1}, ["Allowed: none"]),
        ("studies demo variants v", {"strategy": "ddp", "settings": {"lr": 1}},
         ["variants.v.settings.lr", "Allowed: gradient_accumulation_steps, activation_checkpointing"]),
        ("studies demo variants v", {"strategy": "ddp", "settings": {"gradient_accumulation_steps": 0}},
         ["variants.v.settings.gradient_accumulation_steps = 0"]),
        ("datasets digits", {"source": "synthetic"}, ["datasets.digits", "built in"]),
        ("datasets mine", {}, ["must have exactly one of the keys source, call, images, text"]),
        ("datasets mine", {"source": "synthetc"}, ["Did you mean 'synthetic'?"]),
        ("datasets mine", {"source": "synthetic", "channels": 129}, ["must be at most 128"]),
        ("cluster gpus_per_node", 0, ["cluster.gpus_per_node = 0: must be at least 1"]),
        ("cluster gpus", 0, ["cluster.gpus = 0: unknown key 'gpus'"]),
        ("data download", "never", ["data.download = 'never': must be true or false"]),
    ],
)  # fmt: skip
def test_a_mistake_elsewhere(path, value, expected):
    check_mistake_elsewhere(path, value, expected)


def check_mistake_elsewhere(path: str, value: Any, expected: list[str]) -> None:
    """AssertionError if a value at a path is not refused with all that is expected."""
    message = refusal(changed(path, value))
    assert all(line.startswith("config: ") for line in message.splitlines())
    assert message.startswith("config: ")
    for part in expected:
        assert part in message, message


def test_a_model_that_cannot_take_the_images_is_refused():
    found = raw(dataset="two", models=["vgg16"])
    found["datasets"] = {"two": {"source": "synthetic", "channels": 2}}
    message = refusal(found)
    assert f"{EXPERIMENT}.dataset = 'two': vgg16 takes images with 3 channels" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "must be a mapping"),
        ("[]", "must be a mapping"),
        ("{1: x}", "the key 1 is not text"),
        ("studies: {true: {}}", "studies: the key true is not text"),
        ("study: 2024-01-01", "study = 2024-01-01: is a date"),
        ("{study: .nan}", "study = nan: must be a finite number"),
    ],
)
def test_what_yaml_makes_of_a_file(text, expected):
    message = refusal(yaml.safe_load(text))
    assert expected in message
    assert "\n" not in message


def test_what_a_strategy_checks_for_itself_is_told(monkeypatch):
    """`Strategy.check` sees the resolved options and the batch of each worker count."""
    from stratbench.strategies import get_strategy_class

    seen = []

    def check(cls, name, options, gpus, per_worker_batch):
        seen.append((name, options["bucket_cap_mb"], gpus, per_worker_batch))
        if gpus == 4:
            raise ValueError("four is too many")

    monkeypatch.setattr(get_strategy_class("ddp"), "check", classmethod(check))
    found = changed("studies demo variants small", {"strategy": "ddp", "bucket_cap_mb": 1})
    found["studies"]["demo"]["experiments"]["first"]["strategies"] = ["small"]
    assert refusal(found) == f"config: {EXPERIMENT}.strategies = 'small': four is too many"
    assert seen == [("ddp", 1, 1, 64), ("ddp", 1, 2, 32), ("ddp", 1, 4, 16)]


def test_a_variant_has_settings_of_its_own_and_the_rest_of_its_experiment():
    own = {"gradient_accumulation_steps": "2", "activation_checkpointing": True}
    given = changed("studies demo variants less", {"strategy": "ddp", "settings": own})
    given["studies"]["demo"]["experiments"]["first"] |= {
        "strategies": ["ddp", "less"],
        "models": ["resnet-compact"],
        "gpus": [2],
    }
    _, study = config.load_config(given)
    plain, less = (study.settings(cell) for cell in study.cells)
    assert (plain.gradient_accumulation_steps, plain.activation_checkpointing) == (1, False)
    assert less == replace(plain, gradient_accumulation_steps=2, activation_checkpointing=True)


def test_a_mistake_that_a_variants_settings_make_names_it():
    given = changed(
        "studies demo variants less",
        {"strategy": "ddp", "settings": {"gradient_accumulation_steps": 3}},
    )
    given["studies"]["demo"]["experiments"]["first"]["strategies"] = ["ddp", "less"]
    told = refusal(given)
    assert f"{EXPERIMENT}.gradient_accumulation_steps = 3: a batch of 64" in told
    assert told.endswith("(with the settings of less)")


def test_a_long_value_is_cut_short():
    message = refusal(changed("studies demo experiments", [raw()] * 50))
    assert len(message) < 400


def test_several_mistakes_are_told_from_the_outside_in():
    found = raw(lr=-1, epoch=1, global_batsh=2, gpus=REMOVED)
    found["oops"] = 1
    lines = refusal(found).splitlines()
    starts = [".oops = 1", ".epoch = 1", ".global_batsh = 2", ": the key 'gpus'", ".lr = -1"]
    places = ["", *[EXPERIMENT] * 4]
    assert len(lines) == len(starts)
    for line, place, start in zip(lines, places, starts, strict=True):
        assert line.startswith(f"config: {(place + start).lstrip('.')}")


def test_all_unknown_names_are_told_at_once_and_what_is_allowed_once():
    found = raw(strategies=["dpp", "single", "fsdpp"], models=["vgg-compcat"], dataset="digit")
    found["study"] = "dem"
    found["studies"]["demo"]["variants"] = {"v": {"strategy": "zero", "x": 1}}
    found["studies"]["other"] = {
        "experiments": {
            "e": {**raw(strategies=["dp", "v"])["studies"]["demo"]["experiments"]["first"]}
        }
    }
    said = refusal(found)
    names = ("dem", "zero", "digit", "dpp", "fsdpp", "vgg-compcat", "dp", "v")
    lines = said.splitlines()
    assert len(lines) == len(names)
    for line, name in zip(lines, names, strict=True):
        assert f" = '{name}': is not a " in line
    assert [" Allowed: " in line for line in lines[3:5]] == [False, True]


def test_each_experiment_tells_its_own_contradiction():
    found = raw(global_batch=62)
    first = found["studies"]["demo"]["experiments"]["first"]
    found["studies"]["demo"]["experiments"] |= {
        "second": first | {"steps": 3},
        "third": raw()["studies"]["demo"]["experiments"]["first"],
    }
    lines = refusal(found).splitlines()
    assert [line.partition("experiments.")[2][:8] for line in lines] == ["first.gl", "second: "]


def test_keys_given_twice(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("study: a\nstudies:\n  a: {seed: 1}\n  b: {}\n  a: {seed: 2}\n")
    with pytest.raises(ConfigError) as refused:
        yaml_traps.check_duplicate_yaml_keys(path)
    assert f"{path}: studies.a is given twice, in lines 3 and 5" in str(refused.value)


@pytest.mark.parametrize(
    "text", ["", "a: {x: 1}\nb: {x: 2}\n", "a: &a {x: 1}\nb: {<<: *a, x: 2}\n", "? [1, 2]\n: 3\n"]
)
def test_keys_given_once(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    yaml_traps.check_duplicate_yaml_keys(path)


# ---------------------------------------------------------------- studies and settings


def study(**changes: Any) -> config.Study:
    return config.load_config(raw(**changes))[1]


@pytest.mark.parametrize(
    ("given", "found"),
    [("results", "results"), ("./x", "x"), ("a//b/", "a/b"), ("//a", "/a"), ("x/../y", "y"),
     ("../r", "../r"), ("~/r", "/home/me/r"), ("größe $(x) 'q'", "größe $(x) 'q'")],
)  # fmt: skip
def test_the_results_folder_is_written_as_rules_write_it(monkeypatch, given, found):
    monkeypatch.setenv("HOME", "/home/me")
    assert validation.validate_config(changed("results", given))["results"] == found


@pytest.mark.parametrize(
    ("text", "number"), [("0.02", 0.02), ("1e-3", 0.001), ("1E+0", 1.0), (".5", 0.5), ("1", 1)]
)
def test_a_number_given_as_text_is_the_number(text, number):
    first = validation.validate_config(raw(lr=text))["studies"]["demo"]["experiments"]["first"]
    assert first["lr"] == number
    assert type(first["lr"]) is type(number)


def test_a_description_may_hold_braces_and_lines():
    text = "compare {ddp, fsdp}\nby $(time) 'and' \"space\" – größer\n"
    found = config.load_config(changed("studies demo description", text))[1]
    assert found.description == text


def test_validation_leaves_its_argument_alone():
    given = raw()
    before = copy.deepcopy(given)
    validation.validate_config(given)
    assert given == before


def test_a_study_expands():
    cells = study().cells
    assert len(cells) == 2 * (1 + 3 + 3)
    assert {(c.study, c.experiment, c.dataset, c.repeat) for c in cells} == {
        ("demo", "first", "digits", 0)
    }
    assert study().datasets == ["digits"]


def test_an_experiments_repeats_win_over_the_studys():
    found = raw(repeats=2)
    found["studies"]["demo"]["repeats"] = 5
    found["studies"]["demo"]["experiments"]["second"] = raw()["studies"]["demo"]["experiments"][
        "first"
    ]
    cells = config.load_config(found)[1].cells
    repeats = {e: {c.repeat for c in cells if c.experiment == e} for e in ("first", "second")}
    assert repeats == {"first": {0, 1}, "second": {0, 1, 2, 3, 4}}


def settings_of(study_: config.Study, **coordinates: Any) -> list[Settings]:
    return [
        study_.settings(c)
        for c in study_.cells
        if all(getattr(c, k) == v for k, v in coordinates.items())
    ]


def test_settings_are_resolved():
    found = changed(
        "studies demo variants z2", {"strategy": "fsdp", "reshard_after_forward": "never"}
    )
    found["studies"]["demo"]["experiments"]["first"]["strategies"] = ["z2"]
    (s,) = settings_of(config.load_config(found)[1], model="vgg-compact", gpus=4)
    assert s.strategy == "fsdp"
    assert s.options == get_option_defaults("fsdp") | {"reshard_after_forward": "never"}
    assert (s.global_batch, s.per_worker_batch) == (64, 16)
    assert (s.momentum, s.weight_decay, s.precision, s.warmup_steps) == (0.9, 0.0, "fp32", 3)
    assert s.slowdown is None
    assert Settings.from_json(s.as_json()) == s


def test_what_is_declared_of_a_setting_is_said_nowhere_else():
    """No schema file names one: an experiment and a record have all of them from `Settings`."""
    by_hand = json.loads(schema.SCHEMA_PATH.read_text())["$defs"]["experiment"]["properties"]
    assert by_hand.keys() & set(GIVEN) == set()
    known = schema.build_config_schema()["$defs"]["experiment"]
    declared = [f for _, keys in iter_extension_keys("experiment") for f in fields(keys)]
    of_extensions = [f.name for f in declared if f.metadata["given"]]
    assert list(known["properties"]) == [*by_hand, *GIVEN, *of_extensions]
    assert "lr" in known["required"]
    names = {field.name for field in fields(Settings)}
    assert "properties" not in json.loads(record.SCHEMA_PATH.read_text())["properties"]["settings"]
    stated = record.load_schema()["properties"]["settings"]
    assert stated["properties"].keys() == names
    assert set(stated["required"]) == names - {"more"}


def test_a_config_that_leaves_settings_out_has_the_declared_defaults():
    (s,) = settings_of(
        config.load_config(raw(gpus=[1], models=["vgg-compact"], strategies=["ddp"]))[1]
    )
    declared = {f.name: f.default for f in fields(Settings) if f.name in GIVEN}
    assert {k: getattr(s, k) for k in GIVEN} == declared | {"epochs": 2, "lr": 0.05}


@pytest.mark.parametrize("name", GIVEN)
def test_every_setting_of_an_experiment_reaches_the_settings_of_its_cells(name):
    values = {
        "epochs": 3, "lr": 0.1, "momentum": 0.5, "weight_decay": 0.1, "nesterov": True,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 2.0, "schedule": "cosine", "lr_warmup_steps": 1, "precision": "bf16", "threads": 2,
        "data_placement": "host", "warmup_steps": 5, "device": "cpu", "optimizer_impl": "foreach",
        "slowdown": {"sigma": 0.5}, "betas": [0.8, 0.9], "eps": 1e-6, "optimizer": "adamw", "steps": 4,
        "final_lr": 0.01, "loss_chunks": 2,
    }  # fmt: skip
    needed = {
        "betas": {"optimizer": "adamw"},
        "eps": {"optimizer": "adamw"},
        "steps": {"epochs": REMOVED},
        "final_lr": {"schedule": "linear"},
        "loss_chunks": {"dataset": "tinyshakespeare", "models": ["gpt-compact"]},
    }
    value = values.get(name, True)
    given = {"models": ["resnet-compact"], "strategies": ["ddp"]} | needed.get(name, {})
    _, study_ = config.load_config(raw(**given | {name: value}))
    found = settings_of(study_)
    assert [json.loads(s.as_json())[name] for s in found] == [value] * len(study_.cells)
    assert all(
        f"{name}={json.dumps(value, sort_keys=True)}" == s.format_setting(name) for s in found
    )


def test_weak_scaling():
    weak = study(global_batch=REMOVED, per_worker_batch=16)
    batches = {
        c.gpus: (weak.settings(c).global_batch, weak.settings(c).per_worker_batch)
        for c in weak.cells
    }
    assert batches == {1: (16, 16), 2: (32, 16), 4: (64, 16)}


def test_seeds_follow_from_study_model_and_repeat_alone():
    found = study(repeats=3)
    by_key: dict[tuple, set[int]] = {}
    for c in found.cells:
        by_key.setdefault((c.model, c.repeat), set()).add(found.settings(c).seed)
    assert all(len(seeds) == 1 for seeds in by_key.values())  # across strategies and worker counts
    assert len({next(iter(s)) for s in by_key.values()}) == len(by_key) == 6
    seeds = {config.compute_cell_seed(study_seed, "m", 0) for study_seed in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert (
        config.compute_cell_seed(0, "vgg16", 0) == 69300139
    )  # stable across versions and machines


@pytest.mark.parametrize("change", [{"time_limit_s": 5}, {"time_limit_s": None}])
def test_the_time_limit_is_no_setting(change):
    one, other = study(), study(**change)
    assert [one.settings(c) for c in one.cells] == [other.settings(c) for c in other.cells]
    assert other.time_limit_s(other.cells[0]) == change["time_limit_s"]


def test_the_order_of_keys_is_no_setting():
    """Snakemake compares these texts, and trains again where one has changed."""
    slow = {"workers": [0], "factor": 3}
    one, other = (study(slowdown=s) for s in (slow, dict(reversed(slow.items()))))
    for c in one.cells:
        texts = [s.settings(c).format_setting("slowdown") for s in (one, other)]
        assert texts == ['slowdown={"factor": 3, "workers": [0]}'] * 2


def test_adamw_brings_torchs_own_values_and_no_momentum():
    s = study(optimizer="adamw")
    found = s.settings(s.cells[0])
    assert (found.optimizer, found.momentum, found.nesterov) == ("adamw", 0.0, False)
    assert (found.betas, found.eps) == ([0.9, 0.999], 1e-8)


@pytest.mark.parametrize(
    ("variant", "experiment", "expected"),
    [
        (
            {"strategy": "fsdp", "shard_group_size": 2}, {"gpus": [3], "global_batch": 63},
            "strategies = 'v': shard_group_size = 2 does not divide the 3 workers into equal groups",
        ),
        (
            {"strategy": "fsdp", "shard_group_size": "node"}, {"gpus": [5], "global_batch": 65},
            "shard_group_size = 3 (those of a node) does not divide the 5 workers",
        ),
        ({"strategy": "fsdp", "shard_group_size": 0}, {}, "shard_group_size = 0: must be at least 1"),
        ({"strategy": "fsdp", "shard_group_size": "rack"}, {}, "whole number or 'all' or 'node'"),
        (
            {"strategy": "fsdp", "offload": "cpu"}, {"precision": "fp16"},
            "precision = 'fp16': the loss scaler needs",
        ),
        ({"strategy": "ddp", "powersgd_rank": 4}, {}, "rank = 4: the option has an effect only with"),
        ({"strategy": "ddp", "compress": "powersgd", "powersgd_start_step": 1}, {},
        "powersgd_start_step = 1: must be at least 2"),
        ({"strategy": "ddp", "compress": "bf16"}, {"precision": "fp64"}, "precision = 'fp64'"),
        ({"strategy": "ddp", "compress": "powersgd"}, {"precision": "fp16"}, "loss scale"),
        ({"strategy": "zero1-torch"}, {"precision": "fp16"}, "use bf16, or zero1"),
    ],
)  # fmt: skip
def test_what_the_synchronous_strategies_cannot_do_is_told(variant, experiment, expected):
    found = raw(**experiment)
    found["studies"]["demo"]["variants"] = {"v": variant}
    found["studies"]["demo"]["experiments"]["first"]["strategies"] = ["v"]
    message = refusal(found)
    assert expected in message
    assert "\n" not in message


def test_a_change_of_one_experiment_leaves_the_others_settings():
    found = raw()
    experiments = found["studies"]["demo"]["experiments"]
    experiments["second"] = dict(experiments["first"])
    before = config.load_config(found)[1]
    experiments["second"]["lr"] = 0.5
    after = config.load_config(found)[1]
    for c in before.cells:
        assert (before.settings(c) == after.settings(c)) == (c.experiment == "first")


# ---------------------------------------------------------------- schema and page


def test_every_key_is_described():
    def walk(rule: Any, where: str) -> None:
        if not isinstance(rule, dict):
            return
        for key, inner in rule.get("properties", {}).items():
            if "$ref" not in inner:
                assert inner.get("description"), f"{where}.{key}"
            walk(inner, f"{where}.{key}")
        walk(rule.get("additionalProperties"), f"{where}.*")

    whole = schema.build_config_schema()
    walk(whole, "")
    for name, rule in whole["$defs"].items():
        assert rule["description"]
        walk(rule, name)


@pytest.mark.parametrize("key", messages.ELSEWHERE)
def test_a_key_of_another_trainer_is_told_by_its_name_here(key):
    with pytest.raises(ConfigError, match=f"Did you mean '{messages.ELSEWHERE[key]}'"):
        validation.validate_config(raw(**{key: 8}))


def test_defaults_of_the_schema_are_valid():
    found = validation.validate_config(raw())
    assert validation.validate_config(json.loads(json.dumps(found))) == found


def test_the_example_on_the_page_is_valid():
    page = (ROOT / "docs/configuration.md").read_text()
    example = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1]
    assert config.load_config(yaml.safe_load(example))[1].cells


def test_constraints_from_the_command_line_are_numbers_again():
    decide = {
        "gpus": "2",
        "homogeneous": "false",
        "deadline_s": "null",
        "model": "vgg-compact",
    }
    decide = validation.validate_config(raw() | {"decide": decide})["decide"]
    assert (decide["gpus"], decide["homogeneous"], decide["deadline_s"]) == (2, False, None)
    assert (decide["model"], decide["score_tolerance"]) == ("vgg-compact", {})


def test_settings_say_what_decides_the_samples_and_nothing_else(tmp_path):
    """Other data of the same name are other settings; where files lie and what is only said are none."""

    def spec_of(dataset: str, **keys: Any) -> dict[str, Any] | None:
        model = "vgg-compact" if dataset in ("mnist", "made", "synthetic") else "gpt-compact"
        _, study = config.load_config(raw(dataset=dataset, models=[model]) | keys)
        [spec] = {json.dumps(study.settings(cell).data_spec) for cell in study.cells}
        assert study.data_specs() == ({} if spec == "null" else {dataset: json.loads(spec)})
        return json.loads(spec)

    made = {"source": "synthetic", "train_samples": 256, "seed": 0}
    full = spec_of("made", datasets={"made": made})
    assert full == SPECS["synthetic"] | made
    assert spec_of("made", datasets={"made": full}) == full
    assert spec_of("made", datasets={"made": made | {"seed": 1}}) == full | {"seed": 1}
    assert spec_of("synthetic") == {"source": "synthetic"} | SPECS["synthetic"]
    # The bytes of a file are known by their MD5, wherever it lies.
    for root in (None, str(tmp_path)):
        assert spec_of("mnist", data={"root": root}) is None
        assert spec_of("tinyshakespeare", data={"root": root}) == {
            "source": "tinyshakespeare",
            "sequence": 64,
        }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("study: s\nstudies:\n\ts: {}\n", "config.yaml, line 3: the YAML is invalid: "),
        ("study: s\nstudies: s: {}\n", "config.yaml, line 2: the YAML is invalid: mapping values"),
        ("study: *gone\n", "config.yaml, line 1: the YAML is invalid: found undefined alias"),
        ("study: s\n", None),
        (None, None),
    ],
)
def test_a_file_that_is_not_yaml_is_told_with_its_line(tmp_path, monkeypatch, text, told):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("config.yaml").write_text(text)
    expected = nullcontext() if told is None else pytest.raises(ConfigError, match=re.escape(told))
    with expected:
        yaml_traps.check_yaml_syntax("config.yaml")


# ---------------------------------------------------------------- removed keys


@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_a_removed_key_is_answered_by_what_took_its_place(key):
    section, _, name = key.rpartition(".")
    config_ = raw(**{name: 1}) if section == "experiment" else raw()
    if section != "experiment":
        (config_.setdefault(section, {}) if section else config_)[name] = 1
    message = refusal(config_)
    assert f"{name} = 1: was removed; {REMOVED_KEYS[key]}" in message
    assert "Allowed" not in message
