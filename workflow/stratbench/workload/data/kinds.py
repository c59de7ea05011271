"""Defines the kinds of data sets that a config can describe: generated, or read from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from stratbench.workload.data.dataset import Dataset
from stratbench.workload.data.sources import DataError, Source

#: Samples of a data set, and their number of classes (or of different tokens).
SourceAndClassCount = tuple[Source, int]


class SampleFileKind(NamedTuple):
    """The kind of files in a folder of samples, such as images: their noun and file suffixes.

    Files with other suffixes are ignored.
    """

    noun: str
    ends: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the noun and the suffixes as text, such as `image (.png)`."""
        return f"{self.noun} ({', '.join(self.ends)})"


@dataclass(frozen=True)
class Generator:
    """A source of random samples, whose config values are integers of at least 1 (`seed`: 0)."""

    make_source: Callable[..., Source]
    defaults: Mapping[str, int]
    #: Config keys whose values are the shape of a sample.
    shape_keys: tuple[str, ...]
    #: Config key of the number of classes, or of different tokens.
    class_count_key: str = "classes"
    #: Config key of the number of different tokens, for texts with one label each.
    vocabulary_key: str | None = None
    #: Name of the task, if the shape of a sample does not determine it.
    task: str | None = None
    has_float_samples: bool = False
    #: Returns the minimum values by config key, given the config values.
    list_min_values: Callable[[Mapping[str, int]], Mapping[str, int]] = lambda values: {}

    def make_generated_dataset_metadata(self, values: Mapping[str, int]) -> Dataset:
        """Return the metadata of the data set that these config values describe.

        Raises:
            DataError: If a value is too small.
        """
        for key, lowest in self.list_min_values(values).items():
            if values[key] < lowest:
                raise DataError(
                    f"the key {key} is {values[key]}; it must be a whole number >= {lowest}"
                )
        return Dataset(
            shape=tuple(values[key] for key in self.shape_keys),
            classes=values[self.class_count_key],
            train_samples=values["train_samples"],
            test_samples=values["test_samples"],
            open_source=lambda root, downloads: self.make_source(**values),
            has_float_samples=self.has_float_samples,
            task=self.task,
            vocabulary=values[self.vocabulary_key] if self.vocabulary_key else None,
        )


@dataclass(frozen=True)
class FileKind:
    """A kind of data set that is read from a user's files. The config key of these files is its name."""

    #: Reads the data set. The arguments are the data set's name, its folder or list of files, its further
    #: files, and the values of its other keys by keyword.
    read: Callable[..., SourceAndClassCount]
    #: Config keys besides those of files, with their defaults.
    defaults: Mapping[str, Any]
    #: Config keys that each name one further file, such as `tokenizer`.
    further_file_keys: tuple[str, ...] = ()
    #: Kind of the sample files in its folder, or None if the data set is a list of files.
    samples: SampleFileKind | None = None
    #: Shape of a sample. Each dimension is a number, or the config key that has the number.
    shape: tuple[str | int, ...] = ("sequence",)
    #: Name of the task, if the shape of a sample does not determine it.
    task: str | None = None
    has_float_samples: bool = False
    #: Function that returns why given config values are invalid, or None if they are valid.
    invalid_values_reason: Callable[[Mapping[str, Any]], str | None] = lambda values: None
