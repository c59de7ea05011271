"""The plan's keys of config.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from stratbench.cell.settings import Keys, setting


@dataclass(frozen=True, kw_only=True)
class PlanCluster(Keys):
    """The keys of `cluster`."""

    # fmt: off
    compare_gpus: list[str] = setting(["A10G 24GB", "A100 80GB"], minItems=1, uniqueItems=True,
        items={"type": "string"},
        help="GPUs that `stratbench plan` tells which cells fit, beside `gpu`.")
    link_gb_per_s: float | None = setting(None, exclusiveMinimum=0,
        help="Rate in one direction between two GPUs of a node, in GB/s; null: the GPU's datasheet.")
    network_gb_per_s: float | None = setting(None, exclusiveMinimum=0,
        help="Rate in one direction between two nodes, in GB/s; null: 12.5 (100 Gbit/s), which the plan's "
        "summary then says.")
    price_per_gpu_hour: float | None = setting(None, minimum=0,
        help="What a GPU costs in an hour, in any currency; null: no costs are told.")
    # fmt: on
