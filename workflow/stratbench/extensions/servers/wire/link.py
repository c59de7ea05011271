"""A worker's connection to one server, and the exceptions that end the connection."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from stratbench.extensions.servers.wire.transport import Connection


class ServerLost(ConnectionError):
    """Error if the connection to a server has ended, or the server has sent nothing for too long."""


class RunEnded(RuntimeError):
    """Error if a server has ended the run, or this worker's part in it. The message has the reason."""


class Left(RuntimeError):
    """Raised in a worker that was told to leave, after it has left the run."""


class Link:
    """A worker's connection to one server, which stores the model's shards with numbers `shards`."""

    def __init__(self, connection: Connection, server: int, transport: str, welcome: dict) -> None:
        self.connection, self.server, self.transport = connection, server, transport
        self.shards = range(int(welcome["first"]), int(welcome["stop"]))
        self.shard_numel = int(welcome["shard_numel"])
        self.n_servers = int(welcome["n_servers"])
        self.has_buffers = bool(welcome["buffers"])
        #: Number of starts of an elastic run's servers, including this one. None: workers are not elastic.
        self.incarnation: int | None = welcome.get("incarnation")
        self.snapshot_dir: str | None = welcome["snapshot_dir"]
        self.deadline_s = float(welcome["heartbeat_deadline_s"])
        self.bytes_out = 0  # bytes of gradients and buffers that were sent to the server
        self.bytes_in = 0  # bytes of weights that were received from the server
        self.awaited: set[int] = set()  # numbers of the shards whose weights have not arrived yet
        # Whether arriving weights do not count, because newer ones will follow.
        self.outdated = False
        # Set when the weights of all shards have arrived.
        self.all_weights_arrived = threading.Event()
        self.lock = threading.Lock()  # guards `awaited`, `outdated` and `all_weights_arrived`
        # The thread that receives the server's frames.
        self.receiver: threading.Thread | None = None
        self.to_send: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def expect_all_weights(self, outdated: bool = False) -> None:
        """Expect that the server sends the weights of all its shards.

        Args:
            outdated: Whether weights that arrive before the server's next WAIT do not count.
        """
        with self.lock:
            self.all_weights_arrived.clear()
            self.awaited = set(self.shards)
            self.outdated = outdated

    def record_arrived_weights(self, shards: range) -> None:
        """Record that the weights of some shards have arrived."""
        with self.lock:
            self.awaited.difference_update(shards)
            if not self.awaited and not self.outdated:
                self.all_weights_arrived.set()
