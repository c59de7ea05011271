"""A worker's connection to one server, and the exceptions that end the connection."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from stratbench.extensions.servers.wire.transport import Connection


class ServerLost(ConnectionError):
    """The connection to a server has ended, or the server has sent nothing for too long."""


class RunEnded(RuntimeError):
    """The server has ended the run, or this worker's part in it, for the reason in the message."""


class Left(RuntimeError):
    """This worker has left the run, on request."""


class Link:
    """A worker's connection to one server, which owns the model's shards `shards`."""

    def __init__(self, connection: Connection, server: int, transport: str, welcome: dict) -> None:
        self.connection, self.server, self.transport = connection, server, transport
        self.shards = range(int(welcome["first"]), int(welcome["stop"]))
        self.shard_numel = int(welcome["shard_numel"])
        self.n_servers = int(welcome["n_servers"])
        self.has_buffers = bool(welcome["buffers"])
        #: Incarnation of an elastic run's servers. None: the workers are a gang.
        self.incarnation: int | None = welcome.get("incarnation")
        self.snapshot_dir: str | None = welcome["snapshot_dir"]
        self.deadline_s = float(welcome["heartbeat_deadline_s"])
        self.bytes_out = self.bytes_in = (
            0  # bytes of gradients and buffers sent, and of weights received
        )
        self.awaited: set[int] = set()  # shards whose weights have not arrived
        self.outdated = False  # whether the weights that arrive now will be sent once more
        self.replied = threading.Event()  # set when the weights of all shards have arrived
        self.lock = threading.Lock()  # guards `awaited`, `outdated` and `replied`
        self.receiver: threading.Thread | None = None  # thread that receives the server's frames
        self.to_send: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def expect_all(self, outdated: bool = False) -> None:
        """Expect the weights of all shards from the server.

        Args:
            outdated: Whether weights that arrive before the server's next WAIT do not count.
        """
        with self.lock:
            self.replied.clear()
            self.awaited = set(self.shards)
            self.outdated = outdated

    def record_arrived(self, shards: range) -> None:
        """Record that the weights of some shards have arrived."""
        with self.lock:
            self.awaited.difference_update(shards)
            if not self.awaited and not self.outdated:
                self.replied.set()
