"""Formulates the conclusion of a decision as a sentence: a winner, a tie or no significant difference.

Each sentence has one number with its unit, and names the alternative last. `ddp × 2` is ddp on 2 workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.ranking import ComparisonWithChoice, Ranking
from stratbench.cell.text.words import format_bytes, format_count, format_names, join_with_and


def has_candidate_with_requested_gpus(
    candidates: Sequence[Candidate], constraints: Constraints
) -> bool:
    """Return whether a candidate has the requested number of workers. True without a request."""
    return constraints.gpus is None or any(c.gpus == constraints.gpus for c in candidates)


def iter_sentences_on_missing_results(
    candidates: Sequence[Candidate],
    choice: Candidate,
    worker_noun: str,
    constraints: Constraints,
    has_slowed_workers: bool,
) -> Iterator[str]:
    """Yield a sentence for each constraint of the decision for which there are no results.

    Args:
        candidates: Candidates.
        choice: The chosen candidate.
        worker_noun: Noun for workers: `GPU` or `CPU process`.
        constraints: Constraints of the decision.
        has_slowed_workers: Whether workers were slowed down on purpose.
    """
    if not has_candidate_with_requested_gpus(candidates, constraints):
        requested_workers = format_count(constraints.gpus, worker_noun)
        reason = choice.no_projection_reason or "this number was not measured"
        yield f"There are no results for {requested_workers}: {reason}."
    if not constraints.homogeneous and not has_slowed_workers:
        yield "There are no results for unequal workers: all measured workers were equally fast."


@dataclass(frozen=True)
class Claim:
    """The conclusion of a decision: its kind, such as `winner` or `tie`, and its text."""

    #: Kind of conclusion: `projected`, `alone`, `one run`, `winner`, `tie`, or `apart` (not significant).
    conclusion_kind: str
    conclusion_text: str


#: What all remaining candidates have in common, by the kind of exclusion of a better candidate.
REMAINING_HAVE = {"worse score": "an acceptable {score}", "does not fit": "enough memory"}


def find_best_excluded_candidate_by_kind(
    candidates: Iterable[Candidate], choice: Candidate | None, exclusion_kinds: Iterable[str]
) -> dict[str, Candidate]:
    """Return, by kind of exclusion, the best excluded candidate that is better than the choice.

    Args:
        candidates: Candidates.
        choice: The chosen candidate, if any.
        exclusion_kinds: Kinds of exclusion to look for.
    """
    best = {}
    for kind in exclusion_kinds:
        timed = [c for c in candidates if c.exclusion_kind == kind and c.time_s is not None]
        one = min(timed, key=lambda c: (c.cost_or_time, c.gpus), default=None)
        if one and (choice is None or one.cost_or_time < choice.cost_or_time):
            best[kind] = one
    return best


def formulate_conclusion(
    candidates: Sequence[Candidate],
    ranking: Ranking,
    constraints: Constraints,
    has_uncertain_score: bool,
) -> Claim:
    """Return the strongest conclusion on the choice that the records allow.

    Args:
        candidates: Candidates.
        ranking: Ranking of the candidates.
        constraints: Constraints of the decision.
        has_uncertain_score: Whether the score of the choice may be worse than allowed.
    """
    first = ranking.chosen_candidate
    fast = "cheap" if first.is_ranked_by_cost else "fast"
    faster, fastest = f"{fast}er", f"{fast}est"
    they_have = [
        REMAINING_HAVE[kind].format(score=first.score.name)
        for kind in find_best_excluded_candidate_by_kind(candidates, first, REMAINING_HAVE)
    ]
    remaining = f" of the candidates with {' and '.join(they_have)}" if they_have else ""
    fastest_remaining = f"{fastest.capitalize()}{remaining}"
    but_its_score = (
        f", but its {first.score.name} may be worse than allowed" if has_uncertain_score else ""
    )
    margin = f"{100 * constraints.equivalence_margin:g} %"
    ties = [c for c in ranking.comparisons if c.status == "tied"]
    if first.has_projected_time:
        conclusion = (
            f"Not significantly {faster} than {ties[0].alternative.name}"
            if ties
            else fastest_remaining
        )
        workers = format_count(first.gpus, "worker")
        text = f"{conclusion} by projection; nothing was measured on {workers}."
        return Claim("projected", text)
    if not ranking.comparisons:
        return Claim("alone", f"The only candidate that is not excluded{but_its_score}.")
    if len(first.times) < 2:
        in_one_run_each = f"in one {first.measurement_noun} each"
        if any(c.ratio.value < 1 for c in ranking.comparisons):
            text = f"Within {margin} of the {fastest}, {in_one_run_each}{but_its_score}."
            return Claim("one run", text)
        return Claim("one run", f"{fastest_remaining}, {in_one_run_each}{but_its_score}.")
    if not ties:
        reason = but_its_score or f": {describe_ratio_to_choice(ranking.comparisons[0])}"
        return Claim("winner", f"{fastest_remaining}{reason}.")
    names = [c.alternative.name for c in ties]
    tied_candidates = join_with_and(names) if len(ties) == 2 else format_names(names, 1)
    most = constraints.equivalence_margin + 1e-12
    known_equal = (
        ranking.max_alternative_lead_fraction is not None
        and ranking.max_alternative_lead_fraction <= most
    )
    if known_equal and all(c.ratio.value <= 1 + most for c in ties):
        advantage = describe_advantage_over_ties(first, [c.alternative for c in ties])
        return Claim(
            "tie", f"As {fast} as {tied_candidates} within {margin}{advantage}{but_its_score}."
        )
    return Claim("apart", f"Not significantly {faster} than {tied_candidates}{but_its_score}.")


def describe_ratio_to_choice(comparison: ComparisonWithChoice, rival: str = "the next") -> str:
    """Return a text on how much slower or dearer an alternative is than the choice.

    Example: `the next takes 9 % longer`. Here `rival` is "the next", the subject of the text.
    """
    ratio, by_cost = comparison.ratio.value, comparison.alternative.is_ranked_by_cost
    if ratio >= 2:
        many = f"{ratio:.1f} times as"
        return f"{rival} costs {many} much" if by_cost else f"{rival} takes {many} long"
    more = format_percentage(ratio - 1)
    return f"{rival} costs {more} more" if by_cost else f"{rival} takes {more} longer"


def format_percentage(fraction: float) -> str:
    """Return a fraction as a percentage with few digits: `9 %` or `0.4 %`."""
    if fraction < 0.0005:
        return "less than 0.1 %"
    return f"{100 * fraction:.0f} %" if fraction >= 0.0095 else f"{100 * fraction:.1f} %"


def describe_advantage_over_ties(choice: Candidate, tied_candidates: Sequence[Candidate]) -> str:
    """Return what the choice has over equally fast candidates: fewer workers, or less memory."""
    if all(choice.gpus < c.gpus for c in tied_candidates):
        return ", on fewer workers"
    known = [
        c.peak_memory_bytes_unless_doubted
        for c in tied_candidates
        if c.peak_memory_bytes_unless_doubted is not None
    ]
    own = choice.peak_memory_bytes_unless_doubted
    if own and len(known) == len(tied_candidates):
        saved = min(known) - own
        if saved >= 0.03 * own:
            return f", and needs {format_bytes(saved)} less"
    return ""
