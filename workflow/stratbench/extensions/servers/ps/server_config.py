"""The configuration of one parameter-server process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stratbench.cell.learning_rate import compute_lr_factor

#: Seconds without a heartbeat after which a worker or server counts as lost. This finds stopped processes and
#: lost hosts; a process that ends closes its connections. The time is long, because a process sends no
#: heartbeats while its code holds Python's interpreter lock.
HEARTBEAT_DEADLINE_S = 60.0


@dataclass(frozen=True)
class ServerConfig:
    """The settings of one server process, as plain values that JSON can represent.

    Attributes:
        rendezvous: Path of the rendezvous files without their suffix, which is `.0` for server 0.
        workers: Number of workers.
        epochs: Number of epochs. Server 0 hands out `epochs` x `steps_per_epoch` x `slices_per_step` tickets.
        steps_per_epoch: Global batches per epoch.
        slices_per_step: Tickets per global batch.
        policy: Name of the update policy.
        hyper: Fields of `policy.Hyper`, except `workers` and `lr_scale`.
        policy_options: Options of the policy by name.
        schedule: Arguments `schedule`, `warmup_steps`, `final_factor` of `compute_lr_factor`. None: constant.
        server: Number of this server, from 0.
        n_servers: Number of servers.
        bind_address: Address to listen on: loopback, unless workers run on other hosts.
        advertised_address: Host name under which workers on other hosts reach the server.
        shard_bytes: Size of one shard of the parameters, in bytes.
        heartbeat_deadline_s: Seconds without a heartbeat after which a worker counts as lost.
        handshake_deadline_s: Seconds in which a new connection must show the secret.
        start_deadline_s: Seconds in which all workers must join.
        snapshot_dir: Folder of the snapshots. None: no snapshots are written.
        stats_path: File for the server's statistics. None: none is written.
        max_model_bytes: Largest size of a model that a worker may announce, in bytes.
        steps: Global batches of the run, if it ends within its last epoch. None: all epochs are complete.
    """

    rendezvous: str
    workers: int
    epochs: int
    steps_per_epoch: int
    slices_per_step: int
    policy: str
    hyper: dict[str, Any]
    policy_options: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] | None = None
    server: int = 0
    n_servers: int = 1
    bind_address: str = "127.0.0.1"
    advertised_address: str | None = None
    shard_bytes: int = 4 << 20
    heartbeat_deadline_s: float = HEARTBEAT_DEADLINE_S
    handshake_deadline_s: float = 15.0
    start_deadline_s: float = 600.0
    snapshot_dir: str | None = None
    stats_path: str | None = None
    max_model_bytes: int = 64 << 30
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.workers < 1 or not 0 <= self.server < self.n_servers:
            raise ValueError(
                f"server = {self.server}, n_servers = {self.n_servers}, workers = {self.workers}: `workers` "
                "must be at least 1, and `server` below `n_servers`"
            )
        if self.bind_address in ("0.0.0.0", "::", "") and not self.advertised_address:
            raise ValueError(
                f"bind_address = {self.bind_address!r} needs `advertised_address`, to which workers connect"
            )

    @property
    def lr_factor_by_push_count(self) -> Callable[[int], float] | None:
        """Function from a shard's number of pushes to the schedule's factor on the learning rate.

        The property is None if the learning rate is constant.

        A step ends with the last of the `slices_per_step` pushes of its global batch.
        """
        if self.schedule is None:
            return None
        steps, schedule = self.steps or self.epochs * self.steps_per_epoch, self.schedule
        return lambda pushes: compute_lr_factor(
            step=max(0, pushes - 1) // self.slices_per_step, steps=steps, **schedule
        )
