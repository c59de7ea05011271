"""Sentences of a decision: the reason with its numbers, and what would change the choice."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.claim import (
    find_best_excluded_candidate_by_kind,
    format_percentage,
)
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


def format_candidate_on_workers(candidate: Candidate, worker_noun: str) -> str:
    """Return a candidate as text with a given noun for workers. Example: `ddp on 4 GPUs`."""
    return f"{candidate.strategy} on {format_count(candidate.gpus, worker_noun)}"


def format_candidate_with_worker_count(candidate: Candidate) -> str:
    """Return a candidate as text, with its number of workers: `ddp on 4 workers`."""
    return format_candidate_on_workers(candidate, "worker")


def describe_possible_score_loss(
    choice: Candidate, worker_noun: str, constraints: Constraints
) -> str:
    """Return a sentence on how much worse than the best the choice's score may be.

    The text is empty if the score is certainly within the tolerance.

    Args:
        choice: The chosen candidate.
        worker_noun: Noun for workers.
        constraints: Constraints of the decision.
    """
    if not choice.may_have_intolerable_score(constraints):
        return ""
    score, tolerance = choice.score, constraints.find_score_tolerance(choice.score)
    max_loss = score.format_difference(choice.max_score_loss, score.shown_decimals - 1)
    candidate = format_candidate_on_workers(choice, worker_noun)
    return (
        f"The {score.name} of {candidate} may be up to {max_loss} worse than that of "
        f"{choice.best_scoring_candidates_text} ({tolerance:g} allowed)."
    )


def describe_exclusions(excluded: Sequence[Candidate]) -> str:
    """Return the excluded strategies as text, with the reason for each kind of exclusion."""
    by_kind: dict[str, list[Candidate]] = {}
    for candidate in excluded:
        by_kind.setdefault(candidate.exclusion_kind, []).append(candidate)
    parts = []
    for kind, same in by_kind.items():
        strategies = ", ".join(dict.fromkeys(c.strategy for c in same))
        parts.append(f"{strategies}: {kind} ({describe_exclusion_nearest_to_limit(same)})")
    return "; ".join(parts)


def describe_exclusion_nearest_to_limit(excluded: Sequence[Candidate]) -> str:
    """Return why the excluded candidate that is nearest to the limit is excluded.

    The candidate's name precedes the reason if the candidates have different reasons.
    """
    nearest = min(
        excluded,
        key=lambda c: math.inf if (amount := get_amount_above_limit(c)) is None else amount,
    )
    has_one_reason = len({c.exclusion_reason for c in excluded}) == 1
    named = "" if has_one_reason else f"the nearest, {nearest.name}: "
    return textwrap.shorten(
        f"{named}{nearest.exclusion_reason}", MAX_OF_A_REASON, placeholder=" ..."
    )


def get_amount_above_limit(excluded: Candidate) -> float | None:
    """Return the memory, time or number of workers that exceeds a limit. None for other reasons."""
    by_kind = {
        "does not fit": excluded.model_states_bytes
        if excluded.has_cpu_workers
        else excluded.peak_memory_bytes,
        "too slow": excluded.time_s,
        "needs more workers": excluded.gpus,
    }
    return by_kind.get(excluded.exclusion_kind)


# ---------------------------------------------------------------- sentences on the choice


def describe_choice(
    candidates: Sequence[Candidate], ranking: Ranking, worker_noun: str, constraints: Constraints
) -> str:
    """Return sentences with the results of the choice and of the best alternatives.

    Args:
        candidates: Candidates.
        ranking: Ranking of the candidates.
        worker_noun: Noun for workers.
        constraints: Constraints of the decision.
    """
    first = ranking.chosen_candidate
    sentences = [
        describe_results_of_choice(first, worker_noun),
        *filter(None, [describe_possible_score_loss(first, worker_noun, constraints)]),
    ]
    if first.has_servers and first.training_cost is not None:
        sentences.append(
            "The cost of the choice excludes the processes of its parameter servers "
            "(`processes` in cells.csv)."
        )
    if not constraints.homogeneous:
        sentences += iter_sentences_on_slow_worker(ranking)
    sentences += [
        describe_alternative_to_choice(c, worker_noun, constraints)
        for c in ranking.comparisons_with_nearest
    ]
    sentences += filter(
        None, [describe_strategies_without_projection(candidates, worker_noun, constraints)]
    )
    if not ranking.comparisons:
        out = [c for c in candidates if c.exclusion_kind]
        sentences.append(
            f"All other candidates are excluded: {describe_exclusions(out)}."
            if out
            else "The choice has no rival."
        )
    return " ".join(sentences)


def describe_results_of_choice(choice: Candidate, worker_noun: str) -> str:
    """Return a sentence with the results of the chosen candidate: time, score and memory."""
    if choice.has_projected_time:
        return choice.projection_text
    name = format_candidate_on_workers(choice, worker_noun)
    parts = [f"{name} trains in {format_time_and_cost(choice)}{format_gpu_hours_and_price(choice)}"]
    if choice.token_rate_text:
        parts[0] += f" at {choice.token_rate_text}"
    if choice.mean_score is not None:
        parts.append(f"reaches {choice.score.name} {choice.score.format_score(choice.mean_score)}")
    if choice.peak_memory_bytes is not None:
        above = " above its base" if choice.has_cpu_workers else ""
        doubted = f" (doubted by the audit: {', '.join(choice.rules_doubting_peak_memory)})"
        parts.append(
            f"has a peak of {format_bytes(choice.peak_memory_bytes)} per worker{above}"
            f"{doubted if choice.rules_doubting_peak_memory else ''}"
        )
    return f"{join_with_and(parts)}."


def describe_strategies_without_projection(
    candidates: Sequence[Candidate], worker_noun: str, constraints: Constraints
) -> str:
    """Return a sentence that names strategies whose times could not be projected, with reasons.

    The text is empty if there are no such strategies, or if no strategy has a projection.

    Args:
        candidates: Candidates.
        worker_noun: Noun for workers.
        constraints: Constraints of the decision.
    """
    names_by_reason: dict[str, dict[str, None]] = {}
    for c in candidates:
        if c.no_projection_reason:
            names_by_reason.setdefault(c.no_projection_reason, {})[c.strategy] = None
    # If no strategy has a projection, the answer's conclusion already gives the reason.
    if not names_by_reason or not any(c.has_projected_time for c in candidates):
        return ""
    strategies_and_reasons = "; ".join(
        f"{join_with_and(list(names))} ({reason})" for reason, names in names_by_reason.items()
    )
    requested_workers = format_count(constraints.gpus, worker_noun)
    return f"There is no projection to {requested_workers} for {strategies_and_reasons}."


def describe_alternative_to_choice(
    comparison: ComparisonWithChoice, worker_noun: str, constraints: Constraints
) -> str:
    """Return a sentence that compares an alternative's time (or cost) with the choice's.

    Args:
        comparison: The comparison with the alternative.
        worker_noun: Noun for workers.
        constraints: Constraints of the decision.
    """
    alternative = format_candidate_on_workers(comparison.alternative, worker_noun)
    time = format_time_and_cost(comparison.alternative)
    ratio, by_cost = comparison.ratio.value, comparison.alternative.is_ranked_by_cost
    if ratio == 1:
        takes_exactly_as_long = "costs exactly as much" if by_cost else "takes exactly as long"
        return f"{alternative} {takes_exactly_as_long} as the choice ({time})."
    if ratio < 1:
        takes = "costs" if by_cost else "takes"
        percentage = format_percentage(1 - ratio)
        margin = format_percentage(constraints.equivalence_margin)
        return (
            f"{alternative} {takes} {percentage} less than the choice ({time}), which counts as equal "
            f"(margin: {margin}). Among equals, fewer {pluralize(worker_noun)} and then less memory decide."
        )
    shown = "{:.4f}" if f"{ratio:.2f}" == "1.00" else "{:.2f}"
    ratio_text = comparison.ratio.format_value_and_interval(shown.format, "{:.2f}".format)
    if by_cost:
        return f"{alternative} costs {ratio_text} times as much as the choice ({time})."
    return f"{alternative} takes {ratio_text} times as long as the choice ({time})."


def format_time_and_cost(candidate: Candidate) -> str:
    """Return a candidate's training time as text, with the cost if a price is set."""
    seconds = f"{format_number(candidate.time_s or 0.0, None)} s"
    if candidate.has_projected_time:
        low, high = (format_number(value, None) for value in candidate.training_time_range_s)
        seconds += f" (projected, 80 %: {low} to {high} s)"
    return (
        seconds
        if candidate.training_cost is None
        else f"{seconds} at a cost of {candidate.training_cost:.3g}"
    )


def format_gpu_hours_and_price(candidate: Candidate) -> str:
    """Return how a cost was computed: ` (2.5 GPU-hours at 3 each)`. Empty without a price."""
    if candidate.training_cost is None or not candidate.price_per_gpu_hour:
        return ""
    unit = "process-hours" if candidate.has_cpu_workers else "GPU-hours"
    hours = candidate.training_cost / candidate.price_per_gpu_hour
    return f" ({hours:.3g} {unit} at {candidate.price_per_gpu_hour:g} each)"


# ---------------------------------------------------------------- sentences on what would change the choice


def iter_what_would_change_choice(
    candidates: Sequence[Candidate], ranking: Ranking, constraints: Constraints
) -> Iterator[str]:
    """Yield sentences on what would change the choice: more repeats, other constraints, or other workers.

    Args:
        candidates: Candidates.
        ranking: Ranking of the candidates.
        constraints: Constraints of the decision.
    """
    first = ranking.chosen_candidate
    ranked = [first, *(c.alternative for c in ranking.comparisons)]
    if first.has_projected_time:
        yield f"Training on {first.gpus} workers: the measured times would replace the projected ones."
    elif ranking.comparisons and (
        ranking.reason_ranking_may_be_chance or not ranking.is_choice_clearly_fastest
    ):
        advice = advise_number_of_repeats(ranking)
        yield f"More {first.repetition_noun}s, which would show whether the order is significant.{advice}"
    yield from iter_sentences_on_other_constraints(candidates, first)
    tolerance = constraints.find_score_tolerance(first.score)
    if first.may_have_intolerable_score(constraints):
        sure = [c for c in ranked if c.max_score_loss is not None and c.max_score_loss <= tolerance]
        if sure:
            candidate, time = (
                format_candidate_with_worker_count(sure[0]),
                format_time_and_cost(sure[0]),
            )
            yield (
                f"A score that is surely within the tolerance: then {candidate} would be chosen ({time})."
            )
    smaller = [c for c in ranked if needs_less_memory_than_choice(c, first)]
    if smaller and first.peak_memory_bytes:
        candidate, its_memory = (
            format_candidate_with_worker_count(smaller[0]),
            format_bytes(smaller[0].peak_memory_bytes or 0),
        )
        yield (
            f"GPUs with less memory than {format_bytes(first.peak_memory_bytes)}: then {candidate} would be "
            f"chosen ({its_memory})."
        )
    if constraints.homogeneous:
        yield from iter_sentences_on_slow_worker(ranking)


def advise_number_of_repeats(ranking: Ranking) -> str:
    """Return a sentence on the number of repeats that the measured noise requires.

    It begins with a blank. Empty for blocks, whose number a verdict states.
    """
    if ranking.chosen_candidate.repetition_noun != "repeat":
        return ""
    if ranking.repeat_noise is None:
        return " A single repeat does not show the noise; five repeats are a good start."
    enough = ranking.repeat_noise.compute_needed_repeats(ROUGH)
    needed = f"more than {MAX_REPEATS}" if enough is None else str(enough)
    noise, difference = (
        format_percentage(ranking.repeat_noise.log_time_sd),
        format_percentage(ROUGH),
    )
    return (
        f" At the measured noise of {noise}, {needed} repeats are needed to detect a difference of "
        f"{difference}."
    )


def needs_less_memory_than_choice(candidate: Candidate, choice: Candidate) -> bool:
    """Return whether a candidate needs clearly less memory than the choice. False if unknown."""
    its, own = candidate.peak_memory_bytes_unless_doubted, choice.peak_memory_bytes_unless_doubted
    return None not in (its, own) and not choice.has_cpu_workers and its < 0.95 * own


def iter_sentences_on_other_constraints(
    candidates: Sequence[Candidate], choice: Candidate | None
) -> Iterator[str]:
    """Yield a sentence for each constraint without which another candidate would be chosen."""
    changes = {
        "does not fit": "More memory",
        "too slow": "A later deadline",
        "worse score": "A worse score allowed",
        "needs all workers": "Workers that stay until the end",
        "needs more workers": "More workers",
    }
    for kind, best in find_best_excluded_candidate_by_kind(candidates, choice, changes).items():
        # The exclusion reason of a candidate that is too slow already states its time.
        time = (
            ""
            if kind == "too slow" and best.training_cost is None
            else f"{format_time_and_cost(best)}; "
        )
        yield (
            f"{changes[kind]}: then {format_candidate_with_worker_count(best)} would be chosen "
            f"({time}{best.exclusion_reason})."
        )
    stopped = dict.fromkeys(
        c.strategy for c in candidates if c.exclusion_kind == "too slow" and c.time_s is None
    )
    if choice is None and stopped:
        strategies = ", ".join(stopped)
        yield (
            f"A longer time_limit_s: {strategies} reached the present limit. Raise the limit, and train "
            "again with --forcerun (docs/configuration.md)."
        )


def iter_sentences_on_slow_worker(ranking: Ranking) -> Iterator[str]:
    """Yield a sentence on the slowdown of one worker above which an asynchronous strategy wins.

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
            asynchronous = free[0].strategy
            yield (
                f"Workers of unequal speed: if one of {n} is more than {factor:.2f} times slower than the "
                f"others, {asynchronous} should be faster, since it does not wait for the slowest."
            )


def iter_excluded_strategies_and_reasons(
    candidates: Sequence[Candidate], ranked_strategies: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield each strategy that is excluded on every number of workers, and the reasons."""
    for name in dict.fromkeys(c.strategy for c in candidates):
        if name not in ranked_strategies:
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
