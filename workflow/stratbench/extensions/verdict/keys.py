"""Keys of the block `verdict` in config.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stratbench.cell.settings import Keys, setting


@dataclass(frozen=True, kw_only=True)
class Verdict(Keys):
    """Conditions that end `stratbench verdict`, which finds the fastest strategy (docs/verdict.md)."""

    # fmt: off
    rounds: Literal[1, "all"] = setting(1,
        help="1: run one round of blocks, and print the conclusions so far; all: run rounds until every "
        "comparison is decided or the budget is spent.")
    budget_gpu_hours: float | None = setting(None, exclusiveMinimum=0,
        help="GPU-hours (on CPUs: worker-hours) that all blocks and full trainings of the verdict may take "
        "together; null: no limit.")
    margin: float = setting(0.03, exclusiveMinimum=0, maximum=0.5,
        help="Share by which the chosen strategy may be slower than the fastest one (0.03 is 3 %). A "
        "comparison is decided when no other strategy can be faster than its leader by more than this share.")
    # fmt: on
