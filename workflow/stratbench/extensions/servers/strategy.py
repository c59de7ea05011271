"""Strategies with parameter servers: workers push gradients, and servers update weights by a policy.

Each policy in `policies/policies.py` makes one strategy of the same name (`get_strategy_of_policy`). Workers
get slices of batches as tickets. So a slow worker gets fewer, and another worker gets the ticket of a lost
one. The servers store the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stratbench.cell.options import option
from stratbench.cell.text.words import format_names
from stratbench.extensions.servers.policies.options import EveryPushOptions
from stratbench.extensions.servers.policies.policies import (
    get_policy_class,
    list_policies_supporting,
)
from stratbench.extensions.servers.ps.server_config import ServerConfig
from stratbench.extensions.servers.ps.tickets import Evaluation, Ticket
from stratbench.strategies import base, collective, get_strategy_class, refusals
from stratbench.workload.network.precision import (
    PURE_BF16,
    create_autocast_context,
    get_weights_and_compute_dtypes,
)
from stratbench.workload.tasks import compute_loss_and_weight, divide_or_zero
from stratbench.workload.users_code import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stratbench.cell.run_folder import RunFolder
    from stratbench.cell.settings import Settings
    from stratbench.extensions.servers.ps.client import Channel
    from stratbench.extensions.servers.ps.flat import FlatSpace


@dataclass(frozen=True)
class ServerOptions(base.Options):
    """Options of all strategies with parameter servers, besides the options of the policy."""

    servers: int = option(1, "server processes, each with a part", least=1)
    transport: Literal["auto", "shm", "tcp"] = option(
        "auto", "auto: shared memory on one host, TCP between"
    )
    wire: Literal["native", "bfloat16"] = option(
        "native", "bfloat16 halves a push of fp32 over TCP"
    )
    server_placement: Literal["central", "colocated"] = option(
        "central",
        "central: `servers` processes, dealt over the nodes from the first; colocated: one for each "
        "worker, on the worker's node",
    )


@cache
def get_strategy_of_policy(policy: str) -> type[ParameterServer]:
    """Return the strategy whose servers follow the policy with the name `policy`."""
    rules = get_policy_class(policy)

    @dataclass(frozen=True)
    class Options(ServerOptions, rules.Options):
        """Options of the servers and of their policy, and the policy's properties that follow from them."""

    facts = {
        "policy": policy,
        "family": "servers" if issubclass(rules.Options, EveryPushOptions) else "averaging servers",
        "summary": rules.summary,
        "rule": rules.rule,
        "rigid": rules.rigid,
        "Options": Options,
        "__doc__": rules.__doc__,
        "__module__": __name__,
    }
    return type(f"ServedBy{rules.__name__}", (ParameterServer,), facts)


#: Names of the settings of the servers' optimizer.
HYPER = ("lr", "momentum", "weight_decay", "nesterov", "optimizer", "betas", "eps")


def make_server_configs(
    s: Settings,
    train_samples: int,
    folder: RunFolder,
    host: str | None,
) -> list[ServerConfig]:
    """Return the config of each server process of a cell.

    Args:
        s: Settings of the cell.
        train_samples: Number of training samples.
        folder: Run folder of the cell.
        host: Name by which other nodes reach this one. None if there are no others; the servers then
            listen on loopback only.
    """
    strategy = get_strategy_class(s.strategy)
    options = strategy.Options(**s.options)
    own = [spec.name for spec in fields(get_policy_class(strategy.policy).Options)]
    return [
        ServerConfig(
            rendezvous=str(folder.server_rendezvous_path),
            workers=s.gpus,
            epochs=s.count_training_set_passes(train_samples),
            steps=s.steps,
            steps_per_epoch=train_samples // s.global_batch,
            slices_per_step=s.gpus * options.pushes_per_ticket,
            policy=strategy.policy,
            hyper={name: getattr(s, name) for name in HYPER},
            policy_options={name: getattr(options, name) for name in own},
            schedule={
                "schedule": s.schedule,
                "warmup_steps": s.lr_warmup_steps,
                "final_factor": s.final_lr / s.lr,
            }
            if s.has_changing_lr
            else None,
            server=k,
            n_servers=options.servers,
            bind_address="127.0.0.1" if host is None else "0.0.0.0",
            advertised_address=host,
            snapshot_dir=None if s.steps else str(folder.get_snapshot_dir(host is not None)),
            stats_path=str(folder.get_server_statistics_path(k)),
        )
        for k in range(options.servers)
    ]


def find_node_of_server(s: Settings, server: int, n_nodes: int) -> int:
    """Return the number of the node on which a parameter server of a cell runs.

    Args:
        s: Settings of the cell.
        server: Number of the server.
        n_nodes: Number of nodes.
    """
    if get_strategy_class(s.strategy).Options(**s.options).server_placement == "colocated":
        # Colocated servers are divided among nodes as workers are: all nodes but the last have equally many.
        return server // -(-s.gpus // n_nodes)
    return server % n_nodes


class ParameterServer(base.Strategy):
    """Base class of strategies with parameter servers, as a worker runs them.

    `get_strategy_of_policy` makes a subclass for each policy.
    """

    kind = "server"
    loop = "stratbench.extensions.servers.loop:train_on_tickets"
    needs_group = False
    updates_by_zeros = True
    buffers_note = "each worker keeps its own, and the mean of the float ones is evaluated"
    evaluated_on = "the servers' weights with the workers' mean BatchNorm statistics"
    alike_on_any_count = True
    collectives = ()
    own_phases = (*base.BEFORE_BACKWARD, "slowdown", "backward")
    breakdown_note: ClassVar[str] = (
        "server_wait is the time from the last byte pushed to the last byte of the reply: the "
        "server's update, waiting for other workers and the transfer of the weights are one"
    )

    def traits(self, gpus: int) -> base.Traits:
        own = self.options
        exact = own.wire == "native"
        alone = exact and own.is_synchronous_on_one_worker
        return base.Traits(
            ends_with_a_worker=not own.survives_worker_loss,
            waits_for_slowest=own.waits_for_slowest(gpus),
            is_synchronous_on_one_worker=alone,
            equals_ddp=(exact and own.averages_all) or (alone and gpus == 1),
            updates_per_step=own.updates_per_step(gpus),
        )

    @classmethod
    def resolve(cls, options: dict[str, Any], gpus: int) -> dict[str, Any]:
        return (
            options | {"servers": gpus} if options["server_placement"] == "colocated" else options
        )

    @classmethod
    def check(cls, name: str, options: dict[str, Any], gpus: int, per_worker_batch: int) -> None:
        if options["server_placement"] == "colocated" and options["servers"] != 1:
            raise ValueError(
                f"servers = {options['servers']}: server_placement = 'colocated' runs one server per worker; "
                "leave servers out, or set server_placement to 'central'"
            )
        pushes = cls.Options(**options).pushes_per_ticket
        if per_worker_batch % pushes:
            raise ValueError(
                f"{name} has {pushes} pushes per batch, but the {per_worker_batch} samples of each of {gpus} "
                "workers cannot be divided into so many equal parts; change pushes_per_batch or the batch"
            )

    @classmethod
    def iter_refused_values(
        cls, options: dict[str, Any], values: Mapping[str, Any]
    ) -> Iterator[str]:
        optimizer = values["optimizer"]
        if reason := cls.Options.refusal(optimizer):
            others = ", ".join(list_policies_supporting(optimizer))
            yield f".optimizer = {optimizer!r}: {reason} ({others} take it)"
        if values["precision"] == PURE_BF16:
            yield ".precision = 'bf16-true': servers keep the weights in float32; use bf16"
        if (implementation := values["optimizer_impl"]) != "fused":
            yield (
                f".optimizer_impl = {implementation!r}: servers update the weights by code of their own; set "
                "it to fused"
            )
        if (chunks := values["loss_chunks"]) > 1:
            yield f".loss_chunks = {chunks}: the loss in parts is not tried with servers; set it to 1"
        if values["gradient_accumulation_steps"] != 1:
            yield (
                f".gradient_accumulation_steps = {values['gradient_accumulation_steps']}: a worker's flat "
                "gradients are pushed while backward "
                "makes them, so that a batch cannot come in parts"
            )
        if values["max_grad_norm"] is not None:
            yield (
                f".max_grad_norm = {values['max_grad_norm']}: each server takes its part of one worker's "
                "gradient, so that the norm of the whole is unknown"
            )

    def iter_model_refusals(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        dtypes = collective.list_dtype_names(p for p in model.parameters() if p.requires_grad)
        if len(dtypes) > 1:
            yield (
                f"its parameters have several dtypes ({', '.join(dtypes)}), and servers keep one "
                "flat tensor; use one dtype"
            )
        trial, trained = worker.trial, {n for n, p in model.named_parameters() if p.requires_grad}
        if changed := [name for name in trial.overwritten_parameters if name in trained]:
            yield refusals.lost_parameter_changes_reason(changed)
        if trial.unsaved_evaluation_state:
            yield (
                f"forward changes {format_names(trial.unsaved_evaluation_state)}, and evaluation "
                "depends on it, but the "
                "servers keep weights and buffers of real numbers alone; make it a float buffer "
                "(register_buffer) that is written in place"
            )
        elif trial.changing_training_state:
            yield (
                f"forward changes {format_names(trial.changing_training_state)}, and training depends "
                "on it, but servers "
                "hand a batch to whichever worker is free, so that no worker knows how many there were; "
                "use ddp"
            )

    @classmethod
    def samples_per_step(cls, s: Settings) -> int:
        return s.per_worker_batch // cls.Options(**s.options).pushes_per_ticket

    def setup(self, model: nn.Module, worker: base.Worker) -> None:
        from stratbench.extensions.servers.ps.scale import LossScale

        self.worker, self.model = worker, model
        self.flat = self.flatten_model()
        self.compiled = collective.compile_if_requested(model, worker.settings)
        self.scale = LossScale() if worker.settings.precision == "fp16" else None
        self.channel = self.connect_to_servers()
        self.ticket: Ticket | Evaluation | None = None
        # Function that exchanges gradients and weights with the servers after backward, at first in the
        # warm-up. None once the run is over.
        self._exchange: Callable[[], None] | None = self.channel.rehearse_exchange
        self._before: tuple[float, ...] = (0.0,)
        self.reset()

    def flatten_model(self) -> FlatSpace:
        """Move the model's tensors into flat tensors, and return these."""
        from stratbench.extensions.servers.ps.flat import FlatSpace

        return FlatSpace(self.model, shared=self.worker.settings.options["transport"] != "tcp")

    def connect_to_servers(self) -> Channel:
        """Connect this worker to the cell's servers, and return the channel to them."""
        by = self.worker.make_server_channel
        return by(self._connect_channel) if by else self._connect_channel(None, 300.0)

    def _connect_channel(self, incarnation: int | None, deadline_s: float) -> Channel:
        from stratbench.extensions.servers.ps.client import Channel
        from stratbench.extensions.servers.wire.handshake import JoinRefused, load_secret
        from stratbench.workload.generators import OTHER_START

        worker, options = self.worker, self.worker.settings.options
        try:
            return Channel.connect(
                worker.folder.server_rendezvous_path,
                worker.rank,
                self.flat,
                load_secret(worker.folder.job_secret_path),
                transport=options["transport"],
                wire=options["wire"],
                deadline_s=deadline_s,
                scale=self.scale,
                n_servers=options["servers"],
                incarnation=incarnation,
                initial_weights_hash=worker.initial_weights_hash,
            )
        except JoinRefused as refused:
            if OTHER_START in str(refused):
                raise ModelError(f"model {worker.settings.model!r}: {OTHER_START}") from refused
            raise

    def weights_and_buffers(self) -> list[Tensor]:
        return [self.flat.weights, *self.model.buffers()]

    def list_persistent_tensors(self) -> dict[str, list[Tensor]]:
        return {"gradients": [self.flat.grads]}

    def reset(self) -> None:
        self.steps = 0
        self.flat.zero_grads()
        if self.scale is not None:
            self.scale.reset()

    def iter_tickets(
        self, evaluate: Callable[[int], dict[str, float | None]] | None = None
    ) -> Iterator[tuple[int, slice]]:
        """Yield the epoch of each batch, and the slice of the epoch's shuffled samples.

        The first batch comes when all workers are ready. The caller must call `step` for each batch. In an
        elastic cell the servers also request evaluations. `evaluate` returns the results for an epoch, which
        `Channel.send_evaluation` sends.
        """
        self.ticket = self._request_next_ticket(self.channel.wait_for_first_ticket)
        self._before = self._list_wait_s_and_bytes_by_server()
        self._exchange = self._push_and_take_ticket
        while self.ticket is not None:
            t = self.ticket
            if isinstance(t, Evaluation):
                self.ticket = self._request_next_ticket(
                    partial(self.channel.send_evaluation, evaluate(t.epoch))
                )
                continue
            yield t.epoch, self._get_sample_slice(t.step, t.slice)
        self._exchange = None

    def predict_next_ticket(self, train_samples: int) -> tuple[int, slice] | None:
        """Return the epoch and the slice of samples that this worker will probably get next.

        A worker that keeps pace with the others gets the same slice of the next step. Which batch it gets is
        only known after its push. The result is None at the end of the training.
        """
        s, t = self.worker.settings, self.ticket
        assert isinstance(t, Ticket)  # within a step, the worker trains and does not evaluate
        steps = train_samples // s.global_batch
        following = t.epoch * steps + t.step + 1
        if following >= self.worker.total_steps:
            return None
        return following // steps, self._get_sample_slice(following % steps, t.slice)

    def _get_sample_slice(self, step: int, slice_of_step: int) -> slice:
        samples = self.samples_per_step(self.worker.settings)
        start = step * self.worker.settings.global_batch + slice_of_step * samples
        return slice(start, start + samples)

    def _push_and_take_ticket(self) -> None:
        self.ticket = self._request_next_ticket(self.channel.push_pull)
        self.steps += 1

    def _request_next_ticket(
        self, request_next: Callable[[], Ticket | Evaluation | None]
    ) -> Ticket | Evaluation | None:
        """Return the ticket or the evaluation that `request_next` returns.

        The result is None at the end of the training, or if this worker must leave.
        """
        from stratbench.extensions.servers.wire.link import Left

        try:
            return request_next()
        except Left:
            return None

    def _list_wait_s_and_bytes_by_server(self) -> tuple[float, ...]:
        """Return the seconds of waiting so far, then the bytes to and from each server."""
        return self.channel.wait_s, *self.channel.sent_and_received_bytes_by_server

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute a batch's gradients, push them, and return the loss.

        If the task weights its samples, the result has the sum of losses and that of weights, shape [2]. No
        worker knows the weight of the global batch.
        """
        import torch

        mark = self.worker.mark_phase_end
        with create_autocast_context(self.worker.settings.precision, self.worker.device):
            loss, weight = compute_loss_and_weight(self.worker.task, self.compiled(x), y)
        detached = loss.detach()
        # The pushed gradient is a weighted mean over samples. The servers need its weight to average pushes.
        if weight is not None:
            detached = torch.stack([detached.double(), weight])
            loss = loss * divide_or_zero(1.0, weight).to(loss.dtype)
            self.channel.set_push_weight(weight / y.numel())
        mark("forward")
        if self.worker.settings.slowdown:
            self.worker.delay_step()
            mark("slowdown")
        self.flat.zero_grads()
        if self._exchange is not None and not self.adds_to_gradients_repeatedly:
            self.channel.send_gradients_during_backward()
        (loss if self.scale is None else loss * self.scale.value).backward()
        mark("backward")
        if self._exchange is not None:
            self._exchange()
            mark("server")
        return detached

    def gradients_of(self, x: Tensor, y: Tensor) -> list[Tensor]:
        exchange, self._exchange = self._exchange, None
        self.step(x, y)
        self._exchange = exchange
        return [self.flat.grads.clone()]

    @property
    def is_evaluator(self) -> bool:
        """Whether this worker evaluates the snapshots after the training. False before the last ticket."""
        return self.channel.evaluator == self.worker.rank

    def load_snapshot(self, epoch: int) -> float:
        """Load the servers' snapshot of an epoch, counted from 0, into the model.

        The result is the seconds from the first ticket to the end of that epoch.
        """
        from stratbench.extensions.servers.ps.snapshots import load_snapshot

        seconds, weights, buffers = load_snapshot(self.channel.snapshot_dir, epoch, wait_s=120.0)
        self.flat.load_tensors(weights, self.flat.buffers if buffers is None else buffers)
        return seconds

    @contextmanager
    def hold_snapshot(self, epoch: int) -> Iterator[float]:
        """Load the servers' snapshot of an epoch into the model within a block.

        The context yields the result of `load_snapshot`. At the end of the block the model gets its own
        running statistics again. It gets its weights with the next ticket.
        """
        own = self.flat.buffers.clone()
        yield self.load_snapshot(epoch)
        self.flat.buffers.copy_(own)

    def delete_snapshot(self, epoch: int) -> None:
        """Delete the servers' snapshot of an epoch, which has been evaluated."""
        from stratbench.extensions.servers.ps.snapshots import delete_snapshot

        delete_snapshot(self.channel.snapshot_dir, epoch)

    def report(self) -> dict[str, Any]:
        s = self.worker.settings
        return {
            "details": {
                "transports": self.channel.transports,
                "skipped_steps": 0 if self.scale is None else self.scale.skipped,
                "push_lr": s.lr * self.options.lr_factor(s.gpus),
                "optimizer_dtype": self.flat.layout.dtype if s.momentum or s.betas else None,
            }
            | get_weights_and_compute_dtypes(s.precision, self.worker.device),
            "evaluated_on": self.evaluated_on,
            "updates_applied": None,  # the servers count the updates
        }

    def communication(self) -> dict[str, Any] | None:
        if not self.steps:
            return None
        wait_s, *moved_bytes = (
            now - then
            for now, then in zip(self._list_wait_s_and_bytes_by_server(), self._before, strict=True)
        )
        sent, received = moved_bytes[::2], moved_bytes[1::2]
        return {
            "method": "measured",
            "sent_bytes_per_step": sum(sent) / self.steps,
            "received_bytes_per_step": sum(received) / self.steps,
            "by_server_bytes": list(zip(sent, received, strict=True)),
            "server_wait_ms": 1e3 * wait_s / self.steps,
        }

    def close(self) -> None:
        self.channel.close()
