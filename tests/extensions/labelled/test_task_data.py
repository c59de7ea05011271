"""Masked texts, labelled texts and waveforms: what these data sets hold, and what does not go with them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launching import settings
from stratbench.extensions.labelled import generated
from stratbench.extensions.plan.footprint.request import Request, compute_data_bytes
from stratbench.study.config.config import load_config
from stratbench.study.config.messages import ConfigError
from stratbench.workload import tasks
from stratbench.workload.data import prepared
from stratbench.workload.data.datasets import make_dataset_metadata
from stratbench.workload.data.device_data import (
    DeviceData,
    choose_evaluation_batch_size,
    make_example_batch,
)
from stratbench.workload.data.prepare import prepare_data_set
from stratbench.workload.data.sources import DataError
from stratbench.workload.network import own

SIZES = {"train_samples": 2000, "test_samples": 40}
#: source -> its spec
SPECS: dict[str, dict[str, Any]] = {
    "masked-markov-text": SIZES | {"vocabulary": 13, "sequence": 24},
    "labelled-markov-text": SIZES | {"vocabulary": 12, "sequence": 24, "classes": 3},
    "tones": SIZES | {"classes": 4, "channels": 2, "length": 64},
}
#: source -> the task that follows from it
TASK_OF = {
    "masked-markov-text": "masked-token",
    "labelled-markov-text": "text-classification",
    "tones": "audio-classification",
}


@pytest.fixture(scope="module", params=SPECS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / request.param
    prepare_data_set(request.param, folder, spec={"source": request.param, **SPECS[request.param]})
    return folder


def facts_of(source: str) -> Any:
    return make_dataset_metadata(source, {"source": source, **SPECS[source]})


def test_batches_are_shaped_as_the_example_and_fill_the_bytes_that_the_plan_counts(made):
    facts = facts_of(made.name)
    data = DeviceData.load_prepared_data_set(made, dtype=torch.float64)
    x, y = data.make_training_batch(torch.tensor([5, 0, 7]))
    labelled = facts.vocabulary is not None
    shown = make_example_batch(
        3, facts.shape, facts.classes, torch.device("cpu"), torch.float64,
        torch.channels_last, False, labelled,
    )  # fmt: skip
    assert [(t.shape, t.dtype) for t in shown] == [(t.shape, t.dtype) for t in (x, y)]
    _, arrays = prepared.read_data_set(made)
    stored = sum(array.nbytes for array in arrays.values())
    assert compute_data_bytes(facts, facts.shape, augment=False) == stored + 8 * 2000
    test_x, _ = data.make_test_batch(0, min(40, choose_evaluation_batch_size(facts.shape)))
    assert test_x.shape[1:] == x.shape[1:]


def test_a_hidden_token_is_asked_for_and_no_other(tmp_path):
    source = "masked-markov-text"
    prepare_data_set("it", tmp_path / "it", spec={"source": source, **SPECS[source]})
    meta, arrays = prepared.read_data_set(tmp_path / "it")
    x, y = arrays["train_inputs"].astype(int), arrays["train_targets"]
    hidden = x == 12
    assert (hidden == (y != tasks.IGNORED)).all()
    assert not hidden[:, [0, -1]].any()
    assert hidden.any(axis=1).all()
    assert y[hidden].max() < 12
    assert hidden[:, 1:-1].any(axis=0).all()
    # Who counts what stands between each two neighbours nearly knows the chain.
    text, counts = np.where(hidden, y, x), np.zeros((12, 12, 12))
    np.add.at(counts, (text[:, :-2], text[:, 2:], text[:, 1:-1]), 1)
    odds = counts / np.maximum(counts.sum(2, keepdims=True), 1)
    at = np.nonzero(hidden)
    told = -np.log(odds[text[at[0], at[1] - 1], text[at[0], at[1] + 1], y[hidden]])
    error = told.std() / math.sqrt(told.size)
    free = (counts > 0).sum() / 2 / (2000 * 22)
    assert told.mean() == pytest.approx(meta["least_loss"], abs=4 * error + 2 * free)
    assert meta["least_loss"] < generated.MarkovChain(12, 0).compute_entropy_rate()


def test_the_entropy_between_two_neighbours_is_that_of_all_triples():
    chain, n = generated.MarkovChain(6, 3), 6
    step = np.zeros((n, n))
    np.put_along_axis(step, chain.after, chain.odds, axis=1)
    triples = chain.share[:, None, None] * step[:, :, None] * step[None]
    outer = triples.sum(1, keepdims=True)
    ratio = np.divide(triples, outer, where=triples > 0, out=np.ones_like(triples))
    assert generated.compute_token_entropy_given_neighbours(chain) == pytest.approx(
        -(triples * np.log(ratio)).sum(), abs=1e-9
    )


def test_labels_are_those_of_the_classes_but_for_the_share_that_is_noise(made):
    meta, arrays = prepared.read_data_set(made)
    if made.name == "masked-markov-text":
        return
    y, classes = arrays["train_targets"], meta["classes"]
    right = (y == np.arange(2000) % classes).mean()
    assert right == pytest.approx(1 - generated.LABEL_NOISE, abs=4 * math.sqrt(0.09 / 2000))
    # Who knows the classes, and how noisy labels are, has the least loss in expectation.
    told = -right * math.log(0.9) - (1 - right) * math.log(0.1 / (classes - 1))
    assert meta["least_loss"] == pytest.approx(told, abs=0.1)


def test_the_loudest_pitch_of_a_tone_is_its_class(tmp_path):
    prepare_data_set("it", tmp_path / "it", spec={"source": "tones", **SPECS["tones"]})
    _, arrays = prepared.read_data_set(tmp_path / "it")
    x = arrays["train_inputs"]
    step = (64 // 2 - 1) // 4
    loud = np.abs(np.fft.rfft(x)).sum(1)[:, step : 5 * step : step].argmax(1)
    assert (loud == np.arange(2000) % 4).mean() > 0.99
    data = DeviceData.load_prepared_data_set(tmp_path / "it", dtype=torch.float64)
    inputs, _ = data.make_training_batch(torch.arange(2000))
    assert inputs.mean((0, 2)).abs().max() < 1e-6
    assert (inputs.std((0, 2)) - 1).abs().max() < 1e-4


def test_hidden_tokens_weigh_and_others_are_left_out():
    task, torch_loss = tasks.MaskedToken(), torch.nn.functional.cross_entropy
    torch.manual_seed(0)
    outputs, targets = torch.randn(4, 5, 7), torch.randint(0, 7, (4, 5))
    targets[:, ::2] = tasks.IGNORED
    total, weight = task.loss(outputs, targets)
    assert weight == 8
    expected = torch_loss(outputs.flatten(0, 1), targets.flatten(), ignore_index=tasks.IGNORED)
    assert total / weight == pytest.approx(float(expected), rel=1e-6)
    found = tasks.compute_test_loss_and_score(
        tasks.compute_loss_and_score_sums(task, outputs, targets).tolist()
    )
    assert (found.loss, found.score) == pytest.approx((float(expected),) * 2, rel=1e-6)
    assert found.left_out == 12


# --- the config -----------------------------------------------------------------------------------


def study_on(source: str, entry: dict[str, Any], **changes: Any) -> Any:
    block = {
        "dataset": "mine", "models": ["net"], "strategies": ["ddp"], "gpus": [1], "epochs": 1,
        "global_batch": 8, "lr": 0.1, "device": "cpu",
    }  # fmt: skip
    raw = {
        "study": "s",
        "datasets": {"mine": {"source": source, **SPECS.get(source, {})}},
        "models": {"net": entry},
        "studies": {"s": {"experiments": {"e": block | changes}}},
    }
    return load_config(raw)[1]


@pytest.mark.parametrize("source", SPECS)
def test_a_data_set_says_its_task_and_the_tokens_of_labelled_texts(source):
    study = study_on(source, {"call": "net.Net"})
    s, data = study.settings(study.cells[0]), facts_of(source)
    assert tasks.get_task_name(s, data.shape) == TASK_OF[source]
    assert s.own_model.get("vocabulary") == data.vocabulary
    request = Request(s, data.shape, data.classes, 1, eval_batch=4)
    x, y = request.make_example_batch(2)
    task = tasks.get_task(s, data.shape, has_values=False)
    outputs = torch.zeros(
        tasks.compute_output_shape(task, y.shape, data.classes), requires_grad=True
    )
    loss, weight = tasks.compute_loss_and_weight(task, outputs, y)
    assert float(loss.detach()) / (weight or 1) == pytest.approx(math.log(data.classes))
    facts = tasks.describe_task(task, "it", data.classes, data.shape, 0.5)
    assert facts["least_loss"] == 0.5
    assert facts["counts_per_sample"] == (24 if facts["counts"] == "tokens" else 1)
    roles = own.collect_data_values(data.classes, data.shape, data.vocabulary)
    assert roles["classes"] == data.classes
    assert x.shape == (2, *data.shape)


@pytest.mark.parametrize("source", SPECS)
def test_a_study_read_from_what_was_trained_has_the_same_settings(source):
    study = study_on(source, {"call": "net.Net"})
    kept = study.build_training_config() | {
        "data_specs": study.data_specs(),
        "own_code": study.describe_own_code(),
    }
    again = type(study)(json.loads(json.dumps(kept)), "s")
    assert again.settings(again.cells[0]) == study.settings(study.cells[0])


@pytest.mark.parametrize(
    ("source", "entry", "changes", "reason"),
    [
        ("masked-markov-text", {"call": "net.Net"}, {"task": "next-token"},
         "task = 'next-token': the data set is a masked text, whose task is masked-token"),
        ("tones", {"call": "net.Net"}, {"task": "classification"},
         "task = 'classification': the data set is waveforms, whose task is audio-classification"),
        ("labelled-markov-text", {"call": "net.Net"}, {"task": "my:Task"},
         "only text-classification is possible for texts with one label each"),
        ("labelled-markov-text", {"call": "net.Net"}, {"models": ["gpt-compact"]},
         "models = 'gpt-compact': it returns scores per token, but each text of the data set has one label"),
        ("tones", {"call": "net.Net"}, {"models": ["vgg-compact"]},
         "vgg-compact takes images, but the data set has waveforms"),
        ("masked-markov-text", {"transformers": "LlamaForCausalLM"}, {},
         "models = 'net': transformers:LlamaForCausalLM has a head for next-token, but the task of the data "
         "set 'mine' is masked-token"),
        ("markov-text", {"transformers": "BertForMaskedLM"}, {},
         "transformers:BertForMaskedLM has a head for masked-token, but the task of the data set 'mine' is"),
        ("markov-text", {"transformers": "BertForSequenceClassification"}, {},
         "has a head for text-classification or audio-classification, but the task of the data set 'mine'"),
        ("masked-markov-text", {"call": "net.Net"}, {"loss_chunks": 2},
         "is not a text for next-token"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_told_in_a_sentence(source, entry, changes, reason):
    with pytest.raises(ConfigError) as raised:
        study_on(source, entry, **changes)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"source": "masked-markov-text", "sequence": 2}, "sequence is 2; it must be a whole number >= 3"),
        ({"source": "tones", "classes": 9, "length": 19}, "length is 19; it must be a whole number >= 20"),
    ],
)  # fmt: skip
def test_a_value_that_nothing_can_be_made_of_is_told(spec, reason):
    with pytest.raises(DataError, match=reason):
        make_dataset_metadata("mine", spec)


def test_a_setting_of_ours_names_no_task_where_the_shape_does():
    assert settings("ddp").task is None
    assert {kind: tasks.get_default_task_name(shape) for kind, shape in
            (("text", (5,)), ("waveform", (1, 9)), ("image", (3, 8, 8)))} == {
        "text": "next-token", "waveform": "audio-classification", "image": "classification",
    }  # fmt: skip
