"""History of the members of an elastic synchronous training. The cell's record is made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainingGeneration:
    """A set of members that take steps together. Dates are in seconds since 1970.

    `cause` is why it was formed, and `broken` whether it ended because a member was lost.
    """

    number: int
    members: list[int]
    from_step: int
    cause: str
    formed_unix_s: float
    began_unix_s: float | None = None
    ended_unix_s: float | None = None
    to_step: int | None = None
    #: Seconds without a step since the generation before, by its slowest member, or None for the first one.
    pause_s: float | None = None
    from_checkpoint: bool = False
    broken: bool = False
    #: Seconds of its steps by epoch as members have reported them, and when the last report came.
    train_s_by_member: dict[int, float] = field(default_factory=dict)
    reported_unix_s: float | None = None

    @property
    def last_step(self) -> int:
        """Number of steps that the training had taken when the generation stopped.

        If the stop is unknown, the number is that at the generation's begin.
        """
        return self.from_step if self.to_step is None else self.to_step


@dataclass
class EpochTotals:
    """Totals of one epoch: sum of losses over the reported steps, seconds of steps and of pauses."""

    loss_sum: float = 0.0
    reported_steps: float = 0.0
    train_s: float = 0.0
    pause_s: float = 0.0


@dataclass
class MemberHistory:
    """All that one launcher knows about the members of its training."""

    generations: list[TrainingGeneration] = field(default_factory=list)
    #: When each member was admitted, ready and at its first step, by its number, in seconds since 1970.
    dates_by_member: dict[int, dict[str, float]] = field(default_factory=dict)
    #: Numbers of the members that left in order, and of those that were lost.
    left_members: list[int] = field(default_factory=list)
    lost_members: list[int] = field(default_factory=list)
    #: Totals of each epoch over all generations.
    totals_by_epoch: dict[int, EpochTotals] = field(default_factory=dict)
    #: When this history was written, in seconds since 1970.
    written_unix_s: float | None = None

    def add_steps(
        self, generation: TrainingGeneration, done: Mapping[Any, Sequence[float]]
    ) -> None:
        """Add a member's report on its steps in a generation.

        Args:
            generation: The generation.
            done: By epoch: sum and number of losses, number of members, and seconds of the steps.
        """
        for key, (loss, steps, world, seconds) in done.items():
            number = int(key)
            epoch = self.totals_by_epoch.setdefault(number, EpochTotals())
            epoch.loss_sum += loss / world
            epoch.reported_steps += steps / world
            # The slowest member's time counts.
            longest_s = generation.train_s_by_member.get(number, 0.0)
            epoch.train_s += max(0.0, seconds - longest_s)
            generation.train_s_by_member[number] = max(seconds, longest_s)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MemberHistory:
        """Make a history from the values of `asdict`, which may come from JSON."""
        generations = [
            TrainingGeneration(
                **g | {"train_s_by_member": {int(n): s for n, s in g["train_s_by_member"].items()}}
            )
            for g in values["generations"]
        ]
        dates = {int(n): each for n, each in values["dates_by_member"].items()}
        epochs = {int(n): EpochTotals(**epoch) for n, epoch in values["totals_by_epoch"].items()}
        read = {"generations": generations, "dates_by_member": dates, "totals_by_epoch": epochs}
        return cls(**{**values, **read})
