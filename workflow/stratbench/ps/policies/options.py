"""Common options of all policies, and their effects on memory, updates and waiting.

No torch here: the Snakefile validates a study's options, and the plan counts buffers, without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from stratbench.cell.options import Options, option


def lr_scale_option(default: str) -> Any:
    """Return the field of type Literal["full", "1/N"]: what a push multiplies the learning rate by."""
    return option(
        default,
        "learning rate of one push: 'full' (the study's own, so N workers move N times as far per "
        "global batch) or '1/N' (N pushes move as far as one averaged update)",
    )


@dataclass(frozen=True)
class PolicyOptions(Options):
    """Base of a policy's options. A policy without a field of its own takes none."""

    #: Number of weight-sized tensors in any case, and per worker.
    fixed_buffers: ClassVar[int] = 1
    buffers_per_worker: ClassVar[int] = 0
    #: False: losing a worker ends the run (a barrier can no longer be met honestly).
    tolerates_loss: ClassVar[bool] = True
    #: Whether every update is the mean of one push of each worker, on the same weights.
    averages_all: ClassVar[bool] = False
    #: Why its servers do not support AdamW; None if they do.
    refuses_adamw: ClassVar[str | None] = (
        "its rule weighs or corrects SGD's velocity, and AdamW has none"
    )
    #: The same of SGD.
    refuses_sgd: ClassVar[str | None] = None

    @property
    def synchronous_alone(self) -> bool:
        """Whether a single worker trains as torch's optimizer does."""
        return False

    @classmethod
    def refusal(cls, optimizer: str) -> str | None:
        """Return why its servers do not support "sgd" or "adamw", or None if they do."""
        return {"sgd": cls.refuses_sgd, "adamw": cls.refuses_adamw}[optimizer]

    def waits_for_slowest(self, workers: int) -> bool:
        """Return whether, in the long run, all go at the slowest worker's pace."""
        return True

    def updates_per_step(self, workers: int) -> float | None:
        """Updates that a global batch makes, or None where that is not fixed."""
        return None

    @property
    def pushes_per_ticket(self) -> int:
        """Into how many pushes a worker splits one ticket (batch)."""
        return 1

    def lr_factor(self, workers: int) -> float:
        """Return `Hyper.lr_scale` for `workers`: 1.0, or 1/workers if the options say '1/N'."""
        return 1.0 / workers if getattr(self, "lr_scale", "full") == "1/N" else 1.0

    def optimizer_buffers(self, workers: int) -> int:
        """Return the number of weight-sized tensors of the policy, without the weights, with momentum."""
        return self.fixed_buffers + self.buffers_per_worker * workers

    def momentum_buffers(self, workers: int) -> int:
        """Return how many of these only momentum needs."""
        return 1


@dataclass(frozen=True)
class EveryPushOptions(PolicyOptions):
    """Options of policies that update with every push, without waiting."""

    synchronous_alone: ClassVar[bool] = True

    def waits_for_slowest(self, workers: int) -> bool:
        return False

    def updates_per_step(self, workers: int) -> float:
        return float(workers * self.pushes_per_ticket)


@dataclass(frozen=True)
class BoundedOptions(EveryPushOptions):
    """The same within a bound of staleness, at which the fast wait for the slowest."""

    def waits_for_slowest(self, workers: int) -> bool:
        return True
