"""Short texts of a decision: a row of the report, a line of a terminal.

Each sentence has one number with its unit, and the alternative last; `ddp × 2` is ddp on 2 workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.claim import behind, claim_of, share
from stratbench.analysis.decision.confidence import Confidence
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.ranking import Ranking
from stratbench.analysis.decision.tolerance import chance_difference, shares_score
from stratbench.analysis.records.measures import format_number
from stratbench.cell.text.words import GIB, bytes_text, counted, joined_with_and
from stratbench.statistics.unpaired import mean_of_logs

#: The number of runs from which a time has an interval of its own, and not the range of its runs.
INTERVAL_FROM = 5
#: Number of seconds from which times are in hours.
HOURS_FROM_S = 7200
#: Fraction from which less memory is worth mentioning.
CLEARLY_LESS = 0.1
#: Text if all candidates are excluded, by the most frequent kind.
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
#: Remedies if trainings diverged, and no candidate is left.
STEADIER = (
    "To keep the training from diverging, lower lr or set lr_warmup_steps or max_grad_norm; then train "
    "again."
)
#: Texts on answers without certainty, by kind: for one, for several.
KINDS = {
    "condition": ("holds with a condition", "hold with a condition"),
    "one run": ("rests on one run of each cell", "rest on one run of each cell"),
    "apart": ("has no significant winner", "have no significant winner"),
    "low": ("has a low confidence", "have a low confidence"),
    "none": ("has no strategy to recommend", "have no strategy to recommend"),
}
#: The kind of an answer that its confidence alone decides.
KIND_OF_LEVEL = {"high": "sure", "medium": "condition"}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class Short:
    """The short answer to one question; texts are empty if nothing is known."""

    #: The choice; None if nothing can be recommended.
    strategy: str | None
    gpus: int | None
    #: The conclusion as one sentence, preceded by unknown requested values.
    claim: str
    #: `sure`, or which of KINDS it is.
    kind: str
    #: The training time (with a price: the cost), and below it its spread.
    value: str = ""
    value_note: str = ""
    #: Every remaining alternative: strategy, gpus, and its ratio to the choice with low and high.
    others: tuple[dict[str, Any], ...] = ()
    score: str = ""
    score_name: str = ""
    score_note: str = ""
    #: Whether the score may be worse than allowed.
    score_open: bool = False
    memory: str = ""
    memory_note: str = ""
    #: Fraction of the card's memory that the peak takes; None if the card is unknown.
    memory_share: float | None = None
    #: The next of a sure answer, and by how much: `fsdp × 2 takes 40 % longer, with 30 % less memory`.
    runner_up: str = ""
    #: The one reason for the confidence.
    reason: str = ""
    #: Where nothing can be recommended: what is the least that it takes, and what to try next.
    remedy: str = ""

    @property
    def name(self) -> str:
        """The choice and its workers: `ddp × 4`; empty without a choice."""
        return f"{self.strategy} × {self.gpus}" if self.strategy else ""


def none_left(candidates: Sequence[Candidate], margin: float) -> Short:
    """Return the answer if all candidates are excluded.

    `margin`: the fraction of a peak that is reserved on top of it.
    """
    kinds = Counter(c.kind for c in candidates)
    kind, count = kinds.most_common(1)[0]
    claim, verb = NONE_LEFT.get(kind, ("Every candidate is excluded.", "are excluded"))
    if len(kinds) > 1:
        claim = "Every candidate is excluded."
    remedy = what_would_fit(candidates, margin) if kind == "does not fit" else ""
    if all(c.diverged for c in candidates):
        claim, verb, remedy = "Every training diverged.", "diverged", STEADIER
    return Short(
        None, None, claim, "none", reason=f"{count} of {len(candidates)} {verb}", remedy=remedy
    )


def what_would_fit(candidates: Sequence[Candidate], margin: float) -> str:
    """Return the least memory that any candidate is known to need, and what needs less."""
    known = [(c.memory_bytes, c.name) for c in candidates if c.memory_bytes is not None]
    least = min(known, default=None)
    text = least and (
        f"The lowest need is {bytes_text(least[0] * (1 + margin))} per worker "
        f"({least[1]}{', including the reserve' if margin else ''}). "
    )
    tries = "More workers, activation checkpointing or a smaller batch need less memory"
    return f"{text or ''}{tries}; `plan` says which cells would fit."


def short_answer(
    candidates: Sequence[Candidate],
    ranking: Ranking,
    constraints: Constraints,
    sure: Confidence,
    unknown: Sequence[str],
    slowed: Sequence[str] = (),
) -> Short:
    """Return the answer on the candidates of one model.

    Args:
        candidates: Candidates.
        ranking: Their ranking.
        constraints: Constraints of the decision.
        sure: Confidence.
        unknown: Requested values that are unknown.
        slowed: How workers were slowed down on purpose.
    """
    first = ranking.first
    score_open = first.is_score_open(constraints)
    claim = claim_of(candidates, ranking, constraints, score_open)
    known = "Apart from that:" if first.projected else "Among the measured cells:"
    score, score_note = score_texts(candidates, first, constraints)
    memory, memory_note, share_of_card = memory_texts(first)
    # Among those as fast, the one that needs less memory was chosen already.
    leaner = "" if ranking.tied else leanest(first, [c.rival for c in ranking.compared])
    return Short(
        first.strategy,
        first.gpus,
        " ".join(
            [*unknown, known] * bool(unknown) + [f"With {text}:" for text in slowed] + [claim.text]
        ),
        KIND_OF_LEVEL.get(sure.level, claim.kind if claim.kind in KINDS else "low"),
        *with_rate(first, *value_texts(first)),
        others=tuple(
            {"strategy": c.rival.strategy, "gpus": c.rival.gpus}
            | dict(zip(("ratio", "low", "high"), c.ratio, strict=True))
            for c in ranking.compared
        ),
        score=score,
        score_name=first.score.name if score and not first.unscored else "",
        score_note=score_note,
        score_open=score_open,
        memory=memory,
        memory_note="; ".join(filter(None, (memory_note, leaner))),
        memory_share=share_of_card,
        runner_up=next_best(ranking) if sure.level == "high" else "",
        reason=sure.reason,
    )


# ---------------------------------------------------------------- its figures


def value_texts(c: Candidate) -> tuple[str, str]:
    """Return the time (or cost) of a candidate, and its runs' spread."""
    if c.cost is not None:
        return f"{c.cost:.3g}", f"for {duration(c.time_s)}"
    if c.time_s is None:
        return "", ""
    if not len(c.times):
        return duration(c.time_s), f"{amount(*c.reach)}–{duration(c.reach[1])} (80 %, projected)"
    if len(c.times) == 1:
        return duration(c.time_s), f"one {c.run}"
    low, high = interval_of(c.times.to_numpy(dtype=float))
    note = "95 %" if len(c.times) >= INTERVAL_FROM else f"in {counted(len(c.times), c.run)}"
    span = f"{amount(low, high)}–{duration(high)}"
    return duration(c.time_s), f"{span} ({note})" if note == "95 %" else f"{span} {note}"


def with_rate(c: Candidate, value: str, note: str) -> tuple[str, str]:
    """Return the texts of a value, with tokens per second in the note if text is trained.

    Args:
        c: The candidate.
        value: Text of the value.
        note: Text below it.
    """
    return value, "; ".join(filter(None, (note, c.rate_text)))


def interval_of(values_s: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a geometric mean by Student's t.

    A few values have their range instead.
    """
    if len(values_s) >= INTERVAL_FROM:
        _, low, high = mean_of_logs(np.log(values_s))
        if low is not None and high is not None:
            return low, high
    return float(values_s.min()), float(values_s.max())


def duration(seconds: float | None) -> str:
    """Return a time as text: seconds, from two hours on hours."""
    if seconds is None:
        return ""
    if seconds >= HOURS_FROM_S:
        return f"{seconds / 3600:.1f} h"
    return f"{grouped(seconds)} s"


def amount(low_s: float, high_s: float) -> str:
    """Return the low end of a span, in the unit of its high end."""
    return f"{low_s / 3600:.1f}" if high_s >= HOURS_FROM_S else grouped(low_s)


def grouped(value: float) -> str:
    """Return a number of three digits, with a thin space between thousands."""
    return f"{value:,.0f}".replace(",", "\u2009") if value >= 1000 else format_number(value, None)


def score_texts(
    candidates: Sequence[Candidate], first: Candidate, constraints: Constraints
) -> tuple[str, str]:
    """Return the score, and what is known of a possible loss.

    Args:
        candidates: Candidates.
        first: The choice.
        constraints: Constraints of the decision.
    """
    if first.unscored:
        return "not measured", "equal scores are assumed"
    if first.mean_score is None:
        return "", ""
    score, tolerance = first.score, constraints.tolerance_of(first.score)
    text = f"{first.mean_score:.{max(1, score.decimals - (1 if score.is_share else 0))}f} {score.shown_unit}"
    if first.score_loss_upper is None:
        return text, "not compared"
    left = [c for c in candidates if not c.kind and c is not first]
    lost = score.difference(first.score_loss_upper, score.decimals - 1)
    if first.is_score_open(constraints):
        return text, f"may lose up to {lost} ({tolerance:g} allowed)"
    if left and all(shares_score(first, c) for c in left):
        return text, "the same in all"
    if first.score_loss_upper <= 0:
        chance = chance_difference(first, first)
        if chance > tolerance:
            by_chance = score.difference(chance, score.decimals - 1)
            return text, f"the best here; chance makes {by_chance}"
        return text, "the best"
    return text, f"loses at most {lost} ({tolerance:g} allowed)"


def memory_texts(first: Candidate) -> tuple[str, str, float | None]:
    """Return a worker's peak, its limit, and the fraction of the card that it takes."""
    if first.memory_bytes is None:
        return "", "", None
    if first.on_cpu or first.memory_doubts or not first.card_bytes:
        base = "above its base" if first.on_cpu else ""
        note = "doubted by the audit" if first.memory_doubts else base
        return bytes_text(first.memory_bytes), note, None
    taken = first.memory_bytes / first.card_bytes
    held = first.memory_bytes / GIB
    peak = f"{held:.{1 if held >= 10 else 2}f} GiB"
    return peak, f"of {first.card_bytes / GIB:.0f} GiB", taken


def next_best(ranking: Ranking) -> str:
    """Return the next after the choice: `recomputed × 1 takes 28 % longer`."""
    if not ranking.compared:
        return ""
    c = ranking.compared[0]
    less = leanest(ranking.first, [c.rival]).partition(": ")[2]
    return behind(c, c.rival.name) + (f", with {less} memory" if less else "")


def leanest(first: Candidate, others: Sequence[Candidate]) -> str:
    """Return the alternative with clearly least memory: `fsdp × 2: 40 % less`."""
    own = first.sound_memory_bytes
    known = [(c.sound_memory_bytes, c.name) for c in others if c.sound_memory_bytes is not None]
    if not own or not known or min(known)[0] > (1 - CLEARLY_LESS) * own:
        return ""
    least, name = min(known)
    return f"{name}: {share(1 - least / own)} less"


# ---------------------------------------------------------------- all answers in a line


def lead_of(answers: Sequence[tuple[str, Short]]) -> str:
    """Return one line on all answers: (model, answer) of each.

    A sure one with its next.
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
        sentences.append(f"{number(len(sure)).capitalize()} {verb} sure: {listed}.")
    else:
        questions = "question" if len(answers) == 1 else "questions"
        opening = f"{number(len(answers)).capitalize()} {questions}, no sure answer yet"
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
            parts.append(f"{number(count)} {one if count == 1 else many}")
    if parts:
        text = joined_with_and(parts)
        sentences.append(f"{text[0].upper()}{text[1:]}.")
    return " ".join(sentences)


def number(count: int) -> str:
    """Return a small number as a word."""
    return _NUMBERS[count] if count < len(_NUMBERS) else str(count)
