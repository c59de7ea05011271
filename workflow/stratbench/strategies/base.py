"""Defines the interface of a strategy: a way to train with several workers.

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
    """Properties of a strategy with certain options and workers, which each cell's record contains.

    Decision, audit and plan depend on these properties, and never on the strategy's name. A strategy that
    declares nothing has the defaults, which promise nothing. So no conclusion depends on such a strategy.
    """

    #: Whether the whole training ends as soon as one of its workers is lost.
    ends_with_a_worker: bool = True
    #: Whether the slowest worker determines the mean step time of all workers.
    waits_for_slowest: bool = True
    #: Whether the strategy, with only one worker, makes the same updates as plain synchronous SGD.
    is_synchronous_on_one_worker: bool = False
    #: Whether the strategy makes the same updates as DDP with as many workers, except for rounding. Models
    #: with BatchNorm get other updates with other numbers of workers, since each worker has its own
    #: statistics.
    equals_ddp: bool = False
    #: Whether parameters, gradients and optimizer state are divided among the workers.
    shards_states: bool = False
    #: Number of equal shards into which parameters and gradients are divided. None: the shards are uneven, or
    #: their number is unknown.
    weight_parts: int | None = 1
    #: Number of equal shards into which the optimizer's state is divided. None: the shards are uneven, or
    #: their number is unknown.
    optimizer_parts: int | None = 1
    #: Whether parameters are in flat tensors with padding between them, for which the optimizer has state,
    #: too.
    optimizer_padded: bool = False
    #: Whether sharded states are in host memory instead of device memory.
    states_on_host: bool = False
    #: Number of updates of the weights per global batch. None: the number varies or is unknown.
    updates_per_step: float | None = None
    #: Minimum number of copies of the trainable parameters that ring collectives move per step. In a ring of
    #: W workers, each sends (W - 1) / W of every copy. With sharded states, the gradients are one copy, and
    #: each gathering of all parameters is a further copy. None: there is no ring, or its traffic is unknown.
    ring_copies: float | None = None
    #: Size of further tensors that a worker keeps, such as `Strategy.extra_state`, as a number of copies of
    #: the trainable parameters. The parameters and the optimizer's moments do not count. The tensors are
    #: divided among workers as the optimizer's state is, and are part of that state. None: their size is no
    #: such multiple.
    kept_copies: float | None = 0.0


@dataclass
class Worker:
    """A worker process as a strategy sees it: settings, rank, device, shard groups and callbacks."""

    #: Settings of the cell.
    settings: Settings
    #: Number of this worker among all workers, from 0.
    rank: int
    #: Number of all workers of the cell.
    world_size: int
    #: Number of workers on this worker's node.
    local_world_size: int
    #: Device that this worker computes on.
    device: torch.device
    #: Folder of the files of this run of the cell.
    folder: RunFolder
    #: Name and modules of each shard group of the model, in the order of forward.
    wrap_groups: list[tuple[str, list[nn.Module]]]
    #: Function that a step calls between forward and backward. The function sleeps if the study slows this
    #: worker.
    delay_step: Callable[[], None] = lambda: None
    #: Function that a step calls at the end of each of its phases, with the name of the phase.
    mark_phase_end: Callable[[str], None] = lambda phase: None
    #: Task that the model learns, with its loss and score.
    task: Task = field(default_factory=Classification)
    #: Whether the task returns a batch's loss as two values: a sum and the weight to divide it by
    #: (`tasks.LossKind`).
    has_weighted_loss: bool = False
    #: Number of steps of the whole training. A schedule changes the learning rate over these steps.
    total_steps: int = 1
    #: Counter of torch.compile's compilations. None: the settings do not use torch.compile.
    compile_watch: CompileWatch | None = None
    #: Heartbeat to update at each progress, by which the agent detects a hang. None: no process reads it.
    heartbeat: Heartbeat | None = None
    #: Results of a trial step of a user's own model. None: the model is built-in.
    trial: Trial | None = None
    #: Division of the workers into replicas, stages and tensor workers. None: each worker has a replica of
    #: the model.
    mesh: Mesh | None = None
    #: SHA-256 of the model's initial weights. All workers build these weights from the same seed.
    initial_weights_hash: str = ""
    #: Shape of one sample as the model takes it, without the batch dimension.
    input_shape: tuple[int, ...] = ()
    #: Function that opens the worker's channel to parameter servers that may restart. Its argument is a
    #: function that connects to the servers. That function gets the servers' incarnation and a time limit in
    #: seconds. None: the strategy connects only once.
    make_server_channel: Callable[[Callable[[int | None, float], Any]], Any] | None = None

    def __post_init__(self) -> None:
        self.mesh = self.mesh or Mesh(self.world_size)

    @property
    def data_rank(self) -> int:
        """Index, from 0, of this worker's replica, and of its share of each batch."""
        return self.mesh.get_coordinate(self.rank).replica

    @property
    def random_stream_index(self) -> int:
        """Number to add to the random seed, equal for workers that divide the same layers."""
        return self.rank // self.mesh.tensor

    @property
    def data_workers(self) -> int:
        """Number of replicas of the model. Each trains on its own share of every batch."""
        return self.mesh.replicas


#: Names of the phases of a step before backward, except for the artificial slowdown of a worker.
BEFORE_BACKWARD = ("data", "forward")

#: Reason why workers cannot join and leave if they hold shards of the model's states (for `Strategy.rigid`).
STATE_IN_PARTS = "each worker holds a part of the state, which is lost with the worker"

#: Names of class attributes that subclasses of a strategy do not inherit. They claim something that a
#: subclass may not fulfil.
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
    """One way to train with several workers; the base class of all strategies.

    A subclass sets the class attributes and is registered in `__init__`. With its own `summary`, it is a
    strategy of its own, and declares its own `CLAIMS`.
    """

    #: How the strategy trains. `collective`: all workers take each step together. `server`: workers send
    #: gradients to parameter servers and receive weights. `own`: a user's program trains with its own loop.
    kind: ClassVar[Literal["collective", "server", "own"]] = "collective"
    #: Packages, as `name==version`, that the strategy needs and stratbench itself does not
    #: (`strategies/needs.py`).
    needs: ClassVar[tuple[str, ...]] = ()
    #: Path of the strategy's own training loop, as "module:function". None: the strategy uses
    #: `train.loop.train`.
    loop: ClassVar[str | None] = None
    #: Name of the update policy of the strategy's parameter servers, or None without servers.
    policy: ClassVar[str | None] = None
    #: Group of similar strategies to which this strategy belongs. The group determines the colour in figures;
    #: `other` is black.
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
    #: Number of the strategy's marker in figures, among the markers of its family. A fixed number keeps the
    #: marker even if an extension with other strategies of the family is deleted. None: the next free number,
    #: in the registry's order.
    mark: ClassVar[int | None] = None
    #: Description of the strategy in one line, for documentation and reports.
    summary: ClassVar[str]
    #: Formula by which the weights W are updated, for reports. g is a gradient, velocity is the direction of
    #: SGD with momentum, and N is the number of workers. lr is the learning rate for a global batch, and eta
    #: for one push of a worker.
    rule: ClassVar[str] = ""
    #: Largest number of workers that the strategy can use, or None without a limit.
    max_workers: ClassVar[int | None] = None
    #: Whether the strategy needs a torch.distributed process group.
    needs_group: ClassVar[bool] = True
    #: Whether the strategy shards the model by its wrap groups (modules that are gathered together). The
    #: record then lists these groups.
    uses_wrap_groups: ClassVar[bool] = False
    #: Whether the strategy divides the model's layers among workers. A model must then declare how to divide
    #: it.
    divides_network: ClassVar[bool] = False
    #: Whether a worker waits for activations from other workers. No computation then overlaps with their
    #: transfer.
    waits_for_activations: ClassVar[bool] = False
    #: Whether a rank computes and stores the same with any number of workers. The plan then runs the strategy
    #: with only one number of workers.
    alike_on_any_count: ClassVar[bool] = False
    #: Names of the collectives that a step of the strategy may start (`CollectiveCall.collective_name`).
    #: `stratbench links` measures these. None: the names are unknown, and `links` measures all kinds.
    collectives: ClassVar[tuple[str, ...] | None] = None
    #: Names of the phases of a step that contain no wait for other workers. Their times show how fast each
    #: worker computes. Empty: each phase may contain waits.
    own_phases: tuple[str, ...] = ()
    #: Clause that says why workers cannot join and leave during the training. None: they can join and leave.
    rigid: ClassVar[str | None] = "it does not say that workers may join and leave while it trains"
    #: Clause that says why an interrupted training restarts from step 0. None: the training resumes from its
    #: saved state.
    begins_anew: ClassVar[str | None] = "it does not say that all its state can be kept"
    #: Whether the first steps of a training do other work than later steps. The plan then predicts a later
    #: step.
    warms_up: ClassVar[bool] = False
    #: Whether the strategy uses a gradient of zeros for a parameter that has no gradient in a step. If not,
    #: the parameter stays unchanged.
    updates_by_zeros: ClassVar[bool] = False
    #: Short text that says whose buffers are used, if forward writes different values to them on each worker
    #: (such as BatchNorm's statistics).
    buffers_note: ClassVar[str] = "each worker keeps its own"
    #: Short text that says whose weights and BatchNorm statistics are evaluated.
    evaluated_on: ClassVar[str] = "the only worker's weights and BatchNorm statistics"
    #: Sentence that names the phases of a step in which communication is contained and cannot be separated.
    #: None: there are no such phases.
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
        """Return all options for a cell with `gpus` workers; some may follow from other options."""
        return options

    @classmethod
    def check(cls, name: str, options: dict[str, Any], gpus: int, per_worker_batch: int) -> None:
        """Raise ValueError if the options are not valid for a cell.

        Args:
            name: Name of the strategy.
            options: All options of the strategy.
            gpus: Number of workers.
            per_worker_batch: Number of samples of a worker per step.
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
    def fixed_worker_count_reason(
        cls, options: dict[str, Any], values: Mapping[str, Any]
    ) -> str | None:
        """Return why workers cannot join or leave during the training, or None if they can.

        Args:
            options: All options of the strategy.
            values: Values of the experiment.
        """
        return cls.rigid

    @classmethod
    def restart_reason(cls, options: dict[str, Any], values: Mapping[str, Any]) -> str | None:
        """Return why an interrupted training restarts from step 0, or None if it can resume.

        Args:
            options: All options of the strategy.
            values: Values of the experiment.
        """
        return cls.begins_anew

    @classmethod
    def packages(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the packages that the strategy needs with these options, as `name==version`."""
        return cls.needs

    @classmethod
    def list_user_files(cls, options: Mapping[str, Any]) -> dict[str, Path]:
        """Return the user's files that the strategy's options name, by file name.

        If one of these files changes, cells are trained again.
        """
        return {}

    @classmethod
    def iter_unmet_requirements(cls, options: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence for each thing that the options require and this machine lacks."""
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

    def free_batch_dependent_memory(self) -> None:
        """Free everything that depends on the batch size, which may change with the next step."""

    @classmethod
    def samples_per_step(cls, s: Settings) -> int:
        """Return the number of samples that a worker computes in one call of `step`."""
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
    def num_uncompressed_steps(self) -> int:
        """Number of steps at the beginning that only average gradients, as plain data parallelism does."""
        return 0

    @property
    def num_batch_parts(self) -> int:
        """Number of equal parts into which the strategy divides each batch.

        With gradient accumulation, the strategy divides each accumulated micro-batch instead.
        """
        return 1

    def bubble_share(self, gpus: int) -> float | None:
        """Return the share of a step in which a worker waits for other pipeline stages.

        The prediction assumes that all layers are equally slow and that transfers take no time. The result is
        None if the fraction is unknown.
        """
        return 0.0

    @property
    def steps_that_change_the_work(self) -> tuple[int, ...]:
        """Indices of the steps at which the kind of work changes, such as to compression."""
        return (0,)

    @property
    def steps_until_work_repeats(self) -> int:
        """Number of steps in one period of the work, such as from exchange to exchange.

        It is 1 if all steps are alike.
        The work repeats only from the last index of `steps_that_change_the_work` on.
        """
        return 1

    def choose_discarded_and_timed_steps(self, discarded: int, timed: int) -> tuple[int, int]:
        """Return how many steps of a segment are discarded, and how many are timed.

        A segment is a short timed run. Whole periods of the strategy (`steps_until_work_repeats`) are timed.
        The first steps are discarded, because most steps of a training do other work.

        Args:
            discarded: Smallest number of steps to discard.
            timed: Smallest number of steps to time.
        """
        first, period = (
            max(self.steps_that_change_the_work[-1], self.num_uncompressed_steps),
            self.steps_until_work_repeats,
        )
        before = first + -(-max(0, discarded - first) // period) * period
        return before, -(-timed // period) * period

    def count_exchanges(self, steps: int) -> int:
        """Return in how many of the first `steps` steps of a training the workers communicate."""
        return steps

    def setup(self, model: nn.Module, worker: Worker) -> None:
        """Wrap the model, which is already on the device, create the optimizer, and call `reset`."""
        raise NotImplementedError

    def weights_and_buffers(self) -> list[Tensor]:
        """Return the weights and buffers that this worker holds, as writable tensors."""
        raise NotImplementedError

    @property
    def adds_to_gradients_repeatedly(self) -> bool:
        """Whether one backward adds to a gradient several times before it is complete."""
        return bool(self.worker.trial and self.worker.trial.repeatedly_added_parameters)

    def list_changed_frozen_parameters(self) -> list[Tensor]:
        """Return the frozen parameters that forward changes; like buffers, they are saved and restored."""
        written = set(self.worker.trial.overwritten_parameters if self.worker.trial else ())
        named = self.model.named_parameters() if written else ()
        return [p for name, p in named if name in written and not p.requires_grad]

    def extra_state(self) -> list[Tensor | Stateful]:
        """Return state to restore after warm-up besides weights, buffers and the optimizer's state.

        The list has tensors, or objects with `state_dict` and `load_state_dict`, always in the same order.
        Tensors count as the optimizer's state in the record and in the plan; `Traits.kept_copies` has
        their size.
        """
        return []

    def list_persistent_tensors(self) -> dict[str, list[Tensor]]:
        """Return, by purpose, further tensors that persist between steps, such as gradient buckets.

        Parts of the model, of the optimizer and of `extra_state` are left out. The purposes are `gradients`,
        `buckets`, `communication` and `received`; the plan shows the memory of each. These tensors need not
        be restored. They are not model states, and count in the record's peak memory only.
        """
        return {}

    def list_late_tensors(self) -> list[Tensor]:
        """Return the persistent tensors that only a step after the first one creates."""
        return []

    def reset(self) -> None:
        """Reset the state that `restore` does not restore.

        This state consists of step counts, the loss scale and the state of hooks.
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
        saved.restore_into(self.weights_and_buffers(), self.optimizer, self.extra_state())
        self.reset()

    def batches(self, order: Tensor, epoch: int) -> Iterator[Tensor]:
        """Yield the indices of this worker's samples for each step of an epoch, shape [samples_per_step].

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
        """Compute a batch's gradients without updating weights; return those that this worker holds.

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

    def compute_model_state_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's parameters, gradients, optimizer state and buffers.

        The optimizer state includes the tensors of `extra_state`.
        """
        import torch

        from stratbench.telemetry.memory import measure_model_state_bytes

        states = measure_model_state_bytes(self.model, self.optimizer)
        tensors = filter(torch.is_tensor, self.extra_state())
        return states | {
            "optimizer_bytes": states["optimizer_bytes"] + sum(t.nbytes for t in tensors)
        }

    @property
    def is_evaluator(self) -> bool:
        """Whether this worker reports the results for all workers. This is known only after the training."""
        return self.worker.rank == 0

    def report(self) -> dict[str, Any]:
        """Return the strategy's entries in the record: `details`, `evaluated_on`, `updates_applied`."""
        raise NotImplementedError

    def communication(self) -> dict[str, Any] | None:
        """Return bytes and times of this rank's communication per training step. None if unknown.

        The result has `sent_bytes_per_step` and `received_bytes_per_step` (means over ranks) with their
        `method`. If known, it also has mean times per step: `total_ms` of communication, of which
        `overlapped_ms` run concurrently with computation and `exposed_ms` do not, or `server_wait_ms`. The
        method is called once, after the timed training.
        """
        return None

    def check_equal_collectives(self) -> None:
        """Raise Refused if workers called different collectives. All workers call this between epochs."""

    def close(self) -> None:
        """Release the resources that `setup` acquired, after the last measurement."""
