"""Runs one worker of a cell on fake tensors: real model and strategy, but no memory and no device.

A fake process group of any size takes the place of the other workers, so that one process on a CPU
sees what rank 0 of a thousand GPUs would allocate and send.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.plan.footprint.request import Request
from stratbench.plan.footprint.trace import OperatorTrace
from stratbench.ps.flat import FlatSpace
from stratbench.ps.wire.shm import DTYPES, FlatTensors, Layout
from stratbench.strategies import acceptance, base, strategy_class
from stratbench.strategies.compression import PowerSGD, SixteenBits
from stratbench.strategies.ddp import DDP, SAMPLE_EVERY
from stratbench.strategies.ps import ParameterServer
from stratbench.telemetry.memory import optimizer_state
from stratbench.workload.data.device_data import example_batch
from stratbench.workload.network import models
from stratbench.workload.network.trial import Trial
from stratbench.workload.tasks import task_of

#: The CUDA caching allocator hands out multiples of this (c10/core/CachingDeviceAllocator.h).
CUDA_BLOCK_BYTES = 512
#: A reduce-scatter's names, from PyTorch 2.13 on and before.
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")
#: What a strategy that keeps its states on the host holds there beside a GPU.
HOST_PARTS = ("parameters", "gradients", "optimizer")


def traced_steps(
    request: Request, batches: Iterable[int], number: int = 0, trial: Trial | None = None
) -> tuple[OperatorTrace, base.Strategy]:
    """The trace of rank 0, and its strategy after the steps.

    A training step for each of `batches` (samples), then an evaluation. The trace's phases are
    `setup`, then `forward`, `backward` and `optimizer` of each step, and `evaluate`. No step warms up:
    the first is like any later one, since momentum and buckets exist from the start. `number`: of the
    steps before each, for one of a kind that comes late in a training (`Strategy.first_steps`). `trial`: of
    the network, by which the strategy may refuse it; None: it is not asked.
    """
    with ExitStack() as stack:
        stack.enter_context(surroundings(request))
        model, strategy, worker = built(request)
        if trial is not None:
            worker.trial = trial
            acceptance.check_model(strategy, request.network, model, worker)
        trace = OperatorTrace(
            round_bytes=CUDA_BLOCK_BYTES if request.on_cuda else 1,
            on_cpu=not request.on_cuda,
            on_host=HOST_PARTS if request.on_cuda and request.traits.states_on_host else (),
        )
        strategy.setup(model, worker)
        if worker.mesh.tensor > 1:
            # What DTensor asks of its rules it asks once for each shape, of tensors that nobody keeps.
            with CudaAutocast() if request.autocasts_like_cuda else nullcontext():
                for batch in batches:
                    strategy.step(*batch_of(request, batch))
                evaluate(strategy, request)
        worker.mark = _marking(trace, model, request.accumulate)
        _tag_states(trace, strategy, model)
        with trace:
            if request.autocasts_like_cuda:
                stack.enter_context(CudaAutocast())
            for batch in batches:
                _step(trace, strategy, request, batch, number)
            trace.begin("evaluate")
            evaluate(strategy, request)
        return trace, strategy


@contextmanager
def surroundings(request: Request, on_fakes: bool = True) -> Iterator[None]:
    """The process group and torch's ways of which a worker of the request is made, until the block ends."""
    with ExitStack() as stack:
        stack.enter_context(fake_group(request.world_size))
        if on_fakes:
            stack.enter_context(FakeTensorMode())
        stack.enter_context(torch_on_fakes(request))
        yield


def built(request: Request, on_fakes: bool = True) -> tuple[nn.Module, base.Strategy, base.Worker]:
    """The network, the strategy and its worker, before `setup`; all within `surroundings`."""
    model = models.for_training(
        request.network,
        request.classes,
        request.input_shape,
        seed=0,
        device=torch.device("cpu"),
        dtype=request.dtype,
        build=blank if on_fakes else models.build,
        checkpointing=request.checkpointing,
    )
    strategy = strategy_on_fakes(request)
    worker = base.Worker(
        settings=settings_of(request),
        rank=0,
        world_size=request.world_size,
        local_world=request.local_world,
        device=torch.device("cpu"),
        folder=RunFolder(Path()),
        wrap_groups=models.wrap_groups(request.network, model),
        task=task_of(settings_of(request), request.input_shape, request.values),
        mesh=strategy.mesh(request.world_size),
    )
    return model, strategy, worker


def _step(
    trace: OperatorTrace, strategy: base.Strategy, request: Request, batch: int, number: int
) -> None:
    # Each is a training's last step: all that may be due, is.
    strategy.steps, strategy.worker.total_steps = number, number + 1
    trace.begin("forward")
    x, y = batch_of(request, batch)
    trace.tag("activations", (x, y))
    strategy.step(x, y)
    _tag_kept(trace, strategy)


def evaluate(strategy: base.Strategy, request: Request) -> None:
    """As the training loop does: without autocast, the logits in float64."""
    with strategy.evaluating() as model, torch.no_grad():
        model(batch_of(request, request.eval_batch)[0]).double()


def batch_of(request: Request, samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of so many samples, as the request's model takes them."""
    return example_batch(
        samples,
        request.input_shape,
        request.classes,
        torch.device("cpu"),
        request.dtype,
        request.batch_format,
        request.values,
    )


def _marking(trace: OperatorTrace, model: nn.Module, parts: int) -> Callable[[str], None]:
    """What a strategy calls at the end of a phase; a step has a forward and a backward for each part."""
    backwards = 0

    def mark(ended: str) -> None:
        nonlocal backwards
        if ended == "forward":
            trace.begin("backward")
        elif ended == "backward":
            trace.tag("gradients", (p.grad for p in model.parameters()))
            backwards += 1
            trace.begin("forward" if backwards % parts else "optimizer")

    return mark


def _tag_states(trace: OperatorTrace, strategy: base.Strategy, model: nn.Module) -> None:
    trace.tag("parameters", model.parameters())
    trace.tag("buffers", model.buffers())
    if strategy.optimizer is not None:
        state = optimizer_state(strategy.optimizer).values()
        trace.tag("optimizer", (t for entry in state for t in entry.values()))
    trace.tag("optimizer", filter(torch.is_tensor, strategy.extra_state()))
    _tag_kept(trace, strategy)


def _tag_kept(trace: OperatorTrace, strategy: base.Strategy) -> None:
    for part, tensors in strategy.kept().items():
        trace.tag(part, tensors)


# --- the surroundings ----------------------------------------------------------------------------


@contextmanager
def fake_group(world_size: int) -> Iterator[None]:
    if dist.is_initialized():
        raise RuntimeError("a footprint cannot be made inside a process group")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def torch_on_fakes(request: Request) -> Iterator[None]:
    """Until the block ends, torch does what it refuses on fake tensors or without the device."""
    from torch.distributed import device_mesh
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    make_mesh, sgd = device_mesh.init_device_mesh, torch.optim.SGD

    def real_mesh(*args: Any, **kwargs: Any) -> device_mesh.DeviceMesh:
        with unset_fake_temporarily():  # the mesh reads the ranks out of a tensor
            return make_mesh(*args, **kwargs)

    def fused_sgd(*args: Any, **kwargs: Any) -> torch.optim.SGD:
        return sgd(*args, **(kwargs | {"fused": True}))

    joined = device_mesh.DeviceMesh._concatenate

    def real_joined(*args: Any) -> device_mesh.DeviceMesh:
        with unset_fake_temporarily():
            return joined(*args)

    with ExitStack() as stack:
        stack.enter_context(replaced(device_mesh, "init_device_mesh", real_mesh))
        of_meshes = staticmethod(real_joined)
        stack.enter_context(replaced(device_mesh.DeviceMesh, "_concatenate", of_meshes))
        # Every rank's share of every parameter would be cut, which takes minutes for a thousand.
        stack.enter_context(replaced(_fsdp_param, "_chunk_with_empty", _first_chunk))
        if not request.on_cuda:
            for name in SCATTERS:
                if (scatter := getattr(dist, name, None)) is not None:
                    stack.enter_context(replaced(dist, name, partial(_scattered_by_gloo, scatter)))
        if request.on_cuda or request.precision == "fp16":
            # On CUDA the optimizer is fused and needs no temporary tensors; elsewhere an optimizer
            # that is not fused would look at what the loss scaler found, which a fake tensor does not
            # have.
            stack.enter_context(replaced(torch.optim, "SGD", fused_sgd))
        yield


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """`module.name` is `value` until the block ends: for torch's own, which cannot be told otherwise."""
    kept = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, kept)


def _first_chunk(t: Tensor, chunks: int, dim: int) -> list[Tensor]:
    """Rank 0's share, which is the largest; no other is looked at."""
    return [t.narrow(dim, 0, -(-t.size(dim) // chunks))]


def _scattered_by_gloo(
    scatter: Callable[..., Any], output: Tensor, input: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """What a reduce-scatter beside computation returns: with it lives the copy that gloo reduces."""
    work = scatter(output, input, *args, **kwargs)
    return Reduction(work, input.clone()) if kwargs.get("async_op") else work


class Reduction(NamedTuple):
    """A collective under way, and what it works on until nobody asks for it any longer."""

    work: dist.Work
    copy: Tensor

    def wait(self) -> None:
        self.work.wait()


def settings_of(request: Request) -> Settings:
    """Settings of a cell that makes the request, as far as it says them."""
    return Settings(
        strategy=request.strategy,
        options=dict(request.options),
        model=request.model,
        dataset="",
        gpus=request.world_size,
        seed=0,
        epochs=1,
        global_batch=request.world_size,
        per_worker_batch=1,
        lr=0.1,
        momentum=0.9 if request.momentum else 0.0,
        weight_decay=1e-4 if request.weight_decay else 0.0,
        nesterov=request.nesterov,
        precision=request.precision,
        augment=False,
        warmup_steps=1,
        device="cuda" if request.on_cuda else "cpu",
        threads=1,
        slowdown=None,
        optimizer=request.optimizer,
        betas=[0.9, 0.999] if request.optimizer == "adamw" else None,
        eps=1e-8 if request.optimizer == "adamw" else None,
        clip_norm=1.0 if request.clips else None,
        accumulate=request.accumulate,
        own_task=request.own_task and json.loads(request.own_task),
    )


# --- the model -----------------------------------------------------------------------------------


def blank(model: str | models.Model, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """What `models.build` makes, of fake tensors and without the time that initial weights take."""
    with unset_fake_temporarily(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that weights without memory are not initialised
        made = models.build_without_memory(model, classes, shape)
    models.replace_tensors(made, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype))
    return made


@register_op_impl(torch.ops.aten._fused_sgd_.default)
def _fused_sgd(
    _mode: FakeTensorMode, _op: Any, params: Any, grads: Any, momenta: Any, **options: Any
) -> None:
    """What torch lacks: SGD's fused kernel on fake tensors."""
    _fused(options, params, grads, momenta)


@register_op_impl(torch.ops.aten._fused_adamw_.default)
def _fused_adamw(
    _mode: FakeTensorMode,
    _op: Any,
    params: Any,
    grads: Any,
    means: Any,
    squares: Any,
    _largest: Any,
    _steps: Any,
    **options: Any,
) -> None:
    """The same for AdamW's, without `amsgrad`."""
    _fused(options, params, grads, means, squares)


def _fused(options: dict[str, Any], params: Any, grads: Any, *kept: Any) -> None:
    """A fused kernel on fake tensors, which refuses what the one on CUDA does; `kept`: the moments.

    It works in place and allocates nothing. The conditions: check_fast_path_restrictions in
    aten/src/ATen/native/ForeachUtils.h; RuntimeError where they do not hold.
    """
    for lists in zip(params, grads, *filter(None, kept), strict=True):
        described = [
            (t.device, t.dtype, [(n, k) for n, k in zip(t.shape, t.stride(), strict=True) if n > 1])
            for t in lists
        ]
        if any(d != described[0] for d in described[1:]):
            raise RuntimeError(
                "the fused kernel takes parameters, gradients and moments of one device, dtype, "
                f"shape and stride, not {described}"
            )
    for flag in (options.get("grad_scale"), options.get("found_inf")):
        if flag is not None and flag.device != params[0].device:
            raise RuntimeError(f"the loss scaler's tensors are on {flag.device}")


class CudaAutocast(TorchFunctionMode):
    """Makes autocast on a CPU choose the number formats that it chooses on CUDA.

    The lists differ in two operations of our models: CUDA normalises layers in float32, and of
    cross-entropy it makes the logarithms in the scores' own format and only the rest in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.layer_norm and torch.is_autocast_enabled("cpu"):
            args = tuple(a.float() if isinstance(a, Tensor) else a for a in args)
        if func is F.cross_entropy and torch.is_autocast_enabled("cpu") and not args[2:]:
            return _cross_entropy(*args, **kwargs)
        return func(*args, **kwargs)


def _cross_entropy(
    scores: Tensor, targets: Tensor, label_smoothing: float = 0.0, **kwargs: Any
) -> Tensor:
    if label_smoothing or targets.is_floating_point():
        return F.cross_entropy(scores, targets, label_smoothing=label_smoothing, **kwargs)
    with torch.autocast("cpu", enabled=False):
        return F.nll_loss(F.log_softmax(scores, dim=1).float(), targets, **kwargs)


# --- the strategies ------------------------------------------------------------------------------


def strategy_on_fakes(request: Request) -> base.Strategy:
    """The request's strategy, but for what fake tensors cannot do or no other process is there for."""
    cls = strategy_class(request.strategy)
    for real, fake in ((DDP, FakeDDP), (ParameterServer, FakeParameterServer)):
        if issubclass(cls, real):
            cls = type(cls.__name__, (fake, cls), {})
    return cls(cls.Options(**dict(request.options)))


class FakeParameterServer(ParameterServer):
    """A worker of parameter servers that are not there: its tensors are not mapped."""

    def flatten(self) -> FlatSpace:
        return FlatSpace(self.model, allocate=_unmapped)

    def connect(self) -> NoChannel:
        return NoChannel()


class NoChannel:
    """Of the channel to the servers, what a step calls before the first ticket; it moves nothing."""

    def arm(self) -> None: ...

    def rehearse(self) -> None: ...


def _unmapped(layout: Layout, shared: bool) -> FlatTensors:
    weights = torch.zeros(layout.numel, dtype=DTYPES[layout.dtype])
    buffers = torch.zeros(layout.buffer_numel, dtype=DTYPES[layout.buffer_dtype])
    return FlatTensors(weights, torch.zeros_like(weights), buffers)


class FakeDDP(DDP):
    """The ddp strategy with an emulation of DistributedDataParallel, whose C++ part refuses fakes."""

    _sample_every = SAMPLE_EVERY

    def kept(self) -> dict[str, list[Tensor]]:
        in_place = self.options.gradient_as_bucket_view
        found = {"gradients" if in_place else "buckets": self.module.buckets}
        return found | {"communication": self.grown()}

    def wrap(self, model: nn.Module, worker: base.Worker) -> nn.Module:
        self.compressor = self.make_compressor(worker)
        return Replica(
            model,
            self.options.bucket_cap_mb << 20,
            self.options.gradient_as_bucket_view,
            self.compressor,
        )

    def reset(self) -> None:
        super().reset()
        if isinstance(self.compressor, PowerSGD):  # what it keeps comes with its first steps
            self.compressor.skip_start()
            self.module.compress_all()


class Replica(nn.Module):
    """What DistributedDataParallel allocates and sends, in its steady state.

    Gradients are copied into flat buckets in the order in which backward makes them final, and a full
    bucket is all-reduced. With `as_view` they then live there; else both exist. Buffers are
    broadcast before each forward, coalesced, but for one after a backward in `no_sync`.
    """

    def __init__(
        self,
        module: nn.Module,
        cap_bytes: int,
        as_view: bool,
        compressor: SixteenBits | PowerSGD | None = None,
    ) -> None:
        super().__init__()
        self.module, self._compressor = module, compressor
        self._under_way: list[tuple[torch.futures.Future, Tensor]] = []
        self.synchronises, self._sends_buffers = True, True
        # Backward makes gradients final in about the reverse order of the forward.
        parameters = [p for p in module.parameters() if p.requires_grad][::-1]
        self._hooked: list[GradBucket] = []
        groups, _ = dist._compute_bucket_assignment_by_size(parameters, [cap_bytes])
        self.buckets = [
            parameters[group[0]].new_empty(sum(parameters[i].numel() for i in group))
            for group in groups
        ]
        for bucket, group in zip(self.buckets, groups, strict=True):
            waiting = [len(group), len(group)]
            sizes = [parameters[i].numel() for i in group]
            views = [
                v.view(parameters[i].shape) for i, v in zip(group, bucket.split(sizes), strict=True)
            ]
            index = len(self._hooked)
            self._hooked.append(GradBucket(index, bucket, views, index == len(groups) - 1))
            for i, view in zip(group, views, strict=True):
                taken = partial(self._into_bucket, index, view, waiting, as_view)
                parameters[i].register_post_accumulate_grad_hook(taken)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What DDP has timed: nothing."""
        return {}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients stay in this replica until the block ends."""
        self.synchronises = False
        try:
            yield
        finally:
            self.synchronises = True

    def forward(self, x: Tensor) -> Tensor:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.module.buffers() if self._sends_buffers else ():
            by_dtype.setdefault(buffer.dtype, []).append(buffer.flatten())
        for buffers in by_dtype.values():
            dist.broadcast(torch.cat(buffers), src=0)
        self._sends_buffers = self.synchronises
        return self.module(x)

    def _into_bucket(
        self, index: int, view: Tensor, waiting: list[int], as_view: bool, parameter: Tensor
    ) -> None:
        if not self.synchronises:
            return
        fresh = parameter.grad  # backward holds it until this hook, and what it begins, returns
        view.copy_(fresh)
        if as_view:
            parameter.grad = view
        waiting[0] -= 1
        if waiting[0] == 0:
            waiting[0] = waiting[1]
            self._reduce(index)

    def _reduce(self, index: int) -> None:
        if self._compressor is None:
            dist.all_reduce(self.buckets[index])
            return
        self._arrive()
        under_way = None if self._compressor.holds_backward else self._under_way
        with replaced(dist, "all_reduce", partial(_reduced_by_hook, under_way)):
            self._compressor.hook(None, self._hooked[index])
        if self._hooked[index].comes_last:
            self._arrive()

    def _arrive(self) -> None:
        """End what is under way: one bucket at a time is, while backward fills the next."""
        for future, tensor in self._under_way:
            future.set_result([tensor])
        self._under_way.clear()

    def compress_all(self) -> None:
        """Call the hook for every bucket, as a step does."""
        for index in range(len(self.buckets)):
            self._reduce(index)


all_reduce = dist.all_reduce


class _Reduced:
    """What an all-reduce of a real group returns; a fake one's future has no value."""

    def __init__(self, future: torch.futures.Future) -> None:
        self._future = future

    def get_future(self) -> torch.futures.Future:
        return self._future


def _reduced_by_hook(
    under_way: list[tuple[torch.futures.Future, Tensor]] | None,
    tensor: Tensor,
    *args: Any,
    **kwargs: Any,
) -> _Reduced:
    """An all-reduce that is done at once, or goes to those under way."""
    all_reduce(tensor, group=kwargs.get("group"))
    future = torch.futures.Future()
    if under_way is None:
        future.set_result([tensor])
    else:
        under_way.append((future, tensor))
    return _Reduced(future)


class GradBucket(NamedTuple):
    """What a hook asks of DistributedDataParallel's own bucket."""

    number: int
    flat: Tensor
    views: list[Tensor]
    comes_last: bool

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return self.views

    def is_last(self) -> bool:
        return self.comes_last
