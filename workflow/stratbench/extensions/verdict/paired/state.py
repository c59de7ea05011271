"""The state of a comparison: its looks so far, dropped strategies and remaining strategies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from stratbench.extensions.verdict.paired.evidence import PairedComparison


class Ratio(NamedTuple):
    """Logarithm of a strategy's time over the leader's: estimate, reported interval and bound."""

    mean: float
    low: float  # of the interval that is reported
    high: float
    bound: float  # lower bound, which decides on the strategy


@dataclass(frozen=True)
class ComparisonLook:
    """The evaluation of one comparison at one look, after some number of blocks."""

    blocks: int
    common_blocks: int  # blocks that contain all strategies still in the comparison
    reuses_few_nodes: bool  # whether the blocks ran repeatedly on the same few node sets
    excess_similarity_sds: float  # standard deviations by which successive blocks are too similar
    leader: str
    max_log_advantage: float
    fastest: bool
    ratios: dict[str, Ratio]  # of each rival
    slower: tuple[str, ...]
    equal: tuple[str, ...]


@dataclass(frozen=True)
class DroppedStrategy:
    """A strategy that left the comparison: after how many blocks, why, and its time ratio then."""

    strategy: str
    blocks: int
    kind: str  # slower, much slower, oom, timeout, diverged, unsupported, score
    reason: str
    ratio: Ratio | None = None
    against: str | None = None  # the leader at that time, if the strategy was slower


@dataclass
class ComparisonState:
    """The state of a comparison in its sequential analysis."""

    comparison: PairedComparison
    looks: list[ComparisonLook] = field(default_factory=list)
    drops: list[DroppedStrategy] = field(default_factory=list)
    active: list[str] = field(default_factory=list)
    open: bool = True

    @property
    def last(self) -> ComparisonLook | None:
        """The latest look, or None before the first."""
        return self.looks[-1] if self.looks else None

    @property
    def compared(self) -> int:
        """The number of strategies compared by time, including those dropped as slower."""
        return len(self.active) + sum(drop.against is not None for drop in self.drops)
