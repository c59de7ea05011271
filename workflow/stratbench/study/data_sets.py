"""The data sets of a config: the facts of each, and the identity of a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratbench.workload import own_data
from stratbench.workload.datasets import Dataset, describe


class DataSets:
    """The data sets of a config; each is looked at once."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._specs = config.get("datasets", {})
        self._code = [Path(folder).expanduser() for folder in config.get("code", [])]
        self._folder = Path(config.get("results", "results")) / "data"
        self._identities: dict[str, dict[str, Any] | None] = dict(config.get("own_data", {}))
        self._facts: dict[str, Dataset] = {}

    def identity(self, name: str) -> dict[str, Any] | None:
        """The identity of a user's own data set, as settings hold it; None for any other.

        Files that changed are hashed again. DataError if one cannot be read.
        """
        if name not in self._identities:
            spec, found = self._specs.get(name), None
            if own_data.is_own(spec):
                known = self._folder / ".hashes" / f"{name}.json"
                found = own_data.own_data(name, spec).identity(self._code, known)
            self._identities[name] = found
        return self._identities[name]

    def as_configured(self, name: str) -> Dataset:
        """The facts that the config gives of a data set, without looking at what was prepared."""
        return describe(name, self._specs.get(name))

    def facts(self, name: str) -> Dataset:
        """The facts of a data set; of a user's own, as far as its present state was prepared."""
        if name not in self._facts:
            identity = self.identity(name)
            meta = identity and own_data.prepared_facts(self._folder / name, identity)
            self._facts[name] = describe(name, self._specs.get(name), meta)
        return self._facts[name]
