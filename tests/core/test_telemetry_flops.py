"""Counted operations against published ones, and against a sum by hand."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import FlopCounterMode

from stratbench.telemetry.flops import count_flops
from stratbench.workload.known_values import KnownValueFakeMode
from stratbench.workload.network import models
from stratbench.workload.torch_internals import make_flop_formulas

#: torchvision's own figures: billions of multiply-adds, and the image size they are for.
PUBLISHED = {
    "vgg16": ("VGG16_Weights", 224),
    "resnet50": ("ResNet50_Weights", 224),
    "densenet121": ("DenseNet121_Weights", 224),
    "convnext_large": ("ConvNeXt_Large_Weights", 224),
    "efficientnet_v2_l": ("EfficientNet_V2_L_Weights", 480),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "resnet50" else pytest.mark.slow)
        for name in PUBLISHED
    ],
)
def test_published_networks(name):
    models.import_torchvision()
    import torchvision

    weights, size = PUBLISHED[name]
    multiply_adds = 1e9 * getattr(torchvision.models, weights).DEFAULT.meta["_ops"]
    build = partial(models.build_fake_model, name, 1000, (3, 224, 224))
    counted = count_flops(build, (3, size, size))["forward_flops_per_sample"]
    assert counted == pytest.approx(2 * multiply_adds, rel=0.01)


def test_a_sum_by_hand():
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, groups=2),
            nn.BatchNorm2d(4),
            nn.Flatten(),
            nn.Linear(100, 3),
        )

    forward = 2 * (4 * 25 * 9 * 1 + 100 * 3)
    assert count_flops(build, (2, 5, 5)) == {
        "forward_flops_per_sample": forward,
        "training_flops_per_sample": 3 * forward,
    }


class Attends(nn.Module):
    """Two heads of width 8, whose scores and sums alone are products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def test_fused_attention_is_counted_whole():
    made = count_flops(Attends, (5, 16))
    assert made["forward_flops_per_sample"] == 2 * 2 * 2 * 5 * 5 * 8


def test_frozen_parameters_have_no_gradients_to_count():
    def build() -> nn.Module:
        frozen, after = nn.Linear(10, 20).requires_grad_(False), nn.Linear(20, 20)
        between = nn.Linear(20, 5).requires_grad_(False)
        return nn.Sequential(frozen, after, between)

    first, second, third = 2 * 10 * 20, 2 * 20 * 20, 2 * 20 * 5
    # Of `between` only the gradient of its input; of `after` only its weight's, since nothing before
    # it is trained.
    assert count_flops(build, (1, 10))["training_flops_per_sample"] == (
        first + second + third + third + second
    )


def test_a_grouped_convolution_before_something_frozen_counts_its_two_gradients():
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1).requires_grad_(False),
            nn.Conv2d(4, 4, 3, padding=1, groups=2),
            nn.ConvTranspose2d(4, 6, 3, padding=1, groups=2),
            nn.Conv2d(6, 4, 1).requires_grad_(False),
        )

    first, second, third, last = (2 * 25 * n for n in (4 * 9 * 2, 4 * 9 * 2, 4 * 9 * 3, 4 * 6))
    assert count_flops(build, (2, 5, 5)) == {
        "forward_flops_per_sample": first + second + third + last,
        "training_flops_per_sample": first + 2 * second + 3 * third + 2 * last,
    }


class Masks(nn.Linear):
    """Asks once for the truth of a mask of positions, but not of a fake one, as transformers' masks do."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(10)
        if not isinstance(positions, FakeTensor) and not (positions.diff() == 1).all():
            raise ValueError("several sequences in one")
        return super().forward(x.float())


def test_what_asks_for_no_values_of_fakes_is_counted():
    assert count_flops(lambda: Masks(10, 5), (10,))["forward_flops_per_sample"] == 2 * 10 * 5


def test_counting_draws_no_random_number():
    before = torch.get_rng_state()
    count_flops(lambda: models.build_model("vgg-compact", 10, (1, 32, 32)), (1, 28, 28))
    assert torch.equal(before, torch.get_rng_state())


class Experts(nn.Module):
    """A matrix for each group of rows, as transformers computes experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 5, 8], dtype=torch.int32)
        return F.grouped_mm(x.reshape(8, 16), self.up, offs=ends)


def test_grouped_products_of_any_format_are_followed_and_counted():
    """PyTorch's rule for tensors without memory takes bfloat16 alone, and it counts none of them."""
    assert count_flops(Experts, (8, 16))["forward_flops_per_sample"] == 2 * 8 * 16 * 32
    shapes = []
    for mode in (contextlib.nullcontext(), KnownValueFakeMode()):
        with mode, FlopCounterMode(display=False, custom_mapping=make_flop_formulas()) as counter:
            model, x = Experts(), torch.randn(8, 16, requires_grad=True)
            made = model(x)
            made.square().sum().backward()
        tensors = (made, model.up.grad, x.grad)
        shapes.append([(t.shape, t.dtype) for t in tensors] + [counter.get_total_flops()])
    assert shapes[0] == shapes[1]
    assert shapes[0][-1] == 3 * 2 * 8 * 16 * 32
