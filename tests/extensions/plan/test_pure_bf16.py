"""`precision: bf16-true`: weights, gradients and the optimizer's states in bfloat16."""

from __future__ import annotations

import json
import math
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from process_groups import forking
from test_plan_footprint import ADAMW, changed, planned, request_for

from launching import LIMIT_S, settings
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.plan.footprint.trace import OperatorTrace
from stratbench.strategies import base, collective, get_option_defaults, get_strategy_class
from stratbench.telemetry.machine.hardware import list_datasheets
from stratbench.telemetry.memory import get_optimizer_state
from stratbench.workload.data.device_data import make_example_batch
from stratbench.workload.network import models
from stratbench.workload.network.precision import get_autocast_dtype, get_weights_dtype

TOKENS, MODEL, POSITIONS = 10, "small text", 64
TRAINED = ("ddp", "fsdp", "zero1", "zero1-torch", "local-sgd", "diloco", "gossip")
PRECISION = "bf16-true"


def set_up(request) -> collective.Collective:
    cls = get_strategy_class(request.strategy)
    strategy, device = cls(cls.Options(**request.options)), torch.device("cpu")
    dtype = get_weights_dtype(request.settings.precision)
    source = request.model_source
    model = models.build_model_for_training(source, TOKENS, (POSITIONS,), 0, device, dtype)
    place = device, RunFolder(Path()), models.list_shard_groups(source, model)
    strategy.setup(model, base.Worker(request.settings, 0, 1, 1, *place))
    return strategy


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    layout = torch.contiguous_format
    return make_example_batch(
        samples, (POSITIONS,), TOKENS, torch.device("cpu"), torch.float32, layout
    )


def test_it_is_a_plain_loop_over_a_model_in_bfloat16():
    request = request_for("single", MODEL, 1, precision=PRECISION, **ADAMW)
    made = set_up(request)
    plain = models.build_model_for_training(
        request.model_source, TOKENS, (POSITIONS,), 0, torch.device("cpu"), torch.bfloat16
    )
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0, fused=True)
    x, y = batch(8)
    for _ in range(3):
        loss = F.cross_entropy(plain(x).float().flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(made.step(x, y), loss.detach())
    assert loss.dtype == torch.float32
    weights = zip(made.model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)
    assert made.report()["details"]["optimizer_dtype"] == "bfloat16"
    assert made.report()["details"]["weights_dtype"] == "bfloat16"
    assert get_autocast_dtype(PRECISION) is None


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero1", "tensor", "pipeline"])
def test_states_take_half_the_memory(strategy):
    options = {"microbatches": 2} if strategy == "pipeline" else {}
    workers = 1 if strategy == "single" else 2
    request = request_for(strategy, MODEL, workers, options=options, **ADAMW)
    whole, half = (planned(changed(request, precision=p)) for p in ("fp32", PRECISION))
    for one, other in zip(whole.footprints_of_stages, half.footprints_of_stages, strict=True):
        for key in ("parameters_bytes", "gradients_bytes"):
            assert other.model_states_bytes[key] == one.model_states_bytes[key] / 2
    # The loss is in float32.
    assert half.compute_training_peak(64).n_bytes < 0.75 * whole.compute_training_peak(64).n_bytes
    sent = [sum(made.sum_payload_bytes_by_kind().values()) for made in (whole, half)]
    assert sent[1] <= 0.51 * sent[0]


@pytest.mark.slow
def test_what_is_allocated_is_planned():
    request = request_for("single", MODEL, 1, precision=PRECISION, **ADAMW)
    made, trace = set_up(request), OperatorTrace(on_cpu=True)
    trace.set_purpose_of_storages("parameters", made.model.parameters())
    state = get_optimizer_state(made.optimizer).values()
    trace.set_purpose_of_storages("optimizer", (t for entry in state for t in entry.values()))
    x, y = batch(24)
    trace.set_purpose_of_storages("activations", (x, y))
    with trace:
        made.step(x, y)
    measured = max(trace.list_live_bytes_after_events(0, len(trace.events)))
    assert planned(request).compute_training_peak(24).n_bytes == measured
    assert planned(request).model_states_bytes == made.compute_model_state_bytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each strategy reports after two steps of two workers, with its evaluation's score."""
    folder = tmp_path_factory.mktemp("trained")
    workers = [
        forking().Process(target=train, args=(rank, str(folder)), daemon=True) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(LIMIT_S)
        assert worker.exitcode == 0
    return json.loads((folder / "trained.json").read_text())


def train(rank: int, folder: str) -> None:
    """One of two workers, which train a network with BatchNorm by all strategies in turn."""
    torch.set_num_threads(1)
    timeout, store = timedelta(seconds=LIMIT_S), dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    found = {}
    for name in TRAINED:
        request = request_for(name, "small images", 2, precision=PRECISION)
        cls, device = get_strategy_class(name), torch.device("cpu")
        strategy, source = cls(cls.Options(**request.options)), request.model_source
        model = models.build_model_for_training(
            source, TOKENS, (3, 16, 16), 0, device, torch.bfloat16
        )
        place = device, RunFolder(Path()), models.list_shard_groups(source, model)
        strategy.setup(model, base.Worker(request.settings, rank, 2, 2, *place))
        x, y = request.make_example_batch(4)
        losses = [float(strategy.step(x, y)) for _ in range(2)]
        with strategy.open_evaluation_model() as module, torch.no_grad():
            scores = module(x)
        kinds = sorted({str(t.dtype) for t in model.parameters()} | {str(scores.dtype)})
        found[name] = [losses, kinds, strategy.report()["details"]]
    if rank == 0:
        (Path(folder) / "trained.json").write_text(json.dumps(found, default=str))
    dist.barrier()
    os._exit(0)  # as a worker does: taking a group apart whose other end has gone may hang


@pytest.mark.slow
@pytest.mark.parametrize("strategy", TRAINED)
def test_strategies_train_in_it(trained, strategy):
    """With BatchNorm, whose statistics are rounded, too."""
    losses, kinds, details = trained[strategy]
    assert all(map(math.isfinite, losses))
    assert losses[0] != losses[1]
    assert kinds == ["torch.bfloat16"]
    assert (details["weights_dtype"], details["compute_dtype"]) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("strategy", "options", "remedy"),
    [
        ("ps-sync", {}, "servers keep the weights in float32; use bf16"),
        ("deepspeed", {}, "DeepSpeed keeps its weights in float32; use bf16"),
        ("ddp", {"compress": "powersgd"}, "set it to none, or use bf16"),
    ],
)
def test_who_cannot_says_why(strategy, options, remedy):
    values = settings(strategy if strategy != "ps-sync" else "ddp", precision=PRECISION)
    given = vars(values) | {"compile": False, "gpus": [2]}
    found = get_strategy_class(strategy).iter_refused_values(
        get_option_defaults(strategy) | options, given
    )
    assert any(remedy in reason for reason in found)


def test_its_rate_is_that_of_bf16():
    sheet = list_datasheets()[0]
    assert sheet.get_peak_tflops(PRECISION) == sheet.get_peak_tflops("bf16")
