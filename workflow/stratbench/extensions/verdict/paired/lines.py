"""Formats a verdict for the terminal: comparisons, cost so far, and the next round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stratbench.cell.text.words import format_count


def iter_verdict_lines(verdict: dict[str, Any]) -> Iterator[str]:
    """Yield the verdict as lines for a terminal, from the content of verdict.json."""
    titles: dict[str, list[dict[str, Any]]] = {"Decided": [], "Ended undecided": [], "Open": []}
    for comparison in verdict["comparisons"]:
        titles[get_comparison_title(comparison)].append(comparison)
    for title, comparisons in titles.items():
        if comparisons:
            yield f"{title}:"
            for comparison in comparisons:
                yield from iter_comparison_lines(comparison)
    yield from iter_cost_lines(verdict)
    yield f"Noise: {verdict['noise']['text']}."
    yield from (f"Note: {note}" for note in verdict["notes"])
    yield from iter_next_round_lines(verdict)


def get_comparison_title(comparison: dict[str, Any]) -> str:
    """Return the heading under which a comparison is printed: `Open`, `Decided` or `Ended undecided`."""
    if comparison["open"]:
        return "Open"
    return "Decided" if comparison["claim"] in ("fastest", "within", "only") else "Ended undecided"


def iter_comparison_lines(comparison: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a comparison: its conclusion, confidence, and each strategy's ratio."""
    yield (
        f"  {comparison['model']} on {comparison['workers']} ({comparison['experiment']}): "
        f"{comparison['text']}"
    )
    if comparison["claimed"]:
        yield f"    Confidence: {comparison['confidence']}. {comparison['confidence_reason']}"
    for ratio in comparison["ratios"]:
        if ratio["state"] != "leader" and (text := describe_strategy_time(ratio)):
            yield f"    {ratio['strategy']}: {text}"


def describe_strategy_time(strategy_entry: dict[str, Any]) -> str:
    """Describe a strategy's time relative to the leader's.

    The text is empty if the time is unknown.
    """
    figures = (
        strategy_entry["text"]
        and f"{strategy_entry['text']} times as long as {strategy_entry['against']}"
    )
    if strategy_entry["reason"]:
        return "; ".join(
            filter(None, (f"{strategy_entry['words']}: {strategy_entry['reason']}", figures))
        )
    return figures and f"{figures}: {strategy_entry['words']}"


def iter_cost_lines(verdict: dict[str, Any]) -> Iterator[str]:
    """Yield a line on the cost so far, relative to the full matrix."""
    spent, matrix = verdict["spent_gpu_hours"], verdict["matrix_gpu_hours"]
    text = f"Cost so far: {spent:.3g} {verdict['hours']}"
    if matrix:
        text += (
            f"; the full matrix of {verdict['matrix_repeats']} repeats would take about {matrix:.3g}: "
            f"the cost so far is {spent / matrix:.1%} of that"
        )
        if spent < matrix:
            text += f", {matrix - spent:.3g} saved"
    yield f"{text}."


def iter_next_round_lines(verdict: dict[str, Any]) -> Iterator[str]:
    """Yield a line on the next round, or on why there is none."""
    if verdict["done"]:
        yield f"Done: {verdict['reason']}."
        return
    after, expected = verdict["next"], verdict["expected_gpu_hours"]
    parts = []
    if after["blocks"]:
        parts.append(format_count(after["blocks"], "block"))
    if after["full_runs"]:
        parts.append(
            f"{format_count(len(after['full_runs']), 'full run')} ({'; '.join(after['full_runs'])})"
        )
    cost = "its cost is unknown before the first block"
    if expected is not None:
        cost = f"about {expected:.3g} {verdict['hours']}"
    more = f"at most {format_count(after['may_follow'], 'round')} of blocks may follow"
    yield f"Next round: {' and '.join(parts)}; {cost}; {more}."
