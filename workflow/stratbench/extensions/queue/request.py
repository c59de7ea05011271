"""Keys of `decide.queue` in config.yaml, on a training that waits in a cluster's queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from stratbench.cell.options import build_dataclass_schema
from stratbench.cell.settings import Keys, setting

#: Number of nodes of the simulated cluster if it is unknown from the config and from a history.
NODES = 8


@dataclass(frozen=True, kw_only=True)
class QueueRequest:
    """Values of `decide.queue`: a training that waits in a queue, and properties of the cluster."""

    # fmt: off
    num_gpus: int = setting(MISSING, "Number of GPUs if the training is one job (a gang).",
        minimum=2, maximum=1024)
    training_hours: float = setting(MISSING,
        "Hours that the training takes on `num_gpus` GPUs, without waiting in the queue.",
        exclusiveMinimum=0, maximum=1000)
    load: float | None = setting(None,
        "Share of the cluster's GPUs that other users' jobs use on average, such as 0.7; null: from "
        "`history`.",
        exclusiveMinimum=0, maximum=2)
    history: str | None = setting(None,
        "File with the cluster's accounting, written by `sacct -P` (docs/elastic.md has the command). The "
        "simulation has its jobs. null: synthetic jobs with this `load`.", minLength=1)
    partition: str | None = setting(None,
        "Partition whose jobs to use from `history`; null: all jobs with GPUs.", minLength=1)
    nodes: int | None = setting(None,
        f"Number of nodes of the cluster, each with cluster.gpus_per_node GPUs. null: {NODES}, or with a "
        "history the fewest that can run its jobs.", minimum=1, maximum=4096)
    reservations: Literal["all", "one"] = setting("all",
        "Waiting jobs whose start backfill must not delay: all (SLURM's default), or one, the first (EASY "
        "backfill, bf_job_part_count_reserve=1).")
    slow_nodes: float = setting(0.0, "Share of nodes that are slower.", minimum=0, maximum=1)
    slow_factor: float = setting(1.0, "Factor by which slow nodes are slower.", minimum=1, maximum=100)
    preemptible: bool = setting(False,
        "Whether workers that are separate jobs are preempted by all other jobs.")
    node_mtbf_days: float | None = setting(None,
        "Mean days between failures of one node; null: from `history`, or no failures without one.",
        exclusiveMinimum=0)
    pause_s: float = setting(60.0,
        "Seconds for which synchronous workers pause if one joins or leaves; measure it (docs/elastic.md).",
        minimum=0, maximum=36000)
    recovery: Literal["checkpoint", "peer"] = setting("checkpoint",
        "Where synchronous workers get their state from after a pause: checkpoint (the last one, as with "
        "torchrun), or peer (another worker, as with the elastic workers of stratbench, whose pause was "
        "0.2 s).")
    scaling_loss_per_worker: float = setting(0.02,
        "Share of its speed that a worker loses per further worker.", minimum=0, maximum=1)
    sample_efficiency: list[float] | None = setting(None,
        "Sample efficiency of asynchronous workers, as [low, high]: samples that DDP needs to reach the "
        "target, divided by the samples that they need. null: unknown; the answer states the break-even.",
        minItems=2, maxItems=2, items={"type": "number", "minimum": 0.1, "maximum": 2})
    # fmt: on

    def iter_value_contradictions(self, gpus_per_node: int) -> Iterator[str]:
        """Yield a message for each contradiction between the values of `decide.queue`."""
        if (self.load is None) == (self.history is None):
            yield (
                f".queue: has load = {self.load} and history = {self.history!r}; give exactly one of the two"
            )
        if self.partition is not None and self.history is None:
            yield f".queue.partition = {self.partition!r}: selects jobs of a history; give a history, too"
        if (
            self.sample_efficiency is not None
            and self.sample_efficiency[0] > self.sample_efficiency[1]
        ):
            yield f".queue.sample_efficiency = {self.sample_efficiency}: write the lower end first"
        nodes = self.nodes or (NODES if self.history is None else None)
        if nodes is not None and self.num_gpus > nodes * gpus_per_node:
            yield (
                f".queue.num_gpus = {self.num_gpus}: the cluster has {nodes} nodes of "
                f"{gpus_per_node} GPUs (cluster.gpus_per_node); lower num_gpus, or set nodes"
            )


@dataclass(frozen=True, kw_only=True)
class DecideQueue(Keys):
    """Key `queue` of the block `decide` in config.yaml."""

    # fmt: off
    queue: dict[str, Any] | None = setting(None,
        additionalProperties=False, **build_dataclass_schema(QueueRequest),
        help="A training that waits in a cluster's queue. `decide` simulates whether its result comes "
        "sooner as one job (a gang) or as separate worker jobs (docs/elastic.md). null: no queue.")
    # fmt: on

    @classmethod
    def complete_values(cls, own: dict[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return the block's values, with the number of GPUs per node if it has `decide.queue`."""
        return own and own | {"gpus_per_node": whole["cluster"]["gpus_per_node"]}

    @classmethod
    def iter_contradictions(
        cls, block: Mapping[str, Any], config: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield a message for each contradiction in `decide.queue`, or with the block `cluster`."""
        if block["queue"] is not None:
            yield from QueueRequest(**block["queue"]).iter_value_contradictions(
                config["cluster"]["gpus_per_node"]
            )
