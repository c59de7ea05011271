"""Equal blocks are followed once: what is drawn out from few of them is the full trace's, to the byte."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from test_plan_footprint import ADAMW, SMALL, describe_gpt, request_for
from torch import nn

from stratbench.extensions.plan.footprint import drawn_out, equal_blocks, fake
from stratbench.extensions.plan.footprint.drawn_out import (
    TraceMismatchError,
    extrapolate_footprint_to_all_blocks,
    make_footprint_from_few_blocks,
)
from stratbench.extensions.plan.footprint.equal_blocks import (
    Blocks,
    are_blocks_called_alike,
    find_largest_equal_blocks,
)
from stratbench.extensions.plan.footprint.footprint import (
    Footprint,
    make_footprint,
    trace_two_steps,
)
from stratbench.extensions.plan.footprint.request import Request

pytestmark = pytest.mark.timeout(300)

LAYERS = equal_blocks.MIN_BLOCKS
#: A GPT, and a network with few operations per block.
WIDE, PERCEPTRONS = "wide text", "perceptrons"
OWN = {
    WIDE: describe_gpt(LAYERS, 768),
    "narrow text": describe_gpt(LAYERS, 64),
    PERCEPTRONS: {"call": f"{__name__}.Perceptrons", "kwargs": {}, "wrap_classes": ["Perceptron"]},
    "crossed": {"call": f"{__name__}.Crossed", "kwargs": {}, "wrap_classes": ["Layer"]},
}


class Layer(nn.Module):
    """A block that may look at its number."""

    def __init__(self, number: int, special: int = -1) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(16, 16)
        self._special = special

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.linear(x))
        return x.double().float() if self.number == self._special else x


class Perceptron(nn.Module):
    """A block whose gradients fill a bucket of DDP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Perceptrons(nn.Module):
    def __init__(self, vocab_size: int, width: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Perceptron(width) for _ in range(LAYERS))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Crossed(nn.Module):
    """What a layer gives is added to what its counterpart takes, as in a U-Net."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 16)
        self.layers = nn.ModuleList(Layer(i) for i in range(10))
        self.head = nn.Linear(16, vocab_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.embedding(x), []
        for i, layer in enumerate(self.layers):
            if kept and i >= len(self.layers) // 2:
                x = x * kept.pop()
            x = layer(x)
            if i < len(self.layers) // 2:
                kept.append(x)
        return self.head(x)


def request_of(name: str, strategy: str, **changes) -> Request:
    SMALL.setdefault(name, OWN[name])
    n = 1 if strategy == "single" else 4
    given = {"device": "cuda", "precision": "bf16"} | ADAMW | changes
    return replace(request_for(strategy, name, n, **given), input_shape=(64,))


@cache
def blocks_of(name: str, checkpointing: bool | str = False) -> Blocks | None:
    """The blocks are the same with each strategy."""
    request = request_of(name, "single", activation_checkpointing=checkpointing)
    with fake.open_fake_worker_environment(request):
        model, _, _ = fake.build_model_strategy_and_worker(request)
        blocks = find_largest_equal_blocks(model)
        x, _ = request.make_example_batch(2)
        return blocks if blocks and are_blocks_called_alike(model, blocks, x) else None


def assert_equal(drawn: Footprint, full: Footprint, parts: int) -> None:
    for name in (f.name for f in fields(Footprint) if f.name != "peak_moments"):
        assert getattr(drawn, name) == getattr(full, name), name
    for batch in (1, 2, 3, 16, 100, 1000):
        for threads in (0, 270336):
            peaks = [f.compute_training_peak(batch * parts, threads) for f in (drawn, full)]
            assert peaks[0].n_bytes == peaks[1].n_bytes, (batch, threads)
            assert peaks[0].parts_bytes == peaks[1].parts_bytes, (batch, threads)


def of_options(**options: Any) -> dict[str, Any]:
    return {"options": options}


IN_TWO_PARTS = {"gradient_accumulation_steps": 2}


#: Computing a block again adds marks within it: tried with no collective there, and with FSDP's. What is
#: combined in one case has marks, collectives or memory of its own. What a strategy adds to a block is the
#: same in the network with few operations.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "changes", "checkpointing"),
    [
        ("single", {}, False),
        ("single", {}, True),
        ("single", IN_TWO_PARTS | {"loss_chunks": 4}, "selective"),
        ("ddp", {}, False),
        ("fsdp", {}, "selective"),
        ("fsdp", IN_TWO_PARTS | of_options(mixed_precision="policy"), True),
        ("fsdp", IN_TWO_PARTS | of_options(offload="cpu"), False),
        ("fsdp", {"precision": "bf16-true"} | of_options(reshard_after_forward="never"), False),
        ("zero1", {}, False),
        ("ps-sync", {"precision": "fp32"}, False),
        ("tensor", of_options(tensor_parallel_size=2), True),
    ],
)
def test_a_network_drawn_out_from_few_blocks_is_the_one_that_is_followed(
    strategy, changes, checkpointing
):
    name = WIDE if strategy in ("single", "tensor") else PERCEPTRONS
    request = request_of(name, strategy, activation_checkpointing=checkpointing, **changes)
    blocks = blocks_of(name, checkpointing)
    assert blocks == ("blocks", LAYERS)
    drawn = extrapolate_footprint_to_all_blocks(partial(trace_two_steps, request, 0, None), blocks)
    assert_equal(drawn, make_footprint(request), request.num_accumulated_parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "changes", "reason"),
    [
        ("narrow text", "ddp", {}, "a bucket holds gradients of several blocks"),
        ("crossed", "single", {}, "before|after|back"),
        (WIDE, "single", {"optimizer_impl": "foreach"}, "numbers of events"),
    ],
)
def test_blocks_that_do_not_take_their_turns_alike_are_all_followed(
    name, strategy, changes, reason, monkeypatch
):
    """Small layers share a bucket, crossed ones hold what lies between, and foreach takes all at once."""
    request, blocks = request_of(name, strategy, **changes), blocks_of(name)
    assert blocks is not None
    raised = []

    def watched(*asked: Any) -> Footprint:
        with pytest.raises(TraceMismatchError, match=reason) as error:
            extrapolate_footprint_to_all_blocks(*asked)
        raised.append(error.value)
        raise error.value

    monkeypatch.setattr(drawn_out, "extrapolate_footprint_to_all_blocks", watched)
    monkeypatch.setattr(drawn_out, "make_footprint", lambda *asked: asked)
    assert make_footprint_from_few_blocks(request, None, blocks) == (request, None)
    assert len(raised) == 1


def test_every_fourth_block_is_checkpointed_where_all_are_followed(monkeypatch):
    request, few = request_of(WIDE, "single", activation_checkpointing="every-4"), []
    monkeypatch.setattr(drawn_out, "extrapolate_footprint_to_all_blocks", lambda *_: few.append(_))
    monkeypatch.setattr(drawn_out, "make_footprint", lambda *asked: asked)
    asked = make_footprint_from_few_blocks(request, None, blocks_of(WIDE))
    assert (asked, few) == ((request, None), [])


def layers(count: int = 8, **given) -> nn.ModuleList:
    return nn.ModuleList(Layer(i, **given) for i in range(count))


def test_only_modules_with_equal_parts_are_equal_blocks():
    def found(blocks: nn.ModuleList) -> Blocks | None:
        return find_largest_equal_blocks(nn.ModuleDict({"of": blocks}))

    assert found(layers()) == ("of", 8)
    assert found(layers(equal_blocks.MIN_BLOCKS - 1)) is None
    wider, numbered, frozen, shared = layers(), layers(), layers(), layers()
    wider[5].linear = nn.Linear(16, 16, bias=False)
    assert found(wider) is None
    numbered[5].number = 4
    assert found(numbered) is None
    frozen[5].linear.weight.requires_grad_(False)
    assert found(frozen) is None
    shared[5].linear = shared[4].linear
    assert found(shared) is None


@pytest.mark.parametrize(("special", "alike"), [(-1, True), (6, False)])
def test_a_block_that_computes_something_else_by_its_number_is_found(special, alike):
    model = nn.Sequential(*layers(special=special))
    assert are_blocks_called_alike(model, Blocks("", 8), torch.zeros(2, 16)) is alike
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_numbers_are_drawn_along_a_line():
    few, more = {"a": (1, 2.5), "b": "x"}, {"a": (3, 2.5), "b": "x"}
    assert drawn_out.extrapolate_numbers(few, more, 10) == {"a": (23, 2.5), "b": "x"}
    with pytest.raises(TraceMismatchError):
        drawn_out.extrapolate_numbers({"b": "x"}, {"b": "y"}, 10)
