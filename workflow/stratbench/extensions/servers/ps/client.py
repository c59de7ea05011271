"""The worker's connections to the parameter servers, for gradients, weights and tickets."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stratbench.extensions.servers.ps.device import Staging
from stratbench.extensions.servers.ps.flat import FlatSpace, cut_into_shards
from stratbench.extensions.servers.ps.scale import LossScale, Unscaler
from stratbench.extensions.servers.ps.tickets import Evaluation, Ticket
from stratbench.extensions.servers.wire.frames import (
    BUFFERS,
    NO_TICKET,
    SMALL_BYTES,
    Frame,
    Kind,
    ProtocolError,
    unpack_ticket,
)
from stratbench.extensions.servers.wire.handshake import (
    JoinLater,
    JoinRefused,
    answer_server_challenge,
)
from stratbench.extensions.servers.wire.link import Left, Link, RunEnded, ServerLost
from stratbench.extensions.servers.wire.shm import DTYPES
from stratbench.extensions.servers.wire.transport import (
    Closed,
    Connection,
    Silent,
    connect_to_server,
)
from stratbench.workload.flat import get_tensor_bytes

_HANDSHAKE_S = 30.0
_REDIAL_S = 0.1
#: Maximum seconds that a leaving worker waits for the acknowledgement of each server.
_FAREWELL_S = 2.0


class Channel:
    """One worker's connections to all servers of the run.

    A worker calls, from one thread:

    1. `channel = Channel.connect(...)`.
    2. `channel.rehearse_exchange()` in each step of the warm-up, in place of `push_pull`.
    3. `ticket = channel.wait_for_first_ticket()`.
    4. Per ticket: zero the gradients, run forward and backward on its batch, `ticket = channel.push_pull()`.
       None means that no ticket is left.
    5. `channel.close()`.

    Other threads of the channel receive frames, send frames to all servers but the first, and send
    heartbeats. A slow worker therefore does not count as lost.
    """

    def __init__(
        self,
        flat: FlatSpace,
        worker: int,
        wire: str,
        scale: LossScale | None,
    ) -> None:
        """Create a channel without connections, for `connect`."""
        self.worker, self.flat, self.scale = worker, flat, scale
        #: Folder in which the servers write a snapshot at the end of each epoch.
        self.snapshot_dir: str | None = None
        #: Number of the worker that evaluates after the training: the lowest of those still connected.
        self.evaluator: int | None = None
        #: Seconds from the last byte of a push to the last byte of the servers' reply, summed over pushes.
        self.wait_s = 0.0
        self._wire = wire
        self._incarnation: int | None = None
        self._start = ""
        self._links: list[Link] = []
        self._ticket = NO_TICKET
        self._rehearsing = True
        self._next: Ticket | Evaluation | None = None
        # Set when the frame TICKET, EVAL or DONE has arrived, or when the channel has ended.
        self._next_arrived = threading.Event()
        self._was_idle = False
        self._has_left = threading.Event()  # set once `leave` has finished
        self._error: Exception | None = None
        self._done = False
        self._closing = threading.Event()
        self._staging: Staging | None = None
        self._weight = 1.0  # weight of the current push in an average of pushes
        self._lock = threading.Lock()

    @classmethod
    def connect(
        cls,
        rendezvous: str | Path,
        worker: int,
        flat: FlatSpace,
        secret: bytes,
        transport: str = "auto",
        wire: str = "native",
        deadline_s: float = 60.0,
        scale: LossScale | None = None,
        n_servers: int = 1,
        incarnation: int | None = None,
        initial_weights_hash: str = "",
    ) -> Channel:
        """Connect a worker to all servers of a run.

        Worker r connects to server r mod n first and then to the following ones, so that the servers get
        connections at different times. After the run has ended for this worker, the next call raises.

        Args:
            rendezvous: Path of the servers' rendezvous files, without their suffix.
            worker: Number of the worker.
            flat: Flat tensors of the model.
            secret: Secret of the job.
            transport: "shm" (same host), "tcp", or "auto", which prefers shared memory.
            wire: "native", or "bfloat16" to push half the bytes of fp32 over TCP. Shared memory always uses
                "native", because nothing is copied there.
            deadline_s: Maximum seconds for connecting.
            scale: Loss scale of each backward, or None. A push divides by it, is skipped as a whole if a
                gradient overflowed, and updates it.
            n_servers: Number of servers.
            incarnation: Incarnation of the servers of an elastic run. None: the workers are a gang.
            initial_weights_hash: Hash of the model's initial weights, which must be equal for all workers.

        Raises:
            ConnectionError: If the worker is not connected by `deadline_s`. JoinRefused has the server's
                reason.
        """
        if wire not in ("native", "bfloat16"):
            raise ValueError(f"wire is {wire!r}; expected native or bfloat16")
        if flat.host.shared_memory_descriptor is None and transport == "auto":
            transport = "tcp"
        channel = cls(flat, worker, wire, scale)
        channel._incarnation, channel._start = incarnation, initial_weights_hash
        deadline = time.monotonic() + deadline_s
        try:
            # Elastic workers connect to server 0 first, because it assigns their slots.
            first = worker if incarnation is None else 0
            for k in range(first, first + n_servers):
                link = channel._join_server(rendezvous, k % n_servers, secret, transport, deadline)
                channel._links.append(link)
                if link.incarnation != incarnation:
                    raise JoinLater(
                        f"server {link.server} was restarted (incarnation {link.incarnation}); "
                        f"this worker expects incarnation {incarnation}"
                    )
                if link.n_servers != n_servers:
                    raise JoinRefused(
                        f"the run has {link.n_servers} servers, but this worker expects {n_servers}"
                    )
                channel.snapshot_dir = link.snapshot_dir
            channel._links.sort(key=lambda link: link.server)
        except BaseException:
            # An elastic worker will connect again. So it must not count as lost.
            if incarnation is not None:
                channel._send_farewell(Kind.LEAVE)
            channel._close_connections()
            raise
        channel._start_threads()
        return channel

    def _join_server(
        self, rendezvous: str | Path, server: int, secret: bytes, transport: str, deadline: float
    ) -> Link:
        while True:
            sock, used_transport = connect_to_server(rendezvous, server, transport, deadline)
            try:
                return self._shake_hands_with_server(sock, server, secret, used_transport)
            # A server with too many new connections closes some of them without sending a reason.
            except Closed as error:
                if time.monotonic() > deadline:
                    reason = f"server {server} refuses worker {self.worker}: {error}"
                    raise JoinRefused(reason) from None
            time.sleep(_REDIAL_S)

    def _shake_hands_with_server(
        self, sock: socket.socket, server: int, secret: bytes, transport: str
    ) -> Link:
        try:
            connection = Connection(sock, tick_s=1.0)
        except OSError as error:  # the server may have closed this connection already
            sock.close()
            raise Closed(str(error)) from None
        connection.deadline = time.monotonic() + _HANDSHAKE_S
        wire = "native" if transport == "shm" else self._wire
        hello = {
            "worker": self.worker,
            "layout": asdict(self.flat.layout),
            "wire": wire,
            "scaled": self.scale is not None,
            "start": self._start,
            **({} if self._incarnation is None else {"incarnation": self._incarnation}),
        }
        try:
            welcome = answer_server_challenge(connection, secret, hello)
            if transport == "shm":
                # If the server has closed the connection, a frame that it sent before has the reason.
                with contextlib.suppress(Closed):
                    connection.send_descriptor(
                        Frame(Kind.MEMORY), self.flat.host.shared_memory_descriptor
                    )
        except Closed:
            connection.close()
            raise
        except (ProtocolError, Silent) as error:
            connection.close()
            raise JoinRefused(f"server {server} refuses worker {self.worker}: {error}") from None
        connection.deadline = None
        return Link(connection, server, transport, welcome)

    def _start_threads(self) -> None:
        """Compute the bounds of all shards, and start the threads that receive and send frames."""
        self._bounds = cut_into_shards(self.flat.layout.numel, self._links[0].shard_numel)
        if self.flat.has_host_copies:
            pushes = self._push_buffers, self._push_shards, self._send_end_of_push
            self._staging = Staging(
                self.flat, self._bounds, *pushes, self.scale, self._store_push_weight
            )
            # The warm-up copies the host's weights back to the device. So the host needs the initial weights.
            self._staging.copy_initial_tensors_to_host()
        self._unscaler = None if self.scale is None else Unscaler(self.flat.device)
        self._weight_bytes = get_tensor_bytes(self.flat.host.weights)
        self._grad_bytes = get_tensor_bytes(self.flat.host.grads)
        self._itemsize = self.flat.host.weights.element_size()
        uses_wire = self._wire != "native" and any(x.transport == "tcp" for x in self._links)
        self._grads = self.flat.host.grads
        if uses_wire:
            self._grads = torch.empty(self.flat.layout.numel, dtype=DTYPES[self._wire])
        for link in self._links:
            link.connection.silence_s = link.deadline_s
            link.receiver = self._start_thread(self._receive_frames, link)
            if link.server > 0:
                self._start_thread(self._send_queued_frames, link)
        self._start_thread(self._send_heartbeats)

    def _start_thread(self, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread

    @property
    def transports(self) -> list[str]:
        """Transport to each server: "shm" or "tcp"."""
        return [link.transport for link in self._links]

    @property
    def sent_and_received_bytes_by_server(self) -> list[int]:
        """Bytes sent to server 0, received from server 0, sent to server 1, ...

        Bytes before `wait_for_first_ticket` do not count.
        """
        return [n for link in self._links for n in (link.bytes_out, link.bytes_in)]

    # --- methods that the worker calls ------------------------------------------------------------

    def wait_for_first_ticket(self) -> Ticket | Evaluation | None:
        """Wait until all workers are ready, load the initial weights, and return the first ticket.

        The initial weights are those of one of the workers. So the model must be in its initial state.
        """
        self._rehearsing = False
        self.reset_counters()
        self._prepare_for_reply()
        if self._staging is not None:
            self._staging.start_accepting_weights()
        for link in reversed(self._links):  # server 0 comes last, because its reply starts the run
            self._send_frame(link, Frame(Kind.PULL))
        ticket = self._await_reply(time.perf_counter())
        self.wait_s = 0.0  # the time in which other workers warmed up does not count
        return ticket

    def reset_counters(self) -> None:
        """Reset the counters of bytes and of waiting time."""
        self.wait_s = 0.0
        for link in self._links:
            link.bytes_out = link.bytes_in = 0

    def send_gradients_during_backward(self) -> None:
        """Send gradients bucket by bucket while the next backward runs, on a GPU.

        Call it only if this backward makes the gradients final, except for the loss scale, and if `push_pull`
        or `rehearse_exchange` follows. It has no effect on a CPU.
        """
        if self._staging is not None:
            self._prepare_for_reply()
            self._staging.copy_buckets_during_backward()

    def set_push_weight(self, weight: torch.Tensor) -> None:
        """Set the weight, a scalar, with which the servers average the next push.

        Call this method before `send_gradients_during_backward`.
        """
        if self._staging is not None:
            self._staging.weight = weight
        else:
            self._store_push_weight(weight)

    def _store_push_weight(self, weight: torch.Tensor) -> None:
        self._weight = float(weight)

    def push_pull(self) -> Ticket | Evaluation | None:
        """Push gradients and buffers of the current ticket, and wait for the next ticket.

        The call also waits for new weights. The content of `flat.grads` is undefined afterwards.

        Returns:
            The next ticket, or an evaluation to do. None if no ticket is left: then the weights are
            undefined, and the final ones are in the servers' snapshots.

        Raises:
            RunEnded: If a server has ended the run, with its reason.
            ServerLost: If the connection to a server is lost.
        """
        self._push_tensors()
        return self._await_reply(time.perf_counter())

    def send_evaluation(self, results: dict[str, float | None]) -> Ticket | Evaluation | None:
        """Send the results of a requested evaluation, and wait for weights and the next ticket."""
        self._next_arrived.clear()
        self._next = None
        if self._staging is not None:
            # The evaluation is over. So new weights may overwrite the evaluated weights.
            self._staging.start_accepting_weights()
        self._send_frame(self._links[0], Frame(Kind.SCORE), json.dumps(results).encode())
        if self._error is not None:
            raise self._error
        return self._await_reply(time.perf_counter())

    def leave(self) -> None:
        """Leave before the run is over, so that another worker gets the current ticket.

        Any thread may call it. Other calls that are waiting, or come later, raise Left.
        """
        with self._lock:
            if self._error is not None or self._done:
                return
            self._error = Left("this worker has left")
        try:
            self._send_farewell(Kind.LEAVE)
            for link in self._links:  # a server closes the connection once it has read LEAVE
                link.receiver.join(_FAREWELL_S)
                link.all_weights_arrived.set()
        finally:
            self._next_arrived.set()
            self._close_connections()
            self._has_left.set()

    def rehearse_exchange(self) -> None:
        """Push and pull in a step of the warm-up, before `wait_for_first_ticket`.

        The servers discard the push. Weights and buffers do not change, nothing is counted, and the worker
        does not wait for others.
        """
        self._push_tensors()
        self._await_weights()
        if self._error is not None:
            raise self._error
        if self._staging is not None:
            self._staging.make_stream_wait_for_weights()

    def close(self) -> None:
        """Close all connections and stop the threads. At the run's end, say goodbye to the servers first."""
        if self._done and self._error is None:
            for link in self._links[1:] if self._incarnation is not None else ():
                # Wait until the queued frame DONE was sent, because BYE must come later.
                sent = threading.Event()
                link.to_send.put(sent.set)
                sent.wait(_FAREWELL_S)
            self._send_farewell(Kind.BYE)
        if isinstance(self._error, Left):  # another thread waits until the servers have read LEAVE
            self._has_left.wait(_FAREWELL_S)
        self._close_connections()

    def _send_farewell(self, kind: Kind) -> None:
        """Tell all servers that this worker leaves, and how many seconds it waited for servers."""
        report = json.dumps({"wait_s": self.wait_s}).encode()
        for link in self._links:
            # If the server is gone, its statistics lack this worker's waiting time.
            with contextlib.suppress(Closed):
                link.connection.send(Frame(kind), report)

    def _close_connections(self) -> None:
        self._closing.set()
        if self._staging is not None:
            self._staging.close()
        for link in self._links:
            link.to_send.put(None)
            link.connection.close()

    # --- pushing gradients and buffers ------------------------------------------------------------

    def _prepare_for_reply(self) -> None:
        self._next_arrived.clear()
        self._next = None
        for link in self._links:
            link.expect_all_weights()
        # The error is checked after the events were cleared: a later error sets these events again.
        if self._error is not None:
            raise self._error

    def _push_tensors(self) -> None:
        """Push buffers and gradients. With a loss scale, report whether a gradient overflowed."""
        self.flat.check_gradient_views()
        overflowed = False
        if self._staging is not None:
            if not self._staging.armed:
                self._prepare_for_reply()
            self._staging.finish_push()
            overflowed = self._staging.overflowed
        else:
            self._prepare_for_reply()
            if self._unscaler is not None:
                self._unscaler.begin_step(self.scale)
                self._unscaler.unscale(self.flat.grads)
                overflowed = bool(self._unscaler.overflow_flag)
            if not overflowed:
                self._push_buffers()
                self._push_shards(0, len(self._bounds))
            if self.scale is not None:
                self._send_end_of_push(overflowed)
        if self.scale is not None:
            self.scale.update(overflowed)
        self._wait_for_senders()

    def _send_end_of_push(self, overflowed: bool) -> None:
        """Request that every server applies the push, or drops it if a gradient overflowed.

        A gradient overflows if the loss scale makes it infinite or NaN.
        """
        frame = Frame(Kind.SKIP if overflowed else Kind.APPLY, ticket=self._ticket)
        for link in reversed(self._links):
            if link.server == 0:
                self._send_frame(link, frame)
            else:
                self._queue_frame(link, frame)

    def _push_buffers(self) -> None:
        """Push the float buffers to server 0.

        Buffers are pushed before gradients, because the last shard of gradients completes the ticket.
        """
        link = self._links[0]
        if link.has_buffers:
            payload = b"" if link.transport == "shm" else get_tensor_bytes(self.flat.host.buffers)
            self._send_frame(link, Frame(Kind.PUSH, BUFFERS, 0, self._ticket), payload)
            link.bytes_out += self.flat.layout.buffer_bytes

    def _push_shards(self, first: int, stop: int) -> None:
        """Push shards `first` to `stop` - 1 from the host's gradients, each to its server."""
        for link in reversed(self._links):
            mine = range(max(first, link.shards.start), min(stop, link.shards.stop))
            if not mine:
                continue
            if link.server == 0:
                self._push_shards_to_server(link, mine, self._ticket)
            else:
                link.to_send.put(
                    lambda x=link, m=mine, t=self._ticket: self._push_shards_to_server(x, m, t)
                )

    def _push_shards_to_server(self, link: Link, shards: range, ticket: int) -> None:
        if link.transport == "shm":
            self._send_frame(
                link, Frame(Kind.PUSH, shards.start, len(shards), ticket, weight=self._weight)
            )
            start, stop = self._bounds[shards.start][0], self._bounds[shards.stop - 1][1]
            link.bytes_out += (stop - start) * self._itemsize
            return
        for shard in shards:
            start, stop = self._bounds[shard]
            if self._grads is not self.flat.host.grads:
                self._grads[start:stop].copy_(self.flat.host.grads[start:stop])
            payload = get_tensor_bytes(self._grads[start:stop])
            self._send_frame(link, Frame(Kind.PUSH, shard, 1, ticket, weight=self._weight), payload)
            link.bytes_out += len(payload)

    def _queue_frame(self, link: Link, frame: Frame) -> None:
        """Queue a frame for a server other than 0.

        The frame is sent after the shards that are queued for that server.
        """
        link.to_send.put(lambda: self._send_frame(link, frame))

    def _send_queued_frames(self, link: Link) -> None:
        while (job := link.to_send.get()) is not None:
            try:
                job()
            # The thread that uses the channel raises this error later.
            except Exception as error:
                self._end_with_error(error)
                return

    def _wait_for_senders(self) -> None:
        """Wait until all shards for servers other than 0 are sent."""
        sent = []
        for link in self._links[1:]:
            event = threading.Event()
            link.to_send.put(event.set)
            sent.append(event)
        for event in sent:
            while not event.wait(0.1):
                if self._error is not None:
                    raise self._error

    def _send_frame(self, link: Link, frame: Frame, payload: Any = b"") -> None:
        try:
            link.connection.send(frame, payload)
        except Closed as error:
            # The server may have sent a reason before it closed the connection. The receiver reads it.
            link.receiver.join(link.deadline_s)
            self._end_with_error(ServerLost(f"server {link.server} was lost: {error}"))
            raise self._error from None

    # --- replies of the servers -------------------------------------------------------------------

    def _await_reply(self, pushed_at: float) -> Ticket | Evaluation | None:
        if not self._done:
            self._next_arrived.wait()
        if self._error is None and isinstance(self._next, Ticket):
            self._await_weights()
        self.wait_s += time.perf_counter() - pushed_at
        if self._error is not None:
            raise self._error
        if self._staging is not None:
            self._staging.make_stream_wait_for_weights()
        if self._done:
            return None
        if isinstance(self._next, Ticket):
            self._ticket = self._next.number
        return self._next

    def _await_weights(self) -> None:
        """Wait until all expected weights have arrived, or the training is over."""
        for link in self._links:
            if not self._done:  # after the end of the training, no more weights arrive
                link.all_weights_arrived.wait()

    def _receive_frames(self, link: Link) -> None:
        """Receive and handle the frames of one server, in a thread of its own."""
        try:
            while True:
                self._handle_frame(link, link.connection.receive())
        except (Closed, Silent, ProtocolError) as error:
            if not self._closing.is_set() and not self._done:
                self._end_with_error(ServerLost(f"server {link.server} was lost: {error}"))
        except Exception as error:  # RunEnded, or an error while weights are copied to the device
            self._end_with_error(error)

    def _handle_frame(self, link: Link, frame: Frame) -> None:
        kind = frame.kind
        if kind is Kind.OK:
            self._receive_weights(link, frame)
        elif kind is Kind.TICKET:
            self._accept_ticket(Ticket(*unpack_ticket(link.connection.read_payload(frame.length))))
        elif kind is Kind.ACK:
            # If server 0 has closed its connection, the thread that receives from server 0 gets the reason.
            with contextlib.suppress(Closed):
                self._links[0].connection.send(Frame(Kind.SETTLE, link.server, 0, frame.ticket))
        elif kind is Kind.WAIT:
            self._record_that_no_ticket_is_free(link)
        elif kind is Kind.INIT:
            # If the server has closed the connection, a frame that it sent before has the reason.
            with contextlib.suppress(Closed):
                self._send_initial_tensors(link)
        elif kind is Kind.EVAL:
            self._record_that_no_ticket_is_free(link)
            self._next = Evaluation(frame.shard)
            self._next_arrived.set()
        elif kind is Kind.DONE:
            self.evaluator = frame.shard
            self._end_training()
        elif kind is Kind.ERR:
            raise RunEnded(link.connection.read_payload(frame.length).decode(errors="replace"))
        elif kind is not Kind.HEARTBEAT:
            raise ProtocolError(f"malformed frame: a server sent {kind.name}")

    def _end_training(self) -> None:
        """End the training, and report the end to servers other than 0.

        These servers do not know of an early end.
        """
        self._done = True
        for link in self._links[1:] if self._incarnation is not None else ():
            self._queue_frame(link, Frame(Kind.DONE))
        # No thread may wait forever: the receiving threads, which usually set these events, may have ended.
        for link in self._links:
            link.all_weights_arrived.set()
        self._next_arrived.set()

    def _receive_weights(self, link: Link, frame: Frame) -> None:
        first, last = frame.shard, frame.shard + frame.count - 1
        if not link.shards.start <= first <= last < link.shards.stop:
            raise ProtocolError(
                f"malformed frame: OK of shards {first} to {last}, which this server does not have"
            )
        start, stop = self._bounds[first][0], self._bounds[last][1]
        low, high = start * self._itemsize, stop * self._itemsize
        if link.transport == "tcp":
            if frame.length != high - low:
                raise ProtocolError(
                    f"malformed frame: OK has {frame.length} bytes, expected {high - low}"
                )
            # Replies in the warm-up must not overwrite weights. They overwrite gradients that were pushed.
            target = self._grad_bytes if self._rehearsing else self._weight_bytes
            link.connection.receive_bytes_into(target[low:high])
        if self._staging is not None:
            self._staging.copy_weights_to_device(start, stop)
        link.bytes_in += high - low
        link.record_arrived_weights(range(first, last + 1))

    def _accept_ticket(self, ticket: Ticket) -> None:
        if self._was_idle:
            self._was_idle = False
            for link in self._links[1:]:
                self._queue_frame(link, Frame(Kind.PULL))
        self._next = ticket
        self._next_arrived.set()

    def _record_that_no_ticket_is_free(self, link: Link) -> None:
        """Record that server 0 has no ticket for this worker at present.

        All weights are sent again with the next ticket. Server 0 sends WAIT first. Each other server repeats
        WAIT after the last weights that it had to send.
        """
        link.expect_all_weights()
        if link.server == 0:
            self._was_idle = True
            for other in self._links[1:]:
                other.expect_all_weights(outdated=True)
                self._queue_frame(other, Frame(Kind.WAIT))

    def _send_initial_tensors(self, link: Link) -> None:
        """Send this worker's initial weights and buffers to one server.

        The server sends no other frame before it has received them.
        """
        host = self.flat.host
        if self._staging is not None:
            self._staging.copy_initial_tensors_to_host()
        shared = link.transport == "shm"
        if link.has_buffers:
            payload = b"" if shared else get_tensor_bytes(host.buffers)
            link.connection.send(Frame(Kind.INIT, BUFFERS), payload)
        for shard in link.shards:
            start, stop = self._bounds[shard]
            payload = b"" if shared else get_tensor_bytes(host.weights[start:stop])
            link.connection.send(Frame(Kind.INIT, shard, 1), payload)

    def _end_with_error(self, error: Exception) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        for link in self._links:
            link.all_weights_arrived.set()
            # Send the other servers the reason, so that they do not report this worker as the cause.
            if isinstance(error, RunEnded):
                with contextlib.suppress(Closed):
                    link.connection.send_unless_busy(
                        Frame(Kind.ERR), str(error).encode()[:SMALL_BYTES]
                    )
            link.connection.close()
        self._next_arrived.set()

    def _send_heartbeats(self) -> None:
        interval_s = min(1.0, min(link.deadline_s for link in self._links) / 4)
        while not self._closing.wait(interval_s):
            for link in self._links:
                try:
                    link.connection.send_unless_busy(Frame(Kind.HEARTBEAT))
                except Closed:
                    return  # the thread that receives from this server reports the reason
