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


def has_requested_worker_count(candidates: Sequence[Candidate], constraints: Constraints) -> bool:
    """Return whether any candidate has the requested number of workers. True if no number is requested."""
    return constraints.gpus is None or any(c.gpus == constraints.gpus for c in candidates)


def iter_unanswered_constraints(
    candidates: Sequence[Candidate],
    first: Candidate,
    noun: str,
    constraints: Constraints,
    slowed: bool,
) -> Iterator[str]:
    """Yield sentences on constraints of the decision that no record can answer.

    Args:
        candidates: Candidates.
        first: The recommendation.
        noun: Noun for workers.
        constraints: Constraints of the decision.
        slowed: Whether workers were slowed down on purpose.
    """
    if not has_requested_worker_count(candidates, constraints):
        reason = first.no_projection_reason or "this number was not measured"
        yield f"There are no results for {format_count(constraints.gpus, noun)}: {reason}."
    if not constraints.homogeneous and not slowed:
        yield "There are no results for unequal workers: all measured workers were equally fast."


@dataclass(frozen=True)
class Claim:
    """The conclusion of a decision: its kind, such as `winner` or `tie`, and its text."""

    #: `projected`, `alone`, `one run`, `winner`, `tie` or `apart` (no significant difference).
    kind: str
    text: str


#: What the remaining candidates have, if a constraint excludes a better one; `score` is the score's name.
REMAINING_HAVE = {"worse score": "an acceptable {score}", "does not fit": "enough memory"}


def find_better_excluded(
    candidates: Iterable[Candidate], first: Candidate | None, kinds: Iterable[str]
) -> dict[str, Candidate]:
    """Return the best excluded candidate per kind of exclusion, if better than the choice.

    Args:
        candidates: Candidates.
        first: The recommendation, if any.
        kinds: Kinds of exclusion.
    """
    best = {}
    for kind in kinds:
        timed = [c for c in candidates if c.exclusion_kind == kind and c.time_s is not None]
        one = min(timed, key=lambda c: (c.objective, c.gpus), default=None)
        if one and (first is None or one.objective < first.objective):
            best[kind] = one
    return best


def compute_claim(
    candidates: Sequence[Candidate], ranking: Ranking, constraints: Constraints, score_open: bool
) -> Claim:
    """Return the strongest conclusion on the choice that the records allow.

    Args:
        candidates: Candidates.
        ranking: Ranking of the candidates.
        constraints: Constraints of the decision.
        score_open: Whether the score may be worse than allowed.
    """
    first = ranking.chosen_candidate
    quick = "cheap" if first.is_ranked_by_cost else "fast"
    they_have = [
        REMAINING_HAVE[kind].format(score=first.score.name)
        for kind in find_better_excluded(candidates, first, REMAINING_HAVE)
    ]
    remaining = f" of the candidates with {' and '.join(they_have)}" if they_have else ""
    best = f"{quick.capitalize()}est{remaining}"
    but = f", but its {first.score.name} may be worse than allowed" if score_open else ""
    margin = f"{100 * constraints.equivalence_margin:g} %"
    ties = [c for c in ranking.comparisons if c.status == "tied"]
    if first.is_projected:
        not_faster = f"Not significantly {quick}er than {ties[0].alternative.name}" if ties else ""
        workers = format_count(first.gpus, "worker")
        text = f"{not_faster or best} by projection; nothing was measured on {workers}."
        return Claim("projected", text)
    if not ranking.comparisons:
        return Claim("alone", f"The only candidate that is not excluded{but}.")
    if len(first.times) < 2:
        one = f"in one {first.run} each"
        if any(c.ratio.value < 1 for c in ranking.comparisons):
            return Claim("one run", f"Within {margin} of the {quick}est, {one}{but}.")
        return Claim("one run", f"{best}, {one}{but}.")
    if not ties:
        text = f"{best}{but}." if but else f"{best}: {describe_distance(ranking.comparisons[0])}."
        return Claim("winner", text)
    names = [c.alternative.name for c in ties]
    named = join_with_and(names) if len(ties) == 2 else format_names(names, 1)
    most = constraints.equivalence_margin + 1e-12
    known_equal = ranking.max_lead is not None and ranking.max_lead <= most
    if known_equal and all(c.ratio.value <= 1 + most for c in ties):
        return Claim(
            "tie",
            f"As {quick} as {named} within {margin}"
            f"{describe_advantage(first, [c.alternative for c in ties])}{but}.",
        )
    return Claim("apart", f"Not significantly {quick}er than {named}{but}.")


def describe_distance(c: ComparisonWithChoice, rival: str = "the next") -> str:
    """Return how far an alternative is behind the choice: `the next takes 9 % longer`."""
    ratio, by_cost = c.ratio.value, c.alternative.is_ranked_by_cost
    if ratio >= 2:
        many = f"{ratio:.1f} times as"
        return f"{rival} costs {many} much" if by_cost else f"{rival} takes {many} long"
    more = format_percentage(ratio - 1)
    return f"{rival} costs {more} more" if by_cost else f"{rival} takes {more} longer"


def format_percentage(part: float) -> str:
    """Return a fraction as a percentage with few digits: `9 %` or `0.4 %`."""
    if part < 0.0005:
        return "less than 0.1 %"
    return f"{100 * part:.0f} %" if part >= 0.0095 else f"{100 * part:.1f} %"


def describe_advantage(first: Candidate, ties: Sequence[Candidate]) -> str:
    """Return the advantage of the choice over equally fast candidates: fewer workers, or less memory."""
    if all(first.gpus < c.gpus for c in ties):
        return ", on fewer workers"
    known = [c.trusted_memory_bytes for c in ties if c.trusted_memory_bytes is not None]
    own = first.trusted_memory_bytes
    if own and len(known) == len(ties):
        saved = min(known) - own
        if saved >= 0.03 * own:
            return f", and needs {format_bytes(saved)} less"
    return ""
