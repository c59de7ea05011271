"""Metadata of a data set, and the source of its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stratbench.workload.data.sources import Source

#: Samples with so many dimensions, in words.
KINDS = {1: "texts", 2: "waveforms", 3: "images"}


def kind_of(shape: Sequence[int]) -> str:
    """Return what samples of a shape are: `texts`, `waveforms` or `images`."""
    return KINDS[len(shape)]


@dataclass(frozen=True)
class Dataset:
    """What is known of a data set before it is read.

    `shape` is one sample's: (channels, height, width) of an image in pixels, (channels, length) of a
    waveform, or (length,) of a piece of text in tokens. `classes` is the number of the samples' classes, or
    of the different tokens: in a text, the class of each token is the next token. `open_source` gives its
    samples, from the folder of the source files (None: none is named) and a folder for downloads (None
    forbids them).
    `crop_padding` is the number of pixels, at the model's input size, that augmentation may shift a
    training image by in each direction (random crop after zero padding); `flip` is whether it may
    mirror it: digits may not. `floats`: whether images are stored as float32, and not as uint8. `values`:
    whether a target is no class number but `classes` values, float32. `task`: the task that its targets are
    for, where the samples' shape does not tell it; `vocabulary`: the different tokens of texts whose
    `classes` are those of whole texts.

    Of a user's own data set shape, classes and samples are None until it is prepared, but for what its
    spec says; `own_data.OwnData` opens it, so that `open_source` is None.
    """

    shape: tuple[int, ...] | None
    classes: int | None
    train_samples: int | None
    test_samples: int | None
    open_source: Callable[[Path | None, Path | None], Source] | None = field(
        default=None, compare=False, repr=False
    )
    crop_padding: int = 0
    flip: bool = False
    floats: bool = False
    values: bool = False
    task: str | None = None
    vocabulary: int | None = None

    @property
    def is_text(self) -> bool:
        return self.shape is not None and len(self.shape) == 1

    @property
    def is_read(self) -> bool:
        """Whether everything is known; otherwise it has to be prepared first."""
        return self.train_samples is not None

    @property
    def stored_bytes(self) -> int:
        """Bytes of an image's value or of a token, in the smallest type that can represent all."""
        return (
            4
            if self.floats or (self.is_text and (self.vocabulary or self.classes or 0) > 256)
            else 1
        )

    @property
    def target(self) -> tuple[str, tuple[int, ...]]:
        """The stored type and the shape of a sample's target."""
        shape = self.shape or ()
        if self.values:
            return "float32", (self.classes or 0,)
        if not self.is_text or self.vocabulary:
            return "int64", ()
        if self.task == "masked-token":  # the label of what is not asked for is negative
            return "int32", shape
        return {1: "uint8", 4: "int32"}[self.stored_bytes], shape
