"""`loss_chunks`: the loss of a text in parts, equal to that of the whole, in the memory of one part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_plan_footprint import changed, planned, request_for
from torch import nn

from launching import settings
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.plan.footprint.trace import OperatorTrace
from stratbench.extensions.plan.footprint.traffic import compute_wire_bytes
from stratbench.strategies import base, collective, get_option_defaults, get_strategy_class
from stratbench.workload.data import prepared
from stratbench.workload.data.datasets import make_dataset_metadata
from stratbench.workload.data.device_data import make_example_batch
from stratbench.workload.data.prepare import prepare_data_set
from stratbench.workload.network import models
from stratbench.workload.network.chunked_loss import ChunkedLoss, find_output_layer
from stratbench.workload.network.gpt import GPT
from stratbench.workload.network.precision import get_weights_dtype
from stratbench.workload.tasks import NextToken
from stratbench.workload.users_code import Refused

TOKENS, MODEL, POSITIONS = 10, "small text", 64


class Capped(nn.Module):
    """Scores that are not what the last layer returns, as Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.head(self.embedding(x)).tanh()


def set_up(request) -> collective.Collective:
    cls = get_strategy_class(request.strategy)
    strategy, device = cls(cls.Options(**request.options)), torch.device("cpu")
    dtype = get_weights_dtype(request.settings.precision)
    source = request.model_source
    model = models.build_model_for_training(source, TOKENS, (POSITIONS,), 0, device, dtype)
    place = device, RunFolder(Path()), models.list_shard_groups(source, model)
    worker = base.Worker(
        request.settings, 0, 1, 1, *place, task=NextToken(), input_shape=(POSITIONS,)
    )
    strategy.setup(model, worker)
    return strategy


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    layout = torch.contiguous_format
    return make_example_batch(
        samples, (POSITIONS,), TOKENS, torch.device("cpu"), torch.float32, layout
    )


# How a text is divided is the same in each precision: to the last digits of fp64 is enough.
@pytest.mark.parametrize(
    ("precision", "chunks"),
    [*(("fp64", n) for n in (3, 64, 100)), *((kind, 3) for kind in ("fp32", "bf16", "bf16-true"))],
)
def test_the_loss_in_parts_is_that_of_the_whole(precision, chunks):
    """Also in parts that are not equal, or of one position."""
    losses, weights = [], []
    for parts in (1, chunks):
        made = set_up(request_for("single", MODEL, 1, precision=precision, loss_chunks=parts))
        losses.append(torch.stack([made.step(*batch(4)).double() for _ in range(3)]))
        weights.append(torch.cat([p.detach().flatten().double() for p in made.local]))
        with made.open_evaluation_model() as model, torch.no_grad():
            assert model(batch(2)[0]).shape == (2, POSITIONS, TOKENS)
    bound = {"fp64": 1e-12, "fp32": 1e-5}.get(precision, 2e-2)
    assert (losses[0] - losses[1]).abs().max() < bound
    assert (weights[0] - weights[1]).abs().max() < bound


@pytest.mark.slow
def test_what_is_allocated_is_planned():
    request = request_for("single", MODEL, 1, loss_chunks=4)
    made, trace = set_up(request), OperatorTrace(on_cpu=True)
    trace.set_purpose_of_storages("parameters", made.model.parameters())
    state = made.optimizer.state.values()
    trace.set_purpose_of_storages("optimizer", (t for entry in state for t in entry.values()))
    x, y = batch(24)
    trace.set_purpose_of_storages("activations", (x, y))
    with trace:
        made.step(x, y)
    measured = max(trace.list_live_bytes_after_events(0, len(trace.events)))
    assert planned(request).compute_training_peak(24).n_bytes == measured


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero1"])
def test_the_memory_of_scores_is_that_of_a_part(strategy):
    vocabulary, batch = 8192, 32
    request = request_for(strategy, MODEL, 1 if strategy == "single" else 2, precision="bf16")
    request = request.__class__(**vars(request) | {"classes": vocabulary})
    whole, parts = (planned(changed(request, loss_chunks=n)) for n in (1, 8))
    saved = whole.compute_training_peak(batch).n_bytes - parts.compute_training_peak(batch).n_bytes
    scores_bytes = 4 * batch * POSITIONS * vocabulary
    assert saved > 1.5 * scores_bytes  # in 32 bits, and their gradient
    assert parts.model_states_bytes == whole.model_states_bytes
    assert parts.sum_payload_bytes_by_kind() == whole.sum_payload_bytes_by_kind()
    # The head once more.
    assert parts.recomputed_flops_per_sample == 2 * POSITIONS * 128 * vocabulary


def test_scores_that_no_layer_returns_are_refused_with_the_remedy():
    model = Capped()
    with pytest.raises(Refused, match="set loss_chunks to 1"):
        ChunkedLoss(model, torch.zeros(1, 4, dtype=torch.int64), 2, NextToken().loss)
    assert model.training
    assert model.calls == 0
    tied = GPT(TOKENS, POSITIONS, layers=1, heads=2, width=8)
    assert find_output_layer(tied, torch.zeros(1, 4, dtype=torch.int64)) is tied.head


@pytest.mark.parametrize("strategy", ["ps-sync", "deepspeed", "tensor", "pipeline"])
def test_who_cannot_says_so(strategy):
    values = vars(request_for("ddp", MODEL, loss_chunks=2).settings)
    given = values | {"gpus": [2], "networks": {MODEL: MODEL}}
    found = get_strategy_class(strategy).iter_refused_values(get_option_defaults(strategy), given)
    assert any(
        reason.startswith(".loss_chunks = 2: ") and "set it to 1" in reason for reason in found
    )


@pytest.mark.slow
def test_settings_that_save_memory_go_together(start_cell, warm, tmp_path):
    """On two workers, with what each of them is planned to hold."""
    spec = {"source": "markov-text", "train_samples": 64, "test_samples": 24, "vocabulary": 8,
            "sequence": 16}  # fmt: skip
    prepare_data_set("text", tmp_path / "text", spec=spec)
    data_spec = prepared.read_unverified_metadata(tmp_path / "text")["spec"]
    s = settings(
        "fsdp", model="gpt-compact", dataset="text", data_spec=data_spec, gradient_accumulation_steps=2,
        loss_chunks=3,
        activation_checkpointing="selective", precision="bf16-true", optimizer_impl="foreach",
        optimizer="adamw", momentum=0.0, betas=[0.9, 0.99], eps=1e-8, max_grad_norm=1.0,
    )  # fmt: skip
    launched = start_cell(s, data_dir=tmp_path / "text", env=warm)
    code, output = launched.finish()
    assert code == 0, output
    made = launched.read_record()
    assert made["status"] == "ok", made["reason"]
    request = Request.from_settings(
        s, make_dataset_metadata("text", spec), on_cuda=False, workers_per_node=2
    )
    assert made["memory"]["model_states"] == planned(request).model_states_bytes
    sent_bytes = made["communication"]["sent_bytes_per_step"]
    assert sent_bytes == pytest.approx(
        compute_wire_bytes(planned(request).collectives, 2, on_gloo=False)
    )
