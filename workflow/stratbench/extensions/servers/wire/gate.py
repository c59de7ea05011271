"""The part of a server that accepts connections and admits peers that know the job's secret."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from stratbench.extensions.servers.wire.frames import ComeAgain, Frame, Kind, ProtocolError
from stratbench.extensions.servers.wire.handshake import challenge_worker
from stratbench.extensions.servers.wire.transport import Closed, Connection, Listeners, Silent

log = logging.getLogger(__name__)

#: Maximum number of open connections whose peer has not proved yet that it knows the secret.
_MAX_PENDING = 64
_REFUSALS_KEPT = 100
#: Errors of `accept` if the process or the system has no resources left.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
#: Seconds to wait after an error of `_EXHAUSTED`.
_EXHAUSTED_PAUSE_S = 0.2


class Refusals:
    """Counts refused connections, and stores the first hundred for the server's statistics."""

    def __init__(self) -> None:
        self.count = 0
        self.first_texts: list[str] = []  # texts of the first hundred refusals
        self._lock = threading.Lock()

    def add_refusal(self, peer: str, reason: str) -> None:
        """Count a refused connection. The first hundred are also logged and stored.

        Args:
            peer: Name or address of the peer.
            reason: Reason of the refusal.
        """
        with self._lock:
            self.count += 1
            if len(self.first_texts) >= _REFUSALS_KEPT:
                return
            self.first_texts.append(f"{peer}: {reason}")
            last = len(self.first_texts) == _REFUSALS_KEPT
        log.warning("refused %s: %s", peer, reason)
        if last:
            log.warning("from here on refusals are only counted")


class Gate:
    """Accepts connections to a server. Each connection has a thread of its own.

    Peers that prove the secret are passed to `enter`, and refused if it raises an exception. Connections of
    other users to the local socket are refused at once. If too many peers have not proved the secret, the
    oldest connection is closed.
    """

    def __init__(
        self,
        secret: bytes,
        deadline_s: float,
        refusals: Refusals,
        enter: Callable[[Connection, dict[str, Any], bytes, str], Callable[[], None]],
    ) -> None:
        """Create a gate. It accepts no connection before `accept` is called.

        Args:
            secret: Secret of the job.
            deadline_s: Maximum seconds of a handshake.
            refusals: Counter of refused connections.
            enter: Called with connection, HELLO, nonces and transport of an admitted peer. It returns the
                function that the peer's thread runs from then on.
        """
        self._secret, self._deadline_s = secret, deadline_s
        self._refusals, self._enter = refusals, enter
        self._closed = threading.Event()
        self._wake, self._waker = socket.socketpair()  # by which `close` wakes `accept`
        # Connections whose peer has not proved yet that it knows the secret, in order of arrival.
        self._pending: dict[Connection, None] = {}
        self._lock = threading.Lock()  # guards `_pending`

    def accept(self, listeners: Listeners) -> None:
        """Accept connections until `close` is called."""
        with self._wake, selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for listener in listeners.sockets:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            while not self._closed.is_set():
                for key, _ in selector.select():
                    if key.fileobj is not self._wake:
                        self._accept_from_listener(key.fileobj, key.fileobj is listeners.local)

    def close(self) -> None:
        """Stop accepting connections, so that `accept` returns."""
        self._closed.set()
        self._waker.close()

    def _accept_from_listener(self, listener: socket.socket, local: bool) -> None:
        try:
            sock, address = listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:  # the connection stays queued until others have ended
                self._refusals.add_refusal("a connection", f"accept failed: {error.strerror}")
                self._close_oldest_unproved()
                self._closed.wait(_EXHAUSTED_PAUSE_S)
            return  # after another error, the peer has closed the connection already
        transport = "shm" if local else "tcp"
        peer = "a local socket" if local else f"{address[0]}:{address[1]}"
        try:
            if local:
                _check_peer_user(sock)
            connection = Connection(sock, tick_s=min(1.0, self._deadline_s / 4))
            with self._lock:
                crowded = len(self._pending) >= _MAX_PENDING
                self._pending[connection] = None
            if crowded:
                self._close_oldest_unproved()
            attend = threading.Thread(
                target=self._handle_connection, args=(connection, transport, peer), daemon=True
            )
            try:
                attend.start()
            except RuntimeError:  # the process cannot start more threads
                self._forget_unproved_connection(connection)
                raise
        except (OSError, RuntimeError, ProtocolError) as error:
            self._refusals.add_refusal(peer, str(error))
            sock.close()

    def _close_oldest_unproved(self) -> None:
        """Close the oldest connection whose peer has not proved yet that it knows the secret.

        The connection's thread counts the refusal.
        """
        with self._lock:  # no peer is admitted while the lock is held
            oldest = next(iter(self._pending), None)
            if oldest is not None:
                del self._pending[oldest]
                oldest.close()

    def _forget_unproved_connection(self, connection: Connection) -> bool:
        """Remove a connection from those whose peer has not proved its secret yet.

        The result is whether the connection was one of them.
        """
        with self._lock:
            known = connection in self._pending
            self._pending.pop(connection, None)
        return known

    def _handle_connection(self, connection: Connection, transport: str, peer: str) -> None:
        try:
            serve = self._admit_peer(connection, transport, peer)
        finally:
            self._forget_unproved_connection(connection)
        if serve is not None:
            serve()

    def _admit_peer(
        self, connection: Connection, transport: str, peer: str
    ) -> Callable[[], None] | None:
        connection.on_replay = lambda frame: self._refusals.add_refusal(
            peer, f"replayed frame: {frame.kind.name}"
        )
        connection.deadline = time.monotonic() + self._deadline_s
        try:
            hello, nonces = challenge_worker(connection, self._secret)
            # `_close_oldest_unproved` has closed this connection. The peer connects again.
            if not self._forget_unproved_connection(connection):
                raise Closed("this connection was closed in favour of a newer one; connect again")
            serve = self._enter(connection, hello, nonces, transport)
        except ComeAgain as error:
            _dismiss_connection(connection, str(error), may_retry=True)
            return None
        except Exception as error:
            # Other errors, such as a lack of memory, are logged with their traceback.
            if not isinstance(error, (ProtocolError, Closed, Silent)):
                log.exception("%s could not be taken in", peer)
            self._refusals.add_refusal(peer, str(error))
            _dismiss_connection(connection, str(error))
            return None
        connection.deadline = None
        return serve


def _check_peer_user(sock: socket.socket) -> None:
    """Raise ProtocolError if the peer of a local socket is another user's process."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user not in (0, os.geteuid()):
        raise ProtocolError(f"the peer's user {user} is not the user of this job")


def _dismiss_connection(connection: Connection, reason: str, may_retry: bool = False) -> None:
    with contextlib.suppress(Closed):  # the peer may have closed its side of the connection
        connection.send(Frame(Kind.ERR, count=int(may_retry)), reason.encode()[:1024])
    connection.close()
