"""Metadata of a config's data sets, and each data set's identity, which determines its samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratbench.workload.data import own_data
from stratbench.workload.data.dataset import Dataset
from stratbench.workload.data.datasets import compute_data_identity, make_dataset_metadata
from stratbench.workload.data.own_data import is_own_data_set


class DataSets:
    """The data sets of a config, with a cache of their metadata."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._specs = config.get("datasets", {})
        self._code = [Path(folder).expanduser() for folder in config.get("code", [])]
        self._folder = Path(config.get("results", "results")) / "data"
        self._identities: dict[str, dict[str, Any] | None] = dict(config.get("data_specs", {}))
        self._facts: dict[str, Dataset] = {}

    def compute_data_set_identity(self, name: str) -> dict[str, Any] | None:
        """Return the identity of a data set (`data_spec` of the settings).

        The result is None if its name suffices.

        The identity determines the samples. A user's files are hashed again if they have changed.

        Raises:
            DataError: If a file cannot be read.
        """
        if name not in self._identities:
            spec = self._specs.get(name)
            if is_own_data_set(spec):
                known = self._folder / ".hashes" / f"{name}.json"
                identity = own_data.read_own_data_specification(
                    name, spec
                ).compute_data_set_identity(self._code, known)
            else:
                identity = compute_data_identity(name, spec)
            self._identities[name] = identity
        return self._identities[name]

    def describe_data_set_from_config(self, name: str) -> Dataset:
        """Return the metadata of a data set, as far as the config alone determines them."""
        return make_dataset_metadata(name, self._specs.get(name))

    def describe_data_set_from_identity(self, name: str) -> Dataset:
        """Return the metadata of a data set, as far as its identity alone determines them."""
        return make_dataset_metadata(name, self.compute_data_set_identity(name))

    def describe_data_set(self, name: str) -> Dataset:
        """Return the metadata of a data set. A user's own data set is read from its prepared files."""
        if name not in self._facts:
            spec, meta = self._specs.get(name), None
            if is_own_data_set(spec):
                meta = own_data.read_prepared_metadata(
                    self._folder / name, self.compute_data_set_identity(name)
                )
            self._facts[name] = make_dataset_metadata(name, spec, meta)
        return self._facts[name]
