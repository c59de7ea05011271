"""The run of one server: its workers, their tickets, and the handling of lost workers."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from stratbench.extensions.servers.policies.policies import make_policy
from stratbench.extensions.servers.policies.policy import Hyper
from stratbench.extensions.servers.ps.member import Member, parse_hello
from stratbench.extensions.servers.ps.membership import Membership
from stratbench.extensions.servers.ps.server_config import ServerConfig
from stratbench.extensions.servers.ps.shard import Shard
from stratbench.extensions.servers.ps.snapshots import SnapshotWriter
from stratbench.extensions.servers.ps.store import EpochLog, Store, check_payload_length
from stratbench.extensions.servers.ps.tickets import TicketPlan, Tickets
from stratbench.extensions.servers.wire.frames import (
    BUFFERS,
    NO_TICKET,
    SMALL_BYTES,
    Frame,
    Kind,
    ProtocolError,
    pack_ticket,
)
from stratbench.extensions.servers.wire.gate import Refusals
from stratbench.extensions.servers.wire.handshake import send_welcome_to_worker
from stratbench.extensions.servers.wire.transport import Closed, Connection, PauseDetector, Silent
from stratbench.workload.generators import OTHER_START

log = logging.getLogger(__name__)

_OF_A_TICKET = (Kind.PUSH, Kind.APPLY, Kind.SKIP)


class ServerRun:
    """State of one server process during a run: workers, tickets and shards.

    `_lock` guards members and tickets. A thread that holds it may take a shard's lock, but a thread that
    holds a shard's lock must not take `_lock`.
    """

    #: Class that assigns slots to the workers of the run.
    membership_class: ClassVar[type[Membership]] = Membership
    #: Number of starts of the servers, including this one. Only elastic servers are started again.
    incarnation = 1

    def __init__(self, config: ServerConfig, secret: bytes) -> None:
        self.config, self._secret = config, secret
        self.hyper = Hyper(**config.hyper, workers=config.workers)
        self._make = lambda weights: make_policy(
            config.policy, weights, self.hyper, config.policy_options
        )
        self._tolerates_loss = self._make(torch.zeros(1)).options.survives_worker_loss
        self.over = threading.Event()
        self.refusals = Refusals()
        self.error: str | None = None
        # Whether all tickets are completed, or an epoch has reached the target score.
        self.done = False
        self.lost: list[dict[str, Any]] = []
        self.plan = TicketPlan(
            config.epochs, config.steps_per_epoch, config.slices_per_step, config.steps
        )
        self.tickets = Tickets(self.plan, config.n_servers)  # used on server 0 only
        self._writer: SnapshotWriter | None = None
        if config.snapshot_dir:
            self._writer = SnapshotWriter(
                config.snapshot_dir, config.server, config.n_servers, self._stop_with_error
            )
        self.epochs = EpochLog(self.plan, self._writer)
        self._lock = threading.Lock()
        self._membership = self.membership_class(config.workers)
        self._members = self._membership.members
        # Created when the first worker sends the sizes of its tensors. Until then they are unknown.
        self._store: Store | None = None
        self._start: str | None = None  # hash of the initial weights, from the first worker
        self._initialiser: Member | None = None
        self._evaluator = 0  # number of the worker that evaluates after the training
        self._initialised = self._started = False
        self._first_ticket_s = self._last_push_s = 0.0

    # --- workers that join ------------------------------------------------------------------------

    def admit_connection(
        self, connection: Connection, hello: dict[str, Any], nonces: bytes, transport: str
    ) -> Callable[[], None]:
        """Admit a worker that has proved that it knows the job's secret.

        Args:
            connection: Connection to the worker.
            hello: The worker's description of itself and its model.
            nonces: Nonces of the handshake.
            transport: Transport of the connection.

        Returns:
            The function that the connection's thread runs from then on.
        """
        member = self._admit_worker(connection, hello, transport)
        try:
            self._send_welcome(member, nonces)
        except Exception as error:
            self._lose_member(member, str(error))
            raise
        return lambda: self._serve_worker(member)

    def _admit_worker(
        self, connection: Connection, hello: dict[str, Any], transport: str
    ) -> Member:
        c = self.config
        peer = parse_hello(hello, self._membership.worker_number_limit, transport)
        worker, layout = peer.worker, peer.layout
        with self._lock:
            # Without this check, a late worker would be the first of a new run.
            if self.over.is_set():
                raise ProtocolError(self.error or "the run is over")
            slot = self._membership.choose_slot(worker)
            if self._store is None:
                self._store = Store(layout, c.shard_bytes, c.server, c.n_servers, c.max_model_bytes)
                self._check_disk_space(layout.weight_bytes + layout.buffer_bytes)
            elif layout != self._store.layout:
                raise ProtocolError(
                    f"the model of worker {worker} differs from that of other workers"
                )
            if self._start is None:
                self._start = peer.start
            elif peer.start != self._start:
                raise ProtocolError(OTHER_START)
            member = Member(peer, connection, transport)
            self._membership.add_member(member, slot)
        return member

    @property
    def _max_kept_snapshots(self) -> int:
        """Maximum number of epochs whose snapshots are on the disk at the same time."""
        return self.config.epochs

    def _check_disk_space(self, snapshot_bytes: int) -> None:
        """End the run before its start if the disk lacks room for snapshots. `_lock` is held."""
        folder, max_snapshots = self.config.snapshot_dir, self._max_kept_snapshots
        needed = max_snapshots * snapshot_bytes
        if folder and (free := shutil.disk_usage(folder).free) < needed:
            self._fail_run(
                f"the servers' snapshots of {max_snapshots} epochs need {needed / 1e9:.3g} GB in "
                f"{folder}, where {free / 1e9:.3g} GB are free: make room there, or, for a cell on one "
                "node, set TMPDIR to a folder with more"
            )
            raise ProtocolError(self.error)

    def _send_welcome(self, member: Member, nonces: bytes) -> None:
        store, connection = self._store, member.connection
        welcome = {
            "shard_numel": store.shard_numel,
            "first": store.mine.start,
            "stop": store.mine.stop,
            "n_servers": self.config.n_servers,
            "buffers": store.buffers is not None,
            "snapshot_dir": self.config.snapshot_dir,
            "heartbeat_deadline_s": self.config.heartbeat_deadline_s,
            "limit_bytes": store.limit_bytes,
        } | self._make_extra_welcome_fields()
        send_welcome_to_worker(connection, self._secret, nonces, welcome, store.limit_bytes)
        member.open_lane(store.bounds, store.layout, store.mine)
        sender = threading.Thread(target=self._send_member_replies, args=(member,), daemon=True)
        sender.start()
        member.sender = sender  # set after its start, because `close` may join the thread

    def _make_extra_welcome_fields(self) -> dict[str, Any]:
        return {}

    def _send_member_replies(self, member: Member) -> None:
        try:
            member.send_replies_until_end(self._store.shards)
        except Closed:
            # The thread that receives from this worker handles the closed connection.
            pass
        except Exception as error:
            self._stop_after_error(error)
            member.stop_sending_weights()
            with contextlib.suppress(Closed):
                # This sends the error, which is the next queued reply.
                member.send_replies_until_end(self._store.shards)

    def _get_frame_handlers(self) -> dict[Kind, Callable[[Member, Frame], None]]:
        """Return the methods that handle frames without payload, by kind of frame."""
        return {
            Kind.PULL: self._on_pull,
            Kind.SKIP: self._on_apply_or_skip,
            Kind.APPLY: self._on_apply_or_skip,
            Kind.SETTLE: self._on_settle,
            Kind.WAIT: self._on_wait,
            Kind.HEARTBEAT: lambda member, frame: None,
        }

    def _serve_worker(self, member: Member) -> None:
        try:
            self._handle_frames(member)
        except Exception as error:
            self._stop_after_error(error)
        # The sending thread may still send the reason for the run's end. So wait for this thread first.
        member.sender.join()
        member.close_transport()

    def _handle_frames(self, member: Member) -> None:
        """Handle a worker's frames until it leaves or is lost."""
        connection, handlers = member.connection, self._get_frame_handlers()
        try:
            while True:
                frame = connection.receive()
                if not member.alive:
                    raise ProtocolError(f"{frame.kind.name} from a worker that was declared lost")
                if frame.ticket == NO_TICKET and frame.kind in _OF_A_TICKET:
                    self._rehearse_member_exchange(member, frame)
                elif frame.kind is Kind.PUSH:
                    self._on_push(member, frame)
                elif frame.kind is Kind.INIT:
                    self._on_init(member, frame)
                elif frame.kind is Kind.ERR:
                    self._on_error(member, frame)
                elif frame.kind in (Kind.BYE, Kind.LEAVE):
                    member.wait_s = self._read_reported_wait_s(member, frame)
                    (self._on_bye if frame.kind is Kind.BYE else self._on_leave)(member)
                    break
                elif frame.kind is Kind.SCORE:
                    self._on_score(member, self._read_json(member, frame))
                elif frame.kind in handlers:
                    check_payload_length(frame, 0)
                    handlers[frame.kind](member, frame)
                else:
                    raise ProtocolError(f"malformed frame: a worker sent {frame.kind.name}")
        except ProtocolError as error:
            self.refusals.add_refusal(f"worker {member.worker}", str(error))
            self._lose_member(member, str(error))
        except (Closed, Silent) as error:
            self._lose_member(member, str(error))

    def _stop_after_error(self, error: Exception) -> None:
        """End the run because of an unexpected error, so that workers do not wait forever."""
        log.exception("the server failed")
        self._stop_with_error(f"the server failed: {type(error).__name__}: {error}")

    def _stop_with_error(self, message: str) -> None:
        """End the run for all workers with an error. If the run is over already, record the error only."""
        with self._lock:
            self._fail_run(message)
            self.error = self.error or message

    # --- start of the training --------------------------------------------------------------------

    def _on_pull(self, member: Member, frame: Frame) -> None:
        """Handle PULL of a worker that is ready to start.

        Servers other than 0 also get PULL from a worker that has a ticket again.
        """
        with self._lock:
            # The worker may have been declared lost meanwhile, and another worker may have its slot.
            if not member.alive:
                return
            if member.idle:
                member.idle = False
                self._store.add_worker(member.place)
            elif not member.is_ready_to_start:
                member.is_ready_to_start = True
                self._add_ready_member(member)

    def _add_ready_member(self, member: Member) -> None:
        """Let a worker that is ready to start read the weights. `_lock` is held.

        If there are no weights yet, the initial weights of one worker are requested.
        """
        self._request_initial_weights()
        if self._initialised:
            self._store.add_worker(member.place)
        self._start_if_ready()

    def _request_initial_weights(self) -> None:
        member = self._initialiser
        if self._initialised or (member is not None and member.alive):
            return
        if ready := self._membership.ready_members:
            self._initialiser = ready[0]
            self._store.expect_initial_tensors()
            ready[0].queue_frame(Frame(Kind.INIT))

    def _on_init(self, member: Member, frame: Frame) -> None:
        if member is not self._initialiser or self._initialised:
            raise ProtocolError("malformed frame: INIT was not requested from this worker")
        initial = self._store.receive_initial_tensor(frame, member.lane)
        with self._lock:
            # The worker may have been declared lost meanwhile. Then another worker sends the initial weights.
            if not member.alive:
                raise ProtocolError("INIT from a worker that was declared lost")
            if not self._store.store_initial_tensor(frame.shard, initial):
                return
            self._store.make_shards(self._make_shard)
            self._initialised = True
            for slot in self._membership.list_slots_empty_at_start(
                [entry["worker"] for entry in self.lost]
            ):
                self._store.remove_worker(slot, lost=True)
            for other in self._membership.ready_members:
                self._store.add_worker(other.place)
            self._start_if_ready()

    def _make_shard(self, number: int, weights: Tensor) -> Shard:
        return Shard(
            number,
            self._make(weights),
            self._queue_shard_for_worker,
            self.config.lr_factor_by_push_count,
        )

    def _queue_shard_for_worker(self, slot: int, shard: int) -> None:
        self._membership.get_member(slot).queue_reply(shard)

    def _start_if_ready(self) -> None:
        may_start = self._initialised and self._membership.may_training_start(len(self.lost))
        if self._started or not may_start:
            return
        self._started = True
        self._start_training_clock()
        if self.config.server == 0:
            for member in sorted(self._membership.ready_members, key=lambda m: m.place):
                self._hand_ticket_to_worker(member)

    def _start_training_clock(self) -> None:
        self._first_ticket_s = time.perf_counter()

    # --- tickets and pushes -----------------------------------------------------------------------

    def _check_frame_ticket(self, member: Member, frame: Frame) -> None:
        """Check a frame's ticket. On servers other than 0, a ticket's first frame assigns the ticket."""
        if self.config.server and self._initialised and member.ticket is None:
            if not 0 <= frame.ticket < len(self.plan):
                raise ProtocolError(
                    f"malformed frame: the run has no ticket {frame.ticket}, only {len(self.plan)} tickets"
                )
            member.assign_ticket(frame.ticket, self._store.mine)
        if frame.ticket != member.ticket:
            raise ProtocolError(
                f"malformed frame: {frame.kind.name} has ticket {frame.ticket}, but worker {member.worker} "
                f"has ticket {member.ticket}"
            )

    def _reserve_ticket(self, member: Member) -> None:
        """Reserve a worker's next ticket before the last shard of the present ticket is applied.

        The last shard may end the waiting of other workers. Each of them has a ticket of the next step
        already, so that a fast worker cannot take two of these tickets.
        """
        if self.config.server == 0:
            with self._lock:
                if member.alive and member.reserved_ticket is None and self._hands_out_tickets:
                    member.reserved_ticket = self.tickets.take_next_ticket(
                        member.worker, member.place
                    )

    @property
    def _hands_out_tickets(self) -> bool:
        """Whether workers still get tickets: True until the training is done."""
        return not self.done

    def _rehearse_member_exchange(self, member: Member, frame: Frame) -> None:
        """Exchange as many bytes with a worker in the warm-up as in a training step.

        The bytes are neither applied nor counted.
        """
        if member.is_ready_to_start:
            raise ProtocolError(f"malformed frame: {frame.kind.name} has no ticket")
        if frame.kind is Kind.PUSH:
            answered = self._store.list_pushed_shards(member, frame)
            for k in answered:
                member.lane.receive_shard(k)
        else:
            check_payload_length(frame, 0)
            answered = list(self._store.mine)
        if member.scaled == (frame.kind is Kind.PUSH):
            return  # another frame gets the reply: APPLY or SKIP with a loss scale, PUSH without one
        for k in answered:
            if k != BUFFERS:
                member.queue_frame(Frame(Kind.OK, k, 1), member.lane.make_rehearsal_payload(k))

    def _on_push(self, member: Member, frame: Frame) -> None:
        self._check_frame_ticket(member, frame)
        if (
            not member.scaled
            and frame.shard != BUFFERS
            and frame.count >= len(member.missing_shards)
        ):
            self._reserve_ticket(member)
        self._store.receive_push(member, frame)
        if not member.missing_shards and not member.scaled:
            self._finish_push(member)

    def _on_apply_or_skip(self, member: Member, frame: Frame) -> None:
        """Handle APPLY and SKIP: apply a worker's push, or drop it because a gradient overflowed."""
        self._check_frame_ticket(member, frame)
        self._reserve_ticket(member)
        if frame.kind is Kind.APPLY:
            self._store.apply_push(member, frame.ticket)
        else:
            member.skips += 1
            self._store.skip_ticket(member, frame.ticket)
        self._finish_push(member)

    def _finish_push(self, member: Member) -> None:
        self._complete_ticket(member)
        # If the worker has closed the connection, the thread that receives from the worker handles this.
        with contextlib.suppress(Closed):
            member.send_queued_replies(self._store.shards)

    def _complete_ticket(self, member: Member) -> None:
        """Complete a worker's ticket, for which all shards of this server have arrived."""
        with self._lock:
            number = member.ticket
            if not member.alive or number is None:
                return
            member.ticket = None
            member.tickets += 1
            self._last_push_s = time.perf_counter()
            self.epochs.count_completed_ticket(
                number, self._last_push_s - self._first_ticket_s, self._store
            )
            if self.config.server:
                self.done = self.epochs.is_complete
                member.queue_frame(Frame(Kind.ACK, ticket=number))
                return
            self._record_received_gradients(member.worker, number, server=0)
            self._hand_ticket_to_worker(member)

    def _on_settle(self, member: Member, frame: Frame) -> None:
        """Handle SETTLE: a worker reports that another server has received all gradients of a ticket."""
        if self.config.server or not 0 < frame.shard < self.config.n_servers:
            raise ProtocolError(
                f"malformed frame: SETTLE must go to server 0 and name another server, not {frame.shard}"
            )
        with self._lock:
            if member.alive and frame.ticket in self.tickets.list_held_tickets(member.worker):
                self._record_received_gradients(member.worker, frame.ticket, frame.shard)

    def _record_received_gradients(self, worker: int, ticket_number: int, server: int) -> None:
        self.tickets.record_received_gradients(worker, ticket_number, server)
        self._finish_if_all_tickets_completed()

    def _finish_if_all_tickets_completed(self) -> None:
        if self.tickets.are_all_completed:
            self._finish_training()

    def _finish_training(self) -> None:
        """Report to all workers that the training is over, and which worker evaluates. `_lock` is held."""
        self.done = True
        live = self._membership.live_members
        self._evaluator = min((m.worker for m in live), default=0)
        for other in live:
            other.queue_frame(Frame(Kind.DONE, shard=self._evaluator))

    def _hand_ticket_to_worker(self, member: Member) -> None:
        """Give a worker its next ticket, or tell it to wait if none is free. `_lock` is held."""
        if self.done:
            return
        ticket, member.reserved_ticket = (
            member.reserved_ticket or self.tickets.take_next_ticket(member.worker, member.place),
            None,
        )
        if ticket is not None:
            if member.idle:
                member.idle = False
                self._store.add_worker(member.place)
            member.assign_ticket(ticket.number, self._store.mine)
            member.queue_frame(Frame(Kind.TICKET, ticket=ticket.number), pack_ticket(*ticket))
        elif not member.idle:
            self._tell_worker_to_wait(member)

    def _tell_worker_to_wait(self, member: Member) -> None:
        """Tell a worker that no ticket is free now. `_lock` is held."""
        self._mark_worker_idle(member)
        member.queue_frame(Frame(Kind.WAIT))

    def _mark_worker_idle(self, member: Member) -> None:
        member.idle = True
        if self._tolerates_loss:
            self._store.remove_worker(member.place, lost=False)

    def _on_wait(self, member: Member, frame: Frame) -> None:
        """Handle WAIT: a worker reports that server 0 has no ticket for it now."""
        with self._lock:
            if member.alive:
                self._tell_worker_to_wait(member)

    # --- workers that leave or are lost -----------------------------------------------------------

    def _read_small_payload(self, member: Member, frame: Frame) -> bytes:
        """Return the payload of a frame, which may have `SMALL_BYTES` at most."""
        if frame.length > SMALL_BYTES:
            raise ProtocolError(
                f"oversized frame: {frame.kind.name} has {frame.length} bytes, at most {SMALL_BYTES}"
            )
        return member.connection.read_payload(frame.length)

    def _read_json(self, member: Member, frame: Frame) -> Any:
        try:
            return json.loads(self._read_small_payload(member, frame))
        except ValueError as error:
            raise ProtocolError(f"malformed {frame.kind.name}: {error}") from None

    def _read_reported_wait_s(self, member: Member, frame: Frame) -> float:
        """Return how many seconds a leaving worker has waited for servers, from its report."""
        try:
            return float(self._read_json(member, frame)["wait_s"])
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"malformed {frame.kind.name}: {error}") from None

    def _on_bye(self, member: Member) -> None:
        if not self.done:
            raise Closed("the worker left before the run was over")
        with self._lock:
            member.alive = False
            self._end_run_without_workers()
        member.queue_end()

    def _on_leave(self, member: Member) -> None:
        raise ProtocolError("malformed frame: LEAVE, which only elastic workers may send")

    def _on_score(self, member: Member, values: Any) -> None:
        raise ProtocolError("malformed frame: SCORE, which only elastic workers may send")

    def _on_error(self, member: Member, frame: Frame) -> None:
        """Handle ERR: another server has ended the run, or this worker's part in it."""
        reason = self._read_small_payload(member, frame).decode(errors="replace")
        raise Closed(f"another server: {reason}")

    def _end_run_without_workers(self) -> None:
        if not self._membership.has_no_members_left:
            return
        if not self.done:
            self._fail_run(f"all {self.config.workers} workers were lost")
        self.over.set()

    def _lose_member(self, member: Member, reason: str) -> None:
        """Handle the loss of a worker: give its tickets to others, or end the run."""
        with self._lock:
            if not member.alive or self.over.is_set():
                return
            member.alive = False
            step = self.plan.compute_global_step(member.last_ticket)
            log.warning("worker %d was lost at step %d: %s", member.worker, step, reason)
            # If the worker's process was only stopped, it reads this frame when it resumes.
            member.queue_frame(
                Frame(Kind.ERR), f"the server gave this worker up: {reason}".encode()
            )
            member.queue_end()
            if not self.done:
                after_s = time.perf_counter() - self._first_ticket_s if self._started else 0.0
                self.lost.append(
                    {"worker": member.worker, "step": step, "reason": reason, "after_s": after_s}
                )
                if not self._tolerates_loss:
                    self._fail_run(f"step {step}: worker {member.worker} was lost ({reason})")
                    return
                self._continue_without_member(member)
            self._end_run_without_workers()

    def _continue_without_member(self, member: Member) -> None:
        self.tickets.take_back_tickets(member.worker)
        if self._initialised:
            self._store.remove_worker(member.place, lost=True)
        else:
            self._request_initial_weights()
        self._start_if_ready()
        self._hand_tickets_to_idle_workers()

    def _hand_tickets_to_idle_workers(self) -> None:
        """Give tickets to the workers that wait because no ticket was free. `_lock` is held."""
        for other in self._membership.live_members if self.config.server == 0 else ():
            if other.idle and other.evaluated_epoch is None:
                self._hand_ticket_to_worker(other)

    def _fail_run(self, message: str) -> None:
        """End the run with an error, and tell all workers. `_lock` is held."""
        if self.over.is_set():
            return
        self.error = message
        log.error("%s", message)
        for member in self._membership.live_members:
            member.queue_frame(Frame(Kind.ERR), message.encode()[:SMALL_BYTES])
        self.over.set()

    # --- heartbeats and deadlines -----------------------------------------------------------------

    def watch_members(self) -> None:
        """Send heartbeats and look for silent workers until the run is over."""
        interval_s = min(1.0, self.config.heartbeat_deadline_s / 4)
        born, awake = time.monotonic(), PauseDetector(interval_s)
        while not self.over.wait(interval_s):
            now = time.monotonic()
            self._lose_silent_members(now, awake.update_last_pause_end(now))
            self._check_start_deadline(now - born)

    def _check_start_deadline(self, age_s: float) -> None:
        """End the run with an error if the training has not started by the deadline.

        Args:
            age_s: Seconds since the server has started.
        """
        if not self._started and age_s > self.config.start_deadline_s:
            with self._lock:
                here = sorted(m.worker for m in self._membership.ready_members)
                self._fail_run(
                    f"only workers {here} of {self.config.workers} were ready to start within "
                    f"{self.config.start_deadline_s:g} s"
                )

    def _lose_silent_members(self, now: float, awake_since: float) -> None:
        deadline_s = self.config.heartbeat_deadline_s
        for member in list(self._members.values()):
            if member.alive and member.compute_silence_s(now, awake_since) > deadline_s:
                self._lose_member(member, f"no heartbeat for {deadline_s:g} s")
            elif member.alive and not member.has_queued_replies:
                member.queue_frame(Frame(Kind.HEARTBEAT))

    def close(self) -> None:
        """Send the queued frames, close all connections, and wait until the snapshots are written."""
        members = list(self._members.values())
        give_up = time.monotonic() + self.config.heartbeat_deadline_s
        for member in members:
            member.queue_end()
        # Connected workers leave when they have read the reason for the run's end. Lost workers may
        # never do so.
        readers = [m.reader for m in members if m.alive]
        for thread in [*(m.sender for m in members if m.sender), *readers]:
            thread.join(max(0.0, give_up - time.monotonic()))
        for member in members:
            member.connection.close()
        if self._writer is not None:
            self._writer.close()

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of the run as values that JSON can represent. Times are in seconds."""
        c = self.config
        return {
            "status": "ok" if self.error is None else "lost",
            "error": self.error,
            "policy": c.policy,
            "server": c.server,
            "n_servers": c.n_servers,
            "train_time_s": max(0.0, self._last_push_s - self._first_ticket_s),
            "epochs": self.epochs.ends,
            **({"step_ends_s": self.epochs.step_ends_s.tolist()} if c.steps else {}),
            "tickets_settled": self.tickets.n_settled if c.server == 0 else None,
            "workers": [self._members[w].make_statistics_row() for w in sorted(self._members)],
            "lost": self.lost,
            "reassigned": self.tickets.reassigned,
            "refused": self.refusals.count,
            "refusals": self.refusals.first_texts,
            **(self._store.statistics() if self._store is not None else {}),
        }
