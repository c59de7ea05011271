"""State of a comparison: interim analyses so far, dropped strategies and remaining strategies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from stratbench.extensions.verdict.paired.evidence import PairedComparison


class Ratio(NamedTuple):
    """Logarithm of a strategy's time over the leader's: estimate, reported interval and bound."""

    mean: float
    low: float  # lower end of the interval that is reported
    high: float
    bound: float  # lower bound, which decides on the strategy


@dataclass(frozen=True)
class ComparisonLook:
    """Evaluation of one comparison at one interim analysis, after some number of blocks."""

    num_blocks: int
    num_common_blocks: int  # blocks that contain all strategies still in the comparison
    reuses_few_nodes: bool  # whether the blocks ran repeatedly on the same few node sets
    excess_similarity_sds: float  # standard deviations by which successive blocks are too similar
    leader: str
    max_log_advantage: float
    is_leader_fastest: bool
    ratios: dict[str, Ratio]  # ratio of each rival to the leader
    slower_strategies: tuple[str, ...]
    equal_strategies: tuple[str, ...]


@dataclass(frozen=True)
class DroppedStrategy:
    """Strategy that left the comparison, with its number of blocks, reason and time ratio."""

    strategy: str
    num_blocks: int
    drop_kind: str  # slower, much slower, oom, timeout, diverged, unsupported, score
    reason: str
    ratio: Ratio | None = None
    compared_with: str | None = None  # the leader at that time, if the strategy was slower


@dataclass
class ComparisonState:
    """The state of a comparison in its sequential analysis."""

    comparison: PairedComparison
    looks: list[ComparisonLook] = field(default_factory=list)
    drops: list[DroppedStrategy] = field(default_factory=list)
    active_strategies: list[str] = field(default_factory=list)
    is_open: bool = True

    @property
    def last_look(self) -> ComparisonLook | None:
        """The latest interim analysis, or None before the first."""
        return self.looks[-1] if self.looks else None

    @property
    def num_compared(self) -> int:
        """The number of strategies compared by time, including those dropped as slower."""
        return len(self.active_strategies) + sum(
            drop.compared_with is not None for drop in self.drops
        )
