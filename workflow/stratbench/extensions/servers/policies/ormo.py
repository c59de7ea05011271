"""The policy `ps-ormo`: a late gradient changes the momentum as if it had arrived in time.

The notation is that of `asynchronous.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stratbench.cell.options import option
from stratbench.extensions.servers.policies.options import EveryPushOptions, PolicyOptions
from stratbench.extensions.servers.policies.policy import Hyper, Outcome, Policy, WeightsVersion

if TYPE_CHECKING:
    from torch import Tensor


class OrMoPolicy(Policy):
    """Policy of ordered momentum (OrMo): a late gradient counts as if it had arrived in time.

    N gradients form a bucket, which is one global batch. A gradient belongs to the bucket in which its
    weights were read: the version that was read // N. The first push of a bucket rolls the momentum: V <- mu
    V, W -= eta V. A push that is k buckets late makes V += mu^k g and W -= eta (1 + mu + ... + mu^k) g. W and
    V are then as if g had arrived in its own bucket. Source: OrMo of Shi et al., "Ordered momentum for
    asynchronous SGD", NeurIPS 2024, arXiv 2407.19234. Here the roll is delayed until the bucket's first push,
    so that one worker is heavy-ball SGD.

    `look_ahead` is an addition: with M present workers, a worker reads W - (M - 1) / N eta mu V. This is the
    part of the next roll that other workers' pushes cause before its own. With one worker it is 0.

    With Nesterov a bucket with the gradients G makes W -= eta (G + mu V). So a roll is W -= eta mu V, a push
    is W -= eta (1 + mu + ... + mu^(k + 1)) g, and the look-ahead has mu^2 in place of mu.

    N does not change if workers are lost, since a bucket is one global batch of any workers. Weight decay
    uses W before the roll. If the learning rate changes, eta is that of the push.
    """

    summary: ClassVar[str] = "parameter server, late gradients enter the momentum as if in time"
    rule: ClassVar[str] = (
        "k buckets of N updates late: V += mu^k g, W -= eta (1 + ... + mu^k) g; each bucket first V <- mu V, "
        "W -= eta V; M workers read W - (M - 1) / N eta mu V (Nesterov: one more power of mu in W)"
    )

    @dataclass(frozen=True)
    class Options(EveryPushOptions):
        look_ahead: bool = option(
            True, "workers read the weights moved by what the others' momentum will do; false: OrMo"
        )

        def lr_factor(self, workers: int) -> float:
            """Return the factor on the learning rate of one push: 1 / `workers`.

            Each gradient is of a part of one global batch.
            """
            return 1.0 / workers

    def __init__(self, weights: Tensor, hyper: Hyper, options: PolicyOptions | None = None) -> None:
        import torch

        super().__init__(weights, hyper, options)
        self._momentum = torch.zeros_like(weights) if hyper.momentum else None
        self._bucket = 0  # number of the last bucket that has begun
        self._present = set(range(hyper.workers))

    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        if self.hyper.weight_decay:
            grad.add_(self.weights, alpha=self.hyper.weight_decay)
        bucket, eta = self.version // self.hyper.workers, self.push_lr
        late = bucket - read_version // self.hyper.workers
        mu, ahead = self.hyper.momentum, int(self.hyper.nesterov)
        if self._momentum is not None:
            if bucket > self._bucket:
                self._momentum.mul_(mu)
                self.weights.add_(self._momentum, alpha=-eta * mu**ahead)
            self._momentum.add_(grad, alpha=mu**late)
        self._bucket = bucket
        self.weights.add_(grad, alpha=-eta * sum(mu**j for j in range(late + 1 + ahead)))
        self.version += 1
        return Outcome.APPLIED

    def view(self, worker: int, out: Tensor) -> WeightsVersion:
        """Write the weights that a worker reads to `out`, shape [n], and return their version."""
        out.copy_(self.weights)
        others = len(self._present - {worker})
        if self.options.look_ahead and others and self._momentum is not None:
            share = others / self.hyper.workers * self.hyper.momentum ** (1 + self.hyper.nesterov)
            out.add_(self._momentum, alpha=-self.push_lr * share)
        return self.version

    def on_leave(self, worker: int) -> None:
        self._present.discard(worker)

    def on_join(self, worker: int) -> None:
        self._present.add(worker)
