"""What cells on GPUs are made of, on fake tensors and without a GPU: every strategy takes it.

The plan builds its cells through the functions that training calls, so what it can step, training can.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_plan_footprint import request_for
from torch.distributed import fsdp

from stratbench.extensions.plan.footprint import fake
from stratbench.workload.data.device_data import DeviceData
from stratbench.workload.network import models
from stratbench.workload.network.precision import get_batch_memory_format, get_weights_dtype

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STRATEGIES = [
    ("single", {}),
    ("ddp", {}),
    ("ddp", {"gradient_as_bucket_view": False}),
    ("fsdp", {}),
    ("fsdp", {"reshard_after_forward": "never"}),
    ("fsdp", {"mixed_precision": "policy"}),
    ("ps-sync", {}),
]
PRECISIONS = ["fp16", "bf16", "tf32", "fp32", "fp64"]
COMPACT = [name for name in models.MODELS if name.endswith("-compact")]
#: What hangs on no number format.
ALIKE = ({"gradient_as_bucket_view": False}, {"reshard_after_forward": "never"})
#: A small network in everything; in the families what differs by family, in fp16, which has all there is:
#: their groups and formats in shards (here of 16 bits), and under autocast in flat tensors.
CASES = [
    ("small images", precision, *s)
    for precision in PRECISIONS
    for s in STRATEGIES
    if precision == "fp16" or s[1] not in ALIKE
] + [
    (model, "fp16", *s)
    for model in COMPACT
    for s in STRATEGIES
    if s in (("fsdp", {"mixed_precision": "policy"}), ("ps-sync", {}))
]


@pytest.mark.parametrize(("model", "precision", "strategy", "options"), CASES)
def test_every_strategy_steps_as_on_cuda(model: str, precision: str, strategy: str, options: dict):
    """Among what would raise: a layout that FSDP2 refuses, or one that the fused SGD refuses."""
    workers = 1 if strategy in ("single", "ps-sync") else 4
    request = request_for(
        strategy, model, workers, options=options, precision=precision, device="cuda"
    )
    trace, made = fake.trace_training_steps(replace(request, eval_batch=4), [4])
    assert [p.name for p in trace.phases] == [
        "setup",
        "forward",
        "backward",
        "optimizer",
        "evaluate",
    ]
    assert all(p.is_contiguous() for p in made.model.parameters())


def test_fsdp_hands_pytorch_no_container(monkeypatch: pytest.MonkeyPatch):
    """PyTorch 2.11 refuses a ModuleDict, as DenseNet's block is, though it has a forward of its own."""
    real = fsdp.fully_shard

    def as_in_211(module, **arguments):
        assert not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
        return real(module, **arguments)

    monkeypatch.setattr(fsdp, "fully_shard", as_in_211)
    request = request_for("fsdp", "densenet-compact", 4)
    with fake.open_fake_worker_environment(request):
        model, strategy, worker = fake.build_model_strategy_and_worker(request)
        fake.set_up_strategy(strategy, model, worker)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_starts_from_its_seed_whatever_it_computes_in(precision: str):
    dtype = get_weights_dtype(precision)
    model = models.build_model_for_training(
        "resnet-compact", 10, (3, 32, 32), 5, torch.device("cpu"), dtype
    )
    torch.manual_seed(5)
    plain = models.build_model("resnet-compact", 10, (3, 32, 32)).state_dict()
    assert model.training
    for name, t in model.state_dict().items():
        assert t.is_contiguous(), name
        assert t.dtype == (dtype if t.is_floating_point() else torch.int64), name
        assert torch.equal(t, plain[name].to(t.dtype)), name
    assert [n for n, _ in model.named_parameters()] == [
        n for n, _ in models.build_model("resnet-compact", 10, (3, 32, 32)).named_parameters()
    ]


def test_batches_come_in_the_format_asked_for(tiny_data):
    """Training and test batches, also where a lone channel is repeated, with the same values."""
    plain = DeviceData.load_prepared_data_set(tiny_data, shape=(3, 16, 16))
    data = DeviceData.load_prepared_data_set(
        tiny_data, shape=(3, 16, 16), memory_format=torch.channels_last
    )
    for (x, _), (y, _) in (
        (plain.make_training_batch(torch.arange(5)), data.make_training_batch(torch.arange(5))),
        (plain.make_test_batch(3, 9), data.make_test_batch(3, 9)),
    ):
        assert x.is_contiguous()
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert not y.is_contiguous()
        assert torch.equal(x, y)


def test_tensor_cores_get_channels_last():
    found = {p: get_batch_memory_format(p, "cuda") is torch.channels_last for p in PRECISIONS}
    assert found == {"fp16": True, "bf16": True, "tf32": True, "fp32": False, "fp64": False}
    assert get_batch_memory_format("fp16", "cpu") is torch.contiguous_format
