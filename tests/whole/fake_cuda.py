"""A CUDA device that computes nothing, for PyTorch built for CPUs: fake tensors on `cuda:0`.

Runs the functions that a worker trains with: the model, the data, the strategy, warm-up, timed steps,
evaluation. The process must have loaded what cuda_guard.cpp makes before it imports PyTorch, which
asks at once whether there is an accelerator. Streams and events are stand-ins that take only what
the real ones take.
"""

from __future__ import annotations

import inspect
import json
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from launching import settings
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.plan.footprint import fake
from stratbench.extensions.servers.ps import client, device, flat
from stratbench.extensions.servers.ps.tickets import Ticket
from stratbench.extensions.servers.strategy import ParameterServer
from stratbench.strategies import ddp, get_option_defaults, slowdown
from stratbench.strategies.base import Worker
from stratbench.telemetry.clock import StepClock
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train import loop
from stratbench.workload.data.device_data import DeviceData, Images, Texts
from stratbench.workload.network import models
from stratbench.workload.network.precision import get_batch_memory_format, get_weights_dtype

warnings.simplefilter("ignore")  # of what a CPU build says of CUDA

DEVICE = torch.device("cuda", 0)
CLASSES, SIDE, LENGTH, SAMPLES, BATCH, WORKERS = 10, 32, 16, 8, 4, 2


def stand_in(real: type, **answers: Any) -> type:
    """A class that takes the calls that `real` takes, with no others, and does nothing.

    `answers`: what its methods return, None unless given.
    """

    def answering(function: Callable[..., Any], answer: Any) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            signature.bind(*args, **kwargs)
            return answer

        return call

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        inspect.signature(real.__new__).bind(cls, *args, **kwargs)
        return object.__new__(cls)

    methods = {
        name: answering(function, answers.get(name))
        for name, function in vars(real).items()
        if inspect.isfunction(function) and not name.startswith("_")
    }
    return type(real.__name__, (), methods | {"__new__": new, "device": DEVICE})


Event = stand_in(torch.cuda.Event, query=True, elapsed_time=1.0)
Stream = stand_in(torch.cuda.Stream, query=True)


def patches() -> Iterator[Any]:
    """What a machine without the device cannot answer; each function keeps its signature."""

    def answers(module: Any, name: str, answer: Any) -> Any:
        return mock.patch.object(
            module, name, mock.create_autospec(getattr(module, name), return_value=answer)
        )

    yield mock.patch.object(torch.cuda, "Event", Event)
    yield mock.patch.object(torch.cuda, "Stream", Stream)
    for module in (torch.cuda, torch.accelerator):
        yield answers(module, "current_stream", Stream())
    yield answers(torch.cuda, "stream", nullcontext())
    yield answers(torch.cuda, "set_device", None)
    yield answers(torch.cuda, "synchronize", None)
    yield answers(torch.cuda, "current_device", 0)
    yield answers(torch.cuda, "device_count", 1)
    yield answers(torch.cuda, "is_initialized", True)
    yield answers(torch.cuda, "is_bf16_supported", True)
    yield answers(torch.cuda, "get_rng_state", None)
    yield answers(torch.cuda, "set_rng_state", None)
    yield answers(torch.cuda, "_lazy_init", None)
    hopper = SimpleNamespace(name="none", major=9, minor=0, total_memory=1 << 30)
    yield answers(torch.cuda, "get_device_properties", hopper)
    yield answers(torch.cuda, "get_device_capability", (9, 0))
    yield answers(torch.cuda.amp.common, "amp_definitely_not_available", False)
    yield answers(flat, "_pin_memory", None)
    fake_scalar = mock.create_autospec(
        device.make_host_scalar, side_effect=lambda *_: torch.empty(1)
    )
    yield mock.patch.object(device, "make_host_scalar", fake_scalar)
    yield answers(device.Staging, "_report_overflow", None)  # it looks at what the device found
    # Of a module that is not DistributedDataParallel's.
    yield answers(ddp, "read_sampled_step_times", ddp.SampledTimes(0, 0.0, 0.0))


def layouts_of(model: nn.Module, seen: dict[str, str]) -> None:
    """Note in `seen` how each convolution and normalisation lays its output out."""

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            last = out.is_contiguous(memory_format=torch.channels_last)
            plain = out.is_contiguous()
            seen[name] = (
                "either" if last and plain else "last" if last else "plain" if plain else "no"
            )

        return hook

    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)):
            module.register_forward_hook(note(name))


def channel_to_nobody(strategy: ParameterServer) -> Any:
    """A channel whose pushes go through a CUDA worker's staging and end there; it has one ticket."""
    space, shards = strategy.flat, flat.cut_into_shards(strategy.flat.layout.numel, 1 << 14)
    left: list[Any] = []
    staging = device.Staging(
        space,
        shards,
        push_buffers=lambda: left.append("buffers"),
        push_shards=lambda first, stop: left.extend(range(first, stop)),
        end_push=lambda overflowed: None,
        scale=strategy.scale,
    )

    def push() -> None:
        assert staging.armed
        assert not staging._waiting, "not all was on its way when the backward ended"
        space.check_gradient_views()
        staging.finish_push()
        assert left[0] == "buffers"
        assert sorted(left[1:]) == list(range(len(shards)))
        left.clear()
        for start, stop in shards:
            staging.copy_weights_to_device(start, stop)
        staging.make_stream_wait_for_weights()

    channel = mock.create_autospec(client.Channel, instance=True)
    channel.wait_s, channel.sent_and_received_bytes_by_server = 0.0, [0, 0]
    channel.send_gradients_during_backward.side_effect = staging.copy_buckets_during_backward
    channel.rehearse_exchange.side_effect = channel.push_pull.side_effect = push
    channel.wait_for_first_ticket.return_value = Ticket(0, 0, 0, 0)
    return channel


def data_on_device(shape: tuple[int, ...], precision: str) -> DeviceData:
    meta = {
        "name": "fake", "shape": list(shape), "classes": CLASSES, "crop_padding": 2, "flip": True,
        "mean": [0.5] * shape[0], "std": [0.25] * shape[0],
    }  # fmt: skip
    is_text = len(shape) == 1
    arrays = {
        f"{part}_{what}": torch.zeros(size, dtype=dtype, device=DEVICE)
        for part in ("train", "test")
        for what, size, dtype in (
            ("inputs", (SAMPLES, *shape), torch.uint8),
            ("targets", (SAMPLES, *shape * is_text), torch.uint8 if is_text else torch.int64),
        )
    }
    if is_text:
        return Texts(meta, arrays)
    return Images(
        meta,
        arrays,
        shape,
        get_weights_dtype(precision),
        get_batch_memory_format(precision, DEVICE.type),
    )


def run(strategy: str, options: dict[str, Any], model: str, precision: str) -> dict[str, str]:
    """Set up, warm up, train an epoch, evaluate and restore; the layouts of the layers' outputs."""
    workers = 1 if strategy == "single" else WORKERS
    s = settings(
        strategy, options=get_option_defaults(strategy) | options, model=model, gpus=workers,
        global_batch=BATCH * workers, per_worker_batch=BATCH, precision=precision, augment=True,
        weight_decay=1e-4, warmup_steps=1, device="cuda",
    )  # fmt: skip
    shape = (
        (LENGTH,)
        if models.MODELS[model].reads_text
        else models.compute_input_shape(model, (3, SIDE, SIDE))
    )
    request = fake.Request(s, shape, CLASSES, workers_per_node=workers, eval_batch=SAMPLES)
    with ExitStack() as stack:
        for patch in patches():
            stack.enter_context(patch)
        stack.enter_context(fake.open_fake_worker_environment(request))
        dtype = get_weights_dtype(precision)
        data = data_on_device(shape, precision)
        net = models.build_model_for_training(
            model, CLASSES, shape, s.seed, DEVICE, dtype, build_function=fake.build_fake_model
        )
        groups = models.list_shard_groups(model, net)
        made = fake.make_strategy_for_fake_tensors(request)
        if request.is_worker_of_server:
            made.connect_to_servers = partial(channel_to_nobody, made)
        worker = Worker(s, 0, workers, workers, DEVICE, RunFolder(Path()), groups)
        seen: dict[str, str] = {}
        layouts_of(net, seen)
        if strategy == "single":  # what a factor refers to: of every strategy the bare model's
            slowdown.measure_forward_backward_s(s, net, shape, CLASSES, DEVICE)
        measured = dict(seen)
        fake.set_up_strategy(made, net, worker)
        loop.warm_up(made, data, worker)
        clock = StepClock(DEVICE)
        worker.mark_phase_end = clock.mark_phase_end
        if made.kind == "collective":
            losses = loop.train_epoch(made, data, worker, clock, mock.create_autospec(PhaseLog), 0)
        else:
            order, augmentation = data.draw_order_and_augmentation(s.seed, 0, s.augment).to_device(
                DEVICE
            )
            losses = [
                made.step(*data.make_training_batch(order[which], augmentation))
                for _, which in made.iter_tickets()
            ]
        assert {(x.device, x.dtype) for x in losses} == {(DEVICE, dtype)}, losses
        assert all(p.is_contiguous() and p.device == DEVICE for p in net.parameters())
        assert strategy != "single" or measured == seen
        made.compute_model_state_bytes()
        return seen


def main(cases: str) -> None:
    """Print what each of `cases` (JSON: arguments of `run`) came to, a JSON line each."""
    torch.set_num_threads(1)
    for case in json.loads(cases):
        try:
            answer = {"layouts": run(*case), "error": None}
        except Exception:
            answer = {"layouts": None, "error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
