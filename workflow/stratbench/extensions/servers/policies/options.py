"""Options that all policies share, and their effects on memory, updates and waiting.

This module does not import torch, because the Snakefile and the plan read options without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from stratbench.cell.options import Options, option


def make_lr_scale_option(default: str) -> Any:
    """Return the dataclass field of `lr_scale`, which is "full" or "1/N"."""
    return option(
        default,
        "learning rate of one push: 'full' (the study's own, so N workers move N times as far per "
        "global batch) or '1/N' (N pushes move as far as one averaged update)",
    )


@dataclass(frozen=True)
class PolicyOptions(Options):
    """Base class of a policy's options. The fields of a subclass are the options in config.yaml."""

    #: Number of tensors of the weights' size that do not depend on the number of workers.
    fixed_buffers: ClassVar[int] = 1
    #: Number of tensors of the weights' size per worker.
    buffers_per_worker: ClassVar[int] = 0
    #: Whether the run continues if a worker is lost.
    survives_worker_loss: ClassVar[bool] = True
    #: Whether every update is the mean of one push of each worker, on the same weights.
    averages_all: ClassVar[bool] = False
    #: Why the policy does not support AdamW. None: it does.
    refuses_adamw: ClassVar[str | None] = (
        "its rule weighs or corrects SGD's velocity, and AdamW has none"
    )
    #: Why the policy does not support SGD. None: it does.
    refuses_sgd: ClassVar[str | None] = None

    @property
    def is_synchronous_on_one_worker(self) -> bool:
        """Whether training with one worker equals PyTorch's own optimizer."""
        return False

    @classmethod
    def refusal(cls, optimizer: str) -> str | None:
        """Return the reason for which the policy does not support the optimizer.

        The optimizer is "sgd" or "adamw". The result is None if the policy supports it.
        """
        return {"sgd": cls.refuses_sgd, "adamw": cls.refuses_adamw}[optimizer]

    def waits_for_slowest(self, workers: int) -> bool:
        """Return whether, in the long run, all workers are as slow as the slowest one."""
        return True

    def updates_per_step(self, workers: int) -> float | None:
        """Return the number of updates per global batch, or None if it is not fixed."""
        return None

    @property
    def pushes_per_ticket(self) -> int:
        """Number of pushes into which a worker splits one ticket."""
        return 1

    def lr_factor(self, workers: int) -> float:
        """Return `Hyper.lr_scale`: 1.0, or 1 / workers if the option `lr_scale` is "1/N"."""
        return 1.0 / workers if getattr(self, "lr_scale", "full") == "1/N" else 1.0

    def optimizer_buffers(self, workers: int) -> int:
        """Return how many tensors the policy stores besides the weights, if momentum is used.

        Each tensor has the size of the weights.
        """
        return self.fixed_buffers + self.buffers_per_worker * workers

    def momentum_buffers(self, workers: int) -> int:
        """Return how many of the tensors in `optimizer_buffers` are needed only for momentum."""
        return 1


@dataclass(frozen=True)
class EveryPushOptions(PolicyOptions):
    """Options of policies that update with every push, without waiting."""

    is_synchronous_on_one_worker: ClassVar[bool] = True

    def waits_for_slowest(self, workers: int) -> bool:
        return False

    def updates_per_step(self, workers: int) -> float:
        return float(workers * self.pushes_per_ticket)


@dataclass(frozen=True)
class BoundedOptions(EveryPushOptions):
    """Options of policies that update with every push, but let fast workers wait at a staleness bound."""

    def waits_for_slowest(self, workers: int) -> bool:
        return True
