"""Ranks candidates: which comes first, and what the repeats allow to claim about it.

The arithmetic works on arrays, so that a simulation can run it a hundred thousand times: axes
[..., candidates, repeats], with NaN for a missing repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stratbench import moderated
from stratbench.analysis.candidates import Candidate


class Standings(NamedTuple):
    """Every candidate against the chosen one; ratios as logarithms, shape [..., candidates].

    `low` and `high` are infinite if there is no interval.
    """

    chosen: np.ndarray  # the index of the chosen candidate, shape [...]
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    repeats: np.ndarray
    slower: np.ndarray  # clearly slower: the interval excludes equality, and it is no near tie
    at_most: np.ndarray  # log ratio by which something may be faster than the chosen, shape [...]


def index_of_choice(means: np.ndarray, preference: np.ndarray, margin: float) -> np.ndarray:
    """The index of the choice: the most preferred among those within `margin` of the fastest.

    `means`: logarithms of time or cost, shape [..., candidates]; `preference`: the same shape or
    [candidates], the lowest value is preferred; among equals the fastest is chosen.
    """
    behind = means - np.nanmin(means, axis=-1, keepdims=True)
    near = behind <= np.log1p(margin) + 1e-12
    order = preference + np.nan_to_num(behind) / (1 + np.log1p(margin))
    return np.argmin(np.where(near, order, np.inf), axis=-1)


def differences_from_chosen(logs: np.ndarray, chosen: np.ndarray) -> moderated.Differences:
    """Every candidate's paired difference from the chosen one; its own has no degrees of freedom."""
    first = np.take_along_axis(logs, chosen[..., None, None], axis=-2)
    found = moderated.paired_differences(logs, first)
    itself = np.arange(logs.shape[-2]) == chosen[..., None]
    return found._replace(repeats=np.where(itself, 0, found.repeats))


def standings_against_chosen(
    found: moderated.Differences,
    chosen: np.ndarray,
    means: np.ndarray,
    variance: np.ndarray,
    dof: np.ndarray,
    rivals: int | np.ndarray,
    margin: float,
) -> Standings:
    """The standings that paired differences `found` from the `chosen` allow, with moderated variances.

    `means` are used where there is no common repeat.
    """
    itself = np.arange(means.shape[-1]) == chosen[..., None]
    first = np.take_along_axis(means, chosen[..., None], axis=-1)
    mean = np.where(np.isfinite(found.mean) & ~itself, found.mean, means - first)
    half = moderated.half_widths(variance, dof, found.repeats, moderated.tail_of(rivals))
    low, high = mean - half, mean + half
    beyond = mean > np.log1p(margin) + 1e-12
    screened = (found.repeats == 1) & (mean >= np.log(moderated.SCREEN)) & (dof == 0)
    with_others = (found.repeats.max(-1, keepdims=True) > 1) & screened
    slower = beyond & ((low > 0) | with_others) & ~itself
    may_lead = np.where(itself | with_others, np.inf, low)
    at_most = np.maximum(0.0, -may_lead.min(-1))
    return Standings(chosen, mean, low, high, found.repeats, slower, at_most)


# ---------------------------------------------------------------- of candidates


@dataclass(frozen=True)
class AgainstRival:
    """The ratio of the `rival`'s objective to that of the chosen; `low`, `high` are None without interval."""

    rival: Candidate
    ratio: float
    low: float | None
    high: float | None
    repeats: int
    #: `slower`, `tied` (a near tie, or no clear difference), or `unknown` if nothing tells.
    stand: str


@dataclass(frozen=True)
class Ranking:
    """The chosen candidate and every other against it, in the order of their objectives."""

    first: Candidate
    compared: tuple[AgainstRival, ...]
    #: The share by which something may be faster (cheaper) than the chosen; None: not known.
    at_most: float | None

    @property
    def tied(self) -> list[Candidate]:
        """The candidates that the records cannot distinguish from the chosen one."""
        return [c.rival for c in self.compared if c.stand == "tied"]

    @property
    def is_clear(self) -> bool:
        """Whether every rival is clearly slower."""
        return all(c.stand == "slower" for c in self.compared)

    @property
    def repeats(self) -> int:
        """The fewest repeats behind an interval; without a rival, those of the chosen one."""
        with_interval = [c.repeats for c in self.compared if c.low is not None]
        return min(with_interval, default=len(self.first.times))

    @property
    def chance(self) -> str | None:
        """A few words on why the order may be chance; None if repeats decide, or nothing is compared."""
        if not self.compared or self.first.extrapolated:
            return None
        if len(self.first.times) < 2:
            return f"measured in one {self.first.unit}"
        if any(c.low is None and c.stand != "slower" for c in self.compared):
            return "some rivals were measured once, or not at all"
        return None


def rankings_of_bouts(bouts: Sequence[Sequence[Candidate]], margin: float) -> list[Ranking]:
    """The ranking of each bout: the candidates (at least one) among which to choose for one model.

    Variances are pooled over bouts, so all bouts of a study are ranked together.
    """
    drawn = []
    for bout in bouts:
        logs, means = log_objectives(bout)
        chosen = index_of_choice(means, preference_places(bout), margin)
        drawn.append((means, chosen, differences_from_chosen(logs, chosen)))
    if not drawn:
        return []
    parts = zip(*(found for _, _, found in drawn), strict=True)
    joined = moderated.Differences(*(np.concatenate(part) for part in parts))
    rankings, start = [], 0
    served = np.concatenate(
        [
            [c.served or bout[int(chosen)].served for c in bout]
            for bout, (_, chosen, _) in zip(bouts, drawn, strict=True)
        ]
    )
    variance, dof = moderated.moderated_variances(joined, served)
    for bout, (means, chosen, found) in zip(bouts, drawn, strict=True):
        part = slice(start, start := start + len(bout))
        found = standings_against_chosen(
            found, chosen, means, variance[part], dof[part], len(bout) - 1, margin
        )
        rankings.append(ranking_of_bout(bout, found, margin))
    return rankings


def log_objectives(bout: Sequence[Candidate]) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the objective by repeat, shape [candidates, repeats], and for each candidate.

    Repeats are paired by name: a block of a verdict is not paired with a cell's repeat.
    """
    repeats = list(dict.fromkeys(repeat for c in bout for repeat in c.times.index))
    per_second = np.array([c.objective / c.time_s for c in bout])
    times = np.array([c.times.reindex(repeats).to_numpy(dtype=float) for c in bout])
    logs = np.log(times.reshape(len(bout), -1) * per_second[:, None])
    return logs, np.log([c.objective for c in bout])


def preference_places(bout: Sequence[Candidate]) -> np.ndarray:
    """The order of preference among equals: fewer GPUs first, then less memory."""
    # Peaks that differ by a percent or two count as equal: they are compared in steps of 3 %.
    steps = [np.inf if not c.memory_bytes else round(np.log(c.memory_bytes) / 0.03) for c in bout]
    keys = [(c.gpus, step) for c, step in zip(bout, steps, strict=True)]
    places = {key: place for place, key in enumerate(sorted(set(keys)))}
    return np.array([places[key] for key in keys], dtype=float)


def ranking_of_bout(bout: Sequence[Candidate], found: Standings, margin: float) -> Ranking:
    """The ranking of one bout, from its standings."""
    chosen = int(found.chosen)
    compared = []
    for i in sorted(range(len(bout)), key=lambda i: (bout[i].objective, bout[i].gpus)):
        if i == chosen:
            continue
        known = bool(np.isfinite(found.low[i]))
        near = found.mean[i] <= np.log1p(margin) + 1e-12
        stand = "slower" if found.slower[i] else "tied" if near or known else "unknown"
        compared.append(
            AgainstRival(
                rival=bout[i],
                ratio=float(np.exp(found.mean[i])),
                low=float(np.exp(found.low[i])) if known else None,
                high=float(np.exp(found.high[i])) if known else None,
                repeats=int(found.repeats[i]),
                stand=stand,
            )
        )
    at_most = float(np.expm1(found.at_most)) if np.isfinite(found.at_most) else None
    return Ranking(bout[chosen], tuple(compared), at_most)
