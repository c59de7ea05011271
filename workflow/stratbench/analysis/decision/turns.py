"""At which speed of the links the order of two strategies turns, from `turns.csv`, which the plan writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

import pandas as pd

from stratbench.analysis.decision.ranking import Ranking


@dataclass(frozen=True)
class Turn:
    """Two strategies on as many workers, and the speeds of links at which the slower one is as fast."""

    experiment: str
    model: str
    gpus: int
    faster: str
    slower: str
    link_gb_per_s: float
    turns_at_gb_per_s_low: float
    turns_at_gb_per_s_high: float

    @property
    def nearest_gb_per_s(self) -> float:
        """Of the speeds the one that is nearest to that of the links."""
        both = (self.turns_at_gb_per_s_low, self.turns_at_gb_per_s_high)
        return min(both, key=lambda speed: abs(log(speed / self.link_gb_per_s)))


def read_turns(path: str) -> list[Turn]:
    """The rows of a turns.csv; none where `path` is empty or nothing is there."""
    if not path or not Path(path).exists():
        return []
    return [Turn(**row) for row in pd.read_csv(path).to_dict("records")]


def sentences_on_links(
    ranking: Ranking, turns: Sequence[Turn], experiment: str, model: str
) -> Iterator[str]:
    """The nearest speed of slower links, and of faster ones, at which a rival would be as fast.

    Rivals that count as equal are as fast already.
    """
    first, behind = ranking.first, [c for c in ranking.compared if c.stand != "tied"]
    rivals = {(c.rival.strategy, c.rival.gpus) for c in behind}
    here = [
        t
        for t in turns
        if (t.experiment, t.model, t.gpus, t.faster)
        == (experiment, model, first.gpus, first.strategy)
        and (t.slower, t.gpus) in rivals
    ]
    for word, sign in (("Slower", -1), ("Faster", 1)):
        turning = [t for t in here if sign * (t.nearest_gb_per_s - t.link_gb_per_s) > 0]
        if not turning:
            continue
        t = min(turning, key=lambda t: abs(log(t.nearest_gb_per_s / t.link_gb_per_s)))
        speeds = dict.fromkeys(
            f"{speed:.2g}" for speed in (t.turns_at_gb_per_s_low, t.turns_at_gb_per_s_high)
        )
        yield (
            f"{word} links: of {' to '.join(speeds)} GB/s in place of {t.link_gb_per_s:.3g}, with "
            f"{t.slower} on {t.gpus} the first to be as fast (measured times, and what links add by the "
            "plan)."
        )
