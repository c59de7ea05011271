"""Holds the chosen cell, and tracks which of its settings the file uses or names."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.record import Record
from stratbench.cell.settings import Settings
from stratbench.cell.text.words import format_bytes, format_count
from stratbench.strategies import get_mesh, get_traits
from stratbench.strategies.mesh import Mesh
from stratbench.workload.network.models import get_model
from stratbench.workload.network.registry import FAMILIES, get_metadata

#: Settings that define how a cell is measured and what it trains. A trainer has its own.
MEASUREMENT_SETTINGS = {
    *("strategy", "options", "model", "dataset", "own_model", "own_task", "task", "data_spec"),
    *("warmup_steps", "profile", "more"),
}
#: Beginning of a record's text on sharded classes (`workload.network.sharding.describe_sharding_groups`).
INSTANCES_OF = "instances of "
#: Values that switch a setting off.
OFF = (None, False, 0, "none")


class Choice:
    """Settings of the chosen cell's record, and which of them the file already contains.

    Attributes:
        cell, settings, record: The chosen cell.
        options: The strategy's options.
        mesh: Division of the workers.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.cell = Cell(**record["cell"])
        self.settings = Settings.from_recorded_values(record["settings"])
        self.options: dict[str, Any] = dict(self.settings.options)
        self.mesh: Mesh = get_mesh(self.settings.strategy, self.options, self.settings.gpus)
        self._values: dict[str, Any] = asdict(self.settings)
        self._written = set(MEASUREMENT_SETTINGS)
        self._notes: list[str] = []

    def take_setting(self, key: str) -> Any:
        """Return a setting's value, and mark the setting as written to the file."""
        self._written.add(key)
        return self._values[key]

    def take_option(self, key: str, default: Any = None) -> Any:
        """Return a strategy option or `default`, and mark the option as written to the file."""
        self._written.add(key)
        return self.options.get(key, default)

    def add_note(self, text: str, *keys: str) -> None:
        """Add `text` to the file's comments, after `keys` and their values.

        The keys are settings or options.
        """
        self._written.update(keys)
        values = ", ".join(f"{key} = {self._format_value(key)}" for key in keys)
        self._notes.append(f"{values}: {text}" if values else text)

    def _format_value(self, key: str) -> str:
        value = self.options[key] if key in self.options else self._values[key]
        return json.dumps(value) if value is None or isinstance(value, bool) else str(value)

    @property
    def comments(self) -> list[str]:
        """Comment lines of the file: notes, and each setting that the file cannot express."""
        everything: Mapping[str, Any] = self.options | self._values
        left = [
            f"{key} = {self._format_value(key)}: this file has no name for it"
            for key, value in everything.items()
            if key not in self._written and (key in self.options or value not in OFF)
        ]
        return [*self._notes, *left]

    @property
    def device(self) -> str:
        """Device type of the workers, `cpu` or `cuda`."""
        self._written.add("device")
        return self.record["provenance"]["device"]

    @property
    def num_nodes(self) -> int:
        """Number of nodes on which the workers ran."""
        return self.record["provenance"]["nodes"]

    @property
    def workers_per_node(self) -> int:
        """Maximum number of workers on a node."""
        return self.record["provenance"]["workers_per_node"]

    @property
    def micro_batch_size(self) -> int:
        """Number of samples that a worker computes at once."""
        return self.take_setting("per_worker_batch") // self.settings.gradient_accumulation_steps

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole training."""
        return self.settings.total_steps(self.record["data"]["train_samples"])

    @property
    def shard_group_size(self) -> int:
        """Number of workers that share one copy of the model states."""
        self._written.add("shard_group_size")
        if self.options.get("shard_group_size") == "node":
            return min(self.settings.gpus, self.workers_per_node)
        traits = get_traits(self.settings.strategy, self.settings.options, self.settings.gpus)
        return traits.weight_parts or 1

    @property
    def block_class_names(self) -> list[str]:
        """Class names of the modules that are sharded one by one.

        The list is empty if a rule by size made the groups.
        """
        network = get_metadata(get_model(self.settings))
        if network.own_model is not None:
            # A model may declare these classes itself, as those of transformers do. Then the record has
            # them.
            rule = self.record["model"].get("own", {}).get("sharding") or ""
            named = rule.removeprefix(INSTANCES_OF).split(", ") if INSTANCES_OF in rule else ()
            return list(network.own_model.wrap_classes or named)
        return [path.partition(":")[2] for path in FAMILIES[network.family].block_classes]

    @property
    def title_comments(self) -> list[str]:
        """Comment lines on the chosen cell and its measurements."""
        s, time, memory = self.settings, self.record.get("time") or {}, self.record.get("memory")
        lines = [
            f"{self.cell.strategy} ({s.strategy}), {s.model} on {s.dataset}, "
            f"{format_count(s.gpus, 'worker')}: cell {self.cell.study}/{self.cell.path}"
        ]
        step = (time.get("step_ms") or {}).get("p50")
        measured = [f"a step took {step:.3g} ms (median)"] if step else []
        if memory and memory.get("peak_bytes"):
            key = "peak_over_base_bytes" if memory.get("peak_over_base_bytes") else "peak_bytes"
            measured.append(f"a worker's peak was {format_bytes(memory[key])}")
        if self.record["status"] != "ok":
            measured.append(f"the cell ended as {self.record['status']}: {self.record['reason']}")
        where = "CPU processes" if self.record["provenance"]["device"] == "cpu" else "GPUs"
        return [*lines, f"measured on {where}: {', '.join(measured)}"] if measured else lines


def format_comments(lines: list[str], sign: str = "#") -> str:
    """Return lines as comments of at most 110 characters each."""
    return "".join(
        textwrap.fill(
            line, 110, initial_indent=f"{sign} ", subsequent_indent=f"{sign}   ",
            break_long_words=False, break_on_hyphens=False,
        )
        + "\n"
        for line in lines
    )  # fmt: skip
