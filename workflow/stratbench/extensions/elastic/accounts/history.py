"""History of an elastic synchronous training's members, for the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Generation:
    """Members that take steps together; dates are in s since 1970. `cause`: the reason for forming it."""

    number: int
    members: list[int]
    from_step: int
    cause: str
    formed_unix_s: float
    began_unix_s: float | None = None
    ended_unix_s: float | None = None
    to_step: int | None = None
    #: Seconds without a step before it, as the slowest member of the one before saw it; None: there is none.
    pause_s: float | None = None
    from_checkpoint: bool = False
    broken: bool = False
    #: Seconds of its steps, by epoch, as far as members have told, and when one did so last.
    train_s: dict[int, float] = field(default_factory=dict)
    told_unix_s: float | None = None

    @property
    def stop(self) -> int:
        """After which step it stopped, as far as that is known."""
        return self.from_step if self.to_step is None else self.to_step


@dataclass
class EpochTotals:
    """Totals of one epoch: losses over the reported `steps`, seconds of steps and pauses."""

    loss: float = 0.0
    steps: float = 0.0
    train_s: float = 0.0
    pause_s: float = 0.0


@dataclass
class History:
    """History of the members, for the record."""

    generations: list[Generation] = field(default_factory=list)
    #: When each member was let in, was ready, and took part first; by its number, seconds since 1970.
    dates: dict[int, dict[str, float]] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    #: Of each epoch what its steps took, in all generations.
    epochs: dict[int, EpochTotals] = field(default_factory=dict)
    #: When this was read.
    seen_unix_s: float | None = None

    def add_steps(self, generation: Generation, done: Mapping[Any, Sequence[float]]) -> None:
        """Add what a member of a generation did.

        Add each epoch's sum and number of losses, members of the generation and seconds, by its number.
        """
        for key, (loss, steps, world, seconds) in done.items():
            number = int(key)
            epoch = self.epochs.setdefault(number, EpochTotals())
            epoch.loss += loss / world
            epoch.steps += steps / world
            # The slowest member's time counts.
            longest_s = generation.train_s.get(number, 0.0)
            epoch.train_s += max(0.0, seconds - longest_s)
            generation.train_s[number] = max(seconds, longest_s)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> History:
        """Return the history of which `asdict` made these values, also after JSON."""
        generations = [
            Generation(**g | {"train_s": {int(n): s for n, s in g["train_s"].items()}})
            for g in values["generations"]
        ]
        dates = {int(n): each for n, each in values["dates"].items()}
        epochs = {int(n): EpochTotals(**epoch) for n, epoch in values["epochs"].items()}
        return cls(**{**values, "generations": generations, "dates": dates, "epochs": epochs})
