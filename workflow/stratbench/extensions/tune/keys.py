"""Keys of the block `tune` in config.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from stratbench.cell.settings import Keys, setting


@dataclass(frozen=True, kw_only=True)
class Tune(Keys):
    """Search of `stratbench tune` for the fastest configuration of one network (docs/tune.md)."""

    # fmt: off
    experiment: str | None = setting(None,
        help="Experiment whose data, batch and settings are used. null: the study's first experiment.")
    model: str | None = setting(None, help="Name of the model to tune. null: the experiment's first model.")
    gpus: int | None = setting(None, minimum=1,
        help="Number of workers. null: the largest number of the experiment.")
    baseline: str = setting("ddp",
        help="Strategy that you use today. It is measured even if the plan predicts that it is slow.")
    include: list[str] = setting([], items={"type": "string"},
        help="Strategies to try. Empty: all strategies whose updates equal those of DDP.")
    exclude: list[str] = setting([], items={"type": "string"}, help="Strategies that are not tried.")
    compile: bool = setting(False,
        help="Whether each combination is tried both with and without torch.compile.")
    keep_within: float | None = setting(None, exclusiveMinimum=1,
        help="Largest ratio of a combination's planned time to that of the fastest; slower ones are dropped. "
        "null: on GPUs the ratio comes from public sweeps, by the settings in which two combinations "
        "differ; on CPUs none is dropped.")
    budget_gpu_hours: float | None = setting(None, exclusiveMinimum=0,
        help="Limit of GPU-hours (worker-hours on CPUs) for all blocks and trainings together. If it is too "
        "small, the combinations with the longest planned times are not measured. A larger budget "
        "measures them later and keeps earlier results. null: no limit.")
    # fmt: on
