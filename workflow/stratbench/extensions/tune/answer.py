"""Computes the answer of `tune` from the verdict of the study that it runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from stratbench.cell.files import read_json
from stratbench.cell.text.words import format_bytes, format_count, format_short_time
from stratbench.extensions.tune.sieves import FilterResult
from stratbench.extensions.tune.space import Combination
from stratbench.statistics.intervals import IntervalEstimate, compute_paired_ratios


@dataclass(frozen=True)
class MeasuredCombination:
    """A measured combination, with its step times and its memory.

    Attributes:
        step_s_by_block: Seconds per step in each block (a group of short timed runs of the combinations);
            None for a block without this combination.
        memory_bytes: Largest peak memory of a worker; None if no segment ended well.
        status_in_verdict: State of the combination in the verdict in words, such as `not told apart`.
    """

    combination: Combination
    step_s_by_block: tuple[float | None, ...]
    memory_bytes: int | None
    status_in_verdict: str

    @property
    def name(self) -> str:
        """Name of the combination's variant in config.yaml."""
        return self.combination.name

    @property
    def mean_step_s(self) -> float | None:
        """Seconds per step as a geometric mean over the blocks, or None without blocks."""
        known = [s for s in self.step_s_by_block if s]
        return geometric_mean(known) if known else None


@dataclass(frozen=True)
class Effect:
    """Effect of one choice (a strategy, an option or a setting) on the time per step.

    Attributes:
        choice: The strategy, option or setting, as text.
        reference_strategy: Strategy that the chosen strategy is compared with. It is empty for an option or
            setting, which is compared with its default.
        time_ratio: Time per step with the choice, divided by the time without it.
        num_pairs: Number of pairs of combinations that differ only in this choice.
        num_blocks: Number of blocks in which all these pairs were measured.
    """

    choice: str
    reference_strategy: str
    time_ratio: IntervalEstimate
    num_pairs: int
    num_blocks: int


@dataclass(frozen=True)
class TuneAnswer:
    """Results of the blocks that `tune` has measured so far."""

    #: Content of verdict.json.
    verdict_content: Mapping[str, Any]
    #: Entry of the only comparison in verdict.json.
    comparison_entry: Mapping[str, Any]
    baseline_strategy: str
    measured_combinations: tuple[MeasuredCombination, ...]
    device_memory_bytes: float | None

    @property
    def winning_combination(self) -> MeasuredCombination | None:
        """Fastest combination according to the verdict, or None before its first interim analysis."""
        leader = self.comparison_entry["leader"]
        return next((m for m in self.measured_combinations if m.name == leader), None)

    @property
    def pareto_front(self) -> list[MeasuredCombination]:
        """Combinations than which no other has both less time and less memory, fastest first."""
        fastest: list[MeasuredCombination] = []
        least = math.inf
        for m in sorted(
            self.measured_combinations,
            key=lambda m: (m.mean_step_s or math.inf, m.memory_bytes or 0),
        ):
            if m.mean_step_s and m.memory_bytes and m.memory_bytes < least:
                fastest.append(m)
                least = m.memory_bytes
        return fastest


def read_tune_answer(
    results: Path, study: str, filter_results: Sequence[FilterResult], baseline: str
) -> TuneAnswer | None:
    """Return the results of the study that measures the remaining combinations.

    Args:
        results: The folder of results.
        study: Name of this study.
        filter_results: Outcome of the filters for each combination.
        baseline: Strategy that the user trains with today.

    Returns:
        The results, or None if the study has no verdict yet.
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
    by_name = {s.combination.name: s.combination for s in filter_results}
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
    room = next(
        (s.device_memory_bytes for s in filter_results if s.device_memory_bytes is not None), None
    )
    return TuneAnswer(verdict, comparison, baseline, measured, room)


def read_peak_memory_bytes(study_dir: Path) -> dict[str, int]:
    """Return the largest peak memory in bytes of each strategy, over its segments and workers.

    Args:
        study_dir: The folder results/<study>.
    """
    peaks: dict[str, int] = {}
    for path in sorted((study_dir / "blocks").glob("*/*/*gpu/block*/segments/*/record.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        peak, name = record["memory"]["peak_bytes"], record["cell"]["strategy"]
        if record["status"] == "ok" and peak is not None:
            peaks[name] = max(peak, peaks.get(name, 0))
    return peaks


def estimate_choice_effects(measured: Sequence[MeasuredCombination], baseline: str) -> list[Effect]:
    """Return the effect of each choice on the time per step.

    An effect is a mean over the pairs of combinations that differ only in this choice.

    Args:
        measured: Measured combinations.
        baseline: Strategy that other strategies are compared with.
    """
    pairs: dict[tuple[str, str], list[np.ndarray]] = {}
    for chosen in measured:
        for default in measured:
            choice = _find_choice_and_alternative(chosen.combination, default.combination, baseline)
            times_s = np.array([chosen.step_s_by_block, default.step_s_by_block], dtype=float)
            if choice is not None and np.isfinite(times_s).all(0).any():
                pairs.setdefault(choice, []).append(times_s)
    columns = {
        choice: _average_step_times_over_common_blocks(each) for choice, each in pairs.items()
    }
    ratios = compute_paired_ratios(list(columns.values()), [False] * len(columns))
    return [
        Effect(*choice, ratio, len(pairs[choice]), columns[choice].shape[1])
        for choice, ratio in zip(columns, ratios, strict=True)
    ]


def _average_step_times_over_common_blocks(pairs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the step times per block, averaged geometrically over pairs, shape [2, blocks].

    Only blocks with all pairs count. If there are none, only the pair with the most blocks counts.

    Args:
        pairs: Step times with and without a choice per block, shape [2, blocks], for each pair.
    """
    logs = np.log(np.stack(pairs))
    has_all_pairs = np.isfinite(logs).all((0, 1))
    if not has_all_pairs.any():
        logs = max(logs, key=lambda pair: np.isfinite(pair).all(0).sum())[None]
        has_all_pairs = np.isfinite(logs).all((0, 1))
    return np.exp(logs[..., has_all_pairs].mean(0))


def _find_choice_and_alternative(
    chosen: Combination, default: Combination, baseline: str
) -> tuple[str, str] | None:
    """Return the only choice in which two combinations differ, and its alternative.

    Args:
        chosen: Combination with the choice.
        default: Combination with the default instead.
        baseline: Strategy that other strategies are compared with.

    Returns:
        The choice as text, and the baseline if the choice is a strategy, else an empty text. None if the
        combinations differ in several choices, or in none.
    """
    is_same_settings = chosen.settings == default.settings
    if chosen.strategy != default.strategy:
        is_plain = not chosen.options and not default.options and default.strategy == baseline
        return (chosen.strategy, baseline) if is_plain and is_same_settings else None
    if is_same_settings and chosen.options and not default.options:
        return f"{chosen.strategy} {_format_keys_and_values(chosen.options)}", ""
    own = {k: v for k, v in chosen.settings.items() if default.settings.get(k) != v}
    if (
        chosen.options == default.options
        and len(own) == 1
        and {**default.settings, **own} == chosen.settings
    ):
        (key,) = own
        return (_format_keys_and_values(own), "") if key not in default.settings else None
    return None


def _format_keys_and_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {json.dumps(value).strip(chr(34))}" for key, value in values.items())


def describe_answer(answer: TuneAnswer) -> Iterator[str]:
    """Yield the lines that print the answer on a terminal."""
    winner = answer.winning_combination
    if winner is None:
        yield f"No result yet: {answer.comparison_entry['text']}"
        return
    yield answer.comparison_entry["text"]
    yield f"  {describe_gain_over_baseline(answer, winner)}"
    yield f"  {describe_memory_use(answer, winner)}"
    yield f"  {describe_possible_further_gain(answer)}"
    effects = estimate_choice_effects(answer.measured_combinations, answer.baseline_strategy)
    if effects:
        yield "Effect of each choice: time per step with the choice, divided by the time without it:"
        yield from (f"  {describe_effect(effect)}" for effect in effects)


def describe_gain_over_baseline(answer: TuneAnswer, winner: MeasuredCombination) -> str:
    """Return a sentence on the time ratio of the baseline to the fastest combination."""
    name = answer.baseline_strategy
    if winner.name == name:
        return f"The fastest combination is the baseline, {name}."
    ratio = next((r for r in answer.comparison_entry["ratios"] if r["strategy"] == name), None)
    if ratio is None or ratio["ratio"] is None:
        reason = ratio["reason"] if ratio else "it was not measured"
        return f"The time of the baseline, {name}, was not measured: {reason or 'no block has it'}."
    interval = "" if ratio["low"] is None else f" (95 %: {ratio['low']:.3f} to {ratio['high']:.3f})"
    against = ratio["against"]
    faster = "it" if against == winner.name else f"{against}, the fastest at that time"
    return f"The baseline, {name}, takes {ratio['ratio']:.3f} times as long as {faster}{interval}."


def describe_memory_use(answer: TuneAnswer, winner: MeasuredCombination) -> str:
    """Return a sentence on the fastest combination's memory per worker and the free memory."""
    peak, room = winner.memory_bytes, answer.device_memory_bytes
    if peak is None:
        return "The memory of the fastest combination was not measured."
    if room is None:
        return f"The fastest combination needs {format_bytes(peak)} per worker."
    left = room - peak
    words = f"{format_bytes(left)} are free" if left >= 0 else f"{format_bytes(-left)} too much"
    return f"The fastest combination needs {format_bytes(peak)} of {format_bytes(room)} per worker: {words}."


def describe_possible_further_gain(answer: TuneAnswer) -> str:
    """Return a text on the largest possible gain from further blocks and their cost."""
    comparison, verdict = answer.comparison_entry, answer.verdict_content
    rivals = [r["strategy"] for r in comparison["ratios"] if r["state"] in ("open", "equal")]
    if not rivals:
        return (
            "Every other combination is slower, so that further blocks would find nothing faster."
        )
    gain = comparison["at_most"]
    text = f"{format_count(len(rivals), 'other combination')} may be as fast as the fastest one"
    blocks = comparison["blocks"]
    each = comparison["block_gpu_hours"] / max(blocks, 1)
    share = (len(rivals) + 1.5) / (len(comparison["strategies"]) + 0.5)
    cost = f"another block of these takes about {share * each:.2g} {verdict['hours']}"
    may = "" if gain is None else f", or up to {100 * gain:.1f} % faster"
    return f"{text}{may}; {cost}. {format_count(blocks, 'block')} were measured."


def describe_effect(effect: Effect) -> str:
    """Return an effect's choice, time ratio, and numbers of pairs and blocks as text."""
    over = f" over {effect.reference_strategy}" if effect.reference_strategy else ""
    sure = "" if effect.time_ratio.low is not None else "one block gives no interval; "
    return (
        f"{effect.choice}{over}: {effect.time_ratio.format_value_and_interval('{:.3f}'.format)} "
        f"({sure}{format_count(effect.num_pairs, 'pair')}, {format_count(effect.num_blocks, 'block')})"
    )


def format_step_time(combination: MeasuredCombination) -> str:
    """Return the time per step as text, or the reason why it is unknown."""
    return (
        format_short_time(combination.mean_step_s)
        if combination.mean_step_s
        else combination.status_in_verdict
    )
