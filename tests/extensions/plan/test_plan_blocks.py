"""Equal blocks are followed once: what is drawn out from few of them is the full trace's, to the byte."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from test_plan_footprint import ADAMW, SMALL, request_for
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
WIDE = "wide text"
OWN = {
    WIDE: f'{{"call": "stratbench.workload.network.gpt.GPT", "kwargs": {{"layers": {LAYERS}, "heads": 4, '
    '"width": 768}, "wrap_classes": ["Block"]}',
    "narrow text": f'{{"call": "stratbench.workload.network.gpt.GPT", "kwargs": {{"layers": {LAYERS}, '
    '"heads": 4, "width": 64}, "wrap_classes": ["Block"]}',
    "crossed": f'{{"call": "{__name__}.Crossed", "kwargs": {{}}, "wrap_classes": ["Layer"]}}',
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
    if name in OWN:
        SMALL.setdefault(name, OWN[name])
    n = 1 if strategy == "single" else 4
    given = {"device": "cuda", "precision": "bf16"} | ADAMW | changes
    return replace(request_for(strategy, name, n, **given), input_shape=(64,))


def blocks_of(request: Request) -> Blocks | None:
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


POLICY = {"options": {"mixed_precision": "policy"}}


#: Computing a block again adds marks within it: tried with no collective there, and with FSDP's; of what is
#: combined each pair.
AGAIN = [
    ("single", {}, True),
    ("single", {"gradient_accumulation_steps": 2}, "selective"),
    ("fsdp", {}, "selective"),
    ("fsdp", {"gradient_accumulation_steps": 2}, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "changes", "checkpointing"),
    [
        *AGAIN,
        ("single", {}, False),
        ("single", {"gradient_accumulation_steps": 2}, False),
        ("fsdp", {}, False),
        ("fsdp", {"gradient_accumulation_steps": 2}, False),
        ("ddp", {}, False),
        ("zero1", {}, False),
        ("fsdp", POLICY, False),
        ("fsdp", {"options": {"reshard_after_forward": "never"}}, False),
        ("fsdp", {"options": {"offload": "cpu"}}, False),
        ("single", {"loss_chunks": 4}, False),
        ("fsdp", {"precision": "bf16-true"}, False),
        ("ps-sync", {"precision": "fp32"}, False),
        ("tensor", {"options": {"tensor_parallel_size": 2}}, True),
    ],
)
def test_a_network_drawn_out_from_few_blocks_is_the_one_that_is_followed(
    strategy, changes, checkpointing
):
    name = "gpt2-small" if strategy == "tensor" else WIDE  # which states how it is divided
    request = request_of(name, strategy, activation_checkpointing=checkpointing, **changes)
    blocks = blocks_of(request)
    assert blocks == ("blocks", 12 if strategy == "tensor" else LAYERS)
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
    request = request_of(name, strategy, **changes)
    blocks = blocks_of(request)
    assert blocks is not None
    with pytest.raises(TraceMismatchError, match=reason):
        extrapolate_footprint_to_all_blocks(partial(trace_two_steps, request, 0, None), blocks)
    monkeypatch.setattr(drawn_out, "make_footprint", lambda *asked: asked)
    assert make_footprint_from_few_blocks(request, None, blocks) == (request, None)


def test_every_fourth_block_is_checkpointed_where_all_are_followed(monkeypatch):
    request = request_of(WIDE, "single", activation_checkpointing="every-4")
    monkeypatch.setattr(drawn_out, "make_footprint", lambda *asked: asked)
    assert make_footprint_from_few_blocks(request, None, blocks_of(request)) == (request, None)


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
