"""Connections that carry frames, over TCP or next to shared memory, and how workers find servers.

A server publishes its addresses in a rendezvous file. A worker on the same host takes the local socket, any
other worker takes TCP.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_atomic
from stratbench.ps.wire.frames import HEADER_BYTES, PROTOCOL, Frame, Header, ProtocolError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DISCARD_BYTES = 64 * 1024
#: Offsets in Linux's struct tcp_info: the segments that wait for an acknowledgement, and the milliseconds
#: since the last one (linux/tcp.h).
_UNACKED, _LAST_ACK = struct.Struct("24xI"), struct.Struct("56xI")


class Closed(ConnectionError):
    """The peer, or this side, has closed the connection; the text says when."""


class Silent(ConnectionError):
    """The peer was silent until the deadline."""


class Awake:
    """Time since which this process has not been paused, by a suspended job or with its machine.

    Silent peers may have been paused as well, so that silence counts from then on.
    """

    def __init__(self, interval_s: float) -> None:
        """`look` is called about every `interval_s`."""
        self._longest_s = 3 * interval_s
        self.since = self._looked = time.monotonic()

    def look(self, now: float) -> float:
        """Note that the process is awake `now` (time.monotonic()); return since when."""
        if now - self._looked > self._longest_s:
            self.since = now
        self._looked = now
        return self.since


class Connection:
    """Frames over one stream socket. One thread receives; several may send.

    The socket blocks; the kernel's receive timeout wakes the reader every `tick_s` so that it can
    look at its deadline (Python's own timeouts would make the socket non-blocking, and one system
    call could no longer receive a whole shard).
    """

    def __init__(self, sock: socket.socket, tick_s: float = 1.0) -> None:
        sock.setblocking(True)
        seconds = int(tick_s)
        timeval = struct.pack("@ll", seconds, int((tick_s - seconds) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        if sock.family != socket.AF_UNIX:
            _tune(sock)
        self.sock = sock
        self.replays = 0
        #: Called with a replayed frame, which is then skipped.
        self.on_replay: Callable[[Frame], None] = lambda frame: None
        #: time.monotonic() after which receiving raises Silent; None: never.
        self.deadline: float | None = None
        #: Longest silence of the peer, in seconds, before receiving raises Silent.
        self.silence_s: float | None = None
        #: Maximum time without an acknowledgement by the peer's host, in seconds, before receiving raises
        #: Silent.
        self.vanished_s: float | None = None
        self._awake = Awake(tick_s)
        self.last_heard = time.monotonic()
        #: time.monotonic() since when the reader has been waiting; None while it works.
        self.waiting_since: float | None = None
        self._head = bytearray(HEADER_BYTES)
        self._send_lock = threading.Lock()

    def use_keys(self, sending: bytes, receiving: bytes, limit_bytes: int) -> None:
        """Authenticate frames with these keys from now on, and reject larger payloads.

        Args:
            sending: Key of sent frames.
            receiving: Key of received frames.
            limit_bytes: Maximum size of payloads.
        """
        self._out, self._in = Header(sending), Header(receiving)
        self.limit_bytes = limit_bytes

    def send(self, frame: Frame, payload: Any = b"") -> None:
        """Send one frame; `payload` is a bytes-like object, sent without a copy."""
        with self._send_lock:
            self._send(frame, payload)

    def send_descriptor(self, frame: Frame, descriptor: int) -> None:
        """Send a frame with a file descriptor next to its payload of one byte (local sockets)."""
        with self._send_lock:
            try:
                self.sock.sendall(self._out.pack(frame._replace(length=1)))
                socket.send_fds(self.sock, [b"\0"], [descriptor])
            except OSError as error:
                raise Closed(f"could not send: {error.strerror or error}") from None

    def read_descriptor(self) -> int:
        """Return the file descriptor that came with the last frame; the caller closes it."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:
                self._check_deadlines()
            except OSError as error:
                raise Closed(f"the connection broke: {error.strerror or error}") from None
        if not data:
            raise Closed("truncated frame")
        if len(descriptors) != 1:
            raise ProtocolError(f"{len(descriptors)} file descriptors came, expected 1")
        return descriptors[0]

    def send_if_free(self, frame: Frame, payload: bytes = b"") -> None:
        """Send a small frame unless another thread is sending, which is a sign of life itself."""
        if self._send_lock.acquire(blocking=False):
            try:
                self._send(frame, payload)
            finally:
                self._send_lock.release()

    def _send(self, frame: Frame, payload: Any) -> None:
        length = len(payload)
        head = self._out.pack(frame._replace(length=length))
        try:
            sent = self.sock.sendmsg([head, payload])
            if sent < len(head):
                self.sock.sendall(head[sent:])
                sent = len(head)
            rest = sent - len(head)
            if rest < length:
                self.sock.sendall(memoryview(payload)[rest:])
        except OSError as error:
            raise Closed(f"could not send: {error.strerror or error}") from None

    def receive(self) -> Frame:
        """Return the next frame's header; its payload, if any, must be read next.

        Raises Closed at the stream's end, Silent past a deadline, ProtocolError for a bad frame.
        Replays are skipped and counted.
        """
        while True:
            self.receive_into(memoryview(self._head), between_frames=True)
            frame, replayed = self._in.unpack(self._head, self.limit_bytes)
            if not replayed:
                return frame
            self.replays += 1
            self.on_replay(frame)
            self.discard(frame.length)

    def receive_into(self, view: memoryview, between_frames: bool = False) -> None:
        """Fill `view` (bytes) from the stream."""
        filled, n_bytes = 0, len(view)
        self.waiting_since = time.monotonic()
        while filled < n_bytes:
            try:
                got = self.sock.recv_into(view[filled:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                self._check_deadlines()
                continue
            except OSError as error:
                raise Closed(f"the connection broke: {error.strerror or error}") from None
            if got == 0:
                whole = between_frames and filled == 0
                raise Closed("the connection was closed" if whole else "truncated frame")
            filled += got
            self.last_heard = time.monotonic()
            if self.deadline is not None:
                self._check_deadlines()
        self.waiting_since = None

    def read(self, n_bytes: int) -> bytes:
        """Return a small payload of `n_bytes` (already checked against the limit) as bytes."""
        data = bytearray(n_bytes)
        self.receive_into(memoryview(data))
        return bytes(data)

    def discard(self, n_bytes: int) -> None:
        """Read and drop `n_bytes`."""
        scratch = memoryview(bytearray(min(n_bytes, _DISCARD_BYTES)))
        while n_bytes > 0:
            part = scratch[: min(n_bytes, _DISCARD_BYTES)]
            self.receive_into(part)
            n_bytes -= len(part)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self.deadline is not None and now > self.deadline:
            raise Silent("nothing complete came before the deadline")
        heard = max(self.last_heard, self._awake.look(now))
        if self.silence_s is not None and now - heard > self.silence_s:
            raise Silent(f"nothing was heard for {self.silence_s:g} s")
        if self.vanished_s is not None and now - heard > self.vanished_s and self._unanswered():
            raise Silent(f"its host has not answered for {self.vanished_s:g} s")

    def _unanswered(self) -> bool:
        """Return whether the peer's host has left what was sent unacknowledged for `vanished_s`.

        A host answers for a process that is busy or stopped, too, and while that reads nothing.
        """
        if self.sock.family == socket.AF_UNIX:
            return False
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        (unacked,), (last_ack_ms,) = _UNACKED.unpack_from(info), _LAST_ACK.unpack_from(info)
        return unacked > 0 and last_ack_ms > 1000 * self.vanished_s

    def close(self) -> None:
        """Close at once; a thread blocked in this connection wakes with Closed."""
        with contextlib.suppress(OSError):  # the peer may have been faster
            self.sock.shutdown(socket.SHUT_RDWR)


def _tune(sock: socket.socket) -> None:
    """Send small frames at once; within a host, do not pace.

    Where the system's congestion control is BBR, it spaces packets out even on loopback, at half
    the throughput. Buffer sizes are the kernel's: it tunes them better than any constant.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_CONGESTION") and sock.getsockname()[0] == sock.getpeername()[0]:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _boot_id() -> str:
    """Return names this host's running kernel; empty where the system has no such thing."""
    return _BOOT_ID.read_text(encoding="utf-8").strip() if _BOOT_ID.exists() else ""


class Listeners:
    """A server's two listening sockets: TCP, and a local one where the system has them.

    Binds to `host` alone, by default the loopback address; `advertise` is what workers connect to
    when that is another name for it. The kernel chooses the port.
    """

    def __init__(self, host: str, advertise: str | None = None) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self.tcp = socket.create_server((host, 0), family=family, backlog=128)
        self.host = advertise or host
        self.port = self.tcp.getsockname()[1]
        self.local: socket.socket | None = None
        self.local_name = ""
        if hasattr(os, "memfd_create"):
            # A name in the abstract namespace leaves no file behind when the server is killed.
            self.local_name = f"stratbench-{secrets.token_hex(16)}"
            self.local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.local.bind("\0" + self.local_name)
            self.local.listen(128)

    @property
    def sockets(self) -> list[socket.socket]:
        """The sockets to accept from."""
        return [self.tcp] if self.local is None else [self.tcp, self.local]

    def publish(self, path: str | Path, server: int, incarnation: int = 1) -> None:
        """Write server `server`'s rendezvous file, `<path>.<server>`, atomically.

        Args:
            path: Path of the rendezvous files, without their endings.
            server: Number of the server.
            incarnation: How often the servers of an elastic run were started, this time included.
        """
        endpoint = {
            "protocol": PROTOCOL,
            "server": server,
            "incarnation": incarnation,
            "host": self.host,
            "port": self.port,
            "local": self.local_name,
            "boot_id": _boot_id(),
            "pid": os.getpid(),
        }
        write_atomic(rendezvous_file(path, server), json.dumps(endpoint))

    def close(self) -> None:
        """Stop listening."""
        for sock in self.sockets:
            sock.close()


def rendezvous_file(path: str | Path, server: int) -> Path:
    """Return the file in which server `server` of the job publishes its addresses."""
    return Path(f"{path}.{server}")


def _dial(endpoint: dict[str, Any], transport: str) -> tuple[socket.socket, str]:
    local = endpoint["local"] and endpoint["boot_id"] and endpoint["boot_id"] == _boot_id()
    if transport != "tcp" and local and hasattr(os, "memfd_create"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect("\0" + endpoint["local"])
            return sock, "shm"
        except OSError:
            # Same kernel, but another network namespace (a container): TCP may still work.
            sock.close()
            if transport == "shm":
                raise
    if transport == "shm":
        raise ConnectionError("shared memory needs the server on this host (Linux)")
    return socket.create_connection((endpoint["host"], endpoint["port"]), timeout=5.0), "tcp"


def dial(
    path: str | Path, server: int, transport: str, deadline: float
) -> tuple[socket.socket, str]:
    """Connect to server `server` of the job; return the socket and "shm" or "tcp".

    Waits for the rendezvous file, and for a server behind it, until `deadline`.

    Args:
        path: Path of the rendezvous files, without their endings.
        server: Number of the server.
        transport: "auto", "shm" or "tcp".
        deadline: Value of time.monotonic().

    Raises:
        ConnectionError: When the deadline has passed.
    """
    if transport not in ("auto", "shm", "tcp"):
        raise ValueError(f"transport is {transport!r}; expected auto, shm or tcp")
    file = rendezvous_file(path, server)
    while True:
        try:
            return _dial(json.loads(file.read_text(encoding="utf-8")), transport)
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"no parameter server answers at {file} ({error}): is server {server} running?"
                ) from None
        time.sleep(0.02)
