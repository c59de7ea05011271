"""`diloco`: workers train separately; their mean movement is the gradient of an outer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stratbench.cell.options import option
from stratbench.extensions.local.base import Local, periods
from stratbench.strategies import base

if TYPE_CHECKING:
    from torch import Tensor, nn


class DiLoCo(Local):
    """Takes an outer step by SGD with Nesterov momentum after every `inner_steps` steps.

    Its gradient is the workers' mean movement since the previous one. All workers resume from its result. The
    inner optimizer is the experiment's, whose moments stay each worker's own. An outer step also follows the
    last step. BatchNorm's statistics are averaged. Douillard et al., "DiLoCo: Distributed Low-Communication
    Training of Language Models", 2023, with AdamW inside and 500 inner steps.
    """

    summary: ClassVar[str] = "workers train alone, their mean move is a Nesterov SGD's gradient"
    rule: ClassVar[str] = (
        "W_i -= lr velocity(g_i) on worker i; after every `inner_steps` steps, d = W - mean of all W_i, "
        "m = mu m + d, W -= outer_lr (d + mu m), W_i = W; mu: outer_momentum"
    )
    alike_on_any_count = True
    begins_anew = None
    collectives = ("all_reduce",)

    @dataclass(frozen=True)
    class Options(base.Options):
        inner_steps: int = option(50, "steps between two outer steps", least=1)
        outer_lr: float = option(0.7, "learning rate of the outer steps", least=0.0)
        outer_momentum: float = option(
            0.9, "Nesterov momentum of the outer steps", least=0.0, below=1.0
        )

    def traits(self, gpus: int) -> base.Traits:
        plain = self.options.outer_lr == 1 and self.options.outer_momentum == 0
        return base.Traits(
            synchronous_alone=plain,
            equals_ddp=plain and gpus == 1,
            updates_per_step=1,
            ring_copies=2 / self.options.inner_steps,
            optimizer_padded=True,
            kept_copies=2 if self.options.outer_momentum else 1,
        )

    @property
    def period(self) -> int:
        return self.options.inner_steps

    def exchanges(self, steps: int) -> int:
        return periods(steps, self.options.inner_steps)

    def wrap(self, model: nn.Module, worker: base.Worker) -> nn.Module:
        import torch

        wrapped = super().wrap(model, worker)
        self.outer = [flat.clone() for flat in self.weights]
        with_momentum = self.outer if self.options.outer_momentum else []
        self.momenta = [torch.zeros_like(flat) for flat in with_momentum]
        return wrapped

    def extra_state(self) -> list[Tensor]:
        return [*self.outer, *self.momenta]

    def exchange(self) -> None:
        if not self.is_due(self.options.inner_steps):
            return
        self.average(self.exchanged)
        lr, mu = self.options.outer_lr, self.options.outer_momentum
        for i, (flat, outer) in enumerate(zip(self.weights, self.outer, strict=True)):
            movement = flat.sub_(outer).neg_()
            if mu:
                momentum = self.momenta[i].mul_(mu).add_(movement)
                movement.add_(momentum, alpha=mu)
            outer.sub_(movement, alpha=lr)
            flat.copy_(outer)
