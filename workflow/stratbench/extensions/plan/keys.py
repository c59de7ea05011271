"""Defines the keys of config.yaml that the plan adds."""

from __future__ import annotations

from dataclasses import dataclass

from stratbench.cell.settings import Keys, setting


@dataclass(frozen=True, kw_only=True)
class PlanCluster(Keys):
    """Keys that the plan adds to the block `cluster` of config.yaml."""

    # fmt: off
    compare_gpus: list[str] = setting(["A10G 24GB", "A100 80GB"], minItems=1, uniqueItems=True,
        items={"type": "string"},
        help="Further GPUs, besides `gpu`, for which the plan reports which cells fit.")
    link_gb_per_s: float | None = setting(None, exclusiveMinimum=0,
        help="One-way rate between two GPUs of a node, in GB/s. null: the rate in the GPU's datasheet.")
    network_gb_per_s: float | None = setting(None, exclusiveMinimum=0,
        help="One-way rate between two nodes, in GB/s. null: 12.5 (100 Gbit/s), which the plan's summary "
        "then names as an assumption.")
    price_per_gpu_hour: float | None = setting(None, minimum=0,
        help="Price of a GPU per hour, in any currency. null: costs are not reported.")
    # fmt: on
