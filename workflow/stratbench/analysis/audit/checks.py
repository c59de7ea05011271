"""Tools to check a record: its fields by path, and comparisons that yield a sentence if they fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

from stratbench.analysis.records.derived import value_at
from stratbench.analysis.records.samples import Series, Timeline
from stratbench.cell.record import Record
from stratbench.strategies.mesh import Mesh

#: The relative difference that rounding explains.
ROUNDING = 1e-6
#: Whether sides agree, and how a sentence says that they do not. Written so that NaN agrees with nothing.
SIGNS: dict[str, tuple[Callable[[float, float, float], bool], str]] = {
    "==": (lambda left, right, slack: abs(left - right) <= slack, "but"),
    "<=": (lambda left, right, slack: left <= right + slack, "more than"),
    ">=": (lambda left, right, slack: left >= right - slack, "less than"),
}


class Facts:
    """A record by the paths of its fields: `facts("time.train_time_s")`; None where absent."""

    def __init__(self, record: Record, timeline: Timeline | None = None) -> None:
        self.record = record
        #: What was sampled while the cell ran; None if there is no timeline.
        self.timeline = timeline
        self.workers: list[dict[str, Any]] = record["workers"]
        self.servers: list[dict[str, Any]] = self("server.servers") or []
        self.gpus: int = self("cell.gpus")
        #: How the workers divided the work.
        self.mesh = Mesh(**self("strategy.mesh"))
        self.status: str = self("status")
        #: Whether workers came and went: their number is that of nobody's.
        self.elastic = self("elastic") is not None
        #: Whether its servers' workers trained on while the epoch was evaluated that ended it.
        self.ended_early = self("elastic.servers.last_epoch") is not None
        #: Whether the workers trained to an end, so that their totals are known.
        self.finished = self.status in ("ok", "diverged") and bool(self.workers)
        #: Workers that servers lost, by their number.
        self.lost = {str(entry) for server in self.servers for entry in server.get("lost") or ()}
        #: Whether no worker was lost, and every worker states its totals.
        self.whole = (
            self.finished and not self.elastic and not self.lost and len(self.workers) == self.gpus
        )

    def __call__(self, path: str) -> Any:
        return value_at(self.record, path)

    def product(self, *paths: str) -> float | None:
        """The product of some fields; None if one of them is absent."""
        values = [self(path) for path in paths]
        return None if None in values else math.prod(values)

    def samples_on(self, worker: dict[str, Any], kind: str, name: str | None) -> Series | None:
        """The samples of a worker's host, or of a process or GPU there; None without."""
        if self.timeline is None:
            return None
        return self.timeline.series.get((host_of(worker) or "", kind, name or ""))

    def gpu_series(self, worker: dict[str, Any]) -> Series | None:
        """The samples of a worker's GPU; None without."""
        return self.samples_on(worker, "gpu", name_of_gpu(worker))

    def series_of(self, worker: dict[str, Any]) -> tuple[str, Series | None]:
        """The samples of what a worker computed on, and their kind: of its GPU, or of its process."""
        if self("provenance.device") == "cuda":
            return "gpu", self.gpu_series(worker)
        return "process", self.samples_on(worker, "process", f"rank{worker['rank']}")

    @property
    def workers_per_node(self) -> int:
        """How many workers each node had; the last one may have had fewer."""
        return self("provenance.workers_per_node") or self.gpus

    def node_of(self, rank: int) -> int:
        """The number of the node on which a rank ran."""
        return rank // self.workers_per_node

    @property
    def averages_all(self) -> bool:
        """Whether every update is made of the gradients of all workers, whoever comes first."""
        traits = self("strategy.traits")
        return bool(traits["waits_for_slowest"] and traits["updates_per_step"] == 1)

    @property
    def averaged_all(self) -> bool:
        """Whether every update was made of all workers' gradients on the same weights, if only by chance.

        That is so where a step makes one update and no push was stale: pushes may arrive in turn.
        """
        stale = (sum((server["staleness_all_shards"] or ())[1:]) for server in self.servers)
        return self("strategy.traits.updates_per_step") == 1 and not any(stale)

    @property
    def epochs_run(self) -> int:
        """The number of epochs that were trained to their end, counted by the scores."""
        return len(self("score.per_epoch") or ())

    @property
    def passes_run(self) -> int:
        """The number of passes over the data; of a cell with `steps`, the last one may be incomplete."""
        return len(self("time.epoch_times_s") or ()) if self("settings.steps") else self.epochs_run

    @property
    def steps_run(self) -> int:
        """The number of global batches that were trained on, if the workers trained to an end."""
        whole = self.passes_run * (self("batch.steps_per_epoch") or 0)
        return min(whole, self("settings.steps") or whole)

    @property
    def skips(self) -> int:
        """The number of steps that overflowed, over all workers."""
        if self.servers:
            return sum(link.get("skips") or 0 for link in self.servers[0].get("workers") or ())
        return self("strategy.details.skipped_steps") or 0

    @property
    def trainable(self) -> int | None:
        """The number of parameters that are trained."""
        return self("model.trainable_parameters")

    @property
    def parameter_bytes(self) -> float | None:
        """The size of all of the model's parameters, from their number and format; None if not known."""
        return self._bytes_of(self("model.parameters"))

    @property
    def trainable_bytes(self) -> float | None:
        """The same of those that are trained: what gradients and each moment of an optimizer take."""
        return self._bytes_of(self.trainable)

    def _bytes_of(self, count: int | None) -> float | None:
        wide = self("strategy.details.weights_dtype") == "float64"
        return None if count is None else count * (8 if wide else 4)


def host_of(worker: dict[str, Any]) -> str | None:
    """The name of a worker's host."""
    return value_at(worker["provenance"], "host.name")


def name_of_gpu(worker: dict[str, Any]) -> str | None:
    """The id of a worker's GPU in a timeline: NVML's number, of a MIG instance its UUID."""
    gpu = value_at(worker["provenance"], "gpu") or {}
    return str(gpu["index"]) if gpu.get("index") is not None else gpu.get("uuid")


def unless(
    what: str,
    value: Any,
    sign: str,
    formula: str,
    other: Any,
    relative: float = ROUNDING,
    absolute: float = 0.0,
) -> Iterator[str]:
    """Yields a sentence if a figure is not what a formula gives; nothing if either is absent.

    `sign`: of SIGNS. The two may miss each other by `relative`, a share of what the formula gives (of the
    larger, if they are to be equal), and by `absolute`. What are no numbers must be equal.
    """
    if value is None or other is None:
        return
    holds, words = SIGNS[sign]
    if all(isinstance(side, (int, float)) for side in (value, other)):
        size = max(abs(value), abs(other)) if sign == "==" else abs(other)
        kept = holds(value, other, absolute + relative * size)
    else:
        kept = value == other
    if not kept:
        compared = f"{formula} is" if sign == "==" else f"{formula},"
        yield f"{what} is {shown(value)}, {words} {compared} {shown(other)}"


def shown(value: Any) -> str:
    """A figure in six digits; anything else as it is."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:.6g}" if is_number else str(value)


def unless_given(what: str, value: Any, why: str) -> Iterator[str]:
    """Yields a sentence if there is no value although there must be one."""
    if value is None:
        yield f"{what} is absent, {why}"


def unless_absent(what: str, value: Any, why: str) -> Iterator[str]:
    """Yields a sentence if there is a value although there cannot be one."""
    if value is not None:
        yield f"{what} is {value:.6g}, {why}"


def unless_rising(what: str, values: Iterable[float]) -> Iterator[str]:
    """Yields a sentence if values are not in ascending order."""
    listed = [value for value in values if value is not None]
    if any(not a <= b for a, b in pairwise(listed)):
        yield f"{what} are not in ascending order: {', '.join(f'{v:.6g}' for v in listed)}"


def numbers_by_path(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a record with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers_by_path(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from numbers_by_path(inner, f"{path}[{i}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value
