"""The data of one server: its shards with their policies, the float buffers, and the ends of epochs."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from stratbench.extensions.servers.ps.buffers import BufferMean
from stratbench.extensions.servers.ps.flat import cut_into_shards
from stratbench.extensions.servers.ps.member import Member, SharedLane, StreamLane
from stratbench.extensions.servers.ps.shard import Shard
from stratbench.extensions.servers.ps.snapshots import SnapshotWriter
from stratbench.extensions.servers.ps.tickets import CompactIntSet, TicketPlan
from stratbench.extensions.servers.wire.frames import BUFFERS, SMALL_BYTES, Frame, ProtocolError
from stratbench.extensions.servers.wire.shm import DTYPES, Layout

#: Function that creates a shard from its number and its initial weights, shape [n].
MakeShard = Callable[[int, Tensor], Shard]


def check_payload_length(frame: Frame, expected: int) -> None:
    """Raise ProtocolError unless the frame's payload has `expected` bytes."""
    if frame.length != expected:
        raise ProtocolError(
            f"malformed frame: {frame.kind.name} has {frame.length} bytes, expected {expected}"
        )


class Store:
    """One server's part of the model: the shards with numbers `mine`. `bounds` has the bounds of all shards.

    The store is allocated for the sizes that the first worker sends, and filled with the initial weights of
    one worker.
    """

    def __init__(
        self, layout: Layout, shard_bytes: int, server: int, n_servers: int, max_model_bytes: int
    ) -> None:
        """Cut the model into shards, and choose those of this server.

        Args:
            layout: Sizes and dtypes of the model's flat tensors.
            shard_bytes: Maximum size of a shard, in bytes.
            server: Number of this server.
            n_servers: Number of servers.
            max_model_bytes: Maximum size of a model, in bytes.

        Raises:
            ProtocolError: If the model is larger than `max_model_bytes`, or has fewer shards than servers.
        """
        if 2 * layout.weight_bytes + layout.buffer_bytes > max_model_bytes:
            raise ProtocolError(f"the model needs more than max_model_bytes = {max_model_bytes}")
        itemsize = DTYPES[layout.dtype].itemsize
        # Elements per server, and from it the elements per shard. All shards but the last are equally large.
        # So every server has about the same number of shards.
        part = -(-layout.numel // n_servers)
        numel = max(1, -(-part // -(-part // max(1, shard_bytes // itemsize))))
        self.layout = layout
        self.shard_numel = numel
        self.bounds = cut_into_shards(layout.numel, numel)
        n = len(self.bounds)
        if n < n_servers:
            raise ProtocolError(
                f"the model has only {n} shards for {n_servers} servers; use fewer servers"
            )
        self.mine = range(n * server // n_servers, n * (server + 1) // n_servers)
        self.limit_bytes = max(SMALL_BYTES, numel * itemsize, layout.buffer_bytes)
        self.shards: dict[int, Shard] = {}
        # Initial weights by shard. Each shard has a tensor of its own, which a copy can replace later.
        self._initial: dict[int, Tensor] = {}
        buffers = torch.zeros(layout.buffer_numel, dtype=DTYPES[layout.buffer_dtype])
        self._initial_buffers = buffers
        #: Mean of the float buffers. None on servers other than 0, and if the model has none.
        self.buffers = BufferMean(buffers) if layout.buffer_numel and server == 0 else None
        self._to_fill: set[int] = set()

    def expect_initial_tensors(self) -> None:
        """Prepare to receive the initial weights and buffers from one worker."""
        self._to_fill = set(self.mine) | ({BUFFERS} if self.buffers is not None else set())

    def receive_initial_tensor(self, frame: Frame, lane: StreamLane | SharedLane) -> Tensor:
        """Receive the initial weights of a shard, or the initial buffers, and return them."""
        if frame.shard not in self._to_fill:
            raise ProtocolError(f"malformed frame: INIT of shard {frame.shard} was not requested")
        if frame.shard == BUFFERS:
            check_payload_length(frame, lane.compute_frame_payload_bytes(self.layout.buffer_bytes))
            lane.receive_shard(BUFFERS)
            return lane.get_received_tensor(BUFFERS)
        start, stop = self.bounds[frame.shard]
        weights = torch.empty(stop - start, dtype=DTYPES[self.layout.dtype])
        check_payload_length(frame, lane.compute_frame_payload_bytes(weights.nbytes))
        lane.receive_initial_shard(frame.shard, weights)
        return weights

    def store_initial_tensor(self, shard: int, initial: Tensor) -> bool:
        """Store the initial weights of a shard, or the initial buffers (`BUFFERS`).

        The result is whether the initial weights of all shards and the buffers have arrived.
        """
        if shard == BUFFERS:
            self._initial_buffers.copy_(initial)
        else:
            self._initial[shard] = initial
        self._to_fill.discard(shard)
        return not self._to_fill

    def make_shards(self, make_shard: MakeShard) -> None:
        """Create all shards of this server from their initial weights."""
        # The same dict, since the threads that send weights already have it.
        self.shards.update({k: make_shard(k, self._initial.pop(k)) for k in self.mine})

    def list_pushed_shards(self, member: Member, frame: Frame) -> list[int]:
        """Return the numbers of the shards, or `BUFFERS`, that a PUSH frame has.

        Raises:
            ProtocolError: If this server does not have these shards, or if the frame's length is wrong.
        """
        if frame.shard == BUFFERS:
            if self.buffers is None:
                raise ProtocolError(
                    "malformed frame: PUSH of float buffers, which this server does not store"
                )
            numbers = [BUFFERS]
        else:
            first, last = frame.shard, frame.shard + frame.count - 1
            if not self.mine.start <= first <= last < self.mine.stop:
                raise ProtocolError(
                    f"malformed frame: PUSH of shards {first} to {last}, which this server does not have"
                )
            numbers = list(range(first, last + 1))
        moved_bytes = sum(member.lane.count_pushed_bytes(k) for k in numbers)
        check_payload_length(frame, member.lane.compute_frame_payload_bytes(moved_bytes))
        return numbers

    def receive_push(self, member: Member, frame: Frame) -> None:
        """Receive the gradients, or the buffers, of a PUSH frame and apply them.

        If the worker has a loss scale, they are stored until `apply_push` or `skip_ticket` is called.
        """
        for shard in self.list_pushed_shards(member, frame):
            if shard != BUFFERS and shard not in member.missing_shards:
                raise ProtocolError(f"malformed frame: shard {shard} was pushed already")
            member.lane.receive_shard(shard)
            member.weight = frame.weight
            member.bytes_in += member.lane.count_pushed_bytes(shard)
            if member.scaled:
                member.held_shards.append(shard)
            else:
                self._apply_received_shard(member, frame.ticket, shard)
            member.missing_shards.discard(shard)

    def _apply_received_shard(self, member: Member, ticket: int, shard: int) -> None:
        received = member.lane.get_received_tensor(shard)
        if shard == BUFFERS:
            self.buffers.store_worker_buffers(member.place, received, member.is_alive)
        else:
            self.shards[shard].push(member.place, ticket, received, member.is_alive, member.weight)

    def apply_push(self, member: Member, ticket: int) -> None:
        """Apply the stored gradients and buffers of a worker's ticket.

        Raises:
            ProtocolError: If some of the ticket's shards have not arrived.
        """
        if member.missing_shards or not member.scaled:
            raise ProtocolError("malformed frame: APPLY came before all shards of the push")
        for k in member.held_shards:
            self._apply_received_shard(member, ticket, k)
        member.held_shards.clear()

    def skip_ticket(self, member: Member, ticket: int) -> None:
        """Count a worker's ticket as a step without gradients.

        All data stored for the ticket are dropped.
        """
        for k in sorted(member.missing_shards.union(member.held_shards) - {BUFFERS}):
            self.shards[k].push(member.place, ticket, None, member.is_alive)
        member.missing_shards.clear()
        member.held_shards.clear()

    def add_worker(self, slot: int) -> None:
        """Add the worker with this slot to all shards, and let the worker read them."""
        for shard in self.shards.values():
            shard.add_worker(slot)

    def remove_worker(self, slot: int, lost: bool) -> None:
        """Remove the worker with this slot from all shards. If it is lost, ignore its float buffers, too."""
        for shard in self.shards.values():
            shard.remove_worker(slot)
        if lost and self.buffers is not None:
            self.buffers.forget_worker(slot)

    def restore_state(
        self,
        make_shard: MakeShard,
        shard_states: Mapping[int, dict[str, Any]],
        buffers_state: dict[str, Any] | None,
    ) -> None:
        """Restore all shards and the buffers from their saved states.

        Args:
            make_shard: Function that creates a shard.
            shard_states: Results of `Shard.state`, by number of the shard.
            buffers_state: Result of `BufferMean.state`, or None.
        """
        for k in self.mine:
            self._initial[k] = torch.empty_like(shard_states[k]["policy"]["weights"])
        self.make_shards(make_shard)
        for k, shard in self.shards.items():
            shard.load(shard_states[k])
        if self.buffers is not None and buffers_state is not None:
            self.buffers.load(buffers_state)

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of this server's shards. Lists have one element per shard."""
        shards = list(self.shards.values())
        total: Counter[int] = sum((s.staleness for s in shards), Counter())
        return {
            "shard_numel": self.shard_numel,
            "updates": [s.policy.version for s in shards],
            "staleness": [_convert_counts_to_list(s.staleness) for s in shards],
            "staleness_all_shards": _convert_counts_to_list(total),
            "dropped": [s.dropped for s in shards],
            "apply_s": sum(s.apply_s for s in shards),
        }


class EpochLog:
    """Counts completed tickets, ends epochs, and takes a snapshot at the end of each.

    Epoch e ends when as many tickets are completed as the epochs 0 to e have. These may be other tickets than
    those of these epochs, because a slow worker may hold an old one. If the run has a number of steps, the
    end of each step is recorded in the same way.
    """

    def __init__(self, plan: TicketPlan, writer: SnapshotWriter | None) -> None:
        self.ends: list[dict[str, float]] = []
        self.step_ends_s = array("d")
        self._plan, self._writer = plan, writer
        self._seen = CompactIntSet()
        #: Number of completed tickets at which the next epoch ends.
        self._next_end = 0
        self._set_next_epoch_end()

    @property
    def is_complete(self) -> bool:
        """Whether all tickets of the plan are completed."""
        return len(self._seen) == len(self._plan)

    def restore_completed_tickets(
        self,
        completed: Collection[int],
        epoch_ends: list[dict[str, float]],
        elapsed_s: float,
        store: Store,
    ) -> None:
        """Restore the tickets and epochs that were completed before this server was started again.

        An epoch that is over but has no recorded end ends now.

        Args:
            completed: Numbers of the completed tickets.
            epoch_ends: Recorded ends of epochs.
            elapsed_s: Seconds since the first ticket was handed out.
            store: Shards, of which a snapshot is taken.
        """
        for ticket_number in sorted(completed):
            self._seen.add(ticket_number)
        for end in epoch_ends:
            if self._next_end > len(self._seen):
                break
            self.ends.append(end)
            self._set_next_epoch_end()
        self._end_complete_epochs(elapsed_s, store)

    def count_completed_ticket(self, ticket_number: int, elapsed_s: float, store: Store) -> None:
        """Count a completed ticket, and end each epoch whose tickets are now all completed.

        Args:
            ticket_number: Number of the ticket.
            elapsed_s: Seconds since the first ticket was handed out.
            store: Shards, of which a snapshot is taken.
        """
        if not self._seen.add(ticket_number):
            return
        if self._plan.steps and not len(self._seen) % self._plan.slices_per_step:
            self.step_ends_s.append(elapsed_s)
        self._end_complete_epochs(elapsed_s, store)

    def _end_complete_epochs(self, elapsed_s: float, store: Store) -> None:
        if self.is_complete:
            for shard in store.shards.values():
                shard.finish()
        while len(self._seen) >= self._next_end and len(self.ends) < self._plan.epochs:
            self._end_epoch(len(self.ends), elapsed_s, store)
            self._set_next_epoch_end()

    def _end_epoch(self, epoch: int, elapsed_s: float, store: Store) -> None:
        self.ends.append({"epoch": epoch, "end_s": elapsed_s})
        if self._writer is not None:
            buffers = None if store.buffers is None else store.buffers.compute_mean()
            self._writer.request_snapshot(epoch, elapsed_s, list(store.shards.values()), buffers)

    def _set_next_epoch_end(self) -> None:
        if not self.is_complete:
            self._next_end += self._plan.count_epoch_tickets(len(self.ends))


def _convert_counts_to_list(counts: Counter[int]) -> list[int]:
    """Convert counts by value to a list: element i is the count of i."""
    return [counts[value] for value in range(max(counts, default=-1) + 1)]
