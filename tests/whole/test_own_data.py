"""A user's own data: arrays of a callable, folders of images, texts, and what each mistake says."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stratbench.extensions.plan.needs import make_cell_to_plan
from stratbench.study.config.config import Study, load_config
from stratbench.study.config.messages import ConfigError
from stratbench.train.inputs import check_prepared_data
from stratbench.workload import users_code
from stratbench.workload.data import own_arrays, own_data, prepared
from stratbench.workload.data.prepare import prepare_data_set
from stratbench.workload.data.sources import DataError

CODE = """
import numpy as np

def images(n=12, size=5, kind="uint8", axes="hwc", path=None):
    x = np.random.default_rng(0).integers(0, 255, (n, size + 1, size, 3)).astype(kind)
    x = x.transpose(0, 3, 1, 2) if axes == "chw" else x[..., 0] if axes == "hw" else x
    if path:
        np.save(path, x)
        x = np.load(path, mmap_mode="r")
    return {"train_x": x, "train_y": np.arange(n) % 3, "test_x": x[:6], "test_y": np.arange(6) % 3}

def tokens():
    text = (np.arange(1000) % 300).astype("uint16")
    return text, text[:101]

def fails(n):
    raise ValueError("no such file")
"""


@pytest.fixture
def my_data(tmp_path, monkeypatch, request) -> str:
    """The name of a module with CODE, in a folder that is on the path of this process's jobs."""
    name = f"data_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.setenv(users_code.CODE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def prepared_from(folder: Path, spec: dict) -> tuple[dict, dict[str, np.ndarray]]:
    prepare_data_set("mine", folder / "out", spec=spec)
    return prepared.read_data_set(folder / "out")


# --- call ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ["hwc", "chw", "hw"])
def test_images_of_a_call_are_stored_channels_first(tmp_path, my_data, axes):
    kwargs = {"axes": axes, "path": str(tmp_path / "mapped.npy")}
    meta, arrays = prepared_from(tmp_path, {"call": f"{my_data}.images", "kwargs": kwargs})
    assert meta["shape"] == [1 if axes == "hw" else 3, 6, 5]
    assert (meta["classes"], meta["train_samples"], meta["test_samples"]) == (3, 12, 6)
    kept = arrays["train_inputs"]
    given = np.load(tmp_path / "mapped.npy")
    expected = (
        given[:, None] if axes == "hw" else given.transpose(0, 3, 1, 2) if axes == "hwc" else given
    )
    assert kept.dtype == np.uint8
    assert (kept == expected).all()
    assert meta["mean"] == pytest.approx((kept / 255).mean((0, 2, 3)))


def test_floats_stay_floats_and_are_normalised(tmp_path, my_data):
    from stratbench.workload.data.device_data import DeviceData

    spec = {"call": f"{my_data}:images", "kwargs": {"kind": "float32"}}
    meta, arrays = prepared_from(tmp_path, spec)
    assert arrays["train_inputs"].dtype == np.float32
    values = arrays["train_inputs"].astype(float)
    assert meta["std"] == pytest.approx(values.std((0, 2, 3)))
    images, _ = DeviceData.load_prepared_data_set(tmp_path / "out").make_test_batch(0, 6)
    whole = values.transpose(1, 0, 2, 3).reshape(3, -1)
    expected = (values[:6] - whole.mean(1)[:, None, None]) / whole.std(1)[:, None, None]
    assert images.numpy() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("shape", [(6,), (6, 3)])
def test_values_to_learn_stay_floats_and_come_as_the_weights_do(tmp_path, monkeypatch, shape):
    from stratbench.workload.data.device_data import DeviceData

    y = np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    given = images(train_y=y, test_y=y)
    monkeypatch.setattr(own_data.OwnData, "_call_user_function", lambda _self: given)
    monkeypatch.setattr(own_data.OwnData, "compute_data_set_identity", lambda *_: {"kind": "call"})
    meta, arrays = prepared_from(tmp_path, {"call": "my_data.values"})
    each = 3 if len(shape) == 2 else 1
    assert (meta["values"], meta["classes"]) == (True, each)
    assert (arrays["train_targets"] == y.reshape(6, each)).all()
    for dtype in (torch.float32, torch.float64):
        data = DeviceData.load_prepared_data_set(tmp_path / "out", dtype=dtype)
        _, targets = data.make_training_batch(torch.arange(4))
        assert (targets.dtype, list(targets.shape)) == (dtype, [4, each])


def test_tokens_of_a_call_become_a_text(tmp_path, my_data):
    meta, arrays = prepared_from(tmp_path, {"call": f"{my_data}.tokens", "sequence": 10})
    assert (meta["shape"], meta["classes"]) == ([10], 300)
    assert (meta["train_samples"], meta["test_samples"]) == (99, 10)
    assert (arrays["train_targets"][:, :-1] == arrays["train_inputs"][:, 1:]).all()


def images(n: int = 6, shape: tuple[int, ...] = (4, 4), kind: str = "uint8", **changes) -> dict:
    x = np.arange(n * int(np.prod(shape))).reshape(n, *shape).astype(kind)
    return {
        "train_x": x,
        "train_y": np.arange(n) % 2,
        "test_x": x,
        "test_y": np.arange(n) % 2,
    } | changes


def holding(value: float) -> np.ndarray:
    x = np.zeros((6, 4, 4), np.float32)
    x[3, 0, 0] = value
    return x


VALUES = images() | dict.fromkeys(("train_y", "test_y"), np.zeros(6, np.float32))
TOKENS = np.arange(20)
MISTAKES = {
    "nothing": (None, None, "returned a NoneType; return (train_x, train_y, test_x, test_y), (train"),
    "three": ((1, 2, 3), None, "returned a tuple of 3; return"),
    "keys": ({"x": 1}, None, "returned a mapping with the keys x; return"),
    "list": (images(train_y=[0, 1] * 3), None, "train_y is a list; it must be a NumPy array"),
    "type": (images(kind="float64"), None, "train_x is of type float64; it must be uint8 or float32"),
    "axes": (images(shape=(16,)), None, "train_x has the shape [6, 16]; it must be [N, H, W]"),
    "empty": (images(n=0), None, "train_x has the shape [0, 4, 4]; it must be"),
    "labels": (images(train_y=np.zeros(6)), None, "train_y is float64 [6]; labels must be integers"),
    "count": (images(test_y=np.zeros(5, int)), None, "test_x has 6 images, but test_y has 5 labels"),
    "shapes": (images(test_x=np.zeros((6, 4, 5), np.uint8)), None, "make them equal"),
    "kinds": (images(test_x=holding(1)), None, "test images are float32 [1, 4, 4]"),
    "negative": (images(train_y=np.arange(6) - 1), None, "train_y has the label -1; labels must begin at 0"),
    "gap": (images(train_y=np.arange(6) + 1), None, "has labels up to 6, but not the label 0; labels"),
    "one class": (images(train_y=np.zeros(6, int)), None, "train_y has only one class"),
    "unknown": (images(test_y=np.arange(6)), None, "has the label 5, but the labels of train_y end at 1"),
    "nan": (images(train_x=holding(np.nan), test_x=holding(1)), None, "train_x[3] has NaN or infinity"),
    "no value": (VALUES | {"train_y": holding(np.nan)[:, 0, 0]}, None, "train_y[3] has NaN or infi"),
    "other values": (VALUES | {"test_y": np.zeros((6, 3), np.float32)}, None, "one of test_y is float32 [3]"),
    "values and labels": (VALUES | {"test_y": np.arange(6)}, None, "but one of test_y is int64 []; make"),
    "sequence": (images(), 8, "but the key `sequence` is for texts; remove this key"),
    "no sequence": ((TOKENS, TOKENS), None, "returned tokens; give `sequence`"),
    "no tokens": ((TOKENS / 2, TOKENS), 8, "train is float64 [20]; tokens must be integers [N]"),
    "short": ((TOKENS, TOKENS[:8]), 8, "test has 8 tokens, but a sample with sequence = 8 needs 9"),
    "below": ((TOKENS - 1, TOKENS), 8, "has the token -1; every token must be at least 0"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_what_a_call_may_not_return_is_told_in_one_sentence(what):
    returned, sequence, sentence = MISTAKES[what]

    def read() -> None:
        source = own_arrays.open_returned_arrays("data set 'mine' (a.b)", returned, sequence).source
        list(source.train.chunks)

    with pytest.raises(DataError) as error:
        read()
    message = str(error.value)
    assert sentence in message
    assert message.startswith("data set 'mine' (a.b): ")
    assert "\n" not in message


def test_a_call_that_fails_and_a_constant_channel_are_told(tmp_path, my_data):
    with pytest.raises(DataError, match=r"called with \(n=3\), raised ValueError: no such file"):
        prepare_data_set(
            "mine", tmp_path / "out", spec={"call": f"{my_data}.fails", "kwargs": {"n": 3}}
        )
    with pytest.raises(DataError, match=f"{my_data} has no 'none'"):
        prepare_data_set("mine", tmp_path / "out", spec={"call": f"{my_data}.none"})
    ends = "import sys\ndef ends():\n    sys.exit('no such folder')\n"
    (tmp_path / f"{my_data}_ends.py").write_text(ends)
    with pytest.raises(DataError, match="raised SystemExit: no such folder"):
        prepare_data_set("mine", tmp_path / "out", spec={"call": f"{my_data}_ends.ends"})
    flat = "def flat():\n    x = images()\n    x['train_x'][..., 1] = 7\n    return x\n"
    (tmp_path / f"{my_data}_flat.py").write_text(CODE + flat)
    with pytest.raises(DataError, match="channel 1 has the same value in all training images"):
        prepare_data_set("mine", tmp_path / "out", spec={"call": f"{my_data}_flat.flat"})
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


# --- images --------------------------------------------------------------------------------------


def write_image(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def picture(seed: int, height: int = 8, width: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_class_folders_become_images_cut_to_the_centre(tmp_path):
    folder = tmp_path / "pictures"
    wide = np.repeat(np.repeat(picture(9, 4, 6), 4, 0), 4, 1)  # 16 x 24, of blocks
    for place, seeds in (("train/cat", (0, 1)), ("train/dog", (2,)), ("val/dog", (3,))):
        for seed in seeds:
            write_image(folder / place / f"{seed}.png", picture(seed))
    write_image(folder / "train/dog/wide.PNG", wide)
    (folder / "train/dog/notes.txt").write_text("no image")
    meta, arrays = prepared_from(tmp_path, {"images": str(folder), "size": 8})
    assert (meta["classes"], meta["train_samples"], meta["test_samples"]) == (2, 4, 1)
    assert arrays["train_targets"].tolist() == [0, 0, 1, 1]
    assert arrays["test_targets"].tolist() == [1]
    # What has the size already is kept to the byte.
    assert (arrays["train_inputs"][0] == picture(0).transpose(2, 0, 1)).all()
    resized = Image.fromarray(wide).resize((12, 8), Image.Resampling.BILINEAR)
    assert (arrays["train_inputs"][3].transpose(1, 2, 0) == np.asarray(resized)[:, 2:10]).all()


def test_without_a_test_folder_each_class_is_divided_by_the_seed(tmp_path):
    for i in range(24):
        write_image(tmp_path / "p" / "ab"[i % 2] / f"{i:02}.png", picture(i))
    spec = {"images": str(tmp_path / "p"), "size": 8, "test_share": 0.25, "channels": 1}
    meta, arrays = prepared_from(tmp_path, spec)
    assert meta["shape"] == [1, 8, 8]
    assert np.bincount(arrays["test_targets"]).tolist() == [3, 3]
    assert np.bincount(arrays["train_targets"]).tolist() == [9, 9]
    kept = {a.tobytes() for split in ("train", "test") for a in arrays[f"{split}_inputs"]}
    assert len(kept) == 24
    again = prepare_data_set("mine", tmp_path / "again", spec=spec)
    other = prepare_data_set("mine", tmp_path / "other", spec=spec | {"seed": 1})
    assert again["sha256"] == meta["sha256"] != other["sha256"]


def test_odd_image_folders_are_told_with_the_place(tmp_path):
    def told(sentence: str) -> None:
        with pytest.raises(DataError) as error:
            prepare_data_set(
                "mine", tmp_path / "out", spec={"images": str(tmp_path / "p"), "size": 8}
            )
        assert sentence in str(error.value)

    (tmp_path / "p/a").mkdir(parents=True)
    told("has no image (.png, .jpg, .jpeg) in its subfolders")
    write_image(tmp_path / "p/a/1.png", picture(1))
    told("has 1 class; add images")
    write_image(tmp_path / "p/b/2.png", picture(2))
    told("class 'a' has one image, which cannot be divided")
    write_image(tmp_path / "p/test/c/2.png", picture(2))
    told("has a subfolder 'test', but no subfolder 'train'")
    (tmp_path / "p/train").mkdir()
    for name in "ab":
        (tmp_path / "p" / name).rename(tmp_path / "p/train" / name)
    told("has a class 'c', but the training")
    (tmp_path / "p/test/c").rename(tmp_path / "p/test/a")
    (tmp_path / "p/train/d").mkdir()
    told(f"the class folder {tmp_path / 'p/train/d'} has no image")
    (tmp_path / "p/train/d/broken.jpg").write_bytes(b"\xff\xd8 cut off")
    told(f"{tmp_path / 'p/train/d/broken.jpg'} cannot be read as an image")
    assert not (tmp_path / "out").exists()


# --- text ----------------------------------------------------------------------------------------


def test_files_become_characters_whose_end_is_the_test_set(tmp_path):
    (tmp_path / "a.txt").write_text("naïve " * 30)
    (tmp_path / "b.txt").write_text("ende. " * 20)
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    meta, arrays = prepared_from(tmp_path, {"text": files, "sequence": 7, "test_share": 0.2})
    alphabet = sorted(set("naïve ende."))
    assert meta["classes"] == len(alphabet)
    assert (meta["train_samples"], meta["test_samples"]) == (239 // 7, 59 // 7)
    first = "".join(alphabet[i] for i in arrays["train_inputs"][0])
    following = "".join(alphabet[i] for i in arrays["train_targets"][0])
    assert (first, following) == ("naïve n", "aïve na")
    assert "".join(alphabet[i] for i in arrays["test_inputs"][0]) == "ende. e"


def test_a_tokenizer_gives_the_tokens_where_its_package_is(tmp_path, monkeypatch):
    """The package is not among the tests' requirements: a stand-in with its three methods is called."""
    (tmp_path / "t.txt").write_text("to be or not to be " * 20)
    (tmp_path / "tokenizer.json").write_text('["to", "be", "or", "not"]')
    spec = {"text": str(tmp_path / "t.txt"), "tokenizer": str(tmp_path / "tokenizer.json"),
            "sequence": 4}  # fmt: skip
    monkeypatch.setattr(own_data.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="needs the package `tokenizers`"):
        prepare_data_set("mine", tmp_path / "out", spec=spec)

    class Tokenizer:
        def __init__(self, words: list[str]) -> None:
            self.words = words

        @classmethod
        def from_file(cls, path: str) -> Tokenizer:
            return cls(json.loads(Path(path).read_text()))

        def encode(self, text: str, add_special_tokens: bool) -> types.SimpleNamespace:
            assert not add_special_tokens
            return types.SimpleNamespace(ids=[self.words.index(w) for w in text.split()])

        def get_vocab_size(self) -> int:
            return len(self.words) + 5

    monkeypatch.setattr(own_data.util, "find_spec", lambda name: name)
    stand_in = types.ModuleType("tokenizers")
    stand_in.Tokenizer = Tokenizer
    monkeypatch.setitem(sys.modules, "tokenizers", stand_in)
    meta, arrays = prepared_from(tmp_path, spec)
    assert meta["classes"] == 9
    assert arrays["train_inputs"][0].tolist() == [0, 1, 2, 3]
    assert (meta["train_samples"], meta["test_samples"]) == (107 // 4, 11 // 4)
    (tmp_path / "tokenizer.json").write_text("no JSON")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer file"):
        prepare_data_set("mine", tmp_path / "out", spec=spec)


def test_odd_texts_are_told_with_the_place(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"t.txt is not UTF-8 text \(at byte 3\)"):
        prepare_data_set("mine", tmp_path / "out", spec={"text": str(path)})
    path.write_text("short")
    with pytest.raises(
        DataError, match="the training text has 5 tokens, but a sample with sequence = 64 needs 65"
    ):
        prepare_data_set("mine", tmp_path / "out", spec={"text": str(path), "test_share": 0.01})


# --- once, and again where something changed -----------------------------------------------------


def test_files_are_hashed_again_only_where_one_is_not_as_it_was(tmp_path, monkeypatch):
    for i in range(4):
        write_image(tmp_path / "p" / "ab"[i % 2] / f"{i}.png", picture(i))
    known = tmp_path / "known.json"

    def identity(place: str = "p") -> str:
        said = own_data.read_own_data_specification("mine", {"images": str(tmp_path / place)})
        return said.compute_data_set_identity(hash_cache=known)["sha256"]

    first = identity()
    with monkeypatch.context() as patched:
        patched.setattr(own_data.own_files, "_hash_file", None)  # no file is read
        assert identity() == first
    os.utime(tmp_path / "p/a/0.png", ns=(1, 1))
    assert identity() == first
    (tmp_path / "p").rename(tmp_path / "q")
    assert identity("q") == first
    (tmp_path / "q/a/0.png").rename(tmp_path / "q/a/9.png")
    renamed = identity("q")
    assert renamed != first
    write_image(tmp_path / "q/a/9.png", picture(7))
    assert identity("q") not in (first, renamed)


def test_a_change_between_start_and_preparing_is_told(tmp_path):
    (tmp_path / "t.txt").write_text("to be or not to be " * 20)
    spec = {"text": str(tmp_path / "t.txt"), "sequence": 4}
    identity = own_data.read_own_data_specification("mine", spec).compute_data_set_identity()
    environment = own_data.format_data_paths_for_jobs({"mine": spec})
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(own_data.PLACES_VARIABLE, environment)
        meta = prepare_data_set("mine", tmp_path / "out", spec=identity)
        assert meta["spec"] == identity
        (tmp_path / "t.txt").write_text("or not " * 20)
        with pytest.raises(DataError, match="its files have changed since the run was started"):
            prepare_data_set("mine", tmp_path / "out", spec=identity)


# --- the config ----------------------------------------------------------------------------------


def study_of(folder: Path, spec: dict, **changes) -> tuple[dict, Study]:
    block = {
        "dataset": "mine", "strategies": ["single"], "models": ["vgg-compact"], "gpus": [1],
        "epochs": 1, "global_batch": 4, "lr": 0.02, "device": "cpu",
    } | changes  # fmt: skip
    return load_config(
        {
            "study": "s",
            "results": str(folder / "results"),
            "code": [str(folder)],
            "datasets": {"mine": spec},
            "studies": {"s": {"experiments": {"first": block}}},
        }
    )


def test_what_a_config_says_wrongly_ends_in_one_message(tmp_path):
    (tmp_path / "t.txt").write_text("text")
    (tmp_path / "p").mkdir()
    text, folder = str(tmp_path / "t.txt"), str(tmp_path / "p")
    for spec, sentence in (
        ({"call": "my_data.f", "images": folder}, "it has call and images"),
        ({"call": "my data"}, "call = 'my data' is not a module and a name within it"),
        ({"call": "a.b", "kwargs": 3}, "datasets.mine.kwargs = 3: must be a mapping"),
        ({"call": "a.b", "kwargs": {"a b": 3}}, "kwargs: 'a b' is not a Python parameter name"),
        (
            {"call": "a.b", "test_share": 0.2},
            "the key 'test_share' is not allowed with 'call'; allowed: call",
        ),
        ({"images": str(tmp_path / "none")}, "is not a folder"),
        ({"images": folder, "channels": 4}, "channels = 4: images become grey (1) or RGB (3)"),
        ({"images": folder}, "has no image"),
        ({"text": folder}, "is not a file"),
        ({"text": text, "test_share": 1}, "test_share = 1: must be less than 1"),
        ({"text": text, "sise": 8}, "unknown key 'sise'. Did you mean 'size'?"),
        ({"text": text}, "vgg-compact takes images, but the data set has texts"),
        ({"call": "a.b", "sequence": 4}, "vgg-compact takes images, but the data set has texts"),
        (
            {"source": "synthetic", "images": folder},
            "the key 'images' is unknown; use keys among source, ",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            study_of(tmp_path, spec)
        assert sentence in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="gpt-compact takes texts, but the data set has images"):
        study_of(tmp_path, {"call": "a.b"}, models=["gpt-compact"])
    with pytest.raises(ConfigError, match="has no augmentation"):
        study_of(tmp_path, {"call": "a.b"}, augment=True)
    study_of(tmp_path, {"call": "a.b", "flip": True}, augment=True)


def test_once_prepared_the_config_is_held_to_the_data(tmp_path, my_data):
    spec = {"call": f"{my_data}.images", "kwargs": {"size": 16}}
    config, study = study_of(tmp_path, spec, global_batch=64)
    [cell] = study.cells
    with pytest.raises(ConfigError, match=r"datasets\.mine: is not yet prepared"):
        make_cell_to_plan(config, study, cell)
    identity = study.settings(cell).data_spec
    assert identity == study.data_specs()["mine"]
    prepare_data_set("mine", tmp_path / "results/data/mine", spec=identity)
    # A run that had begun before is told by its launcher.
    with pytest.raises(DataError, match="but the data set 'mine' has only 12 training samples"):
        check_prepared_data(tmp_path / "results/data/mine", study.settings(cell))
    with pytest.raises(
        ConfigError, match="would take 64 samples, but the training set of mine has 12"
    ):
        study_of(tmp_path, spec, global_batch=64)
    config, study = study_of(tmp_path, spec)
    assert make_cell_to_plan(config, study, cell).data.shape == (3, 17, 16)
    # Changed code is other data.
    (tmp_path / f"{my_data}.py").write_text(CODE + "\n# changed\n")
    _, changed = study_of(tmp_path, spec)
    assert not changed.get_dataset("mine").has_known_metadata
    with pytest.raises(DataError, match=r"is not that of the cell's settings \(spec"):
        check_prepared_data(tmp_path / "results/data/mine", changed.settings(cell))
