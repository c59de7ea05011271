"""Keys of config.yaml on elastic workers and their SLURM jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from stratbench.cell.settings import Keys, derived_field, setting

#: Settings of which elastic workers support only one value, with this value and the reason.
_RIGID_SETTINGS = {
    "gradient_accumulation_steps": (
        1,
        "a batch is divided by the number of present workers, so that its parts are not equal",
    ),
    "compile": (
        False,
        "the size of a worker's part depends on the number of workers, and each size would compile again",
    ),
    "profile": (False, "the profiled worker may leave before the end"),
    "checkpoint_every": (
        None,
        "elastic workers and servers already save their state every minute",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Elastic(Keys):
    """Keys on elastic workers in an experiment of config.yaml."""

    extension: ClassVar[str] = "elastic"
    workers_are_jobs: ClassVar[bool] = True

    # fmt: off
    elastic: bool = setting(False,
        help="Whether each worker is a SLURM job of its own, which joins the training when it starts and is "
        "replaced if it ends (docs/elastic.md). `gpus` is then the largest number of workers at a time. A "
        "further job without a GPU submits the worker jobs, and runs the servers or coordinates the workers. "
        "Without SLURM, workers are processes of this machine.")
    ends_at: float | None = derived_field(default=None,
        help="Score of an epoch with which the training of an elastic cell ends; taken from `target_score`. "
        "null: the training ends after all epochs.")
    # fmt: on

    @classmethod
    def complete_values(cls, own: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        target = values.get("target_score")
        return own | {"ends_at": target} if own and target is not None else own

    @classmethod
    def iter_contradictions(
        cls, block: Mapping[str, Any], study: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield a message for each strategy or setting that elastic workers do not support."""
        from stratbench.strategies import get_strategy_class
        from stratbench.study.config.consistency import iter_strategy_options

        if not block["elastic"]:
            return
        for name, base, options in iter_strategy_options(block, study):
            if (
                reason := get_strategy_class(base).fixed_worker_count_reason(options, block)
            ) is not None:
                yield (
                    f".elastic = true: {name}: {reason}; remove {name} from strategies, or move it to "
                    "another experiment"
                )
        for key, (value, reason) in _RIGID_SETTINGS.items():
            if block.get(key, value) != value:
                yield (
                    f".{key} = {json.dumps(block[key])} with elastic = true: {reason}; remove one of these "
                    "two keys"
                )


@dataclass(frozen=True, kw_only=True)
class ElasticCluster(Keys):
    """Keys on elastic workers in the block `cluster` of config.yaml."""

    # fmt: off
    elastic_wait_h: float = setting(24, exclusiveMinimum=0,
        help="Hours that an elastic cell's own job requests in addition to the training time, because the "
        "worker jobs wait in SLURM's queue.")
    worker_partition: str | None = setting(None, minLength=1,
        help="SLURM partition of the worker jobs of elastic cells, for example one whose jobs can be "
        "preempted. null: the partition of the cell's own job.")
    worker_time_limit_min: int | None = setting(None, minimum=5,
        help="Time limit in minutes of each worker job of an elastic cell. A worker leaves the training "
        "shortly before, and another job replaces it. null: the time limit of the whole training.")
    # fmt: on
