"""Holds the settings of the cell to emit, and tracks which of them the emitted file contains."""

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
from stratbench.workload.network.models import get_model_or_name
from stratbench.workload.network.registry import FAMILIES, get_model_metadata

#: Settings that no emitted file contains: the user's trainer has its own model, data and measurement.
MEASUREMENT_SETTINGS = {
    *("strategy", "options", "model", "dataset", "own_model", "own_task", "task", "data_spec"),
    *("warmup_steps", "profile", "more"),
}
#: Prefix of the record's text on sharding. The names of the module classes to shard follow it.
INSTANCES_OF = "instances of "
#: Values of a setting that is switched off. No comment is written about such a setting.
OFF = (None, False, 0, "none")


class ChosenCell:
    """Settings of the cell to emit, and the set of those that the emitted file already contains.

    Attributes:
        cell, settings, record: Name, settings and record of the cell.
        options: Options of the cell's strategy.
        mesh: Numbers of workers that divide the model and the data.
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

    def mark_as_written(self, *keys: str) -> None:
        """Note settings and options that the emitted file contains in some form of its own."""
        self._written.update(keys)

    def get_setting_to_write(self, key: str) -> Any:
        """Return a setting's value, to be written into the emitted file.

        Settings that no caller writes are listed in a comment of the file.
        """
        self._written.add(key)
        return self._values[key]

    def get_option_to_write(self, key: str, default: Any = None) -> Any:
        """Return a strategy option's value or `default`, to be written into the file.

        Options that no caller writes are listed in a comment of the file.
        """
        self._written.add(key)
        return self.options.get(key, default)

    def add_file_comment(self, comment: str, *setting_keys: str) -> None:
        """Add a comment on settings to the emitted file, as `KEY = VALUE: COMMENT`.

        Args:
            comment: Text of the comment.
            setting_keys: Settings or strategy options that the comment is about.
        """
        self._written.update(setting_keys)
        values = ", ".join(f"{key} = {self._format_setting_value(key)}" for key in setting_keys)
        self._notes.append(f"{values}: {comment}" if values else comment)

    def _format_setting_value(self, key: str) -> str:
        value = self.options[key] if key in self.options else self._values[key]
        return json.dumps(value) if value is None or isinstance(value, bool) else str(value)

    @property
    def file_comments(self) -> list[str]:
        """Comments of the emitted file, including one per setting that the file does not contain."""
        everything: Mapping[str, Any] = self.options | self._values
        left = [
            f"{key} = {self._format_setting_value(key)}: this file has no name for it"
            for key, value in everything.items()
            if key not in self._written and (key in self.options or value not in OFF)
        ]
        return [*self._notes, *left]

    @property
    def device_type(self) -> str:
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
        """Number of samples in one forward pass of a worker."""
        return (
            self.get_setting_to_write("per_worker_batch")
            // self.settings.gradient_accumulation_steps
        )

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole training."""
        return self.settings.count_steps(self.record["data"]["train_samples"])

    @property
    def shard_group_size(self) -> int:
        """Number of workers among which one copy of the model states is divided."""
        self._written.add("shard_group_size")
        if self.options.get("shard_group_size") == "node":
            return min(self.settings.gpus, self.workers_per_node)
        traits = get_traits(self.settings.strategy, self.settings.options, self.settings.gpus)
        return traits.weight_parts or 1

    @property
    def block_class_names(self) -> list[str]:
        """Names of the module classes whose instances FSDP shards one at a time.

        The list is empty if FSDP's groups of modules were formed by size.
        """
        network = get_model_metadata(get_model_or_name(self.settings))
        if network.own_model is not None:
            # A model of transformers declares these classes itself, and the record's text lists them.
            rule = self.record["model"].get("own", {}).get("sharding") or ""
            named = rule.removeprefix(INSTANCES_OF).split(", ") if INSTANCES_OF in rule else ()
            return list(network.own_model.wrap_classes or named)
        return [path.partition(":")[2] for path in FAMILIES[network.family].block_classes]

    @property
    def cell_comments(self) -> list[str]:
        """Comments that name the cell and give its measured step time and peak memory."""
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


def format_comment_lines(lines: list[str]) -> str:
    """Return texts as comment lines of Python or YAML, of at most 110 characters each."""
    return "".join(
        textwrap.fill(
            line, 110, initial_indent="# ", subsequent_indent="#   ",
            break_long_words=False, break_on_hyphens=False,
        )
        + "\n"
        for line in lines
    )  # fmt: skip
