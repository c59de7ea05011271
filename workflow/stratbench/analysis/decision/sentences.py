"""Texts of a decision: the reason with its numbers, and what would change the choice."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.claim import kept_out, share
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.ranking import MAX_REPEATS, AgainstRival, Ranking
from stratbench.analysis.records.measures import format_number
from stratbench.cell.text.words import (
    bytes_text,
    counted,
    joined_with_and,
    plural,
)
from stratbench.statistics.moderated import ROUGH

#: Characters of a reason that is quoted.
MAX_OF_A_REASON = 120


def name_of(c: Candidate, noun: str) -> str:
    """Return a candidate's name: `ddp on 4 GPUs`."""
    return f"{c.strategy} on {counted(c.gpus, noun)}"


def full_name(c: Candidate) -> str:
    """Return a candidate's name with the number of its workers: `ddp on 4 workers`."""
    return name_of(c, "worker")


def score_sentence(first: Candidate, noun: str, constraints: Constraints) -> str:
    """Return a sentence on the choice's possible loss in score.

    Return an empty text if allowed.

    Args:
        first: The choice.
        noun: Noun for workers.
        constraints: Constraints of the decision.
    """
    if not first.is_score_open(constraints):
        return ""
    score = first.score
    return (
        f"The {score.name} of {name_of(first, noun)} may be up to "
        f"{score.difference(first.score_loss_upper, score.decimals - 1)} worse than that of "
        f"{first.best_score} ({constraints.tolerance_of(score):g} allowed)."
    )


def why_none(candidates: Sequence[Candidate]) -> str:
    """Return why all candidates are excluded, by kind, with the nearest one's reason."""
    by_kind: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_kind.setdefault(candidate.kind, []).append(candidate)
    return "; ".join(
        f"{', '.join(dict.fromkeys(c.strategy for c in held))}: {kind} ({reason_of_nearest(held)})"
        for kind, held in by_kind.items()
    )


def reason_of_nearest(held: Sequence[Candidate]) -> str:
    """Return the reason of the nearest excluded candidate of a kind, with its name if others differ."""
    nearest = min(held, key=lambda c: math.inf if (lack := lacking(c)) is None else lack)
    named = "" if len({c.reason for c in held}) == 1 else f"the nearest, {nearest.name}: "
    return textwrap.shorten(f"{named}{nearest.reason}", MAX_OF_A_REASON, placeholder=" ...")


def lacking(c: Candidate) -> float | None:
    """Return by how much an excluded candidate exceeds a limit, or None if unknown."""
    by_kind = {
        "does not fit": c.states_bytes if c.on_cpu else c.memory_bytes,
        "too slow": c.time_s,
        "needs more workers": c.gpus,
    }
    return by_kind.get(c.kind)


# ---------------------------------------------------------------- the reason


def reason_for(
    candidates: Sequence[Candidate], ranking: Ranking, noun: str, constraints: Constraints
) -> str:
    """Return sentences with the numbers behind the choice, first its own, then the alternatives'.

    Args:
        candidates: Candidates.
        ranking: Their ranking.
        noun: Noun for workers.
        constraints: Constraints of the decision.
    """
    first = ranking.first
    sentences = [figures_of(first, noun), *filter(None, [score_sentence(first, noun, constraints)])]
    if first.served and first.cost is not None:
        sentences.append(
            "The cost of the choice excludes the processes of its parameter servers "
            "(`processes` in cells.csv)."
        )
    if not constraints.homogeneous:
        sentences += sentences_on_slow_workers(ranking)
    sentences += [describe_rival(c, noun, constraints) for c in ranking.nearest]
    sentences += filter(None, [sentence_on_refusals(candidates, noun, constraints)])
    if not ranking.compared:
        out = [c for c in candidates if c.kind]
        sentences.append(
            f"All other candidates are excluded: {why_none(out)}."
            if out
            else "The choice has no rival."
        )
    return " ".join(sentences)


def figures_of(first: Candidate, noun: str) -> str:
    """Return a sentence with the results of the choice."""
    if first.projected:
        return first.projected_figures
    parts = [f"{name_of(first, noun)} trains in {describe_amount(first)}{unit_of_cost(first)}"]
    if first.rate_text:
        parts[0] += f" at {first.rate_text}"
    if first.mean_score is not None:
        parts.append(f"reaches {first.score.name} {first.score.text(first.mean_score)}")
    if first.memory_bytes is not None:
        above = " above its base" if first.on_cpu else ""
        doubted = f" (doubted by the audit: {', '.join(first.memory_doubts)})"
        parts.append(
            f"has a peak of {bytes_text(first.memory_bytes)} per worker{above}"
            f"{doubted if first.memory_doubts else ''}"
        )
    return f"{joined_with_and(parts)}."


def sentence_on_refusals(
    candidates: Sequence[Candidate], noun: str, constraints: Constraints
) -> str:
    """Return which strategies are not projected to the requested number, and why; empty if none.

    Args:
        candidates: Candidates.
        noun: Noun for workers.
        constraints: Constraints of the decision.
    """
    refused: dict[str, dict[str, None]] = {}
    for c in candidates:
        if c.not_projected:
            refused.setdefault(c.not_projected, {})[c.strategy] = None
    if not refused or not any(c.projected for c in candidates):  # without any, the headline says so
        return ""
    reasons = "; ".join(
        f"{joined_with_and(list(names))} ({reason})" for reason, names in refused.items()
    )
    return f"There is no projection to {counted(constraints.gpus, noun)} for {reasons}."


def describe_rival(comparison: AgainstRival, noun: str, constraints: Constraints) -> str:
    """Return an alternative's time (cost) against the choice's.

    Args:
        comparison: Its comparison.
        noun: Noun for workers.
        constraints: Constraints of the decision.
    """
    name, paid = name_of(comparison.rival, noun), describe_amount(comparison.rival)
    ratio, by_cost = comparison.ratio.value, comparison.rival.by_cost
    if ratio == 1:
        exactly = "costs exactly as much" if by_cost else "takes exactly as long"
        return f"{name} {exactly} as the choice ({paid})."
    if ratio < 1:
        return (
            f"{name} {'costs' if by_cost else 'takes'} {share(1 - ratio)} less than the choice ({paid}), "
            f"which counts as equal (margin: {share(constraints.equivalence_margin)}). Among equals, fewer "
            f"{plural(noun)} and then less memory decide."
        )
    shown = "{:.4f}" if f"{ratio:.2f}" == "1.00" else "{:.2f}"
    many = comparison.ratio.text(shown.format, "{:.2f}".format)
    if by_cost:
        return f"{name} costs {many} times as much as the choice ({paid})."
    return f"{name} takes {many} times as long as the choice ({paid})."


def describe_amount(c: Candidate) -> str:
    """Return the training time of a candidate, and its cost if there is a price."""
    seconds = f"{format_number(c.time_s or 0.0, None)} s"
    if c.projected:
        low, high = (format_number(value, None) for value in c.reach)
        seconds += f" (projected, 80 %: {low} to {high} s)"
    return seconds if c.cost is None else f"{seconds} at a cost of {c.cost:.3g}"


def unit_of_cost(c: Candidate) -> str:
    """Return the hours and the price that make up a cost, in the price's unit.

    Return nothing otherwise.
    """
    if c.cost is None or not c.price_per_gpu_hour:
        return ""
    unit = "process-hours" if c.on_cpu else "GPU-hours"
    hours = c.cost / c.price_per_gpu_hour
    return f" ({hours:.3g} {unit} at {c.price_per_gpu_hour:g} each)"


# ---------------------------------------------------------------- what would change it


def sentences_on_changes(
    candidates: Sequence[Candidate], ranking: Ranking, constraints: Constraints
) -> Iterator[str]:
    """Yield sentences on what would change the answer, starting from the nearest alternatives.

    Args:
        candidates: Candidates.
        ranking: Their ranking.
        constraints: Constraints of the decision.
    """
    first = ranking.first
    ranked = [first, *(c.rival for c in ranking.compared)]
    if first.projected:
        yield f"Training on {first.gpus} workers: the measured times would replace the projected ones."
    elif ranking.compared and (ranking.chance or not ranking.is_clear):
        advice = advise_repeats(ranking)
        yield f"More {first.unit}s, which would show whether the order is significant.{advice}"
    yield from sentences_on_constraints(candidates, first)
    tolerance = constraints.tolerance_of(first.score)
    if first.is_score_open(constraints):
        sure = [
            c for c in ranked if c.score_loss_upper is not None and c.score_loss_upper <= tolerance
        ]
        if sure:
            yield (
                f"A score that is surely within the tolerance: then {full_name(sure[0])} would be chosen "
                f"({describe_amount(sure[0])})."
            )
    smaller = [c for c in ranked if smaller_than(c, first)]
    if smaller and first.memory_bytes:
        yield (
            f"GPUs with less memory than {bytes_text(first.memory_bytes)}: then "
            f"{full_name(smaller[0])} would be chosen ({bytes_text(smaller[0].memory_bytes or 0)})."
        )
    if constraints.homogeneous:
        yield from sentences_on_slow_workers(ranking)


def advise_repeats(ranking: Ranking) -> str:
    """Return a sentence on the number of repeats that distinguish an alternative at the measured noise.

    It begins with a blank. Empty for blocks, whose number a verdict states.
    """
    if ranking.first.unit != "repeat":
        return ""
    if ranking.noise is None:
        return " A single repeat does not show the noise; five repeats are a good start."
    noise, enough = ranking.noise, ranking.noise.repeats_for(ROUGH)
    needed = f"more than {MAX_REPEATS}" if enough is None else str(enough)
    return (
        f" At the measured noise of {share(noise.sd)}, {needed} repeats are needed to detect a difference "
        f"of {share(ROUGH)}."
    )


def smaller_than(candidate: Candidate, first: Candidate) -> bool:
    """Return whether it needs clearly less memory than the first, if their records are comparable."""
    its, own = candidate.sound_memory_bytes, first.sound_memory_bytes
    return None not in (its, own) and not first.on_cpu and its < 0.95 * own


def sentences_on_constraints(
    candidates: Sequence[Candidate], first: Candidate | None
) -> Iterator[str]:
    """Yield for each constraint the best candidate that it excludes, if better than the first."""
    lift = {
        "does not fit": "More memory",
        "too slow": "A later deadline",
        "worse score": "A worse score allowed",
        "needs all workers": "Workers that stay until the end",
        "needs more workers": "More workers",
    }
    for kind, best in kept_out(candidates, first, lift).items():
        # The reason of a too slow candidate has its time.
        amount = "" if kind == "too slow" and best.cost is None else f"{describe_amount(best)}; "
        yield f"{lift[kind]}: then {full_name(best)} would be chosen ({amount}{best.reason})."
    stopped = dict.fromkeys(
        c.strategy for c in candidates if c.kind == "too slow" and c.time_s is None
    )
    if first is None and stopped:
        yield (
            f"A longer time_limit_s: {', '.join(stopped)} reached the present limit. Raise it and train "
            "again with --forcerun (docs/configuration.md)."
        )


def sentences_on_slow_workers(ranking: Ranking) -> Iterator[str]:
    """Yield how slow a worker must be for an asynchronous strategy to win, in theory.

    If one of N workers is f times slower, a strategy that waits takes f times as long. One that does not
    takes N / (N - 1 + 1/f) times as long. They are equal at f = (N r - 1) / (N - 1), with r the ratio of
    their times. Costs are left out.
    """
    first = ranking.first
    if not first.traits.waits_for_slowest or first.by_cost:
        return
    n, rivals = first.gpus, [c.rival for c in ranking.compared]
    free = [c for c in rivals if not c.traits.waits_for_slowest and c.gpus == n]
    if n > 1 and free and first.time_s and free[0].time_s:
        factor = (n * free[0].time_s / first.time_s - 1) / (n - 1)
        if factor > 1:
            yield (
                f"Workers of unequal speed: if one of {n} is more than {factor:.2f} times slower than the "
                f"others, {free[0].strategy} should be faster, since it does not wait for the slowest."
            )


def excluded_strategies(
    candidates: Sequence[Candidate], usable: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield each strategy that is excluded at every worker count, with the reasons by count."""
    for name in dict.fromkeys(c.strategy for c in candidates):
        if name not in usable:
            line = sorted((c for c in candidates if c.strategy == name), key=lambda c: c.gpus)
            counts_by_reason: dict[str, list[str]] = {}
            for c in line:
                counts_by_reason.setdefault(f"{c.kind}: {c.reason}", []).append(str(c.gpus))
            yield (
                name,
                "; ".join(
                    f"on {', '.join(on)} {reason}" for reason, on in counts_by_reason.items()
                ),
            )
