"""Pipeline parallelism: stages train as one process does, send what is predicted, and are refused where
they cannot be cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from process_groups import WORLDS, found_by_groups
from torch._subclasses.fake_tensor import FakeTensorMode

from launching import ADAMW, settings
from stratbench.cell import record
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.extensions.plan.footprint.footprint import Footprint, make_footprint
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.plan.footprint.trace import OperatorTrace
from stratbench.extensions.splitting import declared
from stratbench.extensions.splitting.pieces import group_pieces_into_indivisible_units
from stratbench.extensions.splitting.pipeline import STAGES_PER_WORKER, Pipeline
from stratbench.extensions.splitting.stages import MeasuredUnit, choose_unit_count_per_stage
from stratbench.strategies import get_mesh, get_option_defaults
from stratbench.strategies.base import Worker
from stratbench.strategies.collective import Collective
from stratbench.strategies.mesh import Mesh
from stratbench.strategies.single import Single
from stratbench.telemetry.collective_count import CollectiveCount
from stratbench.telemetry.collectives import CollectiveCall
from stratbench.workload import tasks
from stratbench.workload.data import prepared
from stratbench.workload.data.prepare import prepare_data_set
from stratbench.workload.network import models
from stratbench.workload.network.checkpointing import checkpoint_and_count_blocks
from stratbench.workload.network.gpt import GPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LAYERS, WIDTH, POSITIONS, VOCABULARY, BATCH, MICROBATCHES = 6, 12, 8, 7, 16, 4
#: Two steps show what momentum does; one more, and AdamW's rates, that nothing adds up.
STEPS, FEW_STEPS = 3, 2
#: How far losses, and weights under SGD, may be from one process's; AdamW's weights: near a gradient
#: of zero its update hangs on rounding.
LOSSES, WEIGHTS, ADAMW_WEIGHTS = 1e-12, 1e-12, 1e-9
#: Ways to train: settings, and the network.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "tied"),
    "parts and clip": ({"gradient_accumulation_steps": 2, "max_grad_norm": 0.2}, "tied"),
    "adamw": (ADAMW | {"lr": 0.01, "schedule": "cosine", "lr_warmup_steps": 2}, "own head"),
    "vgg": ({"lr": 0.02}, "vgg-compact"),
    "recomputed": ({"lr": 0.02, "activation_checkpointing": True}, "vit-compact"),
    "planned": ({}, "gpt-compact"),
    "selective": ({"activation_checkpointing": "selective"}, "tied"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    name: {"schedule": name, "microbatches": MICROBATCHES} for name in STAGES_PER_WORKER
}
#: Schedules and workers whose memory is planned: all schedules, and once stages between two others.
HELD = [*((name, 2) for name in OPTIONS), ("1f1b", 4)]
#: Backward in two parts would ask twice for what is kept.
REFUSED = ("selective", "zero-bubble")
#: Tried with all schedules as two pipelines: here gradients are shared, averaged and counted late.
EVERYWHERE = "parts and clip"
#: Four workers as two pipelines.
PAIRS = {f"pairs, {name}": o | {"pipeline_parallel_size": 2} for name, o in OPTIONS.items()}


class CountedTwice(Pipeline):
    """A mutant: what two stages share counts twice in the norm."""

    def wrap(self, model, worker):
        wrapped = super().wrap(model, worker)
        self._counted_elsewhere = set()
        return wrapped


class OwnEmbedding(Pipeline):
    """A mutant: each of two stages learns what they share by itself."""

    def _find_parameters_of_several_stages(self, model):
        shared = super()._find_parameters_of_several_stages(model)
        self._tied = {}
        return shared


class OwnReplicas(Pipeline):
    """A mutant: each pipeline goes its own way."""

    def _start_gradient_averaging(self, parameter, group):
        self._sent.add(parameter)


class TooEarly(Pipeline):
    """A mutant: a gradient is averaged before its last micro-batch."""

    def _store_stage_that_ends_backward(self, stage, last):
        self._ending = stage

    def _start_gradient_averaging(self, parameter, group):
        if parameter not in self._sent:
            super()._start_gradient_averaging(parameter, group)


class OneMicrobatch(Pipeline):
    """A mutant: the loss of a micro-batch counts as that of the whole batch."""

    def _compute_microbatch_loss(self, scores, y):
        return super()._compute_microbatch_loss(scores, y) * self.options.microbatches


def network(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "gpt-compact":
        return models.build_model(kind, VOCABULARY, (POSITIONS,)).double()
    if kind in models.MODELS:
        return models.build_model(kind, VOCABULARY, (1, 16, 16)).double()
    tied = kind == "tied"
    return GPT(VOCABULARY, POSITIONS, layers=LAYERS, heads=4, width=WIDTH, tied=tied).double()


def set_up(cls: type[Collective], options: dict[str, Any], way: str, rank: int, world: int):
    """The strategy, and all parameters that the network has, by name."""
    changed, kind = WAYS[way]
    strategy = cls(cls.Options(**options))
    mesh = strategy.mesh(world)
    name = kind if kind in models.MODELS else "gpt-compact"
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
        task=tasks.NextToken() if name == "gpt-compact" else tasks.Classification(), mesh=mesh,
        total_steps=STEPS, input_shape=(POSITIONS,) if name == "gpt-compact" else (1, 16, 16),
    )  # fmt: skip
    whole = dict(model.named_parameters())
    strategy.setup(model, worker)
    return strategy, whole


def steps_of(way: str) -> int:
    return STEPS if way == "adamw" else FEW_STEPS


def samples(way: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    n = steps_of(way) * BATCH
    if WAYS[way][1] in models.MODELS:
        images = torch.randn(n, 1, 16, 16, generator=generator, dtype=torch.float64)
        return images, torch.randint(VOCABULARY, (n,), generator=generator)
    text = torch.randint(VOCABULARY, (n, POSITIONS + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def whole_weights(strategy: Collective, whole: dict[str, torch.nn.Parameter], world: int):
    """All parameters, of which each worker has some; where several have one, their mean."""
    own = set(strategy.model.parameters())
    values = torch.cat([(p.detach() * (p in own)).flatten() for p in whole.values()])
    holders = torch.tensor([float(p in own) for p in whole.values()])
    if world > 1:
        dist.all_reduce(values)
        dist.all_reduce(holders)
    each = values.split([p.numel() for p in whole.values()])
    return [value / n for value, n in zip(each, holders, strict=True)]


def trajectory(
    cls: type[Collective], options: dict[str, Any], way: str, rank: int, world: int
) -> dict[str, Any]:
    """Losses over all samples [steps], final weights, and scores of an evaluation; after a warm-up."""
    strategy, whole = set_up(cls, options, way, rank, world)
    x, y = samples(way)
    mesh, each = strategy.worker.mesh, strategy.worker.settings.per_worker_batch
    saved = strategy.save()
    strategy.step(x[:each].flip(0), y[:each])
    with strategy.open_evaluation_model() as evaluated, torch.no_grad():
        evaluated(x[:4])
    strategy.restore(saved)
    batches = islice(strategy.batches(torch.arange(len(x)), 0), steps_of(way))
    losses = torch.stack([strategy.step(x[i], y[i]) for i in batches])
    with strategy.open_evaluation_model() as evaluated, torch.no_grad():
        scores = evaluated(x[:4])
    if not mesh.reports_replica_results(rank):
        losses = torch.zeros_like(losses)
    if world > 1:
        dist.all_reduce(losses)
        dist.all_reduce(scores)  # zeros on all workers but the last stage's
    held = torch.tensor(float(strategy.compute_model_state_bytes()["parameters_bytes"]))
    if world > 1:
        dist.all_reduce(held)
    return {
        "losses": losses / mesh.replicas, "weights": whole_weights(strategy, whole, world),
        "scores": scores / mesh.replicas, "bytes": float(held) / mesh.replicas,
        "sent": strategy.communication()["sent_bytes_per_step"] if world > 1 else 0,
        "updates": strategy.report()["updates_applied"],
        "details": strategy.report()["details"],
    }  # fmt: skip


def traffic(options: dict[str, Any], rank: int, world: int) -> float:
    """Bytes of activations and their gradients that all workers together send in a step."""
    strategy, _ = set_up(Pipeline, options, "adamw", rank, world)
    x, y = samples("adamw")
    strategy._counts_step = False  # its own count is looked at elsewhere
    with CollectiveCount() as count:
        strategy.step(x[:BATCH], y[:BATCH])
    sent = torch.tensor(float(sum(c.n_bytes for c in count.calls if c.collective_name == "send")))
    dist.all_reduce(sent)
    return float(sent)


def held(options: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """What a worker holds at most in a step, by an operator trace of real tensors; each rank's."""
    strategy, _ = set_up(Pipeline, options, "planned", rank, world)
    x, y = samples("plain")
    strategy._counts_step = False
    strategy.step(x[:BATCH], y[:BATCH])  # buffers for what is received are there from now on
    trace = OperatorTrace(on_cpu=True)
    trace.set_purpose_of_storages("parameters", strategy.model.parameters())
    trace.set_purpose_of_storages(
        "optimizer", (t for state in strategy.optimizer.state.values() for t in state.values())
    )
    for part, tensors in strategy.list_persistent_tensors().items():
        trace.set_purpose_of_storages(part, tensors)
    first = len(trace.events)
    with trace:
        strategy.step(x[:BATCH], y[:BATCH])
    peak = torch.zeros(world)
    peak[rank] = max(trace.list_live_bytes_after_events(first, len(trace.events)))
    states = torch.zeros(world)
    states[rank] = sum(strategy.compute_model_state_bytes().values())
    dist.all_reduce(peak)
    dist.all_reduce(states)
    return {"peaks": peak.tolist(), "states": states.tolist()}


def tried(way: str, world: int) -> dict[str, dict[str, Any]]:
    """The schedules of a way on so many workers, by name.

    Each way has each schedule and each mesh (a pipeline of two workers, one of four, two pipelines),
    and each schedule has each mesh, but not all three of a kind.
    """
    if world == 1:
        return {"plain": OPTIONS, EVERYWHERE: {"gpipe": OPTIONS["gpipe"]}}.get(way, {})
    found = {}
    for turn, (name, options) in enumerate(OPTIONS.items(), list(WAYS).index(way)):
        if (way, name) == REFUSED:
            continue
        mesh = turn % 3
        if mesh == 1 and not is_possible(way, options, 4):
            mesh = 0
        both = (way, name) == ("plain", "1f1b")
        if both or mesh == {2: 0, 4: 1}[world]:
            found[name] = options
        if world == 4 and (both or mesh == 2 or way == EVERYWHERE):
            found[f"pairs, {name}"] = PAIRS[f"pairs, {name}"]
    return found


def is_possible(way: str, options: dict[str, Any], world: int) -> bool:
    """Whether the network has so many stages."""
    kind = WAYS[way][1]
    most = models.MODELS[kind].max_pipeline_stages if kind in models.MODELS else LAYERS + 2
    return Pipeline(Pipeline.Options(**options)).count_pipeline_stages(world) <= most


#: Of this process: what `counted_once` has counted of each network.
MEASURED: dict[Any, list[MeasuredUnit]] = {}


def counted_once(measure: Callable[..., list[MeasuredUnit]]) -> Callable[..., list[MeasuredUnit]]:
    """`Pipeline.measure`, which counts a network's operations once, however often it is set up.

    That takes longer than to train it a few steps, and depends on nothing but the network.
    """

    def remembered(self: Pipeline, model: torch.nn.Module, units: Any) -> list[MeasuredUnit]:
        shapes = tuple((name, p.shape) for name, p in model.named_parameters())
        key = shapes, self.worker.settings.activation_checkpointing
        if key not in MEASURED:
            MEASURED[key] = measure(self, model, units)
        return MEASURED[key]

    return remembered


def work(world: int, rank: int) -> dict[str, Any]:
    with mock.patch.object(
        Pipeline,
        "measure_unit_costs_on_fake_tensors",
        counted_once(Pipeline.measure_unit_costs_on_fake_tensors),
    ):
        return trained_in_all_ways(world, rank)


def trained_in_all_ways(world: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in (w for w in WAYS if w != "planned"):
        for name, options in tried(way, world).items():
            found[f"{way}: {name}"] = trajectory(Pipeline, options, way, rank, world)
        if world == 1:
            found[f"{way}: single"] = trajectory(Single, {}, way, rank, 1)
    for cls, workers, options, way in MUTANTS:
        if workers == world:
            found[cls.__name__] = trajectory(cls, options, way, rank, world)
    if world > 1:
        found["held"] = {
            name: held(OPTIONS[name], rank, world) for name, workers in HELD if workers == world
        }
        found["traffic"] = {
            name: traffic(options, rank, world) for name, options in OPTIONS.items()
        }
    return found


#: And how many workers notice each.
MUTANTS = (
    (CountedTwice, 2, OPTIONS["1f1b"], "parts and clip"),
    (OwnEmbedding, 2, OPTIONS["1f1b"], "plain"),
    (OwnReplicas, 4, PAIRS["pairs, 1f1b"], "plain"),
    (TooEarly, 4, PAIRS["pairs, gpipe"], "plain"),
    (OneMicrobatch, 2, OPTIONS["gpipe"], "plain"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, dict[str, Any]]:
    return found_by_groups(work, tmp_path_factory.mktemp("pipeline"))


def distance(one: dict[str, Any], other: dict[str, Any], key: str) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one[key], other[key], strict=True))


@pytest.mark.parametrize(
    ("world", "way"),
    [(w, way) for w in WORLDS for way in WAYS if way != "planned" and tried(way, w)],
)
def test_stages_train_as_one_process_does(found, world, way):
    one = found[1][f"{way}: single"]
    held = {k: v for k, v in found[world].items() if k.startswith(f"{way}: ") and "single" not in k}
    assert held
    for name, ours in held.items():
        assert distance(ours, one, "losses") < LOSSES, name
        limit = ADAMW_WEIGHTS if way == "adamw" else WEIGHTS
        assert distance(ours, one, "weights") < limit, name
        assert distance(ours, one, "scores") < 100 * limit, name
        assert ours["updates"] == steps_of(way)


def test_each_two_of_a_way_a_schedule_and_a_mesh_are_tried_together():
    trained = [way for way in WAYS if way != "planned"]
    runs = [
        (way, name.removeprefix("pairs, "), "pairs" if name in PAIRS else world)
        for way in trained
        for world in (2, 4)
        for name in tried(way, world)
    ]
    meshes = (2, 4, "pairs")
    assert {run[:2] for run in runs} == set(product(trained, OPTIONS)) - {REFUSED}
    assert {run[1:] for run in runs} == set(product(OPTIONS, meshes))
    assert {run[::2] for run in runs} == set(product(trained, meshes))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant[0].__name__)
def test_mutants_are_seen(found, mutant):
    cls, world, _, way = mutant
    one = found[1][f"{way}: single"]
    assert distance(found[world][cls.__name__], one, "weights") > 1e-6


@pytest.mark.parametrize("schedule", OPTIONS)
@pytest.mark.parametrize("world", [2, 4])
def test_a_boundary_is_crossed_by_activations_and_their_gradients(found, world, schedule):
    boundaries = world * STAGES_PER_WORKER[schedule] - 1
    sent = found[world]["traffic"][schedule]
    assert sent == boundaries * 2 * BATCH * POSITIONS * WIDTH * 8


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_sent_is_recorded(found, world):
    """On the first worker: the activations of a batch, and a shared embedding's gradient by the ring."""
    activations = BATCH * POSITIONS * WIDTH * 8
    embedding = VOCABULARY * WIDTH * 8
    sent = found[world]["plain: 1f1b"]["sent"]
    assert sent == activations + embedding


@pytest.mark.parametrize("world", [2, 4])
def test_a_parameter_is_where_it_is_used(found, world):
    more = {"adamw": 0, EVERYWHERE: VOCABULARY * WIDTH * 8}  # an embedding on two stages
    for way, bytes_ in more.items():
        for name in tried(way, world):
            whole = found[1][f"{way}: single"]["bytes"]
            assert found[world][f"{way}: {name}"]["bytes"] == whole + bytes_, name


@pytest.mark.parametrize(("schedule", "world"), HELD)
def test_the_plan_knows_what_each_stage_holds(found, world, schedule):
    planned = footprint_of(schedule, world).footprints_of_stages
    assert len(planned) == world
    seen = found[world]["held"][schedule]
    for stage, footprint in enumerate(planned):
        assert sum(footprint.model_states_bytes.values()) == seen["states"][stage]
        # What is sent lives until it has gone, which the plan takes for at once; what is received may come
        # late.
        calls = [CollectiveCall(*c) for c in footprint.collectives if c[0] == "send"]
        under_way = sum(c.compute_ring_sent_bytes(world, BATCH) for c in calls)
        planned_bytes, peak = footprint.compute_training_peak(BATCH).n_bytes, seen["peaks"][stage]
        assert 0.98 * planned_bytes <= peak <= 1.01 * planned_bytes + under_way


def test_1f1b_holds_fewer_activations_than_gpipe():
    """Of at most as many micro-batches as there are stages, here two of four."""
    peaks = [
        footprint_of(name, 2).footprints_of_stages[0].compute_training_peak(512)
        for name in ("gpipe", "1f1b")
    ]
    gpipe, one = (p.parts_bytes["activations"] for p in peaks)
    assert 0.4 * gpipe < one < 0.65 * gpipe


@cache
def footprint_of(schedule: str, world: int) -> Footprint:
    return make_footprint(request(OPTIONS[schedule], world))


def request(options: dict[str, Any], world: int) -> Request:
    """The planned cell of `held`."""
    planned = settings(
        "pipeline", model="gpt-compact", gpus=world, precision="fp64", momentum=0.9, weight_decay=1e-4,
        nesterov=True, global_batch=world, per_worker_batch=1,
        options=get_option_defaults("pipeline") | options,
    )  # fmt: skip
    return Request(planned, (POSITIONS,), VOCABULARY, workers_per_node=world, eval_batch=4)


@pytest.mark.parametrize("world", WORLDS)
def test_the_bubble_is_predicted(found, world):
    for schedule, a_worker in STAGES_PER_WORKER.items():
        way = next(way for way in WAYS if schedule in tried(way, world))
        predicted = found[world][f"{way}: {schedule}"]["details"]["predicted_bubble_share"]
        if schedule == "zero-bubble" and world > 1:
            assert predicted is None
        else:
            assert predicted == (world - 1) / (a_worker * MICROBATCHES + world - 1)


# --- how a network is cut ------------------------------------------------------------------------


def cut(name: str):
    shape = (16,) if models.MODELS[name].reads_text else (3, 32, 32)
    model = models.build_model(name, VOCABULARY, shape).eval()
    return (
        model,
        shape,
        group_pieces_into_indivisible_units(
            model, declared.make_declared_pieces(name, model), models.list_shard_groups(name, model)
        ),
    )


@pytest.mark.parametrize("name", [n for n in models.MODELS if declared.has_pipeline_pieces(n)])
def test_pieces_are_the_forward(name):
    if models.MODELS[name].parameters > 20_000_000:
        pytest.skip("its small relative has the same pieces")
    model, shape, units = cut(name)
    x = torch.zeros(2, *shape, dtype=torch.int64) if len(shape) == 1 else torch.randn(2, *shape)
    whole, own = model(x), set()
    for unit in units:
        for piece in unit:
            x = piece.compute_output(model, x)
            own.update(piece.iter_used_parameters(model))
    assert torch.equal(x, whole)
    assert own == set(model.parameters())


@pytest.mark.parametrize("name", [n for n in models.MODELS if declared.has_pipeline_pieces(n)])
def test_the_most_stages_are_the_units(name):
    shape = (16,) if models.MODELS[name].reads_text else (3, 32, 32)
    with FakeTensorMode():
        model = models.build_fake_model(name, VOCABULARY, shape)
    units = group_pieces_into_indivisible_units(
        model, declared.make_declared_pieces(name, model), models.list_shard_groups(name, model)
    )
    assert len(units) == models.MODELS[name].max_pipeline_stages
    assert all(any(True for p in unit for _ in p.iter_used_parameters(model)) for unit in units)


def units(*flops: int) -> list[MeasuredUnit]:
    return [MeasuredUnit(n, 1, ()) for n in flops]


def test_stages_are_balanced_by_work_and_then_by_memory():
    assert choose_unit_count_per_stage(units(0, 2, 2, 2, 2, 2), [1, 1]) == [3, 3]
    assert choose_unit_count_per_stage(units(0, 1, 1, 1, 1, 5), [1, 1]) == [5, 1]
    assert choose_unit_count_per_stage(units(3, 1, 1, 1), [1] * 4) == [1, 1, 1, 1]
    # With either cut both stages compute 1: the one that holds less counts.
    one = [MeasuredUnit(1, 1, ()), MeasuredUnit(0, 100, ()), MeasuredUnit(1, 100, ())]
    assert choose_unit_count_per_stage(one, [1, 1]) == [2, 1]


def test_a_head_that_outweighs_all_leaves_the_layers_to_be_divided_by_memory():
    """An embedding and a head as large as all layers together, which no stage but the last can exceed."""
    table, layer, head = (
        MeasuredUnit(*each) for each in ((0, 26, (), 0), (7, 3, (), 40), (84, 26, (), 1))
    )
    assert choose_unit_count_per_stage([table, *[layer] * 12, head], [4, 3, 2, 1]) == [3, 4, 6, 1]
    assert choose_unit_count_per_stage([table, *[layer] * 12, head], [8] * 4) == [5, 4, 4, 1]
    without = [u._replace(kept_bytes=0) for u in (table, *[layer] * 12, head)]
    assert choose_unit_count_per_stage(without, [4, 3, 2, 1])[0] == 1
    with pytest.raises(ValueError, match="2 units cannot be divided into 3 pipeline stages"):
        choose_unit_count_per_stage(units(1, 1), [1] * 3)


@pytest.mark.parametrize(
    ("options", "gpus", "mesh"),
    [
        ({}, 4, Mesh(1, stages=4)),
        ({"pipeline_parallel_size": 2}, 4, Mesh(2, stages=2)),
        ({"pipeline_parallel_size": 2}, 1, Mesh(1)),
    ],
)
def test_how_workers_are_divided(options, gpus, mesh):
    assert Pipeline(Pipeline.Options(**options)).mesh(gpus) == mesh


def test_groups_that_do_not_come_out_even_are_refused():
    with pytest.raises(ValueError, match="pipeline_parallel_size = 2 does not divide"):
        Pipeline(Pipeline.Options(pipeline_parallel_size=2)).mesh(3)


@pytest.mark.parametrize(
    ("options", "gpus", "batch", "said"),
    [
        ({"microbatches": 2}, 4, 32, "microbatches = 2: is less than the 4 workers"),
        ({"microbatches": 6, "schedule": "interleaved"}, 4, 24, "set a multiple of 4"),
        ({"microbatches": 8}, 2, 12, "a replica's batch of 12 cannot be divided"),
    ],
)
def test_micro_batches_that_do_not_come_out_even_are_refused(options, gpus, batch, said):
    with pytest.raises(ValueError, match=said):
        Pipeline.check("pipeline", options, gpus, batch)


def refused(**values: Any) -> list[str]:
    block = {
        "models": ["gpt-compact"], "gpus": [1, 2, 4], "compile": False, "gradient_accumulation_steps": 1,
        "loss_chunks": 1,
        "global_batch": 32, "slowdown": None,
    }  # fmt: skip
    options = get_option_defaults("pipeline") | values.pop("options", {})
    block |= values
    block["networks"] = {name: name for name in block["models"]}
    return list(Pipeline.iter_refused_values(options, block))


def test_what_cannot_be_cut_is_refused_before_any_job():
    assert refused() == []
    assert refused(models=["vgg-compact", "vit-compact", "vgg16", "vit_b_16"]) == []
    (said,) = refused(models=["convnext-compact"])
    assert "does not state its forward as pieces" in said
    assert "gpt-compact" in said
    (said,) = refused(models=["resnet-compact"])
    assert "BatchNorm would normalise over micro-batches" in said
    (said,) = refused(gpus=[8])
    assert "gpt-compact: it can be cut into 6 stages, not into 8" in said
    (said,) = refused(options={"schedule": "interleaved"})
    assert "gpt-compact: it can be cut into 6 stages, not into 8" in said
    assert refused(options={"schedule": "interleaved", "pipeline_parallel_size": 2}) == []
    (said,) = refused(compile=True)
    assert ".compile" in said
    (said,) = refused(slowdown={"workers": [0], "factor": 2})
    assert ".slowdown" in said
    zero_bubble = OPTIONS["zero-bubble"]
    (said,) = refused(options=zero_bubble, gpus=[2], activation_checkpointing="selective")
    assert ".activation_checkpointing = 'selective': schedule: zero-bubble" in said
    assert refused(options=OPTIONS["1f1b"], activation_checkpointing="selective") == []
    assert "32 cannot be divided into 8 micro-batches" in refused(gradient_accumulation_steps=8)[0]


# --- cells ---------------------------------------------------------------------------------------


def prepared_text(folder: Path) -> None:
    spec = {"source": "markov-text", "train_samples": 64, "test_samples": 24, "vocabulary": 8,
            "sequence": 16}  # fmt: skip
    prepare_data_set("text", folder, spec=spec)


def cell_settings(text: Path, workers: int, **options: Any) -> Settings:
    """Of a cell with stages, which trains on `text`."""
    options = get_option_defaults("pipeline") | {"microbatches": 4} | options
    replicas = get_mesh("pipeline", options, workers).replicas
    return settings(
        "pipeline", options=options, model="gpt-compact", dataset="text", gpus=workers, epochs=1,
        global_batch=16, per_worker_batch=16 // replicas, lr=0.02,
        data_spec=prepared.read_unverified_metadata(text)["spec"],
    )  # fmt: skip


def test_cells_train_and_their_records_say_their_stages(
    start_cell: Callable[..., Any], warm, tmp_path
):
    """One pipeline and two; what they learn is what one process learns."""
    prepared_text(tmp_path / "text")

    def trained(s: Settings) -> dict[str, Any]:
        cell = start_cell(s, data_dir=tmp_path / "text", env=warm)
        code, output = cell.finish()
        assert code == 0, output
        made = record.read_record(cell.record)
        assert made["status"] == "ok"
        return made

    alone = replace(
        cell_settings(tmp_path / "text", 2), strategy="single", options={}, gpus=1, per_worker_batch=16
    )  # fmt: skip
    one = trained(alone)
    for workers, options in ((2, {"schedule": "gpipe"}), (4, {"pipeline_parallel_size": 2})):
        made = trained(cell_settings(tmp_path / "text", workers, **options))
        assert made["strategy"]["mesh"] == {"replicas": workers // 2, "tensor": 1, "stages": 2}
        assert made["batch"]["samples_seen"] == made["batch"]["samples_applied"] == 64
        assert sum(w["samples"] for w in made["workers"]) == 2 * 64
        assert made["communication"]["sent_bytes_per_step"] > 0
        details = made["strategy"]["details"]
        assert [len(s["pipeline_modules"]) for s in details["stages"]] == [3, 4]
        assert details["predicted_bubble_share"] == 1 / 5
        assert 0 < made["time"]["bubble_share"] < 1
        assert made["time"]["breakdown_ms"]["bubble"] > 0
        peaks = made["memory"]["stages"]
        assert len(peaks) == 2
        assert made["memory"]["peak_bytes"] == max(p["peak_bytes"] for p in peaks)
        for what in ("train_loss", "test_loss", "score"):
            (ours,), (its,) = ([e[what] for e in r["score"]["per_epoch"]] for r in (made, one))
            assert ours == pytest.approx(its, rel=1e-5), what
        assert made["model"] == one["model"]
