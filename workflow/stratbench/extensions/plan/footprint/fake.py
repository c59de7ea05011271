"""Runs one worker of a cell on fake tensors, without memory or device.

A fake process group of any size replaces the other workers. One process on a CPU thus shows what a rank of
a thousand GPUs would allocate and send.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import parallel

from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.plan.footprint.cuda_autocast import emulate_cuda_autocast
from stratbench.extensions.plan.footprint.equal_blocks import (
    Blocks,
    keep_first_blocks,
    register_block_hooks,
)
from stratbench.extensions.plan.footprint.replica import Replica
from stratbench.extensions.plan.footprint.request import MicrobatchCounts, Request
from stratbench.extensions.plan.footprint.torch_internals import (
    FakeTensors,
    open_fake_process_group,
    patch_torch_for_fake_tensors,
    shorten_schedule,
)
from stratbench.extensions.plan.footprint.trace import OperatorTrace
from stratbench.extensions.servers.ps.flat import FlatSpace
from stratbench.extensions.servers.strategy import ParameterServer
from stratbench.extensions.servers.wire.shm import DTYPES, FlatTensors, Layout
from stratbench.strategies import acceptance, base, get_mesh, get_strategy_class
from stratbench.strategies.compression import PowerSGD
from stratbench.strategies.mesh import MeshCoordinate
from stratbench.telemetry.memory import get_optimizer_state
from stratbench.workload.network import models
from stratbench.workload.network.trial import Trial
from stratbench.workload.torch_internals import replace_attribute, unset_fake_temporarily

#: The CUDA caching allocator rounds sizes up to multiples of this (c10/core/CachingDeviceAllocator.h).
CUDA_BLOCK_BYTES = 512
#: Purposes of memory that is on the host, with a strategy that offloads its states.
HOST_PARTS = ("parameters", "gradients", "optimizer")


def trace_training_steps(
    request: Request,
    batches: Iterable[int],
    num_earlier_steps: int = 0,
    stage: int = 0,
    trial: Trial | None = None,
    blocks: Blocks | None = None,
    microbatch_counts: MicrobatchCounts | None = None,
) -> tuple[OperatorTrace, base.Strategy]:
    """Trace training steps and an evaluation of one rank. Return the trace and the strategy.

    The rank is the first of a pipeline stage. The strategy is as it is after the steps.

    There is a training step for each of `batches`, then an evaluation. The trace's phases are `setup`, then
    `forward`, `backward` and `optimizer` of each step, and `evaluate`. Momentum and buckets exist from the
    start, so that the first step equals later ones; otherwise other steps precede it. Forward and backward
    alternate once per part of a batch.

    Args:
        request: The request.
        batches: Samples of each step.
        num_earlier_steps: Number of steps before each step, for kinds of steps that come late in a training
            (`Strategy.steps_that_change_the_work`).
        stage: Number of the stage.
        trial: Trial of the model, by which the strategy may reject it; None skips that.
        blocks: Equal blocks to keep in place of all, which are marked in the trace.
        microbatch_counts: Turns of few micro-batches that a stage takes in place of all.
    """
    with ExitStack() as stack:
        # This context comes first, since it imports modules, which must not create fake tensors.
        stack.enter_context(get_strategy_class(request.strategy).support_fake_tensors())
        stack.enter_context(open_fake_worker_environment(request, stage=stage))
        model, strategy, worker = build_model_strategy_and_worker(
            request, blocks=blocks, trial=trial
        )
        if microbatch_counts is not None:
            limit_traced_microbatches(strategy, microbatch_counts)
        trace = OperatorTrace(
            round_bytes=CUDA_BLOCK_BYTES if request.is_on_cuda else 1,
            on_cpu=not request.is_on_cuda,
            on_host=HOST_PARTS if request.is_on_cuda and request.traits.states_on_host else (),
        )
        set_up_strategy(strategy, model, worker)
        if strategy.warms_up:
            with emulate_cuda_autocast() if request.autocasts_like_cuda else nullcontext():
                for batch in batches:
                    strategy.step(*request.make_example_batch(batch))
                evaluate_on_fake_tensors(strategy, request)
        worker.mark_phase_end = _make_phase_marker(trace, model)
        if blocks is not None:
            register_block_hooks(model, blocks.path, trace.add_mark)
        _tag_model_states(trace, strategy, model)
        with trace:
            if request.autocasts_like_cuda:
                stack.enter_context(emulate_cuda_autocast())
            for batch in batches:
                _trace_training_step(trace, strategy, request, batch, num_earlier_steps)
            trace.begin_phase("evaluate")
            evaluate_on_fake_tensors(strategy, request)
        return trace, strategy


@contextmanager
def open_fake_worker_environment(
    request: Request, on_fake_tensors: bool = True, stage: int = 0
) -> Iterator[None]:
    """Set up the fake process group and the torch modes that a traced worker needs.

    Args:
        request: The request.
        on_fake_tensors: Whether tensors are fake.
        stage: Number of the stage.
    """
    mesh = get_mesh(request.strategy, dict(request.options), request.world_size)
    with ExitStack() as stack:
        stack.enter_context(
            open_fake_process_group(request.world_size, mesh.get_rank(MeshCoordinate(0, stage, 0)))
        )
        if on_fake_tensors:
            stack.enter_context(FakeTensors())
        # A fused optimizer needs no temporary tensors, as on CUDA. With fp16, any other optimizer would read
        # values of the loss scaler, which fake tensors lack.
        fused = request.is_on_cuda or request.settings.precision == "fp16"
        by_kernels = request.settings.optimizer_impl == "fused"
        stack.enter_context(
            patch_torch_for_fake_tensors(request.is_on_cuda, fused and by_kernels, not by_kernels)
        )
        for module in (parallel, parallel.distributed):
            stack.enter_context(replace_attribute(module, "DistributedDataParallel", Replica))
        yield


def build_model_strategy_and_worker(
    request: Request,
    on_fake_tensors: bool = True,
    blocks: Blocks | None = None,
    trial: Trial | None = None,
) -> tuple[nn.Module, base.Strategy, base.Worker]:
    """Return the model, the strategy and the worker of a request, before `setup`.

    Call it within `open_fake_worker_environment`.

    Args:
        request: The request.
        on_fake_tensors: Whether tensors are fake.
        blocks: Equal blocks to keep in place of all.
        trial: Trial of the model, by which the strategy may reject it; None skips that.
    """
    model = models.build_model_for_training(
        request.model_source,
        request.classes,
        request.input_shape,
        seed=0,
        device=torch.device("cpu"),
        dtype=request.dtype,
        build_function=partial(build_fake_model, blocks=blocks)
        if on_fake_tensors
        else models.build_model,
        checkpointing_mode=request.settings.activation_checkpointing,
    )
    strategy = make_strategy_for_fake_tensors(request)
    mesh = strategy.mesh(request.world_size)
    with unset_fake_temporarily():
        task, kind = request.make_task_and_loss_kind()
    worker = base.Worker(
        settings=request.settings,
        rank=dist.get_rank(),
        world_size=request.world_size,
        local_world_size=request.workers_per_node,
        device=torch.device("cpu"),
        folder=RunFolder(Path()),
        wrap_groups=models.list_shard_groups(request.model_source, model),
        task=task,
        has_weighted_loss=kind.weighs,
        mesh=mesh,
        input_shape=request.input_shape,
    )
    if mesh.stages > 1:
        cache_costs_of_pipeline_units(strategy)
    if trial is not None:
        worker.trial = trial
        acceptance.check_model(strategy, request.model_source, model, worker)
    return model, strategy, worker


#: Costs of the units of the model that was measured last, by settings and input. All its pipeline stages need
#: them.
_measured: dict[Any, Any] = {}


def cache_costs_of_pipeline_units(strategy: Any) -> None:
    """Make a pipeline measure the costs of a model's units once, for all stages."""
    measure = strategy.measure_unit_costs_on_fake_tensors

    def look_up_costs_of_pipeline_units(*args: Any) -> Any:
        key = strategy.worker.settings, strategy.worker.input_shape
        if key not in _measured:
            _measured.clear()
            _measured[key] = measure(*args)
        return _measured[key]

    strategy.measure_unit_costs_on_fake_tensors = look_up_costs_of_pipeline_units


def cut_model_into_stages(
    request: Request, trial: Trial | None = None
) -> tuple[Any, list[list[Any]]]:
    """Cut a model into pipeline stages. Return the strategy and each stage's unit costs.

    Args:
        request: Request of the pipeline.
        trial: Trial of the model, by which the strategy may reject it; None skips that.
    """
    with ExitStack() as stack:
        stack.enter_context(get_strategy_class(request.strategy).support_fake_tensors())
        stack.enter_context(open_fake_worker_environment(request))
        strategy: Any
        model, strategy, worker = build_model_strategy_and_worker(request, trial=trial)
        strategy.worker = worker
        return strategy, [units for _, units in strategy.cut_model_into_stages(model, worker)]


def limit_traced_microbatches(strategy: Any, microbatch_counts: MicrobatchCounts) -> None:
    """Make a pipeline stage compute few micro-batches instead of all of a step.

    Args:
        strategy: The pipeline.
        microbatch_counts: Turns of these micro-batches.
    """
    make_schedule = strategy.make_microbatch_schedule

    def make_schedule_of_few_microbatches(samples: int) -> Any:
        schedule = make_schedule(
            samples // microbatch_counts.microbatches * strategy.options.microbatches
        )
        shorten_schedule(schedule, *microbatch_counts)
        return schedule

    strategy.make_microbatch_schedule = make_schedule_of_few_microbatches


def set_up_strategy(strategy: base.Strategy, model: nn.Module, worker: base.Worker) -> None:
    """Call the strategy's `setup`, and create the tensors that first steps would create.

    Args:
        strategy: The strategy.
        model: The model.
        worker: The worker.
    """
    strategy.setup(model, worker)
    if isinstance(compressor := getattr(strategy, "compressor", None), PowerSGD):
        compressor.begin_compression()
        for replica in list_fake_ddp_modules(strategy):
            replica.reduce_all_buckets()


def _trace_training_step(
    trace: OperatorTrace,
    strategy: base.Strategy,
    request: Request,
    batch: int,
    num_earlier_steps: int,
) -> None:
    # Each step counts as the last of the training, so that it includes what only some steps do.
    strategy.steps, strategy.worker.total_steps = num_earlier_steps, num_earlier_steps + 1
    trace.begin_phase("forward")
    x, y = request.make_example_batch(batch)
    trace.set_purpose_of_storages("activations", (x, y))
    strategy.step(x, y)
    _tag_persistent_tensors(trace, strategy)
    strategy.free_batch_dependent_memory()


def evaluate_on_fake_tensors(strategy: base.Strategy, request: Request) -> None:
    """Run an evaluation as in a training: without autocast, and with logits in float64."""
    if not request.eval_batch:
        return
    with strategy.open_evaluation_model() as model, torch.no_grad():
        model(request.make_example_batch(request.eval_batch)[0]).double()


def _make_phase_marker(trace: OperatorTrace, model: nn.Module) -> Callable[[str], None]:
    """Return a function that marks the end of a step's phase in the trace.

    Strategies call the function with the phase's name.
    """

    def begin_next_phase(phase: str) -> None:
        if phase not in ("forward", "backward"):
            return
        trace.phases[-1].name = phase
        if phase == "backward":
            trace.set_purpose_of_storages("gradients", (p.grad for p in model.parameters()))
        trace.begin_phase("optimizer")

    return begin_next_phase


def _tag_model_states(trace: OperatorTrace, strategy: base.Strategy, model: nn.Module) -> None:
    trace.set_purpose_of_storages("parameters", model.parameters())
    trace.set_purpose_of_storages("buffers", model.buffers())
    if strategy.optimizer is not None:
        state = get_optimizer_state(strategy.optimizer).values()
        trace.set_purpose_of_storages("optimizer", (t for entry in state for t in entry.values()))
    trace.set_purpose_of_storages("optimizer", filter(torch.is_tensor, strategy.extra_state()))
    _tag_persistent_tensors(trace, strategy)


def _tag_persistent_tensors(trace: OperatorTrace, strategy: base.Strategy) -> None:
    for part, tensors in strategy.list_persistent_tensors().items():
        trace.set_purpose_of_storages(part, tensors)
    for replica in list_fake_ddp_modules(strategy):
        trace.set_purpose_of_storages(
            "gradients" if replica.as_view else "buckets", replica.buckets
        )


# --- models of fake tensors --------------------------------------------------------------------------


def build_fake_model(
    model: str | models.Model,
    classes: int,
    shape: tuple[int, ...],
    blocks: Blocks | None = None,
) -> nn.Module:
    """Return a model of fake tensors, built without drawing initial weights.

    Args:
        model: The model.
        classes: Number of classes or tokens.
        shape: Shape of the input.
        blocks: Equal blocks to keep in place of all.
    """
    # PyTorch warns that weights without memory are not initialised.
    with warnings.catch_warnings(action="ignore"):
        made = models.build_fake_model(model, classes, shape)
    if blocks is not None:
        keep_first_blocks(made, *blocks)
    return made


# --- strategies on fake tensors ---------------------------------------------------------------------


def make_strategy_for_fake_tensors(request: Request) -> base.Strategy:
    """Return the request's strategy, with substitutes for what other processes provide.

    A substitute overrides only what leaves the process, so that the plan does everything else that a
    strategy does.
    """
    cls = get_strategy_class(request.strategy)
    if issubclass(cls, ParameterServer):
        cls = type(cls.__name__, (FakeParameterServer, cls), {})
    return cls(cls.Options(**dict(request.options)))


class FakeParameterServer(ParameterServer):
    """Substitute for a worker of parameter servers, without servers and shared memory."""

    def flatten_model(self) -> FlatSpace:
        return FlatSpace(self.model, allocate=_allocate_unshared_tensors)

    def connect_to_servers(self) -> NoChannel:
        return NoChannel()


class NoChannel:
    """Substitute for a channel to parameter servers, which neither sends nor receives."""

    def send_gradients_during_backward(self) -> None: ...

    def set_push_weight(self, weight: Tensor) -> None: ...

    def rehearse_exchange(self) -> None: ...


def _allocate_unshared_tensors(layout: Layout, shared: bool) -> FlatTensors:
    weights = torch.zeros(layout.numel, dtype=DTYPES[layout.dtype])
    buffers = torch.zeros(layout.buffer_numel, dtype=DTYPES[layout.buffer_dtype])
    return FlatTensors(weights, torch.zeros_like(weights), buffers)


def list_fake_ddp_modules(strategy: base.Strategy) -> list[Replica]:
    """Return the substitutes for DistributedDataParallel in the strategy's wrapped model."""
    module = getattr(strategy, "module", None)
    return [] if module is None else [m for m in module.modules() if isinstance(m, Replica)]
