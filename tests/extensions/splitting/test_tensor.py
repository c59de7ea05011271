"""Tensor parallelism: divided layers train as one process does, send what is predicted, and are refused
where they cannot be divided."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import WORLDS, found_by_groups

from launching import ADAMW, settings
from stratbench.cell import record
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.splitting.heads import SelfAttention
from stratbench.extensions.splitting.tensor import TensorParallel
from stratbench.strategies import get_mesh, get_option_defaults
from stratbench.strategies.base import Worker
from stratbench.strategies.collective import Collective
from stratbench.strategies.mesh import Mesh
from stratbench.strategies.single import Single
from stratbench.telemetry import collective_count
from stratbench.telemetry.collective_count import CollectiveCount
from stratbench.telemetry.shards import gather_full_tensor
from stratbench.workload import tasks
from stratbench.workload.data import prepared
from stratbench.workload.data.prepare import prepare_data_set
from stratbench.workload.network import models
from stratbench.workload.network.checkpointing import checkpoint_and_count_blocks
from stratbench.workload.network.gpt import GPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LAYERS, WIDTH, POSITIONS, VOCABULARY, BATCH = 2, 12, 8, 7, 8
#: Two steps show what momentum does; one more, and AdamW's rates, that nothing adds up.
STEPS, FEW_STEPS = 3, 2
#: How far losses, and weights under SGD, may be from one process's; AdamW's weights: near a gradient
#: of zero its update hangs on rounding.
LOSSES, WEIGHTS, ADAMW_WEIGHTS = 1e-12, 1e-12, 1e-9
#: Ways to train: settings, and the network.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "tied"),
    "own head": ({}, "own head"),
    "parts and clip": ({"gradient_accumulation_steps": 2, "max_grad_norm": 0.2}, "tied"),
    "adamw": (ADAMW | {"lr": 0.01, "schedule": "cosine", "lr_warmup_steps": 2}, "tied"),
    "recomputed": ({"activation_checkpointing": True}, "tied"),
    "selective": ({"activation_checkpointing": "selective"}, "tied"),
    "vit": ({"lr": 0.02, "max_grad_norm": 0.2}, "vit-compact"),
}
#: Ways to divide; pairs are of four workers.
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "sequence": {"sequence_parallel": True},
    "pairs": {"tensor_parallel_size": 2},
    "pairs, ddp": {"tensor_parallel_size": 2, "data_parallel": "ddp"},
    "pairs, sequence": {
        "tensor_parallel_size": 2,
        "data_parallel": "ddp",
        "sequence_parallel": True,
    },
}
#: Which of them are tried: by pairs in every way, and among more than two workers where parts differ.
TRIED: dict[str, dict[int, tuple[str, ...]]] = {
    "plain": {2: ("all", "sequence"), 4: ("all", "pairs, sequence")},
    "own head": {2: ("all", "sequence"), 4: ("pairs",)},
    "parts and clip": {2: ("all", "sequence"), 4: ("pairs", "pairs, ddp", "pairs, sequence")},
    "adamw": {2: ("all",), 4: ("sequence", "pairs")},
    "recomputed": {2: ("sequence",), 4: ("pairs",)},
    "selective": {2: ("sequence",), 4: ("pairs",)},
    "vit": {2: ("all",), 4: ("pairs",)},
}


class CountedTwice(TensorParallel):
    """A mutant: the norm counts what each worker of a group holds whole as often as there are workers."""

    def wrap(self, model, worker):
        wrapped = super().wrap(model, worker)
        self._counts = [True] * len(self._counts)
        return wrapped


class OwnReplicas(TensorParallel):
    """A mutant: each replica goes its own way."""

    def _register_gradient_averaging(self, model, mesh):
        """Register no hooks."""


class OwnPositions(TensorParallel):
    """A mutant: a norm learns from the positions of this worker alone."""

    def assign_gradients_to_updated_tensors(self):
        self._wait_for_averaged_gradients()
        super(TensorParallel, self).assign_gradients_to_updated_tensors()


class DeafAttention(TensorParallel):
    """A mutant: what an attention reads learns nothing from it."""

    def wrap(self, model, worker):
        wrapped = super().wrap(model, worker)
        for module in model.modules():
            if isinstance(module, SelfAttention):
                module.register_forward_pre_hook(
                    lambda _, inputs: (inputs[0].detach(), *inputs[1:])
                )
        return wrapped


def network(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind in models.MODELS:
        return models.build_model(kind, VOCABULARY, (1, 16, 16)).double()
    tied = kind == "tied"
    return GPT(VOCABULARY, POSITIONS, layers=LAYERS, heads=4, width=WIDTH, tied=tied).double()


def set_up(cls: type[Collective], options: dict[str, Any], way: str, rank: int, world: int):
    changed, kind = WAYS[way]
    name = kind if kind in models.MODELS else "gpt-compact"
    strategy = cls(cls.Options(**options))
    mesh = strategy.mesh(world)
    s = replace(
        settings(gpus=world, model=name), precision="fp64", lr=0.1, momentum=0.9,
        weight_decay=1e-3, nesterov=True, global_batch=BATCH, per_worker_batch=BATCH // mesh.replicas,
    )  # fmt: skip
    s = replace(s, **changed)
    model = network(kind)
    groups = models.list_shard_groups(name, model)
    if s.activation_checkpointing:
        checkpoint_and_count_blocks(groups, s.activation_checkpointing)
    worker = Worker(
        s, rank, world, world, torch.device("cpu"), RunFolder(Path()), groups,
        task=tasks.Classification() if kind in models.MODELS else tasks.NextToken(),
        mesh=mesh, total_steps=STEPS,
    )  # fmt: skip
    strategy.setup(model, worker)
    return strategy, model


def steps_of(way: str) -> int:
    return STEPS if way == "adamw" else FEW_STEPS


def samples(way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of all steps, of the kind that the network reads."""
    generator = torch.Generator().manual_seed(1)
    if WAYS[way][1] in models.MODELS:
        images = torch.randn(STEPS * BATCH, 1, 16, 16, generator=generator, dtype=torch.float64)
        return images, torch.randint(VOCABULARY, (STEPS * BATCH,), generator=generator)
    text = torch.randint(VOCABULARY, (STEPS * BATCH, POSITIONS + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def trajectory(
    cls: type[Collective], options: dict[str, Any], way: str, rank: int, world: int
) -> dict[str, Any]:
    """Losses over all samples [STEPS], final weights, and scores of an evaluation; after a warm-up."""
    strategy, model = set_up(cls, options, way, rank, world)
    x, y = samples(way)
    saved = strategy.save()
    strategy.step(
        x[: strategy.worker.settings.per_worker_batch].flip(0),
        y[: BATCH // strategy.worker.data_workers],
    )
    with strategy.open_evaluation_model() as evaluated, torch.no_grad():
        evaluated(x[:4])
    strategy.restore(saved)
    batches = islice(strategy.batches(torch.arange(len(x)), 0), steps_of(way))
    losses = [strategy.step(x[i], y[i]) for i in batches]
    together = torch.stack(losses)
    if world > 1:
        dist.all_reduce(together)
    weights = whole_weights(model)
    with strategy.open_evaluation_model() as evaluated, torch.no_grad():
        scores = evaluated(x[:4])
    return {
        "losses": together / world, "weights": weights, "scores": scores,
        "sent": strategy.communication()["sent_bytes_per_step"] if world > 1 else 0,
        "bytes": strategy.compute_model_state_bytes()["parameters_bytes"],
        "updates": strategy.report()["updates_applied"],
    }  # fmt: skip


def whole_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """All weights in the order of their names; of an attention's projections as torch's has them."""
    found = {name: gather_full_tensor(p.detach()).clone() for name, p in model.named_parameters()}
    for name in [n for n in found if "self_attention.query." in n]:
        parts = [found.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        found[name.replace("query.", "in_proj_")] = torch.cat(parts)
    return [w for _, w in sorted((n.replace("out_proj", "out"), w) for n, w in found.items())]


def traffic(rank: int, world: int, batch: int) -> dict[str, int]:
    """How often the activations of a batch were added up over a group, in a step of it."""
    strategy, _ = set_up(TensorParallel, {}, "plain", rank, world)
    x, y = samples("plain")
    strategy._counts_step = False  # its own count is looked at elsewhere
    with CollectiveCount() as count:
        strategy.step(x[:batch], y[:batch])
    stream = batch * POSITIONS * WIDTH * 8
    kinds = [c.collective_name for c in count.calls if c.n_bytes == stream]
    return {kind: kinds.count(kind) for kind in set(kinds)}


def work(world: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in WAYS:
        for name in TRIED[way].get(world, ("all",)):
            found[f"{way}: {name}"] = trajectory(TensorParallel, OPTIONS[name], way, rank, world)
        if world == 1:
            found[f"{way}: single"] = trajectory(Single, {}, way, rank, 1)
    for cls, workers, options, way in MUTANTS:
        if workers == world:
            found[cls.__name__] = trajectory(cls, options, way, rank, world)
    if world > 1:
        found["traffic"] = [traffic(rank, world, batch) for batch in (4, 8)[world // 4 :]]
    return found


#: And how many workers notice each.
MUTANTS = (
    (CountedTwice, 2, OPTIONS["all"], "parts and clip"),
    (OwnReplicas, 4, OPTIONS["pairs, ddp"], "plain"),
    (OwnPositions, 2, OPTIONS["sequence"], "plain"),
    (DeafAttention, 2, OPTIONS["all"], "vit"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, dict[str, Any]]:
    return found_by_groups(work, tmp_path_factory.mktemp("tensor"))


def distance(one: dict[str, Any], other: dict[str, Any], key: str) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one[key], other[key], strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", WORLDS)
def test_divided_layers_train_as_one_process_does(found, world, way):
    one = found[1][f"{way}: single"]
    held = {k: v for k, v in found[world].items() if k.startswith(f"{way}: ") and "single" not in k}
    assert held
    for name, ours in held.items():
        assert distance(ours, one, "losses") < LOSSES, name
        limit = ADAMW_WEIGHTS if way == "adamw" else WEIGHTS
        assert distance(ours, one, "weights") < limit, name
        assert distance(ours, one, "scores") < 100 * limit, name
        assert ours["updates"] == steps_of(way)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant[0].__name__)
def test_mutants_are_seen(found, mutant):
    cls, world, _, way = mutant
    one = found[1][f"{way}: single"]
    assert distance(found[world][cls.__name__], one, "weights") > 1e-6


@pytest.mark.parametrize("world", [2, 4])
def test_a_block_adds_up_its_activations_four_times(found, world):
    """And the embedding once in forward, the head's input once in backward, whatever the batch."""
    for counts in found[world]["traffic"]:
        assert counts == {"all_reduce": 4 * LAYERS + 2}


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_sent_is_by_the_ring_formula(found, world):
    stream = BATCH * POSITIONS * WIDTH * 8
    activations = 2 * (world - 1) / world * (4 * LAYERS + 2) * stream
    # The loss on divided scores exchanges its maximum, its sum and the target's score of each token.
    tokens = BATCH * POSITIONS * 8
    loss = 2 * (world - 1) / world * 3 * tokens
    sent = found[world]["plain: all"]["sent"]
    assert activations + loss == pytest.approx(sent, rel=0.02)


def test_workers_hold_their_part(found):
    whole = found[1]["plain: single"]["bytes"]
    norms = (LAYERS * 6 + 2 + POSITIONS) * WIDTH * 8  # and biases of rows, and positions: on all
    for world in (2, 4):
        part = found[world]["plain: all"]["bytes"]
        assert (whole - norms) / world <= part <= (whole - norms) / world * 1.2 + norms
    pairs, replicated = (found[4][f"parts and clip: {name}"] for name in ("pairs", "pairs, ddp"))
    assert pairs["bytes"] < replicated["bytes"]


@pytest.mark.parametrize(
    ("options", "gpus", "mesh"),
    [
        ({}, 4, Mesh(1, tensor=4)),
        ({"tensor_parallel_size": 2}, 4, Mesh(2, tensor=2)),
        ({"tensor_parallel_size": 2}, 1, Mesh(1)),
        ({"tensor_parallel_size": 4}, 2, Mesh(1, tensor=2)),
    ],
)
def test_how_workers_are_divided(options, gpus, mesh):
    assert TensorParallel(TensorParallel.Options(**options)).mesh(gpus) == mesh


def test_groups_that_do_not_come_out_even_are_refused():
    with pytest.raises(ValueError, match="tensor_parallel_size = 2 does not divide the 3 workers"):
        TensorParallel(TensorParallel.Options(tensor_parallel_size=2)).mesh(3)


def refused(**values: Any) -> list[str]:
    block = {
        "models": ["gpt-compact"],
        "gpus": [1, 2, 4],
        "compile": False,
        "loss_chunks": 1,
    }
    options = {
        "tensor_parallel_size": "all",
        "data_parallel": "fsdp",
        "sequence_parallel": False,
    } | values.pop("options", {})
    block |= values
    block["networks"] = {name: name for name in block["models"]}
    return list(TensorParallel.iter_refused_values(options, block))


def test_what_cannot_be_divided_is_refused_before_any_job():
    assert refused() == []
    (said,) = refused(models=["vgg-compact", "gpt-compact"])
    assert "'vgg-compact': it has no plan" in said
    assert "gpt-compact" in said
    assert refused(models=["vit-compact", "vit_b_16"], gpus=[1, 2, 4]) == []
    (said,) = refused(models=["vit-compact"], options={"sequence_parallel": True})
    assert "'vit-compact': sequence_parallel: true divides the positions of texts" in said
    (said,) = refused(models=["vit_b_16"], gpus=[8])
    assert "vit_b_16: 8 workers cannot divide its 12 heads" in said
    (said,) = refused(gpus=[8])
    assert "gpt-compact: 8 workers cannot divide its 4 heads" in said
    assert refused(gpus=[8], options={"tensor_parallel_size": 4}) == []
    assert refused(gpus=[3], options={"tensor_parallel_size": 2}) == []  # `mesh` says why
    (said,) = refused(compile=True)
    assert ".compile" in said


def prepared_cell(folder: Path, workers: int, positions: int = 16, **options: Any):
    """Settings of a cell that divides layers, and its data, prepared in `folder`."""
    spec = {"source": "markov-text", "train_samples": 64, "test_samples": 24, "vocabulary": 8,
            "sequence": positions}  # fmt: skip
    prepare_data_set("text", folder, spec=spec)
    options = get_option_defaults("tensor") | options
    replicas = get_mesh("tensor", options, workers).replicas
    return settings(
        "tensor", options=options, model="gpt-compact", dataset="text", gpus=workers, epochs=1,
        global_batch=16, per_worker_batch=16 // replicas, lr=0.02,
        data_spec=prepared.read_unverified_metadata(folder)["spec"],
    )  # fmt: skip


@pytest.mark.parametrize(("workers", "options"), [(2, {}), (4, {"tensor_parallel_size": 2})])
def test_a_cell_trains_and_its_record_says_its_mesh(
    start_cell: Callable[..., Any], warm, tmp_path, workers, options
):
    s = prepared_cell(tmp_path / "text", workers, **options)
    cell = start_cell(s, data_dir=tmp_path / "text", env=warm)
    code, output = cell.finish()
    assert code == 0, output
    made = record.read_record(cell.record)
    assert made["status"] == "ok"
    assert made["strategy"]["mesh"] == {"replicas": workers // 2, "tensor": 2, "stages": 1}
    assert made["batch"]["samples_seen"] == made["batch"]["samples_applied"] == 64
    assert sum(w["samples"] for w in made["workers"]) == 2 * 64
    assert made["communication"]["sent_bytes_per_step"] > 0


def test_texts_that_cannot_be_divided_by_positions_are_refused(start_cell, warm, tmp_path):
    """How long texts are is known once the data are there."""
    s = prepared_cell(tmp_path / "text", 2, positions=15, sequence_parallel=True)
    cell = start_cell(s, data_dir=tmp_path / "text", env=warm)
    code, output = cell.finish()
    assert code == 0, output
    made = record.read_record(cell.record)
    assert made["status"] == "unsupported"
    assert "2 workers cannot divide texts of 15 tokens evenly" in made["reason"]


def test_a_collective_that_is_not_known_ends_no_training(monkeypatch):
    """What is sent is not known then, and no figure takes its place."""
    monkeypatch.setattr(collective_count, "detect_collective", raising)
    with CollectiveCount() as count:
        assert float(torch.ones(2).sum()) == 2
    assert math.isnan(count.count_sent_bytes(2))


def raising(*_: Any) -> None:
    raise NotImplementedError
