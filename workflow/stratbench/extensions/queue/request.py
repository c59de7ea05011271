"""Keys of `decide.queue` in config.yaml, each declared once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from stratbench.cell.options import schema_of
from stratbench.cell.settings import Keys, setting

#: Nodes of the simulated cluster if neither the config nor a history has their number.
NODES = 8


@dataclass(frozen=True, kw_only=True)
class QueueRequest:
    """A training that is to go through a queue, and what is known of the queue and of its cluster."""

    # fmt: off
    num_gpus: int = setting(MISSING, "GPUs of the training as one gang.", minimum=2, maximum=1024)
    training_hours: float = setting(MISSING,
        "Hours that the training takes on so many GPUs, once it has them all.",
        exclusiveMinimum=0, maximum=1000)
    load: float | None = setting(None,
        "Share of the cluster's GPUs that others ask for on average, as 0.7; null: as in `history`.",
        exclusiveMinimum=0, maximum=2)
    history: str | None = setting(None,
        "File with the cluster's own accounting, of `sacct -P` (docs/elastic.md has the command): others' "
        "jobs come as they came there. null: a made stream of jobs, of this `load`.", minLength=1)
    partition: str | None = setting(None,
        "Of the history this partition alone; null: all jobs with GPUs.", minLength=1)
    nodes: int | None = setting(None,
        f"Nodes of the cluster, each of cluster.gpus_per_node GPUs. null: {NODES}; with a history as few as "
        "held its jobs.", minimum=1, maximum=4096)
    reservations: Literal["all", "one"] = setting("all",
        "Waiting jobs whose start backfill keeps: all is SLURM's default, one is EASY "
        "(bf_job_part_count_reserve=1).")
    slow_nodes: float = setting(0.0, "Share of nodes that are slower.", minimum=0, maximum=1)
    slow_factor: float = setting(1.0, "How many times slower those are.", minimum=1, maximum=100)
    preemptible: bool = setting(False,
        "Whether workers that are jobs of their own run where all others preempt them.")
    node_mtbf_days: float | None = setting(None,
        "Mean days between the failures of one node; null: as in the history, without one no failures.",
        exclusiveMinimum=0)
    pause_s: float = setting(60.0,
        "Seconds that synchronous workers stop for when one joins or leaves; measure it (docs/elastic.md).",
        minimum=0, maximum=36000)
    recovery: Literal["checkpoint", "peer"] = setting("checkpoint",
        "Where they have their state from then: checkpoint, the last one, as with torchrun; peer, one of "
        "those who are there, as with this project's own, whose pause was 0.2 s (docs/elastic.md).")
    scaling_loss_per_worker: float = setting(0.02,
        "Share of a worker's speed that each further worker costs.", minimum=0, maximum=1)
    sample_efficiency: list[float] | None = setting(None,
        "Sample efficiency of asynchronous workers, [low, high]: the samples that DDP needs to the target, "
        "over those that they need. null: unknown; the answer says what it would have to be.",
        minItems=2, maxItems=2, items={"type": "number", "minimum": 0.1, "maximum": 2})
    # fmt: on

    def faults(self, gpus_per_node: int) -> Iterator[str]:
        """Yield a message for values that contradict each other."""
        if (self.load is None) == (self.history is None):
            yield (
                ".queue: give either load or history, and not both; given: "
                f"load = {self.load}, history = {self.history!r}"
            )
        if self.partition is not None and self.history is None:
            yield f".queue.partition = {self.partition!r}: is of a history; give one"
        if (
            self.sample_efficiency is not None
            and self.sample_efficiency[0] > self.sample_efficiency[1]
        ):
            yield f".queue.sample_efficiency = {self.sample_efficiency}: write the lower end first"
        nodes = self.nodes or (NODES if self.history is None else None)
        if nodes is not None and self.num_gpus > nodes * gpus_per_node:
            yield (
                f".queue.num_gpus = {self.num_gpus}: the cluster has {nodes} nodes of "
                f"{gpus_per_node} GPUs (cluster.gpus_per_node); ask for fewer, or give nodes"
            )


@dataclass(frozen=True, kw_only=True)
class DecideQueue(Keys):
    """The key of `decide`."""

    # fmt: off
    queue: dict[str, Any] | None = setting(None, additionalProperties=False, **schema_of(QueueRequest),
        help="A training that waits in a queue: `decide` then says, by simulation, which way "
        "through it brings the result first, a gang or workers that are jobs of their own "
        "(docs/elastic.md). null: no queue.")
    # fmt: on

    @classmethod
    def complete(cls, own: dict[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return the training, with the size of a node, of a config that asks for one."""
        return own and own | {"gpus_per_node": whole["cluster"]["gpus_per_node"]}

    @classmethod
    def faults(cls, block: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
        """Yield what contradicts itself or the cluster in `decide.queue`."""
        if block["queue"] is not None:
            yield from QueueRequest(**block["queue"]).faults(config["cluster"]["gpus_per_node"])
