"""The confidence in a decision: what the repeats allow to conclude, and what lowers it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.claim import share
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.ranking import Ranking
from stratbench.analysis.decision.tolerance import chance_difference
from stratbench.cell.text.words import counted, names_text
from stratbench.statistics.moderated import ROUGH

LEVELS = ("low", "medium", "high")
#: Text if the intervals are corrected for several looks.
LOOKED_AGAIN = (
    "Some records state another planned number of repeats than there are, so the intervals are wider, to "
    "correct for repeated looks."
)


@dataclass(frozen=True)
class Confidence:
    """Confidence of a decision: its level, the main reason in short, and all reasons as sentences."""

    #: `high`, `medium` or `low`.
    level: str
    reason: str
    sure: tuple[str, ...]


def confidence_in(
    ranking: Ranking,
    constraints: Constraints,
    slowed: Sequence[str],
    score_open: bool,
    count_known: bool = True,
) -> Confidence:
    """Return the confidence; docs/decision.md has the rules.

    Every limitation has a maximum level that it allows, and a short text.

    Args:
        ranking: Ranking of the candidates.
        constraints: Constraints of the decision.
        slowed: How workers were slowed down on purpose.
        score_open: Whether the score may be worse than allowed.
        count_known: Whether anything is known of the requested number of workers.
    """
    first, rivals = ranking.first, [c.rival for c in ranking.compared]
    runs = counted(ranking.repeats, first.run)
    sentences = [] if first.basis == "measured" else [f"{first.basis[0].upper()}{first.basis[1:]}."]
    level, claim = level_and_claim(ranking)
    sentences.append(claim)
    limits = []
    if not constraints.homogeneous and not slowed:
        limits.append((0, "unequal workers were not measured"))
    if not count_known:
        limits.append((0, f"there are no results for {constraints.gpus} workers"))
    if first.claim is not None:
        sentences.append(f"The verdict on {counted(first.gpus, 'worker')}: {first.claim[0]}")
        # The verdict counts the blocks of all strategies, and knows nodes, full runs and dependence.
        by_verdict = LEVELS.index(first.claim[1])
        level = by_verdict if rests_on_verdict(ranking) else min(level, by_verdict)
    elif first.unit == "block":
        level = min(level, 1)
        sentences.append(
            f"The verdict on {counted(first.gpus, 'worker')} makes no claim for the choice."
        )
    elif ranking.looked_again:
        sentences.append(LOOKED_AGAIN)
    limits.append((level, what_repeats_leave_open(ranking, constraints, level)))
    if score_open:
        limits.append((1, f"{runs}: the score is not certain"))
    losable = first.score_loss_upper is None or first.score_loss_upper > constraints.tolerance_of(
        first.score
    )
    if losable and not score_open:
        limits.append(
            (1, "equal scores are assumed" if first.unscored else "the score is not known")
        )
    limits += [(1, words) for words in doubts_in_short(ranking)]
    hosts = set.union(set(), *(c.hosts for c in (first, *rivals)))
    if min(len(c.hosts) for c in (first, *rivals)) < 2:
        on = f"host {min(hosts)}" if len(hosts) == 1 else "the same host or hosts each"
        but = "other hosts may rank the strategies differently"
        if is_beyond_hosts(ranking, hosts):
            but = f"only a host whose time ratios differ by over {share(ROUGH)} may rank them differently"
        else:
            limits.append((1, f"{runs} on one host"))
        sentences.append(f"All {first.unit}s ran on {on}; {but}." if hosts else "")
    if presence := unequal_presence(ranking, constraints.equivalence_margin):
        limits.append((0, "the mean number of workers differs between strategies"))
        sentences.append(presence)
    sentences += [*score_caveats(first, constraints), *sentences_on_doubts(ranking)]
    if first.on_cpu:
        sentences.append("The answer holds for CPU processes on this machine, not for GPUs.")
    if slowed and constraints.homogeneous:
        sentences.append(
            f"The measured workers were slowed down on purpose ({'; '.join(slowed)}), although "
            "`decide` in config.yaml says that all workers are equally fast."
        )
    lowest = min(cap for cap, _ in limits)
    reason = next((words for cap, words in limits if cap == lowest and words), "")
    if not reason and ranking.is_clear:
        processes = " of CPU processes" if first.on_cpu else ""
        reason = f"{runs}{processes} on {counted(len(hosts), 'host')}, no doubts"
    elif not reason:
        reason = f"equal within {100 * constraints.equivalence_margin:g} %: either will do"
    return Confidence(LEVELS[lowest], reason, tuple(filter(None, sentences)))


def is_beyond_hosts(ranking: Ranking, hosts: set[str]) -> bool:
    """Return whether all ran on one host, and all alternatives are slower by over ROUGH."""
    lows = [c.ratio.low for c in ranking.compared]
    return (
        len(hosts) == 1 and bool(lows) and all(low is not None and low > 1 + ROUGH for low in lows)
    )


def what_repeats_leave_open(ranking: Ranking, constraints: Constraints, level: int) -> str:
    """Return a short text on what the repeats leave open, or an empty one.

    Args:
        ranking: Ranking of the candidates.
        constraints: Constraints of the decision.
        level: Level of confidence.
    """
    first = ranking.first
    runs = counted(ranking.repeats, first.run)
    if first.projected:
        return "projected, not measured"
    if not ranking.compared:
        return f"{runs}, without a rival"
    if ranking.at_most is None:
        once = f"one {first.run} each" if len(first.times) < 2 else "some were measured once"
        return f"{once}: may be chance"
    if level and (ranking.is_clear or ranking.at_most <= constraints.equivalence_margin):
        return f"{runs} each" if ranking.is_clear and ranking.repeats < 3 else ""
    lows = [(c.ratio.low, c.rival) for c in ranking.compared if c.ratio.low is not None]
    low, quickest = min(lows, key=lambda pair: pair[0], default=(1.0, None))
    if quickest is None or low >= 1:
        return ""
    least = 1 - low
    less = "much less" if least > ROUGH * 5 else f"{share(least)} less"
    return f"{quickest.name} may {'cost' if first.cost is not None else 'take'} {less}"


def doubts_in_short(ranking: Ranking) -> Iterator[str]:
    """Yield short caveats of the audit on the choice, or an alternative in its reason."""
    first = ranking.first
    if first.doubts:
        yield f"{whose(first.doubts[0])}{names_text(first.doubts, 1)}"
    for c, others in doubted_rivals(ranking):
        by = whose(others[0])
        yield f"{c.name} is {by}{others[0]}" if by else f"{c.name}: {others[0]}"


def whose(doubt: str) -> str:
    """Return the text before a caveat that is the name of an audit rule.

    Others are sentences.
    """
    return "" if " " in doubt else "doubted by the audit: "


def sentences_on_doubts(ranking: Ranking) -> Iterator[str]:
    """Yield the caveats on the choice, and on the alternatives in its reason."""
    if ranking.first.doubts:
        yield f"Caveats on the choice: {', '.join(ranking.first.doubts)}."
    for c, others in doubted_rivals(ranking):
        yield f"Caveats on {c.strategy} on {counted(c.gpus, 'worker')}: {', '.join(others)}."


def doubted_rivals(ranking: Ranking) -> Iterator[tuple[Candidate, list[str]]]:
    """Yield the alternatives in the reason, with caveats that the choice does not share."""
    for c in (candidates.rival for candidates in ranking.nearest):
        if others := [doubt for doubt in c.doubts if doubt not in ranking.first.doubts]:
            yield c, others


def unequal_presence(ranking: Ranking, margin: float) -> str:
    """Return a sentence on the mean number of workers if it differs by more than `margin`, else empty.

    It is for cells whose workers are jobs of their own, whose time depends on when they came.
    """
    with_presence = [c for c in (ranking.first, *(c.rival for c in ranking.nearest)) if c.present]
    shares = [c.present / c.gpus for c in with_presence if c.present]
    if not shares or max(shares) <= (1 + margin) * min(shares):
        return ""
    numbers = ", ".join(f"{c.present:.2g} of {c.gpus} for {c.strategy}" for c in with_presence)
    return f"Workers joined and left, so the mean number of present workers differs: {numbers}."


def rests_on_verdict(ranking: Ranking) -> bool:
    """Return whether the choice leads its comparison, and clearly leads on all other worker counts."""
    others = (c for c in ranking.compared if c.rival.gpus != ranking.first.gpus)
    return ranking.first.claim is not None and all(c.stand == "slower" for c in others)


def level_and_claim(ranking: Ranking) -> tuple[int, str]:
    """Return the highest confidence level that the repeats allow, and the conclusion."""
    first, repeats = ranking.first, ranking.repeats
    if first.projected:
        return (
            0,
            f"The time of the choice on {counted(first.gpus, 'worker')} is projected (80 % interval), "
            "not measured.",
        )
    if measured := [c for c in ranking.compared if not c.rival.projected]:
        at_most = max((0.0, *(1 / c.ratio.low - 1 for c in measured if c.ratio.low)))
        known = all(c.ratio.low is not None for c in measured)
        if len(measured) < len(ranking.compared):
            ranking = replace(ranking, compared=tuple(measured), at_most=at_most if known else None)
    elif ranking.compared:
        return 0, "All rivals of the choice are projected, with 80 % intervals."
    if not ranking.compared:
        text = f"The choice was measured in {counted(repeats, first.unit)} and has no rival."
        return (1 if repeats > 1 else 0), text
    if ranking.at_most is None:
        return 0, f"The order may be due to chance: {ranking.chance}, so there is no interval."
    over = f"Over {counted(repeats, first.unit)}"
    rivals = counted(len(ranking.compared), "rival")
    rivals = {1: "its only rival", 2: "both rivals"}.get(len(ranking.compared), f"all {rivals}")
    faster = "cheaper" if first.by_cost else "faster"
    if ranking.is_clear:
        text = f"{over} the choice is significantly {faster} than {rivals} (simultaneous 95 % intervals)."
        return (2 if repeats >= 3 else 1), text
    ties = counted(len(ranking.tied), "rival")
    open_to = (
        f"much {faster}"
        if ranking.at_most > 1
        else f"up to {share(max(ranking.at_most, 0.001))} {faster}"
    )
    text = (
        f"{over} the choice is not significantly {faster} than {ties}; a rival may be {open_to} "
        "(simultaneous 95 % intervals)."
    )
    return (1 if ranking.at_most <= ROUGH else 0), text


def score_caveats(first: Candidate, constraints: Constraints) -> Iterator[str]:
    """Yield sentences on what is not known of the score of the chosen candidate."""
    if first.score_loss_upper is None:
        if first.unscored:
            yield "No score was measured, since `steps` skips evaluation; equal scores are assumed."
        else:
            yield f"The {first.score.name} of the choice could not be compared with the best one."
        return
    score, tolerance = first.score, constraints.tolerance_of(first.score)
    chance = chance_difference(first, first)
    if chance > tolerance:
        yield (
            f"On {first.test_samples:.0f} test samples, two equally good models differ by up to "
            f"{score.difference(chance, score.decimals - 1)} by chance, more than the {tolerance:g} allowed."
        )
