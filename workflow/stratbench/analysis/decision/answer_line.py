"""Formats the decision on a model (from answers.json) as a line for a terminal, without slow imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def format_answer_line(answer: Mapping[str, Any]) -> str:
    """Return an answer of answers.json as one line: `vgg16 (main): ddp × 4, 214 s. Fastest, ...`."""
    short = answer["short"]
    choice = []
    if short["strategy"]:
        value = f", {short['value']}" if short["value"] else ""
        choice = [f"{short['strategy']} × {short['gpus']}{value}."]
    reason = f" ({short['reason']})" if short["reason"] else ""
    where = f"{answer['model']} ({answer['experiment']}):"
    return " ".join(
        [where, *choice, short["claim"], f"Confidence: {answer['confidence']}{reason}."]
    )
