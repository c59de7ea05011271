"""Interface of parameter-server policies: how one shard takes pushes and hands out weights.

A policy object owns one shard. The server and the virtual-clock driver use the same objects, so what is
tested under the clock is what runs. The rules themselves are in `averaging.py` and `asynchronous.py`;
`policies.py` lists them by name. torch is imported inside functions only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stratbench.cell.options import disown
from stratbench.ps.policies.options import PolicyOptions

if TYPE_CHECKING:
    from torch import Tensor


class Outcome(Enum):
    """Outcome of a pushed gradient."""

    APPLIED = "applied"  # the weights changed
    HELD = "held"  # stored for a later update
    DROPPED = "dropped"  # completed without effect (it came too late)


@dataclass(frozen=True)
class Hyper:
    """Settings of the server-side optimizer, SGD or AdamW as in torch.optim, and its workers.

    `lr` is the learning rate of one global batch. `lr_scale` is what an asynchronous push multiplies it by:
    1.0 (`full`, as the paper) or 1/workers (so that `workers` pushes move as far as one averaged update).
    Policies that average several pushes into an update do not use it.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    workers: int = 1
    lr_scale: float = 1.0
    optimizer: Literal["sgd", "adamw"] = "sgd"
    #: For AdamW.
    betas: tuple[float, float] | None = None
    eps: float | None = None


class Fields(dict[str, Any]):
    """The fields of an object, copied."""


def fields_of(owner: object, leave_out: Collection[str] = ("hyper",)) -> Fields:
    """Return a copy of an object's fields, by name, but for those to `leave_out`."""
    return Fields({k: copied(v) for k, v in vars(owner).items() if k not in leave_out})


def copied(value: Any) -> Any:
    """Return a copy of what a policy keeps. TypeError for a kind that cannot be saved."""
    import torch

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if torch.is_tensor(value):
        return value.clone()
    if isinstance(value, (list, set)):
        return type(value)(copied(each) for each in value)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, (Momentum, AdamW)):
        return fields_of(value)
    raise TypeError(
        f"a policy keeps a {type(value).__name__}, which cannot be saved; keep tensors, numbers, texts, "
        "lists, sets or dicts, or name the field in `scratch`"
    )


def set_fields(owner: object, fields: Fields) -> None:
    """Give an object the fields that `fields_of` has copied. ValueError if it is of another kind."""
    if unknown := fields.keys() - vars(owner).keys():
        raise ValueError(
            f"a saved {', '.join(sorted(unknown))} is none of {type(owner).__name__}'s"
        )
    for name, saved in fields.items():
        setattr(owner, name, _put_back(getattr(owner, name), saved))


def _put_back(now: Any, saved: Any) -> Any:
    """`saved`, or the object that is there now with the saved fields."""
    if isinstance(saved, Fields):
        set_fields(now, saved)
        return now
    if isinstance(saved, list) and any(isinstance(each, Fields) for each in saved):
        return [_put_back(*pair) for pair in zip(now, saved, strict=True)]
    return saved


class Momentum:
    """One heavy-ball buffer of a shard, updated as torch.optim.SGD does (dampening 0)."""

    def __init__(self, like: Tensor, hyper: Hyper) -> None:
        """Allocate the momentum of weights `like`, shape [n], unless it is 0."""
        import torch

        self.hyper = hyper
        self.value = torch.zeros_like(like) if hyper.momentum else None

    def reset(self) -> None:
        """Forget what has been pushed."""
        if self.value is not None:
            self.value.zero_()

    def step(self, weights: Tensor, grad: Tensor, lr: float, weight: float = 1.0) -> Tensor:
        """Update `weights` by -lr * direction, in place; return the direction.

        Overwrites `grad`.

        Bit-identical to torch.optim.SGD's step. The first gradient becomes the buffer, weight decay uses the
        weights as they are now, and Nesterov looks ahead along the new buffer.

        Args:
            weights: Shape [n].
            grad: Gradient, shape [n].
            lr: Learning rate.
            weight: Factor on the gradient, decay included, before it enters the momentum.
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
    def known_share(self) -> float:
        """The buffer's share in the next step's direction, whatever gradient that will bring.

        mu; with Nesterov mu^2: the next direction is g + mu (mu v + g) = (1 + mu) g + mu^2 v.
        """
        return self.hyper.momentum**2 if self.hyper.nesterov else self.hyper.momentum


class AdamW:
    """AdamW's two moments of a shard, as torch.optim.AdamW updates them; replaces `Momentum`.

    Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """

    def __init__(self, like: Tensor, hyper: Hyper) -> None:
        """`like`: the shard's weights, shape [n]."""
        import torch

        self.hyper = hyper
        self.mean, self.square = torch.zeros_like(like), torch.zeros_like(like)
        self.steps = 0

    def step(self, weights: Tensor, grad: Tensor, lr: float, weight: float = 1.0) -> None:
        """Update `weights` by one step, in place.

        Overwrites `grad`.

        Args:
            weights: Shape [n].
            grad: Gradient, shape [n].
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
        root = torch.sqrt(self.square, out=grad)  # in the gradient's memory
        root.div_((1 - beta2**self.steps) ** 0.5).add_(h.eps)
        weights.addcdiv_(self.mean, root, value=-lr / (1 - beta1**self.steps))


def optimizer_of(weights: Tensor, hyper: Hyper) -> Momentum | AdamW:
    """Return the optimizer of a policy that has one, for a shard's weights, shape [n]."""
    return AdamW(weights, hyper) if hyper.optimizer == "adamw" else Momentum(weights, hyper)


class Policy(ABC):
    """One shard's rule. Subclass, set the class attributes, and add a line to `policies.py`.

    The server calls `on_push` for every gradient (`on_skip` for a step that had none). Then it calls
    `ready(worker)` for each worker that waits for a reply; a ready worker gets `view`. Barriers, bounded
    staleness and free running are all expressed by `ready`. Whatever the server calls may make a worker ready
    that was not: it asks again after each `on_push`, `on_skip` and `on_leave`.

    Workers are numbered 0 to `hyper.workers` - 1 and all of them are at work from the start. A
    worker has one push under way at a time: it gets a view before it pushes again.
    """

    #: One line for documentation and reports.
    summary: ClassVar[str]
    #: One line for reports: what a push does to the weights W. g: a gradient; velocity: SGD's
    #: direction from it; lr: the learning rate of a global batch, eta that of a push; N workers.
    rule: ClassVar[str]
    #: Why workers cannot join and leave while it trains, in a clause; None: they can.
    rigid: ClassVar[str | None] = None
    #: Names of its fields that hold nothing between two calls.
    scratch: ClassVar[tuple[str, ...]] = ()
    #: Its options and their effects; the defaults apply where none are set.
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        disown(cls, ("rigid",))

    def __init__(self, weights: Tensor, hyper: Hyper, options: PolicyOptions | None = None) -> None:
        """Own a shard.

        The server may replace `self.weights` by a copy between two calls: keep no other reference to them.

        Args:
            weights: The shard's flat parameters, shape [n], updated in place.
            hyper: Optimizer settings.
            options: Options of the policy.
        """
        self.weights = weights
        self.hyper = hyper
        self.options = options if options is not None else self.Options()
        self.version = 0  # updates applied to this shard
        #: The schedule's present factor on the learning rate; the caller of the policy sets it.
        self.lr_share = 1.0
        #: The current push's weight in a mean over a step's pushes; the caller of the policy sets it.
        self.push_weight = 1.0

    @property
    def lr(self) -> float:
        """Learning rate, now, of an update that several pushes make together."""
        return self.hyper.lr * self.lr_share

    @property
    def push_lr(self) -> float:
        """Learning rate, now, of one asynchronous push."""
        return self.lr * self.hyper.lr_scale

    @property
    def tolerates_loss(self) -> bool:
        """Whether the run continues when a worker is lost."""
        return self.options.tolerates_loss

    @abstractmethod
    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        """Take a worker's gradient, which may be overwritten until this returns.

        Args:
            worker: Slot of the worker.
            grad: Gradient, shape [n].
            read_version: Version of the weights that it was computed on.
        """

    # The four below are no-ops for a policy that need not know.
    def on_skip(self, worker: int, read_version: int) -> None:  # noqa: B027
        """`worker` settles a step without a gradient: it overflowed, or was taken before.

        It counts as arrived and the worker waits for `ready` like one that has pushed.
        """

    def on_leave(self, worker: int) -> None:  # noqa: B027
        """Note that `worker` has finished, is idle without a batch, or was lost.

        Call this as soon as there is no batch for a worker: others may be waiting at a bound, with their own
        batch half pushed.
        """

    def on_join(self, worker: int) -> None:  # noqa: B027
        """`worker`, which had left, is at work again; it reads at once."""

    def state(self) -> Fields:
        """Return a copy of the state that determines its next steps: every field but its settings.

        Tensors, numbers, texts, lists, sets and dicts of these, and optimizers are saved automatically.
        Temporary buffers must be named in `scratch`.
        """
        return fields_of(self, {"hyper", "options", *self.scratch})

    def load(self, state: Fields) -> None:
        """Resume from the `state` of a policy with equal settings and shard length."""
        set_fields(self, state)

    def finish(self) -> None:  # noqa: B027
        """No push will come any more: apply what is held."""

    def ready(self, worker: int) -> bool:
        """Return whether `worker`, which has pushed or skipped, may read and continue."""
        return True

    def view(self, worker: int, out: Tensor) -> int:
        """Write the weights for `worker` to `out`; return their version."""
        out.copy_(self.weights)
        return self.version
