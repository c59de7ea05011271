"""Cells whose workers are separate jobs: their supervisor, and rendezvous of synchronous ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from stratbench.cell.settings import Keys, derived, setting

#: What an experiment with elastic workers cannot have, with the value that it must be, and why.
_RIGID_SETTINGS = {
    "gradient_accumulation_steps": (
        1,
        "workers share a batch by how many they are, so that it has no equal parts",
    ),
    "compile": (
        False,
        "each number of workers has shares of another size, and would compile again",
    ),
    "profile": (False, "no worker is sure to be there at the end"),
    "checkpoint_every": (
        None,
        "split synchronous workers and servers keep their state every minute",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Elastic(Keys):
    """The keys of an experiment."""

    extension: ClassVar[str] = "elastic"
    workers_are_jobs: ClassVar[bool] = True

    # fmt: off
    elastic: bool = setting(False,
        help="Whether each worker is a SLURM job of its own, which trains from when it starts and may end "
        "and come again (docs/elastic.md). `gpus` is then the most workers at a time. The cell's own job has "
        "no GPU: it submits the workers and is their server, or brings them together. Without SLURM, workers "
        "are processes of this machine.")
    ends_at: float | None = derived(default=None,
        help="Of an elastic cell the target_score at which its training ends, that of the first epoch that "
        "reaches it. null: after all epochs, as that of any other cell.")
    # fmt: on

    @classmethod
    def complete(cls, own: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        target = values.get("target_score")
        return own | {"ends_at": target} if own and target is not None else own

    @classmethod
    def faults(cls, block: Mapping[str, Any], study: Mapping[str, Any]) -> Iterator[str]:
        """Yield what elastic workers of an experiment cannot have."""
        from stratbench.strategies import strategy_class
        from stratbench.study.config.consistency import strategies_of

        if not block["elastic"]:
            return
        for name, base, options in strategies_of(block, study):
            if (reason := strategy_class(base).rigid_reason(options, block)) is not None:
                yield (
                    f".elastic = true: {name}: {reason}; remove {name} from strategies, or give it an "
                    "experiment of its own"
                )
        for key, (value, reason) in _RIGID_SETTINGS.items():
            if block.get(key, value) != value:
                yield (
                    f".{key} = {json.dumps(block[key])} with elastic = true: {reason}; remove one of the "
                    "two"
                )


@dataclass(frozen=True, kw_only=True)
class ElasticCluster(Keys):
    """The keys of `cluster`."""

    # fmt: off
    elastic_wait_h: float = setting(24, exclusiveMinimum=0,
        help="Hours by which the job of an elastic cell may outlast its training, since its workers wait in "
        "the queue one by one.")
    worker_partition: str | None = setting(None, minLength=1,
        help="SLURM's partition for the worker jobs of elastic cells, such as one that others preempt; null: "
        "that of the cell's own job.")
    worker_time_limit_min: int | None = setting(None, minimum=5,
        help="Minutes that each worker job of an elastic cell asks for; one whose time ends leaves in order, "
        "and another is submitted. null: as long as the training takes at most.")
    # fmt: on
