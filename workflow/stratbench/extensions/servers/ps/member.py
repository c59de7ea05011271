"""A worker as the server sees it: its ticket, queued replies, and transport of shards."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stratbench.extensions.servers.ps.flat import ShardBounds
from stratbench.extensions.servers.ps.shard import Shard
from stratbench.extensions.servers.ps.tickets import Ticket
from stratbench.extensions.servers.wire.frames import BUFFERS, Frame, Kind, ProtocolError
from stratbench.extensions.servers.wire.shm import DTYPES, FlatTensors, Layout, attach_flat_tensors
from stratbench.extensions.servers.wire.transport import Connection
from stratbench.workload.flat import get_tensor_bytes

#: Maximum number of shards that one frame announces over shared memory. A worker can read these shards
#: before the server has written the others.
_RUN_SHARDS = 16


class StreamLane:
    """Transport of shards between the server and one worker over TCP, as payloads of frames.

    Shards are received one after the other into the same buffer. Each shard in `held` has a buffer of its
    own, which is valid until the next push.
    """

    def __init__(
        self,
        connection: Connection,
        bounds: ShardBounds,
        layout: Layout,
        wire: str,
        held: range | None = None,
    ) -> None:
        self._connection, self._bounds = connection, bounds
        numel = max(stop - start for start, stop in bounds)
        self._grad = torch.empty(numel, dtype=DTYPES[layout.dtype])
        self._out = torch.zeros_like(self._grad)
        self._wire = self._grad if wire == "native" else torch.empty(numel, dtype=DTYPES[wire])
        self._first: int | None = None  # first element of the shards in `held`, in the flat tensor
        if held is not None:
            self._first = bounds[held.start][0]
            part = bounds[held.stop - 1][1] - self._first
            self._wire = torch.empty(part, dtype=self._wire.dtype)
        self._buffers = torch.empty(layout.buffer_numel, dtype=DTYPES[layout.buffer_dtype])

    def _count_shard_elements(self, shard: int) -> int:
        start, stop = self._bounds[shard]
        return stop - start

    def _get_receive_buffer(self, shard: int) -> Tensor:
        """Return the receive buffer for a shard's gradient, in the dtype that workers send."""
        if shard == BUFFERS:
            return self._buffers
        start = 0 if self._first is None else self._bounds[shard][0] - self._first
        return self._wire[start : start + self._count_shard_elements(shard)]

    def count_pushed_bytes(self, shard: int) -> int:
        """Return the number of bytes that a push of a shard has.

        `BUFFERS` is the number of the float buffers.
        """
        return self._get_receive_buffer(shard).nbytes

    def compute_frame_payload_bytes(self, pushed_bytes: int) -> int:
        """Return the length of the payload of a frame that pushes `pushed_bytes` bytes."""
        return pushed_bytes

    def receive_shard(self, shard: int) -> None:
        """Receive the gradient of a shard, or the float buffers if `shard` is `BUFFERS`."""
        self._connection.receive_bytes_into(get_tensor_bytes(self._get_receive_buffer(shard)))

    def get_received_tensor(self, shard: int) -> Tensor:
        """Return the gradient of a shard, or the buffers, that `receive_shard` has received.

        The next `receive_shard` may overwrite the tensor.
        """
        buffer = self._get_receive_buffer(shard)
        if buffer.dtype is self._grad.dtype or shard == BUFFERS:
            return buffer
        return self._grad[: self._count_shard_elements(shard)].copy_(buffer)

    def receive_initial_shard(self, shard: int, out: Tensor) -> None:
        """Receive the initial weights of a shard into `out`."""
        self._connection.receive_bytes_into(get_tensor_bytes(out))

    def make_rehearsal_payload(self, shard: int) -> memoryview | bytes:
        """Return a payload as long as a shard's weights, for a reply in the warm-up."""
        return get_tensor_bytes(self._out[: self._count_shard_elements(shard)])

    def send_weights(
        self,
        slot: int,
        shards: list[int],
        shards_by_number: Mapping[int, Shard],
        is_alive: Callable[[], bool],
    ) -> int:
        """Send the weights of some shards to the worker, and return their bytes.

        Args:
            slot: Slot of the worker.
            shards: Numbers of the shards.
            shards_by_number: All shards of the server, by number.
            is_alive: Returns whether the worker is still part of the run. If not, the read is not recorded,
                because another worker may have the slot.
        """
        sent_bytes = 0
        for shard in shards:
            spare = self._out[: self._count_shard_elements(shard)]
            with shards_by_number[shard].lend_weights(slot, spare, is_alive) as (lent, version):
                payload = get_tensor_bytes(lent)
                self._connection.send(Frame(Kind.OK, shard, 1, version=version), payload)
            sent_bytes += len(payload)
        return sent_bytes


class SharedLane:
    """Transport of shards between the server and one worker in shared memory. Frames only announce shards.

    The class has the methods of `StreamLane`.
    """

    def __init__(self, connection: Connection, bounds: ShardBounds, memory: FlatTensors) -> None:
        self._connection, self._bounds, self._memory = connection, bounds, memory

    def count_pushed_bytes(self, shard: int) -> int:
        return self.get_received_tensor(shard).nbytes

    def compute_frame_payload_bytes(self, pushed_bytes: int) -> int:
        return 0

    def receive_shard(self, shard: int) -> None:
        pass

    def get_received_tensor(self, shard: int) -> Tensor:
        if shard == BUFFERS:
            return self._memory.buffers
        start, stop = self._bounds[shard]
        return self._memory.grads[start:stop]

    def receive_initial_shard(self, shard: int, out: Tensor) -> None:
        start, stop = self._bounds[shard]
        out.copy_(self._memory.weights[start:stop])

    def make_rehearsal_payload(self, shard: int) -> memoryview | bytes:
        """Access a shard's memory in the warm-up, and return an empty payload.

        The first access to memory is slow, and must not fall into the training. The payload is empty, because
        the worker reads the weights from shared memory.
        """
        start, stop = self._bounds[shard]
        scratch = self._memory.grads[start:stop].clone()
        weights = self._memory.weights[start:stop]
        weights.copy_(scratch.copy_(weights))
        return b""

    def send_weights(
        self,
        slot: int,
        shards: list[int],
        shards_by_number: Mapping[int, Shard],
        is_alive: Callable[[], bool],
    ) -> int:
        versions = {}
        for shard in shards:
            start, stop = self._bounds[shard]
            out = self._memory.weights[start:stop]
            versions[shard] = shards_by_number[shard].view(slot, out, is_alive)
        for group in _group_consecutive_shards(versions):
            version = min(versions[k] for k in group)
            self._connection.send(Frame(Kind.OK, group.start, len(group), version=version))
        return sum(self.count_pushed_bytes(shard) for shard in versions)


def _group_consecutive_shards(shards: Iterable[int]) -> list[range]:
    """Return the groups of shards whose numbers are consecutive."""
    groups: list[range] = []
    for shard in sorted(shards):
        start = groups.pop().start if groups and groups[-1].stop == shard else shard
        groups.append(range(start, shard + 1))
    return groups


class Hello(NamedTuple):
    """The description of a worker and its model, which the worker sends when it joins."""

    worker: int
    wire: str
    #: Whether the worker's gradients are multiplied by a loss scale, and may overflow.
    scaled: bool
    layout: Layout
    #: Hash of the worker's initial weights.
    start: str


def parse_hello(hello: dict[str, Any], worker_number_limit: int, transport: str) -> Hello:
    """Validate the description that a worker has sent of itself, and return it.

    Args:
        hello: The description.
        worker_number_limit: Exclusive upper bound of workers' numbers.
        transport: Transport of the connection, "tcp" or "shm".

    Raises:
        ProtocolError: If the description is invalid.
    """
    try:
        worker, wire, scaled = hello["worker"], hello["wire"], hello["scaled"]
        layout, start = Layout(**hello["layout"]), str(hello["start"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"malformed HELLO: {error}") from None
    if type(worker) is not int or not 0 <= worker < worker_number_limit:
        raise ProtocolError(f"worker number {worker!r} is not in 0 to {worker_number_limit - 1}")
    if wire != "native" and (wire != "bfloat16" or transport == "shm"):
        raise ProtocolError(f"wire format {wire!r} is not supported over {transport}")
    if type(scaled) is not bool:
        raise ProtocolError(f"malformed HELLO: scaled is {scaled!r}, expected true or false")
    return Hello(worker, wire, scaled, layout, start)


class Member:
    """One worker of the run, as the server sees it: its connection, its ticket, and the queued replies."""

    def __init__(self, hello: Hello, connection: Connection, transport: str) -> None:
        self.worker, self.wire, self.scaled = hello.worker, hello.wire, hello.scaled
        self.place = hello.worker  # the worker's slot, which identifies it to policies and shards
        self.connection = connection
        self.transport = transport
        self.lane: StreamLane | SharedLane
        self.reader = threading.current_thread()
        self.sender: threading.Thread | None = None
        self.alive = True
        # Whether the worker has requested weights, because it is ready to start.
        self.is_ready_to_start = False
        self.idle = False  # whether the worker waits because no ticket was free
        # Epoch whose snapshot the worker evaluates at present. An evaluating worker is idle.
        self.evaluated_epoch: int | None = None
        self.ticket: int | None = None  # number of the worker's current ticket
        # Ticket that is reserved for the worker as its next one.
        self.reserved_ticket: Ticket | None = None
        self.last_ticket = 0
        self.missing_shards: set[int] = set()  # shards of the current ticket that have not arrived
        #: With a loss scale: pushed shards (and `BUFFERS`) for which the worker has not sent APPLY or SKIP.
        self.held_shards: list[int] = []
        self.weight = 1.0  # weight of the arriving push in an average of pushes
        #: Queued replies: a shard's number for its weights, a pair of frame and payload, or None as the end.
        self._outbox: deque[Any] = deque()
        # One item per queued reply, for which the sending thread waits.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._sending = threading.Lock()  # held by the thread that sends the queued replies
        self._ended = self._mute = False
        self.tickets = self.skips = 0
        self.bytes_in = self.bytes_out = 0
        # Seconds that the worker waited for servers. The worker reports them when it leaves.
        self.wait_s: float | None = None

    def is_alive(self) -> bool:
        """Return whether the worker is still part of the run."""
        return self.alive

    def open_lane(self, bounds: ShardBounds, layout: Layout, own_shards: range) -> None:
        """Prepare the transport of this server's shards. For shared memory, receive and map the memory.

        Args:
            bounds: First element and end of each shard.
            layout: Sizes and dtypes of the worker's flat tensors.
            own_shards: Numbers of this server's shards.
        """
        connection = self.connection
        if self.transport != "shm":
            held = own_shards if self.scaled else None
            self.lane = StreamLane(connection, bounds, layout, self.wire, held)
            return
        frame = connection.receive()
        if frame.kind is not Kind.MEMORY or frame.length != 1:
            raise ProtocolError(
                f"malformed frame: {frame.kind.name}, expected MEMORY with a file descriptor"
            )
        try:
            memory = attach_flat_tensors(connection.read_descriptor(), layout)
        except (OSError, ValueError) as error:
            raise ProtocolError(str(error)) from None
        self.lane = SharedLane(connection, bounds, memory)

    def assign_ticket(self, ticket: int, shards: range) -> None:
        """Set the worker's current ticket, and the shards to push for the ticket."""
        self.ticket = self.last_ticket = ticket
        self.missing_shards = set(shards)

    def queue_reply(self, reply: int | tuple[Frame, memoryview | bytes] | None) -> None:
        """Append a reply to the queue of replies to the worker.

        A reply is a shard's number for its weights, a frame with its payload, or None as the end.
        """
        self._outbox.append(reply)
        self._wake.put(None)

    def queue_frame(self, frame: Frame, payload: memoryview | bytes = b"") -> None:
        """Append a frame to the queue of replies to the worker."""
        self.queue_reply((frame, payload))

    def queue_end(self) -> None:
        """Append the end to the queue of replies to the worker. Later replies are not sent."""
        self.queue_reply(None)

    def stop_sending_weights(self) -> None:
        """Send no more weights to the worker, not even queued ones. Other frames are still sent."""
        self._mute = True

    @property
    def has_queued_replies(self) -> bool:
        """Whether a reply to the worker is waiting to be sent."""
        return bool(self._outbox)

    def send_replies_until_end(self, shards_by_number: Mapping[int, Shard]) -> None:
        """Send replies to the worker as soon as they are queued, until none will follow.

        Each worker has a thread that calls this method. So a slow link of one worker does not delay others.
        """
        while not self._ended:
            with self._sending:
                self._send_outbox(shards_by_number)
            if not self._ended:
                self._wake.get()

    def send_queued_replies(self, shards_by_number: Mapping[int, Shard]) -> None:
        """Send the queued replies in this thread, unless the worker's sending thread is doing so.

        The thread that has received a push calls this method, because waking the other thread takes longer.
        """
        if not self._sending.acquire(blocking=False):
            return
        try:
            # From now on, a worker that sends nothing for too long counts as lost.
            self.connection.waiting_since = time.monotonic()
            self._send_outbox(shards_by_number)
        finally:
            self._sending.release()

    def _send_outbox(self, shards_by_number: Mapping[int, Shard]) -> None:
        while self._outbox and not self._ended:
            shards = []
            while self._outbox and type(self._outbox[0]) is int and len(shards) < _RUN_SHARDS:
                shards.append(self._outbox.popleft())
            if shards and self._mute:
                continue
            if shards:
                self.bytes_out += self.lane.send_weights(
                    self.place, shards, shards_by_number, self.is_alive
                )
            elif (item := self._outbox.popleft()) is None:
                self._ended = True
            else:
                self.connection.send(*item)

    def compute_silence_s(self, now: float, awake_since: float) -> float:
        """Return for how many seconds the worker has sent nothing.

        Only time in which the server was running and receiving counts.
        """
        since = self.connection.waiting_since
        return 0.0 if since is None else now - max(since, awake_since, self.connection.last_heard)

    def close_transport(self) -> None:
        """Close the connection and free the transport, after the worker's threads have ended."""
        self.connection.close()
        self.connection.sock.close()
        del self.lane

    def make_statistics_row(self) -> dict[str, Any]:
        """Return the worker's entry in the server's statistics."""
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
