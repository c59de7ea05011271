"""The configuration of one parameter-server process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stratbench.cell.learning_rate import share_of_lr

#: Time of silence, in seconds, after which a worker or server is given up. A process that ends closes its
#: connections and is noticed at once; this is for a stopped one, and for a lost host. It is long, because
#: heartbeats also pause while user code or a garbage collection holds the interpreter lock, and a collective
#: would wait for such a worker.
HEARTBEAT_DEADLINE_S = 60.0


@dataclass(frozen=True)
class ServerConfig:
    """One server process of a run; plain values, so that it can travel as JSON.

    `rendezvous`: path of the rendezvous files, without their ending (`.0` for server 0). `hyper`:
    the fields of `policy.Hyper` but `workers` and `lr_scale`. `bind`: address to listen on; other
    than loopback only where workers run on other hosts. `advertise`: the name by which those reach
    it. `schedule`: how the learning rate changes, `schedule`, `warmup` and `final` of `share_of_lr`; None:
    not at all. Server 0 of `n_servers` hands out the tickets: `epochs` x `steps_per_epoch` x `slices`,
    or `steps` x `slices` where the last epoch is left before its end.
    """

    rendezvous: str
    workers: int
    epochs: int
    steps_per_epoch: int
    slices: int
    policy: str
    hyper: dict[str, Any]
    policy_options: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] | None = None
    server: int = 0
    n_servers: int = 1
    bind: str = "127.0.0.1"
    advertise: str | None = None
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
                f"server {self.server} of {self.n_servers} for {self.workers} workers is impossible"
            )
        if self.bind in ("0.0.0.0", "::", "") and not self.advertise:
            raise ValueError(f"bind {self.bind!r} needs `advertise`, the name workers connect to")

    @property
    def lr_share(self) -> Callable[[int], float] | None:
        """Function from the number of pushes to the factor on the learning rate, or None for 1.

        A step is over with the last of the `slices` pushes of its global batch.
        """
        if self.schedule is None:
            return None
        steps, schedule = self.steps or self.epochs * self.steps_per_epoch, self.schedule
        return lambda pushes: share_of_lr(
            step=max(0, pushes - 1) // self.slices, steps=steps, **schedule
        )
