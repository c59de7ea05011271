"""The verdict in words: what is decided, what is open, what it has cost, what the next round will."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stratbench.cell.words import counted, worker_noun
from stratbench.verdict.evidence import MATRIX_REPEATS


def verdict_lines(verdict: dict[str, Any]) -> Iterator[str]:
    """The lines for a terminal, of what verdict.json holds."""
    bouts = verdict["bouts"]
    still = [b for b in bouts if b["open"]]
    decided = [b for b in bouts if not b["open"]]
    for title, found in (("Decided", decided), ("Open", still)):
        if found:
            yield f"{title}:"
            for bout in found:
                yield from bout_lines(bout)
    yield from cost_lines(verdict)
    yield from noise_lines(verdict)
    yield from (f"Note: {note}" for note in verdict["notes"])
    yield from next_lines(verdict)


def bout_lines(bout: dict[str, Any]) -> Iterator[str]:
    """A bout: its claim, how sure it is, and who was dropped."""
    workers = counted(bout["gpus"], worker_noun([bout["device"]]))
    yield f"  {bout['model']} on {workers} ({bout['experiment']}): {bout['text']}"
    if bout["claim"] in ("fastest", "within", "at most"):
        yield f"    Confidence: {bout['confidence']}. {bout['confidence_why']}"
    for ratio in bout["ratios"]:
        if ratio["state"] != "leader" and (told := ratio_text(ratio)):
            yield f"    {ratio['strategy']}: {told}"


def ratio_text(ratio: dict[str, Any]) -> str:
    """An arm against the leader, in a few words."""
    figures = ""
    if ratio["ratio"] is not None:
        figures = f"{ratio['ratio']:.3f} times"
        if ratio["low"] is not None:
            figures += f" [{end_text(ratio['low'])}, {end_text(ratio['high'])}]"
        figures += f" as long as {ratio['against']}"
    match ratio["state"]:
        case "open":
            return figures and f"{figures}, not told apart"
        case "equal":
            return f"{figures}, equal"
        case "slower" if not ratio["why"]:
            return f"{figures}, slower"
        case _:
            dropped = f"dropped after {counted(ratio['blocks'], 'block')}: {ratio['why']}"
            return f"{dropped}; {figures}" if figures else dropped


def end_text(ratio: float) -> str:
    """An end of an interval; what is farther than ten times either way says nothing more."""
    return "below 0.1" if ratio < 0.1 else "above 10" if ratio > 10 else f"{ratio:.3f}"


def hours_noun(verdict: dict[str, Any]) -> str:
    """What hours are of."""
    on_cpu = any(bout["device"] == "cpu" for bout in verdict["bouts"])
    return "worker-hours" if on_cpu else "GPU-hours"


def cost_lines(verdict: dict[str, Any]) -> Iterator[str]:
    """What it has cost, against the full matrix."""
    spent, matrix = verdict["spent_gpu_hours"], verdict["matrix_gpu_hours"]
    text = f"Cost so far: {spent:.3g} {hours_noun(verdict)}"
    if matrix:
        text += (
            f"; the full matrix of {MATRIX_REPEATS} repeats would take about {matrix:.3g}: "
            f"{spent / matrix:.1%} of it"
        )
        if spent < matrix:
            text += f", {matrix - spent:.3g} saved"
    yield f"{text}."


def noise_lines(verdict: dict[str, Any]) -> Iterator[str]:
    """How this cluster's blocks scatter, and what the next study needs."""
    noise, margin = verdict["noise"], verdict["margin"]
    if noise["ratio"] is None:
        return
    text = f"Noise: two strategies' ratio scatters by {noise['ratio']:.1%} from block to block"
    needed = noise["blocks_for_margin"]
    if needed is None:
        yield f"{text}: a margin of {100 * margin:.3g} % needs more blocks than the race has here."
    else:
        yield f"{text}: a margin of {100 * margin:.3g} % takes about {counted(needed, 'block')}."


def next_lines(verdict: dict[str, Any]) -> Iterator[str]:
    """What comes next."""
    if verdict["done"]:
        yield f"Done: {verdict['reason']}."
        return
    after, expected = verdict["next"], verdict["expected_gpu_hours"]
    parts = []
    if after["blocks"]:
        parts.append(counted(after["blocks"], "block"))
    if after["full_runs"]:
        parts.append(
            f"{counted(len(after['full_runs']), 'full run')} ({'; '.join(after['full_runs'])})"
        )
    cost = "its cost is not known before the first block"
    if expected is not None:
        cost = f"about {expected:.3g} {hours_noun(verdict)}"
    yield f"Next round: {' and '.join(parts)}; {cost}."
