"""A zoo of small networks as people bring them, and the plain loop that says what each has to become.

`tests/whole/test_zoo.py` trains all of them under every strategy. Images are [1, 4, 4]; a class is the
callable that config.yaml would name.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 12


class Base(nn.Module):
    """A stem, a middle and a head; each network below is a change to it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.mid = nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def change(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(self.change(self.stem(x.flatten(1)).relu())).relu())


class Plain(Base):
    """No oddity."""


# --- parameters that are more than a name in a module ---------------------------------------------


class Hooked(Base):
    """Half of a layer stays as it is, by a hook of its gradient."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        mask = torch.zeros(WIDTH, 16)
        mask[: WIDTH // 2] = 1
        self.stem.weight.register_hook(lambda g: g * mask.to(g.dtype))


def _keep_half(p: nn.Parameter) -> None:
    p.grad[: WIDTH // 2].zero_()


class HookedLate(Base):
    """The same by a hook that runs when the gradient has been added up."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.stem.weight.register_post_accumulate_grad_hook(_keep_half)


class InList(Base):
    """Uses a parameter by a reference in a plain list."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.gains = [self.gain]

    def change(self, h: Tensor) -> Tensor:
        return h * self.gains[0]


class InDict(Base):
    """Uses all its weights by a dictionary that it made of them."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.table = dict(self.named_parameters())

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x.flatten(1), self.table["stem.weight"], self.table["stem.bias"]).relu()
        return F.linear(h, self.table["head.weight"], self.table["head.bias"])


class TiedByMemory(Base):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight.data = self.mid.weight.data

    def change(self, h: Tensor) -> Tensor:
        return self.again(h).relu()


class PartsOfOne(Base):
    """Two parameters that lie in one tensor, and do not overlap."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        both = torch.randn(2, WIDTH)
        self.scale, self.shift = nn.Parameter(both[0]), nn.Parameter(both[1])

    def change(self, h: Tensor) -> Tensor:
        return h * self.scale + self.shift


class Tied(Base):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.mid.weight

    def change(self, h: Tensor) -> Tensor:
        return self.again(h).relu()


class Kind(nn.Parameter):
    """A parameter of the user's own class."""


class OwnClass(Base):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.gain = Kind(torch.ones(WIDTH))
        self.gain.doubles = True

    def change(self, h: Tensor) -> Tensor:
        return h * self.gain * (2 if getattr(self.gain, "doubles", False) else 1)


class OneBuffer(Base):
    """One buffer by two names; what is written to one is read from the other."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("count", self.steps)

    def change(self, h: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return h / (1 + self.count)


class Frozen(Base):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.stem.requires_grad_(False)
        self.mid.bias.requires_grad_(False)


class Adapted(Base):
    """Frozen but for the head and a factor of low rank: LoRA."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.stem.requires_grad_(False)
        self.mid.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def change(self, h: Tensor) -> Tensor:
        return h + self.up(self.down(h))


# --- what forward changes -------------------------------------------------------------------------


class Teacher(nn.Module):
    """A teacher that follows its student, in forward."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.student = nn.Sequential(
            nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        )
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        with torch.no_grad():
            if self.training:
                both = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
                for t, s in both:
                    t.mul_(0.9).add_(s, alpha=0.1)
            aim = self.teacher(x)
        return self.head(self.student(x) + aim)


class CountsInBuffer(Base):
    """An output that depends on how often it was trained, by an integer buffer."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def change(self, h: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return h * (1 + 1 / (1 + self.steps))


class CountsInNumber(Base):
    """The same by a plain attribute."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.calls = 0

    def change(self, h: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return h * (1 + 1 / (1 + self.calls))


class Remembers(Base):
    """Plain lists, dictionaries and tensors that forward changes."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.seen: list[float] = []
        self.state = {"factor": torch.ones(())}

    def change(self, h: Tensor) -> Tensor:
        if self.training:
            self.seen.append(1.0)
            self.state["factor"] *= 0.9
        return h * self.state["factor"] + len(self.seen)


class Replaces(Base):
    """Puts a new tensor in its buffer's place."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("factor", torch.ones(()))

    def change(self, h: Tensor) -> Tensor:
        if self.training:
            self.factor = self.factor * 0.9
        return h * self.factor


class WithBatchNorm(Base):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.norm = nn.BatchNorm1d(WIDTH)

    def change(self, h: Tensor) -> Tensor:
        return self.norm(h)


class Changes(Base):
    """Writes a parameter that is trained, in forward."""

    def change(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mid.weight.clamp_(-0.2, 0.2)
        return h


class MaxNorm(Base):
    """nn.Embedding with max_norm writes its weights in forward."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.table = nn.Embedding(4, WIDTH, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.flatten(1)).relu() + self.table((x.flatten(1)[:, 0] > 0).long())
        return self.head(self.mid(h).relu())


# --- random numbers -------------------------------------------------------------------------------


class FromPython(Base):
    """Initial weights from Python's and numpy's generators."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        drawn = [[random.gauss(0, 0.2) for _ in range(WIDTH)] for _ in range(WIDTH)]
        with torch.no_grad():
            self.mid.weight.copy_(torch.tensor(drawn))
            self.mid.bias.copy_(torch.from_numpy(np.random.normal(0, 0.2, WIDTH)))


class FromOutside(Base):
    """Initial weights from a generator that no seed reaches."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        with torch.no_grad():
            self.mid.weight.mul_(random.SystemRandom().random())


class Dropout(Base):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.drop = nn.Dropout(0.3)

    def change(self, h: Tensor) -> Tensor:
        return self.drop(h)


class FunctionalDropout(Base):
    def change(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.3, self.training)


class PythonNoise(Base):
    """Python's and numpy's numbers in forward."""

    def change(self, h: Tensor) -> Tensor:
        if self.training:
            h = h * (0.5 + random.random()) + np.random.normal(0, 0.1)
        return h


class RandomRelu(Base):
    def change(self, h: Tensor) -> Tensor:
        return F.rrelu(h - 0.5, 0.1, 0.9, self.training)


# --- hooks that fire more than once ---------------------------------------------------------------


class Again(Base):
    """Calls one block several times under reentrant checkpointing."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.flatten(1)).relu()
        for _ in range(3):
            h = h + 0.3 * checkpoint(self._block, h, use_reentrant=self.reentrant)
        return self.head(h)

    def _block(self, h: Tensor) -> Tensor:
        return self.mid(h).relu()


class AgainNewer(Again):
    """The same without: the remedy."""

    reentrant = False


class OnceReentrant(Base):
    """A block that is called once under reentrant checkpointing."""

    def change(self, h: Tensor) -> Tensor:
        return checkpoint(lambda t: t + self.mid(t).tanh(), h, use_reentrant=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.change(self.stem(x.flatten(1)).relu()))


# --- layers of PyTorch ----------------------------------------------------------------------------


class AttendsDropout(Base):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.stem, self.embed = nn.Identity(), nn.Linear(4, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x[:, 0])
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(self.mid(h.mean(1)).relu())


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class Layers(Base):
    """Layers that ask nothing of a strategy, and an autograd function of the user's own."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.conv, self.stem = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(48, WIDTH)
        self.norm, self.instead = nn.GroupNorm(3, WIDTH), nn.LayerNorm(WIDTH)
        self.table = nn.Embedding(8, WIDTH)
        self.gru = nn.GRU(4, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def change(self, h: Tensor) -> Tensor:
        return Doubling.apply(self.instead(self.norm(h)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.change(self.stem(self.conv(x).flatten(1)).relu())
        h = h + self.table((x.flatten(1) > 0).long() + 2).mean(1)
        rows = self.gru(x[:, 0])[0]
        rows = rows + self.attention(rows, rows, rows, need_weights=False)[0]
        return self.head(self.mid(h + rows.mean(1)).relu())


class Complex(Base):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.turn = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))

    def change(self, h: Tensor) -> Tensor:
        return (h * self.turn).real


class Normed(Base):
    """Weights as norm and direction, by a forward pre-hook that sets an attribute."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.mid = weight_norm(nn.Linear(WIDTH, WIDTH))


class Parametrized(Base):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        parametrizations.weight_norm(self.mid)


class Expanded(Base):
    """A buffer whose numbers share one place in memory."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("factor", torch.tensor([0.5]).expand(WIDTH))

    def change(self, h: Tensor) -> Tensor:
        return h * self.factor


class Strided(Base):
    """A parameter and a buffer that are slices of larger tensors."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.gain = nn.Parameter(torch.ones(WIDTH, 2)[:, 0])
        self.register_buffer("shift", torch.randn(WIDTH, 3)[:, 1])

    def change(self, h: Tensor) -> Tensor:
        return h * self.gain + self.shift


class Attribute(Base):
    """A tensor that is no buffer."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.mask = torch.tril(torch.ones(WIDTH, WIDTH))

    def change(self, h: Tensor) -> Tensor:
        return h @ self.mask.to(h)


class Experts(Base):
    """Several layers, and a gate that chooses among them."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate = nn.Linear(WIDTH, 4)


class Routed(Experts):
    """An expert sees the samples that choose it, by their numbers."""

    def change(self, h: Tensor) -> Tensor:
        top, which = self.gate(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for i, e in enumerate(self.experts):
            rows = (which == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, e(h[rows]) * top[rows, None])
        return h + out


class Gathered(Experts):
    """The same with every expert called, whether it has samples or not."""

    def change(self, h: Tensor) -> Tensor:
        top, which = self.gate(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for i, e in enumerate(self.experts):
            rows = (which == i).nonzero()[:, 0]
            out = out.index_add(0, rows, e(h[rows]) * top[rows, None])
        return h + out


class Branches(Base):
    """A layer that only some batches reach."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.extra = nn.Linear(WIDTH, WIDTH)

    def change(self, h: Tensor) -> Tensor:
        return h + self.extra(h) if h[0].sum() >= 3 else h


class ReadsConstants(Base):
    """Asks for the truth of numbers that no data enter."""

    def change(self, h: Tensor) -> Tensor:
        positions = torch.arange(h.shape[-1], device=h.device)
        return h if (positions.diff() == 1).all() else self.mid(h)


class Unused(Base):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.spare = nn.Linear(WIDTH, WIDTH)


class RecurrentDropout(Base):
    """An operator that is called without its probability, which has the value of the default."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.stem = nn.Identity()
        self.gru = nn.GRU(4, WIDTH, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(self.gru(x[:, 0])[0][:, -1]).relu())


#: Those that draw as `Dropout` does where tensors are real, each by another operator where they are fake.
DRAWING = (FunctionalDropout, RandomRelu, AttendsDropout, RecurrentDropout)
NETWORKS: dict[str, type[nn.Module]] = {
    name: kind
    for name, kind in list(globals().items())
    if isinstance(kind, type)
    and issubclass(kind, nn.Module)
    and kind.__module__ == __name__
    and name not in ("Base", "Experts", "FromOutside")
    and kind not in DRAWING
}


# --- the plain loop -------------------------------------------------------------------------------


def seed(number: int) -> None:
    """Seed the three generators that a network may draw from."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


class Drawing:
    """The three generators as one worker has them: `with` draws from these, and not from others'."""

    def __init__(self, number: int) -> None:
        kept = _states()
        seed(number)
        self._own = _states()
        _set_states(kept)

    def __enter__(self) -> None:
        self._others = _states()
        _set_states(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = _states()
        _set_states(self._others)


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def train_plainly(
    make: Callable[[], nn.Module],
    number: int,
    workers: int,
    epochs: Iterator[list[tuple[Tensor, Tensor]]],
    test: tuple[Tensor, Tensor],
    hyper: dict[str, float],
    mean_buffers: bool = False,
) -> list[tuple[float, float]]:
    """(training loss, test loss) of each epoch: what a user writes without any library.

    With several workers each has a copy of the network, a part of each batch and generators of its own;
    gradients are averaged by hand. The first one's copy is tested; `mean_buffers`: with the mean of all
    copies' float buffers.
    """
    copies = []
    for _ in range(workers):
        seed(number)
        network = make()
        for buffer in network.buffers():  # one that has two names stays one, as in float32
            buffer.data = buffer.data.double() if buffer.is_floating_point() else buffer.data
        copies.append(network.double())
    drawing = [Drawing(number + 1 + rank) for rank in range(workers)]
    trained = [[p for p in c.parameters() if p.requires_grad] for c in copies]
    optimizers = [torch.optim.SGD(own, **hyper) for own in trained]
    found = []
    for batches in epochs:
        losses = []
        for x, y in batches:
            parts = zip(x.chunk(workers), y.chunk(workers), strict=True)
            own_losses = []
            for network, own, (own_x, own_y) in zip(copies, drawing, parts, strict=True):
                with own:
                    loss = F.cross_entropy(network(own_x), own_y)
                    loss.backward()
                own_losses.append(loss.item())
            for same in zip(*trained, strict=True):
                made = [p.grad for p in same if p.grad is not None]
                for p in same:
                    p.grad = sum(made) / workers if made else None
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(sum(own_losses) / workers)
        network = copies[0].eval()
        floats = [[b for b in c.buffers() if b.is_floating_point()] for c in copies]
        own = [b.clone() for b in floats[0]]
        with torch.no_grad(), drawing[0]:
            for b, *others in zip(*floats, strict=True) if mean_buffers else ():
                b.copy_(sum([b, *others]) / workers)
            tested = float(F.cross_entropy(network(test[0]), test[1]))
            for b, kept in zip(floats[0], own, strict=True) if mean_buffers else ():
                b.copy_(kept)
        network.train()
        found.append((sum(losses) / len(losses), tested))
    return found
