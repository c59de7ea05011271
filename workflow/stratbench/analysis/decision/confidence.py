"""The confidence in a decision: what the repeats allow to claim, and what lowers the confidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stratbench.analysis.decision.candidate import PAIRED_BLOCKS, Candidate
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.ranking import Ranking
from stratbench.analysis.decision.tolerance import chance_difference
from stratbench.cell.text.words import counted
from stratbench.statistics.moderated import ROUGH

LEVELS = ("low", "medium", "high")
#: What is said where the intervals pay for several looks.
LOOKED_AGAIN = (
    "Not every record says that so many repeats were planned: the intervals pay for looking again."
)


def confidence_in(
    ranking: Ranking, given: Constraints, slowed: Sequence[str]
) -> tuple[str, tuple[str, ...]]:
    """`high`, `medium` or `low`, and the sentences that say why; docs/decision.md has the rules.

    `slowed`: how workers were slowed down on purpose. Repeats come first, then hosts, then doubts.
    """
    first, rivals = ranking.first, [c.rival for c in ranking.compared]
    told = [] if first.basis == "measured" else [f"{first.basis[0].upper()}{first.basis[1:]}."]
    level, claim = level_and_claim(ranking)
    told.append(claim)
    if first.claim is not None:
        told.append(f"The verdict on {counted(first.gpus, 'worker')}: {first.claim[0]}")
        # The verdict counts the blocks of all arms, and knows nodes, full runs and dependence.
        by_verdict = LEVELS.index(first.claim[1])
        level = by_verdict if rests_on_verdict(ranking) else min(level, by_verdict)
    elif first.basis == PAIRED_BLOCKS:
        level = min(level, 1)
        told.append(f"The verdict on {counted(first.gpus, 'worker')} does not claim it.")
    elif ranking.looked_again:
        told.append(LOOKED_AGAIN)
    hosts = set.union(set(), *(c.hosts for c in (first, *rivals)))
    if min(len(c.hosts) for c in (first, *rivals)) < 2:
        level = min(level, 1)
        on = f"host {min(hosts)}" if len(hosts) == 1 else "the same host or hosts each"
        told.append(
            f"All {first.unit}s ran on {on}: others may order them differently." if hosts else ""
        )
    told += score_caveats(first, given)
    doubts = list(sentences_on_doubts(ranking))
    losable = first.may_lose is None or first.may_lose > given.tolerance_of(first.score)
    if losable or doubts or first.on_cpu:
        level = min(level, 1)
    told += doubts
    if first.on_cpu:
        told.append("It holds for CPU processes on this machine and says nothing of GPUs.")
    if slowed and given.homogeneous:
        told.append(
            f"Workers were slowed on purpose ({'; '.join(slowed)}); yours are said to be equal."
        )
    if bool(slowed) == given.homogeneous:
        level = 0
    return LEVELS[level], tuple(filter(None, told))


def sentences_on_doubts(ranking: Ranking) -> Iterator[str]:
    """The doubts on the choice, and on the rivals that its reason names."""
    first = ranking.first
    if first.doubts:
        yield f"Doubts: {', '.join(first.doubts)}."
    for c in (found.rival for found in ranking.nearest):
        others = [doubt for doubt in c.doubts if doubt not in first.doubts]
        if others:
            yield f"Doubts on {c.strategy} on {c.gpus}: {', '.join(others)}."


def rests_on_verdict(ranking: Ranking) -> bool:
    """Whether the choice leads its bout, and is clearly faster than all on other numbers of workers."""
    others = (c for c in ranking.compared if c.rival.gpus != ranking.first.gpus)
    return ranking.first.claim is not None and all(c.stand == "slower" for c in others)


def level_and_claim(ranking: Ranking) -> tuple[int, str]:
    """The highest level of confidence that the repeats allow, and the claim that they make."""
    first, repeats = ranking.first, ranking.repeats
    if first.projected:
        return 0, "An interval of 80 % stands behind it, and no measurement on as many workers."
    if measured := [c for c in ranking.compared if not c.rival.projected]:
        at_most = max((0.0, *(1 / c.low - 1 for c in measured if c.low)))
        known = all(c.low is not None for c in measured)
        if len(measured) < len(ranking.compared):
            ranking = replace(ranking, compared=tuple(measured), at_most=at_most if known else None)
    elif ranking.compared:
        return 0, "All of its rivals are projected, with intervals of 80 %."
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
    chance = chance_difference(first, first)
    if chance > tolerance:
        yield (
            f"Chance makes {score.difference(chance, score.decimals - 1)} of a test set of "
            f"{first.test_samples:.0f} samples, more than the {tolerance:g} allowed."
        )
