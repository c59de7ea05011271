"""The networks: published sizes, inputs they accept, wrap groups, and what the record says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from stratbench.workload.data.dataset import get_sample_kind
from stratbench.workload.data.datasets import DATASETS
from stratbench.workload.network import models
from stratbench.workload.network.gpt import GPT
from stratbench.workload.network.models import (
    MODELS,
    build_model,
    build_model_for_training,
    compute_input_shape,
    has_batchnorm,
    has_dropout,
    list_shard_groups,
)
from stratbench.workload.tasks import Classification

WORKFLOW = Path(__file__).parents[2] / "workflow"
COMPACT = [name for name in MODELS if name.endswith("-compact")]
FULL = [name for name in MODELS if name not in COMPACT]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny batches on many threads cost more than on one, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def parameters(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def on_meta(name: str, classes: int, shape: tuple[int, ...] | None = None) -> nn.Module:
    """The network without memory; for texts of 64 tokens or images of 32 pixels."""
    with torch.device("meta"):
        return build_model(
            name, classes, shape or ((64,) if MODELS[name].reads_text else (3, 32, 32))
        )


def empty_batch(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = torch.int64 if MODELS[name].reads_text else torch.float32
    return torch.empty(4, *shape, device="meta", dtype=dtype)


def data_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The data sets that a model takes, and the shape it sees."""
    kind = "texts" if MODELS[name].reads_text else "images"
    taken = {
        key: facts
        for key, facts in DATASETS.items()
        if get_sample_kind(facts.shape) == kind and facts.vocabulary is None
    }
    return {key: compute_input_shape(name, facts.shape) for key, facts in taken.items()}


@pytest.mark.parametrize(
    ("name", "published", "classes", "shape"),
    [
        ("vgg16", 138_357_544, 1000, (3, 224, 224)),
        ("efficientnet_v2_l", 118_515_272, 1000, (3, 224, 224)),
        ("convnext_large", 197_767_336, 1000, (3, 224, 224)),
        ("resnet50", 25_557_032, 1000, (3, 224, 224)),
        ("densenet121", 7_978_856, 1000, (3, 224, 224)),
        ("vit_b_16", 86_567_656, 1000, (3, 224, 224)),
        ("gpt-char", 10_770_816, 65, (256,)),
        ("gpt2-small", 124_439_808, 50257, (1024,)),
    ],
)
def test_full_size_models_have_the_published_parameter_counts(
    name: str, published: int, classes: int, shape: tuple[int, ...]
) -> None:
    assert parameters(on_meta(name, classes, shape)) == published == MODELS[name].parameters


@pytest.mark.parametrize("name", COMPACT)
def test_compact_models_are_compact(name: str) -> None:
    shape, classes = ((64,), 65) if MODELS[name].reads_text else ((3, 224, 224), 1000)
    assert parameters(on_meta(name, classes, shape)) == MODELS[name].parameters
    for shape in data_shapes(name).values():
        assert 100_000 <= parameters(on_meta(name, 10, shape)) <= 900_000


def test_every_family_has_a_full_size_and_a_compact_model() -> None:
    assert {MODELS[name].family for name in FULL} == {MODELS[name].family for name in COMPACT}
    assert {f"{MODELS[name].family}-compact" for name in FULL} == set(COMPACT)


def test_input_shapes_follow_the_data_and_the_model() -> None:
    assert compute_input_shape("vgg16", (1, 28, 28)) == (3, 32, 32)
    assert compute_input_shape("vgg16", (3, 32, 32)) == (3, 32, 32)
    assert compute_input_shape("vgg16", (3, 224, 224)) == (3, 224, 224)
    assert compute_input_shape("vgg-compact", (1, 8, 8)) == (1, 16, 16)
    assert compute_input_shape("vgg-compact", (1, 28, 28)) == (1, 28, 28)
    assert compute_input_shape("vit_b_16", (1, 28, 28)) == (3, 32, 32)
    assert compute_input_shape("vit-compact", (1, 30, 30)) == (1, 32, 32), "whole patches"
    assert compute_input_shape("gpt-compact", (64,)) == (64,)
    for name, shape, reason in (
        ("vgg16", (2, 32, 32), "3 channels"),
        (
            "vit-compact",
            (1, 16, 32),
            "takes square images, but those of the data set have 16x32 pixels",
        ),
        ("vgg-compact", (64,), "takes images, but the data set has texts"),
        ("gpt-compact", (1, 8, 8), "takes texts, but the data set has images"),
    ):
        with pytest.raises(ValueError, match=reason):
            compute_input_shape(name, shape)


def check_step(model: nn.Module, inputs: torch.Tensor, classes: int) -> None:
    """One forward and backward pass: right shape, a finite loss, a gradient everywhere."""
    output = model(inputs)
    per_sample = inputs.shape[1:] if inputs.dim() == 2 else ()
    assert output.shape == (len(inputs), *per_sample, classes)
    targets = torch.arange(output[..., 0].numel(), device=inputs.device) % classes
    Classification().loss(output, targets.view(output.shape[:-1])).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    if not inputs.is_meta:
        assert output.isfinite().all()
        for label, parameter in model.named_parameters():
            assert parameter.grad.isfinite().all(), label


@pytest.mark.parametrize(("name", "dataset"), [(n, d) for n in COMPACT for d in data_shapes(n)])
def test_compact_models_train_on_every_data_set_of_their_kind(name: str, dataset: str) -> None:
    facts = DATASETS[dataset]
    shape = compute_input_shape(name, facts.shape)
    torch.manual_seed(0)
    model = build_model(name, facts.classes, shape)
    x = torch.randint(facts.classes, (4, *shape)) if facts.is_text else torch.randn(4, *shape)
    check_step(model, x, facts.classes)


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_full_size_models_accept_every_data_set_of_their_kind(name: str) -> None:
    for shape in set(data_shapes(name).values()):
        check_step(on_meta(name, 10, shape), empty_batch(name, shape), 10)


@pytest.mark.parametrize("name", ["densenet121", "resnet50"])
def test_the_cheaper_full_size_models_compute(name: str) -> None:
    check_step(build_model(name, 10), torch.randn(2, *compute_input_shape(name, (1, 8, 8))), 10)


def test_a_token_is_predicted_from_those_before_it() -> None:
    torch.manual_seed(0)
    model = build_model("gpt-compact", 65, (64,)).eval()
    tokens = torch.randint(65, (2, 64))
    changed = tokens.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 65
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40], after[:, 40])


def test_a_head_that_shares_the_embeddings_weights_still_does_when_placed() -> None:
    model = build_model_for_training(
        "gpt-compact", 65, (64,), 0, torch.device("cpu"), torch.float64
    )
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.dtype is torch.float64
    assert parameters(model) == MODELS["gpt-compact"].parameters
    untied = GPT(65, 64, layers=4, heads=4, width=128, tied=False)
    assert parameters(untied) == parameters(model) + 65 * 128


@pytest.mark.parametrize("name", COMPACT)
def test_the_same_seed_gives_the_same_weights(name: str) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(build_model(name, 10, data_shapes(name).popitem()[1]).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not all(torch.equal(states[0][key], states[2][key]) for key in states[0])


@pytest.mark.parametrize(
    ("name", "groups", "largest", "share"),
    [
        ("vgg16", 8, "classifier.0", 0.765),
        ("efficientnet_v2_l", 79, "features.7.6", 0.053),
        ("convnext_large", 36, "features.7.2", 0.097),
        ("resnet50", 16, "layer4.0", 0.257),
        ("densenet121", 7, "features.denseblock3", 0.407),
        ("vgg-compact", 6, "classifier.1", 0.671),
        ("efficientnet-compact", 5, "features.4.1", 0.321),
        ("convnext-compact", 4, "features.5.1", 0.376),
        ("resnet-compact", 4, "layer4", 0.704),
        ("densenet-compact", 5, "features.denseblock3", 0.358),
        ("vit_b_16", 12, "encoder.layers.encoder_layer_0", 0.083),
        ("vit-compact", 4, "encoder.layers.encoder_layer_0", 0.2402),
        ("gpt-compact", 4, "blocks.0", 0.247),
        ("gpt2-small", 12, "blocks.0", 0.083),
    ],
)
def test_wrap_groups_are_the_families_blocks(
    name: str, groups: int, largest: str, share: float
) -> None:
    model = on_meta(name, 10)
    sizes = {label: parameters(*modules) for label, modules in list_shard_groups(name, model)}
    assert len(sizes) == groups
    biggest = max(sizes.values())
    assert largest in [label for label, size in sizes.items() if size == biggest]
    assert biggest / parameters(model) == pytest.approx(share, abs=6e-4)


@pytest.mark.parametrize("name", MODELS)
def test_wrap_groups_are_disjoint_and_in_forward_order(name: str) -> None:
    model = on_meta(name, 10)
    groups = list_shard_groups(name, model)
    owned = [id(p) for _, modules in groups for m in modules for p in m.parameters()]
    assert len(owned) == len(set(owned)), "a parameter is in two groups"
    order: list[str] = []
    for label, modules in groups:
        modules[0].register_forward_pre_hook(lambda *_, label=label: order.append(label))
    model(empty_batch(name, (64,) if MODELS[name].reads_text else (3, 32, 32)))
    assert order == [label for label, _ in groups]


@pytest.mark.slow
def test_batchnorm_and_dropout_are_found_where_they_are() -> None:
    with_batchnorm = {name for name in MODELS if has_batchnorm(on_meta(name, 10))}
    assert {MODELS[name].family for name in with_batchnorm} == {
        "efficientnet",
        "resnet",
        "densenet",
    }
    assert len(with_batchnorm) == 6
    with_dropout = {name for name in MODELS if has_dropout(on_meta(name, 10))}
    assert with_dropout == {"vgg16", "efficientnet_v2_l", "convnext_large"}


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    for ask in (
        lambda: build_model("vgg17", 10),
        lambda: compute_input_shape("vgg17", (3, 32, 32)),
    ):
        with pytest.raises(ValueError, match=r"model 'vgg17': is unknown; use one of vgg16, "):
            ask()
    with pytest.raises(ValueError, match="takes images with 3 channels, not 1"):
        build_model("resnet50", 10, (1, 32, 32))


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(WORKFLOW)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("compiled_part", ["missing", "there"])
def test_models_build_whether_or_not_torchvisions_compiled_part_loads(compiled_part: str) -> None:
    # No operator can be loaded; those asked for at import are missing, or exist beforehand.
    prepare = "def refuse(path): raise OSError(path)\ntorch.ops.load_library = refuse\n"
    prepare += {
        "missing": "",
        "there": "lib = torch.library.Library('torchvision', 'FRAGMENT')\n"
        "for op in ('nms', 'qnms'):\n"
        "    if not hasattr(torch.ops.torchvision, op):\n"
        "        lib.define(op + '(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')",
    }[compiled_part]
    code = (
        "import stratbench.workload.with_torch, torch\n"
        f"{prepare}\nfrom stratbench.workload.network import models\n"
        "print(sum(p.numel() for p in models.build_model('vgg-compact', 1000).parameters()))"
    )
    assert run_python(code) == str(MODELS["vgg-compact"].parameters)


# ---------------------------------------------------------------- activation checkpointing


def trained_by_two_steps(
    name: str, checkpointing: bool, dropout: float = 0.0
) -> list[torch.Tensor]:
    """Loss, gradients, buffers and the next random number after two steps in float64."""
    text = name.startswith("gpt")
    shape, device = (16,) if text else (3, 32, 32), torch.device("cpu")

    def build(*args: object) -> torch.nn.Module:
        model = models.build_model(*args)
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm | torch.nn.ReLU) and dropout:
                module.register_forward_hook(
                    lambda m, a, out: torch.nn.functional.dropout(out, dropout, m.training)
                )
        return model

    model = models.build_model_for_training(
        name, 10, shape, 0, device, torch.float64, build, checkpointing_mode=checkpointing
    )
    x = torch.randint(10, (4, *shape)) if text else torch.randn(4, *shape, dtype=torch.float64)
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers(), torch.rand(1)]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("name", "dropout"),
    [("resnet-compact", 0), ("densenet-compact", 0), ("efficientnet-compact", 0), ("gpt-compact", 0.2)],
)  # fmt: skip
def test_what_is_computed_again_is_the_same_bit_for_bit(name, dropout):
    """BatchNorm's statistics and counts, and what dropout draws, included."""
    plain, again = (trained_by_two_steps(name, c, dropout) for c in (False, True))
    assert equal(plain, again)


def test_statistics_taken_twice_and_other_random_numbers_are_seen(monkeypatch):
    """Mutants of the test above."""
    from contextlib import nullcontext
    from functools import partial

    from stratbench.workload.network import checkpointing

    plain = trained_by_two_steps("resnet-compact", False)
    with monkeypatch.context() as m:
        m.setattr(
            checkpointing,
            "_make_forward_and_recompute_contexts",
            lambda *given: (nullcontext(), nullcontext()),
        )
        assert not equal(plain, trained_by_two_steps("resnet-compact", True))
    forgets = partial(checkpointing.checkpoint, preserve_rng_state=False)
    monkeypatch.setattr(checkpointing, "checkpoint", forgets)
    plain = trained_by_two_steps("gpt-compact", False, 0.2)
    assert not equal(plain, trained_by_two_steps("gpt-compact", True, 0.2))
