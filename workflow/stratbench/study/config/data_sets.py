"""Metadata of a config's data sets, and the identity of each: what determines its samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratbench.workload.data import own_data
from stratbench.workload.data.dataset import Dataset
from stratbench.workload.data.datasets import describe, identity_of
from stratbench.workload.data.own_data import is_own


class DataSets:
    """The data sets of a config; each is looked at once."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._specs = config.get("datasets", {})
        self._code = [Path(folder).expanduser() for folder in config.get("code", [])]
        self._folder = Path(config.get("results", "results")) / "data"
        self._identities: dict[str, dict[str, Any] | None] = dict(config.get("data_specs", {}))
        self._facts: dict[str, Dataset] = {}

    def identity(self, name: str) -> dict[str, Any] | None:
        """Return what determines a data set's samples, as in settings.

        Return None if its name does.

        Files of a user that changed are hashed again. DataError if one cannot be read.
        """
        if name not in self._identities:
            spec = self._specs.get(name)
            if is_own(spec):
                known = self._folder / ".hashes" / f"{name}.json"
                identity = own_data.own_data(name, spec).identity(self._code, known)
            else:
                identity = identity_of(name, spec)
            self._identities[name] = identity
        return self._identities[name]

    def as_configured(self, name: str) -> Dataset:
        """Return the metadata that the config has on a data set, whether or not it is prepared."""
        return describe(name, self._specs.get(name))

    def by_identity(self, name: str) -> Dataset:
        """Return the facts of a data set by its identity alone, whatever was prepared."""
        return describe(name, self.identity(name))

    def facts(self, name: str) -> Dataset:
        """Return the metadata of a data set.

        For a user's own, they are those of its prepared state.
        """
        if name not in self._facts:
            spec, meta = self._specs.get(name), None
            if is_own(spec):
                meta = own_data.prepared_facts(self._folder / name, self.identity(name))
            self._facts[name] = describe(name, spec, meta)
        return self._facts[name]
