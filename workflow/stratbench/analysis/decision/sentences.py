"""Texts of a decision: the reason with its numbers, and what would change the choice."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.claim import find_better_excluded, format_percentage
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.ranking import MAX_REPEATS, ComparisonWithChoice, Ranking
from stratbench.analysis.records.measures import format_number
from stratbench.cell.text.words import (
    format_bytes,
    format_count,
    join_with_and,
    pluralize,
)
from stratbench.statistics.moderated import ROUGH

#: Maximum number of characters of a quoted reason.
MAX_OF_A_REASON = 120


def format_name(c: Candidate, noun: str) -> str:
    """Return a candidate's name with the kind of its workers: `ddp on 4 GPUs`."""
    return f"{c.strategy} on {format_count(c.gpus, noun)}"


def format_full_name(c: Candidate) -> str:
    """Return a candidate's name with its number of workers: `ddp on 4 workers`."""
    return format_name(c, "worker")


def describe_score_loss(first: Candidate, noun: str, constraints: Constraints) -> str:
    """Return a sentence on how much worse the choice's score may be.

    Args:
        first: The choice.
        noun: Noun for workers.
        constraints: Constraints of the decision.
    """
    if not first.may_miss_score_tolerance(constraints):
        return ""
    score = first.score
    return (
        f"The {score.name} of {format_name(first, noun)} may be up to "
        f"{score.format_difference(first.score_loss_upper, score.decimals - 1)} worse than that of "
        f"{first.best_scoring_names} ({constraints.find_score_tolerance(score):g} allowed)."
    )


def describe_exclusions(candidates: Sequence[Candidate]) -> str:
    """Return a text with the excluded strategies and the reason, for each kind of exclusion."""
    by_kind: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_kind.setdefault(candidate.exclusion_kind, []).append(candidate)
    return "; ".join(
        f"{', '.join(dict.fromkeys(c.strategy for c in held))}: {kind} ({describe_nearest_exclusion(held)})"
        for kind, held in by_kind.items()
    )


def describe_nearest_exclusion(held: Sequence[Candidate]) -> str:
    """Return the reason of the excluded candidate that is nearest to the limit.

    The candidate's name precedes the reason if the candidates have different reasons.
    """
    nearest = min(
        held, key=lambda c: math.inf if (lack := get_required_amount(c)) is None else lack
    )
    named = "" if len({c.exclusion_reason for c in held}) == 1 else f"the nearest, {nearest.name}: "
    return textwrap.shorten(
        f"{named}{nearest.exclusion_reason}", MAX_OF_A_REASON, placeholder=" ..."
    )


def get_required_amount(c: Candidate) -> float | None:
    """Return the memory, time or workers that an excluded candidate needs, or None if unknown."""
    by_kind = {
        "does not fit": c.model_states_bytes if c.is_on_cpu else c.memory_bytes,
        "too slow": c.time_s,
        "needs more workers": c.gpus,
    }
    return by_kind.get(c.exclusion_kind)


# ---------------------------------------------------------------- the reason


def describe_choice(
    candidates: Sequence[Candidate], ranking: Ranking, noun: str, constraints: Constraints
) -> str:
    """Return sentences with the results of the choice and of its nearest alternatives.

    Args:
        candidates: Candidates.
        ranking: Ranking of the candidates.
        noun: Noun for workers.
        constraints: Constraints of the decision.
    """
    first = ranking.chosen_candidate
    sentences = [
        describe_results(first, noun),
        *filter(None, [describe_score_loss(first, noun, constraints)]),
    ]
    if first.has_servers and first.cost is not None:
        sentences.append(
            "The cost of the choice excludes the processes of its parameter servers "
            "(`processes` in cells.csv)."
        )
    if not constraints.homogeneous:
        sentences += iter_slow_worker_changes(ranking)
    sentences += [describe_alternative(c, noun, constraints) for c in ranking.nearest_alternatives]
    sentences += filter(None, [describe_missing_projections(candidates, noun, constraints)])
    if not ranking.comparisons:
        out = [c for c in candidates if c.exclusion_kind]
        sentences.append(
            f"All other candidates are excluded: {describe_exclusions(out)}."
            if out
            else "The choice has no rival."
        )
    return " ".join(sentences)


def describe_results(first: Candidate, noun: str) -> str:
    """Return a sentence with the measured results of the chosen candidate."""
    if first.is_projected:
        return first.projected_figures
    parts = [
        f"{format_name(first, noun)} trains in {describe_amount(first)}{describe_price(first)}"
    ]
    if first.rate_text:
        parts[0] += f" at {first.rate_text}"
    if first.mean_score is not None:
        parts.append(f"reaches {first.score.name} {first.score.format_score(first.mean_score)}")
    if first.memory_bytes is not None:
        above = " above its base" if first.is_on_cpu else ""
        doubted = f" (doubted by the audit: {', '.join(first.memory_caveats)})"
        parts.append(
            f"has a peak of {format_bytes(first.memory_bytes)} per worker{above}"
            f"{doubted if first.memory_caveats else ''}"
        )
    return f"{join_with_and(parts)}."


def describe_missing_projections(
    candidates: Sequence[Candidate], noun: str, constraints: Constraints
) -> str:
    """Return a sentence on strategies without a projection to the requested number of workers.

    Empty if there are none.

    Args:
        candidates: Candidates.
        noun: Noun for workers.
        constraints: Constraints of the decision.
    """
    refused: dict[str, dict[str, None]] = {}
    for c in candidates:
        if c.no_projection_reason:
            refused.setdefault(c.no_projection_reason, {})[c.strategy] = None
    # If nothing is projected, the headline already says so.
    if not refused or not any(c.is_projected for c in candidates):
        return ""
    reasons = "; ".join(
        f"{join_with_and(list(names))} ({reason})" for reason, names in refused.items()
    )
    return f"There is no projection to {format_count(constraints.gpus, noun)} for {reasons}."


def describe_alternative(
    comparison: ComparisonWithChoice, noun: str, constraints: Constraints
) -> str:
    """Return a sentence that compares an alternative's time (or cost) with the choice's.

    Args:
        comparison: The comparison with the alternative.
        noun: Noun for workers.
        constraints: Constraints of the decision.
    """
    name, paid = format_name(comparison.alternative, noun), describe_amount(comparison.alternative)
    ratio, by_cost = comparison.ratio.value, comparison.alternative.is_ranked_by_cost
    if ratio == 1:
        exactly = "costs exactly as much" if by_cost else "takes exactly as long"
        return f"{name} {exactly} as the choice ({paid})."
    if ratio < 1:
        return (
            f"{name} {'costs' if by_cost else 'takes'} {format_percentage(1 - ratio)} less than the choice "
            f"({paid}), which counts as equal (margin: "
            f"{format_percentage(constraints.equivalence_margin)}). Among equals, fewer {pluralize(noun)} "
            "and then less memory decide."
        )
    shown = "{:.4f}" if f"{ratio:.2f}" == "1.00" else "{:.2f}"
    many = comparison.ratio.format_text(shown.format, "{:.2f}".format)
    if by_cost:
        return f"{name} costs {many} times as much as the choice ({paid})."
    return f"{name} takes {many} times as long as the choice ({paid})."


def describe_amount(c: Candidate) -> str:
    """Return a candidate's training time as text, with the cost if a price is configured."""
    seconds = f"{format_number(c.time_s or 0.0, None)} s"
    if c.is_projected:
        low, high = (format_number(value, None) for value in c.time_range_s)
        seconds += f" (projected, 80 %: {low} to {high} s)"
    return seconds if c.cost is None else f"{seconds} at a cost of {c.cost:.3g}"


def describe_price(c: Candidate) -> str:
    """Return the GPU-hours and the price behind a cost as text, empty without a price."""
    if c.cost is None or not c.price_per_gpu_hour:
        return ""
    unit = "process-hours" if c.is_on_cpu else "GPU-hours"
    hours = c.cost / c.price_per_gpu_hour
    return f" ({hours:.3g} {unit} at {c.price_per_gpu_hour:g} each)"


# ---------------------------------------------------------------- what would change it


def iter_answer_changes(
    candidates: Sequence[Candidate], ranking: Ranking, constraints: Constraints
) -> Iterator[str]:
    """Yield sentences on what would change the answer, starting from the nearest alternatives.

    Args:
        candidates: Candidates.
        ranking: Ranking of the candidates.
        constraints: Constraints of the decision.
    """
    first = ranking.chosen_candidate
    ranked = [first, *(c.alternative for c in ranking.comparisons)]
    if first.is_projected:
        yield f"Training on {first.gpus} workers: the measured times would replace the projected ones."
    elif ranking.comparisons and (ranking.chance_reason or not ranking.is_clear):
        advice = advise_repeats(ranking)
        yield f"More {first.repetition_unit}s, which would show whether the order is significant.{advice}"
    yield from iter_constraint_changes(candidates, first)
    tolerance = constraints.find_score_tolerance(first.score)
    if first.may_miss_score_tolerance(constraints):
        sure = [
            c for c in ranked if c.score_loss_upper is not None and c.score_loss_upper <= tolerance
        ]
        if sure:
            yield (
                f"A score that is surely within the tolerance: then {format_full_name(sure[0])} would be "
                f"chosen ({describe_amount(sure[0])})."
            )
    smaller = [c for c in ranked if needs_less_memory(c, first)]
    if smaller and first.memory_bytes:
        yield (
            f"GPUs with less memory than {format_bytes(first.memory_bytes)}: then "
            f"{format_full_name(smaller[0])} would be chosen ({format_bytes(smaller[0].memory_bytes or 0)})."
        )
    if constraints.homogeneous:
        yield from iter_slow_worker_changes(ranking)


def advise_repeats(ranking: Ranking) -> str:
    """Return a sentence on the number of repeats that the measured noise requires.

    It begins with a blank. Empty for blocks, whose number a verdict states.
    """
    if ranking.chosen_candidate.repetition_unit != "repeat":
        return ""
    if ranking.noise is None:
        return " A single repeat does not show the noise; five repeats are a good start."
    noise, enough = ranking.noise, ranking.noise.compute_needed_repeats(ROUGH)
    needed = f"more than {MAX_REPEATS}" if enough is None else str(enough)
    return (
        f" At the measured noise of {format_percentage(noise.log_time_sd)}, {needed} repeats are needed to "
        f"detect a difference of {format_percentage(ROUGH)}."
    )


def needs_less_memory(candidate: Candidate, first: Candidate) -> bool:
    """Return whether a candidate needs clearly less memory than the choice; False if unknown."""
    its, own = candidate.trusted_memory_bytes, first.trusted_memory_bytes
    return None not in (its, own) and not first.is_on_cpu and its < 0.95 * own


def iter_constraint_changes(
    candidates: Sequence[Candidate], first: Candidate | None
) -> Iterator[str]:
    """Yield a sentence for each constraint that excludes a candidate better than the choice."""
    lift = {
        "does not fit": "More memory",
        "too slow": "A later deadline",
        "worse score": "A worse score allowed",
        "needs all workers": "Workers that stay until the end",
        "needs more workers": "More workers",
    }
    for kind, best in find_better_excluded(candidates, first, lift).items():
        # The reason of a candidate that is too slow already states its time.
        amount = "" if kind == "too slow" and best.cost is None else f"{describe_amount(best)}; "
        yield (
            f"{lift[kind]}: then {format_full_name(best)} would be chosen "
            f"({amount}{best.exclusion_reason})."
        )
    stopped = dict.fromkeys(
        c.strategy for c in candidates if c.exclusion_kind == "too slow" and c.time_s is None
    )
    if first is None and stopped:
        yield (
            f"A longer time_limit_s: {', '.join(stopped)} reached the present limit. Raise it and train "
            "again with --forcerun (docs/configuration.md)."
        )


def iter_slow_worker_changes(ranking: Ranking) -> Iterator[str]:
    """Yield a sentence on the slowdown of a worker beyond which an asynchronous strategy wins.

    If one of N workers is f times slower, a strategy that waits takes f times as long. A strategy that does
    not wait takes N / (N - 1 + 1/f) times as long. Both are equal at f = (N r - 1) / (N - 1), where r is the
    ratio of their times. Costs are ignored.
    """
    first = ranking.chosen_candidate
    if not first.traits.waits_for_slowest or first.is_ranked_by_cost:
        return
    n, rivals = first.gpus, [c.alternative for c in ranking.comparisons]
    free = [c for c in rivals if not c.traits.waits_for_slowest and c.gpus == n]
    if n > 1 and free and first.time_s and free[0].time_s:
        factor = (n * free[0].time_s / first.time_s - 1) / (n - 1)
        if factor > 1:
            yield (
                f"Workers of unequal speed: if one of {n} is more than {factor:.2f} times slower than the "
                f"others, {free[0].strategy} should be faster, since it does not wait for the slowest."
            )


def iter_excluded_strategies(
    candidates: Sequence[Candidate], usable: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield each strategy that is excluded at every worker count, with the reasons as text."""
    for name in dict.fromkeys(c.strategy for c in candidates):
        if name not in usable:
            line = sorted((c for c in candidates if c.strategy == name), key=lambda c: c.gpus)
            counts_by_reason: dict[str, list[str]] = {}
            for c in line:
                counts_by_reason.setdefault(f"{c.exclusion_kind}: {c.exclusion_reason}", []).append(
                    str(c.gpus)
                )
            yield (
                name,
                "; ".join(
                    f"on {', '.join(on)} {reason}" for reason, on in counts_by_reason.items()
                ),
            )
