"""Keys of the block `tune` in config.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from stratbench.cell.settings import Keys, setting


@dataclass(frozen=True, kw_only=True)
class Tune(Keys):
    """Keys of `stratbench tune`, which finds the fastest configuration of one model (docs/tune.md)."""

    # fmt: off
    experiment: str | None = setting(None,
        help="Experiment whose data, batch and settings all combinations have. null: the study's first "
        "experiment.")
    model: str | None = setting(None, help="Name of the model to tune. null: the experiment's first model.")
    gpus: int | None = setting(None, minimum=1,
        help="Number of workers to tune for. null: the experiment's largest number.")
    baseline: str = setting("ddp",
        help="Strategy that you train with today. It is always measured, and the answer compares the fastest "
        "combination with it.")
    include: list[str] = setting([], items={"type": "string"},
        help="Strategies to try. Empty: all strategies whose updates equal those of DDP.")
    exclude: list[str] = setting([], items={"type": "string"}, help="Strategies not to try.")
    compile: bool = setting(False,
        help="Whether each combination is tried both with and without torch.compile.")
    keep_within: float | None = setting(None, exclusiveMinimum=1,
        help="Largest ratio of a combination's planned time to that of the fastest; slower ones are dropped. "
        "null: on GPUs the ratio comes from published measurements, and depends on the settings in which two "
        "combinations differ. On CPUs no combination is dropped.")
    budget_gpu_hours: float | None = setting(None, exclusiveMinimum=0,
        help="Limit of GPU-hours (worker-hours on CPUs) for all measurements together. If the limit is too "
        "small, the combinations with the longest planned times are not measured. If you then raise it, "
        "`tune` measures these too, and keeps earlier results. null: no limit.")
    # fmt: on
