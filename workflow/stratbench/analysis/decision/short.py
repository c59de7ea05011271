"""Short texts of a decision, for a row of the report or a line of a terminal.

Each sentence has one number with its unit, and names the alternative last. `ddp × 2` is ddp on 2 workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.claim import (
    describe_ratio_to_choice,
    format_percentage,
    formulate_conclusion,
)
from stratbench.analysis.decision.confidence import Confidence
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.ranking import Ranking
from stratbench.analysis.decision.tolerance import (
    compute_score_difference_by_chance,
    have_equal_training_arithmetic,
)
from stratbench.analysis.records.measures import format_number
from stratbench.cell.text.words import GIB, format_bytes, format_count, join_with_and
from stratbench.statistics.unpaired import compute_geometric_mean_with_interval

#: Minimum number of runs for which a time has a confidence interval; with fewer it has the runs' range.
INTERVAL_FROM = 5
#: Times of at least this many seconds are shown in hours.
HOURS_FROM_S = 7200
#: Fraction of the memory that an alternative must save to be mentioned.
CLEARLY_LESS = 0.1
#: If all candidates are excluded, by kind of exclusion: the conclusion, and a verb phrase on the candidates.
NONE_LEFT = {
    "does not fit": ("No candidate fits into memory.", "do not fit"),
    "too slow": ("No candidate finishes in time.", "are too slow"),
    "unsupported": ("No strategy supports this network.", "are unsupported"),
    "failed": ("Every cell failed.", "failed"),
    "not measured": (
        "No cell was measured: train the cells, or let `plan` estimate their memory and time.",
        "were not measured",
    ),
    "does not learn": ("No candidate learns.", "do not learn"),
    "unusable record": ("No candidate has a usable record.", "are unusable"),
    "other work": ("No two candidates did the same work.", "did other work"),
    "worse score": ("Every candidate has a worse score than allowed.", "have a worse score"),
    "needs more workers": (
        "Every candidate needs more workers than are available.",
        "need more workers",
    ),
}
#: What to try next if every training diverged.
STEADIER = (
    "To keep the training from diverging, lower lr or set lr_warmup_steps or max_grad_norm; then train "
    "again."
)
#: By kind of uncertain answer: a verb phrase for one such answer, and one for several.
KINDS = {
    "condition": ("holds with a condition", "hold with a condition"),
    "one run": ("rests on one run of each cell", "rest on one run of each cell"),
    "apart": ("has no significant winner", "have no significant winner"),
    "low": ("has a low confidence", "have a low confidence"),
    "none": ("has no strategy to recommend", "have no strategy to recommend"),
}
#: The kind of an answer with a high or medium confidence.
KIND_OF_LEVEL = {"high": "sure", "medium": "condition"}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class ShortAnswer:
    """The answer for one model in short texts, which are empty if unknown."""

    #: The chosen strategy; None if nothing can be recommended.
    strategy: str | None
    gpus: int | None
    #: The conclusion as a sentence, after sentences on constraints that no record can answer.
    claim: str
    #: How firm the answer is: `sure`, or a key of KINDS such as `one run`.
    kind: str
    #: Training time of the choice as text, or its cost if a price is set.
    value: str = ""
    #: Spread of the training time over the runs, as text.
    value_note: str = ""
    #: The alternatives, best first: strategy, gpus, ratio to the choice, and its interval (low, high).
    others: tuple[dict[str, Any], ...] = ()
    score: str = ""
    score_name: str = ""
    score_note: str = ""
    #: Whether the score of the choice may be worse than allowed.
    score_open: bool = False
    memory: str = ""
    memory_note: str = ""
    #: Peak memory of the choice as a fraction of the GPU's memory; None if the GPU is unknown.
    memory_share: float | None = None
    #: The best alternative of a sure answer: `fsdp × 2 takes 40 % longer, with 30 % less memory`.
    runner_up: str = ""
    #: The main reason for the confidence.
    reason: str = ""
    #: If nothing can be recommended: the lowest memory need, and what to try next.
    remedy: str = ""

    @property
    def choice_name(self) -> str:
        """The choice with its number of workers: `ddp × 4`; empty without a choice."""
        return f"{self.strategy} × {self.gpus}" if self.strategy else ""


def build_answer_without_choice(
    candidates: Sequence[Candidate], memory_margin: float
) -> ShortAnswer:
    """Return the short answer for a model whose candidates are all excluded.

    Args:
        candidates: Candidates.
        memory_margin: Memory reserve as a fraction of the peak.
    """
    kinds = Counter(c.exclusion_kind for c in candidates)
    kind, count = kinds.most_common(1)[0]
    claim, verb = NONE_LEFT.get(kind, ("Every candidate is excluded.", "are excluded"))
    if len(kinds) > 1:
        claim = "Every candidate is excluded."
    remedy = (
        describe_lowest_memory_need(candidates, memory_margin) if kind == "does not fit" else ""
    )
    if all(c.has_diverged_training for c in candidates):
        claim, verb, remedy = "Every training diverged.", "diverged", STEADIER
    return ShortAnswer(
        None, None, claim, "none", reason=f"{count} of {len(candidates)} {verb}", remedy=remedy
    )


def describe_lowest_memory_need(candidates: Sequence[Candidate], memory_margin: float) -> str:
    """Return sentences on the lowest known memory need, and on options that reduce memory."""
    known = [(c.peak_memory_bytes, c.name) for c in candidates if c.peak_memory_bytes is not None]
    least = min(known, default=None)
    lowest_need = least and (
        f"The lowest need is {format_bytes(least[0] * (1 + memory_margin))} per worker "
        f"({least[1]}{', including the reserve' if memory_margin else ''}). "
    )
    return (
        f"{lowest_need or ''}More workers, activation checkpointing or a smaller batch need less memory; "
        "`plan` says which cells would fit."
    )


def build_short_answer(
    candidates: Sequence[Candidate],
    ranking: Ranking,
    constraints: Constraints,
    confidence: Confidence,
    unanswered_sentences: Sequence[str],
    slowdown_texts: Sequence[str] = (),
) -> ShortAnswer:
    """Return the answer for one model in short texts, for the report or a terminal.

    Args:
        candidates: Candidates.
        ranking: Ranking of the candidates.
        constraints: Constraints of the decision.
        confidence: Confidence of the decision.
        unanswered_sentences: Sentences on constraints for which there are no results.
        slowdown_texts: How workers were slowed down on purpose.
    """
    first = ranking.chosen_candidate
    score_open = first.may_have_intolerable_score(constraints)
    claim = formulate_conclusion(candidates, ranking, constraints, score_open)
    known = "Apart from that:" if first.has_projected_time else "Among the measured cells:"
    value, spread = format_value_and_spread(first)
    score, score_note = format_score_and_note(candidates, first, constraints)
    memory, memory_note, share_of_card = format_peak_memory_with_note_and_share(first)
    # Memory has already decided between equally fast candidates, so the text on memory is empty for them.
    leaner = (
        ""
        if ranking.alternatives_tied_with_choice
        else describe_alternative_with_least_memory(
            first, [c.alternative for c in ranking.comparisons]
        )
    )
    return ShortAnswer(
        first.strategy,
        first.gpus,
        " ".join(
            [*unanswered_sentences, known] * bool(unanswered_sentences)
            + [claim.conclusion_text]
            + [f"Condition: {text}." for text in slowdown_texts]
        ),
        KIND_OF_LEVEL.get(
            confidence.confidence_level,
            claim.conclusion_kind if claim.conclusion_kind in KINDS else "low",
        ),
        value,
        "; ".join(filter(None, (spread, first.token_rate_text))),
        others=tuple(
            {"strategy": c.alternative.strategy, "gpus": c.alternative.gpus}
            | dict(zip(("ratio", "low", "high"), c.ratio, strict=True))
            for c in ranking.comparisons
        ),
        score=score,
        score_name=first.score.name if score and not first.skips_evaluation else "",
        score_note=score_note,
        score_open=score_open,
        memory=memory,
        memory_note="; ".join(filter(None, (memory_note, leaner))),
        memory_share=share_of_card,
        runner_up=describe_runner_up(ranking) if confidence.confidence_level == "high" else "",
        reason=confidence.main_reason,
    )


# ---------------------------------------------------------------- numbers of an answer as text


def format_value_and_spread(candidate: Candidate) -> tuple[str, str]:
    """Return a candidate's time (or cost) and the spread over its runs, both as text."""
    if candidate.training_cost is not None:
        return f"{candidate.training_cost:.3g}", f"for {format_duration(candidate.time_s)}"
    if candidate.time_s is None:
        return "", ""
    if not len(candidate.times):
        low_s, high_s = candidate.training_time_range_s
        span = f"{format_low_end_of_time_span(low_s, high_s)}–{format_duration(high_s)} (80 %, projected)"
        return format_duration(candidate.time_s), span
    if len(candidate.times) == 1:
        return format_duration(candidate.time_s), f"one {candidate.measurement_noun}"
    low, high = compute_time_interval_s(candidate.times.to_numpy(dtype=float))
    note = (
        "95 %"
        if len(candidate.times) >= INTERVAL_FROM
        else f"in {format_count(len(candidate.times), candidate.measurement_noun)}"
    )
    span = f"{format_low_end_of_time_span(low, high)}–{format_duration(high)}"
    return format_duration(
        candidate.time_s
    ), f"{span} ({note})" if note == "95 %" else f"{span} {note}"


def compute_time_interval_s(values_s: np.ndarray) -> tuple[float, float]:
    """Return the 95 % t interval of the geometric mean of times in s.

    The range of the values replaces it if there are fewer than INTERVAL_FROM.
    """
    if len(values_s) >= INTERVAL_FROM:
        _, low, high = compute_geometric_mean_with_interval(np.log(values_s))
        if low is not None and high is not None:
            return low, high
    return float(values_s.min()), float(values_s.max())


def format_duration(seconds: float | None) -> str:
    """Return a time as text, in seconds, or in hours from two hours on."""
    if seconds is None:
        return ""
    if seconds >= HOURS_FROM_S:
        return f"{seconds / 3600:.1f} h"
    return f"{format_with_thousands_spaces(seconds)} s"


def format_low_end_of_time_span(low_s: float, high_s: float) -> str:
    """Return the low end of a time span without a unit.

    The text is a number in the unit of the high end: hours from HOURS_FROM_S, else seconds.
    """
    return f"{low_s / 3600:.1f}" if high_s >= HOURS_FROM_S else format_with_thousands_spaces(low_s)


def format_with_thousands_spaces(number: float) -> str:
    """Return a number as text: three significant digits, or thin spaces between thousands."""
    return (
        f"{number:,.0f}".replace(",", "\u2009") if number >= 1000 else format_number(number, None)
    )


def format_score_and_note(
    candidates: Sequence[Candidate], choice: Candidate, constraints: Constraints
) -> tuple[str, str]:
    """Return the choice's score as text, and a note on its distance from the best.

    The note has the largest distance that is possible.

    Args:
        candidates: Candidates.
        choice: The chosen candidate.
        constraints: Constraints of the decision.
    """
    if choice.skips_evaluation:
        return "not measured", "equal scores are assumed"
    if choice.mean_score is None:
        return "", ""
    score, tolerance = choice.score, constraints.find_score_tolerance(choice.score)
    decimals = max(1, score.shown_decimals - (1 if score.is_unit_fraction else 0))
    text = f"{choice.mean_score:.{decimals}f} {score.shown_unit}"
    if choice.max_score_loss is None:
        return text, "not compared"
    left = [c for c in candidates if not c.exclusion_kind and c is not choice]
    lost = score.format_difference(choice.max_score_loss, score.shown_decimals - 1)
    if choice.may_have_intolerable_score(constraints):
        return text, f"may lose up to {lost} ({tolerance:g} allowed)"
    if left and all(have_equal_training_arithmetic(choice, c) for c in left):
        return text, "the same in all"
    if choice.max_score_loss <= 0:
        chance = compute_score_difference_by_chance(choice, choice)
        if chance > tolerance:
            by_chance = score.format_difference(chance, score.shown_decimals - 1)
            return text, f"the best here; chance makes {by_chance}"
        return text, "the best"
    return text, f"loses at most {lost} ({tolerance:g} allowed)"


def format_peak_memory_with_note_and_share(choice: Candidate) -> tuple[str, str, float | None]:
    """Return the choice's peak memory as text, a note, and the peak's share.

    The share is a fraction of the GPU's memory. It is None for CPU workers and for an unknown memory.
    It is also None if the audit doubts the peak.
    """
    if choice.peak_memory_bytes is None:
        return "", "", None
    if choice.has_cpu_workers or choice.rules_doubting_peak_memory or not choice.gpu_memory_bytes:
        base = "above its base" if choice.has_cpu_workers else ""
        note = "doubted by the audit" if choice.rules_doubting_peak_memory else base
        return format_bytes(choice.peak_memory_bytes), note, None
    taken = choice.peak_memory_bytes / choice.gpu_memory_bytes
    held = choice.peak_memory_bytes / GIB
    peak = f"{held:.{1 if held >= 10 else 2}f} GiB"
    return peak, f"of {choice.gpu_memory_bytes / GIB:.0f} GiB", taken


def describe_runner_up(ranking: Ranking) -> str:
    """Return how much worse the best alternative is: `recomputed × 1 takes 28 % longer`."""
    if not ranking.comparisons:
        return ""
    c = ranking.comparisons[0]
    less = describe_alternative_with_least_memory(
        ranking.chosen_candidate, [c.alternative]
    ).partition(": ")[2]
    return describe_ratio_to_choice(c, c.alternative.name) + (
        f", with {less} memory" if less else ""
    )


def describe_alternative_with_least_memory(
    choice: Candidate, alternatives: Sequence[Candidate]
) -> str:
    """Return a text on the memory that the most frugal alternative saves.

    Example: `fsdp × 2: 40 % less`. Empty if no alternative needs clearly less than the choice.
    """
    own = choice.peak_memory_bytes_unless_doubted
    known = [
        (c.peak_memory_bytes_unless_doubted, c.name)
        for c in alternatives
        if c.peak_memory_bytes_unless_doubted is not None
    ]
    if not own or not known or min(known)[0] > (1 - CLEARLY_LESS) * own:
        return ""
    least, name = min(known)
    return f"{name}: {format_percentage(1 - least / own)} less"


# ---------------------------------------------------------------- one line that summarises all answers


def format_summary_line(answers: Sequence[tuple[str, ShortAnswer]]) -> str:
    """Return one line that summarises the answers for all models.

    Args:
        answers: Pairs of a model and the short answer for this model.
    """
    sure = [(model, a) for model, a in answers if a.kind == "sure"]
    if not answers:
        return ""
    sentences = []
    choices = {a.choice_name for _, a in answers}
    common = choices.pop() if len(answers) > 2 and len(choices) == 1 else ""
    if sure:
        names = [
            f"{a.choice_name} for {model}" + (f" ({a.runner_up})" if a.runner_up else "")
            for model, a in sure
        ]
        listed = "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")
        listed = f"{common} in all" if common and len(sure) == len(answers) else listed
        verb = "answer is" if len(sure) == 1 else "answers are"
        sentences.append(f"{spell_small_number(len(sure)).capitalize()} {verb} sure: {listed}.")
    else:
        questions = "question" if len(answers) == 1 else "questions"
        opening = f"{spell_small_number(len(answers)).capitalize()} {questions}, no sure answer yet"
        opening += f" ({common} in all)" if common else ""
        if len({a.kind for _, a in answers}) == 1:
            one, many = KINDS[answers[0][1].kind]
            same = {1: f"it {one}", 2: f"both {many}"}.get(len(answers), f"all {many}")
            return f"{opening}: {same}."
        sentences.append(f"{opening}.")
    groups = Counter(a.kind for _, a in answers)
    parts = []
    for kind, (one, many) in KINDS.items():
        if count := groups[kind]:
            parts.append(f"{spell_small_number(count)} {one if count == 1 else many}")
    if parts:
        text = join_with_and(parts)
        sentences.append(f"{text[0].upper()}{text[1:]}.")
    return " ".join(sentences)


def spell_small_number(count: int) -> str:
    """Return a number up to ten as a word, and a larger one in digits."""
    return _NUMBERS[count] if count < len(_NUMBERS) else str(count)
