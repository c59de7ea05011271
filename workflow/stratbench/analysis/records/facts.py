"""Access to the fields of a record by path, derived values, and comparisons of values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from stratbench.analysis.records.derived import get_field_by_path
from stratbench.analysis.records.samples import SampleSeries, Timeline
from stratbench.cell.record import Record
from stratbench.strategies.mesh import Mesh

#: Maximum relative difference that rounding can explain.
ROUNDING = 1e-6


class Facts:
    """A record whose fields are read by path: `facts("time.train_time_s")`. Absent fields are None."""

    def __init__(self, record: Record, timeline: Timeline | None = None) -> None:
        self.record = record
        #: Samples while the cell ran; None if there is no timeline.
        self.timeline = timeline
        self.workers: list[dict[str, Any]] = record["workers"]
        self.servers: list[dict[str, Any]] = self("server.servers") or []
        self.gpus: int = self("cell.gpus")
        #: The groups into which the strategy divides the workers.
        self.mesh = Mesh(**self("strategy.mesh"))
        self.status: str = self("status")
        #: Whether the workers finished training, so that their totals are known.
        self.finished = self.status in ("ok", "diverged") and bool(self.workers)
        #: Numbers of workers that disconnected from a parameter server before they finished training.
        self.lost = {str(entry) for server in self.servers for entry in server.get("lost") or ()}

    def __call__(self, path: str) -> Any:
        return get_field_by_path(self.record, path)

    def multiply_fields(self, *paths: str) -> float | None:
        """Return the product of the fields at the paths, or None if one is absent."""
        values = [self(path) for path in paths]
        return None if None in values else math.prod(values)

    def find_sample_series(
        self, worker: dict[str, Any], kind: str, name: str | None
    ) -> SampleSeries | None:
        """Return the samples of a worker's host, or of a process or GPU there.

        The result is None without samples.

        Args:
            worker: The worker's entry.
            kind: Kind of the samples.
            name: Name of the process or GPU.
        """
        if self.timeline is None:
            return None
        return self.timeline.series_by_source.get((get_host_name(worker) or "", kind, name or ""))

    def find_gpu_sample_series(self, worker: dict[str, Any]) -> SampleSeries | None:
        """Return the samples of a worker's GPU, or None without samples."""
        return self.find_sample_series(worker, "gpu", get_gpu_id(worker))

    def find_device_kind_and_sample_series(
        self, worker: dict[str, Any]
    ) -> tuple[str, SampleSeries | None]:
        """Return a worker's kind of device, and the summary of what was sampled on it.

        The kind is `gpu`, or `process` for a CPU process. The summary has columns such as utilisation. It is
        None if nothing was sampled.
        """
        if self("provenance.device") == "cuda":
            return "gpu", self.find_gpu_sample_series(worker)
        return "process", self.find_sample_series(worker, "process", f"rank{worker['rank']}")

    @property
    def workers_per_node(self) -> int:
        """Number of workers per node; the last node may have had fewer."""
        return self("provenance.workers_per_node") or self.gpus

    def compute_node_number_of_rank(self, rank: int) -> int:
        """Compute the number, from 0, of the node on which a rank ran."""
        return rank // self.workers_per_node

    @property
    def averages_gradients_of_all_workers(self) -> bool:
        """Whether every update averages the gradients of all workers."""
        traits = self("strategy.traits")
        return bool(traits["waits_for_slowest"] and traits["updates_per_step"] == 1)

    @property
    def num_data_passes(self) -> int:
        """Number of passes over the training data that a cell made. The last may be incomplete."""
        counted = "time.epoch_times_s" if self("settings.steps") else "score.per_epoch"
        return len(self(counted) or ())

    @property
    def num_steps_trained(self) -> int:
        """Number of global batches on which the cell trained, from its passes over the data."""
        whole = self.num_data_passes * (self("batch.steps_per_epoch") or 0)
        return min(whole, self("settings.steps") or whole)

    @property
    def num_skipped_steps(self) -> int:
        """Number of optimizer steps of all workers that were skipped because gradients overflowed."""
        if self.servers:
            return sum(link.get("skips") or 0 for link in self.servers[0].get("workers") or ())
        return self("strategy.details.skipped_steps") or 0

    @property
    def parameter_bytes(self) -> float | None:
        """Size of all parameters of the model in bytes, from their number and dtype. None if unknown."""
        return self.compute_parameter_bytes(self("model.parameters"))

    def compute_parameter_bytes(self, count: int | None) -> float | None:
        """Return the size in bytes of `count` parameters in their stored dtype."""
        widths = {"float64": 8, "bfloat16": 2}
        width = widths.get(self("strategy.details.weights_dtype"), 4)
        return None if count is None else count * width


def compute_longest_pause_of_node_s(
    facts: Facts, get_pause_s: Callable[[dict[str, Any]], float]
) -> float:
    """Return the total length in s of the pauses of the node that paused longest."""
    by_node: dict[int, float] = defaultdict(float)
    for pause in facts("pauses") or ():
        by_node[pause["node"]] += get_pause_s(pause)
    return max(by_node.values(), default=0.0)


def get_host_name(worker: dict[str, Any]) -> str | None:
    """Return the name of a worker's host."""
    return get_field_by_path(worker["provenance"], "host.name")


def get_gpu_id(worker: dict[str, Any]) -> str | None:
    """Return the id of a worker's GPU in the timeline.

    It is the NVML index, or the UUID of a MIG instance.
    """
    gpu = get_field_by_path(worker["provenance"], "gpu") or {}
    return str(gpu["index"]) if gpu.get("index") is not None else gpu.get("uuid")


def iter_mismatch_messages(
    value_name: str,
    value: float | None,
    formula_name: str,
    formula_value: float | None,
    relative_tolerance: float = ROUNDING,
    absolute_tolerance: float = 0.0,
) -> Iterator[str]:
    """Yield a message if a value in the record differs from a formula's value.

    Args:
        value_name: Name of the value, such as its path in the record.
        value: The value.
        formula_name: Name of the formula.
        formula_value: The value of the formula.
        relative_tolerance: Allowed difference as a fraction of the larger value.
        absolute_tolerance: Allowed absolute difference, in addition to `relative_tolerance`.
    """
    if None in (value, formula_value):
        return
    slack = absolute_tolerance + relative_tolerance * max(abs(value), abs(formula_value))
    if not abs(value - formula_value) <= slack:  # unlike `>`, this is true if a value is NaN
        yield f"{value_name} is {value:.6g}, but {formula_name} is {formula_value:.6g}"


def iter_excess_messages(
    value_name: str,
    value: float | None,
    formula_name: str,
    formula_value: float | None,
    absolute_tolerance: float = 0.0,
) -> Iterator[str]:
    """Yield a message if a value in the record exceeds the value of a formula.

    Args:
        value_name: Name of the value, such as its path in the record.
        value: The value.
        formula_name: Name of the formula.
        formula_value: The value of the formula.
        absolute_tolerance: Allowed absolute excess, in addition to rounding errors.
    """
    if None not in (
        value,
        formula_value,
    ) and not value <= formula_value + absolute_tolerance + ROUNDING * abs(formula_value):
        yield f"{value_name} is {value:.6g}, more than {formula_name}, {formula_value:.6g}"
