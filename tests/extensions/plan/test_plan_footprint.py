"""Footprints: fake tensors against real ones, any batch from two, sharding, DDP's own buckets."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.extensions.plan.footprint import fake, footprint, torch_internals
from stratbench.extensions.plan.footprint.footprint import Affine, find_highest_line_indices
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.plan.footprint.trace import OperatorTrace
from stratbench.extensions.plan.footprint.traffic import compute_wire_bytes
from stratbench.extensions.plan.pages.answers import compute_parameter_growth_range
from stratbench.strategies import base, get_option_defaults, get_strategy_class
from stratbench.workload.data.datasets import make_dataset_metadata
from stratbench.workload.data.device_data import make_example_batch
from stratbench.workload.network import models
from stratbench.workload.network.checkpointing import checkpoint_and_count_blocks
from stratbench.workload.tasks import Classification
from stratbench.workload.users_code import ModelError

pytestmark = pytest.mark.timeout(300)


#: Layers and width of a text model, of one that is deeper, and of one that is wider.
SIZES = ((2, 64), (4, 64), (2, 256))


def describe_gpt(layers: int, width: int) -> dict[str, Any]:
    """What a study says of a GPT of four heads, with how it is divided."""
    gpt = "stratbench.workload.network.gpt"
    divided = {"tensor_plan": f"{gpt}:TENSOR_PLAN", "pipeline_modules": f"{gpt}:PIECES"}
    return {
        "call": f"{gpt}.GPT",
        "kwargs": {"layers": layers, "heads": 4, "width": width},
        "wrap_classes": ["Block"],
        "num_heads": 4,
        **divided,
    }


#: Networks in which a strategy meets what it meets in larger ones, by the name of the model.
SMALL = {
    "small text": describe_gpt(2, 128),
    **{f"text of {layers} x {width}": describe_gpt(layers, width) for layers, width in SIZES},
    "small images": {
        "call": f"{__name__}.normalised",
        "kwargs": {},
        "wrap_classes": ["Conv2d", "Linear"],
    },
}
READ_TEXT = ("gpt-compact", *(name for name in SMALL if "text" in name))
#: Ways to compute activations again.
CHECKPOINTING = (True, "selective", "every-2")
ADAMW = {"optimizer": "adamw", "momentum": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}


def request_for(strategy: str, model: str = "vgg-compact", workers: int = 2, **changes) -> Request:
    """The request of a strategy; `changes` replace settings."""
    settings = Settings(
        strategy=strategy,
        options=get_option_defaults(strategy) | changes.pop("options", {}),
        model=model,
        own_model=SMALL.get(model),
        dataset="",
        gpus=workers,
        seed=0,
        global_batch=workers,
        per_worker_batch=1,
        lr=0.1,
        device="cpu",
    )
    return Request(
        settings=replace(settings, **changes),
        input_shape=(64,) if model in READ_TEXT else (3, 32, 32),
        classes=10,
        workers_per_node=workers,
        eval_batch=16,
    )


def changed(request: Request, **changes) -> Request:
    """The same with other settings."""
    return replace(request, settings=replace(request.settings, **changes))


def request_of(**changes) -> Request:
    """The request of a cell on GPUs with momentum, clipping and AdamW's keys; `changes` replace settings."""
    s = request_for("fsdp", workers=4, max_grad_norm=2.0, weight_decay=0.01, lr=0.3).settings
    data = make_dataset_metadata("digits")
    return Request.from_settings(
        replace(s, dataset="digits", **changes), data, on_cuda=True, workers_per_node=4
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.5}, {"weight_decay": 0.1}, {"lr": 1.0}, {"max_grad_norm": 9.0}, {"seed": 3},
        {"schedule": "cosine"}, {"augment": True}, {"data_placement": "host"}, {"threads": 3},
        {"epochs": 7}, {"device": "auto"}, {"global_batch": 64, "per_worker_batch": 16},
    ],
)  # fmt: skip
def test_cells_that_differ_in_what_no_footprint_depends_on_share_one(changes):
    assert request_of(**changes) == request_of()
    assert hash(request_of(**changes)) == hash(request_of())


@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.0}, {"weight_decay": 0.0}, {"max_grad_norm": None}, {"nesterov": True}, ADAMW,
        {"gradient_accumulation_steps": 2}, {"activation_checkpointing": True}, {"precision": "bf16"},
        {"gpus": 2},
        {"model": "resnet-compact"}, {"strategy": "ddp", "options": get_option_defaults("ddp")},
        {"own_task": {"call": "my.Task", "sha256": None, "version": "1"}},
    ],
)  # fmt: skip
def test_cells_that_differ_in_what_a_footprint_depends_on_share_none(changes):
    """A value that only has to be there stands for all others."""
    assert request_of(**changes) != request_of()
    assert request_of(**ADAMW | {"eps": 1e-7, "betas": [0.8, 0.9]}) == request_of(**ADAMW)


def test_what_is_alike_on_any_count_is_followed_once_for_all_counts_and_nodes():
    s, data = request_for("ddp").settings, make_dataset_metadata("digits")
    counts = [
        Request.from_settings(
            replace(s, dataset="digits", gpus=gpus), data, on_cuda=True, workers_per_node=node
        )
        for gpus, node in ((1, 1), (2, 2), (2, 1), (8, 4))
    ]
    assert len(set(counts)) == 1


@pytest.mark.parametrize(("strategy", "precision"), [("fsdp", "fp16"), ("ddp", "bf16")])
def test_what_is_looked_up_by_fewer_words_is_what_torch_computes(monkeypatch, strategy, precision):
    request = changed(request_for(strategy, "small images"), precision=precision, device="cuda")
    torch_internals.FakeTensors.keys.clear()
    quick = footprint.make_footprint(request)
    assert torch_internals.FakeTensors.keys
    again = footprint.make_footprint(request)  # by what the first has left
    monkeypatch.setattr(fake, "FakeTensors", FakeTensorMode)
    assert quick == again == footprint.make_footprint(request)


def test_a_tensor_of_another_kind_has_other_words():
    with torch_internals.FakeTensors() as mode:
        x = torch.zeros(4, 6)
        kinds = [x, x.double(), x[:3], x.t(), x[1:4], torch.zeros(5, 6)[1:4], torch.zeros(3, 6)]
        kinds += [
            torch.zeros(4, 6, requires_grad=True),
            torch.zeros(4, 6, dtype=torch.cfloat).conj(),
        ]
        words = [mode._describe_operands([t]) for t in kinds] + [
            mode._describe_operands([v]) for v in (1, 1.0, True, [1])
        ]
        assert len(set(words)) == len(words)
        with pytest.raises(torch_internals._IndescribableOperand):
            mode._describe_operands([torch.zeros(3).to_sparse()])
    with (
        torch_internals.FakeTensors() as other,
        pytest.raises(torch_internals._IndescribableOperand),
    ):
        other._describe_operands([x])


def test_a_profilers_marks_are_no_operations(monkeypatch):
    """FSDP and optimizers mark what they do, for a profiler that nobody runs."""
    seen = []
    ran = OperatorTrace.__torch_dispatch__

    def watched(self, op, *args, **kwargs):
        seen.append(op.namespace)
        return ran(self, op, *args, **kwargs)

    monkeypatch.setattr(OperatorTrace, "__torch_dispatch__", watched)
    footprint.make_footprint(request_for("fsdp", "small images"))
    assert "fsdp" in seen
    assert "profiler" not in seen


def test_questions_for_a_tensors_device_are_no_kernels(monkeypatch):
    """C++ asks fake tensors for their device through the trace, several times per operation."""
    counted, asked = [], []
    ran = OperatorTrace.__torch_dispatch__

    def watched(self, op, *args, **kwargs):
        before = self.phases[-1].operations, self.phases[-1].touched_bytes
        out = ran(self, op, *args, **kwargs)
        if op.namespace == "prim":
            asked.append(op)
            if before != (self.phases[-1].operations, self.phases[-1].touched_bytes):
                counted.append(op)
        return out

    monkeypatch.setattr(OperatorTrace, "__torch_dispatch__", watched)
    footprint.make_footprint(request_for("single", "small images"))
    assert asked
    assert not counted


def normalised(classes: int) -> nn.Module:
    """Two convolutions, each with BatchNorm."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64)):
        convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)]
    return nn.Sequential(*layers)


@cache
def planned(request: Request) -> footprint.Footprint:
    """The footprint, made once for all tests that ask for the same."""
    return footprint.make_footprint(request)


def peak_of(request: Request, batch: int) -> int:
    """By running one step of that batch, not by the line through two others; of each kind of steps."""
    trace, made = fake.trace_training_steps(request, [batch])
    later = [
        fake.trace_training_steps(request, [batch], n)[0]
        for n in made.steps_that_change_the_work[1:]
    ]
    return max(
        max(t.list_live_bytes_after_events(t.phases[1].first_event, t.phases[4].first_event))
        for t in (trace, *later)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mode"),
    [
        *(
            (name, False)
            for name in ("resnet-compact", "vgg-compact", "vit-compact", "gpt-compact")
        ),
        *(("gpt-compact", mode) for mode in CHECKPOINTING),
        ("resnet-compact", "selective"),
    ],
)
def test_fake_tensors_allocate_what_real_ones_do(model: str, mode: bool | str):
    batch = 5
    request = request_for("single", model, workers=1, activation_checkpointing=mode)
    predicted = planned(request).compute_training_peak(batch)

    torch.manual_seed(0)
    shape = (64,) if models.MODELS[model].reads_text else (3, 32, 32)
    net = models.build_model(model, 10, shape).train()
    if mode:
        checkpoint_and_count_blocks(models.list_shard_groups(model, net), mode)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for p in net.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    trace = OperatorTrace(on_cpu=True)
    trace.set_purpose_of_storages("parameters", net.parameters())
    trace.set_purpose_of_storages("buffers", net.buffers())
    trace.set_purpose_of_storages(
        "optimizer", (s["momentum_buffer"] for s in optimizer.state.values())
    )
    x, y = make_example_batch(
        batch, shape, 10, torch.device("cpu"), torch.float32, torch.contiguous_format
    )
    trace.set_purpose_of_storages("activations", (x, y))
    with trace:
        loss = Classification().loss(net(x), y)
        loss.backward()
        optimizer.step()
    measured = max(trace.list_live_bytes_after_events(0, len(trace.events)))
    assert predicted.n_bytes == measured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("single", {}),
        ("ddp", {}),
        ("ddp", {"gradient_as_bucket_view": False}),
        ("fsdp", {}),
        ("fsdp", {"reshard_after_forward": "never"}),
        ("fsdp", {"shard_group_size": 2}),
        ("ddp", {"compress": "fp16"}),
        ("ddp", {"compress": "powersgd", "powersgd_rank": 2}),
        ("zero1", {"bucket_cap_mb": 1}),
        ("zero1-torch", {}),
        ("ps-sync", {}),
        ("local-sgd", {"start": 1}),
        ("diloco", {}),
        ("gossip", {}),
    ],
)
def test_two_batches_tell_the_peak_of_every_other(strategy: str, options: dict):
    workers = 1 if strategy in ("single", "ps-sync") else 2
    request = request_for(strategy, workers=workers, options=options)
    made = planned(request)
    for batch in (3, 100):
        assert made.compute_training_peak(batch).n_bytes == peak_of(request, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", "zero1", "zero1-torch", "ps-sync", "local-sgd", "diloco", "gossip"]
)
def test_the_first_step_is_like_the_next(strategy: str):
    request = request_for(strategy, workers=1 if strategy == "ps-sync" else 4, precision="bf16")
    trace, _ = fake.trace_training_steps(request, [8, 8])
    first, second, end = (trace.phases[i].first_event for i in (1, 4, 7))
    assert trace.list_live_bytes_after_events(first, second) == trace.list_live_bytes_after_events(
        second, end
    )


@pytest.mark.slow
def test_a_worker_of_divided_layers_makes_no_tensor_of_the_whole_scores():
    """DTensor asks its rules on fake tensors of the whole shape, in every step; no memory is that."""
    asked = changed(request_for("tensor", "small text"), precision="bf16", device="cuda")
    batches = [16, 32]
    trace, _ = fake.trace_training_steps(replace(asked, classes=4096), batches)
    positions = max(batches) * asked.input_shape[0]
    evaluated = trace.phases[-1].first_event
    # A worker's half of the scores in float32.
    assert max(n for _, n in trace.events[:evaluated]) == positions * 4096 // 2 * 4


@pytest.mark.slow
def test_parts_add_up_to_the_peak_and_states_are_exact():
    request = request_for("fsdp", workers=4)
    made = planned(request)
    peak = made.compute_training_peak(10)
    assert sum(peak.parts_bytes.values()) == pytest.approx(peak.n_bytes, abs=len(peak.parts_bytes))
    # Rank 0 holds the first quarter, rounded up, of the first dimension of every parameter.
    with torch.device("meta"):
        shapes = [p.shape for p in models.build_model("vgg-compact", 10, (3, 32, 32)).parameters()]
    shard_bytes = sum(4 * -(-s[0] // 4) * s[1:].numel() for s in shapes)
    assert made.model_states_bytes["parameters_bytes"] == shard_bytes
    assert made.model_states_bytes["gradients_bytes"] == shard_bytes
    assert made.model_states_bytes["optimizer_bytes"] == shard_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers", "kept", "exchanged"),
    [
        ("local-sgd", 2, 1, "all_reduce"),
        ("diloco", 2, 3, "all_reduce"),
        ("gossip", 2, 1, "send"),
        ("gossip", 4, 1, "send"),
    ],
)
def test_workers_that_train_alone_hold_and_exchange_the_whole_model(
    strategy: str, workers: int, kept: int, exchanged: str
):
    request = request_for(strategy, "small images", workers)
    made = planned(request)
    whole = made.model_states_bytes["parameters_bytes"]
    with torch.device("meta"):
        net = models.build_model(request.model_source, 10, (3, 32, 32))
    assert whole == sum(p.nbytes for p in net.parameters())
    padding = 64 * len(list(net.parameters()))
    # What an outer step keeps lies in flat tensors.
    flat_padding = made.model_states_bytes["optimizer_bytes"] - kept * whole
    assert 0 <= flat_padding <= (kept - 1) * padding
    statistics = sum(b.nbytes for b in net.buffers() if b.is_floating_point())
    times = 2 if (strategy, workers) == ("gossip", 4) else 1
    assert {kind for kind, _ in made.collectives} == {exchanged}
    sent = made.sum_payload_bytes_by_kind()[exchanged]
    assert 0 <= sent - times * (whole + statistics) <= 3 * times * padding
    held = made.between_steps_bytes.get("communication", 0)
    assert (times * whole <= held <= sent) if strategy == "gossip" else held == 0


def test_what_gloo_copies_to_reduce_and_scatter_lives_until_the_update():
    """`zero1` reduces beside backward, and asks for the results when it is over."""
    trace, made = fake.trace_training_steps(request_for("zero1", options={"bucket_cap_mb": 1}), [4])
    assert len(made.buckets) > 1
    start, update = trace.phases[1].first_event, trace.phases[3].first_event
    before, after = trace.list_live_bytes_after_events(start, update)[:: update - start]
    copies = sum(bucket.weights.nbytes for bucket in made.buckets)
    activations = trace.get_device_bytes_by_purpose(update)["activations"]
    assert after - before - activations == pytest.approx(copies, rel=0.01)
    assert (
        trace.list_live_bytes_after_events(start, trace.phases[4].first_event)[-1]
        - before
        - activations
        < 0.01 * copies
    )


def test_a_compressed_bucket_is_under_way_while_backward_fills_the_next():
    request = request_for("ddp", options={"compress": "fp16", "bucket_cap_mb": 1})
    trace, made = fake.trace_training_steps(request, [4])
    halves = [2 * bucket.numel() for bucket in made.module.buckets]
    assert len(halves) > 1
    found = []
    for i, (number, n_bytes) in enumerate(trace.events):
        if n_bytes in halves and trace.tags.get(number) != "staging":
            freed = trace.events.index((number, -n_bytes), i)
            found.append((n_bytes, freed - i))
    assert [n for n, _ in found] == halves
    assert found[0][1] > 20 > found[-1][1]  # all are waited for at the end
    # The gradient that completes the first bucket is there until that has begun: of vgg16 392 MiB.
    largest = max(p.nbytes for p in made.parameters)
    changes = [n_bytes for _, n_bytes in trace.events]
    assert changes.index(-largest, trace.phases[2].first_event) > changes.index(halves[0])


@pytest.mark.slow
def test_what_the_first_steps_make_is_not_there_before_them():
    plain, compressed = (
        planned(request_for("ddp", options=options)) for options in ({}, {"compress": "powersgd"})
    )
    assert compressed.bytes_created_by_first_step >= plain.model_states_bytes["parameters_bytes"]
    grown = sum(compressed.between_steps_bytes.values()) - compressed.bytes_created_by_first_step
    assert grown == sum(plain.between_steps_bytes.values())
    assert plain.bytes_created_by_first_step == 0


def test_the_peak_is_that_of_the_worst_kind_of_steps(monkeypatch):
    """Post-local SGD: were an exchange of weights to need more than one of gradients, that would count."""
    largest = 1 << 26

    class Wasteful(get_strategy_class("local-sgd")):
        def exchange_weights(self) -> None:
            if self.steps > self.options.start:
                torch.zeros(largest, dtype=torch.uint8)
            super().exchange_weights()

    request = request_for("local-sgd", options={"start": 3})
    plain = planned(request).compute_training_peak(4)
    monkeypatch.setattr(fake, "get_strategy_class", lambda name: Wasteful)
    waste = footprint.make_footprint(request).compute_training_peak(4)
    assert waste.n_bytes > largest > plain.n_bytes


@pytest.mark.slow
def test_a_thousand_workers_take_no_longer_than_two_and_hold_less():
    few, many = (planned(request_for("fsdp", workers=n)) for n in (2, 1024))
    assert many.between_steps_bytes["parameters"] < few.between_steps_bytes["parameters"]
    assert len(many.collectives) == len(few.collectives)


@pytest.mark.slow
def test_keeping_gathered_weights_saves_a_gather_and_costs_memory():
    always, never = (
        planned(request_for("fsdp", "vgg-compact", options={"reshard_after_forward": choice}))
        for choice in ("always", "never")
    )
    assert (
        always.sum_payload_bytes_by_kind()["all_gather"]
        > never.sum_payload_bytes_by_kind()["all_gather"]
    )
    assert (
        always.sum_payload_bytes_by_kind()["reduce_scatter"]
        == never.sum_payload_bytes_by_kind()["reduce_scatter"]
    )
    assert never.compute_training_peak(1).n_bytes >= always.compute_training_peak(1).n_bytes


@pytest.mark.slow
def test_fsdp_policy_gathers_in_16_bits():
    kinds = {}
    for choice in ("autocast", "policy"):
        request = request_for(
            "fsdp", "vgg-compact", precision="bf16", options={"mixed_precision": choice}
        )
        kinds[choice] = planned(request).sum_payload_bytes_by_kind()
    assert 2 * kinds["policy"]["all_gather"] == kinds["autocast"]["all_gather"]
    assert kinds["policy"]["reduce_scatter"] == kinds["autocast"]["reduce_scatter"]


@pytest.fixture
def join_alone(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """A function that joins a real process group of one, until the test's end."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    yield lambda: dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.destroy_process_group()


@pytest.mark.parametrize("cap_mb", [1, 25])
def test_the_emulated_buckets_are_as_large_as_ddps(join_alone, cap_mb: int):
    join_alone()
    net = models.build_model("resnet-compact", 10, (3, 32, 32))
    module = DistributedDataParallel(net, bucket_cap_mb=cap_mb)
    for _ in range(3):  # DDP builds its buckets anew after the first
        F.cross_entropy(
            module(torch.randn(4, 3, 32, 32)), torch.zeros(4, dtype=torch.int64)
        ).backward()
    logged = module._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    emulated = fake.Replica(
        models.build_model("resnet-compact", 10, (3, 32, 32)), bucket_cap_mb=cap_mb
    )
    assert sorted(4 * b.numel() for b in emulated.buckets) == sorted(
        int(n) for n in logged.split(",")
    )


def test_a_strategy_made_from_ddp_is_planned_as_ddp_is(monkeypatch):
    class Derived(get_strategy_class("ddp")):
        pass

    as_ddp = planned(request_for("ddp"))
    monkeypatch.setattr(fake, "get_strategy_class", lambda name: Derived)
    assert footprint.make_footprint(request_for("ddp")) == as_ddp


def test_torch_is_as_it_was_after_a_footprint():
    before = torch.optim.SGD
    with (
        contextlib.suppress(ValueError),
        fake.patch_torch_for_fake_tensors(on_cuda=True, fused=True),
    ):
        assert torch.optim.SGD is not before
        raise ValueError("a model that cannot be planned")
    assert torch.optim.SGD is before


@pytest.mark.parametrize("as_view", [True, False])
def test_the_emulation_allocates_what_ddp_does(join_alone, as_view: bool):
    batch = 24
    request = request_for("ddp", options={"gradient_as_bucket_view": as_view})
    predicted = planned(request).compute_training_peak(batch)
    join_alone()
    net = models.build_model("vgg-compact", 10, (3, 32, 32)).train()
    module = DistributedDataParallel(net, bucket_cap_mb=25, gradient_as_bucket_view=as_view)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64)

    def step() -> None:
        F.cross_entropy(module(x), y).backward()
        optimizer.step()

    for _ in range(3):
        optimizer.zero_grad()
        step()
    trace = OperatorTrace(on_cpu=True)
    trace.set_purpose_of_storages("parameters", net.parameters())
    trace.set_purpose_of_storages(
        "optimizer", (s["momentum_buffer"] for s in optimizer.state.values())
    )
    if as_view:
        trace.set_purpose_of_storages(
            "gradients", [p.grad for p in net.parameters()]
        )  # they lie in the buckets
    trace.set_purpose_of_storages("activations", (x, y))
    optimizer.zero_grad()
    with trace:
        step()
    # Buckets that the gradients do not lie in are counted from the first copy into them on.
    assert predicted.n_bytes == pytest.approx(
        max(trace.list_live_bytes_after_events(0, len(trace.events))), rel=0.001
    )


def test_loss_scaling_on_cuda_can_be_planned_without_cuda():
    request = request_for("ddp", precision="fp16", device="cuda", weight_decay=1e-4)
    made = planned(request)
    assert "staging" not in made.compute_training_peak(8).parts_bytes
    half = planned(changed(request, precision="fp32"))
    assert made.compute_training_peak(256).n_bytes < half.compute_training_peak(256).n_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision", "on_cuda"),
    [
        ("single", "fp32", False),
        ("ddp", "fp16", True),
        ("fsdp", "fp64", True),
    ],
)
def test_adamw_takes_sixteen_bytes_a_parameter_and_no_temporaries(strategy, on_cuda, precision):
    """Its count of steps takes four bytes more for each tensor; with SGD a parameter takes twelve."""
    workers = 1 if strategy == "single" else 2
    device = "cuda" if on_cuda else "cpu"
    request = request_for(
        strategy, "small text", workers, precision=precision, device=device, weight_decay=1e-4
    )
    sgd, adamw = (planned(changed(request, **keys)) for keys in ({}, ADAMW))
    tensors = len(list(models.build_model(request.model_source, 65, (64,)).parameters()))
    held, whole = adamw.model_states_bytes, sgd.model_states_bytes["parameters_bytes"]
    assert sgd.model_states_bytes["optimizer_bytes"] == whole
    assert held == sgd.model_states_bytes | {"optimizer_bytes": 2 * whole + 4 * tensors}
    more = adamw.compute_training_peak(1).n_bytes - sgd.compute_training_peak(1).n_bytes
    # The CUDA allocator gives each count of steps a block of its own; SGD on a CPU has temporaries.
    assert more <= whole + tensors * 2 * 512


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [("single", "sgd"), ("ddp", "sgd"), ("fsdp", "sgd"), ("fsdp", "adamw")],
)
def test_only_sharded_gradients_have_a_norm_and_a_verdict_in_common(strategy, optimizer):
    """And the norms, all that clipping takes, change no peak of a batch."""
    request = request_for(
        strategy,
        "small text",
        1 if strategy == "single" else 2,
        precision="fp16",
        device="cuda",
        weight_decay=1e-4,
        **ADAMW if optimizer == "adamw" else {},
    )
    plain, clipped = (planned(changed(request, max_grad_norm=norm)) for norm in (None, 1.0))
    flags = [made.collectives.count(("all_reduce", 4)) for made in (plain, clipped)]
    # Without clipping, the loss scale's verdict alone.
    assert flags == ([1, 2] if strategy == "fsdp" else [0, 0])
    assert len(clipped.collectives) - len(plain.collectives) == flags[1] - flags[0]
    assert clipped.compute_training_peak(64).n_bytes == plain.compute_training_peak(64).n_bytes


@pytest.mark.slow
def test_attention_counts_in_traced_flops():
    """PyTorch before 2.15 has no formula for its kernel on a CPU."""
    one, two = (request_for(s, "small text", n) for s, n in (("single", 1), ("tensor", 2)))
    assert 2 * planned(two).flops_per_sample == planned(one).flops_per_sample


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero1"])
def test_a_batch_in_parts_takes_the_memory_of_one(strategy):
    """All but FSDP reduce once; it gathers and reduces for each part."""
    whole, parts = (
        planned(request_for(strategy, "small images", gradient_accumulation_steps=n))
        for n in (1, 2)
    )
    assert parts.model_states_bytes == whole.model_states_bytes
    assert parts.flops_per_sample == whole.flops_per_sample
    assert parts.compute_training_peak(512).n_bytes < 0.7 * whole.compute_training_peak(512).n_bytes
    times = 2 if strategy == "fsdp" else 1
    assert parts.sum_payload_bytes_by_kind() == {
        k: times * n for k, n in whole.sum_payload_bytes_by_kind().items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("fsdp", {}), ("tensor", {"tensor_parallel_size": 2, "data_parallel": "fsdp"})],
)
def test_parts_of_a_batch_leave_no_whole_gradients_on_a_worker(strategy, options):
    request = request_for(strategy, "small text", 16, options=options)
    whole, parts = (planned(changed(request, gradient_accumulation_steps=n)) for n in (1, 2))
    shards_bytes = parts.model_states_bytes["gradients_bytes"]
    # A part's shards are there while those of the next are made.
    assert (
        parts.compute_training_peak(2).n_bytes
        <= whole.compute_training_peak(1).n_bytes + 1.1 * shards_bytes
    )


@pytest.mark.slow
def test_gradients_that_are_reduced_with_the_last_part_are_kept_whole():
    request = request_for("fsdp", "small text", 8, gradient_accumulation_steps=2)
    each, last = (
        planned(request.with_options(gradient_sync=sync)) for sync in ("each-part", "last-part")
    )
    parameters_bytes = 8 * each.model_states_bytes["parameters_bytes"]
    peaks = [f.compute_training_peak(2) for f in (each, last)]
    assert peaks[0].n_bytes < peaks[1].n_bytes
    assert peaks[0].parts_bytes["gathered"] < 0.2 * parameters_bytes
    assert (
        peaks[1].parts_bytes["gathered"] > parameters_bytes
    )  # whole gradients, and a group's weights
    reduced = [f.sum_payload_bytes_by_kind()["reduce_scatter"] for f in (each, last)]
    assert reduced[0] == 2 * reduced[1]
    assert (
        last.sum_payload_bytes_by_kind()["all_gather"]
        == each.sum_payload_bytes_by_kind()["all_gather"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "ps-sync"])
def test_blocks_computed_again_take_less_memory_and_more_operations(strategy):
    workers = 1 if strategy in ("single", "ps-sync") else 2
    request = request_for(strategy, "small text", workers, weight_decay=1e-4)
    kept, again = (
        planned(changed(request, activation_checkpointing=again)) for again in (False, True)
    )
    assert again.model_states_bytes == kept.model_states_bytes
    assert again.flops_per_sample == kept.flops_per_sample
    assert again.sum_payload_bytes_by_kind() == kept.sum_payload_bytes_by_kind()
    assert again.operations_per_step > kept.operations_per_step
    peaks = [made.compute_training_peak(64) for made in (kept, again)]
    assert peaks[1].n_bytes < 0.65 * peaks[0].n_bytes
    kept_bytes, again_bytes = (peak.parts_bytes["activations"] for peak in peaks)
    assert again_bytes < 0.1 * kept_bytes


@pytest.mark.slow
def test_operations_that_are_computed_again_are_counted():
    """A block's last product is needed by nothing in its backward."""
    layers, width, positions = 4, 64, 64
    request = request_for("single", "text of 4 x 64", workers=1)
    kept, whole, selective, every = (
        planned(changed(request, activation_checkpointing=mode)) for mode in (False, *CHECKPOINTING)
    )
    assert kept.recomputed_flops_per_sample == 0
    attention = 4 * positions**2 * width
    # Queries, keys and values; what attention gives; up, to four times the width.
    product = 2 * positions * width**2
    block = (3 + 1 + 4) * product + attention
    assert whole.recomputed_flops_per_sample == layers * block
    assert every.recomputed_flops_per_sample == layers / 2 * block
    # Every second: keys, and what attention gives.
    assert selective.recomputed_flops_per_sample == layers * 2 * product
    assert whole.executed_flops_per_sample == 3 * kept.flops_per_sample + layers * block
    peaks = [made.compute_training_peak(64).n_bytes for made in (kept, every, selective, whole)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


def test_more_blocks_than_there_are_cannot_be_counted():
    with pytest.raises(ModelError, match="'every-9': it has only 2 blocks; lower N"):
        planned(request_for("single", "small text", activation_checkpointing="every-9"))


def test_a_network_of_single_layers_has_nothing_to_compute_again():
    with pytest.raises(ModelError, match="vgg-compact: activation_checkpointing recomputes blocks"):
        planned(request_for("single", activation_checkpointing=True))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero1", "zero1-torch"])
def test_the_plan_predicts_adamws_states_as_training_counts_them(join_alone, strategy):
    request = request_for(strategy, "small text", workers=1, **ADAMW)
    predicted = planned(request).model_states_bytes
    join_alone()
    real = get_strategy_class(strategy)(get_strategy_class(strategy).Options(**request.options))
    device = torch.device("cpu")
    net = models.build_model_for_training(request.model_source, 10, (64,), 0, device, torch.float32)
    groups = models.list_shard_groups(request.model_source, net)
    real.setup(net, base.Worker(request.settings, 0, 1, 1, device, RunFolder(Path()), groups))
    x = torch.randint(10, (4, 64))
    for _ in range(2):
        real.step(x, x)
        assert real.compute_model_state_bytes() == predicted


@pytest.mark.slow
def test_states_on_the_host_are_not_in_the_devices_memory():
    """On a GPU; on a CPU both are one."""
    plain, away = (
        planned(request_for("fsdp", workers=4, device="cuda", options={"offload": where}))
        for where in ("none", "cpu")
    )
    states = ("parameters", "optimizer")
    assert away.host_bytes == {k: plain.between_steps_bytes[k] for k in states} | {"gradients": 0}
    assert not set(states) & set(away.between_steps_bytes)
    least = sum(away.host_bytes.values())
    assert plain.compute_training_peak(8).n_bytes - away.compute_training_peak(8).n_bytes >= least
    assert away.model_states_bytes == plain.model_states_bytes
    assert away.collectives == plain.collectives
    on_cpu, plain = (
        planned(request_for("fsdp", options={"offload": where})) for where in ("cpu", "none")
    )
    assert on_cpu.peak_moments == plain.peak_moments
    assert on_cpu.host_bytes == {}


@pytest.mark.slow
def test_groups_of_workers_hold_a_model_each():
    pairs, two, four = (
        planned(request_for("fsdp", workers=n, options={"shard_group_size": s}))
        for n, s in ((4, 2), (2, "all"), (4, "node"))
    )
    assert pairs.model_states_bytes == two.model_states_bytes
    assert pairs.model_states_bytes != four.model_states_bytes
    between = [c for c in pairs.collectives if c[0] == "all_reduce"]
    assert {c[2] for c in pairs.collectives} == {2}
    assert {c[4] for c in between} == {2}  # replicas of a shard are two ranks apart
    assert sum(c[1] for c in between) == pairs.model_states_bytes["gradients_bytes"]
    assert compute_wire_bytes(pairs.collectives, 4, on_gloo=False) > compute_wire_bytes(
        two.collectives, 2, False
    )


@pytest.mark.slow
def test_zero1_cuts_vgg16s_huge_tensor_and_torchs_leaves_it_on_one_rank():
    """As ZeroRedundancyOptimizer deals them out: 76.5, 12.5, 5.5 and 5.5 % of the momentum."""
    held = {
        name: planned(request_for(name, "vgg16", 4)).model_states_bytes
        for name in ("zero1", "zero1-torch")
    }
    whole = held["zero1"]["parameters_bytes"]
    assert held["zero1"]["gradients_bytes"] == whole
    assert held["zero1"]["optimizer_bytes"] == pytest.approx(whole / 4, rel=1e-4)  # padding
    assert held["zero1-torch"]["optimizer_bytes"] / whole == pytest.approx(0.765, abs=5e-4)


@pytest.mark.slow
def test_what_is_in_no_group_is_gathered_once():
    """FSDP2 keeps the root's own parameters from forward to backward."""
    model = "convnext-compact"
    net = models.build_model(model, 10, (3, 32, 32))
    grouped = {
        id(p) for _, ms in models.list_shard_groups(model, net) for m in ms for p in m.parameters()
    }
    root_bytes = sum(4 * p.numel() for p in net.parameters() if id(p) not in grouped)
    whole_bytes = sum(4 * p.numel() for p in net.parameters())
    assert root_bytes > 0.1 * whole_bytes
    gathered = planned(request_for("fsdp", model)).sum_payload_bytes_by_kind()["all_gather"]
    assert gathered == pytest.approx(2 * whole_bytes - root_bytes, rel=0.002)  # padding


def test_the_largest_batch_is_the_last_that_fits():
    made = planned(request_for("single", workers=1))
    room = made.compute_needed_bytes(77)
    assert made.largest_batch(room) == 77
    assert made.largest_batch(made.compute_needed_bytes(1) - 1) == 0


def test_the_envelope_holds_every_line_that_is_highest_somewhere():
    lines = [Affine(10, 1), Affine(0, 3), Affine(8, 1.5), Affine(-100, 3), Affine(-20, 4)]
    kept = find_highest_line_indices(lines)
    for batch in range(1, 60):
        highest = max(lines, key=lambda line: line.evaluate_at(batch))
        assert max(lines[i].evaluate_at(batch) for i in kept) == highest.evaluate_at(batch)
    assert 3 not in kept
    assert kept == sorted(kept, key=lambda i: lines[i].per_sample)


@pytest.mark.slow  # each footprint takes a second or two
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_how_much_larger_a_network_may_be_holds_for_deeper_and_wider_ones(strategy: str):
    small, *larger = (
        planned(request_for(strategy, f"text of {layers} x {width}", **ADAMW))
        for layers, width in SIZES
    )
    parameters = "parameters_bytes"
    for f in larger:
        times = f.model_states_bytes[parameters] / small.model_states_bytes[parameters]
        least, most = compute_parameter_growth_range(small, 8, f.compute_needed_bytes(8))
        assert 1 < least <= times <= most


def test_the_share_of_attention_is_that_of_its_products():
    """A block's scores and sums take 4 x length x width per token, its linear layers 24 x width^2."""
    made = planned(request_for("single", "small text", **ADAMW))
    length, layers, width, classes = 64, 2, 128, 10
    attention = layers * 4 * length**2 * width
    whole = layers * length * 24 * width**2 + attention + 2 * length * width * classes
    assert made.flops_per_sample == whole
    assert made.attention_share == pytest.approx(attention / whole)
    assert planned(request_for("single", workers=1)).attention_share == 0


def test_a_footprint_survives_json():
    made = planned(request_for("fsdp"))
    assert footprint.Footprint.from_dict(json.loads(json.dumps(asdict(made)))) == made


# Peaks in MiB on 32x32 pixels, global batch 128, float32 and momentum, without a device's rounding or the
# CPU backend's copies: as torch.distributed._tools.mem_tracker.MemTracker counts them.
KNOWN_MIB = [
    ("ddp", {"gradient_as_bucket_view": False}, 2, 2129),
    ("ddp", {"gradient_as_bucket_view": False}, 8, 2068),
    ("fsdp", {}, 2, 1524),
    ("fsdp", {}, 8, 1037),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "options", "workers", "mib"), KNOWN_MIB)
def test_vgg16_needs_what_torchs_own_tracker_says(strategy, options, workers, mib):
    request = request_for(strategy, "vgg16", workers=workers, options=options, device="cuda")
    peak = planned(request).compute_training_peak(128 // workers)
    assert peak.n_bytes / 2**20 == pytest.approx(mib, rel=0.002)
