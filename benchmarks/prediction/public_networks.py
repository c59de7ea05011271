"""Networks of public measurements, written from the widths and layers that their sources state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from stratbench.workload.tasks import NextToken

aten = torch.ops.aten
#: What selective checkpointing keeps: attention, and every second matrix product.
KEPT = {
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


class HeldScores(NextToken):
    """Next tokens in a loop that keeps the scores, in 32 bits, until backward has ended."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores = outputs.float()
        loss = F.cross_entropy(scores.flatten(0, -2), targets.flatten())
        loss.kept = scores
        return loss


def selective_contexts() -> Any:
    """Return the contexts of selective checkpointing by operators, as torchtitan has it."""
    products = {True: 0, False: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op == aten.mm.default:
            products[context.is_recompute] += 1
        odd = op != aten.mm.default or products[context.is_recompute] % 2
        keep = op in KEPT and odd
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class EagerRMSNorm(nn.Module):
    """A norm in 32 bits that keeps its parts, as Llama's first code had it."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y.type_as(x) * self.weight


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Return heads [batch, token, head, size], turned by complex numbers [token, size / 2]."""
    y = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(y * turns[:, None, :]).flatten(3).type_as(x)


class RotaryAttention(nn.Module):
    """Causal attention of grouped heads; Qwen3 has norms of queries and keys (`norm_heads`)."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int, norm_heads: bool):
        super().__init__()
        self.size, self.repeats = size, heads // kv_heads
        self.wq = nn.Linear(width, heads * size, bias=False)
        self.wk = nn.Linear(width, kv_heads * size, bias=False)
        self.wv = nn.Linear(width, kv_heads * size, bias=False)
        self.wo = nn.Linear(heads * size, width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(size, eps=1e-6) for _ in range(2 * norm_heads))

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.size)) for p in (self.wq, self.wk, self.wv))
        if self.norms:
            q, k = self.norms[0](q), self.norms[1](k)
        if turns is not None:
            q, k = rotate(q, turns), rotate(k, turns)
        if self.repeats > 1:
            k, v = (
                y[:, :, :, None].expand(-1, -1, -1, self.repeats, -1).flatten(2, 3) for y in (k, v)
            )
        y = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class GatedLayer(nn.Module):
    """Llama's gated feed-forward layer."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    """One block of Llama."""

    def __init__(
        self, attention: nn.Module, width: int, hidden: int, norm: Callable[[int], nn.Module]
    ):
        super().__init__()
        self.attention, self.feed_forward = attention, GatedLayer(width, hidden)
        self.n1, self.n2 = norm(width), norm(width)
        self.selective = False

    def body(self, x: Tensor, turns: Tensor | None) -> Tensor:
        h = x + self.attention(self.n1(x), turns)
        return h + self.feed_forward(self.n2(h))

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        if self.selective and torch.is_grad_enabled():
            kept = {"preserve_rng_state": False, "context_fn": selective_contexts}
            return checkpoint(self.body, x, turns, use_reentrant=False, **kept)
        return self.body(x, turns)


class Llama(nn.Module):
    """Llama 2 and 3, and Qwen3 (`norm_heads`, no rotation in memory).

    `head_size`: None: width / heads. `selective`: whether blocks checkpoint single operators. `eager_norm`:
    whether norms are sums and products, as in the code of 2024.
    """

    def __init__(
        self,
        vocab_size: int,
        sequence: int,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        head_size: int | None = None,
        selective: bool = False,
        eager_norm: bool = False,
        norm_heads: bool = False,
        tied: bool = False,
    ):
        super().__init__()
        size = head_size or width // heads
        norm = EagerRMSNorm if eager_norm else partial(nn.RMSNorm, eps=1e-5)
        self.embed, self.stream = nn.Embedding(vocab_size, width), nn.Identity()
        turns = None if norm_heads else torch.ones(sequence, size // 2, dtype=torch.complex64)
        self.register_buffer("turns", turns, persistent=False)
        self.layers = nn.ModuleList(
            LlamaBlock(
                RotaryAttention(width, heads, kv_heads, size, norm_heads), width, hidden, norm
            )
            for _ in range(layers)
        )
        for layer in self.layers:
            layer.selective = selective
        self.norm, self.output = norm(width), nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.output.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.stream(self.embed(tokens))
        turns = None if self.turns is None else self.turns[: tokens.shape[1]]
        for layer in self.layers:
            h = layer(h, turns)
        return self.output(self.norm(h))


LLAMA_TENSOR_PLAN = {
    "embed": "embedding",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward": "input",
    "layers.*.feed_forward.w1": "colwise of input",
    "layers.*.feed_forward.w3": "colwise of input",
    "layers.*.feed_forward.w2": "rowwise",
    "output": "scores",
}
#: The same, by which the stream between blocks can be divided by positions, too.
LLAMA_SEQUENCE_PLAN = LLAMA_TENSOR_PLAN | {
    "stream": "first",
    "layers.*.n1": "norm",
    "layers.*.attention": "input",
    **{f"layers.*.attention.{name}": "colwise of input" for name in ("wq", "wk", "wv")},
    "layers.*.n2": "norm",
    "norm": "norm",
}


class GPTBlock(nn.Module):
    """A block of MPT and GPT-2: one matrix for queries, keys and values, fused attention.

    `separate`: three matrices in its place, which can be divided among workers.
    """

    def __init__(self, width: int, heads: int, bias: bool, separate: bool = False):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.separate = separate
        if separate:
            self.wq, self.wk, self.wv = (nn.Linear(width, width, bias=bias) for _ in range(3))
        else:
            self.wqkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=bias),
            nn.Linear(4 * width, width, bias=bias),
        )
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.n1(x)
        parts = [w(y) for w in (self.wq, self.wk, self.wv)] if self.separate else []
        parts = parts or self.wqkv(y).chunk(3, -1)
        size = x.shape[-1] // self.heads
        q, k, v = (y.unflatten(-1, (-1, size)).transpose(1, 2) for y in parts)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    """MPT and GPT-2: learned positions, a head that is the embedding or (`separate`) has its own weights."""

    def __init__(
        self,
        vocab_size: int,
        sequence: int,
        layers: int,
        width: int,
        heads: int,
        bias: bool = False,
        separate: bool = False,
    ):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab_size, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, bias, separate) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocab_size, bias=False) if separate else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = embed_tokens(self, tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) if self.head is not None else F.linear(x, self.embed.weight)


def embed_tokens(model: GPT, tokens: Tensor) -> Tensor:
    """Return the first activations of a GPT."""
    return model.embed(tokens) + model.position.weight[: tokens.shape[1]]


GPT_PIECES = ((embed_tokens, ("embed", "position")), "blocks.*", "norm", "head")
GPT_TENSOR_PLAN = {
    "embed": "embedding",
    "blocks.*.wq": "colwise",
    "blocks.*.wk": "colwise",
    "blocks.*.wv": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "scores",
}


class KeptAttention(nn.Module):
    """Attention whose scores are kept: a product, a softmax, dropout and a product."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, causal: bool = False):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.dropout, self.causal = heads, dropout, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.causal:
            t = x.shape[1]
            later = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, -10000.0)
        weights = F.dropout(torch.softmax(scores, -1), self.dropout, self.training)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class MegatronBlock(nn.Module):
    """A block of Megatron's GPT without fused kernels."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = KeptAttention(width, heads, 0.1, causal=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.n1(x)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.n2(x)))), 0.1, self.training)


class MegatronGPT(nn.Module):
    """Megatron's GPT of its functional tests."""

    def __init__(self, vocab_size: int, sequence: int, layers: int, width: int, heads: int):
        super().__init__()
        self.embedding, self.position = (
            nn.Embedding(vocab_size, width),
            nn.Embedding(sequence, width),
        )
        self.blocks = nn.ModuleList(MegatronBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = embed(self, tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def embed(model: MegatronGPT, tokens: Tensor) -> Tensor:
    """Return the first activations of Megatron's GPT."""
    x = model.embedding(tokens) + model.position.weight[: tokens.shape[1]]
    return F.dropout(x, 0.1, model.training)


MEGATRON_PIECES = ((embed, ("embedding", "position")), "blocks.*", "norm", "head")


class BertLayer(nn.Module):
    """A layer of BERT, whose norms follow the sums."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = KeptAttention(width, heads, 0.1)
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(x + F.dropout(self.attention(x), 0.1, self.training))
        return self.n2(x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training))


class Bert(nn.Module):
    """BERT as a classifier; the pixels of an image are its tokens."""

    def __init__(self, num_classes: int, layers: int = 24, width: int = 1024, heads: int = 16):
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(n, width) for n in (30522, 512, 2))
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, num_classes)

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = pixels.flatten(1).long()
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]] + self.kinds.weight[0]
        x = F.dropout(self.norm(x), 0.1, self.training)
        for layer in self.layers:
            x = layer(x)
        pooled = F.dropout(torch.tanh(self.pooler(x[:, 0])), 0.1, self.training)
        return self.head(pooled)


class ViTBlock(nn.Module):
    """A block of ViT whose attention is not fused."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = KeptAttention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class ViT(nn.Module):
    """ViT on patches of 16 pixels."""

    def __init__(self, num_classes: int, layers: int, width: int, heads: int, size: int = 224):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (size // 16) ** 2 + 1, width))
        self.blocks = nn.ModuleList(ViTBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class EncoderDecoder(nn.Module):
    """Lightning's demonstration: torch's own transformer of one billion parameters."""

    def __init__(
        self,
        vocab_size: int,
        sequence: int,
        layers: int = 32,
        width: int = 1024,
        heads: int = 64,
        hidden: int = 4096,
    ):
        super().__init__()
        self.embedding, self.drop = nn.Embedding(vocab_size, width), nn.Dropout(0.2)
        self.transformer = nn.Transformer(
            width, heads, layers, layers, hidden, 0.2, batch_first=True
        )
        self.decoder = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.shape[1]
        later = torch.ones(t, t, device=tokens.device).tril() == 0
        source, target = (
            self.drop(self.embedding(tokens) * self.embedding.embedding_dim**0.5) for _ in range(2)
        )
        return self.decoder(self.transformer(source, target, tgt_mask=later, tgt_is_causal=False))
