"""A worker as the server sees it: its ticket, queued replies, and transport of shards."""

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

from stratbench.extensions.servers.ps.tickets import Ticket
from stratbench.extensions.servers.wire.frames import BUFFERS, Frame, Kind, ProtocolError
from stratbench.extensions.servers.wire.shm import DTYPES, FlatTensors, Layout, attach_flat_tensors
from stratbench.extensions.servers.wire.transport import Connection
from stratbench.workload.flat import get_tensor_bytes

#: Maximum number of shards that one frame announces over shared memory, so that the worker can begin earlier.
_RUN_SHARDS = 16

Bounds = list[tuple[int, int]]  # first element and end of each shard in the flat tensor


class Weights(Protocol):
    """Protocol of an object that gives a `StreamLane` or `SharedLane` the shards' weights to send.

    See `Shard.view` and `Shard.lend_weights`.
    """

    def view(self, slot: int, shard: int, out: Tensor, alive: Callable[[], bool]) -> int: ...

    def lend_weights(
        self, slot: int, shard: int, spare: Tensor, alive: Callable[[], bool]
    ) -> AbstractContextManager[tuple[Tensor, int]]: ...


class StreamLane:
    """Transport of shards to and from one worker over TCP, as payloads of frames.

    Shards are received one after the other into the same buffer. Those in `held` have a buffer each, which is
    valid until the next push.
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

    def _get_receive_buffer(self, shard: int) -> Tensor:
        """Return the receive buffer of a shard's gradient, in the dtype that is sent."""
        if shard == BUFFERS:
            return self._buffers
        start = 0 if self._first is None else self._bounds[shard][0] - self._first
        return self._wire[start : start + self._numel(shard)]

    def moved_bytes(self, shard: int) -> int:
        """Return how many bytes a push of this shard sends. The shard may be `BUFFERS`."""
        return self._get_receive_buffer(shard).nbytes

    def payload_bytes(self, moved_bytes: int) -> int:
        """Return the length of a frame's payload that transports this many bytes."""
        return moved_bytes

    def receive_shard(self, shard: int) -> None:
        """Receive the gradient of a shard, or the float buffers if `shard` is `BUFFERS`."""
        self._connection.receive_into(get_tensor_bytes(self._get_receive_buffer(shard)))

    def get_received_tensor(self, shard: int) -> Tensor:
        """Return the gradient or buffers that were received. The next `receive_shard` may overwrite them."""
        buffer = self._get_receive_buffer(shard)
        if buffer.dtype is self._grad.dtype or shard == BUFFERS:
            return buffer
        return self._grad[: self._numel(shard)].copy_(buffer)

    def take_weights(self, shard: int, out: Tensor) -> None:
        """Receive the initial weights of a shard into `out`."""
        self._connection.receive_into(get_tensor_bytes(out))

    def make_rehearsal_payload(self, shard: int) -> memoryview | bytes:
        """Return a warm-up reply's payload, which is as long as the shard's weights."""
        return get_tensor_bytes(self._out[: self._numel(shard)])

    def send_weights(
        self, slot: int, shards: list[int], weights: Weights, alive: Callable[[], bool]
    ) -> int:
        """Send the weights of some shards to the worker, and return the number of bytes.

        Args:
            slot: Slot of the worker.
            shards: Numbers of the shards.
            weights: Source of the weights.
            alive: Returns whether the worker is still part of the run. If not, the read is not recorded,
                because another worker may have the slot.
        """
        sent_bytes = 0
        for shard in shards:
            spare = self._out[: self._numel(shard)]
            with weights.lend_weights(slot, shard, spare, alive) as (lent, version):
                payload = get_tensor_bytes(lent)
                self._connection.send(Frame(Kind.OK, shard, 1, version=version), payload)
            sent_bytes += len(payload)
        return sent_bytes


class SharedLane:
    """Access to shards in memory that is shared with one worker. Frames only announce them.

    The class has the methods of `StreamLane`.
    """

    def __init__(self, connection: Connection, bounds: Bounds, memory: FlatTensors) -> None:
        self._connection, self._bounds, self._memory = connection, bounds, memory

    def moved_bytes(self, shard: int) -> int:
        return self.get_received_tensor(shard).nbytes

    def payload_bytes(self, moved_bytes: int) -> int:
        return 0

    def receive_shard(self, shard: int) -> None:
        pass

    def get_received_tensor(self, shard: int) -> Tensor:
        if shard == BUFFERS:
            return self._memory.buffers
        start, stop = self._bounds[shard]
        return self._memory.grads[start:stop]

    def take_weights(self, shard: int, out: Tensor) -> None:
        start, stop = self._bounds[shard]
        out.copy_(self._memory.weights[start:stop])

    def make_rehearsal_payload(self, shard: int) -> memoryview | bytes:
        """Touch the shard's memory, and return an empty payload.

        Training then does not touch the memory first.
        """
        start, stop = self._bounds[shard]
        scratch = self._memory.grads[start:stop].clone()
        weights = self._memory.weights[start:stop]
        weights.copy_(scratch.copy_(weights))
        return b""

    def send_weights(
        self, slot: int, shards: list[int], weights: Weights, alive: Callable[[], bool]
    ) -> int:
        versions = {}
        for shard in shards:
            start, stop = self._bounds[shard]
            out = self._memory.weights[start:stop]
            versions[shard] = weights.view(slot, shard, out, alive)
        for first, count in _group_consecutive(versions):
            version = min(versions[k] for k in range(first, first + count))
            self._connection.send(Frame(Kind.OK, first, count, version=version))
        return sum(self.moved_bytes(shard) for shard in versions)


def _group_consecutive(numbers: dict[int, int]) -> list[tuple[int, int]]:
    """Return the first key and the length of each run of consecutive keys."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and sum(runs[-1]) == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


class Hello(NamedTuple):
    """The description that a worker sends of itself when it joins."""

    worker: int
    wire: str
    #: Whether the worker's gradients are multiplied by a loss scale, and may overflow.
    scaled: bool
    layout: Layout
    #: Hash of the worker's initial weights.
    start: str


def parse_hello(hello: dict[str, Any], workers: int, transport: str) -> Hello:
    """Validate the description that a worker has sent, and return it.

    Args:
        hello: The description.
        workers: Exclusive upper bound of workers' numbers.
        transport: Transport of the connection, "tcp" or "shm".

    Raises:
        ProtocolError: If the description is invalid.
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
    """One worker of the run, as the server sees it: its connection, its ticket, and the frames to send."""

    def __init__(self, hello: Hello, connection: Connection, transport: str) -> None:
        self.worker, self.wire, self.scaled = hello.worker, hello.wire, hello.scaled
        self.place = hello.worker  # the worker's slot, by which policies and shards know it
        self.connection = connection
        self.transport = transport
        self.lane: StreamLane | SharedLane
        self.reader = threading.current_thread()
        self.sender: threading.Thread | None = None
        self.alive = True
        self.pulled = False  # whether the worker has asked for weights, and so is ready to start
        self.idle = False  # whether the worker waits because no ticket was free
        # Epoch whose snapshot the worker evaluates now; it is idle meanwhile.
        self.evaluates: int | None = None
        self.ticket: int | None = None  # number of the worker's current ticket
        self.next: Ticket | None = None  # ticket that is reserved for the worker
        self.last_ticket = 0
        self.todo: set[int] = set()  # shards of the current ticket that have not arrived
        #: With a loss scale, shards (and `BUFFERS`) that have arrived, until APPLY or SKIP follows.
        self.held: list[int] = []
        self.weight = 1.0  # weight of the push that is arriving
        #: Replies to send: numbers of shards, pairs of frame and payload, and None at the end.
        self._outbox: deque[Any] = deque()
        # This queue has one item per item of the outbox.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._sending = threading.Lock()  # lock of the thread that empties the outbox
        self._ended = self._mute = False
        self.tickets = self.skips = 0
        self.bytes_in = self.bytes_out = 0
        # Seconds that the worker waited for servers, as it reports when it leaves.
        self.wait_s: float | None = None

    def is_alive(self) -> bool:
        """Return whether the worker is still part of the run."""
        return self.alive

    def open_lane(self, bounds: Bounds, layout: Layout, mine: range) -> None:
        """Prepare the transport of this server's shards. For shared memory, receive and map the memory.

        Args:
            bounds: First element and end of each shard.
            layout: Sizes and dtypes of the worker's flat tensors.
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
            memory = attach_flat_tensors(connection.read_descriptor(), layout)
        except (OSError, ValueError) as error:
            raise ProtocolError(str(error)) from None
        self.lane = SharedLane(connection, bounds, memory)

    def assign_ticket(self, ticket: int, shards: range) -> None:
        """Set the worker's current ticket, and the shards to push for the ticket."""
        self.ticket = self.last_ticket = ticket
        self.todo = set(shards)

    def queue_item(self, item: int | tuple[Frame, memoryview | bytes] | None) -> None:
        """Append a shard, a frame with payload, or the end (None) to the outbox."""
        self._outbox.append(item)
        self._wake.put(None)

    def queue_frame(self, frame: Frame, payload: memoryview | bytes = b"") -> None:
        """Append a frame to the queue of replies to the worker."""
        self.queue_item((frame, payload))

    def end(self) -> None:
        """Append the end to the queue of replies. Nothing is sent after the end."""
        self.queue_item(None)

    def drop_shards(self) -> None:
        """Drop all weights that are queued or come later. Other frames are still sent."""
        self._mute = True

    @property
    def has_queued(self) -> bool:
        """Whether a reply to the worker is waiting to be sent."""
        return bool(self._outbox)

    def send_replies(self, weights: Weights) -> None:
        """Send queued frames and shards, and wait for more, until the end is queued.

        Each worker has a thread that runs this, so that a slow link of one worker does not delay others.
        """
        while not self._ended:
            with self._sending:
                self._send_queued(weights)
            if not self._ended:
                self._wake.get()

    def send_now(self, weights: Weights) -> None:
        """Send queued frames and shards now, unless the worker's sending thread is doing so.

        The thread that has received a push calls it, because that is faster than waking the other thread.
        """
        if not self._sending.acquire(blocking=False):
            return
        try:
            # From now on, silence counts against the worker.
            self.connection.waiting_since = time.monotonic()
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
                self.bytes_out += self.lane.send_weights(self.place, shards, weights, self.is_alive)
            elif (item := self._outbox.popleft()) is None:
                self._ended = True
            else:
                self.connection.send(*item)

    def compute_silence_s(self, now: float, awake_since: float) -> float:
        """Return the seconds in which the worker has sent nothing.

        Only time in which the server was running and receiving counts.
        """
        since = self.connection.waiting_since
        return 0.0 if since is None else now - max(since, awake_since, self.connection.last_heard)

    def close_transport(self) -> None:
        """Close the connection and free the transport, after the worker's threads have ended."""
        self.connection.close()
        self.connection.sock.close()
        del self.lane

    def check_ticket(self, frame: Frame) -> None:
        """Raise ProtocolError unless a frame belongs to the worker's current ticket."""
        if frame.ticket != self.ticket:
            raise ProtocolError(
                f"malformed frame: {frame.kind.name} for ticket {frame.ticket}, "
                f"which worker {self.worker} does not hold"
            )

    def make_statistics_row(self) -> dict[str, Any]:
        """Return the worker's row of the server's statistics."""
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
