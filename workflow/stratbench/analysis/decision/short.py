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
from stratbench.analysis.decision.claim import compute_claim, describe_distance, format_percentage
from stratbench.analysis.decision.confidence import Confidence
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.ranking import Ranking
from stratbench.analysis.decision.tolerance import compute_chance_difference, have_equal_arithmetic
from stratbench.analysis.records.measures import format_number
from stratbench.cell.text.words import GIB, format_bytes, format_count, join_with_and
from stratbench.statistics.unpaired import compute_mean_of_logs

#: Number of runs from which a time is shown with a confidence interval instead of the range of the runs.
INTERVAL_FROM = 5
#: Number of seconds from which times are shown in hours.
HOURS_FROM_S = 7200
#: Fraction from which less memory is worth mentioning.
CLEARLY_LESS = 0.1
#: Claim and verb if all candidates are excluded, by the kind of exclusion.
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
#: Remedies if every training diverged.
STEADIER = (
    "To keep the training from diverging, lower lr or set lr_warmup_steps or max_grad_norm; then train "
    "again."
)
#: Verb phrases on uncertain answers by kind, in the singular and the plural.
KINDS = {
    "condition": ("holds with a condition", "hold with a condition"),
    "one run": ("rests on one run of each cell", "rest on one run of each cell"),
    "apart": ("has no significant winner", "have no significant winner"),
    "low": ("has a low confidence", "have a low confidence"),
    "none": ("has no strategy to recommend", "have no strategy to recommend"),
}
#: The kind of an answer whose confidence is high or medium.
KIND_OF_LEVEL = {"high": "sure", "medium": "condition"}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class ShortAnswer:
    """The short answer for one model, whose texts are empty where nothing is known."""

    #: The chosen strategy; None if nothing can be recommended.
    strategy: str | None
    gpus: int | None
    #: The conclusion as a sentence, after sentences on constraints that no record can answer.
    claim: str
    #: `sure`, or a key of KINDS.
    kind: str
    #: The training time (or the cost if there is a price) as text, and its spread.
    value: str = ""
    value_note: str = ""
    #: The alternatives: strategy, gpus, and the ratio to the choice with its interval (low, high).
    others: tuple[dict[str, Any], ...] = ()
    score: str = ""
    score_name: str = ""
    score_note: str = ""
    #: Whether the score may be worse than allowed.
    score_open: bool = False
    memory: str = ""
    memory_note: str = ""
    #: The peak as a fraction of the GPU's memory; None if the GPU is unknown.
    memory_share: float | None = None
    #: The best alternative of a sure answer: `fsdp × 2 takes 40 % longer, with 30 % less memory`.
    runner_up: str = ""
    #: The main reason for the confidence.
    reason: str = ""
    #: If nothing can be recommended: the lowest memory need, and what to try next.
    remedy: str = ""

    @property
    def name(self) -> str:
        """The choice with its number of workers: `ddp × 4`; empty without a choice."""
        return f"{self.strategy} × {self.gpus}" if self.strategy else ""


def build_empty_answer(candidates: Sequence[Candidate], margin: float) -> ShortAnswer:
    """Return the answer if all candidates are excluded.

    Args:
        candidates: Candidates.
        margin: Memory reserve as a fraction of the peak.
    """
    kinds = Counter(c.exclusion_kind for c in candidates)
    kind, count = kinds.most_common(1)[0]
    claim, verb = NONE_LEFT.get(kind, ("Every candidate is excluded.", "are excluded"))
    if len(kinds) > 1:
        claim = "Every candidate is excluded."
    remedy = describe_least_memory(candidates, margin) if kind == "does not fit" else ""
    if all(c.has_diverged for c in candidates):
        claim, verb, remedy = "Every training diverged.", "diverged", STEADIER
    return ShortAnswer(
        None, None, claim, "none", reason=f"{count} of {len(candidates)} {verb}", remedy=remedy
    )


def describe_least_memory(candidates: Sequence[Candidate], margin: float) -> str:
    """Return sentences on the lowest known memory need, and on options that reduce memory."""
    known = [(c.memory_bytes, c.name) for c in candidates if c.memory_bytes is not None]
    least = min(known, default=None)
    text = least and (
        f"The lowest need is {format_bytes(least[0] * (1 + margin))} per worker "
        f"({least[1]}{', including the reserve' if margin else ''}). "
    )
    tries = "More workers, activation checkpointing or a smaller batch need less memory"
    return f"{text or ''}{tries}; `plan` says which cells would fit."


def build_short_answer(
    candidates: Sequence[Candidate],
    ranking: Ranking,
    constraints: Constraints,
    sure: Confidence,
    unknown: Sequence[str],
    slowed: Sequence[str] = (),
) -> ShortAnswer:
    """Return the short answer for one model, for the report or a terminal.

    Args:
        candidates: Candidates.
        ranking: Ranking of the candidates.
        constraints: Constraints of the decision.
        sure: Confidence of the decision.
        unknown: Sentences on constraints that no record can answer.
        slowed: How workers were slowed down on purpose.
    """
    first = ranking.chosen_candidate
    score_open = first.may_miss_score_tolerance(constraints)
    claim = compute_claim(candidates, ranking, constraints, score_open)
    known = "Apart from that:" if first.is_projected else "Among the measured cells:"
    score, score_note = format_score(candidates, first, constraints)
    memory, memory_note, share_of_card = format_memory(first)
    # Among equally fast candidates the one with less memory is already the choice.
    leaner = (
        ""
        if ranking.tied_alternatives
        else describe_leanest_alternative(first, [c.alternative for c in ranking.comparisons])
    )
    return ShortAnswer(
        first.strategy,
        first.gpus,
        " ".join(
            [*unknown, known] * bool(unknown) + [f"With {text}:" for text in slowed] + [claim.text]
        ),
        KIND_OF_LEVEL.get(sure.level, claim.kind if claim.kind in KINDS else "low"),
        *append_token_rate(first, *format_objective(first)),
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
        runner_up=describe_runner_up(ranking) if sure.level == "high" else "",
        reason=sure.reason,
    )


# ---------------------------------------------------------------- its figures


def format_objective(c: Candidate) -> tuple[str, str]:
    """Return a candidate's time (or cost) as text, and the spread of the candidate's runs."""
    if c.cost is not None:
        return f"{c.cost:.3g}", f"for {format_duration(c.time_s)}"
    if c.time_s is None:
        return "", ""
    if not len(c.times):
        return (
            format_duration(c.time_s),
            f"{format_low_end(*c.time_range_s)}–{format_duration(c.time_range_s[1])} (80 %, projected)",
        )
    if len(c.times) == 1:
        return format_duration(c.time_s), f"one {c.run}"
    low, high = compute_time_interval(c.times.to_numpy(dtype=float))
    note = "95 %" if len(c.times) >= INTERVAL_FROM else f"in {format_count(len(c.times), c.run)}"
    span = f"{format_low_end(low, high)}–{format_duration(high)}"
    return format_duration(c.time_s), f"{span} ({note})" if note == "95 %" else f"{span} {note}"


def append_token_rate(c: Candidate, value: str, note: str) -> tuple[str, str]:
    """Return a value and its note. For text data, the note includes the tokens per second.

    Args:
        c: The candidate.
        value: The value as text.
        note: The text below the value.
    """
    return value, "; ".join(filter(None, (note, c.rate_text)))


def compute_time_interval(values_s: np.ndarray) -> tuple[float, float]:
    """Return the 95 % t interval of the values' geometric mean.

    The range of the values replaces it if there are fewer than INTERVAL_FROM.
    """
    if len(values_s) >= INTERVAL_FROM:
        _, low, high = compute_mean_of_logs(np.log(values_s))
        if low is not None and high is not None:
            return low, high
    return float(values_s.min()), float(values_s.max())


def format_duration(seconds: float | None) -> str:
    """Return a time as text, in seconds, or in hours from two hours on."""
    if seconds is None:
        return ""
    if seconds >= HOURS_FROM_S:
        return f"{seconds / 3600:.1f} h"
    return f"{format_grouped(seconds)} s"


def format_low_end(low_s: float, high_s: float) -> str:
    """Return the low end of a time span as text, in the high end's unit."""
    return f"{low_s / 3600:.1f}" if high_s >= HOURS_FROM_S else format_grouped(low_s)


def format_grouped(value: float) -> str:
    """Return a number as text with three digits, or with a thin space between thousands."""
    return f"{value:,.0f}".replace(",", "\u2009") if value >= 1000 else format_number(value, None)


def format_score(
    candidates: Sequence[Candidate], first: Candidate, constraints: Constraints
) -> tuple[str, str]:
    """Return the choice's score as text, and a note on the possible loss of score.

    Args:
        candidates: Candidates.
        first: The choice.
        constraints: Constraints of the decision.
    """
    if first.skips_evaluation:
        return "not measured", "equal scores are assumed"
    if first.mean_score is None:
        return "", ""
    score, tolerance = first.score, constraints.find_score_tolerance(first.score)
    decimals = max(1, score.decimals - (1 if score.is_fraction else 0))
    text = f"{first.mean_score:.{decimals}f} {score.shown_unit}"
    if first.score_loss_upper is None:
        return text, "not compared"
    left = [c for c in candidates if not c.exclusion_kind and c is not first]
    lost = score.format_difference(first.score_loss_upper, score.decimals - 1)
    if first.may_miss_score_tolerance(constraints):
        return text, f"may lose up to {lost} ({tolerance:g} allowed)"
    if left and all(have_equal_arithmetic(first, c) for c in left):
        return text, "the same in all"
    if first.score_loss_upper <= 0:
        chance = compute_chance_difference(first, first)
        if chance > tolerance:
            by_chance = score.format_difference(chance, score.decimals - 1)
            return text, f"the best here; chance makes {by_chance}"
        return text, "the best"
    return text, f"loses at most {lost} ({tolerance:g} allowed)"


def format_memory(first: Candidate) -> tuple[str, str, float | None]:
    """Return peak memory as text, a note, and its fraction of the GPU's memory."""
    if first.memory_bytes is None:
        return "", "", None
    if first.is_on_cpu or first.memory_caveats or not first.gpu_memory_bytes:
        base = "above its base" if first.is_on_cpu else ""
        note = "doubted by the audit" if first.memory_caveats else base
        return format_bytes(first.memory_bytes), note, None
    taken = first.memory_bytes / first.gpu_memory_bytes
    held = first.memory_bytes / GIB
    peak = f"{held:.{1 if held >= 10 else 2}f} GiB"
    return peak, f"of {first.gpu_memory_bytes / GIB:.0f} GiB", taken


def describe_runner_up(ranking: Ranking) -> str:
    """Return how far the best alternative is behind: `recomputed × 1 takes 28 % longer`."""
    if not ranking.comparisons:
        return ""
    c = ranking.comparisons[0]
    less = describe_leanest_alternative(ranking.chosen_candidate, [c.alternative]).partition(": ")[
        2
    ]
    return describe_distance(c, c.alternative.name) + (f", with {less} memory" if less else "")


def describe_leanest_alternative(first: Candidate, others: Sequence[Candidate]) -> str:
    """Return the alternative with the least memory: `fsdp × 2: 40 % less`.

    Empty if no alternative needs clearly less than the choice.
    """
    own = first.trusted_memory_bytes
    known = [(c.trusted_memory_bytes, c.name) for c in others if c.trusted_memory_bytes is not None]
    if not own or not known or min(known)[0] > (1 - CLEARLY_LESS) * own:
        return ""
    least, name = min(known)
    return f"{name}: {format_percentage(1 - least / own)} less"


# ---------------------------------------------------------------- summary of all answers


def format_summary_line(answers: Sequence[tuple[str, ShortAnswer]]) -> str:
    """Return a line that summarises the answers for all models.

    Args:
        answers: Pairs of a model and the short answer for this model.
    """
    sure = [(model, a) for model, a in answers if a.kind == "sure"]
    if not answers:
        return ""
    sentences = []
    choices = {a.name for _, a in answers}
    common = choices.pop() if len(answers) > 2 and len(choices) == 1 else ""
    if sure:
        names = [
            f"{a.name} for {model}" + (f" ({a.runner_up})" if a.runner_up else "")
            for model, a in sure
        ]
        listed = "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")
        listed = f"{common} in all" if common and len(sure) == len(answers) else listed
        verb = "answer is" if len(sure) == 1 else "answers are"
        sentences.append(f"{spell_number(len(sure)).capitalize()} {verb} sure: {listed}.")
    else:
        questions = "question" if len(answers) == 1 else "questions"
        opening = f"{spell_number(len(answers)).capitalize()} {questions}, no sure answer yet"
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
            parts.append(f"{spell_number(count)} {one if count == 1 else many}")
    if parts:
        text = join_with_and(parts)
        sentences.append(f"{text[0].upper()}{text[1:]}.")
    return " ".join(sentences)


def spell_number(count: int) -> str:
    """Return a small number as a word."""
    return _NUMBERS[count] if count < len(_NUMBERS) else str(count)
