"""Describes everything that a footprint depends on; cells with equal requests share a footprint."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from stratbench.cell.settings import EACH, Settings
from stratbench.strategies import REGISTRY, get_option_defaults, get_strategy_class, get_traits
from stratbench.strategies.base import Traits
from stratbench.workload.data.dataset import Dataset
from stratbench.workload.data.device_data import choose_evaluation_batch_size, make_example_batch
from stratbench.workload.data.placement import BUFFERED_BATCHES
from stratbench.workload.network import models
from stratbench.workload.network.precision import get_batch_memory_format, get_weights_dtype
from stratbench.workload.task_trial import run_task_trial
from stratbench.workload.tasks import LossKind, Task

if TYPE_CHECKING:
    import torch

#: Name of the option that says when gathered parameters are freed.
RESHARDING = "reshard_after_forward"


@dataclass(frozen=True)
class Request:
    """All that determines one rank's footprint, except for the batch size.

    Attributes:
        settings: The settings that affect the work; others have fixed values.
        workers_per_node: Number of workers on a node.
        eval_batch: Samples that are evaluated at once; 0 without evaluation.
        values: Whether the targets are values instead of classes.
    """

    settings: Settings
    input_shape: tuple[int, ...]
    classes: int
    workers_per_node: int
    eval_batch: int
    values: bool = False

    @classmethod
    def from_settings(
        cls, s: Settings, data: Dataset, on_cuda: bool, workers_per_node: int
    ) -> Request:
        """Return the request of a cell with these settings and data.

        A worker of a parameter server does the same under every policy. A rank's memory depends on the
        number of ranks only if something is sharded.

        Args:
            s: Settings of the cell.
            data: Data set of the cell.
            on_cuda: Whether the cell trains on GPUs.
            workers_per_node: Number of workers on a node.
        """
        strategy, options = s.strategy, s.options
        planned = get_strategy_class(strategy)
        most, of_node = s.gpus, workers_per_node
        if planned.kind == "server":
            # The first strategy with servers stands for all.
            strategy = next(name for name in REGISTRY if get_strategy_class(name).kind == "server")
            most = 1
            options = get_option_defaults(strategy)
        elif planned.kind == "own":  # of a user's command, only the model is traced
            options, most = get_option_defaults(strategy), 1
        elif planned.alike_on_any_count:
            one, two = (get_traits(strategy, options, n) for n in (1, 2))
            # With these strategies, all numbers of workers from two on have the same footprint. A single
            # worker has it too, unless its traits differ.
            most = of_node = 2 if one == two else min(2, s.gpus)
        settings = Settings(
            strategy=strategy,
            options=options,
            dataset="",
            gpus=most,
            seed=0,
            global_batch=most,
            per_worker_batch=1,
            **select_settings_that_affect_footprint(s) | {"device": "cuda" if on_cuda else "cpu"},
        )
        return cls(
            settings=settings,
            input_shape=models.compute_input_shape(models.get_model_or_name(s), data.shape),
            classes=data.classes,
            values=data.values,
            workers_per_node=min(most, of_node),
            eval_batch=min(choose_evaluation_batch_size(data.shape), data.test_samples),
        )

    def make_example_batch(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch of inputs and targets, in the shapes that the model takes."""
        import torch

        s = self.settings
        return make_example_batch(
            samples,
            self.input_shape,
            self.classes,
            torch.device("cpu"),
            self.dtype,
            get_batch_memory_format(s.precision, s.device),
            self.values,
            s.task == "text-classification",
        )

    def make_task_and_loss_kind(self) -> tuple[Task, LossKind]:
        """Return the task and its kind of loss, after a trial as in a training."""
        return run_task_trial(self.settings, self.input_shape, self.classes, self.values)

    def with_options(self, **changes: Any) -> Request:
        """Return the request with other options of its strategy."""
        options = self.settings.options | changes
        return replace(self, settings=replace(self.settings, options=options))

    @property
    def strategy(self) -> str:
        return self.settings.strategy

    @property
    def options(self) -> dict[str, Any]:
        return self.settings.options

    @property
    def world_size(self) -> int:
        return self.settings.gpus

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.settings.gradient_accumulation_steps

    @property
    def is_on_cuda(self) -> bool:
        return self.settings.device == "cuda"

    @property
    def model_source(self) -> str | models.Model:
        """The model as the functions of `models` expect it: a name or a `Model`."""
        return models.get_model_or_name(self.settings)

    @property
    def is_worker_of_server(self) -> bool:
        """Whether the rank is a worker of a parameter server."""
        return get_strategy_class(self.strategy).kind == "server"

    @property
    def is_trained_by_command(self) -> bool:
        """Whether a user's command trains the requested cell. Its footprint is then unknown."""
        return get_strategy_class(self.strategy).kind == "own"

    @property
    def traits(self) -> Traits:
        """Properties of the strategy, with its options and this number of workers."""
        return get_traits(self.strategy, self.options, self.world_size)

    @property
    def num_accumulated_parts(self) -> int:
        """Number of equal parts into which a worker divides the batch of a step."""
        cls = get_strategy_class(self.strategy)
        return (
            self.gradient_accumulation_steps
            * cls(cls.Options(**dict(self.options))).num_batch_parts
        )

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights and the input."""
        return get_weights_dtype(self.settings.precision)

    @property
    def autocasts_like_cuda(self) -> bool:
        return self.is_on_cuda and self.settings.precision in ("fp16", "bf16")


class MicrobatchCounts(NamedTuple):
    """Numbers of a pipeline stage's micro-batches: all, and those that wait for backward."""

    microbatches: int
    num_waiting_for_backward: int


def select_settings_that_affect_footprint(s: Settings) -> dict[str, Any]:
    """Return the settings that affect a footprint, by each setting's metadata `planned`."""
    selected = {}
    for field in fields(Settings):
        value, planned = getattr(s, field.name), field.metadata["planned"]
        if planned is not None:
            selected[field.name] = value if planned is EACH or not value else planned
    return selected


def compute_data_bytes(data: Dataset, input_shape: tuple[int, ...], augment: bool) -> int:
    """Return the bytes of the whole data set, if it is on the device.

    Images count at the model's size, with the stored channels and type. Texts, waveforms and targets count as
    they are stored. The order of an epoch is int64, and augmentation has three int64 numbers per training
    sample.

    Args:
        data: The data set.
        input_shape: Shape of the model's input.
        augment: Whether samples are augmented.
    """
    samples = data.train_samples + data.test_samples
    numbers = data.train_samples * (4 if augment else 1)
    size = input_shape[1:] if len(input_shape) == 3 else data.shape[1:]
    values = samples * data.shape[0] * math.prod(size)
    return (
        values * data.stored_bytes + samples * compute_target_bytes_per_sample(data) + 8 * numbers
    )


def compute_target_bytes_per_sample(data: Dataset) -> int:
    """Return the bytes of one sample's target, as the data set stores it."""
    kind, shape = data.target_dtype_name_and_shape
    return {"uint8": 1, "int32": 4, "float32": 4, "int64": 8}[kind] * math.prod(shape)


def compute_batch_buffer_bytes(data: Dataset, samples: int, augment: bool) -> int:
    """Return the bytes of the batches that are copied to the device in advance.

    These batches exist if the data are in host memory. They are as stored, with their targets, and three
    int64 numbers per augmented sample.

    Args:
        data: The data set.
        samples: Samples of a batch.
        augment: Whether samples are augmented.
    """
    each = math.prod(data.shape) * data.stored_bytes + compute_target_bytes_per_sample(data)
    each += 24 if augment and not data.is_text else 0
    return BUFFERED_BATCHES * samples * each
