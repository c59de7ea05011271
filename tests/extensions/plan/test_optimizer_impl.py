"""PyTorch's implementations of the optimizer: the same weights, and the memory that is planned."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from process_groups import forking
from test_plan_footprint import ADAMW, changed, request_for

from launching import LIMIT_S
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.plan.footprint import footprint
from stratbench.extensions.plan.footprint.trace import OperatorTrace
from stratbench.strategies import base, collective, get_strategy_class
from stratbench.telemetry.memory import get_optimizer_state
from stratbench.workload.data.device_data import make_example_batch
from stratbench.workload.network import models

IMPLEMENTATIONS = ("fused", "foreach", "for-loop")
SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
STRATEGIES = ("single", "fsdp", "zero1-torch", "local-sgd")
TOKENS, MODEL = 10, "small text"


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def set_up(request, dtype: torch.dtype) -> collective.Collective:
    cls = get_strategy_class(request.strategy)
    strategy, device = cls(cls.Options(**request.options)), torch.device("cpu")
    source = request.model_source
    model = models.build_model_for_training(source, TOKENS, request.input_shape, 0, device, dtype)
    groups = models.list_shard_groups(source, model)
    strategy.setup(model, base.Worker(request.settings, 0, 1, 1, device, RunFolder(Path()), groups))
    return strategy


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    layout = torch.contiguous_format
    return make_example_batch(8, (64,), TOKENS, torch.device("cpu"), torch.float32, layout)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [SGD, ADAMW | {"eps": 1e-3}], ids=["sgd", "adamw"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_implementations_train_alike(alone, strategy, optimizer):
    found: dict[str, torch.Tensor] = {}
    two = [t[:2] for t in batch()]  # any gradients will do
    for implementation in IMPLEMENTATIONS:
        request = request_for(
            strategy, MODEL, 1, optimizer_impl=implementation, precision="fp64", **optimizer
        )
        made = set_up(request, torch.float64)
        saved = made.save()
        made.step(*two)
        made.restore(saved)
        for _ in range(3):
            made.step(*two)
        found[implementation] = torch.cat([t.detach().flatten() for t in made.local])
        group = made.optimizer.param_groups[0]
        assert group["foreach"] == (implementation == "foreach")
        steps = [
            e["step"].device.type
            for e in get_optimizer_state(made.optimizer).values()
            if "step" in e
        ]
        assert set(steps) <= {"cpu"}
    for weights in found.values():
        assert (weights - found["for-loop"]).abs().max() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [SGD, ADAMW | {"eps": 1e-3}], ids=["sgd", "adamw"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_an_implementation_allocates_is_planned(implementation, optimizer):
    """To the byte, at the highest moment of the update, where the batch is small."""
    request = request_for("single", MODEL, 1, optimizer_impl=implementation, **optimizer)
    made = set_up(request, torch.float32)
    trace = OperatorTrace(on_cpu=True)
    model = made.model
    trace.set_purpose_of_storages("parameters", model.parameters())
    trace.set_purpose_of_storages("buffers", model.buffers())
    state = get_optimizer_state(made.optimizer).values()
    trace.set_purpose_of_storages("optimizer", (t for entry in state for t in entry.values()))
    x, y = (t[:1] for t in batch())
    x, y = x.clone(), y.clone()
    trace.set_purpose_of_storages("activations", (x, y))
    with trace:
        made.step(x, y)
    measured = max(trace.list_live_bytes_after_events(0, len(trace.events)))
    assert footprint.make_footprint(request).compute_training_peak(1).n_bytes == measured


@pytest.mark.slow
def test_adamw_by_foreach_takes_a_copy_of_what_a_gpu_trains():
    request = request_for("single", "text of 2 x 256", 1, device="cuda", **ADAMW)
    fused, foreach, loop = (
        footprint.make_footprint(changed(request, optimizer_impl=implementation))
        for implementation in IMPLEMENTATIONS
    )
    assert foreach.model_states_bytes == fused.model_states_bytes == loop.model_states_bytes
    peak = foreach.compute_training_peak(1)
    assert peak.phase == "optimizer"
    parameters_bytes = fused.model_states_bytes["parameters_bytes"]
    assert peak.parts_bytes["temporaries"] == pytest.approx(parameters_bytes, rel=0.01)
    assert loop.compute_training_peak(1).n_bytes < peak.n_bytes - 0.5 * parameters_bytes
    assert fused.operations_per_step < foreach.operations_per_step < loop.operations_per_step


@pytest.mark.slow
def test_torchs_own_zero_is_planned_in_a_process_of_its_own():
    """It compiles torch's functional optimizers where it is first imported."""
    process = forking().Process(target=plan_torchs_zero, daemon=True)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0


def plan_torchs_zero() -> None:
    assert "torch.distributed.optim" not in sys.modules
    for implementation in reversed(IMPLEMENTATIONS):  # what reads its count of steps comes first
        request = request_for("zero1-torch", MODEL, 2, optimizer_impl=implementation, **ADAMW)
        footprint.make_footprint(request)
    assert "torch.distributed.optim" in sys.modules
