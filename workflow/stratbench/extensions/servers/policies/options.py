"""Options that all policies share, and their effects on memory, updates and waiting.

This module does not import torch, because the Snakefile and the plan read options without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from stratbench.cell.options import Options, option

#: Number of tensors that are as large as the weights.
BufferCount = int


def make_lr_scale_option(default: str) -> Any:
    """Return the dataclass field for the option `lr_scale`, whose values are "full" and "1/N"."""
    return option(
        default,
        "learning rate of one push: 'full' (the study's own, so N workers move N times as far per "
        "global batch) or '1/N' (N pushes move as far as one averaged update)",
    )


@dataclass(frozen=True)
class PolicyOptions(Options):
    """Base class of a policy's options. The fields of a subclass are the options in config.yaml."""

    #: Number of tensors, as large as the weights, that the policy stores for any number of workers.
    fixed_buffers: ClassVar[BufferCount] = 1
    #: Number of further tensors, as large as the weights, that the policy stores per worker.
    buffers_per_worker: ClassVar[BufferCount] = 0
    #: Whether the run continues if a worker is lost.
    survives_worker_loss: ClassVar[bool] = True
    #: Whether every update averages one gradient of each worker, all computed on the same weights.
    averages_all: ClassVar[bool] = False
    #: The reason for which the policy does not support AdamW. None: it supports AdamW.
    refuses_adamw: ClassVar[str | None] = (
        "its rule weighs or corrects SGD's velocity, and AdamW has none"
    )
    #: The reason for which the policy does not support SGD. None: it supports SGD.
    refuses_sgd: ClassVar[str | None] = None

    @property
    def is_synchronous_on_one_worker(self) -> bool:
        """Whether a training with only one worker equals that with PyTorch's own optimizer."""
        return False

    @classmethod
    def refusal(cls, optimizer: str) -> str | None:
        """Return the reason for which the policy does not support an optimizer, "sgd" or "adamw".

        The result is None if the policy supports the optimizer.
        """
        return {"sgd": cls.refuses_sgd, "adamw": cls.refuses_adamw}[optimizer]

    def waits_for_slowest(self, workers: int) -> bool:
        """Return whether a slow worker makes all others as slow as itself.

        Short delays do not count.
        """
        return True

    def updates_per_step(self, workers: int) -> float | None:
        """Return the number of updates of the weights per global batch. None: the number varies."""
        return None

    @property
    def pushes_per_ticket(self) -> int:
        """Number of pushes that a worker makes for its slice of a global batch."""
        return 1

    def lr_factor(self, workers: int) -> float:
        """Return the factor on the learning rate of one push.

        It is 1, or 1 / `workers` if the option `lr_scale` is "1/N".
        """
        return 1.0 / workers if getattr(self, "lr_scale", "full") == "1/N" else 1.0

    def optimizer_buffers(self, workers: int) -> BufferCount:
        """Return how many tensors as large as the weights a policy with momentum stores.

        The weights themselves do not count.
        """
        return self.fixed_buffers + self.buffers_per_worker * workers

    def momentum_buffers(self, workers: int) -> BufferCount:
        """Return how many tensors of `optimizer_buffers` a policy without momentum does not store."""
        return 1


@dataclass(frozen=True)
class EveryPushOptions(PolicyOptions):
    """Options of policies that update the weights with every push, and let no worker wait."""

    is_synchronous_on_one_worker: ClassVar[bool] = True

    def waits_for_slowest(self, workers: int) -> bool:
        return False

    def updates_per_step(self, workers: int) -> float:
        return float(workers * self.pushes_per_ticket)


@dataclass(frozen=True)
class BoundedOptions(EveryPushOptions):
    """Options of policies that update the weights with every push, and bound the staleness.

    Workers that are too far ahead of the slowest one wait.
    """

    def waits_for_slowest(self, workers: int) -> bool:
        return True
