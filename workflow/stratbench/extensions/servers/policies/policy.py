"""Interface of update policies: how a shard of the weights applies gradients, and what workers read.

A policy object owns one shard. The server and the simulation under a virtual clock use the same objects, so
that tests under the clock hold for training. The rules are in `averaging.py` and `asynchronous.py`, and
`policies.py` lists them by name. torch is imported inside functions only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stratbench.cell.options import reset_inherited_attributes
from stratbench.extensions.servers.policies.options import PolicyOptions

if TYPE_CHECKING:
    from torch import Tensor


class Outcome(Enum):
    """Outcome of a push: whether the policy applied, stored or dropped the gradient."""

    APPLIED = "applied"  # the policy has updated the weights
    HELD = "held"  # the policy has stored the gradient for a later update
    DROPPED = "dropped"  # the gradient came too late and has no effect


@dataclass(frozen=True)
class Hyper:
    """Settings of the servers' optimizer (SGD or AdamW, as in torch.optim), and the number of workers.

    Policies that average several pushes into one update do not use `lr_scale`.
    """

    #: Learning rate of one global batch.
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    workers: int = 1
    #: Factor on `lr` for one asynchronous push: 1 (option "full"), or 1 / `workers` (option "1/N").
    lr_scale: float = 1.0
    optimizer: Literal["sgd", "adamw"] = "sgd"
    #: AdamW's `betas`, as in torch.optim.AdamW. None for SGD.
    betas: tuple[float, float] | None = None
    #: AdamW's `eps`, as in torch.optim.AdamW. None for SGD.
    eps: float | None = None


class Fields(dict[str, Any]):
    """A copy of an object's attributes, by name."""


def copy_attributes(owner: object, leave_out: Collection[str] = ("hyper",)) -> Fields:
    """Return a copy of an object's attributes by name, without those in `leave_out`."""
    return Fields({k: copy_attribute(v) for k, v in vars(owner).items() if k not in leave_out})


def copy_attribute(value: Any) -> Any:
    """Return a copy of one attribute of a policy.

    Raises:
        TypeError: If the value has a type that cannot be saved.
    """
    import torch

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if torch.is_tensor(value):
        return value.clone()
    if isinstance(value, (list, set)):
        return type(value)(copy_attribute(each) for each in value)
    if isinstance(value, dict):
        return {key: copy_attribute(each) for key, each in value.items()}
    if isinstance(value, (Momentum, AdamW)):
        return copy_attributes(value)
    raise TypeError(
        f"an attribute of a policy is a {type(value).__name__}, which cannot be saved; use tensors, numbers, "
        "texts, lists, sets or dicts, or name the attribute in `scratch`"
    )


def restore_attributes(owner: object, fields: Fields) -> None:
    """Set an object's attributes to those that `copy_attributes` has copied.

    Raises:
        ValueError: If the object lacks one of the attributes.
    """
    if unknown := fields.keys() - vars(owner).keys():
        raise ValueError(
            f"saved attributes {', '.join(sorted(unknown))} do not exist in {type(owner).__name__}"
        )
    for name, saved in fields.items():
        setattr(owner, name, _restore_value(getattr(owner, name), saved))


def _restore_value(present: Any, saved: Any) -> Any:
    """Return the saved value of an attribute.

    If the saved value is `Fields`, the attribute is an object: the result is this object with its attributes
    restored.
    """
    if isinstance(saved, Fields):
        restore_attributes(present, saved)
        return present
    if isinstance(saved, list) and any(isinstance(each, Fields) for each in saved):
        return [_restore_value(*pair) for pair in zip(present, saved, strict=True)]
    return saved


class Momentum:
    """SGD with momentum for one shard of the weights, as torch.optim.SGD with dampening 0."""

    def __init__(self, like: Tensor, hyper: Hyper) -> None:
        """Allocate a buffer of zeros like `like`, shape [n], unless the momentum is 0."""
        import torch

        self.hyper = hyper
        self.value = torch.zeros_like(like) if hyper.momentum else None

    def reset(self) -> None:
        """Set the momentum buffer to 0."""
        if self.value is not None:
            self.value.zero_()

    def step(self, weights: Tensor, grad: Tensor, lr: float, weight: float = 1.0) -> Tensor:
        """Update the weights in place by one step of SGD, bit-identical to torch.optim.SGD.

        Args:
            weights: Weights of the model, shape [n], updated in place.
            grad: Gradient, shape [n], overwritten.
            lr: Learning rate.
            weight: Factor on the gradient and its weight decay, before the gradient enters the momentum.

        Returns:
            The direction of the step, by which the weights have moved -lr times.
        """
        if self.hyper.weight_decay:
            grad.add_(weights, alpha=self.hyper.weight_decay)
        if weight != 1.0:
            grad.mul_(weight)
        direction = grad
        if self.value is not None:
            self.value.mul_(self.hyper.momentum).add_(grad)
            if self.hyper.nesterov:
                grad.add_(self.value, alpha=self.hyper.momentum)
            else:
                direction = self.value
        weights.add_(direction, alpha=-lr)
        return direction

    @property
    def next_step_momentum_factor(self) -> float:
        """Factor with which the present momentum buffer enters the direction of the next step.

        The factor is mu. With Nesterov it is mu^2: the next direction is g + mu (mu v + g) = (1 + mu) g +
        mu^2 v.
        """
        return self.hyper.momentum**2 if self.hyper.nesterov else self.hyper.momentum


class AdamW:
    """AdamW for one shard of the weights, as torch.optim.AdamW.

    The class is used in place of `Momentum`.
    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """

    def __init__(self, like: Tensor, hyper: Hyper) -> None:
        """Allocate moments of zeros with the shape of `like`, [n]."""
        import torch

        self.hyper = hyper
        self.mean, self.square = torch.zeros_like(like), torch.zeros_like(like)
        self.steps = 0

    def step(self, weights: Tensor, grad: Tensor, lr: float, weight: float = 1.0) -> None:
        """Update the weights in place by one step of AdamW.

        Args:
            weights: Weights, shape [n], updated in place.
            grad: Gradient, shape [n], overwritten.
            lr: Learning rate.
            weight: Factor on the gradient.
        """
        import torch

        (beta1, beta2), h = self.hyper.betas, self.hyper
        self.steps += 1
        if weight != 1.0:
            grad.mul_(weight)
        weights.mul_(1 - lr * h.weight_decay)
        self.mean.lerp_(grad, 1 - beta1)
        self.square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = torch.sqrt(self.square, out=grad)  # the gradient's memory is reused
        root.div_((1 - beta2**self.steps) ** 0.5).add_(h.eps)
        weights.addcdiv_(self.mean, root, value=-lr / (1 - beta1**self.steps))


def make_shard_optimizer(weights: Tensor, hyper: Hyper) -> Momentum | AdamW:
    """Create the optimizer of a shard, AdamW or SGD, for weights of shape [n]."""
    return AdamW(weights, hyper) if hyper.optimizer == "adamw" else Momentum(weights, hyper)


#: Number of updates of a shard's weights.
WeightsVersion = int


class Policy(ABC):
    """Update rule of one shard of the weights.

    To add a policy, write a subclass, set the class attributes, and add a line to `policies.py`.

    The server calls `on_push` for every gradient, and `on_skip` for a step without one. After each of these
    and after `on_leave` it calls `ready(worker)` for each worker that waits for a reply. A ready worker reads
    the weights by `view`. `ready` implements barriers and bounded staleness.

    Workers have the slots 0 to `hyper.workers` - 1, and all are present at the start. A worker reads the
    weights before it pushes again.
    """

    #: One line that says what the policy does, for documentation and reports.
    summary: ClassVar[str]
    #: Formula by which a push updates the weights W, for documentation. Its symbols: g is the gradient,
    #: velocity SGD's direction, lr and eta the learning rates of a global batch and of a push, N the number
    #: of workers.
    rule: ClassVar[str]
    #: Clause with the reason for which workers cannot join and leave during the training. None: workers can.
    rigid: ClassVar[str | None] = None
    #: Names of attributes that are not saved, because no later call needs their values.
    scratch: ClassVar[tuple[str, ...]] = ()
    #: Class of the policy's options, with their defaults and effects.
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reset_inherited_attributes(cls, ("rigid",))

    def __init__(self, weights: Tensor, hyper: Hyper, options: PolicyOptions | None = None) -> None:
        """Take over the weights of a shard, which the policy then updates in place.

        The server may replace `self.weights` by a copy between two calls. So do not store other references to
        it.

        Args:
            weights: Flat parameters of the shard, shape [n], updated in place.
            hyper: Optimizer settings.
            options: Options of the policy. None: the defaults.
        """
        self.weights = weights
        self.hyper = hyper
        self.options = options if options is not None else self.Options()
        self.version = 0  # number of updates of this shard's weights
        #: Present factor of the learning rate schedule, which the caller sets before each call.
        self.lr_share = 1.0
        #: Weight of the present push in a mean over pushes, which the caller sets before each call.
        self.push_weight = 1.0

    @property
    def lr(self) -> float:
        """Present learning rate of an update that averages several pushes."""
        return self.hyper.lr * self.lr_share

    @property
    def push_lr(self) -> float:
        """Present learning rate of one asynchronous push."""
        return self.lr * self.hyper.lr_scale

    @abstractmethod
    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        """Apply, store or drop a worker's gradient, which the caller may overwrite afterwards.

        Args:
            worker: Slot of the worker.
            grad: Gradient, shape [n]. The policy may overwrite it.
            read_version: Version of the weights on which the gradient was computed.
        """

    # The following methods do nothing. A policy overrides those that it needs.
    def on_skip(self, worker: int, read_version: int) -> None:  # noqa: B027
        """Count a worker's step as done although the worker has no gradient.

        The gradient overflowed, or was applied before. The worker waits for `ready` as after a push.
        `read_version` is the version of the weights with which the worker computed the step.
        """

    def on_leave(self, worker: int) -> None:  # noqa: B027
        """Stop waiting for a worker that has finished, is lost, or has no work.

        The server calls this method at once, because other workers may be waiting for this one.
        """

    def on_join(self, worker: int) -> None:  # noqa: B027
        """Count a worker as present again that had left. The worker reads the weights at once."""

    def state(self) -> Fields:
        """Return a copy of all attributes that determine later steps.

        These attributes are all but the settings and `scratch`. Values may be tensors, numbers, texts,
        optimizers, and lists, sets and dicts of these.
        """
        return copy_attributes(self, {"hyper", "options", *self.scratch})

    def load(self, state: Fields) -> None:
        """Restore the `state` of a policy with the same settings and the same shard."""
        restore_attributes(self, state)

    def finish(self) -> None:  # noqa: B027
        """End the training: apply the gradients that are still stored."""

    def ready(self, worker: int) -> bool:
        """Return whether a worker that has pushed or skipped may read the weights and continue."""
        return True

    def view(self, worker: int, out: Tensor) -> WeightsVersion:
        """Write the weights that a worker reads to `out`, shape [n], and return their version."""
        out.copy_(self.weights)
        return self.version
