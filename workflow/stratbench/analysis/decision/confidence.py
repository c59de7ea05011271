"""Computes the confidence of a decision from its repeats and its caveats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.claim import format_percentage
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.ranking import Ranking
from stratbench.analysis.decision.tolerance import compute_score_difference_by_chance
from stratbench.cell.text.words import format_count, format_names
from stratbench.statistics.moderated import ROUGH

LEVELS = ("low", "medium", "high")
#: Sentence for a decision whose number of repeats was not fixed in advance.
LOOKED_AGAIN = (
    "Some records plan another number of repeats than there are. The intervals are therefore wider, which "
    "corrects for repeated looks at the results."
)


@dataclass(frozen=True)
class Confidence:
    """Confidence of a decision: its level, a short main reason, and all reasons as sentences."""

    #: An entry of LEVELS.
    confidence_level: str
    main_reason: str
    reason_sentences: tuple[str, ...]


def compute_confidence(
    ranking: Ranking,
    constraints: Constraints,
    slowdown_texts: Sequence[str],
    has_uncertain_score: bool,
    has_requested_gpus: bool = True,
) -> Confidence:
    """Return the confidence in a decision, by the rules of docs/decision.md.

    Every limitation has a short text and the maximum level that it allows.

    Args:
        ranking: Ranking of the candidates.
        constraints: Constraints of the decision.
        slowdown_texts: How workers were slowed down on purpose.
        has_uncertain_score: Whether the score of the choice may be worse than allowed.
        has_requested_gpus: Whether there are results for the requested number of workers.
    """
    first, rivals = ranking.chosen_candidate, [c.alternative for c in ranking.comparisons]
    runs = format_count(ranking.min_num_compared_repeats, first.measurement_noun)
    sentences = (
        []
        if first.time_source_text == "measured"
        else [f"{first.time_source_text[0].upper()}{first.time_source_text[1:]}."]
    )
    level, claim = compute_max_confidence_level_and_reason(ranking)
    sentences.append(claim)
    limits = []
    if not constraints.homogeneous and not slowdown_texts:
        limits.append((0, "unequal workers were not measured"))
    if not has_requested_gpus:
        limits.append((0, f"there are no results for {constraints.gpus} workers"))
    if first.verdict_claim_and_confidence is not None:
        sentences.append(
            f"The verdict on {format_count(first.gpus, 'worker')}: {first.verdict_claim_and_confidence[0]}"
        )
        # A confirmed verdict replaces the level of the repeats; any other verdict can only lower it.
        by_verdict = LEVELS.index(first.verdict_claim_and_confidence[1])
        level = by_verdict if is_choice_confirmed_by_verdict(ranking) else min(level, by_verdict)
    elif first.repetition_noun == "block":
        level = min(level, 1)
        sentences.append(
            f"The verdict on {format_count(first.gpus, 'worker')} makes no claim for the choice."
        )
    elif ranking.corrects_for_interim_analyses:
        sentences.append(LOOKED_AGAIN)
    limits.append((level, describe_limit_from_repeats(ranking, constraints, level)))
    if has_uncertain_score:
        limits.append((1, f"{runs}: the score is not certain"))
    losable = (
        first.max_score_loss is None
        or first.max_score_loss > constraints.find_score_tolerance(first.score)
    )
    if losable and not has_uncertain_score:
        limits.append(
            (1, "equal scores are assumed" if first.skips_evaluation else "the score is not known")
        )
    limits += [(1, words) for words in iter_caveat_phrases(ranking)]
    hosts = set.union(set(), *(c.hosts for c in (first, *rivals)))
    if min(len(c.hosts) for c in (first, *rivals)) < 2:
        these_hosts = f"host {min(hosts)}" if len(hosts) == 1 else "the same host or hosts each"
        other_hosts = "other hosts may rank the strategies differently"
        if is_every_rival_much_slower_on_one_host(ranking, hosts):
            change = format_percentage(ROUGH)
            other_hosts = (
                f"only a host whose time ratios differ by over {change} may rank them differently"
            )
        else:
            limits.append((1, f"{runs} on one host"))
        repeats = f"{first.repetition_noun}s"
        sentences.append(f"All {repeats} ran on {these_hosts}; {other_hosts}." if hosts else "")
    if unequal := describe_unequal_mean_worker_counts(ranking, constraints.equivalence_margin):
        limits.append((0, "the mean number of workers differs between strategies"))
        sentences.append(unequal)
    sentences += [*iter_score_caveats(first, constraints), *iter_caveat_sentences(ranking)]
    if first.has_cpu_workers:
        sentences.append("The answer holds for CPU processes on this machine, not for GPUs.")
    if slowdown_texts and constraints.homogeneous:
        sentences.append(
            f"The measured workers were slowed down on purpose ({'; '.join(slowdown_texts)}), although "
            "`decide` in config.yaml says that all workers are equally fast."
        )
    lowest = min(cap for cap, _ in limits)
    reason = next((words for cap, words in limits if cap == lowest and words), "")
    if not reason and ranking.is_choice_clearly_fastest:
        processes = " of CPU processes" if first.has_cpu_workers else ""
        reason = f"{runs}{processes} on {format_count(len(hosts), 'host')}, no doubts"
    elif not reason:
        reason = f"equal within {100 * constraints.equivalence_margin:g} %: either will do"
    return Confidence(LEVELS[lowest], reason, tuple(filter(None, sentences)))


def is_every_rival_much_slower_on_one_host(ranking: Ranking, hosts: set[str]) -> bool:
    """Return whether all repeats ran on one host and every alternative is clearly slower.

    An alternative is clearly slower if the interval of its ratio to the choice is above 1 + ROUGH.
    """
    lows = [c.ratio.low for c in ranking.comparisons]
    return (
        len(hosts) == 1 and bool(lows) and all(low is not None and low > 1 + ROUGH for low in lows)
    )


def describe_limit_from_repeats(
    ranking: Ranking, constraints: Constraints, allowed_level: int
) -> str:
    """Return in a few words why the repeats limit the confidence, or an empty text.

    Args:
        ranking: Ranking of the candidates.
        constraints: Constraints of the decision.
        allowed_level: The confidence that the repeats allow, as an index into LEVELS.
    """
    first = ranking.chosen_candidate
    runs = format_count(ranking.min_num_compared_repeats, first.measurement_noun)
    if first.has_projected_time:
        return "projected, not measured"
    if not ranking.comparisons:
        return f"{runs}, without a rival"
    if ranking.max_alternative_lead_fraction is None:
        once = (
            f"one {first.measurement_noun} each"
            if len(first.times) < 2
            else "some were measured once"
        )
        return f"{once}: may be chance"
    if allowed_level and (
        ranking.is_choice_clearly_fastest
        or ranking.max_alternative_lead_fraction <= constraints.equivalence_margin
    ):
        return (
            f"{runs} each"
            if ranking.is_choice_clearly_fastest and ranking.min_num_compared_repeats < 3
            else ""
        )
    lows = [(c.ratio.low, c.alternative) for c in ranking.comparisons if c.ratio.low is not None]
    low, quickest = min(lows, key=lambda pair: pair[0], default=(1.0, None))
    if quickest is None or low >= 1:
        return ""
    least = 1 - low
    less = "much less" if least > ROUGH * 5 else f"{format_percentage(least)} less"
    return f"{quickest.name} may {'cost' if first.training_cost is not None else 'take'} {less}"


def iter_caveat_phrases(ranking: Ranking) -> Iterator[str]:
    """Yield short texts with the choice's caveats and with caveats of alternatives.

    Alternatives are included if the decision's reason names them.
    """
    first = ranking.chosen_candidate
    if first.caveats:
        yield f"{get_caveat_prefix(first.caveats[0])}{format_names(first.caveats, 1)}"
    for alternative, caveats in iter_alternative_caveats(ranking):
        doubted = get_caveat_prefix(caveats[0])
        is_or_colon = f" is {doubted}" if doubted else ": "
        yield f"{alternative.name}{is_or_colon}{caveats[0]}"


def get_caveat_prefix(caveat: str) -> str:
    """Return `doubted by the audit: ` if a caveat is a rule's name. Empty otherwise."""
    return "" if " " in caveat else "doubted by the audit: "


def iter_caveat_sentences(ranking: Ranking) -> Iterator[str]:
    """Yield a sentence with the caveats on the choice. Then yield one per alternative with other caveats."""
    if ranking.chosen_candidate.caveats:
        yield f"Caveats on the choice: {', '.join(ranking.chosen_candidate.caveats)}."
    for alternative, caveats in iter_alternative_caveats(ranking):
        workers = format_count(alternative.gpus, "worker")
        yield f"Caveats on {alternative.strategy} on {workers}: {', '.join(caveats)}."


def iter_alternative_caveats(ranking: Ranking) -> Iterator[tuple[Candidate, list[str]]]:
    """Yield the alternatives that the decision's reason names, with caveats that the choice lacks."""
    on_choice = ranking.chosen_candidate.caveats
    for alternative in (comparison.alternative for comparison in ranking.comparisons_with_nearest):
        if caveats := [caveat for caveat in alternative.caveats if caveat not in on_choice]:
            yield alternative, caveats


def describe_unequal_mean_worker_counts(ranking: Ranking, equivalence_margin: float) -> str:
    """Return a sentence on the mean numbers of present workers. Empty unless they differ clearly.

    The numbers differ if workers are separate jobs, which start at different times.
    """
    candidates = [
        c
        for c in (
            ranking.chosen_candidate,
            *(c.alternative for c in ranking.comparisons_with_nearest),
        )
        if c.mean_num_workers
    ]
    shares = [c.mean_num_workers / c.gpus for c in candidates if c.mean_num_workers]
    if not shares or max(shares) <= (1 + equivalence_margin) * min(shares):
        return ""
    numbers_by_strategy = ", ".join(
        f"{c.mean_num_workers:.2g} of {c.gpus} for {c.strategy}" for c in candidates
    )
    return (
        "Workers joined and left, so the mean number of present workers differs: "
        f"{numbers_by_strategy}."
    )


def is_choice_confirmed_by_verdict(ranking: Ranking) -> bool:
    """Return whether a verdict confirmed the choice, and all other numbers of workers are slower."""
    others = (c for c in ranking.comparisons if c.alternative.gpus != ranking.chosen_candidate.gpus)
    return ranking.chosen_candidate.verdict_claim_and_confidence is not None and all(
        c.status == "slower" for c in others
    )


def compute_max_confidence_level_and_reason(ranking: Ranking) -> tuple[int, str]:
    """Return the highest confidence level that the repeats allow, and a sentence with the reason.

    The level is an index into LEVELS.
    """
    first, repeats = ranking.chosen_candidate, ranking.min_num_compared_repeats
    if first.has_projected_time:
        return (
            0,
            f"The time of the choice on {format_count(first.gpus, 'worker')} is projected (80 % interval), "
            "not measured.",
        )
    if measured := [c for c in ranking.comparisons if not c.alternative.has_projected_time]:
        max_lead = max((0.0, *(1 / c.ratio.low - 1 for c in measured if c.ratio.low)))
        known = all(c.ratio.low is not None for c in measured)
        if len(measured) < len(ranking.comparisons):
            ranking = Ranking(
                first,
                tuple(measured),
                max_lead if known else None,
                ranking.repeat_noise,
                ranking.corrects_for_interim_analyses,
            )
    elif ranking.comparisons:
        return 0, "All rivals of the choice are projected, with 80 % intervals."
    if not ranking.comparisons:
        text = f"The choice was measured in {format_count(repeats, first.repetition_noun)} and has no rival."
        return (1 if repeats > 1 else 0), text
    if ranking.max_alternative_lead_fraction is None:
        return (
            0,
            "There is no interval, so the order may be due to chance: "
            f"{ranking.reason_ranking_may_be_chance}.",
        )
    over_repeats = f"Over {format_count(repeats, first.repetition_noun)}"
    rivals = format_count(len(ranking.comparisons), "rival")
    rivals = {1: "its only rival", 2: "both rivals"}.get(len(ranking.comparisons), f"all {rivals}")
    faster = "cheaper" if first.is_ranked_by_cost else "faster"
    if ranking.is_choice_clearly_fastest:
        text = (
            f"{over_repeats} the choice is significantly {faster} than {rivals} "
            "(simultaneous 95 % intervals)."
        )
        return (2 if repeats >= 3 else 1), text
    tied_rivals = format_count(len(ranking.alternatives_tied_with_choice), "rival")
    how_much = (
        "much"
        if ranking.max_alternative_lead_fraction > 1
        else f"up to {format_percentage(max(ranking.max_alternative_lead_fraction, 0.001))}"
    )
    text = (
        f"{over_repeats} the choice is not significantly {faster} than {tied_rivals}; a rival may be "
        f"{how_much} {faster} (simultaneous 95 % intervals)."
    )
    return (1 if ranking.max_alternative_lead_fraction <= ROUGH else 0), text


def iter_score_caveats(choice: Candidate, constraints: Constraints) -> Iterator[str]:
    """Yield sentences on the uncertainty in the chosen candidate's score."""
    if choice.max_score_loss is None:
        if choice.skips_evaluation:
            yield "No score was measured, since `steps` skips evaluation; equal scores are assumed."
        else:
            yield f"The {choice.score.name} of the choice could not be compared with the best one."
        return
    score, tolerance = choice.score, constraints.find_score_tolerance(choice.score)
    chance = compute_score_difference_by_chance(choice, choice)
    if chance > tolerance:
        difference = score.format_difference(chance, score.shown_decimals - 1)
        yield (
            f"On {choice.test_samples:.0f} test samples, two equally good models differ by up to "
            f"{difference} by chance, more than the {tolerance:g} allowed."
        )
