"""Preparing a data set: verified, whole or not at all, with errors that say what to do."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from launching import until
from stratbench.workload.data import prepared, sources
from stratbench.workload.data.datasets import DATASETS, make_dataset_metadata
from stratbench.workload.data.prepare import main, prepare_data_set
from stratbench.workload.data.sources import DataError

WORKFLOW = Path(__file__).parents[2] / "workflow"
SPEC = {"source": "synthetic", "train_samples": 300, "test_samples": 50, "size": 12, "classes": 3}
REAL_DATA = os.environ.get("STRATBENCH_TEST_DATA")
needs_real_data = pytest.mark.skipif(not REAL_DATA, reason="STRATBENCH_TEST_DATA is not set")


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@pytest.fixture(autouse=True)
def _no_data_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sources.ROOT_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def digits_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "digits"
    prepare_data_set("digits", folder)
    return folder


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + bytes(values)


@pytest.fixture
def mnist_files(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A tiny MNIST, uncompressed, whose MD5s the package is made to expect."""
    rng = np.random.default_rng(0)
    contents = {}
    for split, samples in (("train", 6), ("t10k", 4)):
        images = rng.integers(0, 256, (samples, 28, 28), dtype=np.uint8)
        contents[f"{split}-images-idx3-ubyte"] = idx(images)
        contents[f"{split}-labels-idx1-ubyte"] = idx(np.arange(samples, dtype=np.uint8))
    expected = {
        name: (md5(gzip.compress(content, mtime=0)), md5(content))
        for name, content in contents.items()
    }
    monkeypatch.setattr(sources, "MNIST_FILES", expected)
    return contents


def put_mnist(root: Path, contents: dict[str, bytes], compressed: bool) -> Path:
    folder = root / sources.MNIST_FOLDER
    folder.mkdir(parents=True)
    for name, content in contents.items():
        if compressed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def cifar10_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny CIFAR-10 in torchvision's layout, whose MD5s the package is made to expect."""
    folder = tmp_path / "root" / sources.CIFAR10_FOLDER
    folder.mkdir(parents=True)
    expected = {}
    for number, name in enumerate(sources.CIFAR10_FILES):
        rng = np.random.default_rng(number)
        pixels = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
        content = pickle.dumps({b"data": pixels, b"labels": [number, 1, 2, 3]})
        (folder / name).write_bytes(content)
        expected[name] = md5(content)
    monkeypatch.setattr(sources, "CIFAR10_FILES", expected)
    return tmp_path / "root"


# ---------------------------------------------------------------- preparing


def test_digits_are_the_embedded_ones_in_a_fixed_split(digits_dir: Path) -> None:
    meta, arrays = prepared.read_data_set(digits_dir)
    assert meta["sha256"] == "90490bb2ffbc52a10e47594d770eb0cf72cf1e7e86a80c9be4553390d88f4977"
    assert arrays["train_inputs"].shape == (1437, 1, 8, 8)
    assert arrays["test_inputs"].shape == (360, 1, 8, 8)
    assert arrays["train_inputs"].min() == 0
    assert arrays["train_inputs"].max() == 255
    assert np.bincount(arrays["test_targets"]).min() >= 34
    images = arrays["train_inputs"] / 255
    assert meta["mean"] == pytest.approx([images.mean()])
    assert meta["std"] == pytest.approx([images.std()])


def test_facts_match_what_is_prepared(digits_dir: Path) -> None:
    meta = json.loads((digits_dir / "meta.json").read_text())
    facts = DATASETS["digits"]
    assert (meta["classes"], tuple(meta["shape"])) == (facts.classes, facts.shape)
    assert (meta["train_samples"], meta["test_samples"]) == (
        facts.train_samples,
        facts.test_samples,
    )


def test_a_synthetic_set_has_the_asked_size_and_is_the_same_each_time(tmp_path: Path) -> None:
    first = prepare_data_set("mine", tmp_path / "a", spec=SPEC)
    second = prepare_data_set("mine", tmp_path / "b", spec=SPEC)
    other = prepare_data_set("mine", tmp_path / "c", spec=SPEC | {"seed": 1})
    assert first["sha256"] == second["sha256"] != other["sha256"]
    assert first["shape"] == [3, 12, 12]
    assert make_dataset_metadata("mine", SPEC).shape == (3, 12, 12)
    _, arrays = prepared.read_data_set(tmp_path / "a")
    assert len(arrays["train_inputs"]) == 300
    assert np.bincount(arrays["train_targets"]).tolist() == [100, 100, 100]


def test_a_synthetic_set_can_be_learnt_from_but_not_copied(tmp_path: Path) -> None:
    prepare_data_set("mine", tmp_path / "a", spec=SPEC)
    _, arrays = prepared.read_data_set(tmp_path / "a")
    images, labels = arrays["train_inputs"].astype(float), arrays["train_targets"]
    centres = np.stack([images[labels == label].mean(axis=0) for label in range(3)])
    distances = ((arrays["test_inputs"].astype(float)[:, None] - centres) ** 2).sum(axis=(2, 3, 4))
    assert (distances.argmin(axis=1) == arrays["test_targets"]).mean() == 1
    assert images[labels == 0].std(axis=0).mean() > 30, "no noise"


@pytest.mark.parametrize("compressed", [True, False])
def test_mnist_is_read_compressed_and_uncompressed(
    tmp_path: Path, mnist_files: dict[str, bytes], compressed: bool
) -> None:
    put_mnist(tmp_path / "root", mnist_files, compressed)
    meta = prepare_data_set("mnist", tmp_path / "out", tmp_path / "root", download=False)
    _, arrays = prepared.read_data_set(tmp_path / "out")
    assert arrays["train_inputs"].shape == (6, 1, 28, 28)
    assert arrays["train_inputs"].tobytes() == mnist_files["train-images-idx3-ubyte"][16:]
    assert arrays["test_targets"].tolist() == [0, 1, 2, 3]
    named = {source["file"]: source["md5"] for source in meta["sources"]}
    end = ".gz" if compressed else ""
    assert named[f"t10k-labels-idx1-ubyte{end}"] in sources.MNIST_FILES["t10k-labels-idx1-ubyte"]


def test_cifar10_is_read_from_batches(tmp_path: Path, cifar10_root: Path) -> None:
    prepare_data_set("cifar10", tmp_path / "out", cifar10_root, download=False)
    _, arrays = prepared.read_data_set(tmp_path / "out")
    assert arrays["train_inputs"].shape == (20, 3, 32, 32)
    assert arrays["train_targets"].tolist()[::4] == [0, 1, 2, 3, 4]
    expected = np.random.default_rng(5).integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
    assert (arrays["test_inputs"] == expected).all()


def test_cifar10_is_read_from_its_archive(
    tmp_path: Path, cifar10_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = prepare_data_set("cifar10", tmp_path / "a", cifar10_root, download=False)
    archive = shutil.make_archive(
        str(cifar10_root / "cifar-10-python"), "gztar", cifar10_root, sources.CIFAR10_FOLDER
    )
    shutil.rmtree(cifar10_root / sources.CIFAR10_FOLDER)
    archive_md5 = md5(Path(archive).read_bytes())
    monkeypatch.setattr(sources, "CIFAR10_ARCHIVE", ("cifar-10-python.tar.gz", archive_md5))
    found = prepare_data_set("cifar10", tmp_path / "b", cifar10_root, download=False)
    assert found["sha256"] == expected["sha256"]
    assert found["sources"][0]["file"] == "cifar-10-python.tar.gz"


def test_the_environment_variable_stands_in_for_the_root(
    tmp_path: Path, mnist_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_mnist(tmp_path / "root", mnist_files, compressed=True)
    monkeypatch.setenv(sources.ROOT_VARIABLE, str(tmp_path / "root"))
    assert prepare_data_set("mnist", tmp_path / "out", download=False)["train_samples"] == 6


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("damage", ["truncated", "corrupt"])
def test_a_damaged_file_is_named_with_both_md5s_and_a_remedy(
    tmp_path: Path, mnist_files: dict[str, bytes], compressed: bool, damage: str
) -> None:
    folder = put_mnist(tmp_path / "root", mnist_files, compressed)
    name = "train-labels-idx1-ubyte"
    file = folder / (f"{name}.gz" if compressed else name)
    content = file.read_bytes()
    broken = content[:-3] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1])
    file.write_bytes(broken)
    with pytest.raises(DataError) as caught:
        prepare_data_set("mnist", tmp_path / "out", tmp_path / "root", download=False)
    message = str(caught.value)
    for part in (str(file), md5(broken), sources.MNIST_FILES[name][not compressed], "Delete"):
        assert part in message
    assert os.listdir(tmp_path) == ["root"], "something was left behind"


def test_a_batch_is_not_unpickled_before_its_md5_is_right(
    tmp_path: Path, cifar10_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    content = pickle.dumps(Evil())
    (cifar10_root / sources.CIFAR10_FOLDER / "test_batch").write_bytes(content)
    with pytest.raises(DataError, match="expected MD5"):
        prepare_data_set("cifar10", tmp_path / "out", cifar10_root, download=False)
    # Even with the expected MD5, only arrays of numbers come out.
    monkeypatch.setitem(sources.CIFAR10_FILES, "test_batch", md5(content))
    with pytest.raises(DataError, match="is not part of a batch file of CIFAR-10"):
        prepare_data_set("cifar10", tmp_path / "out", cifar10_root, download=False)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_missing_files_without_network_say_what_to_put_where(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        prepare_data_set(name, tmp_path / "out", tmp_path / "root", download=False)
    message = str(caught.value)
    for part in (str(tmp_path / "root"), "not allowed", "data.root", sources.ROOT_VARIABLE, "http"):
        assert part in message
    assert not list(tmp_path.iterdir())


def test_a_network_that_does_not_answer_is_reported_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MNIST_MIRRORS", ("http://127.0.0.1:9/",))
    with pytest.raises(
        DataError, match=r"(?s)No folder .*Downloading failed.*127\.0\.0\.1:9.*ROOT"
    ):
        prepare_data_set("mnist", tmp_path / "out")


@pytest.mark.timeout(300)
def test_a_download_is_verified_and_the_next_mirror_tried(
    tmp_path: Path, mnist_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = put_mnist(tmp_path / "server" / "good", mnist_files, compressed=True)
    bad = put_mnist(tmp_path / "server" / "bad", mnist_files, compressed=True)
    for file in bad.iterdir():
        file.write_bytes(file.read_bytes()[:-1])

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments, directory=str(tmp_path / "server"))

        def log_message(self, *_) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        mirrors = [f"{base}/{folder.relative_to(tmp_path / 'server')}/" for folder in (bad, good)]
        monkeypatch.setattr(sources, "MNIST_MIRRORS", tuple(mirrors))
        meta = prepare_data_set("mnist", tmp_path / "out" / "mnist")
        assert meta["test_samples"] == 4
        monkeypatch.setattr(sources, "MNIST_MIRRORS", tuple(mirrors[:1]))
        with pytest.raises(DataError, match="corrupt or truncated"):
            prepare_data_set("mnist", tmp_path / "out" / "again")
        server.shutdown()
    assert os.listdir(tmp_path / "out") == ["mnist"]


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("imagenet", None, "data set 'imagenet': is unknown; use one of digits"),
        ("mine", {"source": "web"}, "source is 'web'"),
        (
            "mine",
            SPEC | {"colour": 1},
            "the key 'colour' is unknown; use keys among source, train_samples",
        ),
        ("mine", SPEC | {"size": 0}, "size is 0; it must be a whole number >= 1"),
        ("mine", SPEC | {"classes": True}, "classes is True"),
        ("mnist", SPEC, "is built in"),
    ],
)
def test_a_wrong_request_names_the_key_and_what_is_allowed(
    tmp_path: Path, name: str, spec: dict | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prepare_data_set(name, tmp_path / "out", spec=spec)


def test_a_folder_with_other_things_in_it_is_not_touched(tmp_path: Path) -> None:
    precious = tmp_path / "out" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("precious")
    with pytest.raises(DataError, match=r"thesis\.tex"):
        prepare_data_set("mine", tmp_path / "out", spec=SPEC)
    with pytest.raises(DataError, match="is not a folder"):
        prepare_data_set("mine", precious, spec=SPEC)
    assert precious.read_text() == "precious"
    assert os.listdir(tmp_path) == ["out"]


# ---------------------------------------------------------------- whole or not at all


#: Of one that stays before it moves what it has built.
STAYS = """
import runpy, time
from stratbench.workload.data import prepared
prepared.install_data_set = lambda *_: time.sleep(600)
runpy.run_module("stratbench.workload.data.prepare", run_name="__main__", alter_sys=True)
"""


def run_prepare(out: Path, *program: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *program, "mine", "--out", str(out), "--spec", json.dumps(SPEC)],
        env=os.environ | {"PYTHONPATH": str(WORKFLOW)},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_preparation_leaves_nothing_that_looks_whole(tmp_path: Path, how: int) -> None:
    out = tmp_path / "out"
    process = run_prepare(out, "-c", STAYS)
    until(lambda: list(tmp_path.glob(".out.*.partial/built/meta*.json")))
    process.send_signal(how)
    assert process.wait() != 0
    assert not out.exists()
    if how == signal.SIGTERM:
        assert not list(tmp_path.iterdir())
    assert prepare_data_set("mine", out, spec=SPEC)["train_samples"] == 300
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.timeout(300)
def test_what_killed_preparations_have_left_goes_and_what_others_still_build_stays(
    tmp_path: Path,
) -> None:
    out, other = tmp_path / "out", tmp_path / "out2"
    living, killed = run_prepare(out, "-c", STAYS), run_prepare(out, "-c", STAYS)
    until(lambda: len(list(tmp_path.glob(".out.*.partial/built/meta*.json"))) == 2)
    killed.kill()
    killed.wait()
    try:
        prepare_data_set("other", other, spec=SPEC)
        assert len(list(tmp_path.glob(".out.*.partial"))) == 2  # of another data set
        prepare_data_set("mine", out, spec=SPEC)
        [left] = tmp_path.glob(".out.*.partial")
        assert list(left.glob("built/meta*.json"))
        assert living.poll() is None
    finally:
        living.kill()
        living.wait()
    prepare_data_set("mine", out, spec=SPEC | {"seed": 1})
    assert {*tmp_path.iterdir()} == {out, other}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_concurrent_preparations_all_succeed_on_one_result(tmp_path: Path) -> None:
    processes = [
        run_prepare(tmp_path / "out", "-m", "stratbench.workload.data.prepare") for _ in range(4)
    ]
    assert [process.wait() for process in processes] == [0] * 4
    assert os.listdir(tmp_path) == ["out"]
    assert prepared.read_metadata_if_intact(tmp_path / "out", {"name": "mine"})


def test_an_intact_result_is_kept_and_a_damaged_one_made_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_data_set("mine", out, spec=SPEC)
    images = out / "train_inputs.npy"
    before = images.stat().st_ino
    prepare_data_set("mine", out, spec=SPEC)
    assert images.stat().st_ino == before
    whole = images.read_bytes()
    images.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    prepare_data_set("mine", out, spec=SPEC)
    assert images.read_bytes() == whole
    assert prepare_data_set("mine", out, spec=SPEC | {"classes": 2})["classes"] == 2
    assert os.listdir(tmp_path) == ["out"]


def test_an_array_that_changed_is_noticed_and_a_copy_is_not(tmp_path: Path) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    meta = prepare_data_set("mine", out, spec=SPEC)
    assert prepared.read_verified_metadata(out) == meta
    shutil.copytree(out, copy, copy_function=shutil.copyfile)  # other times of change
    assert prepared.read_verified_metadata(copy)["sha256"] == meta["sha256"]
    labels = out / "test_targets.npy"
    whole = labels.read_bytes()
    labels.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(
        DataError, match=r"test_targets have changed since the data set was prepared\); delete it"
    ):
        prepared.read_verified_metadata(out)
    labels.write_bytes(whole)
    assert prepared.read_verified_metadata(out) == meta


@pytest.mark.timeout(300)
@pytest.mark.parametrize("odd", ["fifo", "folder", "device", "nothing", "no JSON"])
def test_a_prepared_folder_with_odd_files_is_not_whole(tmp_path: Path, odd: str) -> None:
    out = tmp_path / "out"
    meta = prepare_data_set("mine", out, spec=SPEC)
    array = out / (
        prepared.format_meta_file_name(meta["spec"]) if odd == "no JSON" else "train_inputs.npy"
    )
    array.unlink()
    if odd == "fifo":
        os.mkfifo(array)
    elif odd == "folder":
        array.mkdir()
    elif odd == "device":
        array.symlink_to("/dev/zero")
    elif odd == "no JSON":
        array.write_text("{" * 100_000)
    of_meta = [prepared.read_unverified_metadata] if odd == "no JSON" else []
    for read in (prepared.read_verified_metadata, prepared.read_data_set, *of_meta):
        with pytest.raises(DataError, match="is not a complete prepared data set"):
            read(out)
    assert prepared.read_metadata_if_intact(out, {"sha256": meta["sha256"]}) is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("odd", ["fifo", "device", "endless"])
def test_a_source_that_never_ends_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    monkeypatch.setattr(sources, "MAX_FILE_BYTES", 1 << 20)
    path = tmp_path / sources.CIFAR10_ARCHIVE[0]
    if odd == "fifo":
        os.mkfifo(path)
    elif odd == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as f:
            f.truncate(1 << 40)
    what = "is larger than 1,048,576 bytes" if odd == "endless" else "is not a regular file"
    with pytest.raises(DataError, match=f"{path.name}: cannot be read: {what}"):
        prepare_data_set("cifar10", tmp_path / "out", root=tmp_path, download=False)


def test_a_failure_midway_keeps_the_earlier_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    earlier = prepare_data_set("mine", out, spec=SPEC)

    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "open_memmap", disk_full)
    with pytest.raises(OSError, match="No space"):
        prepare_data_set("mine", out, spec=SPEC | {"seed": 1})
    assert prepared.read_metadata_if_intact(out, {"sha256": earlier["sha256"]})
    assert os.listdir(tmp_path) == ["out"]


def test_the_command_prints_one_message_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "digits")
    assert main(["digits", "--out", out]) == 0
    assert "1437 training" in capsys.readouterr().out
    assert main(["mnist", "--out", str(tmp_path / "mnist"), "--no-download"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: mnist: the data set was not found")
    assert "Traceback" not in errors


# ---------------------------------------------------------------- the real files


@needs_real_data
@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("mnist", [0.1307], [0.3081]),
        ("cifar10", [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    ],
)
def test_the_real_files_have_the_expected_md5s_and_statistics(
    tmp_path: Path, name: str, mean: list[float], std: list[float]
) -> None:
    meta = prepare_data_set(name, tmp_path / name, REAL_DATA, download=False)
    facts = DATASETS[name]
    assert (meta["train_samples"], meta["test_samples"]) == (
        facts.train_samples,
        facts.test_samples,
    )
    assert tuple(meta["shape"]) == facts.shape
    assert meta["mean"] == pytest.approx(mean, abs=1e-4)
    assert meta["std"] == pytest.approx(std, abs=1e-4)
    _, arrays = prepared.read_data_set(tmp_path / name)
    assert set(np.bincount(arrays["test_targets"])) == {1000} or name == "mnist"


@needs_real_data
def test_uncompressed_mnist_has_the_expected_md5s(tmp_path: Path) -> None:
    folder = tmp_path / "root" / sources.MNIST_FOLDER
    folder.mkdir(parents=True)
    for name in sources.MNIST_FILES:
        compressed = Path(REAL_DATA, sources.MNIST_FOLDER, f"{name}.gz").read_bytes()
        (folder / name).write_bytes(gzip.decompress(compressed))
    meta = prepare_data_set("mnist", tmp_path / "out", tmp_path / "root", download=False)
    assert [source["file"] for source in meta["sources"]] == list(sources.MNIST_FILES)
