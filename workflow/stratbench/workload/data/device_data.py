"""Loads a prepared data set to the device or to host memory, and makes batches of it.

The device pads, augments and normalises whole batches. The result depends on a sample's index, the seed and
the epoch, and not on the worker that has the sample.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stratbench.workload.data import prepared
from stratbench.workload.data.dataset import Dataset
from stratbench.workload.data.placement import HostRows
from stratbench.workload.data.sources import DataError

if TYPE_CHECKING:
    import torch

    from stratbench.cell.settings import Settings

    # Inputs and targets of a batch.
    InputsAndTargets = tuple[torch.Tensor, torch.Tensor]

#: Number of images, waveforms or tokens per batch of the evaluation.
EVAL_IMAGES, EVAL_WAVEFORMS, EVAL_TOKENS = 512, 64, 8192


class Augmentation(NamedTuple):
    """The random crops and flips of all N training images for one epoch, as integer tensors [N].

    Attributes:
        top: First row of each crop within the padded image.
        left: First column of each crop within the padded image.
        flip: 1 for each image to mirror, else 0.
    """

    top: torch.Tensor
    left: torch.Tensor
    flip: torch.Tensor


class EpochTables(NamedTuple):
    """The order of the N training samples in one epoch, int64 [N], and the augmentation, if any."""

    order: torch.Tensor
    augmentation: Augmentation | None

    def convert_to_small_integers(self) -> EpochTables:
        """Return the tables converted to smaller integer types, to save memory."""
        import torch

        a = self.augmentation
        small = None if a is None else Augmentation(*(t.to(torch.uint8) for t in a))
        return EpochTables(self.order.to(torch.int32), small)

    def to_device(self, device: torch.device) -> EpochTables:
        """Return the tables as int64 on a device."""
        a = self.augmentation
        whole = None if a is None else Augmentation(*(t.to(device).long() for t in a))
        return EpochTables(self.order.to(device).long(), whole)


def compute_epoch_tables_bytes(data: Dataset, augment: bool) -> int:
    """Return the memory in bytes of one epoch's order and augmentation in packed form.

    The order takes 4 bytes per training sample, and the augmentation 3.
    """
    augmented = augment and (data.crop_padding > 0 or data.has_random_flips)
    return data.train_samples * (4 + 3 * augmented)


def make_random_generator(purpose: str, seed: int, epoch: int) -> torch.Generator:
    """Return a CPU generator whose random numbers are the same on all workers and devices.

    Args:
        purpose: Name of the random numbers' use; each use has its own stream.
        seed: Seed of the cell.
        epoch: Number of the epoch.
    """
    import torch

    digest = hashlib.sha256(f"{purpose}/{seed}/{epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def draw_epoch_order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of the training samples in an epoch: a permutation, int64 [samples].

    Args:
        samples: Number of training samples.
        seed: Seed of the cell.
        epoch: Number of the epoch.
    """
    import torch

    return torch.randperm(samples, generator=make_random_generator("order", seed, epoch))


def enlarge_images(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return images [N, C, H, W] enlarged to [N, C, height, width].

    Every pixel is repeated by the largest integer factor that fits, then zeros are added evenly around. For
    example, 8x8 becomes 16x16 by doubling, and 28x28 becomes 32x32 by padding. Without interpolation, the
    values stay the original bytes.

    Args:
        images: Shape [N, C, H, W].
        height: New height.
        width: New width.
    """
    import torch.nn.functional as functional

    have_height, have_width = images.shape[-2:]
    factor = min(height // have_height, width // have_width)
    if factor < 1:
        raise DataError(
            f"the data set's images of {have_height}x{have_width} pixels are larger than the model's input "
            f"of {height}x{width}; use smaller images or another model"
        )
    if factor > 1:
        images = images.repeat_interleave(factor, dim=-2).repeat_interleave(factor, dim=-1)
    add_height, add_width = height - factor * have_height, width - factor * have_width
    if add_height or add_width:
        top, left = add_height // 2, add_width // 2
        images = functional.pad(images, (left, add_width - left, top, add_height - top))
    return images


def choose_evaluation_batch_size(shape: Sequence[int]) -> int:
    """Return the number of samples per batch of the evaluation. It depends on the sample shape."""
    if len(shape) == 1:
        return max(1, EVAL_TOKENS // shape[0])
    return EVAL_IMAGES if len(shape) == 3 else EVAL_WAVEFORMS


def make_example_batch(
    samples: int,
    shape: Sequence[int],
    classes: int,
    device: torch.device,
    dtype: torch.dtype,
    memory_format: torch.memory_format,
    has_value_targets: bool = False,
    has_one_target_per_text: bool = False,
) -> InputsAndTargets:
    """Return inputs and targets shaped like a training batch, for trial steps without data.

    Args:
        samples: Samples of the batch.
        shape: Shape of a sample.
        classes: Number of classes.
        device: Device of the tensors.
        dtype: Type of real inputs.
        memory_format: Memory format of images.
        has_value_targets: Whether a target is `classes` values in `dtype`.
        has_one_target_per_text: Whether a text has one target.
    """
    import torch

    def make_placeholder(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # A fake tensor that is created by `torch.zeros` would have known values, which real data do not have.
        return torch.empty(shape, device=device, dtype=dtype).zero_()

    if len(shape) == 1 and not has_one_target_per_text:
        return tuple(make_placeholder((samples, *shape), torch.int64) for _ in range(2))
    x = make_placeholder((samples, *shape), torch.int64 if has_one_target_per_text else dtype)
    y = make_placeholder((samples,), torch.int64).add_(
        torch.arange(samples, device=device) % classes
    )
    if has_value_targets:
        y = make_placeholder((samples, classes), dtype)
    return x.contiguous(memory_format=memory_format) if x.dim() == 4 else x, y


class DeviceData(ABC):
    """A prepared data set for training on one device.

    `train_inputs`, `test_inputs`, `train_targets` and `test_targets` are tensors [N, ...] as they are stored,
    either on the device or mapped from the prepared files. In the second case each batch's rows are gathered
    in host memory, and copied ahead (`HostRows`). `meta` is the content of the prepared folder's meta.json.
    """

    def __init__(
        self,
        meta: Mapping[str, Any],
        arrays: Mapping[str, torch.Tensor],
        device: torch.device | None = None,
    ) -> None:
        """Create a data set from its arrays.

        Args:
            meta: Metadata of the data set.
            arrays: Inputs and targets by name.
            device: Device of batches if the arrays stay in host memory, or None for the arrays' device.
        """
        self.meta = dict(meta)
        self.train_inputs, self.test_inputs = arrays["train_inputs"], arrays["test_inputs"]
        self.train_targets, self.test_targets = arrays["train_targets"], arrays["test_targets"]
        self._rows = device and HostRows(self.train_inputs, self.train_targets, device)
        self.device = device or self.train_inputs.device
        #: Device on which `make_training_batch` needs the sample indices and the augmentation.
        self.index_device = self.train_inputs.device

    @staticmethod
    def load_prepared_data_set(
        directory: str | Path,
        device: torch.device | str = "cpu",
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        data_placement: str = "device",
    ) -> DeviceData:
        """Load a data set from the folder that `prepare` has written.

        Args:
            directory: The prepared folder.
            device: Device of batches.
            shape: Shape of the model's input, or None for the shape of the samples.
            dtype: Type of images, float32 by default; tokens are int64.
            memory_format: Memory format of images, contiguous by default.
            data_placement: `device`, or `host` to leave the data in host memory.

        Raises:
            DataError: If the folder is incomplete.
        """
        import torch

        meta, arrays = prepared.read_data_set(Path(directory))
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        at = torch.device(device) if data_placement == "host" else None
        if at is None:
            tensors = {name: t.to(device, copy=True) for name, t in tensors.items()}
        if len(meta["shape"]) == 1:
            return Texts(meta, tensors, at)
        shape = shape or tuple(meta["shape"])
        if len(shape) == 2:
            return Waveforms(meta, tensors, dtype or torch.float32, at)
        memory_format = memory_format or torch.contiguous_format
        return Images(meta, tensors, shape, dtype or torch.float32, memory_format, at)

    @property
    def train_samples(self) -> int:
        return len(self.train_targets)

    @property
    def test_samples(self) -> int:
        return len(self.test_targets)

    def draw_order_and_augmentation(self, seed: int, epoch: int, augment: bool) -> EpochTables:
        """Return the random order of samples in an epoch and, with `augment`, crops and flips.

        The tables are in host memory. Augmentation is drawn per sample index, so that it does not depend on
        worker, batch or strategy. It is None if the data set has none.

        Args:
            seed: Seed of the cell.
            epoch: Number of the epoch.
            augment: Whether to draw augmentation.
        """
        drawn = self._draw_augmentation(seed, epoch) if augment else None
        return EpochTables(draw_epoch_order(self.train_samples, seed, epoch), drawn)

    def _draw_augmentation(self, seed: int, epoch: int) -> Augmentation | None:
        return None

    def make_training_batch(
        self, indices: torch.Tensor, augmentation: Augmentation | None = None
    ) -> InputsAndTargets:
        """Return a batch of training samples in the model's input format, and their targets.

        Args:
            indices: Indices of the samples, shape [b].
            augmentation: The epoch's augmentation of all samples, if any.
        """
        if self._rows is not None:
            return self._convert_stored_batch(*self._rows.take_fetched_batch(indices, augmentation))
        drawn = augmentation and [table[indices] for table in augmentation]
        return self._convert_stored_batch(
            self.train_inputs[indices], self.train_targets[indices], drawn
        )

    def create_warmup_batch_function(
        self, samples: int, settings: Settings
    ) -> Callable[[], InputsAndTargets]:
        """Return a function that makes a training batch, for steps before the training (warm-up)."""
        import torch

        indices = torch.arange(samples, device=self.index_device) % self.train_samples
        _, augmentation = self.draw_order_and_augmentation(
            settings.seed, 0, settings.augment
        ).to_device(self.index_device)
        return lambda: self.make_training_batch(indices, augmentation)

    def prefetch(self, indices: torch.Tensor, augmentation: Augmentation | None = None) -> None:
        """Start to fetch the next batch, so that it arrives during the training step.

        It must be called after `make_training_batch` has returned a batch, and before the training step on
        this batch.
        """
        if self._rows is not None:
            self._rows.begin_fetching_batch(indices, augmentation)

    @property
    def fetches_next_batch_early(self) -> bool:
        """Whether batches are fetched from host memory in advance, so that `prefetch` has an effect."""
        return self._rows is not None

    def make_test_batch(self, start: int, stop: int) -> InputsAndTargets:
        """Return the test samples from `start` to `stop` (exclusive), without augmentation."""
        rows = (a[start:stop].to(self.device) for a in (self.test_inputs, self.test_targets))
        return self._convert_stored_batch(*rows)

    @abstractmethod
    def _convert_stored_batch(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        augmentation_rows: Sequence[torch.Tensor] | None = None,
    ) -> InputsAndTargets:
        """Return a batch in the model's input format, made of stored samples on the device.

        Args:
            inputs: Stored inputs.
            targets: Stored targets.
            augmentation_rows: Augmentation of these samples, if any.
        """


class Texts(DeviceData):
    """A data set of texts: tokens [b, length], with targets [b, length] or labels [b], all int64."""

    def _convert_stored_batch(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        augmentation_rows: Sequence[torch.Tensor] | None = None,
    ) -> InputsAndTargets:
        return inputs.long(), targets.long()


class Waveforms(DeviceData):
    """A data set of waveforms: normalised batches [b, C, length], and labels [b], int64."""

    def __init__(
        self,
        meta: Mapping[str, Any],
        arrays: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        import torch

        super().__init__(meta, arrays, device)
        mean, std = (torch.tensor(meta[key], dtype=torch.float64) for key in ("mean", "std"))
        self._scale, self._offset = (
            values[:, None].to(self.device, dtype) for values in (1 / std, -mean / std)
        )

    def _convert_stored_batch(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        augmentation_rows: Sequence[torch.Tensor] | None = None,
    ) -> InputsAndTargets:
        return (inputs * self._scale).add_(self._offset), targets


class Images(DeviceData):
    """A data set of images: normalised batches [b, C, H, W] at the model's size, and labels [b], int64.

    Targets that are values are [b, values] in the images' dtype. The stored images are uint8 or float32
    [N, C, H, W], where C is the stored number of channels. Normalising repeats a single channel for a model
    that takes more channels.
    """

    def __init__(
        self,
        meta: Mapping[str, Any],
        arrays: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        memory_format: torch.memory_format,
        device: torch.device | None = None,
    ) -> None:
        import torch

        super().__init__(meta, arrays, device)
        channels, height, width = shape
        if meta["shape"][0] not in (1, channels):
            raise DataError(
                f"data set {meta['name']!r}: has {meta['shape'][0]} channels, but the model takes "
                f"{channels}; use another model"
            )
        self._size = height, width
        if device is None:
            self.train_inputs = enlarge_images(self.train_inputs, height, width)
            self.test_inputs = enlarge_images(self.test_inputs, height, width)
        else:
            # Each batch will enlarge its images. This call raises DataError already now if that is
            # impossible.
            enlarge_images(self.test_inputs[:1], height, width)
        self._memory_format = memory_format
        self._padding = meta["crop_padding"]
        self._flip = meta["flip"]
        mean, std = (torch.tensor(meta[key], dtype=torch.float64) for key in ("mean", "std"))
        # (x / one - mean) / std is computed as x * scale + offset. `expand` repeats the values of a single
        # channel.
        one = 1 if meta.get("floats") else 255
        self._scale, self._offset = (
            values.expand(channels).reshape(1, -1, 1, 1).to(self.device, dtype)
            for values in (1 / (one * std), -mean / std)
        )
        columns = torch.arange(width, device=self.device)
        self._row_numbers = torch.arange(height, device=self.device)
        self._columns = torch.stack([columns, columns.flip(0)])

    def _draw_augmentation(self, seed: int, epoch: int) -> Augmentation | None:
        import torch

        if not self._padding and not self._flip:
            return None
        generator = make_random_generator("augmentation", seed, epoch)
        draw = (self.train_samples,)
        return Augmentation(
            torch.randint(2 * self._padding + 1, draw, generator=generator),
            torch.randint(2 * self._padding + 1, draw, generator=generator),
            torch.randint(2 if self._flip else 1, draw, generator=generator),
        )

    def _convert_stored_batch(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        augmentation_rows: Sequence[torch.Tensor] | None = None,
    ) -> InputsAndTargets:
        # Images that stay in host memory were not enlarged when the data set was loaded.
        if inputs.shape[2:] != self._size:
            inputs = enlarge_images(inputs, *self._size)
        if augmentation_rows is not None:
            inputs = self._crop_and_flip_images(inputs, *augmentation_rows)
        if targets.is_floating_point():
            targets = targets.to(self._scale.dtype)
        return self._normalise_images(inputs), targets

    def _normalise_images(self, images: torch.Tensor) -> torch.Tensor:
        import torch

        # The output tensor already has the model's memory format. No further kernel has to convert it.
        made = torch.empty(
            (len(images), self._scale.shape[1], *images.shape[2:]),
            dtype=self._scale.dtype,
            device=images.device,
            memory_format=self._memory_format,
        )
        return torch.mul(images, self._scale, out=made).add_(self._offset)

    def _crop_and_flip_images(
        self, images: torch.Tensor, top: torch.Tensor, left: torch.Tensor, flip: torch.Tensor
    ) -> torch.Tensor:
        """Crop each zero-padded image at its own offset. Mirror each image whose `flip` is 1."""
        import torch.nn.functional as functional

        batch, channels, height, width = images.shape
        padded = functional.pad(images, (self._padding,) * 4)
        rows = (top[:, None] + self._row_numbers) * padded.shape[-1]
        columns = left[:, None] + self._columns[flip]
        pixels = (rows[:, :, None] + columns[:, None, :]).reshape(batch, 1, -1)
        cropped = padded.flatten(2).gather(2, pixels.expand(-1, channels, -1))
        return cropped.reshape(batch, channels, height, width)
