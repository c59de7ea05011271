"""`ps-*`: workers push gradients to parameter servers, which update the weights by a policy.

One class a policy; what they share is `ParameterServer`. Workers take batches as tickets, so a slow
worker does fewer, and a lost one's batch is handed on. The servers keep the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stratbench.ps.config import ServerConfig
from stratbench.ps.options import OPTIONS, PolicyOptions, parse_options
from stratbench.strategies import base

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stratbench.cell.run_folder import RunFolder
    from stratbench.cell.settings import Settings
    from stratbench.ps.client import Channel
    from stratbench.ps.flat import FlatSpace
    from stratbench.ps.tickets import Ticket

#: Options of every parameter-server strategy, beside its policy's own.
TRANSPORT_OPTIONS = (
    ("servers", int, field(default=1, metadata={"help": "server processes, each with a part"})),
    (
        "transport",
        Literal["auto", "shm", "tcp"],
        field(default="auto", metadata={"help": "auto: shared memory on one host, TCP between"}),
    ),
    (
        "wire",
        Literal["native", "bfloat16"],
        field(default="native", metadata={"help": "bfloat16 halves a push of fp32 over TCP"}),
    ),
)


def options_of(policy: str) -> type[base.Options]:
    """The options class of a policy's strategy: the policy's options and the transport's."""
    own = [
        (f.name, f.type, field(default=f.default, metadata=f.metadata))
        for f in fields(OPTIONS[policy])
    ]

    def check(self: base.Options) -> None:
        base.Options.__post_init__(self)
        policy_options(policy, asdict(self))
        if self.servers < 1:
            raise ValueError(f"servers = {self.servers}: must be at least 1")

    return make_dataclass(
        f"{policy}-options",
        [*own, *TRANSPORT_OPTIONS],
        bases=(base.Options,),
        frozen=True,
        namespace={"__post_init__": check, "policy": policy},
    )


def policy_options(policy: str, options: dict[str, Any]) -> PolicyOptions:
    """The policy's part of a strategy's options; ValueError for a value it does not take."""
    own = {f.name for f in fields(OPTIONS[policy])}
    return parse_options(policy, {k: v for k, v in options.items() if k in own})


def server_configs(
    s: Settings, train_samples: int, folder: RunFolder, host: str | None
) -> list[ServerConfig]:
    """What each server process of a cell is told.

    `host`: the name by which other nodes reach this one; None: there are none, and the servers listen
    on loopback only.
    """
    policy = s.strategy
    own = policy_options(policy, s.options)
    return [
        ServerConfig(
            rendezvous=str(folder.rendezvous),
            workers=s.gpus,
            epochs=s.epochs,
            steps_per_epoch=train_samples // s.global_batch,
            slices=s.gpus * own.pushes_per_ticket,
            policy=policy,
            hyper={
                "lr": s.lr,
                "momentum": s.momentum,
                "weight_decay": s.weight_decay,
                "nesterov": s.nesterov,
            },
            policy_options=asdict(own),
            server=k,
            n_servers=s.options["servers"],
            bind="127.0.0.1" if host is None else "0.0.0.0",
            advertise=host,
            snapshot_dir=str(folder.snapshots),
            stats_path=str(folder.server_statistics(k)),
        )
        for k in range(s.options["servers"])
    ]


class ParameterServer(base.Strategy):
    """A worker of a parameter server. The policy is the strategy's name."""

    kind = "server"
    needs_group = False
    alike_on_any_count = True
    breakdown_note: ClassVar[str] = (
        "server_wait is the time from the last byte pushed to the last byte of the reply: the "
        "server's update, waiting for other workers and the transfer of the weights are one"
    )

    def traits(self, gpus: int) -> base.Traits:
        own = policy_options(self.options.policy, asdict(self.options))
        exact = self.options.wire == "native"
        alone = exact and own.synchronous_alone
        return base.Traits(
            ends_with_a_worker=not own.tolerates_loss,
            waits_for_slowest=own.waits_for_slowest(gpus),
            synchronous_alone=alone,
            equals_ddp=(exact and own.averages_all) or (alone and gpus == 1),
            updates_per_step=own.updates_per_step(gpus),
        )

    @classmethod
    def check(cls, name: str, options: dict[str, Any], gpus: int, per_worker_batch: int) -> None:
        pushes = policy_options(name, options).pushes_per_ticket
        if per_worker_batch % pushes:
            raise ValueError(
                f"{name} pushes {pushes} times a batch, which {per_worker_batch} samples for each of "
                f"{gpus} workers do not divide into; change pushes_per_batch or the batch"
            )

    @classmethod
    def samples_per_step(cls, s: Settings) -> int:
        return s.per_worker_batch // policy_options(s.strategy, s.options).pushes_per_ticket

    def setup(self, model: nn.Module, worker: base.Worker) -> None:
        from stratbench.ps.scale import LossScale

        self.worker, self.model = worker, model
        self.flat = self.flatten()
        self.scale = LossScale() if worker.settings.precision == "fp16" else None
        self.channel = self.connect()
        self.ticket: Ticket | None = None
        self._exchange: Callable[[], None] | None = self.channel.rehearse  # None: the run is over
        self._before = (0.0, 0, 0)
        self.reset()

    def flatten(self) -> FlatSpace:
        """The model's tensors as views of flat ones."""
        from stratbench.ps.flat import FlatSpace

        return FlatSpace(self.model, shared=self.worker.settings.options["transport"] != "tcp")

    def connect(self) -> Channel:
        """The connections to the cell's servers."""
        from stratbench.ps.client import Channel
        from stratbench.ps.handshake import load_secret

        worker, options = self.worker, self.worker.settings.options
        return Channel.connect(
            worker.folder.rendezvous,
            worker.rank,
            self.flat,
            load_secret(worker.folder.secret),
            transport=options["transport"],
            wire=options["wire"],
            deadline_s=300.0,
            scale=self.scale,
        )

    def weights_and_buffers(self) -> list[Tensor]:
        return [self.flat.weights, *self.model.buffers()]

    def reset(self) -> None:
        self.steps = 0
        self.flat.zero_grads()
        if self.scale is not None:
            self.scale.reset()

    def tickets(self) -> Iterator[tuple[int, slice]]:
        """(epoch, which of the epoch's shuffled samples) of each batch this worker is handed.

        The first waits until all workers are ready. `step` must be called for each.
        """
        s = self.worker.settings
        samples = self.samples_per_step(s)
        self.ticket = self.channel.first()
        self._before = self._exchanged()
        self._exchange = self._take_ticket
        while self.ticket is not None:
            t = self.ticket
            start = t.step * s.global_batch + t.slice * samples
            yield t.epoch, slice(start, start + samples)
        self._exchange = None

    def _take_ticket(self) -> None:
        self.ticket = self.channel.push_pull()
        self.steps += 1

    def _exchanged(self) -> tuple[float, int, int]:
        """Seconds waited, bytes sent and bytes received so far."""
        return self.channel.wait_s, self.channel.bytes_out, self.channel.bytes_in

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        import torch.nn.functional as F

        mark = self.worker.mark
        with base.autocast(self.worker):
            loss = F.cross_entropy(self.model(x), y)
        mark("forward")
        if self.worker.settings.slowdown:
            self.worker.delay()
            mark("slowdown")
        self.flat.zero_grads()
        if self._exchange is not None:
            self.channel.arm()
        (loss if self.scale is None else loss * self.scale.value).backward()
        mark("backward")
        if self._exchange is not None:
            self._exchange()
            mark("server")
        return loss.detach()

    @property
    def evaluates(self) -> bool:
        """After the last ticket: whether this worker evaluates for all."""
        return self.channel.evaluator == self.worker.rank

    def load_epoch(self, epoch: int) -> float:
        """Put the servers' state after `epoch` (from 0) into the model; seconds from the first ticket."""
        from stratbench.ps.snapshots import load_snapshot

        seconds, weights, buffers = load_snapshot(self.channel.snapshot_dir, epoch, wait_s=120.0)
        self.flat.load(weights, self.flat.buffers if buffers is None else buffers)
        return seconds

    def drop_epoch(self, epoch: int) -> None:
        """Delete the servers' state after `epoch`: it has been evaluated."""
        from stratbench.ps.snapshots import drop_snapshot

        drop_snapshot(self.channel.snapshot_dir, epoch)

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        self.model.eval()
        try:
            yield self.model
        finally:
            self.model.train()

    def model_states(self) -> dict[str, int]:
        weights_bytes = sum(p.numel() * p.element_size() for p in self.flat.parameters)
        return {
            "parameters_bytes": weights_bytes,
            "gradients_bytes": weights_bytes,
            "optimizer_bytes": 0,  # on the servers
            "buffers_bytes": sum(b.numel() * b.element_size() for b in self.model.buffers()),
        }

    def report(self) -> dict[str, Any]:
        s = self.worker.settings
        own = policy_options(s.strategy, s.options)
        return {
            "details": {
                "transports": self.channel.transports,
                "skipped_steps": 0 if self.scale is None else self.scale.skipped,
                "push_lr": s.lr * own.lr_factor(s.gpus),
            }
            | base.effective_dtypes(self.worker),
            "evaluated_on": "the servers' weights with the workers' mean BatchNorm statistics",
            "updates_applied": None,  # the servers count them
        }

    def communication(self) -> dict[str, Any] | None:
        if not self.steps:
            return None
        wait_s, sent, received = (
            now - then for now, then in zip(self._exchanged(), self._before, strict=True)
        )
        return {
            "method": "measured",
            "sent_bytes_per_step": sent / self.steps,
            "received_bytes_per_step": received / self.steps,
            "server_wait_ms": 1e3 * wait_s / self.steps,
        }

    def close(self) -> None:
        self.channel.close()


class Sync(ParameterServer):
    """All workers' gradients of a step are averaged into one update."""

    summary: ClassVar[str] = "parameter server, every step waits for all workers"
    rule: ClassVar[str] = "W -= lr velocity(mean of all workers' g)"
    Options = options_of("ps-sync")


class Async(ParameterServer):
    """Every push is an update of its own."""

    summary: ClassVar[str] = "parameter server, nobody waits"
    rule: ClassVar[str] = "W -= eta velocity(g) for each push"
    Options = options_of("ps-async")


class AsyncModified(ParameterServer):
    """The paper's mitigation: bounded staleness, smaller and more frequent pushes, weighted by age."""

    summary: ClassVar[str] = "parameter server, the paper's staleness mitigation"
    rule: ClassVar[str] = (
        "W -= eta / f velocity(g / (1 + tau)) for each of f pushes a batch, tau: updates since W was "
        "read; waits as ps-ssp, counted in sub-batches"
    )
    Options = options_of("ps-async-modified")


class Ssp(ParameterServer):
    """Asynchronous, but nobody may be more than a bound ahead of the slowest."""

    summary: ClassVar[str] = "parameter server, bounded staleness"
    rule: ClassVar[str] = "as ps-async; whoever is more than s pushes ahead of the slowest waits"
    Options = options_of("ps-ssp")


class Backup(ParameterServer):
    """A step is made of the first workers' gradients; the slowest are dropped."""

    summary: ClassVar[str] = "parameter server, does not wait for the slowest workers"
    rule: ClassVar[str] = (
        "as ps-sync, from the first N - b pushes of a step; later ones are dropped"
    )
    Options = options_of("ps-backup")


class KBatch(ParameterServer):
    """Any K gradients are averaged into one update."""

    summary: ClassVar[str] = "parameter server, averages any K pushes"
    rule: ClassVar[str] = "W -= lr velocity(mean of any K pushes)"
    Options = options_of("ps-kbatch")


class DcAsgd(ParameterServer):
    """Gradients are corrected for the weights' move since they were read."""

    summary: ClassVar[str] = "parameter server, delay-compensated"
    rule: ClassVar[str] = (
        "as ps-async with g + lambda / sqrt(ms + 1e-7) g² (W - W_read) in place of g, ms: running "
        "mean of g²"
    )
    Options = options_of("ps-dcasgd")


class GapAware(ParameterServer):
    """Gradients are divided by how far the weights have moved since they were read."""

    summary: ClassVar[str] = "parameter server, gap-aware"
    rule: ClassVar[str] = (
        "as ps-async with g / (1 + |W - W_read| / (eta RMS(v))) in place of g, v: the direction of a step"
    )
    Options = options_of("ps-gap-aware")


class StalenessLr(ParameterServer):
    """The learning rate of a push falls with its staleness."""

    summary: ClassVar[str] = "parameter server, learning rate by staleness"
    rule: ClassVar[str] = (
        "W -= eta velocity(g / (1 + tau)) for each push, tau: updates since W was read"
    )
    Options = options_of("ps-staleness-lr")


class Dana(ParameterServer):
    """A momentum for each worker, and a look-ahead over the others': the default mitigation."""

    summary: ClassVar[str] = "parameter server, look-ahead over the other workers' momentum"
    rule: ClassVar[str] = (
        "v_i <- mu v_i + g, W -= eta v_i; worker i reads W - eta mu Σ_{j≠i} v_j (Nesterov: mu² for mu)"
    )
    first_choice = "unequal workers"
    Options = options_of("ps-dana")
