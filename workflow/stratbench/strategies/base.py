"""Defines a strategy (a way to train with N workers) as the training loop needs it.

The loop calls, in this order: `setup`; `save`, a few `step`s and `restore` (the warm-up); then for each epoch
`batches`, `step` for each batch, and `open_evaluation_model`; finally `report` and `close`. A strategy of
kind `server` has no common epochs: see the extension `servers`. No code in `step` may synchronise the device.
This module imports torch inside functions only: the workflow reads strategies' names and options on every
parse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stratbench.cell.options import Options, reset_inherited_attributes
from stratbench.cell.text.words import format_names
from stratbench.strategies.mesh import Mesh
from stratbench.workload.network.precision import (
    convert_scores_for_loss,
    create_autocast_context,
    get_effective_dtypes,
)
from stratbench.workload.tasks import Classification, Task, compute_loss_and_weight, divide_or_zero

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from stratbench.cell.run_folder import RunFolder
    from stratbench.cell.settings import Settings
    from stratbench.strategies.saved import SavedState, Stateful
    from stratbench.telemetry.compiling import CompileWatch
    from stratbench.telemetry.heartbeat import Heartbeat
    from stratbench.workload.network.chunked_loss import ChunkedLoss
    from stratbench.workload.network.trial import Trial


@dataclass(frozen=True)
class Traits:
    """Properties of a strategy with its options and number of workers, recorded with each cell.

    Decision, audit and plan depend on these properties, and never on the strategy's name. The defaults are
    for a strategy that declares nothing. They promise nothing, so that no conclusion depends on it.
    """

    #: Whether the training ends when one of several workers is lost.
    ends_with_a_worker: bool = True
    #: Whether, in the long run, all workers are as slow as the slowest one.
    waits_for_slowest: bool = True
    #: Whether a single worker makes the updates of plain synchronous SGD.
    is_synchronous_on_one_worker: bool = False
    #: Whether the updates with this number of workers are those of DDP, except for rounding. With BatchNorm,
    #: whose statistics are each worker's own, this is so only for equal numbers of workers.
    equals_ddp: bool = False
    #: Whether parameters, gradients and optimizer state are divided among the workers.
    shards_states: bool = False
    #: Number of equal shards into which parameters and gradients are divided, or None if the shards are
    #: uneven or unknown.
    weight_parts: int | None = 1
    #: Number of equal shards into which the optimizer's state is divided, or None if it is uneven or unknown.
    optimizer_parts: int | None = 1
    #: Whether the optimizer also has state for the padding between parameters in a flat tensor.
    optimizer_padded: bool = False
    #: Whether sharded states are in host memory instead of device memory.
    states_on_host: bool = False
    #: Number of updates per global batch, or None if it varies or is unknown.
    updates_per_step: float | None = None
    #: Traffic of ring collectives: each of W workers sends at least this number of copies of the trainable
    #: parameters per step, times (W - 1) / W. With sharded states, all copies but one are of all parameters,
    #: which are gathered. None without a ring, or if unknown.
    ring_copies: float | None = None
    #: Number of copies of the trainable parameters that a worker keeps in addition to the parameters and the
    #: optimizer's moments, such as those in `Strategy.extra_state`. They are divided as the optimizer's state
    #: is, and count as part of it. None if there is no such number.
    kept_copies: float | None = 0.0


@dataclass
class Worker:
    """A worker process as a strategy sees it: settings, rank, device, shard groups and callbacks."""

    #: Settings of the cell.
    settings: Settings
    #: Number of this worker among all workers, from 0.
    rank: int
    #: Number of workers.
    world_size: int
    #: Number of workers on this worker's node.
    local_world_size: int
    #: Device that this worker computes on.
    device: torch.device
    #: Folder of the run's files.
    folder: RunFolder
    #: The model's sharding groups in forward order: (label, modules).
    wrap_groups: list[tuple[str, list[nn.Module]]]
    #: Function that a step calls between forward and backward. It sleeps if the study slows this worker.
    delay_step: Callable[[], None] = lambda: None
    #: Function that a step calls with the name of each of its phases when the phase ends.
    mark_phase_end: Callable[[str], None] = lambda phase: None
    #: Training task.
    task: Task = field(default_factory=Classification)
    #: Whether the task returns its loss as a sum and a weight (`tasks.LossKind`).
    has_weighted_loss: bool = False
    #: Number of steps of all epochs, over which a schedule changes the learning rate.
    total_steps: int = 1
    #: Counts compilations if the settings use torch.compile.
    compile_watch: CompileWatch | None = None
    #: Heartbeat to update on progress, or None if no process reads it.
    heartbeat: Heartbeat | None = None
    #: Result of a trial step of the model if it is a user's own.
    trial: Trial | None = None
    #: Division of the workers, or None if each has a replica of the model.
    mesh: Mesh | None = None
    #: Hash of the model's initial weights, which all workers build from one seed.
    initial_weights_hash: str = ""
    #: Shape of one sample, as the model takes it.
    input_shape: tuple[int, ...] = ()
    #: Makes the worker's channel to parameter servers from a function that connects to an incarnation of the
    #: servers within a number of seconds. None: that function makes it.
    make_server_channel: Callable[[Callable[[int | None, float], Any]], Any] | None = None

    def __post_init__(self) -> None:
        self.mesh = self.mesh or Mesh(self.world_size)

    @property
    def data_rank(self) -> int:
        """Index of this worker's share among the `data_workers` shares of each batch."""
        return self.mesh.place(self.rank).replica

    @property
    def random_stream_index(self) -> int:
        """Index of this worker's random stream. Workers with equal layers and samples share a stream."""
        return self.rank // self.mesh.tensor

    @property
    def data_workers(self) -> int:
        """Number of shares of each batch: one per replica of the model."""
        return self.mesh.replicas


#: Phases of a step before backward, without the artificial slowdown of a worker.
BEFORE_BACKWARD = ("data", "forward")

#: Reason why workers with shards of the model's states cannot join and leave (`Strategy.rigid`).
STATE_IN_PARTS = "each worker holds a part of the state, which is lost with the worker"

#: Class attributes of a strategy that strategies derived from it do not inherit.
CLAIMS = (
    "rule",
    "alike_on_any_count",
    "collectives",
    "own_phases",
    "rigid",
    "begins_anew",
    "traits",
)


class Strategy:
    """One way to train with N workers; the base class of all strategies.

    A subclass sets the class attributes and is registered in `__init__`. With its own `summary`, it is a
    strategy of its own, and declares its own `CLAIMS`.
    """

    #: `collective`: all workers take each step together. `server`: workers send gradients to parameter
    #: servers and receive weights. `own`: a user's program trains, with its own loop.
    kind: ClassVar[Literal["collective", "server", "own"]] = "collective"
    #: Packages that the strategy needs in addition to stratbench's, as `name==version`
    #: (`strategies/needs.py`).
    needs: ClassVar[tuple[str, ...]] = ()
    #: Training loop of the strategy in place of `train.loop.train`, as "module:function". None: that loop.
    loop: ClassVar[str | None] = None
    #: Name of the update policy of the strategy's parameter servers, or None without servers.
    policy: ClassVar[str | None] = None
    #: Family of the strategy, which determines its colour in figures; `other` is black.
    family: ClassVar[
        Literal[
            "alone",
            "replicas",
            "shards",
            "splits",
            "own weights",
            "averaging servers",
            "servers",
            "engines",
            "other",
        ]
    ] = "other"
    #: Number of the strategy's marker in figures among its family's markers, for families that several
    #: extensions share: without one of them, the others keep their markers. None: the next free number in the
    #: registry's order.
    mark: ClassVar[int | None] = None
    #: Description of the strategy in one line, for documentation and reports.
    summary: ClassVar[str]
    #: Formula for reports of how the weights W are updated. g is a gradient, velocity SGD's direction, lr the
    #: learning rate of a global batch, eta that of one push of a worker, and N the number of workers.
    rule: ClassVar[str] = ""
    #: Largest number of workers that the strategy can use, or None without a limit.
    max_workers: ClassVar[int | None] = None
    #: Whether the strategy needs a torch.distributed process group.
    needs_group: ClassVar[bool] = True
    #: Whether the strategy shards the model by its wrap groups. The record then has these groups.
    uses_wrap_groups: ClassVar[bool] = False
    #: Whether the strategy divides the model's layers among workers, for which the model must declare how.
    divides_network: ClassVar[bool] = False
    #: Whether a worker waits for activations of other workers, so that no computation hides their transfer.
    waits_for_activations: ClassVar[bool] = False
    #: Whether a rank computes and stores the same with any number of workers, so that the plan needs to
    #: predict only one number of workers.
    alike_on_any_count: ClassVar[bool] = False
    #: Names of collectives that its steps may start (`CollectiveCall.collective_name`), for the measurement
    #: of links. None: unknown, and all kinds are measured.
    collectives: ClassVar[tuple[str, ...] | None] = None
    #: Phases of a step that contain no wait for other workers: they show how the workers' computation times
    #: differ. It is empty if each phase may contain waits.
    own_phases: tuple[str, ...] = ()
    #: Reason why the strategy's workers cannot join and leave during the training, as a clause, or None if
    #: they can.
    rigid: ClassVar[str | None] = "it does not say that workers may join and leave while it trains"
    #: Reason why an interrupted training restarts from step 0, as a clause, or None if its state is saved.
    begins_anew: ClassVar[str | None] = "it does not say that all its state can be kept"
    #: Whether the strategy's first steps differ from later ones, so that the plan has to look at later steps.
    warms_up: ClassVar[bool] = False
    #: Whether a parameter without a gradient in a step is updated by a gradient of zeros, not left unchanged.
    updates_by_zeros: ClassVar[bool] = False
    #: Short text on which buffers count, such as BatchNorm's statistics, if forward writes to them.
    buffers_note: ClassVar[str] = "each worker keeps its own"
    #: Short text on the weights and BatchNorm statistics that are evaluated.
    evaluated_on: ClassVar[str] = "the only worker's weights and BatchNorm statistics"
    #: Sentence on parts of a step's time that the breakdown cannot separate, or None if there are none.
    breakdown_note: ClassVar[str | None] = None
    #: Dataclass of the strategy's options.
    Options: ClassVar[type[Options]] = Options
    #: Model that was given to `setup`.
    model: nn.Module
    #: Worker that was given to `setup`.
    worker: Worker
    #: Optimizer of this worker's weights after `setup`, or None if there is none.
    optimizer: torch.optim.Optimizer | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reset_inherited_attributes(cls, CLAIMS)

    def __init__(self, options: Options) -> None:
        self.options = options

    @classmethod
    def resolve(cls, options: dict[str, Any], gpus: int) -> dict[str, Any]:
        """Return the options for a cell with `gpus` workers, including those that others determine."""
        return options

    @classmethod
    def check(cls, name: str, options: dict[str, Any], gpus: int, per_worker_batch: int) -> None:
        """Raise ValueError if the options are not valid for a cell.

        Args:
            name: Name of the strategy.
            options: All options of the strategy.
            gpus: Number of workers.
            per_worker_batch: Samples per step of a worker.
        """

    @classmethod
    def check_nodes(cls, options: dict[str, Any], gpus: int, per_node: int) -> None:
        """Raise ValueError if the options are not valid for the cluster's nodes.

        Args:
            options: All options of the strategy.
            gpus: Number of workers.
            per_node: Maximum number of workers per node.
        """

    @classmethod
    def iter_refused_values(
        cls, options: dict[str, Any], values: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield a message for each value of an experiment that the strategy does not support.

        The messages have the form `.key = ...: reason`.
        """
        yield from ()

    @classmethod
    def explain_fixed_workers(
        cls, options: dict[str, Any], values: Mapping[str, Any]
    ) -> str | None:
        """Return why workers cannot join or leave during training. None if they can.

        Args:
            options: All options of the strategy.
            values: Values of the experiment.
        """
        return cls.rigid

    @classmethod
    def restart_reason(cls, options: dict[str, Any], values: Mapping[str, Any]) -> str | None:
        """Return why an interrupted training cannot resume and restarts from step 0. None if it resumes.

        Args:
            options: All options of the strategy.
            values: Values of the experiment.
        """
        return cls.begins_anew

    @classmethod
    def packages(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the packages that the strategy needs: those in `needs`, and others by option."""
        return cls.needs

    @classmethod
    def list_user_files(cls, options: Mapping[str, Any]) -> dict[str, Path]:
        """Return the user's files that the strategy's options name, by file name.

        If one of these files changes, cells are trained again.
        """
        return {}

    @classmethod
    def iter_unmet_requirements(cls, options: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence per requirement of the strategy's options that this machine does not meet."""
        yield from ()

    def iter_model_refusals(self, model: nn.Module, worker: Worker) -> Iterator[str]:
        """Yield reasons why the strategy cannot train a model, each with its remedy.

        It is called before `setup`. `worker.trial` has the result of a trial step.
        """
        s, sparse = worker.settings, worker.trial.sparse_gradient_parameters
        by = {
            "AdamW does not take": s.optimizer == "adamw",
            "weight_decay cannot be added to": bool(s.weight_decay),
            "max_grad_norm cannot measure": s.max_grad_norm is not None,
        }
        if sparse and any(by.values()):
            yield sparse_gradient_reason(
                sparse, next(reason for reason, set_ in by.items() if set_)
            )

    @classmethod
    def support_fake_tensors(cls) -> AbstractContextManager:
        """Return a context in which the strategy's libraries work with fake tensors and process groups."""
        return nullcontext()

    def forget_batch(self) -> None:
        """Free everything that depends on the batch size, which may differ in the next step."""

    @classmethod
    def samples_per_step(cls, s: Settings) -> int:
        """Return the number of samples of a worker in one call of `step`."""
        return s.per_worker_batch

    def traits(self, gpus: int) -> Traits:
        """Return the strategy's traits with `gpus` workers."""
        return Traits()

    def mesh(self, gpus: int) -> Mesh:
        """Return the mesh in which `gpus` workers divide batches and layers.

        Raises:
            ValueError: If the options do not allow this number of workers.
        """
        return Mesh(gpus)

    @property
    def num_plain_steps(self) -> int:
        """Number of first steps that only average gradients, before the strategy's own kind of step."""
        return 0

    @property
    def num_batch_parts(self) -> int:
        """Number of equal parts into which the strategy divides each batch.

        It divides each part of gradient accumulation instead if a batch has several.
        """
        return 1

    def bubble_share(self, gpus: int) -> float | None:
        """Return the fraction of a step in which a worker waits for other workers' layers.

        The result is None if unknown.

        All layers count as equally slow, and transfers as free.
        """
        return 0.0

    @property
    def list_first_steps_by_kind(self) -> tuple[int, ...]:
        """Indices of the training steps at which a new kind of step begins."""
        return (0,)

    @property
    def steps_per_period(self) -> int:
        """Number of steps after which the strategy's pattern of work repeats.

        The work repeats only once the last kind of step has begun.
        """
        return 1

    def choose_segment_steps(self, discarded: int, timed: int) -> tuple[int, int]:
        """Return the numbers of steps to discard and to time in a segment.

        Whole periods of the strategy are timed. Its first steps are discarded, because most steps of a
        training are of another kind.

        Args:
            discarded: Smallest number of steps to discard.
            timed: Smallest number of steps to time.
        """
        first, period = (
            max(self.list_first_steps_by_kind[-1], self.num_plain_steps),
            self.steps_per_period,
        )
        before = first + -(-max(0, discarded - first) // period) * period
        return before, -(-timed // period) * period

    def count_exchanges(self, steps: int) -> int:
        """Return the number of steps with communication among the first `steps` of a training."""
        return steps

    def setup(self, model: nn.Module, worker: Worker) -> None:
        """Wrap the model, which is already on the device, create the optimizer, and call `reset`."""
        raise NotImplementedError

    def weights_and_buffers(self) -> list[Tensor]:
        """Return this worker's part of the model, as writable tensors."""
        raise NotImplementedError

    @property
    def accumulates_repeatedly(self) -> bool:
        """Whether backward adds to a gradient several times, until the last sum is complete."""
        return bool(self.worker.trial and self.worker.trial.repeatedly_added_parameters)

    def list_changed_frozen_parameters(self) -> list[Tensor]:
        """Return the frozen parameters that forward changes, which are saved and restored like buffers."""
        written = set(self.worker.trial.overwritten_parameters if self.worker.trial else ())
        named = self.model.named_parameters() if written else ()
        return [p for name, p in named if name in written and not p.requires_grad]

    def extra_state(self) -> list[Tensor | Stateful]:
        """Return the strategy's state besides weights, buffers and the optimizer's, to restore after warm-up.

        The list has tensors, or objects with `state_dict` and `load_state_dict`, always in the same order.
        Tensors count as the optimizer's state in the record and in the plan; `Traits.kept_copies` has
        their size.
        """
        return []

    def list_persistent_tensors(self) -> dict[str, list[Tensor]]:
        """Return tensors that persist between steps besides model, optimizer and `extra_state`, by purpose.

        The purposes are `gradients`, `buckets`, `communication` and `received`; the plan shows the memory of
        each. These tensors need not be restored. They are not model states, and count in the record's peak
        memory only.
        """
        return {}

    def list_late_tensors(self) -> list[Tensor]:
        """Return the persistent tensors that only a later step than the first creates."""
        return []

    def reset(self) -> None:
        """Reset the state that `restore` does not restore.

        It consists of step counts, the loss scale and the state of hooks.
        """

    def save(self) -> SavedState:
        """Return a copy in host memory of all state that a warm-up changes."""
        from stratbench.strategies.saved import SavedState
        from stratbench.workload.network.changes import Attributes

        names = self.worker.trial.changed_attributes if self.worker.trial else ()
        attributes = Attributes(self.model, names) if names else None
        tensors = self.weights_and_buffers()
        return SavedState(tensors, self.optimizer, self.extra_state(), attributes)

    def restore(self, saved: SavedState) -> None:
        """Restore the state that `save` returned, bit for bit, and call `reset`."""
        saved.put_back(self.weights_and_buffers(), self.optimizer, self.extra_state())
        self.reset()

    def batches(self, order: Tensor, epoch: int) -> Iterator[Tensor]:
        """Yield the indices of this worker's samples, shape [samples_per_step], for each step of an epoch.

        Args:
            order: The epoch's shuffled sample indices, shape [train_samples], equal on all workers.
            epoch: Number of the epoch.
        """
        raise NotImplementedError

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train one step. Return the mean loss of the batch on the device, without synchronising.

        The mean of the returned losses over the workers is the loss of the global batch, also for a task that
        weights its targets.
        """
        raise NotImplementedError

    def gradients_of(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Compute a batch's gradients without an update; return the gradients that this worker holds.

        Parameters without a gradient have zeros. The list is empty if the strategy does not know its
        gradients; compiled code is then not checked.
        """
        return []

    @contextmanager
    def open_evaluation_model(self) -> Iterator[nn.Module]:
        """Yield the model in evaluation mode, with the weights and buffers to evaluate."""
        self.model.eval()
        try:
            yield self.model
        finally:
            self.model.train()

    def model_states(self) -> dict[str, int]:
        """Return the bytes of this rank's parameters, gradients, optimizer state and buffers.

        The optimizer state includes the tensors of `extra_state`.
        """
        import torch

        from stratbench.telemetry.memory import measure_model_states

        states = measure_model_states(self.model, self.optimizer)
        tensors = filter(torch.is_tensor, self.extra_state())
        return states | {
            "optimizer_bytes": states["optimizer_bytes"] + sum(t.nbytes for t in tensors)
        }

    @property
    def is_evaluator(self) -> bool:
        """Whether this worker reports the results of all workers, which is known after the training."""
        return self.worker.rank == 0

    def report(self) -> dict[str, Any]:
        """Return the strategy's own entries of the record: `details`, `evaluated_on`, `updates_applied`."""
        raise NotImplementedError

    def communication(self) -> dict[str, Any] | None:
        """Return this rank's communication per training step, or None if the communication is unknown.

        It has `sent_bytes_per_step` and `received_bytes_per_step` (means over ranks) with their `method`. If
        known, it also has mean times per step: `total_ms` of communication, of which `overlapped_ms` run
        concurrently with computation and `exposed_ms` do not, or `server_wait_ms`. It is called once, after
        the timed training.
        """
        return None

    def check_equal_collectives(self) -> None:
        """Raise Refused if workers have called different collectives. All workers call it between epochs."""

    def close(self) -> None:
        """Release the resources that `setup` acquired, after the last measurement."""


class Collective(Strategy):
    """Base of the strategies in which all workers take every step together.

    A subclass wraps the model. Forward, backward, precision and the optimizer's step are the same for all
    strategies, so that a comparison shows the effect of the strategy alone.
    """

    #: Model as the strategy has wrapped it.
    module: nn.Module
    #: Module that a step calls: the wrapped model, or its compiled form.
    compiled: nn.Module
    #: Wrapper that makes the model return its loss (`loss_chunks`), or None if the model returns scores.
    chunked: ChunkedLoss | None = None

    def wrap(self, model: nn.Module, worker: Worker) -> nn.Module:
        """Return a model wrapped in a module whose forward and backward synchronise the workers."""
        raise NotImplementedError

    def setup(self, model: nn.Module, worker: Worker) -> None:
        self.worker, self.model = worker, model
        # If the model has buffers, forward may begin with a wait for the buffers of another worker.
        if any(True for _ in model.buffers()):
            self.own_phases = ()
        if worker.settings.loss_chunks > 1:
            self.chunked = self.make_chunked_loss()
        self.module = self.wrap(model, worker)
        self.compiled = compile_if_requested(self.module, worker.settings)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.local = self.updated_tensors()
        self.optimizer = self.make_optimizer()
        self.reset()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer of the tensors in `self.local`, by the cell's settings.

        No other code builds an optimizer. Its state should exist before the first step, as the moments do
        here: the plan assumes that the first step needs the memory of any step.
        """
        kind, settings = self.get_optimizer_class()
        optimizer = kind(self.local, **settings)
        self.create_optimizer_states(optimizer, self.local)
        return optimizer

    def get_optimizer_class(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Return the class of the optimizer, and the keyword arguments to construct it."""
        import torch

        s = self.worker.settings
        common = {
            "lr": s.lr,
            "weight_decay": s.weight_decay,
            "foreach": s.optimizer_impl == "foreach",
            # Fused kernels read on the device whether the loss scaler found an overflow, without a wait.
            "fused": s.optimizer_impl == "fused",
        }
        if s.optimizer == "adamw":
            return torch.optim.AdamW, common | {"betas": tuple(s.betas), "eps": s.eps}
        if self.local[0].device.type != "cuda" or any(
            getattr(module, "sparse", False) for module in self.model.modules()
        ):
            common["fused"] = False
        return torch.optim.SGD, common | {"momentum": s.momentum, "nesterov": s.nesterov}

    def create_optimizer_states(
        self, optimizer: torch.optim.Optimizer, tensors: Iterable[Tensor]
    ) -> None:
        """Create the optimizer's state for each of `tensors`, as the optimizer's first step would."""
        import torch

        s = self.worker.settings
        fused = s.optimizer_impl == "fused"
        for t in tensors:
            if s.optimizer == "adamw":
                optimizer.state[t] = {
                    # Fused kernels read the step on the device; other implementations read it on the host.
                    "step": torch.zeros(
                        (), dtype=torch.float32, device=t.device if fused else "cpu"
                    ),
                    "exp_avg": torch.zeros_like(t),
                    "exp_avg_sq": torch.zeros_like(t),
                }
            elif s.momentum:
                # A momentum of zero becomes the first gradient, as in torch. Without it, torch's fused SGD
                # reads uninitialised memory if the loss scaler skips the first step.
                optimizer.state[t]["momentum_buffer"] = torch.zeros_like(t)

    def reset(self) -> None:
        self.steps, self.scaler = 0, None
        #: Weight of each part of the current batch, for tasks that return a sum and a weight.
        self.part_weights: list[Tensor] = []
        if self.worker.settings.precision == "fp16":
            from stratbench.strategies.scaler import SharedScaler

            parts = self.traits(self.worker.world_size).optimizer_parts
            self.scaler = SharedScaler(self.worker.device, shared=parts is None or parts > 1)

    def updated_tensors(self) -> list[Tensor]:
        """Return the tensors that this rank's optimizer updates: the parameters, or shards of them."""
        return self.parameters

    def link_gradients(self) -> None:
        """Assign the gradients to `updated_tensors`, unless these are the parameters themselves."""

    def prepare_update(self) -> None:
        """Set the step's learning rate, and clip the gradients if the settings require clipping."""
        s = self.worker.settings
        if s.has_changing_lr:
            share = s.compute_lr_factor(self.steps, self.worker.total_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = s.lr * share
        if s.max_grad_norm is not None:
            self.clip_gradients(s.max_grad_norm)

    def clip_gradients(self, norm: float) -> None:
        """Scale the gradients down if their norm is larger than `norm`, without synchronising the device."""
        from torch.nn.utils import clip_grads_with_norm_

        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        clip_grads_with_norm_(self.local, norm, self.gradient_norm())

    def gradient_norm(self) -> Tensor:
        """Return the Euclidean norm of the full gradient on the device, without synchronising."""
        from torch.nn.utils import get_total_norm

        return get_total_norm([t.grad for t in self.list_normed_tensors() if t.grad is not None])

    def list_normed_tensors(self) -> list[Tensor]:
        """Return the tensors whose gradients this worker adds to the gradient norm.

        A tensor that several workers hold is counted by one of them.
        """
        return self.local

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with create_autocast_context(self.worker.settings.precision, self.worker.device):
            return self.compute_mean_loss(x, y)

    def compute_mean_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of the compiled or wrapped model on part of a batch."""
        if self.chunked is None:
            return self.compute_part_loss(self.compiled(x), y)
        with self.chunked.compute_loss_against(y):
            return self.compiled(x)

    def make_chunked_loss(self) -> ChunkedLoss:
        """Make the model compute its loss in parts of the positions.

        The model is not wrapped yet.
        """
        import torch

        from stratbench.workload.network.chunked_loss import ChunkedLoss

        worker = self.worker
        shape = (1, *worker.input_shape)
        tokens = torch.empty(shape, dtype=torch.int64, device=worker.device).zero_()
        return ChunkedLoss(self.model, tokens, worker.settings.loss_chunks, worker.task.loss)

    def compute_part_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a part of the batch, on which backward is called.

        If the task returns a sum and a weight, each target counts as 1 here. The weight of the global batch
        is known only after the last part of the last worker; `correct_by_weight` then corrects the loss.
        """
        outputs = convert_scores_for_loss(outputs, self.worker.settings.precision)
        loss, weight = compute_loss_and_weight(self.worker.task, outputs, y)
        if weight is None:
            return loss
        from stratbench.telemetry.shards import get_local_shard

        self.part_weights.append(get_local_shard(weight))
        return loss * (
            self.worker.settings.gradient_accumulation_steps
            * self.num_batch_parts
            / self.count_targets(y)
        )

    def count_targets(self, y: Tensor) -> float:
        """Return the number of targets in a worker's batch, each of which weighs 1.

        Args:
            y: Targets of any samples, which show the number of targets per sample.
        """
        return math.prod(y.shape[1:]) * self.worker.settings.per_worker_batch

    def correct_by_weight(self, loss: Tensor, full: float) -> Tensor:
        """Correct gradients and mean loss of a batch for the weights of its targets.

        Afterwards the loss is the global batch's sum divided by its weight.

        Args:
            loss: Mean loss with a weight of 1 per target.
            full: Weight of a worker's batch if each target weighs 1.

        Returns:
            The corrected loss.
        """
        import torch

        from stratbench.workload.torch_internals import multiply_all

        own = torch.zeros((), dtype=torch.float64, device=self.worker.device)
        for weight in self.part_weights:
            own += weight
        self.part_weights.clear()
        factor = divide_or_zero(full, self.average_batch_weight(own))
        by_kind: dict[Any, list[Tensor]] = {}
        for gradient in self.list_gradients():
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, dtype), gradients in by_kind.items():
            multiply_all(gradients, factor.to(device, dtype))
        return loss * factor.to(loss.dtype)

    def average_batch_weight(self, own: Tensor) -> Tensor:
        """Return the mean weight of the replicas' batches. `own` is the weight of this worker's batch."""
        import torch.distributed as dist

        w = self.worker
        if w.world_size > 1:
            if not w.mesh.reports_for_replica(w.rank):
                own.zero_()
            dist.all_reduce(own)
        return own / w.mesh.replicas

    def list_gradients(self) -> list[Tensor]:
        """Return the gradients that this worker's optimizer uses in the next update."""
        from stratbench.telemetry.shards import get_local_shard

        return [get_local_shard(t.grad) for t in self.local if t.grad is not None]

    def gradients_of(self, x: Tensor, y: Tensor) -> list[Tensor]:
        import torch

        from stratbench.telemetry.shards import get_local_shard

        self.compute_gradients(x, y)
        gradients = [
            torch.zeros_like(get_local_shard(t))
            if t.grad is None
            else get_local_shard(t.grad).clone()
            for t in self.local
        ]
        self.optimizer.zero_grad(set_to_none=True)
        return gradients

    def compute_gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the batch's gradients of `updated_tensors`, and return the mean loss of the batch."""
        parts = self.worker.settings.gradient_accumulation_steps
        loss = self.add_gradients(x, y) if parts == 1 else self.accumulate_gradients(x, y, parts)
        self.link_gradients()
        return (
            self.correct_by_weight(loss, self.count_targets(y))
            if self.worker.has_weighted_loss
            else loss
        )

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.compute_gradients(x, y)
        self.prepare_update()
        self.update()
        self.steps += 1
        return loss

    def update(self) -> None:
        """Update the weights by the gradients, and free the gradients."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate_gradients(self, x: Tensor, y: Tensor, parts: int) -> Tensor:
        """Add the gradients of the batch in equal parts; return the batch's mean loss.

        The last part synchronises the gradients. Memory for activations is that of one part.

        Args:
            x: Inputs.
            y: Targets.
            parts: Number of parts.
        """
        loss = 0.0
        for part, (own_x, own_y) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True), 1):
            with self.create_sync_context(part == parts):
                loss += self.add_gradients(own_x, own_y, parts, part == parts)
        return loss

    def create_sync_context(self, last: bool) -> AbstractContextManager:
        """Return the context that decides whether a part of a batch synchronises gradients.

        Gradients are synchronised only in the `last` part.
        """
        return nullcontext()

    def add_gradients(self, x: Tensor, y: Tensor, parts: int = 1, last: bool = True) -> Tensor:
        """Run forward and backward of one batch part; return its share of the mean loss.

        Args:
            x: Inputs.
            y: Targets.
            parts: Number of parts.
            last: Whether this is the last part.
        """
        mark = self.worker.mark_phase_end
        loss = self.forward(x, y)
        if parts > 1:
            loss = loss / parts
        mark("forward")
        if self.worker.settings.slowdown and last:
            self.worker.delay_step()
            mark("slowdown")
        self.backward(loss if self.scaler is None else self.scaler.scale(loss))
        mark("backward")
        return loss.detach()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `loss`, which the wrapped model synchronises between the workers."""
        loss.backward()

    def batches(self, order: Tensor, epoch: int) -> Iterator[Tensor]:
        w, s = self.worker, self.worker.settings
        steps = len(order) // s.global_batch
        mine = order[: steps * s.global_batch].view(steps, w.data_workers, self.samples_per_step(s))
        yield from mine[:, w.data_rank]

    def weights_and_buffers(self) -> list[Tensor]:
        return [*self.local, *self.list_changed_frozen_parameters(), *self.model.buffers()]

    def state_tensors(self) -> list[Tensor]:
        """Return the tensors of this worker's training state, always in the same number and order."""
        import torch

        from stratbench.telemetry.memory import get_optimizer_state

        state = get_optimizer_state(self.optimizer)
        entries = [state[t] for t in self.local if t in state]
        states = [entry[name] for entry in entries for name in sorted(entry)]
        others = [t for t in [*states, *self.extra_state()] if torch.is_tensor(t)]
        return [t.detach() for t in [*self.weights_and_buffers(), *others]]

    def export_counts(self) -> dict[str, Any]:
        """Return, as values for JSON, the counts since `reset` that are not in tensors."""
        scale = None if self.scaler is None else self.scaler.export_counts()
        return {"steps": self.steps, "scale": scale}

    def load_counts(self, counts: dict[str, Any]) -> None:
        """Restore the values that `export_counts` returned; it must be called after `reset`."""
        self.steps = counts["steps"]
        if self.scaler is not None:
            self.scaler.load_counts(counts["scale"])

    def optimizer_dtype(self) -> str | None:
        """Return the number formats of the optimizer's state per weight, or None without such state."""
        from stratbench.telemetry.memory import get_optimizer_state

        state = get_optimizer_state(self.optimizer).items()
        moments = (v for t, entry in state for v in entry.values() if v.shape == t.shape)
        return ", ".join(list_dtype_names(moments)) or None

    def report(self) -> dict[str, Any]:
        s, skipped = (
            self.worker.settings,
            0 if self.scaler is None else self.scaler.count_skipped_steps(),
        )
        return {
            "details": {"skipped_steps": skipped, "optimizer_dtype": self.optimizer_dtype()}
            | get_effective_dtypes(s.precision, self.worker.device),
            "evaluated_on": self.evaluated_on,
            "updates_applied": self.steps - skipped,
        }


def reduce_norm(norm: Tensor, workers: int, group: ProcessGroup | None = None) -> Tensor:
    """Return the norm of a vector that workers hold in shards. All workers must call it.

    Args:
        norm: Norm of this worker's shard.
        workers: Number of workers.
        group: Process group of the workers.
    """
    if workers == 1:
        return norm
    import torch.distributed as dist

    square = norm.square()
    dist.all_reduce(square, group=group)
    return square.sqrt()


def list_dtype_names(tensors: Iterable[Tensor]) -> list[str]:
    """Return the sorted names of the tensors' number formats, without repetition."""
    return sorted({str(t.dtype).removeprefix("torch.") for t in tensors})


def sparse_gradient_reason(names: Sequence[str], reason: str) -> str:
    """Return a sentence on parameters with sparse gradients, which are not supported, with the remedy."""
    listed = format_names(names)
    return f"the gradient of {listed} is sparse, which {reason}; build the layer with sparse=False"


def iter_unshardable_model_reasons(trial: Trial, as_parameters: bool = True) -> Iterator[str]:
    """Yield reasons why a strategy that shards parameters would train a user's model wrongly.

    Args:
        trial: Result of a trial step of the model.
        as_parameters: Whether the shards replace the parameters in the model's modules.
    """
    if trial.hooked_parameters:
        yield lost_hooks_reason(trial.hooked_parameters)
    if as_parameters and trial.parameters_read_elsewhere:
        yield wrong_reference_reason(trial.parameters_read_elsewhere)
    if as_parameters and trial.class_dependent_parameters:
        yield changed_class_reason(trial.class_dependent_parameters)
    if trial.overwritten_parameters:
        yield lost_changes_reason(trial.overwritten_parameters)
    if trial.repeatedly_added_parameters:
        yield describe_repeated_gradients(trial.repeatedly_added_parameters)


def lost_hooks_reason(names: Sequence[str]) -> str:
    """Return a sentence on gradient hooks that sharding the parameters would remove, with the remedy."""
    return (
        f"{format_names(names)} has a gradient hook, which would stay on the whole parameter while its "
        "shards are trained; change the gradient in forward instead (torch.where, detach, an autograd "
        "function)"
    )


def wrong_reference_reason(names: Sequence[str]) -> str:
    """Return a sentence on parameters that forward does not read from their module's attribute."""
    return (
        f"forward reads {format_names(names)} from a list or dictionary instead of its module's attribute, "
        "but only the attribute gets the shards that are trained; read the attribute, or use "
        "nn.ParameterList or nn.ParameterDict"
    )


def changed_class_reason(names: Sequence[str]) -> str:
    """Return a sentence on parameters whose class or attributes forward reads, with the remedy."""
    return (
        f"forward uses the class or an attribute of {format_names(names)}, which shards of a parameter do "
        "not have; store the attribute in the module"
    )


def lost_changes_reason(names: Sequence[str]) -> str:
    """Return a sentence on parameters that forward changes without effect, with the remedy."""
    return (
        f"forward writes to {format_names(names)}, and its changes are lost when the weights are gathered or "
        "pulled; store them in a buffer (register_buffer), or change how forward uses the parameter"
    )


def diverging_replicas_reason(names: Sequence[str]) -> str:
    """Return a sentence on parameters that forward changes depending on data, which makes replicas differ."""
    return (
        f"forward writes values to {format_names(names)} that depend on the batch, so the workers' replicas "
        "would diverge; store them in a buffer (register_buffer), or change how forward uses the parameter"
    )


def describe_repeated_gradients(names: Sequence[str]) -> str:
    """Return a sentence on gradients to which one backward adds repeatedly, with the remedy."""
    return (
        f"backward adds to the gradient of {format_names(names)} several times, and the first sum would be "
        "used as the whole gradient (reentrant checkpointing calls a block again); checkpoint with "
        "use_reentrant=False"
    )


def skipped_by_data_reason(names: Sequence[str]) -> str:
    """Return a sentence on modules that forward skips depending on its data, with the remedy."""
    return (
        f"not every batch uses {format_names(names)}: forward chooses by values of tensors. Workers have "
        "different data, so they would wait for each other forever or sum the gradients of different "
        "modules; call it always, and choose with torch.where or a factor of 0 or 1"
    )


def skipped_at_random_reason(modules: Sequence[str]) -> str:
    """Return a sentence on modules that forward skips at random, with the remedy."""
    return (
        f"not every forward calls {format_names(modules)}: each worker draws its own random numbers, so "
        "workers would wait for each other forever; call it always, and multiply its output by 0 or 1"
    )


def compile_if_requested(module: nn.Module, s: Settings) -> nn.Module:
    """Return a module, or its compiled form if the settings have `compile: true`.

    As PyTorch recommends, the wrapped module is compiled: DDP's buckets divide the graph (DDPOptimizer), and
    FSDP's hooks are between the graphs of its groups. All batches of a training have one shape. The evaluated
    module is the original, which is not compiled. Compilation happens in the first call.
    """
    if not s.compile:
        return module
    import torch

    from stratbench.workload.torch_internals import configure_compiler

    configure_compiler()
    return torch.compile(module, dynamic=False)


def describe_ring_traffic(sent_bytes: float) -> dict[str, Any]:
    """Return `Strategy.communication` for ring collectives, where a worker receives as much as it sends.

    See Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    return {
        "method": "ring",
        "sent_bytes_per_step": sent_bytes,
        "received_bytes_per_step": sent_bytes,
    }
