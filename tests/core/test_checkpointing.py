"""Activation checkpointing of single blocks: what is drawn, cast, called again or changed in place."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn

from stratbench.cell.settings import build_experiment_schema
from stratbench.study.config.schema import parse_texts_by_schema
from stratbench.workload.network.checkpointing import (
    checkpoint_and_count_blocks,
    is_recomputing_block,
)

TOKENS, WIDTH = 11, 16
MODES = (True, "selective")


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, inplace: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.relu, self.dropout = nn.ReLU(inplace), nn.Dropout(dropout)
        self.seen: list[bool] = []

    def note(self) -> None:
        self.seen.append(is_recomputing_block())

    def forward(self, h: Tensor) -> Tensor:
        self.note()
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return h + self.dropout(self.down(self.relu(self.up(h))))


class Repeated(nn.Module):
    """Calls one block several times, so that its weights are cast once for all calls."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(TOKENS, WIDTH), Block(**options)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for _ in range(3):
            h = self.block(h)
        return self.head(h)


def gradients(model: nn.Module, autocast: bool = False) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randint(TOKENS, (4, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    return [p.grad for p in model.parameters()]


def both(mode: bool | str, **options) -> tuple[nn.Module, nn.Module]:
    """A network, and the same with its block checkpointed."""
    torch.manual_seed(0)
    plain = Repeated(**options)
    again = copy.deepcopy(plain)
    assert checkpoint_and_count_blocks([("block", [again.block])], mode) == 1
    return plain, again


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_what_is_computed_again_is_what_was_computed(mode, dropout):
    """Also where attention drops out: kept, it would leave the generator behind."""
    plain, again = (network.double() for network in both(mode, dropout=dropout))
    assert all(map(torch.equal, gradients(plain), gradients(again)))
    assert again.block.seen == [False] * 3 + [True] * 3
    assert not is_recomputing_block()


@pytest.mark.parametrize("mode", MODES)
def test_a_block_that_is_called_again_casts_its_weights_again(mode):
    plain, again = both(mode)
    for one, other in zip(gradients(plain, True), gradients(again, True), strict=True):
        assert (one - other).abs().max() < 2e-2 * one.abs().max()


def test_a_kept_result_that_is_changed_in_place_is_refused_by_its_remedy_or_computed_again():
    plain, whole = both(True, inplace=True)
    expected = gradients(plain)
    assert all(map(torch.equal, expected, gradients(whole)))
    _, selective = both("selective", inplace=True)
    if Version(torch.__version__) >= Version("2.15"):  # it computes such a result again
        assert all(map(torch.equal, expected, gradients(selective)))
    else:
        with pytest.raises(RuntimeError, match="set inplace to False, or activation_checkpointing"):
            gradients(selective)
    assert not is_recomputing_block()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_compiled_blocks_are_computed_again(mode, monkeypatch):
    """By a backend that needs no compiler."""
    monkeypatch.setattr(Block, "note", lambda _: None)  # a compiler takes no lists
    plain, again = (network.double() for network in both(mode))
    compiled = torch.compile(again, backend="aot_eager", dynamic=False)
    for one, other in zip(gradients(plain), gradients(compiled), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("selective", "selective")]
)
def test_a_text_that_says_true_is_true(text, value):
    """Snakemake passes values of --config as text."""
    given = parse_texts_by_schema({"activation_checkpointing": text}, build_experiment_schema())
    assert given == {"activation_checkpointing": value}
