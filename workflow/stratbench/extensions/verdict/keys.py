"""The block `verdict` of config.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stratbench.cell.settings import Keys, setting


@dataclass(frozen=True, kw_only=True)
class Verdict(Keys):
    """How far `stratbench verdict` goes: which strategy is fastest, from short blocks (docs/verdict.md)."""

    # fmt: off
    rounds: Literal[1, "all"] = setting(1,
        help="1: one round of blocks, then what it decided; all: rounds until all is decided or the budget "
        "is spent.")
    budget_gpu_hours: float | None = setting(None, exclusiveMinimum=0,
        help="GPU-hours (of CPU workers: worker-hours) that all blocks and trainings for the verdict may "
        "take together; null: no limit.")
    margin: float = setting(0.03, exclusiveMinimum=0, maximum=0.5,
        help="Share by which a strategy may be slower than the fastest and still be good enough: a verdict "
        "is decided when no better one is possible within it.")
    # fmt: on
