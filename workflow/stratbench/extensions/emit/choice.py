"""The chosen cell for a target: each setting is used in the file or named in a comment."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.record import Record
from stratbench.cell.settings import Settings
from stratbench.cell.text.words import bytes_text, counted
from stratbench.strategies import mesh_of, traits_of
from stratbench.strategies.mesh import Mesh
from stratbench.workload.network.models import model_of
from stratbench.workload.network.registry import FAMILIES, facts_of

#: Settings that say how a cell is measured, and what it trains: a trainer has its own.
OF_THE_MEASUREMENT = {
    *("strategy", "options", "model", "dataset", "own_model", "own_task", "task", "data_spec"),
    *("warmup_steps", "profile", "more"),
}
#: A record's text on the sharded classes (`workload.network.sharding.rule_of`).
INSTANCES_OF = "instances of "
#: Values that switch a setting off.
OFF = (None, False, 0, "none")


class Choice:
    """A record's settings, with those that the file already contains.

    Attributes:
        cell, settings, record: The chosen cell.
        options: The strategy's options.
        mesh: Division of the workers.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.cell = Cell(**record["cell"])
        self.settings = Settings.of_record(record["settings"])
        self.options: dict[str, Any] = dict(self.settings.options)
        self.mesh: Mesh = mesh_of(self.settings.strategy, self.options, self.settings.gpus)
        self._values: dict[str, Any] = asdict(self.settings)
        self._said = set(OF_THE_MEASUREMENT)
        self._notes: list[str] = []

    def take(self, key: str) -> Any:
        """Return a setting, and mark it as contained in the file."""
        self._said.add(key)
        return self._values[key]

    def take_option(self, key: str, default: Any = None) -> Any:
        """Return an option of the strategy or `default`, and mark it as contained in the file."""
        self._said.add(key)
        return self.options.get(key, default)

    def note(self, text: str, *keys: str) -> None:
        """Add `text` as a comment, with the settings or options `keys` and their values."""
        self._said.update(keys)
        values = ", ".join(f"{key} = {self._value(key)}" for key in keys)
        self._notes.append(f"{values}: {text}" if values else text)

    def _value(self, key: str) -> str:
        value = self.options[key] if key in self.options else self._values[key]
        return json.dumps(value) if value is None or isinstance(value, bool) else str(value)

    @property
    def comments(self) -> list[str]:
        """Comments of the file: notes, and each setting that it does not contain."""
        everything: Mapping[str, Any] = self.options | self._values
        left = [
            f"{key} = {self._value(key)}: this file has no name for it"
            for key, value in everything.items()
            if key not in self._said and (key in self.options or value not in OFF)
        ]
        return [*self._notes, *left]

    @property
    def device(self) -> str:
        """`cpu` or `cuda`: what the workers ran on."""
        self._said.add("device")
        return self.record["provenance"]["device"]

    @property
    def nodes(self) -> int:
        """The nodes that the workers ran on."""
        return self.record["provenance"]["nodes"]

    @property
    def workers_per_node(self) -> int:
        """The most workers of a node."""
        return self.record["provenance"]["workers_per_node"]

    @property
    def micro_batch(self) -> int:
        """Samples that a worker computes on at once."""
        return self.take("per_worker_batch") // self.settings.gradient_accumulation_steps

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.settings.total_steps(self.record["data"]["train_samples"])

    @property
    def shard_group_size(self) -> int:
        """The workers that hold one model between them."""
        self._said.add("shard_group_size")
        if self.options.get("shard_group_size") == "node":
            return min(self.settings.gpus, self.workers_per_node)
        traits = traits_of(self.settings.strategy, self.settings.options, self.settings.gpus)
        return traits.weight_parts or 1

    @property
    def block_classes(self) -> list[str]:
        """The classes whose instances are sharded one by one.

        Empty where a rule by size made the groups.
        """
        network = facts_of(model_of(self.settings))
        if network.own is not None:
            # A model may declare them itself, as those of transformers do: then they are in the record.
            rule = self.record["model"].get("own", {}).get("sharding") or ""
            named = rule.removeprefix(INSTANCES_OF).split(", ") if INSTANCES_OF in rule else ()
            return list(network.own.wrap_classes or named)
        return [path.partition(":")[2] for path in FAMILIES[network.family].blocks]

    @property
    def title(self) -> list[str]:
        """Lines on the chosen cell and its measurements."""
        s, time, memory = self.settings, self.record.get("time") or {}, self.record.get("memory")
        lines = [
            f"{self.cell.strategy} ({s.strategy}), {s.model} on {s.dataset}, "
            f"{counted(s.gpus, 'worker')}: cell {self.cell.study}/{self.cell.path}"
        ]
        step = (time.get("step_ms") or {}).get("p50")
        measured = [f"a step took {step:.3g} ms (median)"] if step else []
        if memory and memory.get("peak_bytes"):
            key = "peak_over_base_bytes" if memory.get("peak_over_base_bytes") else "peak_bytes"
            measured.append(f"a worker's peak was {bytes_text(memory[key])}")
        if self.record["status"] != "ok":
            measured.append(f"the cell ended as {self.record['status']}: {self.record['reason']}")
        where = "CPU processes" if self.record["provenance"]["device"] == "cpu" else "GPUs"
        return [*lines, f"measured on {where}: {', '.join(measured)}"] if measured else lines


def commented(lines: list[str], sign: str = "#") -> str:
    """Return lines as comments of at most 110 characters."""
    return "".join(
        textwrap.fill(
            line, 110, initial_indent=f"{sign} ", subsequent_indent=f"{sign}   ",
            break_long_words=False, break_on_hyphens=False,
        )
        + "\n"
        for line in lines
    )  # fmt: skip
