"""Text as data: pieces and their next tokens, a chain whose least possible loss is known."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from stratbench.workload.data import generated, prepared, sources
from stratbench.workload.data.datasets import DATASETS, make_dataset_metadata
from stratbench.workload.data.device_data import (
    DeviceData,
    choose_evaluation_batch_size,
    make_example_batch,
)
from stratbench.workload.data.prepare import prepare_data_set
from stratbench.workload.data.sources import DataError

REAL_DATA = os.environ.get("STRATBENCH_TEST_DATA")
SPEC = {
    "source": "markov-text", "train_samples": 2000, "test_samples": 40, "vocabulary": 12,
    "sequence": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "chain"
    prepare_data_set("chain", folder, spec=SPEC)
    return folder


def test_a_piece_ends_where_the_next_begins() -> None:
    samples, chunks = sources.cut_text_into_samples(np.arange(11), 3)
    [(inputs, targets)] = chunks
    assert samples == 3
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert (targets == inputs + 1).all()


def test_each_token_is_the_next_of_the_one_before_it(chain: Path) -> None:
    meta, arrays = prepared.read_data_set(chain)
    facts = make_dataset_metadata("chain", SPEC)
    assert meta["generated"]
    assert tuple(meta["shape"]) == facts.shape == (32,)
    assert (meta["train_samples"], meta["test_samples"]) == (2000, 40)
    assert arrays["train_inputs"].dtype == arrays["train_targets"].dtype == np.uint8
    assert (arrays["train_inputs"][:, 1:] == arrays["train_targets"][:, :-1]).all()
    assert set(np.unique(arrays["train_targets"])) <= set(range(12))


def test_the_least_loss_is_that_of_who_knows_the_chain(chain: Path) -> None:
    """A table of how often each token follows each is, with so much text, nearly the chain itself."""
    meta, arrays = prepared.read_data_set(chain)
    counts = np.zeros((12, 12))
    np.add.at(counts, (arrays["train_inputs"], arrays["train_targets"]), 1)
    assert ((counts > 0).sum(axis=1) <= generated.MARKOV_SUCCESSORS).all()
    odds = counts / counts.sum(axis=1, keepdims=True)
    told = -np.log(odds[arrays["train_inputs"], arrays["train_targets"]])
    # Of 64,000 tokens the mean's standard error is 0.003; the table has 84 free values: 84 / 128,000.
    error = told.std() / math.sqrt(told.size)
    assert told.mean() == pytest.approx(meta["least_loss"], abs=4 * error + 84 / 128_000)
    assert meta["least_loss"] < math.log(8)
    # A slip in the chain's statistics would show: the first token is drawn as all later ones are.
    first, later = arrays["train_inputs"][:, 0], arrays["train_inputs"][:, -1]
    shares = [np.bincount(tokens, minlength=12) / 2000 for tokens in (first, later)]
    assert np.abs(shares[0] - shares[1]).max() < 0.05


def test_the_same_seed_makes_the_same_text(chain: Path, tmp_path: Path) -> None:
    sha256 = prepared.read_data_set(chain)[0]["sha256"]
    assert prepare_data_set("chain", tmp_path / "same", spec=SPEC)["sha256"] == sha256
    assert (
        prepare_data_set("chain", tmp_path / "other", spec=SPEC | {"seed": 1})["sha256"] != sha256
    )


def test_a_vocabulary_beyond_a_byte_is_kept_whole(tmp_path: Path) -> None:
    prepare_data_set("large", tmp_path / "large", spec=SPEC | {"vocabulary": 5000})
    _, arrays = prepared.read_data_set(tmp_path / "large")
    assert arrays["train_inputs"].dtype == np.int32
    assert 1000 < arrays["train_inputs"].max() < 5000


def test_batches_are_tokens_and_their_next_ones(chain: Path) -> None:
    data = DeviceData.load_prepared_data_set(chain)
    x, y = data.make_training_batch(torch.tensor([5, 0]))
    assert x.dtype == y.dtype == torch.int64
    assert x.shape == y.shape == (2, 32)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(data.make_test_batch(10, 20)[0], data.test_inputs[10:20].long())
    assert data.draw_order_and_augmentation(0, 0, augment=True).augmentation is None
    shown = make_example_batch(
        2, (32,), 12, torch.device("cpu"), torch.float32, torch.contiguous_format
    )
    assert [t.shape for t in shown] == [x.shape, y.shape]
    assert [t.dtype for t in shown] == [x.dtype, y.dtype]


def test_long_texts_are_evaluated_a_few_at_once() -> None:
    assert choose_evaluation_batch_size((3, 32, 32)) == 512
    assert choose_evaluation_batch_size((64,)) == 128
    assert choose_evaluation_batch_size((1_000_000,)) == 1


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (
            {"source": "markov-text", "size": 8},
            "the key 'size' is unknown; use keys among source, train_samples",
        ),
        ({"source": "tinyshakespeare", "sequence": 0}, "sequence is 0; it must be a whole number"),
        ({"source": "tinyshakespeare", "sequence": 111_540}, "the test text has 111,540 tokens"),
        ({"source": "wikipedia"}, "it must be one of synthetic, markov-text"),
    ],
)
def test_a_wrong_spec_is_refused(spec: dict, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        make_dataset_metadata("mine", spec)


def test_a_text_that_is_not_the_published_one_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / sources.SHAKESPEARE_FOLDER
    folder.mkdir()
    (folder / "input.txt").write_text("To be, or not to be")
    with pytest.raises(DataError, match=r"input.txt: is corrupt or truncated \(19 bytes\)"):
        prepare_data_set("tinyshakespeare", tmp_path / "out", tmp_path, download=False)


def test_a_missing_text_is_told_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"files into ROOT/tinyshakespeare/\n.*/input.txt"):
        prepare_data_set("tinyshakespeare", tmp_path / "out", tmp_path, download=False)


@pytest.mark.skipif(REAL_DATA is None, reason="STRATBENCH_TEST_DATA is not set")
def test_the_real_text_has_its_alphabet_and_its_counts(tmp_path: Path) -> None:
    meta = prepare_data_set("tinyshakespeare", tmp_path / "out", REAL_DATA, download=False)
    facts = DATASETS["tinyshakespeare"]
    assert (meta["train_samples"], meta["test_samples"]) == (
        facts.train_samples,
        facts.test_samples,
    )
    _, arrays = prepared.read_data_set(tmp_path / "out")
    assert set(np.unique(arrays["train_inputs"])) <= set(range(facts.classes))
    assert len(np.unique(np.concatenate(list(arrays.values())))) == facts.classes
    # Token 0 is the new line: the text begins with "First Citizen:\nBefore".
    assert arrays["train_inputs"][0, 14] == 0
