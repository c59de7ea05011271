"""Estimates memory and speed of a PyTorch module on GPUs: `stratbench.estimate`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stratbench.cell.coordinates import Cell
from stratbench.cell.settings import Settings, build_experiment_schema
from stratbench.cell.text.words import format_bytes
from stratbench.extensions.plan.check import (
    BY_COMMAND,
    PathAndCount,
    find_equal_blocks,
    make_footprint_or_error,
)
from stratbench.extensions.plan.device_rates import find_gpu_datasheet, make_gpu_device
from stratbench.extensions.plan.footprint import fake
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.plan.footprint.torch_internals import replace_attribute
from stratbench.extensions.plan.needs import CellToPlan
from stratbench.extensions.plan.one_model.model_answer import NODE_GPUS, predict_strategy_answer
from stratbench.strategies import (
    REGISTRY,
    get_mesh,
    get_option_defaults,
    get_strategy_class,
    resolve_options,
)
from stratbench.study.config.messages import suggest_closest_name
from stratbench.study.config.schema import check_config_block
from stratbench.workload.data.dataset import Dataset
from stratbench.workload.network.models import Model
from stratbench.workload.network.own import OwnModel
from stratbench.workload.tasks import LossKind, Task

#: Default options of `estimate` by strategy, where they differ from those in config.yaml.
USUAL_OPTIONS: dict[str, dict[str, Any]] = {"fsdp": {"mixed_precision": "policy"}}
#: Number of steps of the assumed training. It is large, since the first steps must count little.
MANY_STEPS = 1000
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Estimate:
    """Memory per GPU and duration of a training step.

    Attributes:
        strategy: Name of the strategy.
        gpus: Number of GPUs.
        gpu: Name of the GPU.
        batch: Samples of the example batch, which a GPU computes at once.
        verdict: fits, tight or does not fit, for that batch.
        allocated_bytes: Value that torch.cuda.max_memory_allocated will show.
        reserved_bytes: Memory that PyTorch's allocator will reserve, in expandable segments.
        shown_bytes: Value that nvidia-smi will show, with the CUDA context and NCCL's buffers.
        parts_bytes: Allocated bytes by purpose, such as parameters or activations.
        phase: Part of a step with the peak.
        largest_batch: Maximum samples that fit on a GPU at once; 0 if none do.
        step_s: Seconds per step, as a single time to compare by; None if the GPU's rate is unknown.
        step_range_s: Seconds per step at best and at worst; None like `step_s`.
        time_source: Public runs behind the range; empty if it follows from the datasheet.
    """

    strategy: str
    gpus: int
    gpu: str
    batch: int
    verdict: str
    allocated_bytes: int
    reserved_bytes: int
    shown_bytes: int
    parts_bytes: dict[str, int]
    phase: str
    largest_batch: int
    step_s: float | None
    step_range_s: tuple[float, float] | None
    time_source: str

    def __str__(self) -> str:
        memory = (self.allocated_bytes, self.reserved_bytes, self.shown_bytes)
        allocated, reserved, shown = map(format_bytes, memory)
        return (
            f"{self.strategy} on {self.gpus} x {self.gpu}, {self.batch} samples on each at once: "
            f"{self.verdict}; {allocated} allocated, {reserved} reserved, {shown} shown by nvidia-smi; "
            f"largest batch {self.largest_batch}"
        )


def estimate(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    gpus: int = 1,
    gpu: str = "H100 80GB",
    strategy: str | None = None,
    options: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    optimizer: str = "adamw",
    precision: str = "bf16",
    activation_checkpointing: bool = False,
    gpus_per_node: int = NODE_GPUS,
) -> Estimate:
    """Return an estimate of training `model` on some GPUs. Nothing is trained, and no GPU is needed.

    Args:
        model: A module that is called with the inputs alone. It may be on the meta device. Its values
            are not read, and it is not changed.
        batch: Inputs and targets, [samples, ...] each, of which only shapes and dtypes count. They may
            be on the meta device. The samples are those that one GPU computes at once.
        gpus: Number of GPUs.
        gpu: Name of the GPU, such as "H100 80GB".
        strategy: Name of a strategy of stratbench; None for `single` on one GPU and `fsdp` on more.
        options: Options of the strategy; None for `mixed_precision: policy` of fsdp, and the defaults
            of others.
        loss: Called with outputs and targets, returns a scalar. None: cross-entropy for integer
            targets, mean squared error for others.
        optimizer: adamw or sgd.
        precision: bf16, fp16, fp32 or tf32, as in config.yaml.
        activation_checkpointing: Whether the model's blocks recompute their activations in backward.
        gpus_per_node: Number of GPUs per node.

    Raises:
        ValueError: If the training cannot be estimated; the message has the reason.
    """
    if dist.is_initialized():
        raise ValueError(
            "stratbench.estimate: a process group is initialised; call it in a process without one"
        )
    x, y = _check_batch_is_pair(batch)
    name = strategy or ("single" if gpus == 1 else "fsdp")
    set_options = USUAL_OPTIONS.get(name, {}) if options is None else options
    try:
        _check_is_allowed("strategy", name, REGISTRY)
        for key in set_options:
            _check_is_allowed("options", key, get_option_defaults(name))
        for key, value in (("optimizer", optimizer), ("precision", precision)):
            _check_is_allowed(key, value, build_experiment_schema()["properties"][key]["enum"])
        resolved = resolve_options(name, set_options, gpus)
        get_mesh(name, resolved, gpus)
        cluster = check_config_block("cluster", {"gpus_per_node": gpus_per_node})
        device = make_gpu_device(find_gpu_datasheet(gpu, "gpu"), precision, cluster)
    except (TypeError, ValueError) as error:
        raise ValueError(f"stratbench.estimate: {error}") from error
    request = _GivenRequest(
        settings=_make_settings(
            name, resolved, gpus, optimizer, precision, activation_checkpointing
        ),
        input_shape=(1,),  # unused, since the example batch has the real shape
        classes=0,
        workers_per_node=min(gpus, gpus_per_node),
        eval_batch=0,
        given=CallerInput(model, x.to("meta"), y.to("meta"), loss or _choose_loss(y)),
    )
    cls = get_strategy_class(name)
    reason = BY_COMMAND if request.is_trained_by_command else None
    if cls.divides_network:
        reason = cls.indivisible_model_reason(request.model_source)
    if reason is not None:
        raise ValueError(f"stratbench.estimate: strategy = {name!r}: {reason}")
    # If a GPU is visible, some of PyTorch's code treats fake tensors as real ones.
    with (
        replace_attribute(torch.cuda, "is_available", lambda: False),
        warnings.catch_warnings(action="ignore"),
    ):
        footprint = make_footprint_or_error(request, blocks=_trace_equal_blocks(request))
    if isinstance(footprint, str):
        raise ValueError(f"stratbench.estimate: {footprint}")
    cell = Cell("estimate", "", name, request.settings.model, "", gpus, 0)
    nothing = Dataset(shape=(0,), classes=0, train_samples=0, test_samples=0)
    subject = CellToPlan(
        cell, request.settings, nothing, request.is_worker_of_server, None, request
    )
    is_text = not x.is_floating_point()
    chosen = partial(
        predict_strategy_answer, subject, footprint, device, cluster, reads_text=is_text
    )
    samples = len(x) * request.num_accumulated_parts
    typical, largest = chosen(batch=samples), chosen()
    peak = footprint.find_fullest_rank_footprint(
        samples, device.resident_threads
    ).compute_training_peak(samples, device.resident_threads)
    fits = largest.verdict == "fits"
    return Estimate(
        strategy=name,
        gpus=gpus,
        gpu=device.name,
        batch=len(x),
        verdict=typical.verdict,
        allocated_bytes=typical.memory.allocated_bytes,
        reserved_bytes=typical.memory.reserved_bytes,
        shown_bytes=typical.memory.shown_bytes,
        parts_bytes={part: n for part, n in peak.parts_bytes.items() if n},
        phase=peak.phase,
        largest_batch=largest.micro_batch if fits else 0,
        step_s=typical.step_s and typical.step_s[2],
        step_range_s=typical.step_s and typical.step_s[:2],
        time_source=typical.time_source,
    )


def _trace_equal_blocks(request: Request) -> PathAndCount | None:
    """Return the path and number of the model's equal blocks, or None."""
    # Errors are dropped here, since the trace of the whole model reports them.
    with suppress(Exception), fake.open_fake_worker_environment(request):
        model, _, _ = fake.build_model_strategy_and_worker(request)
        return find_equal_blocks(request, model)
    return None


@dataclass(frozen=True, eq=False)
class CallerInput:
    """Input of `estimate`: a module, an example batch on the meta device, and the loss."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    loss: Loss


@dataclass(frozen=True)
class _GivenRequest(Request):
    """Request for a model that the caller of `estimate` gives as an object, not by a name."""

    given: CallerInput = field(kw_only=True)

    @property
    def model_source(self) -> Model:
        own = OwnModel(
            self.settings.model, f"{__name__}:copy_given_model", {"given": self.given}, None
        )
        return Model("own", None, own_model=own)

    def make_example_batch(self, samples: int) -> tuple[Tensor, Tensor]:
        return tuple(
            torch.empty((samples, *t.shape[1:]), dtype=t.dtype).zero_()
            for t in (self.given.inputs, self.given.targets)
        )

    def make_task_and_loss_kind(self) -> tuple[Task, LossKind]:
        """Return a task with the caller's loss, and the usual kind of loss."""
        return _GivenTask(self.given.loss), LossKind()


class _GivenTask(Task):
    """Task with the loss that the caller of `estimate` gives, and without a score."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return self._loss(outputs, targets)


def copy_given_model(given: CallerInput) -> nn.Module:
    """Return a copy of the caller's module whose tensors are fake.

    The tensors belong to the active fake mode.
    """
    memo: dict[int, Any] = {}
    for p in given.model.parameters():
        empty = torch.empty(p.shape, dtype=p.dtype)
        memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    for b in given.model.buffers():
        memo[id(b)] = torch.empty(b.shape, dtype=b.dtype)
    return deepcopy(given.model, memo)


#: Numbers for the models' names, so that each module has keys of its own in caches.
_numbers = count(1)


def _make_settings(
    name: str,
    options: dict[str, Any],
    gpus: int,
    optimizer: str,
    precision: str,
    activation_checkpointing: bool,
) -> Settings:
    return Settings(
        strategy=name,
        options=options,
        model=f"model-{next(_numbers)}",
        own_model={"call": f"{__name__}:copy_given_model", "kwargs": {}, "wrap_classes": None},
        dataset="",
        gpus=gpus,
        seed=0,
        global_batch=gpus,
        per_worker_batch=1,
        steps=MANY_STEPS,
        lr=0.1,
        optimizer=optimizer,
        betas=[0.9, 0.999] if optimizer == "adamw" else None,
        eps=1e-8 if optimizer == "adamw" else None,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
        device="cuda",
        data_placement="host",
    )


def _check_is_allowed(argument: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        suggestion, allowed_names = suggest_closest_name(value, allowed), ", ".join(allowed)
        raise ValueError(
            f"{argument} = {value!r}: is unknown.{suggestion} Allowed: {allowed_names}"
        )


def _check_batch_is_pair(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    if not pair or not all(torch.is_tensor(t) and t.dim() for t in batch):
        raise ValueError(
            "stratbench.estimate: batch: is not a pair of tensors; give inputs and targets, and wrap a "
            "module with several inputs into one with one input"
        )
    x, y = batch
    if len(x) != len(y) or not len(x):
        raise ValueError(
            f"stratbench.estimate: batch: inputs have {len(x)} samples and targets have {len(y)}; give "
            "equally many of both, at least one"
        )
    return x, y


def _choose_loss(y: Tensor) -> Loss:
    if y.is_floating_point():
        return nn.functional.mse_loss

    def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    return cross_entropy
