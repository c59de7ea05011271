"""The block `tune` of config.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from stratbench.cell.settings import Keys, setting


@dataclass(frozen=True, kw_only=True)
class Tune(Keys):
    """What `stratbench tune` looks for: the fastest configuration of one network (docs/tune.md)."""

    # fmt: off
    experiment: str | None = setting(None,
        help="The experiment whose data, batch and settings hold; null: the study's first.")
    model: str | None = setting(None, help="The network; null: the experiment's first.")
    gpus: int | None = setting(None, minimum=1,
        help="Number of workers; null: the experiment's largest.")
    baseline: str = setting("ddp",
        help="What is trained with today: it is measured whatever the plan says of its time.")
    include: list[str] = setting([], items={"type": "string"},
        help="Strategies that are looked at; empty: all whose updates are DDP's.")
    exclude: list[str] = setting([], items={"type": "string"}, help="Strategies that are not looked at.")
    compile: bool = setting(False,
        help="Whether each combination is tried with torch.compile, too.")
    keep_within: float | None = setting(None, exclusiveMinimum=1,
        help="A combination is dropped when it is planned to take more than so many times the time of the "
        "fastest one. null: on GPUs the factor follows from public sweeps, by what the combination differs "
        "in from a faster one; on CPUs none is dropped.")
    budget_gpu_hours: float | None = setting(None, exclusiveMinimum=0,
        help="GPU-hours (of CPU workers: worker-hours) that all blocks and trainings of the combinations may "
        "take together. Of those whose cost it cannot pay, the planned slowest are not measured; with a "
        "larger budget they are, beside what is there. null: no limit.")
    # fmt: on
