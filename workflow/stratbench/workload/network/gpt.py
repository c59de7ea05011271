"""GPT, a transformer that predicts the next token of a text, in the sizes of nanoGPT and GPT-2.

`registry.MODELS` names the functions that build it.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention with `heads` heads over [batch, time, width].

    Queries, keys and values have separate projections, which devices can divide by heads without rearranging
    weights.
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
    """A layer of GPT: attention, then a perceptron, each after a layer norm and with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A model from tokens [batch, time] to scores [batch, time, vocabulary] of each next token.

    It follows Radford et al., Language Models are Unsupervised Multitask Learners, 2019: a layer norm
    precedes each part and the head. Weights are drawn from normal(0, 0.02); the standard deviation of those
    that end a residual branch is smaller by sqrt(2 layers). With `tied`, the head's weights are the
    embedding's. There is no dropout.
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
        x = embed_tokens(self, tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def embed_tokens(model: GPT, tokens: Tensor) -> Tensor:
    """Return the input [batch, time, width] of the first block: embeddings of tokens and positions."""
    return model.embedding(tokens) + model.position.weight[: tokens.shape[1]]


def build_compact_gpt(classes: int, shape: tuple[int, ...]) -> GPT:
    """Return a GPT of nanoGPT's size for characters on CPUs: 4 layers, width 128."""
    return GPT(classes, *shape, layers=4, heads=4, width=128)


def build_character_gpt(classes: int, shape: tuple[int, ...]) -> GPT:
    """Return a GPT of nanoGPT's size for characters on GPUs: 6 layers, width 384."""
    return GPT(classes, *shape, layers=6, heads=6, width=384)


def build_gpt2_small(classes: int, shape: tuple[int, ...]) -> GPT:
    """Return a GPT of the smallest GPT-2's size: twelve layers of width 768."""
    return GPT(classes, *shape, layers=12, heads=12, width=768)


#: How tensor-parallel workers divide each module of a GPT, by module path.
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

#: A GPT's forward as a chain of pieces, from which pipeline stages are made.
PIECES = ((embed_tokens, ("embedding", "position")), "blocks.*", "norm", "head")
