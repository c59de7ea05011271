"""Scales from values to pixels, with round ticks that have room beside each other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.ticker import MaxNLocator

from stratbench.analysis.figures.sheet import text_width

#: The least room between the texts of two ticks, in pixels.
GAP = 6
#: About so many ticks are on a scale.
MAX_TICKS = 4
#: The first digits of ticks on a logarithmic scale: the first row that gives three is taken.
_FIRSTS = (
    (1.0,),
    (1.0, 2.0, 5.0),
    (1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0),
)


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` on the pixels from `start` to `end`, which may be the lower one."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    #: Ticks at whole numbers alone.
    whole: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round values on the scale, about MAX_TICKS of them."""
        ticks = self._log_ticks() if self.log else []
        if len(ticks) < 2:
            steps = MaxNLocator(MAX_TICKS, steps=[1, 2, 2.5, 5, 10], integer=self.whole)
            ticks = [float(t) for t in steps.tick_values(self.low, self.high)]
        inside = [t for t in ticks if self._inside(t)]
        return inside if len(inside) > 1 else [self.low, self.high]

    def _inside(self, value: float) -> bool:
        room = 1e-9 * (self.high - self.low)
        return self.low - room <= value <= self.high + room and (value > 0 or not self.log)

    def _log_ticks(self) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for firsts in _FIRSTS:
            ticks = [first * 10.0**decade for decade in decades for first in firsts]
            ticks = [tick for tick in ticks if self._inside(tick)]
            if len(ticks) >= 3:
                break
        return ticks[:: max(1, -(-len(ticks) // (MAX_TICKS + 2)))]

    def labelled(self, ticks: Iterable[float], unit: str = "") -> list[tuple[float, str]]:
        """Pixels and texts of the ticks that have room beside each other; the last one has the unit."""
        texts = [(self.at(tick), tick_text(tick)) for tick in ticks]
        if unit and texts:
            texts[-1] = texts[-1][0], f"{texts[-1][1]} {unit}"
        kept: list[tuple[float, str]] = []
        for at, text in reversed(texts):
            apart = (text_width(text) + text_width(kept[-1][1])) / 2 + GAP if kept else 0
            if not kept or abs(kept[-1][0] - at) >= apart:
                kept.append((at, text))
        return kept[::-1]


def tick_text(value: float) -> str:
    """A round number as text; thousands from ten thousand on with a k."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def within_reach(values: list[float], ends: Iterable[float]) -> list[float]:
    """Values, and the ends of their intervals as far as they leave room for the values."""
    if not values:
        return values
    low, high = min(values), max(values)
    low, high = low - 0.5 * abs(low), high + 0.5 * abs(high)
    return [*values, *(min(max(end, low), high) for end in ends)]


def padded(values: Iterable[float], start: float, end: float, room: float, log: bool) -> Scale:
    """The scale that holds these values with `room` pixels at both ends; linear ones begin at 0."""
    known = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not known:
        return Scale(1, 10, start, end, log) if log else Scale(0, 1, start, end)
    if not log:
        top = max(*known, 0.0) or 1.0
        return Scale(0, top * (end - start) / (end - start - room), start, end)
    low, high = min(known), max(known)
    if high / low < 1.2:  # a few percent would look like a lot
        low, high = low / 1.1, high * 1.1
    share = room / (end - start - 2 * room)
    wide = (high / low) ** share
    return Scale(low / wide, high * wide, start, end, True)
