"""Reads the report of a user's command: the lines that `stratbench.report` writes.

Nothing in it is trusted: anything that is no such line is one error, with its number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The longest line that is read, in bytes; the losses of an epoch stand in one.
MAX_LINE = 1 << 24
#: The most facts that a trainer may state, and the most characters of one.
MAX_FACTS, MAX_FACT = 50, 200


class ReportError(RuntimeError):
    """The report cannot be used: one sentence."""


@dataclass(frozen=True)
class ReportedScore:
    """Result of an evaluation, and its time; `train_loss` is the mean loss since the previous one."""

    at_s: float
    train_time_s: float
    train_loss: float | None
    test_loss: float | None
    score: float | None
    error: float | None


@dataclass
class CommandReport:
    """A report. Times are seconds by the clock of its node; `not_finite`: the first loss that is not."""

    facts: dict[str, Any] = field(default_factory=dict)
    #: (begin, end) of each time in which the clock of training ran.
    stretches: list[list[float]] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    scores: list[ReportedScore] = field(default_factory=list)
    not_finite: str | None = None
    #: When its last line was written, and whether the clock stood then.
    latest_s: float = -math.inf
    paused: bool = False

    @property
    def train_time_s(self) -> float:
        """Seconds of all steps."""
        return sum(self.step_s)


def read_report(path: Path) -> CommandReport:
    """Return the report in a file.

    A last line that was cut short is left out. ReportError if it is none.
    """
    reader = _Reader()
    try:
        with path.open("rb") as file:
            number = 0
            while (line := file.readline(MAX_LINE + 1)).endswith(b"\n"):
                number += 1
                try:
                    reader.take(json.loads(line))
                except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as e:
                    raise ReportError(f"{path.name}, line {number}: {_why(e)}") from e
            if len(line) > MAX_LINE:
                raise ReportError(f"{path.name}, line {number + 1}: is longer than 16 MiB")
    except FileNotFoundError:
        raise ReportError(
            "it wrote no report: let it make a `stratbench.report.Report` (docs/engines.md)"
        ) from None
    if not reader.report.step_s:
        raise ReportError(f"{path.name} tells of no step")
    return reader.report


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError):
        return "is no JSON object"
    return f"lacks {error}" if isinstance(error, KeyError) else str(error)


class _Reader:
    """Takes the lines of a report in their order. ValueError and its like where one cannot follow."""

    def __init__(self) -> None:
        self.report = CommandReport()
        self._clock_s: float | None = None  # where the next step begins; None: the clock stands
        self._losses: list[float] = []
        self._begins_anew = True
        self._events: dict[str, Callable[[dict[str, Any], float], None]] = {
            "start": self._start,
            "step": self._step,
            "pause": self._pause,
            "resume": self._resume,
            "score": self._score,
        }

    def take(self, line: Any) -> None:
        """Take a line."""
        if not isinstance(line, dict):
            raise ValueError("is no JSON object")
        event, at_s = line["event"], _number(line["t"], "t")
        if not math.isfinite(at_s):
            raise ValueError(f"t = {line['t']} is not finite")
        if event not in self._events:
            raise ValueError(f"event {str(event)[:40]!r} is none of {', '.join(self._events)}")
        if not self.report.facts and event != "start":
            raise ValueError(f"{event} comes before start")
        if at_s < self.report.latest_s:
            raise ValueError(f"t = {at_s} is before that of the line above")
        self._events[event](line, at_s)
        self.report.latest_s, self.report.paused = at_s, self._clock_s is None

    def _start(self, line: dict[str, Any], at_s: float) -> None:
        if self.report.facts:
            raise ValueError(
                "a second start: the training began twice, so that its time is not one"
            )
        facts = line["facts"]
        if not isinstance(facts, dict) or len(facts) > MAX_FACTS:
            raise ValueError(f"facts must be an object of at most {MAX_FACTS}")
        for name, value in facts.items():
            if not isinstance(value, str | int | float | bool) or len(str(value)) > MAX_FACT:
                raise ValueError(f"the fact {name[:40]!r} must be a number or a short text")
        _whole(facts.get("workers"), "workers", 1)
        if "parameters" in facts:
            _whole(facts["parameters"], "parameters", 0)
        self.report.facts = facts
        self._clock_s = at_s

    def _step(self, line: dict[str, Any], at_s: float) -> None:
        if self._clock_s is None:
            raise ValueError(
                "a step while the clock is stopped; call resume() or score() after pause()"
            )
        self.report.samples.append(_whole(line["samples"], "samples", 1))
        if "loss" in line:
            self._take_losses([line["loss"]])
        if self._begins_anew:
            self.report.stretches.append([self._clock_s, at_s])
            self._begins_anew = False
        self.report.stretches[-1][1] = at_s
        self.report.step_s.append(at_s - self._clock_s)
        self._clock_s = at_s

    def _pause(self, line: dict[str, Any], at_s: float) -> None:
        self._take_losses(line.get("losses", []))
        if self._clock_s is not None and not self._begins_anew:
            # The device may have been behind the last step.
            self.report.step_s[-1] += at_s - self._clock_s
            self.report.stretches[-1][1] = at_s
        self._clock_s, self._begins_anew = None, True

    def _resume(self, line: dict[str, Any], at_s: float) -> None:
        self._clock_s, self._begins_anew = at_s, True

    def _score(self, line: dict[str, Any], at_s: float) -> None:
        self._take_losses(line.get("losses", []))
        values = {
            key: _number(line[key], key) for key in ("score", "test_loss", "error") if key in line
        }
        for key, value in values.items():
            if key != "error" and not math.isfinite(value):
                self.report.not_finite = self.report.not_finite or f"the {key.replace('_', ' ')}"
        known = {key: value for key, value in values.items() if math.isfinite(value)}
        self.report.scores.append(
            ReportedScore(
                at_s=at_s,
                train_time_s=self.report.train_time_s,
                train_loss=_mean(self._losses),
                test_loss=known.get("test_loss"),
                score=known.get("score"),
                error=known.get("error"),
            )
        )
        self._losses = []
        self._clock_s, self._begins_anew = at_s, True

    def _take_losses(self, losses: list[Any]) -> None:
        if not isinstance(losses, list):
            raise ValueError("losses must be a list")
        for loss in losses:
            if not math.isfinite(_number(loss, "loss")):
                self.report.not_finite = self.report.not_finite or "the training loss"
        self._losses += losses


def _mean(losses: list[float]) -> float | None:
    mean = sum(losses) / len(losses) if losses else math.nan
    return mean if math.isfinite(mean) else None


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} = {str(value)[:40]!r} is no number")
    return float(value)


def _whole(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 53:
        raise ValueError(f"{name} = {str(value)[:40]!r} is no whole number of at least {least}")
    return value
