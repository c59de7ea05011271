"""GPT: a decoder that predicts the next token of a text, in the sizes of nanoGPT and GPT-2.

Importing this file imports torch; `registry.MODELS` names its functions.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention of `heads` heads over [batch, time, width].

    Queries, keys and values have a projection each: split by heads over several devices, they need
    no rearrangement.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            project(x).view(batch, time, -1, width // self.heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, -1))


class Block(nn.Module):
    """One layer: attention and a two-layer perceptron, each with pre-layer norm and residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Token numbers [batch, time] become scores [batch, time, vocabulary] of each next token.

    Radford et al., Language Models are Unsupervised Multitask Learners, 2019: layer norms stand before
    each part and once at the end; weights are drawn from normal(0, 0.02), those that are added to
    the stream from a normal smaller by sqrt(2 layers). `tied`: the head's weights are the embedding's.
    There is no dropout.
    """

    def __init__(
        self,
        vocabulary: int,
        sequence: int,
        layers: int,
        heads: int,
        width: int,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                adds = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers if adds else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = embed(self, tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def embed(model: GPT, tokens: Tensor) -> Tensor:
    """Return the stream [batch, time, width] before the first block."""
    return model.embedding(tokens) + model.position.weight[: tokens.shape[1]]


def compact(classes: int, shape: tuple[int, ...]) -> GPT:
    """Four layers of width 128: nanoGPT's size for characters on a CPU."""
    return GPT(classes, *shape, layers=4, heads=4, width=128)


def char(classes: int, shape: tuple[int, ...]) -> GPT:
    """Six layers of width 384: nanoGPT's size for characters on a GPU."""
    return GPT(classes, *shape, layers=6, heads=6, width=384)


def gpt2_small(classes: int, shape: tuple[int, ...]) -> GPT:
    """Twelve layers of width 768: the smallest GPT-2."""
    return GPT(classes, *shape, layers=12, heads=12, width=768)


#: How workers divide a GPT's layers, by paths of modules; `extensions/splitting/tensor.py` knows the words.
TENSOR_PLAN = {
    "embedding": "embedding",
    "blocks.0": "first",
    "blocks.*.norm_1": "norm",
    "blocks.*.attention": "input",
    "blocks.*.attention.query": "colwise of input",
    "blocks.*.attention.key": "colwise of input",
    "blocks.*.attention.value": "colwise of input",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.norm_2": "norm",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "norm": "norm",
    "head": "scores",
}

#: A GPT's forward as a chain (`workload/network/pieces.py`).
PIECES = ((embed, ("embedding", "position")), "blocks.*", "norm", "head")
