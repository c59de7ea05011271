"""The data sets: for each, what is known before it is read, and the function that opens it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stratbench.workload import sources
from stratbench.workload.sources import DataError, Source

SYNTHETIC_DEFAULTS: dict[str, int] = {
    "train_samples": 2048,
    "test_samples": 512,
    "classes": 10,
    "channels": 3,
    "size": 32,
    "seed": 0,
}


@dataclass(frozen=True)
class Dataset:
    """What is known of a data set before it is read: image shape in pixels, counts, augmentation.

    `crop_padding` is the number of pixels, at the model's input size, that augmentation may shift
    a training image by in each direction (random crop after zero padding); `flip` is whether it may
    mirror it: digits may not. `open_source` gives its images and labels, from the folder of the
    source files (None: none is named) and a folder for downloads (None forbids them).
    """

    classes: int
    channels: int
    height: int
    width: int
    train_samples: int
    test_samples: int
    open_source: Callable[[Path | None, Path | None], Source] = field(compare=False, repr=False)
    crop_padding: int = 0
    flip: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of a stored image."""
        return self.channels, self.height, self.width


def describe(name: str, spec: Mapping[str, Any] | None = None) -> Dataset:
    """The facts of a built-in data set, or of a synthetic one by its `spec`.

    A spec is `{source: synthetic}` with any of the keys of SYNTHETIC_DEFAULTS, all whole numbers,
    positive except `seed`, which may be 0. Raises DataError for anything else.
    """
    if spec is None:
        if name not in DATASETS:
            raise DataError(f"unknown data set {name!r}; known: {', '.join(DATASETS)}")
        return DATASETS[name]
    if name in DATASETS and name != "synthetic":
        raise DataError(f"{name!r} is a built-in data set and takes no spec; name yours otherwise")
    return _synthetic_facts(synthetic_values(name, spec))


def _synthetic_facts(values: Mapping[str, int]) -> Dataset:
    return Dataset(
        classes=values["classes"],
        channels=values["channels"],
        height=values["size"],
        width=values["size"],
        train_samples=values["train_samples"],
        test_samples=values["test_samples"],
        open_source=partial(_open_synthetic, values),
    )


def _open_synthetic(values: Mapping[str, int], root: Path | None, downloads: Path | None) -> Source:
    return sources.synthetic(**values)


def synthetic_values(name: str, spec: Mapping[str, Any]) -> dict[str, int]:
    """The values of a synthetic data set's `spec`, with defaults; DataError for a mistake in it."""
    allowed = ", ".join(SYNTHETIC_DEFAULTS)
    if spec.get("source") != "synthetic":
        raise DataError(
            f"data set {name!r}: source is {spec.get('source')!r}; only 'synthetic' takes a spec"
        )
    values = {key: value for key, value in spec.items() if key != "source"}
    for key, value in values.items():
        if key not in SYNTHETIC_DEFAULTS:
            raise DataError(f"data set {name!r}: unknown key {key!r}; allowed: source, {allowed}")
        lowest = 0 if key == "seed" else 1
        if type(value) is not int or value < lowest:
            raise DataError(
                f"data set {name!r}: {key} is {value!r}; it must be a whole number >= {lowest}"
            )
    return SYNTHETIC_DEFAULTS | values


DATASETS: dict[str, Dataset] = {
    "digits": Dataset(10, 1, 8, 8, 1437, 360, sources.digits, crop_padding=1),
    "mnist": Dataset(10, 1, 28, 28, 60_000, 10_000, sources.mnist, crop_padding=2),
    "cifar10": Dataset(10, 3, 32, 32, 50_000, 10_000, sources.cifar10, crop_padding=4, flip=True),
    "synthetic": _synthetic_facts(SYNTHETIC_DEFAULTS),
}
