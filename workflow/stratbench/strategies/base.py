"""The protocol between the training loop and a strategy, a way to train with N workers.

The loop calls, in this order: `setup`; `save`, a few `step`s and `restore` (the warm-up); then for each epoch
`batches`, `step` for each batch, and `evaluating`; finally `report` and `close`. A strategy of kind `server`
has no common epochs: see `strategies/ps.py`. Nothing in `step` may synchronise the device. This module
imports torch inside functions only: the workflow reads strategies' names and options on every parse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stratbench.cell.options import Options, disown
from stratbench.cell.text.words import names_text
from stratbench.strategies.mesh import Mesh
from stratbench.workload.network.precision import autocast, effective_dtypes, scores_for_loss
from stratbench.workload.tasks import Classification, Task, loss_and_weight, ratio

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

    Decision, audit and plan depend on these and never on the strategy's name. The defaults are for a strategy
    that declares nothing: nothing is expected of it, and no conclusion rests on it.
    """

    #: Whether the job ends when one of several workers is lost.
    ends_with_a_worker: bool = True
    #: Whether, in the long run, all workers go at the pace of the slowest.
    waits_for_slowest: bool = True
    #: Whether one worker by itself trains as plain synchronous SGD does.
    synchronous_alone: bool = False
    #: Whether its updates on this many workers are those of DDP, but for rounding. With BatchNorm,
    #: whose statistics are each worker's own, that holds among equal numbers of workers only.
    equals_ddp: bool = False
    #: Whether parameters, gradients and optimizer state are divided among the workers.
    shards_states: bool = False
    #: Number of shards of parameters and gradients, one per worker. None: uneven or unknown, a worker has
    #: between an equal shard and the whole.
    weight_parts: int | None = 1
    #: The same of the optimizer's state.
    optimizer_parts: int | None = 1
    #: Whether the optimizer's state covers the padding between tensors in a flat one.
    optimizer_padded: bool = False
    #: Whether sharded states are in the host's memory and not in the device's.
    states_on_host: bool = False
    #: Updates that each global batch makes; None: not fixed, or unknown.
    updates_per_step: float | None = None
    #: Copies of the trainable parameters, times (W - 1) / W, that each of W workers at least sends per step
    #: by ring collectives; with sharded states, all but one are of all parameters, which are gathered. None:
    #: no ring, or unknown.
    ring_copies: float | None = None
    #: Copies of the trainable parameters beside them and the optimizer's moments, such as those that
    #: `Strategy.extra_state` names, divided as the optimizer's state is: they count as part of it. None: no
    #: such number, or unknown.
    kept_copies: float | None = 0.0


@dataclass
class Worker:
    """One worker process as the strategy sees it."""

    settings: Settings
    rank: int
    world_size: int
    #: Number of workers on this worker's node.
    local_world: int
    device: torch.device
    folder: RunFolder
    #: The model's sharding groups in forward order: (label, modules).
    wrap_groups: list[tuple[str, list[nn.Module]]]
    #: Called between forward and backward; sleeps when the study slows this worker.
    delay: Callable[[], None] = lambda: None
    #: Called with a phase's name at its end within a step.
    mark: Callable[[str], None] = lambda phase: None
    #: The task.
    task: Task = field(default_factory=Classification)
    #: Whether its loss is a sum and a weight (`tasks.LossKind`).
    weighs: bool = False
    #: Steps of all epochs together, over which a schedule changes the learning rate.
    total_steps: int = 1
    #: Counts compilations, if the settings have torch.compile.
    watch: CompileWatch | None = None
    #: Heartbeat to update on progress, or None without a reader.
    heartbeat: Heartbeat | None = None
    #: A step of the network, if it is a user's.
    trial: Trial | None = None
    #: Division of the workers; None: each has a copy of the model.
    mesh: Mesh | None = None
    #: Hash of the network's initial weights, which all workers build from one seed.
    start: str = ""
    #: Shape of one sample, as the model takes it.
    input_shape: tuple[int, ...] = ()
    #: Makes its channel to parameter servers of a function that connects to an incarnation of them within so
    #: many seconds; None: that function does.
    channel_by: Callable[[Callable[[int | None, float], Any]], Any] | None = None

    def __post_init__(self) -> None:
        self.mesh = self.mesh or Mesh(self.world_size)

    @property
    def data_rank(self) -> int:
        """Number of this worker's part among the `data_workers` parts of each batch."""
        return self.mesh.place(self.rank).replica

    @property
    def draws(self) -> int:
        """Number of its random stream, shared by workers with equal layers and samples."""
        return self.rank // self.mesh.tensor

    @property
    def data_workers(self) -> int:
        """Into how many shares the workers divide each batch: the copies of the network."""
        return self.mesh.replicas


#: The phases of a step before backward, without what the study slows there.
BEFORE_BACKWARD = ("data", "forward")

#: Why workers with shards of the model's states cannot join and leave (`Strategy.rigid`).
STATE_IN_PARTS = "each worker holds a part of the state, which ends with the worker"

#: Declarations of a strategy that derived ones do not inherit.
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
    """One way to train with N workers. Subclass, set the class attributes, register in `__init__`.

    With a `summary` of its own a subclass is a strategy of its own, and makes its own `CLAIMS`.
    """

    #: `collective`: all workers step together; `server`: workers talk to parameter servers; `own`: a
    #: program of the user's trains, whose loop is its own.
    kind: ClassVar[Literal["collective", "server", "own"]] = "collective"
    #: Distributions beyond stratbench's own that it needs, pinned: `name==version` (`strategies/needs.py`).
    needs: ClassVar[tuple[str, ...]] = ()
    #: The policy by which its servers update the weights (`ps/policies/policies.py`); None: no servers.
    policy: ClassVar[str | None] = None
    #: Family of the strategy: figures give each family a hue, `other` black.
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
    #: Its number among its family's marks, where several extensions share the family: deleting one leaves
    #: the others' marks. None: the next free number, in the registry's order.
    mark: ClassVar[int | None] = None
    #: One line for documentation and reports.
    summary: ClassVar[str]
    #: One line for reports: how an update of the weights W comes about. g: a gradient; velocity: SGD's
    #: direction from it; lr: the learning rate of a global batch, eta that of a push; N workers.
    rule: ClassVar[str] = ""
    #: The most workers it can use; None: no limit.
    max_workers: ClassVar[int | None] = None
    #: Whether it needs a torch.distributed process group.
    needs_group: ClassVar[bool] = True
    #: Whether it shards the model by its wrap groups, which are then in the record.
    uses_wrap_groups: ClassVar[bool] = False
    #: Whether it divides the model itself, which must declare how; others take any model.
    divides_network: ClassVar[bool] = False
    #: Whether a worker waits for the activations that others send, so that no computation hides them.
    waits_for_activations: ClassVar[bool] = False
    #: Whether a rank does and holds the same on any number of workers, so that the plan predicts one.
    alike_on_any_count: ClassVar[bool] = False
    #: The kinds of collectives that its steps may start (`CollectiveCall.kind`), for the measurement of
    #: links; None: it does not say, and all are measured.
    collectives: ClassVar[tuple[str, ...] | None] = None
    #: The phases of a step without waits for other workers: they show how the workers' computation times
    #: differ. Empty: each may contain waits.
    own_phases: tuple[str, ...] = ()
    #: Why its workers cannot join and leave while it trains, in a clause; None: they can.
    rigid: ClassVar[str | None] = "it does not say that workers may join and leave while it trains"
    #: Why a training that was ended restarts from step 0, in a clause; None: its state can be saved.
    begins_anew: ClassVar[str | None] = "it does not say that all its state can be kept"
    #: Whether its first steps do what later ones do not: the plan then looks at later ones.
    warms_up: ClassVar[bool] = False
    #: Whether a parameter that got no gradient in a step is updated as by one of zeros; else it is left.
    updates_by_zeros: ClassVar[bool] = False
    #: Short text on buffers that forward writes, such as BatchNorm's statistics.
    buffers_note: ClassVar[str] = "each worker keeps its own"
    #: Whose weights and BatchNorm statistics are evaluated.
    evaluated_on: ClassVar[str] = "the only worker's weights and BatchNorm statistics"
    #: Sentence on parts of a step's time that the breakdown cannot separate; None if there are none.
    breakdown_note: ClassVar[str | None] = None
    Options: ClassVar[type[Options]] = Options
    #: The model given to `setup`.
    model: nn.Module
    #: The optimizer of this worker's weights, from `setup` on; None if there is none.
    optimizer: torch.optim.Optimizer | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        disown(cls, CLAIMS)

    def __init__(self, options: Options) -> None:
        self.options = options

    @classmethod
    def resolve(cls, options: dict[str, Any], gpus: int) -> dict[str, Any]:
        """Return the options for a cell on `gpus` workers, completed by derived values."""
        return options

    @classmethod
    def check(cls, name: str, options: dict[str, Any], gpus: int, per_worker_batch: int) -> None:
        """Raise ValueError when options do not suit a cell.

        Args:
            name: Name of the strategy.
            options: All of its options.
            gpus: Number of workers.
            per_worker_batch: Samples of a worker's step.
        """

    @classmethod
    def check_nodes(cls, options: dict[str, Any], gpus: int, per_node: int) -> None:
        """Raise ValueError when options do not suit the nodes.

        Args:
            options: All of its options.
            gpus: Number of workers.
            per_node: Maximum number of workers per node.
        """

    @classmethod
    def refusals(cls, options: dict[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
        """Yield why it does not support an experiment's `values`, each as `.key = ...: why`."""
        yield from ()

    @classmethod
    def rigid_reason(cls, options: dict[str, Any], values: Mapping[str, Any]) -> str | None:
        """Return `rigid` as of all its `options` and an experiment's `values`."""
        return cls.rigid

    @classmethod
    def restart_reason(cls, options: dict[str, Any], values: Mapping[str, Any]) -> str | None:
        """Return `begins_anew` as of all its `options` and an experiment's `values`."""
        return cls.begins_anew

    @classmethod
    def packages(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the distributions that it needs with these options: `needs`, and what options name."""
        return cls.needs

    @classmethod
    def files(cls, options: Mapping[str, Any]) -> dict[str, Path]:
        """Return the user's files that its options name, by name. If one changes, cells are trained again."""
        return {}

    @classmethod
    def faults_here(cls, options: Mapping[str, Any]) -> Iterator[str]:
        """Yield sentences on what its options need and this machine lacks, before any training."""
        yield from ()

    def refusals_of_model(self, model: nn.Module, worker: Worker) -> Iterator[str]:
        """Yield why it cannot train `model`, with the remedy. Called before `setup`, with `worker.trial`."""
        s, sparse = worker.settings, worker.trial.sparse
        by = {
            "AdamW does not take": s.optimizer == "adamw",
            "weight_decay cannot be added to": bool(s.weight_decay),
            "max_grad_norm cannot measure": s.max_grad_norm is not None,
        }
        if sparse and any(by.values()):
            yield sparse_gradient(sparse, next(reason for reason, set_ in by.items() if set_))

    @classmethod
    def on_fakes(cls) -> AbstractContextManager:
        """Return a context in which its libraries support fake tensors and groups."""
        return nullcontext()

    def forget_batch(self) -> None:
        """Free what was made for a batch's size, so that the next step makes its own."""

    @classmethod
    def samples_per_step(cls, s: Settings) -> int:
        """Return the samples that a worker computes on in one `step`, also outside of training."""
        return s.per_worker_batch

    def traits(self, gpus: int) -> Traits:
        """Return its traits on `gpus` workers."""
        return Traits()

    def mesh(self, gpus: int) -> Mesh:
        """Return how `gpus` workers divide the work.

        Raises:
            ValueError: If its options do not allow it.
        """
        return Mesh(gpus)

    @property
    def plain_steps(self) -> int:
        """Number of initial steps with plain gradient averaging, before the strategy's own kind."""
        return 0

    @property
    def parts(self) -> int:
        """Equal parts of a step's batch, or of each part of it (`gradient_accumulation_steps`)."""
        return 1

    def bubble_share(self, gpus: int) -> float | None:
        """Return the fraction of a step spent waiting for others' layers, or None.

        Return None if unknown.

        All layers count as equal, and transfers as free.
        """
        return 0.0

    @property
    def first_steps(self) -> tuple[int, ...]:
        """Number of the first step of each kind in the training, for the plan."""
        return (0,)

    @property
    def period(self) -> int:
        """Steps after which its work repeats, once its last kind of step has begun."""
        return 1

    def own_length(self, discarded: int, timed: int) -> tuple[int, int]:
        """Return the steps to discard and to time in a segment, at least those required.

        Whole periods of its own are timed. Its first steps are not, because they are of another kind than
        most of a training's.
        """
        first, period = max(self.first_steps[-1], self.plain_steps), self.period
        before = first + -(-max(0, discarded - first) // period) * period
        return before, -(-timed // period) * period

    def exchanges(self, steps: int) -> int:
        """Return in how many of a training's `steps` the workers communicate."""
        return steps

    def setup(self, model: nn.Module, worker: Worker) -> None:
        """Wrap `model` (already on the device), make the optimizer, and at last `reset`."""
        raise NotImplementedError

    def weights_and_buffers(self) -> list[Tensor]:
        """Return this worker's part of the model, as writable tensors."""
        raise NotImplementedError

    @property
    def adds_again(self) -> bool:
        """Whether backward adds to a gradient several times, so that only its end is final."""
        return bool(self.worker.trial and self.worker.trial.again)

    def frozen_written(self) -> list[Tensor]:
        """Return frozen parameters that forward changes: they are saved and restored as buffers are."""
        written = set(self.worker.trial.overwritten if self.worker.trial else ())
        named = self.model.named_parameters() if written else ()
        return [p for name, p in named if name in written and not p.requires_grad]

    def extra_state(self) -> list[Tensor | Stateful]:
        """Return its state beyond weights, buffers and the optimizer's, to be restored after warm-up.

        These are tensors, or objects with `state_dict` and `load_state_dict`, always as many, in one order.
        Tensors count as the optimizer's state, in the record and in the plan; `Traits.kept_copies` has their
        size.
        """
        return []

    def kept_tensors(self) -> dict[str, list[Tensor]]:
        """Return tensors that persist between steps beyond parameters, buffers and optimizer state.

        They are by purpose (`gradients`, `buckets`, `communication`, `received`), which the plan names with
        their memory. Nothing in them needs to be restored. They are no model states, and count in the
        record's peak only.
        """
        return {}

    def late_tensors(self) -> list[Tensor]:
        """Return those persistent tensors that do not exist before some later step."""
        return []

    def reset(self) -> None:
        """Reset what `restore` does not restore: counts of steps, loss scale, the state of hooks."""

    def save(self) -> SavedState:
        """Return a copy in host memory of all that a warm-up would change."""
        from stratbench.strategies.saved import SavedState
        from stratbench.workload.network.changes import Attributes

        names = self.worker.trial.attributes if self.worker.trial else ()
        attributes = Attributes(self.model, names) if names else None
        tensors = self.weights_and_buffers()
        return SavedState(tensors, self.optimizer, self.extra_state(), attributes)

    def restore(self, saved: SavedState) -> None:
        """Undo everything done since `save`, bit for bit, and `reset`."""
        saved.put_back(self.weights_and_buffers(), self.optimizer, self.extra_state())
        self.reset()

    def batches(self, order: Tensor, epoch: int) -> Iterator[Tensor]:
        """Yield this worker's sample numbers, shape [samples_per_step], for each of its steps in `epoch`.

        `order`: the epoch's shuffled sample numbers, shape [train_samples], equal on all workers.
        """
        raise NotImplementedError

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Return one training step; returns the batch's mean loss on the device, unsynchronised.

        The mean over the workers is the global batch's, also of a task that weighs.
        """
        raise NotImplementedError

    def gradients_of(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the gradients of a step, as far as this worker holds them.

        Nothing is updated.

        Parameters without a gradient have zeros. The list is empty if the strategy does not know its
        gradients; compiled code is then not checked.
        """
        return []

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the model in evaluation mode, with the weights and buffers that are evaluated."""
        self.model.eval()
        try:
            yield self.model
        finally:
            self.model.train()

    def model_states(self) -> dict[str, int]:
        """Return the bytes of this rank's parameters, gradients, optimizer state and buffers.

        The tensors of `extra_state` are in the optimizer's.
        """
        import torch

        from stratbench.telemetry.memory import model_states

        states = model_states(self.model, self.optimizer)
        tensors = filter(torch.is_tensor, self.extra_state())
        return states | {
            "optimizer_bytes": states["optimizer_bytes"] + sum(t.nbytes for t in tensors)
        }

    def report(self) -> dict[str, Any]:
        """Return its further entries of the record: `details`, `evaluated_on`, `updates_applied`."""
        raise NotImplementedError

    def communication(self) -> dict[str, Any] | None:
        """Return this rank's communication per training step, or None if unknown.

        It has `sent_bytes_per_step` and `received_bytes_per_step` (means over ranks) with their `method`. If
        known, it also has mean times per step: `total_ms` of communication, of which `overlapped_ms` run
        concurrently with computation and `exposed_ms` do not, or `server_wait_ms`. Called once, after the
        timed training.
        """
        return None

    def check_alike(self) -> None:
        """Between epochs: Refused where the workers did not do the same though they had to."""

    def close(self) -> None:
        """Release what `setup` took, after the last measurement."""


class Collective(Strategy):
    """Base of the strategies in which all workers take every step together.

    A subclass wraps the model. Forward, backward, precision and the optimizer's step are the same for all, so
    that a comparison of two strategies compares nothing else.
    """

    module: nn.Module  # the wrapped model
    compiled: nn.Module  # what a step calls: it, or what compiles it
    #: Wrapper that makes the model return its loss (`loss_chunks`); None: it returns scores.
    chunked: ChunkedLoss | None = None

    def wrap(self, model: nn.Module, worker: Worker) -> nn.Module:
        """Return the module whose forward and backward synchronise the workers."""
        raise NotImplementedError

    def setup(self, model: nn.Module, worker: Worker) -> None:
        self.worker, self.model = worker, model
        if any(True for _ in model.buffers()):  # another worker's may be waited for before forward
            self.own_phases = ()
        if worker.settings.loss_chunks > 1:
            self.chunked = self.make_chunked_loss()
        self.module = self.wrap(model, worker)
        self.compiled = compiled(self.module, worker.settings)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.local = self.local_tensors()
        self.optimizer = self.make_optimizer()
        self.reset()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of the tensors in `self.local`, by the cell's settings.

        Nowhere else is one built. What it keeps should be there from the start, as the moments are
        here: the plan takes the first step for one like any other.
        """
        kind, settings = self.optimizer_kind()
        optimizer = kind(self.local, **settings)
        self.begin_states(optimizer, self.local)
        return optimizer

    def optimizer_kind(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Return the optimizer's class, and its arguments but for the tensors."""
        import torch

        s = self.worker.settings
        common = {
            "lr": s.lr,
            "weight_decay": s.weight_decay,
            "foreach": s.optimizer_impl == "foreach",
            # Fused kernels take the loss scaler's verdict on the device, without a synchronisation.
            "fused": s.optimizer_impl == "fused",
        }
        if s.optimizer == "adamw":
            return torch.optim.AdamW, common | {"betas": tuple(s.betas), "eps": s.eps}
        if self.local[0].device.type != "cuda" or any(
            getattr(module, "sparse", False) for module in self.model.modules()
        ):
            common["fused"] = False
        return torch.optim.SGD, common | {"momentum": s.momentum, "nesterov": s.nesterov}

    def begin_states(self, optimizer: torch.optim.Optimizer, tensors: Iterable[Tensor]) -> None:
        """Give `optimizer` what it keeps for each of `tensors`, as its first step would."""
        import torch

        s = self.worker.settings
        fused = s.optimizer_impl == "fused"
        for t in tensors:
            if s.optimizer == "adamw":
                optimizer.state[t] = {
                    # Kernels read it on the device; the others compute with it on the host.
                    "step": torch.zeros(
                        (), dtype=torch.float32, device=t.device if fused else "cpu"
                    ),
                    "exp_avg": torch.zeros_like(t),
                    "exp_avg_sq": torch.zeros_like(t),
                }
            elif s.momentum:
                # From zero, momentum becomes the first gradient, as in torch. But if the loss scaler skips
                # the first step, torch's fused SGD continues with uninitialised memory.
                optimizer.state[t]["momentum_buffer"] = torch.zeros_like(t)

    def reset(self) -> None:
        self.steps, self.scaler = 0, None
        #: The weights of the parts of the current batch (tasks that return a sum and a weight).
        self.part_weights: list[Tensor] = []
        if self.worker.settings.precision == "fp16":
            from stratbench.strategies.scaler import SharedScaler

            parts = self.traits(self.worker.world_size).optimizer_parts
            self.scaler = SharedScaler(self.worker.device, shared=parts is None or parts > 1)

    def local_tensors(self) -> list[Tensor]:
        """Return the tensors that this rank's optimizer updates; SGD is element-wise, so shards will do."""
        return self.parameters

    def link_gradients(self) -> None:
        """Hand the gradients to `local_tensors`, where those are not the parameters themselves."""

    def before_update(self) -> None:
        """Set the step's learning rate and clip the gradients, where the settings ask for it."""
        s = self.worker.settings
        if s.changes_lr:
            share = s.share_of_lr(self.steps, self.worker.total_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = s.lr * share
        if s.max_grad_norm is not None:
            self.clip(s.max_grad_norm)

    def clip(self, norm: float) -> None:
        """Scale the gradients down to `norm`, where theirs is larger; unsynchronised."""
        from torch.nn.utils import clip_grads_with_norm_

        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        clip_grads_with_norm_(self.local, norm, self.gradient_norm())

    def gradient_norm(self) -> Tensor:
        """Return the Euclidean norm of the full gradient, on the device, unsynchronised."""
        from torch.nn.utils import get_total_norm

        return get_total_norm([t.grad for t in self.normed_tensors() if t.grad is not None])

    def normed_tensors(self) -> list[Tensor]:
        """Return the tensors whose gradients this worker adds to the norm; replicated ones count once."""
        return self.local

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with autocast(self.worker.settings.precision, self.worker.device):
            return self.mean_loss(x, y)

    def mean_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a part of the batch, in the model's number format."""
        if self.chunked is None:
            return self.loss_of(self.compiled(x), y)
        with self.chunked.against(y):
            return self.compiled(x)

    def make_chunked_loss(self) -> ChunkedLoss:
        """Have the network, not wrapped yet, compute its loss in parts of the positions."""
        import torch

        from stratbench.workload.network.chunked_loss import ChunkedLoss

        worker = self.worker
        shape = (1, *worker.input_shape)
        tokens = torch.empty(shape, dtype=torch.int64, device=worker.device).zero_()
        return ChunkedLoss(self.model, tokens, worker.settings.loss_chunks, worker.task.loss)

    def loss_of(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a part of the batch, from which backward begins.

        If the task returns a sum and a weight, each target counts as 1 here. The weight of the global batch
        is known only after the last part of the last worker; `divide_by_weight` corrects by it.
        """
        outputs = scores_for_loss(outputs, self.worker.settings.precision)
        loss, weight = loss_and_weight(self.worker.task, outputs, y)
        if weight is None:
            return loss
        from stratbench.telemetry.shards import local_part

        self.part_weights.append(local_part(weight))
        return loss * (
            self.worker.settings.gradient_accumulation_steps * self.parts / self.full_weight(y)
        )

    def full_weight(self, y: Tensor) -> float:
        """Return the weight of a worker's batch if each target weighs 1.

        `y`: targets of some samples.
        """
        return math.prod(y.shape[1:]) * self.worker.settings.per_worker_batch

    def divide_by_weight(self, loss: Tensor, full: float) -> Tensor:
        """Scale gradients and loss to the sum over the global batch divided by its weight."""
        import torch

        from stratbench.workload.torch_internals import multiply_all

        own = torch.zeros((), dtype=torch.float64, device=self.worker.device)
        for weight in self.part_weights:
            own += weight
        self.part_weights.clear()
        factor = ratio(full, self.mean_weight(own))
        by_kind: dict[Any, list[Tensor]] = {}
        for gradient in self.gradients():
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, dtype), gradients in by_kind.items():
            multiply_all(gradients, factor.to(device, dtype))
        return loss * factor.to(loss.dtype)

    def mean_weight(self, own: Tensor) -> Tensor:
        """Return the mean weight of the replicas' batches; `own`: the weight of this worker's batch."""
        import torch.distributed as dist

        w = self.worker
        if w.world_size > 1:
            if not w.mesh.speaks(w.rank):
                own.zero_()
            dist.all_reduce(own)
        return own / w.mesh.replicas

    def gradients(self) -> list[Tensor]:
        """Return the gradients that the update goes by, as far as this worker holds them."""
        from stratbench.telemetry.shards import local_part

        return [local_part(t.grad) for t in self.local if t.grad is not None]

    def gradients_of(self, x: Tensor, y: Tensor) -> list[Tensor]:
        import torch

        from stratbench.telemetry.shards import local_part

        self.compute_gradients(x, y)
        gradients = [
            torch.zeros_like(local_part(t)) if t.grad is None else local_part(t.grad).clone()
            for t in self.local
        ]
        self.optimizer.zero_grad(set_to_none=True)
        return gradients

    def compute_gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the gradients of the batch in `local_tensors`; returns its mean loss."""
        parts = self.worker.settings.gradient_accumulation_steps
        loss = self.add_gradients(x, y) if parts == 1 else self.accumulate(x, y, parts)
        self.link_gradients()
        return self.divide_by_weight(loss, self.full_weight(y)) if self.worker.weighs else loss

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.compute_gradients(x, y)
        self.before_update()
        self.update()
        self.steps += 1
        return loss

    def update(self) -> None:
        """Update the weights by the gradients, and drop these."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate(self, x: Tensor, y: Tensor, parts: int) -> Tensor:
        """Add the gradients of the batch in equal parts; return the batch's mean loss.

        The last part synchronises the gradients. Memory for activations is that of one part.

        Args:
            x: Inputs.
            y: Targets.
            parts: Number of parts.
        """
        loss = 0.0
        for part, (own_x, own_y) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True), 1):
            with self.synchronising(part == parts):
                loss += self.add_gradients(own_x, own_y, parts, part == parts)
        return loss

    def synchronising(self, last: bool) -> AbstractContextManager:
        """Return the context for a part of a batch; before the `last` gradients stay local."""
        return nullcontext()

    def add_gradients(self, x: Tensor, y: Tensor, parts: int = 1, last: bool = True) -> Tensor:
        """Run forward and backward of one part of a batch.

        Return its contribution to the mean loss.

        Args:
            x: Inputs.
            y: Targets.
            parts: Number of parts.
            last: Whether it is the last part.
        """
        mark = self.worker.mark
        loss = self.forward(x, y)
        if parts > 1:
            loss = loss / parts
        mark("forward")
        if self.worker.settings.slowdown and last:
            self.worker.delay()
            mark("slowdown")
        self.backward(loss if self.scaler is None else self.scaler.scale(loss))
        mark("backward")
        return loss.detach()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `loss`, the workers' together where they are to be synchronised."""
        loss.backward()

    def batches(self, order: Tensor, epoch: int) -> Iterator[Tensor]:
        w, s = self.worker, self.worker.settings
        steps = len(order) // s.global_batch
        mine = order[: steps * s.global_batch].view(steps, w.data_workers, self.samples_per_step(s))
        yield from mine[:, w.data_rank]

    def weights_and_buffers(self) -> list[Tensor]:
        return [*self.local, *self.frozen_written(), *self.model.buffers()]

    def state_tensors(self) -> list[Tensor]:
        """Return the tensors of this worker's training state, always as many in one order."""
        import torch

        from stratbench.telemetry.memory import optimizer_state

        state = optimizer_state(self.optimizer)
        entries = [state[t] for t in self.local if t in state]
        states = [entry[name] for entry in entries for name in sorted(entry)]
        others = [t for t in [*states, *self.extra_state()] if torch.is_tensor(t)]
        return [t.detach() for t in [*self.weights_and_buffers(), *others]]

    def counts(self) -> dict[str, Any]:
        """Return its counts since `reset` that are in no tensor, as JSON-able values."""
        scale = None if self.scaler is None else self.scaler.counts()
        return {"steps": self.steps, "scale": scale}

    def go_on(self, counts: dict[str, Any]) -> None:
        """Count on from `counts`, after `reset`."""
        self.steps = counts["steps"]
        if self.scaler is not None:
            self.scaler.go_on(counts["scale"])

    def optimizer_dtype(self) -> str | None:
        """The number formats of what the optimizer keeps for each weight.

        None where it keeps nothing.
        """
        from stratbench.telemetry.memory import optimizer_state

        state = optimizer_state(self.optimizer).items()
        moments = (v for t, entry in state for v in entry.values() if v.shape == t.shape)
        return ", ".join(dtype_names(moments)) or None

    def report(self) -> dict[str, Any]:
        s, skipped = self.worker.settings, 0 if self.scaler is None else self.scaler.skipped_steps()
        return {
            "details": {"skipped_steps": skipped, "optimizer_dtype": self.optimizer_dtype()}
            | effective_dtypes(s.precision, self.worker.device),
            "evaluated_on": self.evaluated_on,
            "updates_applied": self.steps - skipped,
        }


def norm_of_parts(norm: Tensor, workers: int, group: ProcessGroup | None = None) -> Tensor:
    """Return the norm of a sharded vector, of which `norm` is this worker's part.

    A collective.

    Args:
        norm: Norm of this worker's part.
        workers: Number of workers.
        group: Their process group.
    """
    if workers == 1:
        return norm
    import torch.distributed as dist

    square = norm.square()
    dist.all_reduce(square, group=group)
    return square.sqrt()


def dtype_names(tensors: Iterable[Tensor]) -> list[str]:
    """Return the number formats of some tensors, each once, in the order of their names."""
    return sorted({str(t.dtype).removeprefix("torch.") for t in tensors})


def sparse_gradient(names: Sequence[str], reason: str) -> str:
    """Return why a strategy does not support sparse gradients, and the remedy."""
    return f"the gradient of {names_text(names)} is sparse, which {reason}; make the layer with sparse=False"


def refusals_of_parts(trial: Trial, as_parameters: bool = True) -> Iterator[str]:
    """Yield why a strategy that trains shards of parameters would train a user's model wrongly.

    Args:
        trial: Result of a trial step of the model.
        as_parameters: Whether the shards replace the parameters in the model's modules.
    """
    if trial.hooked:
        yield hooks_lost(trial.hooked)
    if as_parameters and trial.elsewhere:
        yield read_elsewhere(trial.elsewhere)
    if as_parameters and trial.remade:
        yield remade(trial.remade)
    if trial.overwritten:
        yield changes_lost(trial.overwritten)
    if trial.again:
        yield adds_again(trial.again)


def hooks_lost(names: Sequence[str]) -> str:
    """Return why a strategy that replaces parameters does not support a user's hooks, and the remedy."""
    return (
        f"{names_text(names)} has a hook of its gradient, which would stay with the whole parameter while "
        "its parts are trained; change the gradient in forward (torch.where, detach, an autograd function)"
    )


def read_elsewhere(names: Sequence[str]) -> str:
    """Return why parameters that forward reads past their modules are unsupported, and the remedy."""
    return (
        f"forward reads {names_text(names)} by a reference that is no attribute of its module (a list, a "
        "dictionary), and only the attribute is given the parts that are trained; read the attribute, or use "
        "nn.ParameterList or nn.ParameterDict"
    )


def remade(names: Sequence[str]) -> str:
    """Return why subclasses of nn.Parameter are unsupported, and the remedy."""
    return (
        f"forward depends on the class or an attribute of {names_text(names)}, which parts of a parameter do "
        "not have; keep it in the module"
    )


def changes_lost(names: Sequence[str]) -> str:
    """Return why parameters that forward writes to are unsupported, and the remedy."""
    return (
        f"forward changes {names_text(names)}, and what it writes is lost when the weights are gathered or "
        "pulled anew; keep it in a buffer (register_buffer), or change the parameter's use in place of it"
    )


def parted(names: Sequence[str]) -> str:
    """Return why replicas do not support parameters that forward changes depending on its data."""
    return (
        f"what forward writes to {names_text(names)} depends on its batch, so that the workers' copies would "
        "part; keep it in a buffer (register_buffer), or change the parameter's use in place of it"
    )


def adds_again(names: Sequence[str]) -> str:
    """Return why gradients with several additions in one backward are unsupported, and the remedy."""
    return (
        f"backward adds to the gradient of {names_text(names)} several times, and the first part would be "
        "taken for the whole (a block that is called again under reentrant checkpointing); checkpoint with "
        "use_reentrant=False"
    )


def by_data(names: Sequence[str]) -> str:
    """Return why workers that step together cannot skip modules depending on their data."""
    return (
        f"not every batch reaches {names_text(names)}: forward reads values of tensors and chooses by them, "
        "and workers, whose data differ, would wait for one another in vain or add up what does not belong "
        "together; call it always, and choose with torch.where or a factor of 0 or 1"
    )


def by_chance(modules: Sequence[str]) -> str:
    """Return why workers that step together cannot skip modules at random."""
    return (
        f"not every forward calls {names_text(modules)}: each worker throws its own dice, and they would "
        "wait for one another in vain; call it always, and multiply what it gives by 0 or 1"
    )


def compiled(module: nn.Module, s: Settings) -> nn.Module:
    """Return `module`, or its compiled form if the settings ask for it.

    As PyTorch recommends, it is compiled as the strategy has wrapped it: DDP's buckets divide the graph
    (DDPOptimizer), and FSDP's hooks are between the graphs of its groups. All batches of a training have one
    shape. The evaluated module is the original, which is not compiled. Compilation happens in the first call.
    """
    if not s.compile:
        return module
    import torch

    from stratbench.workload.torch_internals import configure_compiler

    configure_compiler()
    return torch.compile(module, dynamic=False)


def ring_traffic(sent_bytes: float) -> dict[str, Any]:
    """`Strategy.communication` of collectives by the ring algorithms: what is sent is also received.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    return {
        "method": "ring",
        "sent_bytes_per_step": sent_bytes,
        "received_bytes_per_step": sent_bytes,
    }
