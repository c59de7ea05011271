"""State of a comparison: interim analyses so far, dropped strategies and remaining strategies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from stratbench.extensions.verdict.paired.evidence import PairedComparison


class Ratio(NamedTuple):
    """Estimate of log(strategy's time / leader's time), with its reported interval and lower bound."""

    mean: float
    #: Lower end of the reported interval.
    low: float
    high: float
    #: Lower bound, from which decisions on the strategy follow.
    bound: float


@dataclass(frozen=True)
class ComparisonAnalysis:
    """Results of one interim analysis for one comparison."""

    num_blocks: int
    #: Number of blocks that contain all strategies still in the comparison.
    num_common_blocks: int
    #: Whether the blocks ran on fewer than three sets of nodes, with several blocks on one of them.
    reuses_few_nodes: bool
    #: How similar successive blocks are: 1 minus von Neumann's ratio, in standard deviations of this ratio.
    block_similarity_sds: float
    leader: str
    #: How much faster than the leader an alternative may be at most: the largest upper bound on
    #: log(leader's time / alternative's time), over all alternatives.
    max_log_advantage_over_leader: float
    is_leader_fastest: bool
    #: Log time ratio of each alternative to the leader, by name of the alternative.
    log_time_ratios_to_leader: dict[str, Ratio]
    slower_strategies: tuple[str, ...]
    equal_strategies: tuple[str, ...]


@dataclass(frozen=True)
class DroppedStrategy:
    """Strategy that left its comparison, after some number of blocks and for some reason."""

    strategy: str
    num_blocks_when_dropped: int
    #: Kind of the reason: slower, much slower, oom, timeout, diverged, unsupported or score.
    drop_kind: str
    drop_reason: str
    log_time_ratio_to_leader: Ratio | None = None
    #: If the strategy was dropped as slower: the leader at that time.
    leader_when_dropped: str | None = None


@dataclass
class ComparisonState:
    """State of a comparison after some rounds: its interim analyses, dropped and remaining strategies."""

    comparison: PairedComparison
    looks: list[ComparisonAnalysis] = field(default_factory=list)
    dropped_strategies: list[DroppedStrategy] = field(default_factory=list)
    active_strategies: list[str] = field(default_factory=list)
    is_open: bool = True

    @property
    def latest_analysis(self) -> ComparisonAnalysis | None:
        """The latest interim analysis, or None before the first."""
        return self.looks[-1] if self.looks else None

    @property
    def num_compared_strategies(self) -> int:
        """Number of strategies whose times were compared: the remaining ones, and those dropped as slower."""
        return len(self.active_strategies) + sum(
            drop.leader_when_dropped is not None for drop in self.dropped_strategies
        )
