"""The confidence in a decision: what the repeats allow to claim, and what lowers the confidence."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from stratbench.analysis.candidates import PAIRED_BLOCKS, Candidate
from stratbench.analysis.constraints import Constraints
from stratbench.analysis.ranking import Ranking
from stratbench.analysis.tolerance import chance_difference
from stratbench.cell.words import counted
from stratbench.moderated import ROUGH


def confidence_in(rows: pd.DataFrame, ranking: Ranking, given: Constraints) -> tuple[str, str]:
    """`high`, `medium` or `low`, and the sentences that say why; docs/decision.md has the rules."""
    first, rivals = ranking.first, [c.rival for c in ranking.compared]
    told = [f"{first.basis[0].upper()}{first.basis[1:]}."]
    if given.gpus is not None and given.gpus not in set(rows["gpus"]) and first.gpus != given.gpus:
        told.append(
            f"Nothing is known of {counted(given.gpus, 'worker')}: too few counts were measured, or too far "
            "from it, or more workers did not help."
        )
    level, claim = level_and_claim(ranking)
    told.append(claim)
    if first.claim is not None:
        told.append(f"The verdict on {counted(first.gpus, 'worker')}: {first.claim[0]}")
        # The verdict counts the blocks of all arms, and knows nodes, full runs and dependence.
        by_verdict = ("low", "medium", "high").index(first.claim[1])
        level = by_verdict if rests_on_verdict(ranking) else min(level, by_verdict)
    elif first.basis == PAIRED_BLOCKS:
        level = min(level, 1)
        told.append(f"The verdict on {counted(first.gpus, 'worker')} does not claim it.")
    hosts = set.union(set(), *(c.hosts for c in (first, *rivals)))
    alone = min(len(c.hosts) for c in (first, *rivals)) < 2
    if alone:
        level = min(level, 1)
        on = f"host {min(hosts)}" if len(hosts) == 1 else "the same host or hosts each"
        told.append(
            f"All {first.unit}s ran on {on}: others may order them differently." if hosts else ""
        )
    told += score_caveats(first, given)
    if first.may_lose is None or first.may_lose > given.tolerance_of(first.score):
        level = min(level, 1)
    for c in (first, *nearest_rivals(ranking)):
        others = [doubt for doubt in c.doubts if c is first or doubt not in first.doubts]
        if others:
            level = min(level, 1)
            whose = "Doubts" if c is first else f"Doubts on {c.strategy} on {c.gpus}"
            told.append(f"{whose}: {', '.join(others)}.")
    if first.on_cpu:
        level = min(level, 1)
        told.append("It holds for CPU processes on this machine and says nothing of GPUs.")
    slowed = sorted(set(rows["slowdown"].dropna()))
    if slowed and given.homogeneous:
        level = min(level, 0)
        told.append(
            f"Workers were slowed on purpose ({'; '.join(slowed)}); yours are said to be equal."
        )
    if not slowed and not given.homogeneous:
        level = min(level, 0)
        told.append("Measured on equally fast workers; yours are said to differ.")
    return ("low", "medium", "high")[level], " ".join(filter(None, told))


def rests_on_verdict(ranking: Ranking) -> bool:
    """Whether the choice leads its bout, and is clearly faster than all on other numbers of workers."""
    others = (c for c in ranking.compared if c.rival.gpus != ranking.first.gpus)
    return ranking.first.claim is not None and all(c.stand == "slower" for c in others)


def nearest_rivals(ranking: Ranking) -> list[Candidate]:
    """The next rival, and of each other strategy the best one that is not clearly slower."""
    close = [c.rival for c in ranking.compared if c.stand != "slower"]
    best = {c.strategy: c for c in reversed(close) if c.strategy != ranking.first.strategy}
    following = [c.rival for c in ranking.compared[:1] if c.rival not in best.values()]
    return [*following, *(c for c in close if best.get(c.strategy) is c)]


def level_and_claim(ranking: Ranking) -> tuple[int, str]:
    """The highest level of confidence that the repeats allow, and the claim that they make."""
    first, repeats = ranking.first, ranking.repeats
    if first.extrapolated:
        return 0, "An extrapolated time has no interval."
    if not ranking.compared:
        return (1 if repeats > 1 else 0), f"Over {counted(repeats, first.unit)}, without a rival."
    if ranking.at_most is None:
        return 0, f"The order may be chance: {ranking.chance}, so no interval tells."
    over = f"Over {counted(repeats, first.unit)}"
    rivals = counted(len(ranking.compared), "rival")
    rivals = {1: "its only rival", 2: "both rivals"}.get(len(ranking.compared), f"all {rivals}")
    if ranking.is_clear:
        told = f"{over} it is told apart from {rivals} (95 %, all of them together)."
        return (2 if repeats >= 3 else 1), told
    ties = counted(len(ranking.tied), "rival")
    open_to = "much faster" if ranking.at_most > 1 else f"up to {ranking.at_most:.0%} faster"
    told = (
        f"{over} it is not told apart from {ties}, and something may be {open_to} "
        "(95 %, all of them together)."
    )
    return (1 if ranking.at_most <= ROUGH else 0), told


def score_caveats(first: Candidate, given: Constraints) -> Iterator[str]:
    """Sentences on what is not known of the score of the chosen candidate."""
    if first.may_lose is None:
        if first.unscored:
            yield "No score was measured (steps): equal scores are assumed."
        else:
            yield f"Nothing is known of how much worse its {first.score.name} is."
        return
    score, tolerance = first.score, given.tolerance_of(first.score)
    if first.may_lose > tolerance:
        by = "repeats" if len(first.scores) > 1 else "its one repeat"
        yield (
            f"Its {score.name} may be up to {score.difference(first.may_lose, score.decimals - 1)} worse "
            f"by {by} (95 %), more than the {tolerance:g} allowed."
        )
    chance = chance_difference(first, first)
    if chance > tolerance:
        yield (
            f"Chance makes {score.difference(chance, score.decimals - 1)} of a test set of "
            f"{first.test_samples:.0f} samples, more than the {tolerance:g} allowed."
        )
