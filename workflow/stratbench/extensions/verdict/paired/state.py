"""The state of a verdict: what it has evaluated, dropped and still needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from stratbench.extensions.verdict.paired.evidence import PairedComparison


class Ratio(NamedTuple):
    """Time of a strategy over the leader's, as logarithms, like those in judging.Look."""

    mean: float
    low: float  # of the interval that is reported
    high: float
    bound: float  # lower bound, which decides on the strategy


@dataclass(frozen=True)
class Judged:
    """A comparison at one look: what its blocks show of each strategy."""

    blocks: int
    counted: int  # blocks that all strategies in the comparison are in
    alike: bool  # whether these are few, and came again
    unlike: float  # standard deviations by which neighbouring blocks are too similar
    leader: str
    at_most: float
    fastest: bool
    ratios: dict[str, Ratio]  # of each rival
    slower: tuple[str, ...]
    equal: tuple[str, ...]


@dataclass(frozen=True)
class Drop:
    """A strategy that left the comparison: when, the reason, and its ratio then."""

    strategy: str
    blocks: int
    kind: str  # slower, much slower, oom, timeout, diverged, unsupported, score
    reason: str
    ratio: Ratio | None = None
    against: str | None = None  # the leader that it is slower than


@dataclass
class State:
    """The state of a comparison in its sequential analysis."""

    comparison: PairedComparison
    looks: list[Judged] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    active: list[str] = field(default_factory=list)
    open: bool = True

    @property
    def last(self) -> Judged | None:
        """The latest look, which is the one that counts, or None before the first."""
        return self.looks[-1] if self.looks else None

    @property
    def compared(self) -> int:
        """The number of strategies compared by time, including those dropped as slower."""
        return len(self.active) + sum(drop.against is not None for drop in self.drops)
