"""Defines a strategy (a way to train with N workers) as the training loop needs it.

The loop calls, in this order: `setup`; `save`, a few `step`s and `restore` (the warm-up); then for each epoch
`batches`, `step` for each batch, and `open_evaluation_model`; finally `report` and `close`. A strategy of
kind `server` has no common epochs: see the extension `servers`. No code in `step` may synchronise the device.
This module imports torch inside functions only: the workflow reads strategies' names and options on every
parse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stratbench.cell.options import Options, reset_inherited_attributes
from stratbench.strategies import refusals
from stratbench.strategies.mesh import Mesh
from stratbench.workload.tasks import Classification, Task

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from stratbench.cell.run_folder import RunFolder
    from stratbench.cell.settings import Settings
    from stratbench.strategies.saved import SavedState, Stateful
    from stratbench.telemetry.compiling import CompileWatch
    from stratbench.telemetry.heartbeat import Heartbeat
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
            yield refusals.sparse_gradient_reason(
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
