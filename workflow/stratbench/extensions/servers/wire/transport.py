"""Connections that transport frames, over TCP or a local socket, and how workers find servers.

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

from stratbench.cell.files import write_text_atomically
from stratbench.extensions.servers.wire.frames import (
    HEADER_BYTES,
    PROTOCOL,
    Frame,
    Header,
    ProtocolError,
)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DISCARD_BYTES = 64 * 1024
#: Fields of Linux's struct tcp_info by their offsets (linux/tcp.h): the number of segments that wait for an
#: acknowledgement, and the milliseconds since the last acknowledgement.
_UNACKED, _LAST_ACK = struct.Struct("24xI"), struct.Struct("56xI")


class Closed(ConnectionError):
    """Error if the peer or this process has closed the connection. The message says at which point."""


class Silent(ConnectionError):
    """Error if the peer has sent nothing until a deadline."""


#: A connected socket, and its transport, "tcp" or "shm".
SocketAndTransport = tuple[socket.socket, str]


class PauseDetector:
    """Detects pauses of this process, such as those of a suspended job or machine.

    After a pause, the silence of peers counts from its end, because they may have been paused as well.
    """

    def __init__(self, interval_s: float) -> None:
        """Start to detect pauses.

        Args:
            interval_s: Seconds between two calls of `update_last_pause_end`.
        """
        self._longest_s = 3 * interval_s
        self.since = self._looked = time.monotonic()

    def update_last_pause_end(self, now: float) -> float:
        """Record that this process runs at `now`, and return when its last pause ended.

        Both times are values of time.monotonic().
        """
        if now - self._looked > self._longest_s:
            self.since = now
        self._looked = now
        return self.since


class Connection:
    """Sends and receives frames over one stream socket. One thread receives, and several may send.

    The socket blocks. The kernel's receive timeout wakes the reading thread every `tick_s` seconds, so that
    it can check its deadlines. Python's own timeouts would make the socket non-blocking, so that one system
    call could not receive a whole shard.
    """

    def __init__(self, sock: socket.socket, tick_s: float = 1.0) -> None:
        sock.setblocking(True)
        seconds = int(tick_s)
        timeval = struct.pack("@ll", seconds, int((tick_s - seconds) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        if sock.family != socket.AF_UNIX:
            _set_tcp_options(sock)
        self.sock = sock
        self.replays = 0
        #: Function that is called with each frame that the peer sends a second time. The frame is skipped.
        self.on_replay: Callable[[Frame], None] = lambda frame: None
        #: Value of time.monotonic() after which receiving raises Silent. None: no deadline.
        self.deadline: float | None = None
        #: Seconds without data from the peer after which receiving raises Silent. None: no limit.
        self.silence_s: float | None = None
        #: Seconds without an acknowledgement by the peer's host after which receiving raises Silent. None: no
        #: limit.
        self.vanished_s: float | None = None
        self._awake = PauseDetector(tick_s)
        self.last_heard = time.monotonic()
        #: Value of time.monotonic() since when a thread has been waiting for data. None: no thread waits.
        self.waiting_since: float | None = None
        self._head = bytearray(HEADER_BYTES)
        self._send_lock = threading.Lock()

    def set_frame_keys(self, sending_key: bytes, receiving_key: bytes, limit_bytes: int) -> None:
        """Set the keys that authenticate all later frames, and the limit of their payloads.

        Args:
            sending_key: Key of sent frames.
            receiving_key: Key of received frames.
            limit_bytes: Maximum size of a received payload, in bytes.
        """
        self._out, self._in = Header(sending_key), Header(receiving_key)
        self.limit_bytes = limit_bytes

    def send(self, frame: Frame, payload: Any = b"") -> None:
        """Send one frame with its payload, a bytes-like object that is not copied."""
        with self._send_lock:
            self._send(frame, payload)

    def send_descriptor(self, frame: Frame, descriptor: int) -> None:
        """Send a frame and a file descriptor over a local socket.

        The frame has a payload of one byte.
        """
        with self._send_lock:
            try:
                self.sock.sendall(self._out.pack_frame(frame._replace(length=1)))
                socket.send_fds(self.sock, [b"\0"], [descriptor])
            except OSError as error:
                raise Closed(f"the frame could not be sent: {error.strerror or error}") from None

    def read_descriptor(self) -> int:
        """Receive the file descriptor that follows the last frame. The caller must close it."""
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
            raise ProtocolError(
                f"malformed frame: it came with {len(descriptors)} file descriptors, expected 1"
            )
        return descriptors[0]

    def send_unless_busy(self, frame: Frame, payload: bytes = b"") -> None:
        """Send a small frame such as a heartbeat, unless another thread is sending at present.

        If another thread is sending, the peer hears from this process anyway.
        """
        if self._send_lock.acquire(blocking=False):
            try:
                self._send(frame, payload)
            finally:
                self._send_lock.release()

    def _send(self, frame: Frame, payload: Any) -> None:
        length = len(payload)
        head = self._out.pack_frame(frame._replace(length=length))
        try:
            sent = self.sock.sendmsg([head, payload])
            if sent < len(head):
                self.sock.sendall(head[sent:])
                sent = len(head)
            rest = sent - len(head)
            if rest < length:
                self.sock.sendall(memoryview(payload)[rest:])
        except OSError as error:
            raise Closed(f"the frame could not be sent: {error.strerror or error}") from None

    def receive(self) -> Frame:
        """Receive the header of the next frame. The caller must read its payload next.

        Repeated frames are counted and skipped.

        Raises:
            Closed: If the connection has ended.
            Silent: If a deadline has passed.
            ProtocolError: If the frame is invalid.
        """
        while True:
            self.receive_bytes_into(memoryview(self._head), between_frames=True)
            frame, replayed = self._in.unpack_frame(self._head, self.limit_bytes)
            if not replayed:
                return frame
            self.replays += 1
            self.on_replay(frame)
            self.discard_payload(frame.length)

    def receive_bytes_into(self, view: memoryview, between_frames: bool = False) -> None:
        """Receive bytes into the memory `view`, until it is full.

        Args:
            view: Memory that is filled.
            between_frames: Whether the connection may end here without an incomplete frame.
        """
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

    def read_payload(self, n_bytes: int) -> bytes:
        """Receive a small payload of `n_bytes` bytes, a length that the caller has checked."""
        data = bytearray(n_bytes)
        self.receive_bytes_into(memoryview(data))
        return bytes(data)

    def discard_payload(self, n_bytes: int) -> None:
        """Receive a payload of `n_bytes` bytes, and drop it."""
        scratch = memoryview(bytearray(min(n_bytes, _DISCARD_BYTES)))
        while n_bytes > 0:
            part = scratch[: min(n_bytes, _DISCARD_BYTES)]
            self.receive_bytes_into(part)
            n_bytes -= len(part)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self.deadline is not None and now > self.deadline:
            raise Silent("the peer sent no complete frame before the deadline")
        heard = max(self.last_heard, self._awake.update_last_pause_end(now))
        if self.silence_s is not None and now - heard > self.silence_s:
            raise Silent(f"the peer has sent nothing for {self.silence_s:g} s")
        if (
            self.vanished_s is not None
            and now - heard > self.vanished_s
            and self._has_peer_host_vanished()
        ):
            raise Silent(f"the peer's host has not answered for {self.vanished_s:g} s")

    def _has_peer_host_vanished(self) -> bool:
        """Return whether the peer's host has not acknowledged sent data for `vanished_s` seconds.

        A host that is alive acknowledges data even if the receiving process is busy or stopped.
        """
        if self.sock.family == socket.AF_UNIX:
            return False
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        (unacked,), (last_ack_ms,) = _UNACKED.unpack_from(info), _LAST_ACK.unpack_from(info)
        return unacked > 0 and last_ack_ms > 1000 * self.vanished_s

    def close(self) -> None:
        """Close the connection at once. Threads that wait in it raise Closed."""
        with contextlib.suppress(OSError):  # the connection may be closed already
            self.sock.shutdown(socket.SHUT_RDWR)


def _set_tcp_options(sock: socket.socket) -> None:
    """Turn off TCP's delay of small frames, and choose the congestion control.

    Connections within a host use "reno".

    The congestion control BBR halves the throughput on loopback, because it delays packets. Buffer sizes stay
    those that the kernel chooses.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_CONGESTION") and sock.getsockname()[0] == sock.getpeername()[0]:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _read_boot_id() -> str:
    """Return the identifier of this host's running kernel.

    The text is empty if there is none.
    """
    return _BOOT_ID.read_text(encoding="utf-8").strip() if _BOOT_ID.exists() else ""


class Listeners:
    """A server's listening sockets: one for TCP, and a local one if the system supports it.

    The TCP socket binds to the address `host`, with a port that the kernel chooses. Workers connect to the
    name `advertise`, or to `host` if that is None.
    """

    def __init__(self, host: str, advertise: str | None = None) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self.tcp = socket.create_server((host, 0), family=family, backlog=128)
        self.host = advertise or host
        self.port = self.tcp.getsockname()[1]
        self.local: socket.socket | None = None
        self.local_name = ""
        if hasattr(os, "memfd_create"):
            # The socket's name is in the abstract namespace. So a killed server leaves no file.
            self.local_name = f"stratbench-{secrets.token_hex(16)}"
            self.local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.local.bind("\0" + self.local_name)
            self.local.listen(128)

    @property
    def sockets(self) -> list[socket.socket]:
        """All listening sockets of the server."""
        return [self.tcp] if self.local is None else [self.tcp, self.local]

    def publish_addresses(self, path: str | Path, server: int, incarnation: int = 1) -> None:
        """Write the rendezvous file of a server, `<path>.<server>`, atomically.

        Args:
            path: Path of the rendezvous files, without their suffix.
            server: Number of the server.
            incarnation: Number of starts of an elastic run's servers, including this one.
        """
        endpoint = {
            "protocol": PROTOCOL,
            "server": server,
            "incarnation": incarnation,
            "host": self.host,
            "port": self.port,
            "local": self.local_name,
            "boot_id": _read_boot_id(),
            "pid": os.getpid(),
        }
        write_text_atomically(get_rendezvous_path(path, server), json.dumps(endpoint))

    def close(self) -> None:
        """Close the listening sockets."""
        for sock in self.sockets:
            sock.close()


def get_rendezvous_path(path: str | Path, server: int) -> Path:
    """Return the path of the file in which a server publishes its addresses."""
    return Path(f"{path}.{server}")


def _connect_once(endpoint: dict[str, Any], transport: str) -> SocketAndTransport:
    local = endpoint["local"] and endpoint["boot_id"] and endpoint["boot_id"] == _read_boot_id()
    if transport != "tcp" and local and hasattr(os, "memfd_create"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect("\0" + endpoint["local"])
            return sock, "shm"
        except OSError:
            # The server may be in another network namespace on this host, such as a container. Try TCP.
            sock.close()
            if transport == "shm":
                raise
    if transport == "shm":
        raise ConnectionError("transport is shm, but the server is not on this Linux host")
    return socket.create_connection((endpoint["host"], endpoint["port"]), timeout=5.0), "tcp"


def connect_to_server(
    path: str | Path, server: int, transport: str, deadline: float
) -> SocketAndTransport:
    """Connect to a server as soon as it answers.

    The call waits until the deadline for the server's rendezvous file and its answer.

    Args:
        path: Path of the rendezvous files, without their suffix.
        server: Number of the server.
        transport: "auto", "shm" or "tcp".
        deadline: Value of time.monotonic() at which to give up.

    Returns:
        The connected socket, and its transport: "shm" or "tcp".

    Raises:
        ConnectionError: If the deadline has passed.
    """
    if transport not in ("auto", "shm", "tcp"):
        raise ValueError(f"transport is {transport!r}; expected auto, shm or tcp")
    file = get_rendezvous_path(path, server)
    while True:
        try:
            return _connect_once(json.loads(file.read_text(encoding="utf-8")), transport)
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"no parameter server answers at {file} ({error}): is server {server} running?"
                ) from None
        time.sleep(0.02)
