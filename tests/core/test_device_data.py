"""A data set on the device: the same samples, crops and flips whichever worker holds them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from stratbench.workload.data import prepared
from stratbench.workload.data.datasets import DATASETS, make_dataset_metadata
from stratbench.workload.data.device_data import (
    Augmentation,
    DeviceData,
    compute_epoch_tables_bytes,
    draw_epoch_order,
    enlarge_images,
)
from stratbench.workload.data.prepare import prepare_data_set
from stratbench.workload.data.sources import DataError

SPEC = {"source": "synthetic", "train_samples": 300, "test_samples": 50, "size": 12, "classes": 3}


@pytest.fixture(scope="module")
def digits_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "digits"
    prepare_data_set("digits", folder)
    return folder


@pytest.fixture(scope="module")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as if of CIFAR-10: three channels, cropped with 4 pixels of padding, flipped."""
    folder = tmp_path_factory.mktemp("data") / "coloured"
    prepare_data_set("mine", folder, spec=SPEC)
    [path] = folder.glob("meta*.json")
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"crop_padding": 4, "flip": True}))
    return folder


def test_a_batch_is_normalised_with_the_training_sets_statistics(coloured: Path) -> None:
    data = DeviceData.load_prepared_data_set(coloured, dtype=torch.float64)
    images, labels = data.make_training_batch(torch.arange(data.train_samples))
    assert images.dtype == torch.float64
    assert images.mean(dim=(0, 2, 3)).abs().max() < 1e-12
    assert (images.std(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-12
    assert labels.tolist() == [i % 3 for i in range(300)]
    single, _ = DeviceData.load_prepared_data_set(coloured).make_training_batch(torch.tensor([7]))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), images[7:8], rtol=0, atol=1e-5)


def drawn(data: DeviceData, seed: int, epoch: int) -> Augmentation | None:
    return data.draw_order_and_augmentation(seed, epoch, augment=True).augmentation


def test_augmentation_is_a_crop_from_zero_padding_and_a_flip(coloured: Path) -> None:
    data = DeviceData.load_prepared_data_set(coloured, dtype=torch.float64)
    tables = drawn(data, 1, 2)
    mean, std = (
        torch.tensor(data.meta[key], dtype=torch.float64)[:, None, None] for key in ("mean", "std")
    )
    indices = torch.tensor([5, 299, 0, 17, 5, 100])
    images, _ = data.make_training_batch(indices, tables)
    for image, index in zip(images, indices.tolist(), strict=True):
        padded = torch.zeros(3, 20, 20, dtype=torch.float64)
        padded[:, 4:16, 4:16] = data.train_inputs[index]
        top, left = tables.top[index], tables.left[index]
        crop = padded[:, top : top + 12, left : left + 12]
        crop = crop.flip(-1) if tables.flip[index] else crop
        torch.testing.assert_close(image, (crop / 255 - mean) / std, rtol=0, atol=1e-12)
    assert len({tuple(row) for row in torch.stack(tables, dim=1)[indices].tolist()}) > 2


def test_augmentation_uses_all_positions_evenly_and_flips_half(coloured: Path) -> None:
    data = DeviceData.load_prepared_data_set(coloured)
    epochs = [drawn(data, 0, epoch) for epoch in range(30)]
    for position in ("top", "left"):
        share = torch.cat([getattr(epoch, position) for epoch in epochs]).bincount() / 9000
        assert share.tolist() == pytest.approx([1 / 9] * 9, abs=0.02)
    assert torch.cat([epoch.flip for epoch in epochs]).double().mean() == pytest.approx(
        0.5, abs=0.02
    )


def test_augmentation_does_not_depend_on_how_samples_are_split(coloured: Path) -> None:
    whole = DeviceData.load_prepared_data_set(coloured)
    order = draw_epoch_order(whole.train_samples, seed=3, epoch=1)[:64]
    expected, _ = whole.make_training_batch(order, drawn(whole, 3, 1))
    for workers in (2, 4):
        for rank in range(workers):
            worker = DeviceData.load_prepared_data_set(coloured)
            torch.rand(rank + 1)
            found, _ = worker.make_training_batch(order[rank::workers], drawn(worker, 3, 1))
            assert torch.equal(found, expected[rank::workers])


def test_each_epoch_and_seed_has_its_own_order_and_augmentation(coloured: Path) -> None:
    data = DeviceData.load_prepared_data_set(coloured)
    assert sorted(draw_epoch_order(300, 0, 0).tolist()) == list(range(300))
    assert torch.equal(draw_epoch_order(300, 0, 0), draw_epoch_order(300, 0, 0))
    for seed, epoch in ((0, 1), (1, 0), (1, 1)):
        assert not torch.equal(draw_epoch_order(300, 0, 0), draw_epoch_order(300, seed, epoch))
        assert not torch.equal(drawn(data, 0, 0).top, drawn(data, seed, epoch).top)
    assert not torch.equal(draw_epoch_order(300, 0, 1), draw_epoch_order(300, 1, 0))


def test_drawing_an_epoch_leaves_the_global_generator_alone(coloured: Path) -> None:
    data = DeviceData.load_prepared_data_set(coloured)
    state = torch.get_rng_state()
    drawn(data, 0, 0)
    draw_epoch_order(300, 0, 0)
    assert torch.equal(state, torch.get_rng_state())


def test_digits_are_doubled_and_mnist_is_padded() -> None:
    digits = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8)
    doubled = enlarge_images(digits, 16, 16)
    assert torch.equal(doubled[..., ::2, ::2], digits)
    assert torch.equal(doubled[..., 1::2, 1::2], digits)
    mnist = torch.ones(1, 1, 28, 28, dtype=torch.uint8)
    padded = enlarge_images(mnist, 32, 32)
    assert padded.shape == (1, 1, 32, 32)
    assert padded.sum() == 28 * 28
    assert (padded[..., 2:30, 2:30] == 1).all()
    assert enlarge_images(torch.ones(1, 1, 5, 7, dtype=torch.uint8), 16, 16).shape == (1, 1, 16, 16)
    with pytest.raises(DataError, match="28x28 pixels are larger than"):
        enlarge_images(mnist, 16, 16)


def test_one_channel_is_repeated_for_a_model_that_wants_three(digits_dir: Path) -> None:
    grey = DeviceData.load_prepared_data_set(digits_dir, shape=(1, 32, 32))
    colour = DeviceData.load_prepared_data_set(digits_dir, shape=(3, 32, 32))
    expected, _ = grey.make_training_batch(torch.arange(4))
    found, _ = colour.make_training_batch(torch.arange(4))
    assert torch.equal(found, expected.repeat(1, 3, 1, 1))
    assert colour.train_inputs.shape[1] == 1, "memory is spent on repeated bytes"


def test_channels_that_cannot_be_made_are_refused(coloured: Path) -> None:
    with pytest.raises(DataError, match="3 channels, but the model takes 1"):
        DeviceData.load_prepared_data_set(coloured, shape=(1, 12, 12))


def test_test_batches_are_normalised_in_order_and_end_with_the_test_set(digits_dir: Path) -> None:
    data = DeviceData.load_prepared_data_set(digits_dir)
    batches = [
        data.make_test_batch(start, start + 100) for start in range(0, data.test_samples, 100)
    ]
    assert [len(labels) for _, labels in batches] == [100, 100, 100, 60]
    assert torch.equal(torch.cat([labels for _, labels in batches]), data.test_targets)
    images = torch.cat([images for images, _ in batches])
    expected = (data.test_inputs / 255 - data.meta["mean"][0]) / data.meta["std"][0]
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-5)


def test_a_data_set_without_augmentation_has_no_tables(tmp_path: Path) -> None:
    prepare_data_set("mine", tmp_path / "a", spec=SPEC)
    assert drawn(DeviceData.load_prepared_data_set(tmp_path / "a"), 0, 0) is None


def test_digits_and_mnist_are_never_mirrored(digits_dir: Path) -> None:
    assert not DATASETS["mnist"].has_random_flips
    assert drawn(DeviceData.load_prepared_data_set(digits_dir), 0, 0).flip.sum() == 0


def test_the_prepared_files_are_not_changed_by_training_on_them(digits_dir: Path) -> None:
    data = DeviceData.load_prepared_data_set(digits_dir)
    data.train_inputs.zero_()
    assert prepared.read_metadata_if_intact(digits_dir, {"name": "digits"})


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path, digits_dir: Path) -> None:
    with pytest.raises(DataError, match=r"stratbench\.workload\.data\.prepare"):
        DeviceData.load_prepared_data_set(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(digits_dir, broken)
    file = broken / "train_inputs.npy"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DataError, match="broken"):
        DeviceData.load_prepared_data_set(broken)


def test_packed_tables_are_the_same_tables(digits_dir):
    data = DeviceData.load_prepared_data_set(digits_dir)
    tables = data.draw_order_and_augmentation(seed=1, epoch=2, augment=True)
    assert torch.equal(tables.order, draw_epoch_order(data.train_samples, 1, 2))
    packed = tables.convert_to_small_integers()
    facts = make_dataset_metadata("digits")
    kept_bytes = sum(t.nbytes for t in (packed.order, *packed.augmentation))
    assert kept_bytes == compute_epoch_tables_bytes(facts, augment=True) == 7 * data.train_samples
    plain = data.draw_order_and_augmentation(
        seed=1, epoch=2, augment=False
    ).convert_to_small_integers()
    assert plain.order.nbytes == compute_epoch_tables_bytes(facts, augment=False)
    back = packed.to_device(torch.device("cpu"))
    for mine, theirs in zip(
        (back.order, *back.augmentation), (tables.order, *tables.augmentation), strict=True
    ):
        assert torch.equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    assert (
        data.draw_order_and_augmentation(1, 2, augment=False)
        .convert_to_small_integers()
        .to_device(torch.device("cpu"))
        .augmentation
        is None
    )
