"""The server's door: accepts connections, and lets in who knows the job's secret."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from stratbench.ps.frames import Frame, Kind, ProtocolError
from stratbench.ps.handshake import open_handshake
from stratbench.ps.transport import Closed, Connection, Listeners, Silent

log = logging.getLogger(__name__)

#: Connections that have not shown that they know the secret, at most, at a time.
_MOST_STRANGERS = 64
_REFUSALS_KEPT = 100


class Refusals:
    """What was refused, for the log and the statistics."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []  # the first hundred
        self._lock = threading.Lock()

    def add(self, who: str, reason: str) -> None:
        """`who` was refused because of `reason`."""
        log.warning("refused %s: %s", who, reason)
        with self._lock:
            self.count += 1
            if len(self.first) < _REFUSALS_KEPT:
                self.first.append(f"{who}: {reason}")


class Gate:
    """Accepts connections, each on a thread of its own, until `over` is set.

    `enter(connection, hello, nonces, transport)` is called for a peer that knows the secret, and
    serves it; a ProtocolError, Closed or Silent that it raises is a refusal.
    """

    def __init__(
        self,
        secret: bytes,
        deadline_s: float,
        over: threading.Event,
        refusals: Refusals,
        enter: Callable[[Connection, dict[str, Any], bytes, str], Callable[[], None]],
    ) -> None:
        """`enter` returns what the peer's thread shall do from then on."""
        self._secret, self._deadline_s, self._over = secret, deadline_s, over
        self._refusals, self._enter = refusals, enter
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)

    def accept(self, listeners: Listeners) -> None:
        """Accept until the run is over."""
        with selectors.DefaultSelector() as selector:
            for listener in listeners.sockets:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            while not self._over.is_set():
                for key, _ in selector.select(timeout=0.2):
                    try:
                        sock, address = key.fileobj.accept()
                    except OSError:
                        continue  # it went away again
                    transport = "shm" if key.fileobj is listeners.local else "tcp"
                    peer = "a local socket" if transport == "shm" else f"{address[0]}:{address[1]}"
                    threading.Thread(
                        target=self._attend, args=(sock, transport, peer), daemon=True
                    ).start()

    def _attend(self, sock: socket.socket, transport: str, peer: str) -> None:
        if not self._strangers.acquire(blocking=False):
            self._refusals.add(peer, "too many connections that have not shown the secret")
            sock.close()
            return
        try:
            serve = self._greet(sock, transport, peer)
        finally:
            self._strangers.release()
        if serve is not None:
            serve()

    def _greet(self, sock: socket.socket, transport: str, peer: str) -> Callable[[], None] | None:
        connection = Connection(sock, tick_s=min(1.0, self._deadline_s / 4))
        connection.on_replay = lambda frame: self._refusals.add(
            peer, f"replayed frame: {frame.kind.name}"
        )
        connection.deadline = time.monotonic() + self._deadline_s
        try:
            hello, nonces = open_handshake(connection, self._secret)
            serve = self._enter(connection, hello, nonces, transport)
        except (ProtocolError, Closed, Silent) as error:
            self._refusals.add(peer, str(error))
            _dismiss(connection, str(error))
            return None
        connection.deadline = None
        return serve


def _dismiss(connection: Connection, reason: str) -> None:
    with contextlib.suppress(Closed):  # it may not have waited for our reasons
        connection.send(Frame(Kind.ERR), reason.encode()[:1024])
    connection.close()
