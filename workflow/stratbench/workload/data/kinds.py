"""Defines kinds of data sets: generated from integers in the config, or read from a user's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from stratbench.workload.data.dataset import Dataset
from stratbench.workload.data.sources import DataError, Source


class Samples(NamedTuple):
    """The kind of sample files in a folder: a noun, and the suffixes of these files; others are ignored."""

    noun: str
    ends: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the noun and the file suffixes as text, as in `image (.png)`."""
        return f"{self.noun} ({', '.join(self.ends)})"


@dataclass(frozen=True)
class Generator:
    """A source of generated samples; its config values are integers, all positive except `seed`."""

    make_source: Callable[..., Source]
    defaults: Mapping[str, int]
    #: The values that are the shape of a sample.
    shape_keys: tuple[str, ...]
    #: Name of the value that has the number of classes or tokens.
    classes_key: str = "classes"
    #: The value that is the number of tokens of texts with labels.
    vocabulary_key: str | None = None
    #: The task, if the shape of a sample does not determine it.
    task: str | None = None
    has_float_samples: bool = False
    #: Minimum values that samples can be made of.
    list_min_values: Callable[[Mapping[str, int]], Mapping[str, int]] = lambda values: {}

    def describe_data_set(self, values: Mapping[str, int]) -> Dataset:
        """Return the metadata of the data set that is generated from these values.

        Raises:
            DataError: For a value that is too small.
        """
        for key, lowest in self.list_min_values(values).items():
            if values[key] < lowest:
                raise DataError(f"{key} is {values[key]}; it must be a whole number >= {lowest}")
        return Dataset(
            shape=tuple(values[key] for key in self.shape_keys),
            classes=values[self.classes_key],
            train_samples=values["train_samples"],
            test_samples=values["test_samples"],
            open_source=lambda root, downloads: self.make_source(**values),
            has_float_samples=self.has_float_samples,
            task=self.task,
            vocabulary=values[self.vocabulary_key] if self.vocabulary_key else None,
        )


@dataclass(frozen=True)
class FileKind:
    """A kind of data set that is read from a user's files, named by the config key for these files."""

    #: A function of the data set's name, its folder or files, further files, and the values by keyword. It
    #: returns the samples, and the number of classes or tokens.
    read: Callable[..., tuple[Source, int]]
    #: Other keys of the kind, with their defaults.
    defaults: Mapping[str, Any]
    #: Keys that name a further file each.
    further_file_keys: tuple[str, ...] = ()
    #: Samples of its folder; None for a kind that is one file or several.
    samples: Samples | None = None
    #: The shape of a sample: numbers, or keys whose values they are.
    shape: tuple[str | int, ...] = ("sequence",)
    #: The task, if the shape of a sample does not determine it.
    task: str | None = None
    has_float_samples: bool = False
    #: Returns the reason that makes some values invalid, or None.
    invalid_values_reason: Callable[[Mapping[str, Any]], str | None] = lambda values: None
