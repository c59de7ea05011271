"""A decision in a few words: a row of the report, a line of a terminal.

One number and its unit a sentence, the rival last; `ddp × 2` is ddp on 2 workers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.ranking import AgainstRival, Ranking
from stratbench.analysis.decision.tolerance import chance_difference, shares_score
from stratbench.analysis.records.measures import format_number
from stratbench.cell.text.words import GIB, bytes_text, counted
from stratbench.statistics.moderated import ROUGH

#: The number of runs from which a time has an interval of its own, and not the range of its runs.
INTERVAL_FROM = 5
#: From so many seconds on a time is told in hours.
HOURS_FROM_S = 7200
#: What is said where every candidate is excluded, by the kind that most of them share.
NONE_LEFT = {
    "does not fit": ("No candidate fits the memory.", "do not fit"),
    "too slow": ("No candidate ends in time.", "are too slow"),
    "refused": ("Every strategy refuses this network.", "were refused"),
    "failed": ("Every cell failed.", "failed"),
    "does not learn": ("No candidate learns.", "do not learn"),
    "unusable record": ("No record can be used.", "are unusable"),
    "worse score": ("Every candidate loses too much.", "lose too much"),
}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class Short:
    """The answer to one question in a few words; texts are empty where nothing is known."""

    #: The choice; None if nothing can be recommended.
    strategy: str | None
    gpus: int | None
    #: What kind of answer it is, in one sentence.
    claim: str
    #: The training time (with a price: the cost), and below it how far it scatters.
    value: str = ""
    value_note: str = ""
    #: Every rival that is left: strategy, gpus, and its ratio to the choice with low and high.
    others: tuple[dict[str, Any], ...] = ()
    score: str = ""
    score_note: str = ""
    #: Whether the score may be worse than allowed.
    score_open: bool = False
    memory: str = ""
    memory_note: str = ""
    #: Of the card's memory, the share that the peak takes; None where no card is known.
    memory_share: float | None = None
    #: The one reason for the confidence.
    why: str = ""


def times(c: Candidate) -> str:
    """A candidate's name: `ddp × 4`."""
    return f"{c.strategy} × {c.gpus}"


def short_answer(
    found: Sequence[Candidate],
    ranking: Ranking | None,
    given: Constraints,
    level: str,
    slowed: bool,
) -> Short:
    """The answer on the candidates `found` of one model; `level`: its confidence."""
    if ranking is None:
        kinds = Counter(c.kind for c in found)
        kind, count = kinds.most_common(1)[0]
        claim, verb = NONE_LEFT.get(kind, ("Every candidate is excluded.", "are excluded"))
        if len(kinds) > 1:
            claim = "Every candidate is excluded."
        return Short(None, None, claim, why=f"{count} of {len(found)} {verb}")
    first = ranking.first
    score, score_note, score_open = score_texts(found, first, given)
    memory, memory_note, share = memory_texts(first)
    return Short(
        first.strategy,
        first.gpus,
        claim_of(ranking, given, score_open),
        *value_texts(first),
        others=tuple(
            {
                "strategy": c.rival.strategy,
                "gpus": c.rival.gpus,
                "ratio": c.ratio,
                "low": c.low,
                "high": c.high,
            }
            for c in ranking.compared
        ),
        score=score,
        score_note=score_note,
        score_open=score_open,
        memory=memory,
        memory_note=memory_note,
        memory_share=share,
        why=reason_of(ranking, given, level, score_open, slowed),
    )


# ---------------------------------------------------------------- what is claimed


def claim_of(ranking: Ranking, given: Constraints, score_open: bool) -> str:
    """What kind of answer it is: a winner, a tie, not told apart, one run, projected."""
    first = ranking.first
    best = "Fastest" if first.price_per_gpu_hour is None else "Cheapest"
    but = f", but {first.score.name} may be lost" if score_open else ""
    margin = f"{100 * given.equivalence_margin:g} %"
    if first.projected:
        ties = [c for c in ranking.compared if c.stand == "tied"]
        told = f"{best} as projected" if not ties else f"Not told apart from {times(ties[0].rival)}"
        return f"{told}: nothing was measured on {counted(first.gpus, 'worker')}."
    if not ranking.compared:
        return f"The only one left{but}."
    if len(first.times) < 2:
        one = f"in one {'run' if first.unit == 'repeat' else first.unit} each"
        if any(c.ratio < 1 for c in ranking.compared):
            return f"Within {margin} of the best, {one}{but}."
        return f"{best}, {one}{but}."
    ties = [c for c in ranking.compared if c.stand == "tied"]
    if not ties:
        return f"{best}{but}." if but else f"{best}: {behind(ranking.compared[0])}."
    names = " and ".join(times(c.rival) for c in ties[:2])
    if len(ties) > 2:
        names = f"{times(ties[0].rival)} and {len(ties) - 1} more"
    if all(c.ratio <= 1 + given.equivalence_margin + 1e-12 for c in ties):
        return (
            f"As {best.lower().removesuffix('est')} as {names} within {margin}"
            f"{advantage(first, [c.rival for c in ties])}{but}."
        )
    return f"Not told apart from {names}{but}."


def behind(c: AgainstRival) -> str:
    """How much longer the next takes: `the next takes 9 % longer`."""
    if c.rival.price_per_gpu_hour is not None:
        return f"the next costs {share(c.ratio - 1)} more"
    return f"the next takes {share(c.ratio - 1)} longer"


def share(part: float) -> str:
    """A share as text: `9 %`, `0.4 %`, and from twice on a factor is told by the caller's words."""
    return f"{100 * part:.0f} %" if part >= 0.0095 else f"{100 * part:.1f} %"


def advantage(first: Candidate, ties: Sequence[Candidate]) -> str:
    """What the choice has before all that are as fast: fewer workers, or less memory."""
    if all(first.gpus < c.gpus for c in ties):
        return ", on fewer workers"
    known = [c.memory_bytes for c in ties if c.memory_bytes is not None]
    if first.memory_bytes and len(known) == len(ties):
        saved = min(known) - first.memory_bytes
        if saved >= 0.03 * first.memory_bytes:
            return f", and needs {bytes_text(saved)} less"
    return ""


# ---------------------------------------------------------------- its figures


def value_texts(c: Candidate) -> tuple[str, str]:
    """The time (with a price the cost) of a candidate, and below it how far its runs scatter."""
    if c.cost is not None:
        return f"{c.cost:.3g}", f"for {duration(c.time_s)}"
    if c.time_s is None:
        return "", ""
    runs = counted(len(c.times), "run" if c.unit == "repeat" else c.unit)
    if not len(c.times):
        return duration(c.time_s), f"{amount(*c.reach)}–{duration(c.reach[1])} (80 %, projected)"
    if len(c.times) == 1:
        return duration(c.time_s), f"one {'run' if c.unit == 'repeat' else c.unit}"
    low, high = interval_of(c.times.to_numpy(dtype=float))
    note = "95 %" if len(c.times) >= INTERVAL_FROM else f"in {runs}"
    span = f"{amount(low, high)}–{duration(high)}"
    return duration(c.time_s), f"{span} ({note})" if note == "95 %" else f"{span} {note}"


def interval_of(values_s: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of a geometric mean by Student's t; of few values their range."""
    if len(values_s) < INTERVAL_FROM:
        return float(values_s.min()), float(values_s.max())
    from scipy.special import stdtrit  # takes 0.2 s

    logs = np.log(values_s)
    half = stdtrit(len(logs) - 1, 0.975) * logs.std(ddof=1) / math.sqrt(len(logs))
    return float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))


def duration(seconds: float | None) -> str:
    """A time as text: seconds, from two hours on hours."""
    if seconds is None:
        return ""
    if seconds >= HOURS_FROM_S:
        return f"{seconds / 3600:.1f} h"
    return f"{grouped(seconds)} s"


def amount(low_s: float, high_s: float) -> str:
    """The low end of a span, in the unit of its high end."""
    return f"{low_s / 3600:.1f}" if high_s >= HOURS_FROM_S else grouped(low_s)


def grouped(value: float) -> str:
    """A number of three digits, with a thin space between thousands."""
    return f"{value:,.0f}".replace(",", "\u2009") if value >= 1000 else format_number(value, None)


def score_texts(
    found: Sequence[Candidate], first: Candidate, given: Constraints
) -> tuple[str, str, bool]:
    """The score, what is known of what may be lost, and whether that may be more than allowed."""
    if first.unscored:
        return "not measured", "equal scores are assumed", False
    if first.mean_score is None:
        return "", "", False
    score, tolerance = first.score, given.tolerance_of(first.score)
    text = f"{first.mean_score:.{max(1, score.decimals - (1 if score.is_share else 0))}f} {score.shown_unit}"
    if first.may_lose is None:
        return text, "not compared", False
    left = [c for c in found if not c.kind and c is not first]
    if first.may_lose > tolerance:
        lost = score.difference(first.may_lose, score.decimals - 1)
        return text, f"may lose up to {lost} ({tolerance:g} allowed)", True
    if left and all(shares_score(first, c) for c in left):
        return text, "the same in all", False
    if first.may_lose <= 0:
        chance = chance_difference(first, first)
        if chance > tolerance:
            by_chance = score.difference(chance, score.decimals - 1)
            return text, f"the best here; chance makes {by_chance}", False
        return text, "the best", False
    lost = score.difference(first.may_lose, score.decimals - 1)
    return text, f"loses at most {lost} ({tolerance:g} allowed)", False


def memory_texts(first: Candidate) -> tuple[str, str, float | None]:
    """The peak of a worker, what it stands against, and the share of the card that it takes."""
    if first.memory_bytes is None:
        return "", "", None
    if first.on_cpu:
        return bytes_text(first.memory_bytes), "above its base", None
    if not first.card_bytes:
        return bytes_text(first.memory_bytes), "", None
    taken = first.memory_bytes / first.card_bytes
    held = first.memory_bytes / GIB
    return f"{held:.{1 if held >= 10 else 2}f} of {first.card_bytes / GIB:.0f} GiB", "", taken


# ---------------------------------------------------------------- how sure


def reason_of(
    ranking: Ranking, given: Constraints, level: str, score_open: bool, slowed: bool
) -> str:
    """The one reason for the confidence: of what limits it, what comes first."""
    first = ranking.first
    runs = counted(ranking.repeats, "run" if first.unit == "repeat" else first.unit)
    if slowed == given.homogeneous:
        return "workers were slowed on purpose" if slowed else "unequal workers were not measured"
    if first.projected:
        return "projected: not measured there"
    if not ranking.compared:
        return f"{runs}, without a rival"
    if ranking.at_most is None:
        if len(first.times) < 2:
            return f"one {'run' if first.unit == 'repeat' else first.unit} each: may be chance"
        return "some were measured once: may be chance"
    if level == "low" or (not ranking.is_clear and ranking.at_most > given.equivalence_margin):
        quickest = min(
            (c for c in ranking.compared if c.low is not None and c.low < 1),
            key=lambda c: c.low or 0.0,
            default=None,
        )
        if quickest is not None:
            least = 1 - (quickest.low or 0.0)
            less = "much less" if least > ROUGH * 5 else f"{share(least)} less"
            return (
                f"{times(quickest.rival)} may {'cost' if first.cost is not None else 'take'} {less}"
            )
    limits = list(limits_of(ranking, score_open, runs))
    if limits:
        return limits[0]
    if not ranking.is_clear:
        return f"equal within {100 * given.equivalence_margin:g} %: either will do"
    hosts = set.union(set(), *(c.hosts for c in (first, *(r.rival for r in ranking.compared))))
    return f"{runs} on {counted(len(hosts), 'host')}, no doubts"


def limits_of(ranking: Ranking, score_open: bool, runs: str) -> Iterator[str]:
    """What keeps a clear order from being sure."""
    first, rivals = ranking.first, [c.rival for c in ranking.compared]
    if score_open:
        yield f"{runs}: the score is not certain"
    if first.doubts:
        more = f" and {len(first.doubts) - 1} more" if len(first.doubts) > 1 else ""
        yield f"doubted by the audit: {first.doubts[0]}{more}"
    nearest = next((c.rival for c in ranking.nearest if c.rival.doubts), None)
    if nearest is not None:
        yield f"{times(nearest)} is doubted by the audit: {nearest.doubts[0]}"
    if ranking.repeats < 3:
        yield f"{runs} each"
    if min(len(c.hosts) for c in (first, *rivals)) < 2:
        yield f"{runs} on one host"
    if first.on_cpu:
        yield "CPU processes, not GPUs"


# ---------------------------------------------------------------- all answers in a line


def lead_of(answers: Sequence[tuple[str, str, Short]]) -> str:
    """One line on all answers: (model, confidence, answer) of each."""
    sure = [(model, a) for model, level, a in answers if level == "high"]
    rest = [(model, level, a) for model, level, a in answers if level != "high"]
    if not answers:
        return ""
    told = []
    if sure:
        names = [f"{a.strategy} × {a.gpus} for {model}" for model, a in sure]
        listed = "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")
        verb = "answer is" if len(sure) == 1 else "answers are"
        told.append(f"{number(len(sure)).capitalize()} {verb} sure: {listed}.")
    else:
        questions = "question" if len(answers) == 1 else "questions"
        told.append(f"{number(len(answers)).capitalize()} {questions}, no sure answer yet.")
    groups = Counter(kind_of(level, a) for _, level, a in rest)
    parts = []
    for kind, (one, many) in KINDS.items():
        if count := groups[kind]:
            parts.append(f"{number(count)} {one if count == 1 else many}")
    if parts:
        text = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
        told.append(f"{text[0].upper()}{text[1:]}.")
    return " ".join(told)


#: What is said of the answers that are not sure, by kind: of one, of several.
KINDS = {
    "condition": ("holds with a condition", "hold with a condition"),
    "one run": ("rests on one run of each cell", "rest on one run of each cell"),
    "apart": ("does not tell the first two apart", "do not tell the first two apart"),
    "low": ("has a low confidence", "have a low confidence"),
    "theory": ("is from theory alone", "are from theory alone"),
    "none": ("has no strategy to recommend", "have no strategy to recommend"),
}


def kind_of(level: str, a: Short) -> str:
    """Which of KINDS an answer is that is not sure."""
    if a.strategy is None:
        return "none"
    if level == "none":
        return "theory"
    if level == "medium":
        return "condition"
    if a.why.startswith("one "):
        return "one run"
    return "apart" if a.claim.startswith("Not told apart") else "low"


def number(count: int) -> str:
    """A small number as a word."""
    return _NUMBERS[count] if count < len(_NUMBERS) else str(count)
