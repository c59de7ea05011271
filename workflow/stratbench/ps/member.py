"""A worker on the server's side: its pending work and replies, and the transport of its shards."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from stratbench.ps.tickets import Ticket
from stratbench.ps.wire.frames import BUFFERS, Frame, Kind, ProtocolError
from stratbench.ps.wire.shm import DTYPES, FlatTensors, Layout, attach
from stratbench.ps.wire.transport import Connection
from stratbench.workload.flat import as_bytes

#: Most shards answered by one frame over shared memory; more would make the worker wait for them.
_RUN_SHARDS = 16

Bounds = list[tuple[int, int]]  # (start, stop) of every shard of the model


class Weights(Protocol):
    """Source of the weights that lanes send; see Shard.view and Shard.lend."""

    def view(self, slot: int, shard: int, out: Tensor, alive: Callable[[], bool]) -> int: ...

    def lend(
        self, slot: int, shard: int, spare: Tensor, alive: Callable[[], bool]
    ) -> AbstractContextManager[tuple[Tensor, int]]: ...


class StreamLane:
    """Transport of shards as payloads, over TCP.

    One shard is received at a time, into one buffer. If `held` names the shards to expect, each has a buffer
    of its own, valid until the next push.
    """

    def __init__(
        self,
        connection: Connection,
        bounds: Bounds,
        layout: Layout,
        wire: str,
        held: range | None = None,
    ) -> None:
        self._connection, self._bounds = connection, bounds
        numel = max(stop - start for start, stop in bounds)
        self._grad = torch.empty(numel, dtype=DTYPES[layout.dtype])
        self._out = torch.zeros_like(self._grad)
        self._wire = self._grad if wire == "native" else torch.empty(numel, dtype=DTYPES[wire])
        self._first: int | None = None  # element of the model where the held part begins
        if held is not None:
            self._first = bounds[held.start][0]
            part = bounds[held.stop - 1][1] - self._first
            self._wire = torch.empty(part, dtype=self._wire.dtype)
        self._buffers = torch.empty(layout.buffer_numel, dtype=DTYPES[layout.buffer_dtype])

    def _numel(self, shard: int) -> int:
        start, stop = self._bounds[shard]
        return stop - start

    def _place(self, shard: int) -> Tensor:
        """Return the buffer for the shard's gradient, in its wire format."""
        if shard == BUFFERS:
            return self._buffers
        start = 0 if self._first is None else self._bounds[shard][0] - self._first
        return self._wire[start : start + self._numel(shard)]

    def moved_bytes(self, shard: int) -> int:
        """Return bytes that a push of the shard, or of the BUFFERS, moves."""
        return self._place(shard).nbytes

    def payload_bytes(self, moved_bytes: int) -> int:
        """Length of the payload of a frame that moves as many bytes."""
        return moved_bytes

    def receive(self, shard: int) -> None:
        """Receive the shard's gradient, or the BUFFERS, that come now."""
        self._connection.receive_into(as_bytes(self._place(shard)))

    def received(self, shard: int) -> Tensor:
        """Return the received shard or BUFFERS, which the next one overwrites."""
        buffer = self._place(shard)
        if buffer.dtype is self._grad.dtype or shard == BUFFERS:
            return buffer
        return self._grad[: self._numel(shard)].copy_(buffer)

    def take_weights(self, shard: int, out: Tensor) -> None:
        """Write the shard's initial weights into `out`."""
        self._connection.receive_into(as_bytes(out))

    def blank(self, shard: int) -> memoryview | bytes:
        """Payload of an OK in the warm-up: as long as the shard's weights."""
        return as_bytes(self._out[: self._numel(shard)])

    def give(
        self, slot: int, shards: list[int], weights: Weights, alive: Callable[[], bool]
    ) -> int:
        """Send `shards` of `weights` to the worker in slot `slot`; return their bytes.

        Once it is no longer `alive`, its slot may be another's, for which nothing is noted.

        Args:
            slot: Slot of the worker.
            shards: Numbers of the shards.
            weights: Source of the weights.
            alive: Whether the worker is still part of the run.
        """
        sent_bytes = 0
        for shard in shards:
            spare = self._out[: self._numel(shard)]
            with weights.lend(slot, shard, spare, alive) as (lent, version):
                payload = as_bytes(lent)
                self._connection.send(Frame(Kind.OK, shard, 1, version=version), payload)
            sent_bytes += len(payload)
        return sent_bytes


class SharedLane:
    """Shards that stay where they are, in memory shared with the worker; frames only announce.

    The methods are those of StreamLane.
    """

    def __init__(self, connection: Connection, bounds: Bounds, memory: FlatTensors) -> None:
        self._connection, self._bounds, self._memory = connection, bounds, memory

    def moved_bytes(self, shard: int) -> int:
        return self.received(shard).nbytes

    def payload_bytes(self, moved_bytes: int) -> int:
        return 0

    def receive(self, shard: int) -> None:
        pass

    def received(self, shard: int) -> Tensor:
        if shard == BUFFERS:
            return self._memory.buffers
        start, stop = self._bounds[shard]
        return self._memory.grads[start:stop]

    def take_weights(self, shard: int, out: Tensor) -> None:
        start, stop = self._bounds[shard]
        out.copy_(self._memory.weights[start:stop])

    def blank(self, shard: int) -> memoryview | bytes:
        """Return nothing travels.

        But what is touched for the first time here is not in training.
        """
        start, stop = self._bounds[shard]
        scratch = self._memory.grads[start:stop].clone()
        weights = self._memory.weights[start:stop]
        weights.copy_(scratch.copy_(weights))
        return b""

    def give(
        self, slot: int, shards: list[int], weights: Weights, alive: Callable[[], bool]
    ) -> int:
        versions = {}
        for shard in shards:
            start, stop = self._bounds[shard]
            out = self._memory.weights[start:stop]
            versions[shard] = weights.view(slot, shard, out, alive)
        for first, count in _runs(versions):
            version = min(versions[k] for k in range(first, first + count))
            self._connection.send(Frame(Kind.OK, first, count, version=version))
        return sum(self.moved_bytes(shard) for shard in versions)


def _runs(numbers: dict[int, int]) -> list[tuple[int, int]]:
    """(first, length) of each run of consecutive keys."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and sum(runs[-1]) == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


class Hello(NamedTuple):
    """A worker's own description, sent when it joins."""

    worker: int
    wire: str
    scaled: bool  # its gradients carry a loss scale and may overflow
    layout: Layout
    start: str  # hash of the weights that it has built


def parse_hello(hello: dict[str, Any], workers: int, transport: str) -> Hello:
    """Return a peer's validated description, whose number must be below `workers`.

    Args:
        hello: The description.
        workers: Number of workers.
        transport: Transport of the connection.

    Raises:
        ProtocolError: If it is invalid.
    """
    try:
        worker, wire, scaled = hello["worker"], hello["wire"], hello["scaled"]
        layout, start = Layout(**hello["layout"]), str(hello["start"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"malformed HELLO: {error}") from None
    if type(worker) is not int or not 0 <= worker < workers:
        raise ProtocolError(f"worker {worker!r} is not one of 0..{workers - 1}")
    if wire != "native" and (wire != "bfloat16" or transport == "shm"):
        raise ProtocolError(f"wire format {wire!r} is not known over {transport}")
    if type(scaled) is not bool:
        raise ProtocolError(f"malformed HELLO: scaled is {scaled!r}")
    return Hello(worker, wire, scaled, layout, start)


class Member:
    """One worker of the run."""

    def __init__(self, hello: Hello, connection: Connection, transport: str) -> None:
        self.worker, self.wire, self.scaled = hello.worker, hello.wire, hello.scaled
        self.place = hello.worker  # its slot in policies and shards (ps.membership)
        self.connection = connection
        self.transport = transport
        self.lane: StreamLane | SharedLane
        self.reader = threading.current_thread()
        self.sender: threading.Thread | None = None
        self.alive = True
        self.pulled = False  # it is ready to start
        self.idle = False  # no ticket was left for it
        self.evaluates: int | None = None  # the epoch whose state it evaluates, idle meanwhile
        self.ticket: int | None = None  # its current ticket
        self.next: Ticket | None = None  # reserved for it
        self.last_ticket = 0
        self.todo: set[int] = set()  # shards of that ticket still to come
        self.held: list[int] = []  # shards that have come, and BUFFERS: they may have overflowed
        self.weight = 1.0  # of what has come
        #: Queue of data to send: shard numbers, (frame, payload), None at the end.
        self._outbox: deque[Any] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # as often as something is put
        self._sending = threading.Lock()  # held by the thread that takes from the outbox
        self._ended = self._mute = False
        self.tickets = self.skips = 0
        self.bytes_in = self.bytes_out = 0
        self.wait_s: float | None = None  # its own measurement, from its BYE

    def is_alive(self) -> bool:
        """Return whether it still takes part."""
        return self.alive

    def open_lane(self, bounds: Bounds, layout: Layout, mine: range) -> None:
        """Prepare the transport of shards `mine`; over shared memory, receive and map that memory.

        Args:
            bounds: Begin and end of each shard.
            layout: Flat tensors of the workers.
            mine: Numbers of this server's shards.
        """
        connection = self.connection
        if self.transport != "shm":
            held = mine if self.scaled else None
            self.lane = StreamLane(connection, bounds, layout, self.wire, held)
            return
        frame = connection.receive()
        if frame.kind is not Kind.MEMORY or frame.length != 1:
            raise ProtocolError(f"malformed frame: {frame.kind.name}, expected MEMORY")
        try:
            memory = attach(connection.read_descriptor(), layout)
        except (OSError, ValueError) as error:
            raise ProtocolError(str(error)) from None
        self.lane = SharedLane(connection, bounds, memory)

    def assign(self, ticket: int, shards: range) -> None:
        """Set the current ticket, for which all of `shards` are pending."""
        self.ticket = self.last_ticket = ticket
        self.todo = set(shards)

    def post(self, item: int | tuple[Frame, memoryview | bytes] | None) -> None:
        """Queue a shard, a frame with its payload, or the end (None), to be sent in this order."""
        self._outbox.append(item)
        self._wake.put(None)

    def tell(self, frame: Frame, payload: memoryview | bytes = b"") -> None:
        """Queue a frame for it."""
        self.post((frame, payload))

    def end(self) -> None:
        """Queue the end: nothing more will be sent."""
        self.post(None)

    def drop_shards(self) -> None:
        """Send no more weights, only other frames."""
        self._mute = True

    @property
    def has_mail(self) -> bool:
        """Whether something is queued for it."""
        return bool(self._outbox)

    def send_replies(self, weights: Weights) -> None:
        """Send everything that is or will be queued, until the end.

        Runs on the member's own thread, so that one worker's slow link does not delay others.
        """
        while not self._ended:
            with self._sending:
                self._send_queued(weights)
            if not self._ended:
                self._wake.get()

    def send_now(self, weights: Weights) -> None:
        """Send what is queued at once, unless the member's own thread is at it already.

        For the thread that has just received all of a push: it saves the others' waking up.
        """
        if not self._sending.acquire(blocking=False):
            return
        try:
            self.connection.waiting_since = time.monotonic()  # it is the worker's turn
            self._send_queued(weights)
        finally:
            self._sending.release()

    def _send_queued(self, weights: Weights) -> None:
        while self._outbox and not self._ended:
            shards = []
            while self._outbox and type(self._outbox[0]) is int and len(shards) < _RUN_SHARDS:
                shards.append(self._outbox.popleft())
            if shards and self._mute:
                continue
            if shards:
                self.bytes_out += self.lane.give(self.place, shards, weights, self.is_alive)
            elif (item := self._outbox.popleft()) is None:
                self._ended = True
            else:
                self.connection.send(*item)

    def silent_s(self, now: float, awake_since: float) -> float:
        """Return the seconds without a message from it, while the server was receiving and awake."""
        since = self.connection.waiting_since
        return 0.0 if since is None else now - max(since, awake_since, self.connection.last_heard)

    def let_go(self) -> None:
        """Free the transport of a lost worker whose threads have ended."""
        self.connection.close()
        self.connection.sock.close()
        del self.lane

    def check_ticket(self, frame: Frame) -> None:
        """Raise ProtocolError unless `frame` is about the ticket it works on."""
        if frame.ticket != self.ticket:
            raise ProtocolError(
                f"malformed frame: {frame.kind.name} for ticket {frame.ticket}, "
                f"which worker {self.worker} does not hold"
            )

    def summary(self) -> dict[str, Any]:
        """Return its row of the server's statistics."""
        return {
            "worker": self.worker,
            "transport": self.transport,
            "wire": self.wire,
            "tickets": self.tickets,
            "skips": self.skips,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "replayed_frames": self.connection.replays,
            "wait_s": self.wait_s,
        }
