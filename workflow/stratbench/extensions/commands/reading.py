"""Reads the report of a user's command, to which `stratbench.report` has written lines of JSON.

The report is not trusted: any other line raises an error that names the number of the line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Maximum bytes of one line of the report. A line may have the losses of all steps of an epoch.
MAX_LINE = 1 << 24
#: Maximum number of facts in a report's first line, and maximum number of characters of one fact.
MAX_FACTS, MAX_FACT = 50, 200
#: Begin and end of an interval, in seconds.
TimeInterval = list[float]


class ReportError(RuntimeError):
    """Error for a report that is missing or invalid. The message gives the reason."""


@dataclass(frozen=True)
class ReportedScore:
    """Results of one evaluation that a command has reported, and the time of the report.

    `train_loss` is the mean loss of the training steps since the previous evaluation.
    """

    reported_at_s: float
    train_time_s: float
    train_loss: float | None
    test_loss: float | None
    score: float | None
    standard_error: float | None


@dataclass
class CommandReport:
    """The content of a command's report. Times are seconds on the clock of the command's node.

    `first_nonfinite_value_name` names the first value that was not finite, if any.
    """

    reported_facts: dict[str, Any] = field(default_factory=dict)
    #: Begin and end of each interval in which the command trained, without evaluations and pauses.
    training_intervals: list[TimeInterval] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)
    samples_per_step: list[int] = field(default_factory=list)
    scores: list[ReportedScore] = field(default_factory=list)
    first_nonfinite_value_name: str | None = None
    #: Time of the report's last line.
    last_line_at_s: float = -math.inf
    #: Whether the training clock was stopped at the report's last line.
    is_paused: bool = False

    @property
    def train_time_s(self) -> float:
        """Sum of the times of all steps, in seconds."""
        return sum(self.step_times_s)


def read_report(path: Path) -> CommandReport:
    """Read the report that a user's command has written to a file.

    An incomplete last line is left out.

    Raises:
        ReportError: If the file is missing, or is not a valid report.
    """
    reader = _ReportReader()
    try:
        with path.open("rb") as file:
            number = 0
            while (line := file.readline(MAX_LINE + 1)).endswith(b"\n"):
                number += 1
                try:
                    reader.add_line(json.loads(line))
                except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as e:
                    problem = _describe_error(e)
                    raise ReportError(f"{path.name}, line {number}: {problem}") from e
            if len(line) > MAX_LINE:
                raise ReportError(f"{path.name}, line {number + 1}: the line is longer than 16 MiB")
    except FileNotFoundError:
        raise ReportError(
            "the command wrote no report; create a `stratbench.report.Report` in it (docs/engines.md)"
        ) from None
    if not reader.report.step_times_s:
        raise ReportError(
            f"{path.name} has no step: call `step` on the report after each training step"
        )
    return reader.report


def _describe_error(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError):
        return "the line is no JSON object"
    return f"lacks {error}" if isinstance(error, KeyError) else str(error)


class _ReportReader:
    """Builds a `CommandReport` from the lines of a report, in order.

    An invalid line raises ValueError, TypeError or KeyError.
    """

    def __init__(self) -> None:
        self.report = CommandReport()
        # Time at which the next step begins. None while the training clock is stopped.
        self._clock_s: float | None = None
        self._losses: list[float] = []
        self._begins_anew = True
        self._events: dict[str, Callable[[dict[str, Any], float], None]] = {
            "start": self._handle_start_event,
            "step": self._handle_step_event,
            "pause": self._handle_pause_event,
            "resume": self._handle_resume_event,
            "score": self._handle_score_event,
        }

    def add_line(self, line: Any) -> None:
        """Add the values of one line of JSON to the report."""
        if not isinstance(line, dict):
            raise ValueError("the line is no JSON object")
        event, at_s = line["event"], _parse_number(line["t"], "t")
        if not math.isfinite(at_s):
            raise ValueError(f"the time t = {line['t']} is not finite")
        if event not in self._events:
            raise ValueError(f"event {str(event)[:40]!r} is unknown; use {', '.join(self._events)}")
        if not self.report.reported_facts and event != "start":
            raise ValueError(f"the event {event} comes before the event start")
        if at_s < self.report.last_line_at_s:
            raise ValueError(f"the time t = {at_s} is earlier than that of the previous line")
        self._events[event](line, at_s)
        self.report.last_line_at_s, self.report.is_paused = at_s, self._clock_s is None

    def _handle_start_event(self, line: dict[str, Any], at_s: float) -> None:
        if self.report.reported_facts:
            raise ValueError("the event start comes a second time; create one Report per training")
        facts = line["facts"]
        if not isinstance(facts, dict) or len(facts) > MAX_FACTS:
            raise ValueError(f"facts must be a JSON object with at most {MAX_FACTS} entries")
        for name, value in facts.items():
            if not isinstance(value, str | int | float | bool) or len(str(value)) > MAX_FACT:
                raise ValueError(f"the fact {name[:40]!r} must be a number or a short text")
        _parse_whole_number(facts.get("workers"), "workers", 1)
        if "parameters" in facts:
            _parse_whole_number(facts["parameters"], "parameters", 0)
        self.report.reported_facts = facts
        self._clock_s = at_s

    def _handle_step_event(self, line: dict[str, Any], at_s: float) -> None:
        if self._clock_s is None:
            raise ValueError(
                "a step came while the training clock was stopped; call resume() or score() after pause()"
            )
        self.report.samples_per_step.append(_parse_whole_number(line["samples"], "samples", 1))
        if "loss" in line:
            self._add_losses([line["loss"]])
        if self._begins_anew:
            self.report.training_intervals.append([self._clock_s, at_s])
            self._begins_anew = False
        self.report.training_intervals[-1][1] = at_s
        self.report.step_times_s.append(at_s - self._clock_s)
        self._clock_s = at_s

    def _handle_pause_event(self, line: dict[str, Any], at_s: float) -> None:
        self._add_losses(line.get("losses", []))
        if self._clock_s is not None and not self._begins_anew:
            # Until now, the device may have been busy with the last step. So this time belongs to that step.
            self.report.step_times_s[-1] += at_s - self._clock_s
            self.report.training_intervals[-1][1] = at_s
        self._clock_s, self._begins_anew = None, True

    def _handle_resume_event(self, line: dict[str, Any], at_s: float) -> None:
        self._clock_s, self._begins_anew = at_s, True

    def _handle_score_event(self, line: dict[str, Any], at_s: float) -> None:
        self._add_losses(line.get("losses", []))
        values = {
            key: _parse_number(line[key], key)
            for key in ("score", "test_loss", "error")
            if key in line
        }
        for key, value in values.items():
            if key != "error" and not math.isfinite(value):
                self.report.first_nonfinite_value_name = (
                    self.report.first_nonfinite_value_name or f"the {key.replace('_', ' ')}"
                )
        known = {key: value for key, value in values.items() if math.isfinite(value)}
        self.report.scores.append(
            ReportedScore(
                reported_at_s=at_s,
                train_time_s=self.report.train_time_s,
                train_loss=_average_losses(self._losses),
                test_loss=known.get("test_loss"),
                score=known.get("score"),
                standard_error=known.get("error"),
            )
        )
        self._losses = []
        self._clock_s, self._begins_anew = at_s, True

    def _add_losses(self, losses: list[Any]) -> None:
        if not isinstance(losses, list):
            raise ValueError("losses must be a list of numbers")
        for loss in losses:
            if not math.isfinite(_parse_number(loss, "loss")):
                self.report.first_nonfinite_value_name = (
                    self.report.first_nonfinite_value_name or "the training loss"
                )
        self._losses += losses


def _average_losses(losses: list[float]) -> float | None:
    mean = sum(losses) / len(losses) if losses else math.nan
    return mean if math.isfinite(mean) else None


def _parse_number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} = {str(value)[:40]!r} is no number")
    return float(value)


def _parse_whole_number(value: Any, name: str, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 1 << 53:
        raise ValueError(f"{name} = {str(value)[:40]!r} is no whole number of at least {minimum}")
    return value
