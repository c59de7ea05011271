"""The strategy `diloco`: workers train separately, and an outer optimizer applies their mean change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stratbench.cell.options import option
from stratbench.extensions.local.base import Local, count_periods
from stratbench.strategies import base

if TYPE_CHECKING:
    from torch import Tensor, nn


class DiLoCo(Local):
    """Trains workers separately; every `inner_steps` steps, an outer SGD step applies their mean change.

    The outer SGD has Nesterov momentum.
    The gradient of an outer step is the workers' mean change of weights since the previous outer step. All
    workers continue from its result. The inner optimizer is that of the experiment, and each worker keeps its
    own moments. An outer step also follows the last step. BatchNorm's statistics are averaged. The method is
    that of Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
    """

    summary: ClassVar[str] = (
        "workers train alone; their mean change is the gradient of an outer SGD"
    )
    rule: ClassVar[str] = (
        "W_i -= lr velocity(g_i) on worker i; after every `inner_steps` steps, d = W - mean of all W_i, "
        "m = mu m + d, W -= outer_lr (d + mu m), W_i = W; mu: outer_momentum"
    )
    alike_on_any_count = True
    begins_anew = None
    collectives = ("all_reduce",)

    @dataclass(frozen=True)
    class Options(base.Options):
        inner_steps: int = option(50, "number of steps between two outer steps", least=1)
        outer_lr: float = option(0.7, "learning rate of the outer steps", least=0.0)
        outer_momentum: float = option(
            0.9, "Nesterov momentum of the outer steps", least=0.0, below=1.0
        )

    def traits(self, gpus: int) -> base.Traits:
        plain = self.options.outer_lr == 1 and self.options.outer_momentum == 0
        return base.Traits(
            is_synchronous_on_one_worker=plain,
            equals_ddp=plain and gpus == 1,
            updates_per_step=1,
            ring_copies=2 / self.options.inner_steps,
            optimizer_padded=True,
            kept_copies=2 if self.options.outer_momentum else 1,
        )

    @property
    def steps_until_work_repeats(self) -> int:
        """Number of steps from one outer step to the next."""
        return self.options.inner_steps

    def count_exchanges(self, steps: int) -> int:
        return count_periods(steps, self.options.inner_steps)

    def wrap(self, model: nn.Module, worker: base.Worker) -> nn.Module:
        import torch

        wrapped = super().wrap(model, worker)
        self.outer = [flat.clone() for flat in self.weights]
        with_momentum = self.outer if self.options.outer_momentum else []
        self.momenta = [torch.zeros_like(flat) for flat in with_momentum]
        return wrapped

    def extra_state(self) -> list[Tensor]:
        return [*self.outer, *self.momenta]

    def exchange_weights(self) -> None:
        if not self.is_exchange_due(self.options.inner_steps):
            return
        self.average_tensors(self.exchanged_tensors)
        lr, mu = self.options.outer_lr, self.options.outer_momentum
        for i, (flat, outer) in enumerate(zip(self.weights, self.outer, strict=True)):
            movement = flat.sub_(outer).neg_()
            if mu:
                momentum = self.momenta[i].mul_(mu).add_(movement)
                movement.add_(momentum, alpha=mu)
            outer.sub_(movement, alpha=lr)
            flat.copy_(outer)
