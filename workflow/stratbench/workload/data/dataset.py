"""Defines `Dataset`: the metadata of a data set, and a function that opens its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stratbench.workload.data.sources import Source

#: Kind of a data set's samples, by a sample's number of dimensions.
KINDS = {1: "texts", 2: "waveforms", 3: "images"}


def get_sample_kind(shape: Sequence[int]) -> str:
    """Return the kind of samples that have a given shape: `texts`, `waveforms` or `images`."""
    return KINDS[len(shape)]


@dataclass(frozen=True)
class Dataset:
    """The metadata of a data set, as far as they are known before the data set is read.

    Shape, classes and numbers of samples of a user's own data set are None until it is prepared, unless its
    specification has them. `own_data.OwnData` opens such a data set, so that `open_source` is None.

    Attributes:
        shape: Shape of one sample: (channels, height, width) of an image in pixels, (channels, length) of a
            waveform, or (length,) of a piece of text in tokens.
        classes: Number of classes, or of different tokens: in a text, the class of a token is the next token.
        train_samples: Number of training samples.
        test_samples: Number of test samples.
        open_source: Opens the samples, given the folder of the source files (None if none is named) and a
            folder for downloads (None if they are forbidden).
        crop_padding: Pixels, at the model's input size, by which augmentation may shift a training image in
            each direction (random crop after zero padding).
        has_random_flips: Whether augmentation may mirror a training image.
        has_float_samples: Whether images are stored as float32 instead of uint8.
        values: Whether a target is `classes` values of type float32 instead of a class number.
        task: Task of the targets, if the samples' shape does not determine it.
        vocabulary: Number of different tokens of texts whose `classes` are those of whole texts.
    """

    shape: tuple[int, ...] | None
    classes: int | None
    train_samples: int | None
    test_samples: int | None
    open_source: Callable[[Path | None, Path | None], Source] | None = field(
        default=None, compare=False, repr=False
    )
    crop_padding: int = 0
    has_random_flips: bool = False
    has_float_samples: bool = False
    values: bool = False
    task: str | None = None
    vocabulary: int | None = None

    @property
    def is_text(self) -> bool:
        return self.shape is not None and len(self.shape) == 1

    @property
    def has_known_metadata(self) -> bool:
        """Whether all metadata are known. Otherwise the data set has to be prepared first."""
        return self.train_samples is not None

    @property
    def stored_bytes(self) -> int:
        """Bytes per stored image value, waveform value or text token.

        Tokens are stored in one byte if the vocabulary allows it.
        """
        return (
            4
            if self.has_float_samples
            or (self.is_text and (self.vocabulary or self.classes or 0) > 256)
            else 1
        )

    @property
    def target_dtype_name_and_shape(self) -> tuple[str, tuple[int, ...]]:
        """Data type and shape in which the target of one sample is stored."""
        shape = self.shape or ()
        if self.values:
            return "float32", (self.classes or 0,)
        if not self.is_text or self.vocabulary:
            return "int64", ()
        # Unsigned bytes do not suffice, because the target of a token that is not masked is negative.
        if self.task == "masked-token":
            return "int32", shape
        return {1: "uint8", 4: "int32"}[self.stored_bytes], shape
