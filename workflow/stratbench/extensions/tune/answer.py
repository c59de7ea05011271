"""Computes the answer of `tune` from its study's verdict."""

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
from stratbench.cell.text.words import format_bytes, format_count, format_short_time
from stratbench.extensions.tune.sieves import Sieved
from stratbench.extensions.tune.space import Combination
from stratbench.statistics.intervals import IntervalEstimate, compute_paired_ratios


@dataclass(frozen=True)
class MeasuredCombination:
    """A combination that was measured, with its step times and its memory.

    Attributes:
        step_s_by_block: Seconds per step in each block; None for a block without this combination.
        memory_bytes: Peak memory of a worker; None if no segment of a block ended.
        verdict_words: The combination's status in the verdict, as text.
    """

    combination: Combination
    step_s_by_block: tuple[float | None, ...]
    memory_bytes: int | None
    verdict_words: str

    @property
    def name(self) -> str:
        """Name of the combination's variant in config.yaml."""
        return self.combination.name

    @property
    def step_s(self) -> float | None:
        """Geometric mean of the seconds per step over blocks, or None without blocks."""
        known = [math.log(s) for s in self.step_s_by_block if s]
        return math.exp(fmean(known)) if known else None


@dataclass(frozen=True)
class Effect:
    """Effect of one choice on the time of a step, all else equal.

    Attributes:
        choice: Strategy, option or setting that has the effect.
        compared_with: Strategy that `choice` replaces; empty for the experiment's setting or the
            option's default.
        ratio: Time with the choice divided by the time without it.
        num_pairs: Number of pairs of combinations that differ in this choice alone.
        num_blocks: Number of blocks that all these pairs have.
    """

    choice: str
    compared_with: str
    ratio: IntervalEstimate
    num_pairs: int
    num_blocks: int


@dataclass(frozen=True)
class TuneAnswer:
    """Results of the blocks that a `tune` has measured so far."""

    verdict: Mapping[str, Any]
    comparison: Mapping[str, Any]
    baseline: str
    measured_combinations: tuple[MeasuredCombination, ...]
    device_memory_bytes: float | None

    def get_measured_combination(self, name: str | None) -> MeasuredCombination | None:
        """Return the measured combination of a name, or None if there is none."""
        return next((m for m in self.measured_combinations if m.name == name), None)

    @property
    def winning_combination(self) -> MeasuredCombination | None:
        """Combination that leads the verdict, or None before the first interim analysis."""
        return self.get_measured_combination(self.comparison["leader"])

    @property
    def pareto_front(self) -> list[MeasuredCombination]:
        """Pareto front: combinations that no other beats in both time and memory, fastest first."""
        fastest: list[MeasuredCombination] = []
        least = math.inf
        for m in sorted(
            self.measured_combinations, key=lambda m: (m.step_s or math.inf, m.memory_bytes or 0)
        ):
            if m.step_s and m.memory_bytes and m.memory_bytes < least:
                fastest.append(m)
                least = m.memory_bytes
        return fastest


def read_answer(
    results: Path, study: str, sieved: Sequence[Sieved], baseline: str
) -> TuneAnswer | None:
    """Return the results of the study that measures the combinations left by the filters.

    Args:
        results: The folder of results.
        study: Name of that study.
        sieved: Outcome of the filters for each combination.
        baseline: Name of the combination that the winner is compared with.

    Returns:
        The results, or None if the study has no verdict.
    """
    path = results / study / "verdict" / "verdict.json"
    if not path.exists():
        return None
    verdict = read_json(path)
    comparison = next(iter(verdict["comparisons"]), None)
    if comparison is None:
        return None
    peaks, words = (
        read_peak_memory_bytes(results / study),
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
    room = next((s.device_memory_bytes for s in sieved if s.device_memory_bytes is not None), None)
    return TuneAnswer(verdict, comparison, baseline, measured, room)


def read_peak_memory_bytes(study: Path) -> dict[str, int]:
    """Return the peak memory (bytes) of each strategy: the maximum over its segments and workers."""
    peaks: dict[str, int] = {}
    for path in sorted((study / "blocks").glob("*/*/*gpu/block*/segments/*/record.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        peak, name = record["memory"]["peak_bytes"], record["cell"]["strategy"]
        if record["status"] == "ok" and peak is not None:
            peaks[name] = max(peak, peaks.get(name, 0))
    return peaks


def estimate_choice_effects(measured: Sequence[MeasuredCombination], baseline: str) -> list[Effect]:
    """Return the effect of each choice on the time of a step.

    An effect is a mean over pairs of combinations that differ only in the choice.

    Args:
        measured: Measured combinations.
        baseline: Strategy that other strategies are compared with.
    """
    pairs: dict[tuple[str, str], list[np.ndarray]] = {}
    for more in measured:
        for less in measured:
            choice = _find_single_difference(more.combination, less.combination, baseline)
            both = np.array([more.step_s_by_block, less.step_s_by_block], dtype=float)
            if choice is not None and np.isfinite(both).all(0).any():
                pairs.setdefault(choice, []).append(both)
    columns = {choice: _average_common_blocks(each) for choice, each in pairs.items()}
    ratios = compute_paired_ratios(list(columns.values()), [False] * len(columns))
    return [
        Effect(*choice, ratio, len(pairs[choice]), columns[choice].shape[1])
        for choice, ratio in zip(columns, ratios, strict=True)
    ]


def _average_common_blocks(pairs: Sequence[np.ndarray]) -> np.ndarray:
    """Return two choices' mean step times per block, shape [2, blocks].

    The means are geometric, over the blocks that all pairs have.
    """
    logs = np.log(np.stack(pairs))
    whole = np.isfinite(logs).all((0, 1))
    if not whole.any():  # no block has all pairs: use the pair with the most blocks
        logs = max(logs, key=lambda pair: np.isfinite(pair).all(0).sum())[None]
        whole = np.isfinite(logs).all((0, 1))
    return np.exp(logs[..., whole].mean(0))


def _find_single_difference(
    more: Combination, less: Combination, baseline: str
) -> tuple[str, str] | None:
    """Return the single choice in which `more` differs from `less`, and its alternative.

    Return None if they differ in several choices, or in none.
    """
    if more.strategy != less.strategy:
        alone = not more.options and not less.options and less.strategy == baseline
        return (more.strategy, baseline) if alone and more.settings == less.settings else None
    if more.settings == less.settings and more.options and not less.options:
        return f"{more.strategy} {_join_values(more.options)}", ""
    own = {k: v for k, v in more.settings.items() if less.settings.get(k) != v}
    if more.options == less.options and len(own) == 1 and {**less.settings, **own} == more.settings:
        (key,) = own
        return (_join_values(own), "") if key not in less.settings else None
    return None


def _join_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {json.dumps(value).strip(chr(34))}" for key, value in values.items())


def describe_answer(answer: TuneAnswer) -> Iterator[str]:
    """Yield the lines of the answer, at most a screen."""
    winner = answer.winning_combination
    if winner is None:
        yield f"No result yet: {answer.comparison['text']}"
        return
    yield answer.comparison["text"]
    yield f"  {compare_with_baseline(answer, winner)}"
    yield f"  {describe_memory_use(answer, winner)}"
    yield f"  {describe_further_gain(answer)}"
    effects = estimate_choice_effects(answer.measured_combinations, answer.baseline)
    if effects:
        yield "Effect of each choice on the time of a step, as a ratio with all else equal:"
        yield from (f"  {describe_effect(effect)}" for effect in effects)


def compare_with_baseline(answer: TuneAnswer, winner: MeasuredCombination) -> str:
    """Return a sentence that compares the winner's time with the baseline's."""
    name = answer.baseline
    if winner.name == name:
        return f"The fastest combination is the baseline, {name}."
    ratio = next((r for r in answer.comparison["ratios"] if r["strategy"] == name), None)
    if ratio is None or ratio["ratio"] is None:
        reason = ratio["reason"] if ratio else "it was not measured"
        return (
            f"The baseline, {name}, has no measured time to compare with: {reason or 'no block'}."
        )
    interval = "" if ratio["low"] is None else f" (95 %: {ratio['low']:.3f} to {ratio['high']:.3f})"
    against = ratio["against"]
    of = "" if against == winner.name else f" of {against}, which was fastest at that time"
    return f"The baseline, {name}, takes {ratio['ratio']:.3f} times the time{of}{interval}."


def describe_memory_use(answer: TuneAnswer, winner: MeasuredCombination) -> str:
    """Return a sentence on the winner's memory per worker and the memory left free."""
    peak, room = winner.memory_bytes, answer.device_memory_bytes
    if peak is None:
        return "The memory of the fastest combination was not measured."
    if room is None:
        return f"The fastest combination needs {format_bytes(peak)} per worker."
    left = room - peak
    words = f"{format_bytes(left)} are free" if left >= 0 else f"{format_bytes(-left)} too much"
    return f"The fastest combination needs {format_bytes(peak)} of {format_bytes(room)} per worker: {words}."


def describe_further_gain(answer: TuneAnswer) -> str:
    """Return a sentence on the largest possible further gain and the cost to find it."""
    comparison, verdict = answer.comparison, answer.verdict
    rivals = [r["strategy"] for r in comparison["ratios"] if r["state"] in ("open", "equal")]
    if not rivals:
        return "Every other combination is slower: further blocks gain nothing."
    gain = comparison["at_most"]
    text = f"{format_count(len(rivals), 'combination')} may be as fast as the fastest"
    blocks = comparison["blocks"]
    each = comparison["block_gpu_hours"] / max(blocks, 1)
    share = (len(rivals) + 1.5) / (len(comparison["strategies"]) + 0.5)
    cost = f"another block of them takes about {share * each:.2g} {verdict['hours']}"
    may = "" if gain is None else f", or up to {100 * gain:.1f} % faster"
    return f"{text}{may}; {cost}. {format_count(blocks, 'block')} were measured."


def describe_effect(effect: Effect) -> str:
    """Return an effect as text: the choice, its alternative, the ratio and the evidence."""
    over = f" over {effect.compared_with}" if effect.compared_with else ""
    return (
        f"{effect.choice}{over}: "
        f"{effect.ratio.format_text('{:.3f}'.format)}{describe_effect_evidence(effect)}"
    )


def describe_effect_evidence(effect: Effect) -> str:
    """Return the number of pairs and blocks on which an effect rests."""
    sure = "" if effect.ratio.low is not None else "one block gives no interval; "
    return f" ({sure}{format_count(effect.num_pairs, 'pair')}, {format_count(effect.num_blocks, 'block')})"


def format_step_time(combination: MeasuredCombination) -> str:
    """Return the time per step as text, or the reason why it is unknown."""
    return (
        format_short_time(combination.step_s) if combination.step_s else combination.verdict_words
    )
