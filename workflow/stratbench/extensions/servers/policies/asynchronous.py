"""Policies that apply every push when it arrives: plain, bounded, staleness-weighted and compensated.

W is the shard's weights, g the pushed gradient, and W_read the weights on which g was computed. tau is the
staleness of g: the number of updates of W since the worker read W_read. N is the number of workers, mu the
momentum, and eta the learning rate of one push (`Policy.push_lr`).

Weight decay uses W at the time when the push is applied, and not W_read. So the decay is never stale, and no
policy has to store W_read for it. With one worker both are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from stratbench.cell.options import option
from stratbench.extensions.servers.policies.options import (
    BoundedOptions,
    BufferCount,
    EveryPushOptions,
    PolicyOptions,
    make_lr_scale_option,
)
from stratbench.extensions.servers.policies.policy import (
    Hyper,
    Momentum,
    Outcome,
    Policy,
    WeightsVersion,
    make_shard_optimizer,
)

if TYPE_CHECKING:
    from torch import Tensor


class AsyncPolicy(Policy):
    """Policy that applies every pushed gradient at once, without waiting for other workers.

    W -= eta * velocity(g), with one momentum on the server. Sources: Downpour SGD of Dean et al., "Large
    scale distributed deep networks", NIPS 2012, and the asynchronous server of the paper this project
    re-implements.
    """

    summary: ClassVar[str] = "parameter server, nobody waits"
    rule: ClassVar[str] = "W -= eta velocity(g) for each push"

    @dataclass(frozen=True)
    class Options(EveryPushOptions):
        refuses_adamw: ClassVar[str | None] = None

        lr_scale: Literal["full", "1/N"] = make_lr_scale_option("full")

    def __init__(self, weights: Tensor, hyper: Hyper, options: PolicyOptions | None = None) -> None:
        super().__init__(weights, hyper, options)
        self._optimizer = make_shard_optimizer(weights, hyper)

    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        weight = self._compute_gradient_weight(self.version - read_version)
        self._optimizer.step(self.weights, grad, self._learning_rate_of_push, weight)
        self.version += 1
        return Outcome.APPLIED

    @property
    def _learning_rate_of_push(self) -> float:
        return self.push_lr

    def _compute_gradient_weight(self, staleness: int) -> float:
        """Return the factor by which a stale gradient is multiplied before it enters the momentum."""
        return 1.0


class StalenessLrPolicy(AsyncPolicy):
    """Policy that gives a gradient less weight the staler it is.

    W -= eta * velocity(g / (1 + tau)). Source: Zhang et al., "Staleness-aware async-SGD for distributed deep
    learning", IJCAI 2016, who divide each gradient's learning rate by its staleness. Here the divisor is 1 +
    tau, so that a fresh gradient keeps eta. The gradient is divided before it enters the momentum, so that a
    stale push does not reduce the momentum of earlier ones.
    """

    summary: ClassVar[str] = "parameter server, learning rate by staleness"
    rule: ClassVar[str] = (
        "W -= eta velocity(g / (1 + tau)) for each push, tau: updates since W was read"
    )

    @dataclass(frozen=True)
    class Options(EveryPushOptions):
        # The default is "full", because the factor 1 / (1 + staleness) already divides by about N workers.
        lr_scale: Literal["full", "1/N"] = make_lr_scale_option("full")

    def _compute_gradient_weight(self, staleness: int) -> float:
        return 1 / (1 + staleness)


class SspPolicy(AsyncPolicy):
    """Policy that applies every push at once, but makes workers wait that are too far ahead of others.

    No batch starts more than `s` pushes ahead of the slowest worker.

    The clock of a worker counts its pushes. A worker waits while its clock is larger than the slowest
    worker's plus s. Each push is a step, as in ps-async. A worker that joins starts at the slowest clock.
    Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS
        2013.
    """

    summary: ClassVar[str] = "parameter server, bounded staleness"
    rule: ClassVar[str] = "as ps-async; a worker more than s pushes ahead of the slowest waits"

    @dataclass(frozen=True)
    class Options(BoundedOptions):
        refuses_adamw: ClassVar[str | None] = None

        staleness_bound: int = option(
            3, "pushes a worker may be ahead of the slowest one when it starts a batch", least=0
        )
        lr_scale: Literal["full", "1/N"] = make_lr_scale_option("1/N")

    def __init__(self, weights: Tensor, hyper: Hyper, options: PolicyOptions | None = None) -> None:
        super().__init__(weights, hyper, options)
        self._clock = dict.fromkeys(range(hyper.workers), 0)

    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        self._clock[worker] += 1
        return super().on_push(worker, grad, read_version)

    def on_skip(self, worker: int, read_version: int) -> None:
        self._clock[worker] += 1

    def on_leave(self, worker: int) -> None:
        self._clock.pop(worker, None)

    def on_join(self, worker: int) -> None:
        self._clock[worker] = min(self._clock.values(), default=0)

    def ready(self, worker: int) -> bool:
        return self._clock[worker] <= min(self._clock.values()) + self.options.staleness_bound


class AsyncModifiedPolicy(SspPolicy):
    """Policy of the "modified asynchronous" server of the published study that stratbench re-implements.

    The policy differs from ps-async in three ways. A worker splits each batch into f = `pushes_per_batch`
    sub-batches, and pushes and pulls for each. Staleness is bounded as in ps-ssp, where the clock counts
    sub-batches. Gradients are weighted by 1 / (1 + tau), as in ps-staleness-lr.

    W -= eta / f * velocity(g / (1 + tau)), so that f sub-batches together have the weight of their batch. The
    paper gives no values for the three options. The policy is slow for the paper's reason: it has f times the
    traffic, and workers wait at the bound.
    """

    summary: ClassVar[str] = "parameter server, the paper's staleness mitigation"
    rule: ClassVar[str] = (
        "W -= eta / f velocity(g / (1 + tau)) for each of f pushes per batch, tau: updates since W was "
        "read; waits as ps-ssp, counted in sub-batches"
    )

    @dataclass(frozen=True)
    class Options(BoundedOptions):
        staleness_bound: int = option(
            1, "pushes a worker may be ahead of the slowest one when it starts a sub-batch", least=0
        )
        pushes_per_batch: int = option(
            4, "sub-batches, each pushed by itself, of one batch", least=1
        )
        lr_scale: Literal["full", "1/N"] = make_lr_scale_option("full")

        @property
        def pushes_per_ticket(self) -> int:
            return self.pushes_per_batch

        @property
        def is_synchronous_on_one_worker(self) -> bool:
            """Whether training with one worker equals PyTorch's own optimizer.

            It does if each batch has one push. Several pushes are several updates on smaller batches.
            """
            return self.pushes_per_batch == 1

    @property
    def _learning_rate_of_push(self) -> float:
        return self.push_lr / self.options.pushes_per_batch

    def _compute_gradient_weight(self, staleness: int) -> float:
        return 1 / (1 + staleness)


@dataclass(frozen=True)
class ViewKeepingOptions(EveryPushOptions):
    """Options of policies that store a copy of the weights that each worker has read.

    The fixed buffers are the momentum, a running mean of squares, and a temporary tensor.
    """

    fixed_buffers: ClassVar[BufferCount] = 3
    buffers_per_worker: ClassVar[BufferCount] = 1


class ViewKeepingPolicy(Policy):
    """Base class of policies that compare the present weights with those that a worker has read before."""

    scratch = ("_scratch",)

    def __init__(self, weights: Tensor, hyper: Hyper, options: PolicyOptions | None = None) -> None:
        import torch

        super().__init__(weights, hyper, options)
        self._momentum = Momentum(weights, hyper)
        self._mean_square = torch.zeros_like(weights)
        self._scratch = torch.zeros_like(weights)
        self._read = [weights.clone() for _ in range(hyper.workers)]

    def view(self, worker: int, out: Tensor) -> WeightsVersion:
        self._read[worker].copy_(self.weights)
        return super().view(worker, out)


class DcAsgdPolicy(ViewKeepingPolicy):
    """Policy that corrects a gradient for the change of the weights since the worker read them.

    ms <- m ms + (1 - m) g*g;  g' = g + lambda / sqrt(ms + 1e-7) * g*g*(W - W_read);
    W -= eta * velocity(g'). g*g approximates the Hessian's diagonal. Source: DC-ASGD-a of Zheng et al.,
    "Asynchronous stochastic gradient descent with delay compensation", ICML 2017. The momentum on the server
    is an addition.
    """

    summary: ClassVar[str] = "parameter server, delay-compensated"
    rule: ClassVar[str] = (
        "as ps-async with g + lambda / sqrt(ms + 1e-7) g² (W - W_read) in place of g, ms: running "
        "mean of g²"
    )

    @dataclass(frozen=True)
    class Options(ViewKeepingOptions):
        dc_lambda: float = option(2.0, "strength of the delay compensation", least=0.0)
        dc_decay: float = option(
            0.95, "decay of the gradient's running mean square", 0.0, below=1.0
        )
        lr_scale: Literal["full", "1/N"] = make_lr_scale_option("1/N")

    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        import torch

        decay = self.options.dc_decay
        self._mean_square.mul_(decay).addcmul_(grad, grad, value=1 - decay)
        if read_version != self.version:
            # The memory of W_read is reused for W_read - W, because W_read is not needed after this push.
            moved_back = self._read[worker].sub_(self.weights)
            curvature = torch.add(self._mean_square, 1e-7, out=self._scratch).sqrt_()
            torch.div(grad, curvature, out=curvature).mul_(grad)
            grad.addcmul_(curvature, moved_back, value=-self.options.dc_lambda)
        self._momentum.step(self.weights, grad, self.push_lr)
        self.version += 1
        return Outcome.APPLIED


class GapAwarePolicy(ViewKeepingPolicy):
    """Policy that makes a gradient smaller the more its weights have changed since the worker read them.

    The gradient of each weight is divided by 1 plus the change of this weight, in units of a typical step.

    g' = g / (1 + |W - W_read| / (eta RMS(v)));  W -= eta * velocity(g'). v is the step direction
    (with Nesterov g' + mu times the momentum), and RMS its bias-corrected running root mean square. Source:
    Barkai et al., "Gap-aware mitigation of gradient staleness", ICLR 2020 (the per-parameter form).
    """

    summary: ClassVar[str] = "parameter server, gap-aware"
    rule: ClassVar[str] = (
        "as ps-async with g / (1 + |W - W_read| / (eta RMS(v))) in place of g, v: the direction of a step"
    )

    @dataclass(frozen=True)
    class Options(ViewKeepingOptions):
        step_decay: float = option(0.999, "decay of the step's running mean square", 0.0, below=1.0)
        lr_scale: Literal["full", "1/N"] = make_lr_scale_option("1/N")

    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        import torch

        decay, lr = self.options.step_decay, self.push_lr
        if read_version != self.version:
            # The running mean starts at 0. Division by this share corrects its bias, as in Adam.
            seen_share = 1 - decay**self.version
            typical = torch.div(self._mean_square, seen_share, out=self._scratch).sqrt_()
            typical.mul_(lr).add_(1e-8)
            # The memory of W_read is reused for the gap, because W_read is not needed after this push.
            gap = self._read[worker].sub_(self.weights).abs_().div_(typical)
            grad.div_(gap.add_(1))
        direction = self._momentum.step(self.weights, grad, lr)
        self.version += 1
        self._mean_square.mul_(decay).addcmul_(direction, direction, value=1 - decay)
        return Outcome.APPLIED


class DanaPolicy(Policy):
    """Policy with a momentum per worker. A worker reads weights predicted from the others' momenta.

    v_i <- mu v_i + g;  W -= eta v_i. Worker i reads W - eta mu sum over j != i of v_j, which estimates the
    weights to which its gradient will be applied. With `nesterov`, W -= eta (g + mu v_i). The read
    then has mu^2 in place of mu, because the part of a next step that is known is eta mu^2 v_j.

    Source: DANA-Zero of Hakimi et al., "Taming momentum in a distributed asynchronous environment", 2019,
    which also looks ahead along the worker's own momentum. Without that term, one worker equals
    torch.optim.SGD exactly.

    The policy stores N + 1 momentum buffers. The last is the sum of the others, so that a read costs the same
    for any N. Each push updates the sum, and every 8 N pushes it is recomputed, which limits rounding errors.
    When a worker leaves, its momentum is removed.
    """

    summary: ClassVar[str] = "parameter server, look-ahead over the other workers' momentum"
    rule: ClassVar[str] = (
        "v_i <- mu v_i + g, W -= eta v_i; worker i reads W - eta mu Σ_{j≠i} v_j (Nesterov: mu² for mu)"
    )

    @dataclass(frozen=True)
    class Options(EveryPushOptions):
        buffers_per_worker: ClassVar[BufferCount] = 1

        lr_scale: Literal["full", "1/N"] = make_lr_scale_option("1/N")

        def momentum_buffers(self, workers: int) -> BufferCount:
            return workers + 1

    def __init__(self, weights: Tensor, hyper: Hyper, options: PolicyOptions | None = None) -> None:
        import torch

        super().__init__(weights, hyper, options)
        self._momenta = [Momentum(weights, hyper) for _ in range(hyper.workers)]
        self._sum = torch.zeros_like(weights) if hyper.momentum else None

    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        own = self._momenta[worker]
        if self._sum is not None:
            self._sum.sub_(own.value)
        own.step(self.weights, grad, self.push_lr)
        self.version += 1
        if self._sum is not None:
            self._sum.add_(own.value)
            if self.version % (8 * self.hyper.workers) == 0:
                self._recompute_momentum_sum()
        return Outcome.APPLIED

    def _recompute_momentum_sum(self) -> None:
        """Recompute the sum of all workers' momentum buffers, so that rounding errors do not accumulate."""
        self._sum.zero_()
        for momentum in self._momenta:
            self._sum.add_(momentum.value)

    def view(self, worker: int, out: Tensor) -> WeightsVersion:
        if self._sum is None:
            return super().view(worker, out)
        import torch

        own = self._momenta[worker]
        others = torch.sub(self._sum, own.value, out=out)  # exactly 0 with one worker
        torch.sub(self.weights, others, alpha=self.push_lr * own.next_step_momentum_factor, out=out)
        return self.version

    def on_leave(self, worker: int) -> None:
        own = self._momenta[worker]
        if self._sum is not None:
            self._sum.sub_(own.value)
        own.reset()
