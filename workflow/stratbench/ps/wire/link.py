"""A worker's connection to one server, and the ways in which it ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from stratbench.ps.wire.transport import Connection


class ServerLost(ConnectionError):
    """The connection to a server is gone, or it has fallen silent."""


class RunEnded(RuntimeError):
    """The server ended the run, or this worker's part in it; the text has its reason."""


class Left(RuntimeError):
    """This worker has left the run, on request."""


class Link:
    """The connection to one server, which owns `shards` of the model."""

    def __init__(self, connection: Connection, server: int, transport: str, welcome: dict) -> None:
        self.connection, self.server, self.transport = connection, server, transport
        self.shards = range(int(welcome["first"]), int(welcome["stop"]))
        self.shard_numel = int(welcome["shard_numel"])
        self.n_servers = int(welcome["n_servers"])
        self.has_buffers = bool(welcome["buffers"])
        self.incarnation: int | None = welcome.get(
            "incarnation"
        )  # of the servers, where they have several
        self.snapshot_dir: str | None = welcome["snapshot_dir"]
        self.deadline_s = float(welcome["heartbeat_deadline_s"])
        self.bytes_out = self.bytes_in = 0  # of gradients and buffers sent, and weights received
        self.awaited: set[int] = set()  # shards whose weights are still to come
        self.outdated = False  # the present transfer will be sent again
        self.replied = threading.Event()  # all shards' weights have come
        self.lock = threading.Lock()  # guards the three above
        self.receiver: threading.Thread | None = None  # receives the server's frames
        self.to_send: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def expect_all(self, outdated: bool = False) -> None:
        """All shards' weights will come; `outdated`: only after the server's next WAIT."""
        with self.lock:
            self.replied.clear()
            self.awaited = set(self.shards)
            self.outdated = outdated

    def arrived(self, shards: range) -> None:
        """Weights of `shards` have come."""
        with self.lock:
            self.awaited.difference_update(shards)
            if not self.awaited and not self.outdated:
                self.replied.set()
