"""An answer as a line of a terminal, from answers.json; imports nothing that is slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def answer_line(answer: Mapping[str, Any]) -> str:
    """Return an answer: `vgg16 (main): ddp × 4, 214 s. Fastest, in one run each. Confidence: low (...)`."""
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
