"""Renders the page of `tune`: the answer, a plot, and the effect of each choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from stratbench.analysis.figures.log_chart import ChartSeries, render_log_chart
from stratbench.analysis.figures.marks import (
    assign_marks_by_strategy,
    create_mark,
    format_family_css_variables,
)
from stratbench.cell.text.pages import render_page
from stratbench.cell.text.words import format_bytes, format_count, format_short_time
from stratbench.extensions.tune.answer import (
    Effect,
    MeasuredCombination,
    TuneAnswer,
    describe_gain_over_baseline,
    describe_memory_use,
    describe_possible_further_gain,
    estimate_choice_effects,
    format_step_time,
)
from stratbench.extensions.tune.differences import describe_margins, fit_public_margins
from stratbench.extensions.tune.sieves import MEASURED, OUT_OF_MEMORY, FilterResult

TEMPLATES = Path(__file__).parent / "templates"
#: Largest number of reasons that the page lists per outcome.
MAX_REASONS = 5
#: Sentences on the settings that all combinations have in common.
COMMON_SETTINGS_SENTENCES = (
    "All combinations have the experiment's global batch, sequence length, data, optimizer and precision. "
    "For each strategy, one option at a time differs from its default."
)


def render_answer_page(
    answer: TuneAnswer, filter_results: Sequence[FilterResult], model: str
) -> str:
    """Return the HTML page with the answer of `tune`.

    Args:
        answer: Results of the measured blocks.
        filter_results: Outcome of the filters for each combination.
        model: Name of the model.
    """
    comparison, measured = answer.comparison_entry, answer.measured_combinations
    return render_page("tune.html.j2", TEMPLATES, values={
        "title": f"The fastest configuration of {model} on {comparison['workers']}",
        "lead": comparison["text"],
        "facts": list(_iter_labelled_results(answer)),
        "svg": _draw_time_over_memory(answer) if answer.pareto_front else "",
        "effects": [_make_effect_row(e) for e in estimate_choice_effects(measured, answer.baseline_strategy)],
        "measured": [_make_measured_row(answer, m) for m in _sort_by_step_time(measured)],
        "others": list(_iter_sentences_on_dropped_combinations(filter_results)),
        "light_marks": Markup(format_family_css_variables(for_dark_pages=False)),
        "dark_marks": Markup(format_family_css_variables(for_dark_pages=True)),
    })  # fmt: skip


def _iter_labelled_results(answer: TuneAnswer) -> Iterator[tuple[str, str]]:
    winner = answer.winning_combination
    if winner is not None:
        yield "Compared with the baseline", describe_gain_over_baseline(answer, winner)
        yield "Memory per worker", describe_memory_use(answer, winner)
        yield "Possible further gain", describe_possible_further_gain(answer)
    verdict = answer.verdict_content
    ended = f" Done: {verdict['reason']}." if verdict["done"] else ""
    yield "Cost so far", f"{verdict['spent_gpu_hours']:.3g} {verdict['hours']}.{ended}"


def _sort_by_step_time(measured: Sequence[MeasuredCombination]) -> list[MeasuredCombination]:
    return sorted(measured, key=lambda m: m.mean_step_s or float("inf"))


def _draw_time_over_memory(answer: TuneAnswer) -> Markup:
    """Return an SVG chart of step time over peak memory, with a mark per combination."""
    strategies = dict.fromkeys(m.combination.strategy for m in answer.measured_combinations)
    marks = assign_marks_by_strategy((name, name) for name in strategies)
    series = []
    for strategy in strategies:
        own = [m for m in answer.measured_combinations if m.combination.strategy == strategy]
        dots = [(m.memory_bytes, m.mean_step_s) for m in own if m.memory_bytes and m.mean_step_s]
        if dots:
            mark = marks.get(strategy) or create_mark("other", 0)
            series.append(ChartSeries(strategy, mark.colour_css_variable, dots, mark=mark))
    front = [
        (m.memory_bytes, m.mean_step_s)
        for m in answer.pareto_front
        if m.memory_bytes and m.mean_step_s
    ]
    series.append(ChartSeries("", "muted", solid_line_points=front))
    sizes = [m.memory_bytes for m in answer.measured_combinations if m.memory_bytes]
    ends = sorted({min(sizes), max(sizes)})
    return render_log_chart(
        series, "peak memory per worker", "time per step", ends, format_bytes, format_short_time,
        "Time per step over peak memory per worker, one dot per measured combination",
    )  # fmt: skip


def _make_effect_row(effect: Effect) -> dict[str, Any]:
    over = f" over {effect.reference_strategy}" if effect.reference_strategy else ""
    ratio = effect.time_ratio.format_value_and_interval("{:.3f}".format)
    if effect.time_ratio.low is None:
        ratio += " (no interval)"
    return {
        "choice": f"{effect.choice}{over}",
        "ratio": ratio,
        "num_pairs": effect.num_pairs,
        "num_blocks": effect.num_blocks,
    }


def _make_measured_row(answer: TuneAnswer, combination: MeasuredCombination) -> dict[str, str]:
    name, memory_bytes = combination.name, combination.memory_bytes
    ratio = next(r for r in answer.comparison_entry["ratios"] if r["strategy"] == name)
    return {
        "name": name,
        "step": format_step_time(combination),
        "memory": format_bytes(memory_bytes) if memory_bytes else "",
        "ratio": ratio["text"],
        "words": ratio["reason"] or ratio["words"],
    }


def _iter_sentences_on_dropped_combinations(
    filter_results: Sequence[FilterResult],
) -> Iterator[str]:
    """Yield a sentence per outcome on the combinations that are not measured, with the reasons."""
    yield COMMON_SETTINGS_SENTENCES
    for fate in dict.fromkeys(
        s.outcome for s in filter_results if s.outcome not in (MEASURED, OUT_OF_MEMORY)
    ):
        own = [s for s in filter_results if s.outcome == fate]
        reasons = Counter(s.reason for s in own)
        if len(reasons) > MAX_REASONS:
            examples = "; ".join(f"{s.combination.name} ({s.reason})" for s in own[:MAX_REASONS])
            yield f"{format_count(len(own), 'combination')} {fate}, such as {examples}."
        else:
            text = "; ".join(f"{reason} ({n})" for reason, n in reasons.most_common())
            yield f"{format_count(len(own), 'combination')} {fate}: {text}."
    if any(s.amounts_by_difference_kind is not None for s in filter_results):
        margins = "; ".join(line.strip() for line in describe_margins(fit_public_margins()))
        yield (
            "A combination is dropped by time if its planned time, divided by that of a faster one, exceeds "
            f"the plan's largest error in public sweeps for the property in which the two differ: {margins}."
        )
