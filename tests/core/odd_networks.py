"""Networks with one oddity each, as a user may bring them; what becomes of each is in test_check.py."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).relu())


class Plain(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, classes)

    def body(self, x: Tensor) -> Tensor:
        x = self.stem(F.adaptive_avg_pool2d(x, 8).flatten(1))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Adapted(Plain):
    """Frozen but for the head, the norm and a factor of low rank beside the second block: like LoRA."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.stem = nn.Sequential(nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 8))
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.head.requires_grad_(True)

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(F.adaptive_avg_pool2d(x, 8).flatten(1)))
        return self.norm(self.blocks[1](x + self.up(self.down(x))))


class Unused(Plain):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.spare = nn.Linear(8, 8)


class UnusedBlock(Plain):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.extra = Block()


class Tied(Plain):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.blocks[0].outer.weight
        self.blocks[1].inner.weight = self.blocks[1].outer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.body(x)))


class Counts(Plain):
    """Writes buffers in place, which its output does not depend on."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        self.calls += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x


class Replaces(Counts):
    def body(self, x: Tensor) -> Tensor:
        x = Plain.body(self, x)
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return x


class WritesLate(Counts):
    """The buffer is needed for backward, and is changed before."""

    def body(self, x: Tensor) -> Tensor:
        x = Plain.body(self, x)
        y = x * self.mean + x
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return y


class Parts(Plain):
    """Calls parts of its blocks, and never a block."""

    def body(self, x: Tensor) -> Tensor:
        x = self.stem(F.adaptive_avg_pool2d(x, 8).flatten(1))
        for block in self.blocks:
            x = x + block.outer(block.inner(x).relu())
        return x


class ReadsLate(Plain):
    """Reads a block's weight after the block was called."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(self.body(x), self.blocks[0].outer.weight))


class ReadsHead(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x), self.head.weight, self.head.bias)


class Branches(Plain):
    """What it computes depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(x * 2 if x.abs().sum() > 0 else x)


class Chooses(Plain):
    """Which of its blocks it calls depends on the data."""

    def body(self, x: Tensor) -> Tensor:
        x = self.stem(F.adaptive_avg_pool2d(x, 8).flatten(1))
        return self.blocks[int(x.mean().item() > 0)](x)


class Routed(Plain):
    """A block computes the samples that choose it, by their numbers."""

    def body(self, x: Tensor) -> Tensor:
        x = self.stem(F.adaptive_avg_pool2d(x, 8).flatten(1))
        out = torch.zeros_like(x)
        for i, block in enumerate(self.blocks):
            rows = ((x[:, 0] > 0) == bool(i)).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, block(x[rows]))
        return out


class ReadsConstants(Plain):
    """Asks for the truth of numbers that no data enter, as transformers' masks do."""

    def body(self, x: Tensor) -> Tensor:
        positions = torch.arange(8)
        if not (positions.diff() == 1).all():
            return x
        return super().body(x)


class Masked(Plain):
    """Holds a tensor that is no buffer, and another in a hook."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.mask = torch.tril(torch.ones(8, 8))
        half = torch.full((8,), 0.5)
        self.stem.register_forward_hook(lambda _m, _x, out: out * half.to(out))

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) @ self.mask.to(x)


class RaisesOnFakes(Plain):
    """An operator that fake tensors judge otherwise than real ones."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            raise ValueError("expected another device")
        return super().forward(x)


class Orders(Plain):
    """The data decide in which order it calls its blocks, of equal size."""

    def body(self, x: Tensor) -> Tensor:
        first, second = self.blocks if x.mean().item() > 0 else reversed(self.blocks)
        return second(first(self.stem(F.adaptive_avg_pool2d(x, 8).flatten(1))))


class Dice(Plain):
    """Skips blocks by chance."""

    def body(self, x: Tensor) -> Tensor:
        x = self.stem(F.adaptive_avg_pool2d(x, 8).flatten(1))
        for block in self.blocks:
            if torch.rand(()) < 0.5:
                x = block(x)
        return x


class Scalar(Plain):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Transposed(Plain):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.map = nn.Parameter(torch.randn(4, 8).t())

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(x + x @ self.map @ self.map.t())


class Complex(Plain):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.turn = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.body(x) * self.turn).real)


class Sparse(Plain):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.table = nn.Embedding(4, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) + self.table((x.flatten(1)[:, 0] > 0).long()))


class Normalises(Plain):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.norm = nn.BatchNorm1d(8)

    def body(self, x: Tensor) -> Tensor:
        return self.norm(super().body(x))


class Halved(Plain):
    """A body in 16 bits, to whose weights' format its input is cast."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.blocks.to(torch.bfloat16)

    def format(self) -> torch.dtype:
        return self.blocks[0].inner.weight.dtype

    def body(self, x: Tensor) -> Tensor:
        h = self.stem(F.adaptive_avg_pool2d(x, 8).flatten(1)).to(self.format())
        for block in self.blocks:
            h = block(h)
        return h.to(x.dtype)


class HalvedInput(Halved):
    """The same, whose code names the format."""

    def format(self) -> torch.dtype:
        return torch.bfloat16


class ViewBlock(Block):
    """Stands in the place of `Block`, by whose name shard groups are chosen."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu()).view(-1, 2, 4)


ViewBlock.__name__ = "Block"


class Views(Plain):
    """Changes in place what a block gives, which is a view."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.blocks = nn.ModuleList([ViewBlock(), ViewBlock()])

    def body(self, x: Tensor) -> Tensor:
        x = self.stem(F.adaptive_avg_pool2d(x, 8).flatten(1))
        for block in self.blocks:
            h = block(x)
            h += x.view(-1, 2, 4)
            x = h.flatten(1)
        return x


class Empty(Plain):
    """Uses a parameter that holds no number."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.nothing = nn.Parameter(torch.zeros(0, 8))

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) + self.nothing.sum()


class Normed(Plain):
    """A weight that a hook makes of two parameters before its layer is called."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch has a newer one
            self.blocks[0].inner = nn.utils.weight_norm(self.blocks[0].inner)
