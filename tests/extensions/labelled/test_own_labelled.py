"""A user's waveforms, labelled texts and masked texts: how they are read, and what each mistake says."""

from __future__ import annotations

import json
import sys
import types
import wave
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stratbench.extensions.plan.footprint.request import compute_data_bytes
from stratbench.extensions.plan.needs import make_cell_to_plan
from stratbench.study.config.config import load_config
from stratbench.study.config.messages import ConfigError
from stratbench.workload import tasks
from stratbench.workload.data import own_data, prepared
from stratbench.workload.data.datasets import make_dataset_metadata
from stratbench.workload.data.device_data import DeviceData, make_example_batch
from stratbench.workload.data.prepare import prepare_data_set
from stratbench.workload.data.sources import DataError

LETTERS = "to be or not to be, that is the question. " * 12


def write_wave(
    path: Path, values: np.ndarray, rate: int = 16_000, channels: int = 1, width: int = 2
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(values.astype("<i2").tobytes())


def noise(seed: int, count: int = 20) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9000, 9000, count)


def write_csv(path: Path, rows: list[tuple[str, Any]], header: str = "text,label") -> str:
    lines = [header, *(f'"{text}",{label}' for text, label in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def rows_of(count: int) -> list[tuple[str, int]]:
    return [(f"{'good' if i % 2 else 'bad'} number {i}", i % 2) for i in range(count)]


def read(folder: Path, spec: dict) -> tuple[dict, dict[str, np.ndarray]]:
    prepare_data_set("mine", folder / "out", spec=spec)
    return prepared.read_data_set(folder / "out")


# --- waveforms ------------------------------------------------------------------------------------


def test_wav_files_are_cut_or_filled_up_and_their_channels_averaged(tmp_path):
    folder = tmp_path / "p"
    long, short, stereo = noise(0), noise(1, 7), noise(2, 24).reshape(12, 2)
    write_wave(folder / "train/go/1.wav", long)
    write_wave(folder / "train/go/2.WAV", short)
    write_wave(folder / "train/stop/1.wav", stereo, channels=2)
    write_wave(folder / "val/stop/1.wav", long)
    (folder / "train/go/notes.txt").write_text("no waveform")
    meta, arrays = read(tmp_path, {"waveforms": str(folder), "length": 12})
    assert (meta["shape"], meta["classes"], meta["floats"]) == ([1, 12], 2, True)
    assert arrays["train_targets"].tolist() == [0, 0, 1]
    assert arrays["test_targets"].tolist() == [1]
    x = arrays["train_inputs"][:, 0]
    assert x[0] == pytest.approx(long[:12] / 32768)
    assert x[1] == pytest.approx([*short / 32768, *[0] * 5])
    assert x[2] == pytest.approx(stereo.mean(1) / 32768)


def test_a_table_says_the_label_of_each_file(tmp_path):
    for i in range(6):
        write_wave(tmp_path / f"p/speaker{i % 3}/{i}.wav", noise(i))
    write_wave(tmp_path / "p/unknown.wav", noise(9))
    rows = [
        {"file": f"speaker{i % 3}/{i}.wav", "label": "yes" if i < 3 else "no"} for i in range(6)
    ]
    table = tmp_path / "labels.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)))
    spec = {"waveforms": str(tmp_path / "p"), "labels": str(table), "length": 20}
    meta, arrays = read(tmp_path, spec)
    assert (meta["train_samples"], meta["test_samples"]) == (4, 2)
    for split in ("train", "test"):
        for x, label in zip(arrays[f"{split}_inputs"], arrays[f"{split}_targets"], strict=True):
            number = next(i for i in range(6) if np.allclose(x[0], noise(i) / 32768))
            assert label == (number < 3)  # no, then yes
    for files in (["speaker0/7.wav"], ["../out.wav"], ["speaker0/0.wav", "./speaker0/0.wav"]):
        table.write_text("\n".join(json.dumps({"file": file, "label": "no"}) for file in files))
        with pytest.raises(DataError, match=r"which is not a waveform \(\.wav\) in .* twice"):
            prepare_data_set("mine", tmp_path / "other", spec=spec)


def test_odd_waveforms_are_told_with_the_file(tmp_path):
    def told(sentence: str) -> None:
        with pytest.raises(DataError) as error:
            prepare_data_set(
                "mine", tmp_path / "out", spec={"waveforms": str(tmp_path / "p"), "length": 12}
            )
        assert sentence in str(error.value)
        assert "\n" not in str(error.value)

    (tmp_path / "p/go").mkdir(parents=True)
    told("has no waveform (.wav) in its subfolders")
    for i in range(4):
        write_wave(tmp_path / f"p/go/{i}.wav", noise(i))
    told("the training set has 1 class; add waveforms")
    write_wave(tmp_path / "p/stop/1.wav", noise(5))
    told("class 'stop' has one waveform, which cannot be divided")
    write_wave(tmp_path / "p/stop/2.wav", noise(5), rate=8000)
    told(f"stop/2.wav has 8,000 values per second, but {tmp_path / 'p/go'}")
    write_wave(tmp_path / "p/stop/2.wav", noise(5), width=1)
    told("stop/2.wav has 8-bit values; convert it to 16-bit PCM")
    whole = (tmp_path / "p/stop/1.wav").read_bytes()
    (tmp_path / "p/stop/2.wav").write_bytes(whole[:-31])
    told("stop/2.wav contains 4 of the 20 values that its header states; repair or remove it")
    (tmp_path / "p/stop/2.wav").write_bytes(b"RIFF")
    told("stop/2.wav cannot be read as 16-bit PCM")
    write_wave(tmp_path / "p/stop/2.wav", noise(5, 0))
    told("stop/2.wav contains 0 of the 0 values")
    (tmp_path / "p/none").mkdir()
    told(f"the class folder {tmp_path / 'p/none'} has no waveform (.wav)")
    assert not (tmp_path / "out").exists()


# --- texts with labels ----------------------------------------------------------------------------


def test_rows_become_bytes_of_one_length_with_the_numbers_of_their_labels(tmp_path):
    train = write_csv(tmp_path / "a.csv", [("naïve", "no"), ("a long text", "yes"), ("c", "no")])
    test = write_csv(tmp_path / "b.csv", [("d", "yes")])
    spec = {"labelled_texts": train, "test": test, "sequence": 8}
    meta, arrays = read(tmp_path, spec)
    assert (meta["shape"], meta["classes"], meta["vocabulary"]) == ([8], 2, 256)
    # The training set is sorted by class.
    texts = [bytes(row).rstrip(b"\0").decode() for row in arrays["train_inputs"].tolist()]
    assert dict(zip(texts, arrays["train_targets"].tolist(), strict=True)) == {
        "naïve": 0, "c": 0, "a long t": 1,
    }  # fmt: skip
    assert arrays["test_targets"].tolist() == [1]
    lines = [
        json.dumps({"label": "no", "text": "naïve"}),
        "",
        json.dumps({"label": "yes", "text": "a long text"}),
    ]
    lines.append(json.dumps({"label": "no", "text": "c"}))
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    again = prepare_data_set(
        "mine", tmp_path / "again", spec=spec | {"labelled_texts": str(tmp_path / "a.jsonl")}
    )
    assert again["sha256"] == meta["sha256"]


def test_each_class_is_divided_by_the_seed_where_no_test_set_is_given(tmp_path):
    spec = {"labelled_texts": write_csv(tmp_path / "a.csv", rows_of(40)), "test_share": 0.25}
    meta, arrays = read(tmp_path, spec)
    assert [np.bincount(arrays[f"{split}_targets"]).tolist() for split in ("train", "test")] == [
        [15, 15], [5, 5],
    ]  # fmt: skip
    other = prepare_data_set("mine", tmp_path / "other", spec=spec | {"seed": 1})
    assert other["sha256"] != meta["sha256"]


@pytest.mark.parametrize(
    ("text", "test", "sentence"),
    [
        ("text,tag\na,1\n", None, "line 2: has no column 'label', but only text, tag"),
        ("text,label\n", None, "has no rows"),
        ("text,label\na,1\n,2\n", None, "line 3: the value of text is ''; it must be a text"),
        ("text,label\na,1\nb\n", None, "line 3: the value of label is None; it must be a text or"),
        ('text,label\n"a"b,1\n', None, "line 2: is not CSV"),
        ("text,label\na,1\nb,1\n", None, "the training set has 1 class; add texts"),
        ("text,label\na,1\nb,1\nc,2\n", None, "class '2' has one text, which cannot be divided"),
        ("text,label\na,1\nb,2\n", "text,label\nc,3\n", "the test set has a class '3', but the training"),
    ],
)  # fmt: skip
def test_odd_tables_are_told_with_the_line(tmp_path, text, test, sentence):
    (tmp_path / "a.csv").write_text(text)
    spec = {"labelled_texts": str(tmp_path / "a.csv")}
    if test:
        (tmp_path / "b.csv").write_text(test)
        spec["test"] = str(tmp_path / "b.csv")
    with pytest.raises(DataError) as error:
        prepare_data_set("mine", tmp_path / "out", spec=spec)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 1: is not JSON"),
        ("[1]", "line 1: is not a JSON object"),
        (
            '{"text": "a", "label": 0.5}',
            "line 1: the value of label is 0.5; it must be a text or a whole",
        ),
    ],
)
def test_odd_lines_of_json_are_told(tmp_path, line, sentence):
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(DataError, match=sentence):
        prepare_data_set(
            "mine", tmp_path / "out", spec={"labelled_texts": str(tmp_path / "a.jsonl")}
        )


# --- hidden tokens --------------------------------------------------------------------------------


def test_each_piece_of_a_text_has_hidden_tokens(tmp_path):
    (tmp_path / "t.txt").write_text(LETTERS)
    spec = {"masked_text": str(tmp_path / "t.txt"), "sequence": 20}
    meta, arrays = read(tmp_path, spec)
    alphabet = sorted(set(LETTERS))
    assert meta["classes"] == len(alphabet) + 1
    x, y = arrays["train_inputs"].astype(int), arrays["train_targets"]
    hidden = x == len(alphabet)
    assert ((y != tasks.IGNORED) == hidden).all()
    assert hidden.sum(1).min() >= 2
    text = "".join(alphabet[i] for i in np.where(hidden, y, x).ravel())
    assert LETTERS.startswith(text)
    assert len(text) == meta["train_samples"] * 20
    other = prepare_data_set("mine", tmp_path / "other", spec=spec | {"seed": 1})
    assert other["sha256"] != meta["sha256"]


class Words:
    """A stand-in for the package `tokenizers`, which is not among the tests' requirements."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.length, self.fills = words, 0, 0

    @classmethod
    def from_file(cls, path: str) -> Words:
        return cls(json.loads(Path(path).read_text()))

    def encode(self, text: str, add_special_tokens: bool = True) -> types.SimpleNamespace:
        return types.SimpleNamespace(ids=[self.words.index(w) for w in text.split()])

    def encode_batch(self, texts: list[str]) -> list[types.SimpleNamespace]:
        rows = [self.encode(text).ids[: self.length] for text in texts]
        return [
            types.SimpleNamespace(ids=ids + [self.fills] * (self.length - len(ids))) for ids in rows
        ]

    def get_vocab_size(self) -> int:
        return len(self.words)

    def token_to_id(self, word: str) -> int | None:
        return self.words.index(word) if word in self.words else None

    def enable_truncation(self, length: int) -> None:
        self.length = length

    def enable_padding(self, length: int, pad_id: int) -> None:
        assert length == self.length
        self.fills = pad_id


@pytest.fixture
def tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_data.util, "find_spec", lambda name: name)
    stand_in = types.ModuleType("tokenizers")
    stand_in.Tokenizer = Words
    monkeypatch.setitem(sys.modules, "tokenizers", stand_in)


@pytest.mark.parametrize("special", [[], ["<pad>", "<mask>"]])
def test_a_tokenizers_own_tokens_fill_up_and_hide(tmp_path, tokenizers, special):
    words = ["to", "be", "or", "not", *special]
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    (tmp_path / "t.txt").write_text("to be or not to be " * 20)
    tokenizer = {"tokenizer": str(tmp_path / "tokenizer.json"), "sequence": 5}
    table = write_csv(tmp_path / "a.csv", [("to be or not to be", 1), ("to be", 0)])
    labelled = {"labelled_texts": table, "test": table, **tokenizer}
    with pytest.raises(DataError, match=r"vocabulary = 3: .*; set `vocabulary: (5|6)`"):
        prepare_data_set("mine", tmp_path / "none", spec=labelled | {"vocabulary": 3})
    meta, arrays = read(tmp_path, labelled | {"vocabulary": 6})
    assert arrays["train_inputs"].tolist() == [[0, 1, 2, 3, 0], [0, 1, 4, 4, 4]]
    assert meta["vocabulary"] == 6
    masked = {"masked_text": str(tmp_path / "t.txt"), **tokenizer}
    found = prepare_data_set("mine", tmp_path / "masked", spec=masked)
    inputs = prepared.read_data_set(tmp_path / "masked")[1]["train_inputs"]
    hides = 5 if special else 4
    assert (found["classes"], inputs.max()) == (hides + 1, hides)


@pytest.mark.skipif(util.find_spec("tokenizers") is None, reason="pip install tokenizers")
def test_the_package_tokenizers_reads_labelled_and_masked_texts(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {
        word: i for i, word in enumerate(["[PAD]", "[CLS]", "[MASK]", "to", "be", "or", "not"])
    }
    made = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 1)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = {"tokenizer": str(tmp_path / "tokenizer.json"), "sequence": 5}
    table = write_csv(tmp_path / "a.csv", [("to be or not to be", 1), ("to be", 0)])
    spec = {"labelled_texts": table, "test": table, "vocabulary": 7, **tokenizer}
    _, arrays = read(tmp_path, spec)
    assert arrays["train_inputs"].tolist() == [[1, 3, 4, 5, 6], [1, 3, 4, 0, 0]]
    (tmp_path / "t.txt").write_text("to be or not to be " * 20)
    meta = prepare_data_set(
        "mine", tmp_path / "masked", spec={"masked_text": str(tmp_path / "t.txt"), **tokenizer}
    )
    inputs = prepared.read_data_set(tmp_path / "masked")[1]["train_inputs"]
    assert (meta["classes"], sorted(set(inputs.ravel().tolist()))) == (7, [2, 3, 4, 5, 6])


# --- contracts ------------------------------------------------------------------------------------


def specs(folder: Path) -> dict[str, dict[str, Any]]:
    """A spec of each kind, whose files are in a folder."""
    for i in range(24):
        write_wave(folder / "waves" / "ab"[i % 2] / f"{i:02}.wav", noise(i, 40))
    (folder / "t.txt").write_text(LETTERS)
    table = write_csv(folder / "a.csv", rows_of(24))
    return {
        "audio-classification": {"waveforms": str(folder / "waves"), "length": 40},
        "text-classification": {"labelled_texts": table, "sequence": 16},
        "masked-token": {"masked_text": str(folder / "t.txt"), "sequence": 16},
    }


def study_of(folder: Path, spec: dict, **changes: Any) -> Any:
    block = {
        "dataset": "mine", "models": ["net"], "strategies": ["ddp"], "gpus": [1], "epochs": 1,
        "global_batch": 4, "lr": 0.1, "device": "cpu",
    }  # fmt: skip
    raw = {
        "study": "s",
        "results": str(folder / "results"),
        "code": [str(folder)],
        "datasets": {"mine": spec},
        "models": {"net": {"call": "net.Net"}},
        "studies": {"s": {"experiments": {"e": block | changes}}},
    }
    return load_config(raw)


@pytest.mark.parametrize("task", ["audio-classification", "text-classification", "masked-token"])
def test_settings_are_the_same_before_and_after_the_data_are_prepared(tmp_path, task):
    spec = specs(tmp_path)[task]
    config, study = study_of(tmp_path, spec)
    [cell] = study.cells
    before = study.settings(cell)
    facts = study.get_dataset("mine")
    assert tasks.get_task_name(before, facts.shape) == task
    assert not facts.has_known_metadata
    with pytest.raises(ConfigError, match=r"datasets\.mine: is not yet prepared"):
        make_cell_to_plan(config, study, cell)
    folder = tmp_path / "results/data/mine"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(
            own_data.PLACES_VARIABLE, own_data.format_data_paths_for_jobs({"mine": spec})
        )
        meta = prepare_data_set("mine", folder, spec=before.data_spec)
    config, study = study_of(tmp_path, spec)
    assert study.settings(cell) == before
    after = study.get_dataset("mine")
    assert after == make_dataset_metadata("mine", spec, meta)
    assert (after.shape, after.task, after.vocabulary) == (
        facts.shape,
        facts.task,
        facts.vocabulary,
    )
    assert make_cell_to_plan(config, study, cell).data.shape == facts.shape
    kept = study.build_training_config() | {
        "data_specs": study.data_specs(),
        "own_code": study.describe_own_code(),
    }
    again = type(study)(json.loads(json.dumps(kept)), "s")
    assert again.settings(again.cells[0]) == before
    # A batch is as the example that is planned with, and the plan counts the arrays' bytes.
    x, y = DeviceData.load_prepared_data_set(folder, dtype=torch.float64).make_training_batch(
        torch.tensor([3, 0])
    )
    shown = make_example_batch(
        2, after.shape, after.classes, torch.device("cpu"), torch.float64, torch.channels_last,
        False, after.vocabulary is not None,
    )  # fmt: skip
    assert [(t.shape, t.dtype) for t in shown] == [(t.shape, t.dtype) for t in (x, y)]
    stored = sum(array.nbytes for array in prepared.read_data_set(folder)[1].values())
    assert (
        compute_data_bytes(after, after.shape, augment=False) == stored + 8 * meta["train_samples"]
    )


def test_what_a_config_says_wrongly_ends_in_one_message(tmp_path):
    sound, labelled, masked = specs(tmp_path).values()
    table, letters = labelled["labelled_texts"], masked["masked_text"]
    for spec, changes, sentence in (
        ({"waveforms": table}, {}, "is not a folder"),
        ({"waveforms": str(tmp_path)}, {"models": ["vgg-compact"]}, "takes images, but the data set has wav"),
        (sound | {"labels": "none.csv"}, {}, "labels = 'none.csv' is not a file"),
        (sound | {"flip": True}, {}, "the key 'flip' is not allowed with 'waveforms'; allowed: waveforms, "),
        (sound, {"task": "masked-token"}, "the data set is waveforms, whose task is audio-classification"),
        ({"labelled_texts": "none.csv"}, {}, "labelled_texts = 'none.csv' is not a file"),
        (labelled | {"test": "none.csv"}, {}, "test = 'none.csv' is not a file"),
        (labelled, {"models": ["gpt-compact"]}, "but each text of the data set has one label"),
        (labelled, {"task": "my:Task"}, "only text-classification is possible for texts"),
        (masked | {"sequence": 2}, {}, "sequence = 2: a text with hidden tokens must have at least 3"),
        (masked | {"text": letters}, {}, "it has text and masked_text"),
        (masked, {"task": "next-token"}, "the data set is a masked text, whose task is masked-token"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            study_of(tmp_path, spec, **changes)
        assert sentence in str(error.value)
        assert "\n" not in str(error.value)
