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

from stratbench.workload.datasets import DATASETS
from stratbench.workload.models import (
    MODELS,
    build,
    has_batchnorm,
    has_dropout,
    input_shape,
    wrap_groups,
)

WORKFLOW = Path(__file__).parents[2] / "workflow"
COMPACT = [name for name, model in MODELS.items() if model.builder]
FULL = [name for name, model in MODELS.items() if not model.builder]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny batches on many threads cost more than on one, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def parameters(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def on_meta(name: str, classes: int, channels: int = 3) -> nn.Module:
    with torch.device("meta"):
        return build(name, classes, channels)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("vgg16", 138_357_544),
        ("efficientnet_v2_l", 118_515_272),
        ("convnext_large", 197_767_336),
        ("resnet50", 25_557_032),
        ("densenet121", 7_978_856),
    ],
)
def test_full_size_models_have_the_published_parameter_counts(name: str, published: int) -> None:
    assert parameters(on_meta(name, 1000)) == published == MODELS[name].parameters


@pytest.mark.parametrize("name", COMPACT)
def test_compact_models_are_compact(name: str) -> None:
    assert parameters(on_meta(name, 1000)) == MODELS[name].parameters
    for channels in (1, 3):
        assert 100_000 <= parameters(on_meta(name, 10, channels)) <= 500_000


def test_every_family_has_a_full_size_and_a_compact_model() -> None:
    assert sorted(MODELS[name].family for name in FULL) == sorted(
        MODELS[name].family for name in COMPACT
    )
    assert [f"{MODELS[name].family}-compact" for name in FULL] == COMPACT


def test_input_shapes_follow_the_data_and_the_model() -> None:
    assert input_shape("vgg16", (1, 28, 28)) == (3, 32, 32)
    assert input_shape("vgg16", (3, 32, 32)) == (3, 32, 32)
    assert input_shape("vgg16", (3, 224, 224)) == (3, 224, 224)
    assert input_shape("vgg-compact", (1, 8, 8)) == (1, 16, 16)
    assert input_shape("vgg-compact", (1, 28, 28)) == (1, 28, 28)
    with pytest.raises(ValueError, match="3 channels"):
        input_shape("vgg16", (2, 32, 32))


def check_step(model: nn.Module, images: torch.Tensor, classes: int) -> None:
    """One forward and backward pass: right shape, a finite loss, a gradient everywhere."""
    labels = torch.arange(len(images), device=images.device) % classes
    output = model(images)
    assert output.shape == (len(images), classes)
    nn.functional.cross_entropy(output, labels).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    if not images.is_meta:
        assert output.isfinite().all()
        for label, parameter in model.named_parameters():
            assert parameter.grad.isfinite().all(), label


@pytest.mark.parametrize("name", COMPACT)
@pytest.mark.parametrize("dataset", ["digits", "mnist", "cifar10"])
def test_compact_models_train_on_every_data_set(name: str, dataset: str) -> None:
    facts = DATASETS[dataset]
    shape = input_shape(name, facts.shape)
    torch.manual_seed(0)
    model = build(name, facts.classes, shape[0])
    check_step(model, torch.randn(4, *shape), facts.classes)


@pytest.mark.parametrize("name", FULL)
def test_full_size_models_accept_every_data_set(name: str) -> None:
    model = on_meta(name, 10)
    for shape in {input_shape(name, facts.shape) for facts in DATASETS.values()}:
        check_step(model, torch.empty(4, *shape, device="meta"), 10)


@pytest.mark.parametrize("name", ["densenet121", "resnet50"])
def test_the_cheaper_full_size_models_compute(name: str) -> None:
    check_step(build(name, 10), torch.randn(2, *input_shape(name, (1, 8, 8))), 10)


@pytest.mark.parametrize("name", COMPACT)
def test_the_same_seed_gives_the_same_weights(name: str) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(build(name, 10, 1).state_dict())
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
    ],
)
def test_wrap_groups_are_the_families_blocks(
    name: str, groups: int, largest: str, share: float
) -> None:
    model = on_meta(name, 10)
    sizes = {label: parameters(*modules) for label, modules in wrap_groups(name, model)}
    assert len(sizes) == groups
    biggest = max(sizes.values())
    assert largest in [label for label, size in sizes.items() if size == biggest]
    assert biggest / parameters(model) == pytest.approx(share, abs=6e-4)


@pytest.mark.parametrize("name", MODELS)
def test_wrap_groups_are_disjoint_and_in_forward_order(name: str) -> None:
    model = on_meta(name, 10)
    groups = wrap_groups(name, model)
    owned = [id(p) for _, modules in groups for m in modules for p in m.parameters()]
    assert len(owned) == len(set(owned)), "a parameter is in two groups"
    order: list[str] = []
    for label, modules in groups:
        modules[0].register_forward_pre_hook(lambda *_, label=label: order.append(label))
    model(torch.empty(2, 3, 32, 32, device="meta"))
    assert order == [label for label, _ in groups]


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
    for ask in (lambda: build("vgg17", 10), lambda: input_shape("vgg17", (3, 32, 32))):
        with pytest.raises(ValueError, match=r"unknown model 'vgg17'; known: vgg16, "):
            ask()
    with pytest.raises(ValueError, match="takes 3 channels, not 1"):
        build("resnet50", 10, channels=1)


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(WORKFLOW)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_reading_the_facts_imports_neither_torch_nor_numpy() -> None:
    heavy = "{'torch', 'numpy', 'torchvision'}"
    code = f"import sys, stratbench.workload.models; print({heavy} & set(sys.modules))"
    assert run_python(code) == "set()"


@pytest.mark.slow
@pytest.mark.timeout(90)
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
        f"import torch\n{prepare}\nfrom stratbench.workload import models\n"
        "print(sum(p.numel() for p in models.build('vgg-compact', 1000).parameters()))"
    )
    assert run_python(code) == str(MODELS["vgg-compact"].parameters)
