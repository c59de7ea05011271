"""History of which workers trained together in an elastic synchronous training, for the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainingGeneration:
    """Workers (members) that train together in one process group until a member joins or leaves.

    Attributes:
        number: Number of the generation, from 0.
        members: Numbers of the workers, by rank.
        from_step: Number of steps that the training had taken before the generation.
        cause: Event that started the generation, as a text.
        formed_unix_s: When the members were told to form the process group.
        began_unix_s: When the first step began; None if the generation broke before.
        ended_unix_s: When the last step ended, if known.
        to_step: Number of steps that the training had taken at the end, if known.
        pause_s: Seconds without a step since the previous generation, for the slowest member; None without
            one.
        from_checkpoint: Whether the members got their state from a checkpoint.
        broken: Whether the generation ended because a member was lost.
        train_s_by_epoch: Seconds of training steps by epoch, as reported by the slowest member.
        reported_unix_s: When a member last reported steps.
    """

    number: int
    members: list[int]
    from_step: int
    cause: str
    formed_unix_s: float
    began_unix_s: float | None = None
    ended_unix_s: float | None = None
    to_step: int | None = None
    pause_s: float | None = None
    from_checkpoint: bool = False
    broken: bool = False
    train_s_by_epoch: dict[int, float] = field(default_factory=dict)
    reported_unix_s: float | None = None

    @property
    def step_at_end(self) -> int:
        """Number of steps that the training had taken at the end of this generation.

        If the end is unknown, the number is that at the begin.
        """
        return self.from_step if self.to_step is None else self.to_step


@dataclass
class EpochTotals:
    """Totals of one epoch: sum of losses, number of steps, seconds of steps and pauses.

    Each worker reports its own losses and steps. With N workers a report counts 1/N, so that the number of
    steps may be a fraction.
    """

    loss_sum: float = 0.0
    reported_steps: float = 0.0
    train_s: float = 0.0
    pause_s: float = 0.0


@dataclass
class MemberHistory:
    """History of all workers (members) that trained while one launcher of the cell ran.

    Attributes:
        generations: All generations, in order.
        event_times_by_member: By worker number: when it was `admitted`, `ready` and at its `first_step`, in
            seconds since 1970.
        left_members: Numbers of the workers that left by themselves.
        lost_members: Numbers of the workers that were lost.
        totals_by_epoch: Totals of each epoch over all generations.
        written_unix_s: When this history was written to its file.
    """

    generations: list[TrainingGeneration] = field(default_factory=list)
    event_times_by_member: dict[int, dict[str, float]] = field(default_factory=dict)
    left_members: list[int] = field(default_factory=list)
    lost_members: list[int] = field(default_factory=list)
    totals_by_epoch: dict[int, EpochTotals] = field(default_factory=dict)
    written_unix_s: float | None = None

    def add_reported_steps(
        self, generation: TrainingGeneration, reports_by_epoch: Mapping[Any, Sequence[float]]
    ) -> None:
        """Add the steps that a member reports to have taken in a generation.

        Args:
            generation: The generation.
            reports_by_epoch: By epoch: sum of losses, number of steps, number of members, and seconds.
        """
        for key, (loss, steps, world, seconds) in reports_by_epoch.items():
            number = int(key)
            epoch = self.totals_by_epoch.setdefault(number, EpochTotals())
            epoch.loss_sum += loss / world
            epoch.reported_steps += steps / world
            # The seconds of a generation are those of its slowest member.
            longest_s = generation.train_s_by_epoch.get(number, 0.0)
            epoch.train_s += max(0.0, seconds - longest_s)
            generation.train_s_by_epoch[number] = max(seconds, longest_s)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MemberHistory:
        """Make a history from a dict of its fields, which may come from JSON."""
        generations = [
            TrainingGeneration(
                **g | {"train_s_by_epoch": {int(n): s for n, s in g["train_s_by_epoch"].items()}}
            )
            for g in values["generations"]
        ]
        dates = {int(n): each for n, each in values["event_times_by_member"].items()}
        epochs = {int(n): EpochTotals(**epoch) for n, epoch in values["totals_by_epoch"].items()}
        read = {
            "generations": generations,
            "event_times_by_member": dates,
            "totals_by_epoch": epochs,
        }
        return cls(**{**values, **read})
