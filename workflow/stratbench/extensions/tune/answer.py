"""The answer of `tune`, from its study's verdict: the fastest, its gain, and effects of choices."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from stratbench.cell.files import read_json
from stratbench.cell.text.words import bytes_text, counted, short_time
from stratbench.extensions.tune.sieves import Sieved
from stratbench.extensions.tune.space import Combination
from stratbench.statistics.intervals import IntervalEstimate, paired_ratios


@dataclass(frozen=True)
class MeasuredCombination:
    """A measured combination: seconds per step by block (None: not in it), and its memory.

    `memory_bytes`: the peak of a worker; None where no segment ended. `standing`: its status in the verdict.
    """

    combination: Combination
    steps_s: tuple[float | None, ...]
    memory_bytes: int | None
    standing: str

    @property
    def name(self) -> str:
        """The name of its variant."""
        return self.combination.name

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, the geometric mean of its blocks."""
        known = [math.log(s) for s in self.steps_s if s]
        return math.exp(fmean(known)) if known else None


@dataclass(frozen=True)
class Effect:
    """Effect of one choice on a step's time, all else equal: a ratio with its interval.

    `choice` is compared with `over`; empty: with the experiment's setting or the option's default.
    """

    choice: str
    over: str
    ratio: IntervalEstimate
    pairs: int
    blocks: int


@dataclass(frozen=True)
class TuneAnswer:
    """Results of the blocks of a `tune` so far."""

    verdict: Mapping[str, Any]
    comparison: Mapping[str, Any]
    baseline: str
    measured: tuple[MeasuredCombination, ...]
    device_bytes: float | None

    def of(self, name: str | None) -> MeasuredCombination | None:
        """Return a combination that was measured, by its name."""
        return next((m for m in self.measured if m.name == name), None)

    @property
    def winner(self) -> MeasuredCombination | None:
        """The one that leads, or None before the first look."""
        return self.of(self.comparison["leader"])

    @property
    def front(self) -> list[MeasuredCombination]:
        """Combinations that no other beats in both time and memory, fastest first."""
        fastest: list[MeasuredCombination] = []
        least = math.inf
        for m in sorted(self.measured, key=lambda m: (m.step_s or math.inf, m.memory_bytes or 0)):
            if m.step_s and m.memory_bytes and m.memory_bytes < least:
                fastest.append(m)
                least = m.memory_bytes
        return fastest


def read_answer(
    results: Path, study: str, sieved: Sequence[Sieved], baseline: str
) -> TuneAnswer | None:
    """Return the answer of the study that measures what the sieves left.

    Return None if it has no verdict.

    Args:
        results: The folder of results.
        study: That study.
        sieved: What became of each combination.
        baseline: Name of what the winner is held against.
    """
    path = results / study / "verdict" / "verdict.json"
    if not path.exists():
        return None
    verdict = read_json(path)
    comparison = next(iter(verdict["comparisons"]), None)
    if comparison is None:
        return None
    peaks, words = (
        read_peaks(results / study),
        {r["strategy"]: r["words"] for r in comparison["ratios"]},
    )
    by_name = {s.combination.name: s.combination for s in sieved}
    measured = tuple(
        MeasuredCombination(
            by_name[strategy],
            tuple(comparison["step_s"][strategy]),
            peaks.get(strategy),
            words[strategy],
        )
        for strategy in comparison["strategies"]
        if strategy in by_name
    )
    room = next((s.device_bytes for s in sieved if s.device_bytes is not None), None)
    return TuneAnswer(verdict, comparison, baseline, measured, room)


def read_peaks(study: Path) -> dict[str, int]:
    """Return the maximum worker's peak in the segments of each strategy of a study."""
    peaks: dict[str, int] = {}
    for path in sorted((study / "blocks").glob("*/*/*gpu/block*/segments/*/record.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        peak, name = record["memory"]["peak_bytes"], record["cell"]["strategy"]
        if record["status"] == "ok" and peak is not None:
            peaks[name] = max(peak, peaks.get(name, 0))
    return peaks


def effects_of(measured: Sequence[MeasuredCombination], baseline: str) -> list[Effect]:
    """Return the effect of each choice on a step's time, over pairs that differ in nothing else.

    Args:
        measured: Measured combinations.
        baseline: The strategy to compare with.
    """
    pairs: dict[tuple[str, str], list[np.ndarray]] = {}
    for more in measured:
        for less in measured:
            choice = _choice(more.combination, less.combination, baseline)
            both = np.array([more.steps_s, less.steps_s], dtype=float)
            if choice is not None and np.isfinite(both).all(0).any():
                pairs.setdefault(choice, []).append(both)
    columns = {choice: _in_common(each) for choice, each in pairs.items()}
    ratios = paired_ratios(list(columns.values()), [False] * len(columns))
    return [
        Effect(*choice, ratio, len(pairs[choice]), columns[choice].shape[1])
        for choice, ratio in zip(columns, ratios, strict=True)
    ]


def _in_common(pairs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the geometric means of pairs [2, blocks], over their common blocks."""
    logs = np.log(np.stack(pairs))
    whole = np.isfinite(logs).all((0, 1))
    if not whole.any():  # pairs that came back to the comparison: the one in most blocks
        logs = max(logs, key=lambda pair: np.isfinite(pair).all(0).sum())[None]
        whole = np.isfinite(logs).all((0, 1))
    return np.exp(logs[..., whole].mean(0))


def _choice(more: Combination, less: Combination, baseline: str) -> tuple[str, str] | None:
    """Return the only difference between `more` and `less`, or None if there are several."""
    if more.strategy != less.strategy:
        alone = not more.options and not less.options and less.strategy == baseline
        return (more.strategy, baseline) if alone and more.settings == less.settings else None
    if more.settings == less.settings and more.options and not less.options:
        return f"{more.strategy} {_said(more.options)}", ""
    own = {k: v for k, v in more.settings.items() if less.settings.get(k) != v}
    if more.options == less.options and len(own) == 1 and {**less.settings, **own} == more.settings:
        (key,) = own
        return (_said(own), "") if key not in less.settings else None
    return None


def _said(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {json.dumps(value).strip(chr(34))}" for key, value in values.items())


def answer_lines(answer: TuneAnswer) -> Iterator[str]:
    """Yield the answer on one screen."""
    winner = answer.winner
    if winner is None:
        yield f"Nothing is known yet: {answer.comparison['text']}"
        return
    yield answer.comparison["text"]
    yield f"  {against_baseline(answer, winner)}"
    yield f"  {memory_left(answer, winner)}"
    yield f"  {further_cost(answer)}"
    effects = effects_of(answer.measured, answer.baseline)
    if effects:
        yield "What mattered, times as long where all else is equal:"
        yield from (f"  {effect_text(effect)}" for effect in effects)


def against_baseline(answer: TuneAnswer, winner: MeasuredCombination) -> str:
    """Return how much faster the winner is than the baseline."""
    name = answer.baseline
    if winner.name == name:
        return f"It is the baseline, {name}."
    ratio = next((r for r in answer.comparison["ratios"] if r["strategy"] == name), None)
    if ratio is None or ratio["ratio"] is None:
        reason = ratio["reason"] if ratio else "it was not measured"
        return f"The baseline, {name}, has no time to hold it against: {reason or 'no block'}."
    interval = "" if ratio["low"] is None else f" (95 %: {ratio['low']:.3f} to {ratio['high']:.3f})"
    against = ratio["against"]
    of = "" if against == winner.name else f" of {against}, which led then"
    return f"The baseline, {name}, takes {ratio['ratio']:.3f} times the time{of}{interval}."


def memory_left(answer: TuneAnswer, winner: MeasuredCombination) -> str:
    """Return how much of a worker's memory the winner leaves."""
    peak, room = winner.memory_bytes, answer.device_bytes
    if peak is None:
        return "Its memory was not measured."
    if room is None:
        return f"It takes {bytes_text(peak)} per worker."
    left = room - peak
    words = (
        f"{bytes_text(left)} are left" if left >= 0 else f"{bytes_text(-left)} more than there is"
    )
    return f"It takes {bytes_text(peak)} of {bytes_text(room)} per worker: {words}."


def further_cost(answer: TuneAnswer) -> str:
    """Return what may still be gained, and what finding it would cost."""
    comparison, verdict = answer.comparison, answer.verdict
    rivals = [r["strategy"] for r in comparison["ratios"] if r["state"] in ("open", "equal")]
    if not rivals:
        return "Every other one is slower: nothing is left to gain."
    gain = comparison["at_most"]
    text = f"{counted(len(rivals), 'combination')} not told apart from it"
    blocks = comparison["blocks"]
    each = comparison["block_gpu_hours"] / max(blocks, 1)
    share = (len(rivals) + 1.5) / (len(comparison["strategies"]) + 0.5)
    cost = f"a further block of these takes about {share * each:.2g} {verdict['hours']}"
    may = "" if gain is None else f" may be up to {100 * gain:.1f} % faster"
    return f"{text}{may}; {cost}. {counted(blocks, 'block')} were measured."


def effect_text(effect: Effect) -> str:
    """Return an effect in words."""
    over = f" over {effect.over}" if effect.over else ""
    return f"{effect.choice}{over}: {effect.ratio.text('{:.3f}'.format)}{evidence_text(effect)}"


def evidence_text(effect: Effect) -> str:
    """Return what an effect rests on."""
    sure = "" if effect.ratio.low is not None else "no interval by one block; "
    return f" ({sure}{counted(effect.pairs, 'pair')}, {counted(effect.blocks, 'block')})"


def time_text(m: MeasuredCombination) -> str:
    """Return the time per step, or the reason why there is none."""
    return short_time(m.step_s) if m.step_s else m.standing
