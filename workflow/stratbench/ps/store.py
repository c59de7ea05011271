"""A server's data: its shards of the model and their policies, the buffers, the snapshots."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from stratbench.ps.buffers import BufferMean
from stratbench.ps.flat import cut
from stratbench.ps.member import Member, SharedLane, StreamLane
from stratbench.ps.policies.policy import Hyper, Policy
from stratbench.ps.shard import Shard
from stratbench.ps.snapshots import SnapshotWriter
from stratbench.ps.tickets import Once, TicketPlan, common
from stratbench.ps.wire.frames import BUFFERS, SMALL_BYTES, Frame, ProtocolError
from stratbench.ps.wire.shm import DTYPES, Layout

MakePolicy = Callable[[str, Tensor, Hyper, Mapping[str, Any]], Policy]
MakeShard = Callable[[int, Tensor], Shard]  # of its number and its initial weights, shape [n]


def check_length(frame: Frame, expected: int) -> None:
    """Raise ProtocolError unless the frame's payload has `expected` bytes."""
    if frame.length != expected:
        raise ProtocolError(
            f"malformed frame: {frame.kind.name} of {frame.length} bytes, expected {expected}"
        )


class Store:
    """One server's part of the model: shards `mine` of all `bounds`.

    Allocated for the first worker's layout, filled with one worker's initial weights, then served.
    """

    def __init__(
        self, layout: Layout, shard_bytes: int, server: int, n_servers: int, most_bytes: int
    ) -> None:
        """Raises ProtocolError for a model over `most_bytes`, or too small for so many servers."""
        if 2 * layout.weight_bytes + layout.buffer_bytes > most_bytes:
            raise ProtocolError(f"the model needs more than max_model_bytes = {most_bytes}")
        itemsize = DTYPES[layout.dtype].itemsize
        # Servers have equal parts, and shards are equal, too: no server has a shard more than others.
        part = -(-layout.numel // n_servers)
        numel = max(1, -(-part // -(-part // max(1, shard_bytes // itemsize))))
        self.layout = layout
        self.shard_numel = numel
        self.bounds = cut(layout.numel, numel)
        n = len(self.bounds)
        if n < n_servers:
            raise ProtocolError(f"the model makes {n} shards, too few for {n_servers} servers")
        self.mine = range(n * server // n_servers, n * (server + 1) // n_servers)
        self.limit_bytes = max(SMALL_BYTES, numel * itemsize, layout.buffer_bytes)
        self.shards: dict[int, Shard] = {}
        # One tensor a shard: a shard's can be replaced, and its memory used again.
        self._initial: dict[int, Tensor] = {}
        buffers = torch.zeros(layout.buffer_numel, dtype=DTYPES[layout.buffer_dtype])
        self._initial_buffers = buffers
        #: The float buffers are server 0's.
        self.buffers = BufferMean(buffers) if layout.buffer_numel and server == 0 else None
        self._to_fill: set[int] = set()

    def begin_filling(self) -> None:
        """Expect one worker's initial weights."""
        self._to_fill = set(self.mine) | ({BUFFERS} if self.buffers is not None else set())

    def receive_initial(self, frame: Frame, lane: StreamLane | SharedLane) -> Tensor:
        """Return the initial weights, or buffers, that `frame` brings; `fill` takes them in."""
        if frame.shard not in self._to_fill:
            raise ProtocolError(f"malformed frame: INIT of shard {frame.shard}, not asked for")
        if frame.shard == BUFFERS:
            check_length(frame, lane.payload_bytes(self.layout.buffer_bytes))
            lane.receive(BUFFERS)
            return lane.received(BUFFERS)
        start, stop = self.bounds[frame.shard]
        weights = torch.empty(stop - start, dtype=DTYPES[self.layout.dtype])
        check_length(frame, lane.payload_bytes(weights.nbytes))
        lane.take_weights(frame.shard, weights)
        return weights

    def fill(self, shard: int, initial: Tensor) -> bool:
        """Keep the initial weights or buffers that have come; returns whether all are here now."""
        if shard == BUFFERS:
            self._initial_buffers.copy_(initial)
        else:
            self._initial[shard] = initial
        self._to_fill.discard(shard)
        return not self._to_fill

    def make_shards(self, make: MakeShard) -> None:
        """Make every shard from its initial weights."""
        self.shards = {k: make(k, self._initial.pop(k)) for k in self.mine}

    def shards_of(self, member: Member, frame: Frame) -> list[int]:
        """The shards that a PUSH brings, or BUFFERS. Raises ProtocolError if the frame is impossible."""
        if frame.shard == BUFFERS:
            if self.buffers is None:
                raise ProtocolError("malformed frame: PUSH of buffers that this server has not")
            numbers = [BUFFERS]
        else:
            first, last = frame.shard, frame.shard + frame.count - 1
            if not self.mine.start <= first <= last < self.mine.stop:
                raise ProtocolError(f"malformed frame: PUSH of shards {first}..{last}")
            numbers = list(range(first, last + 1))
        moved_bytes = sum(member.lane.moved_bytes(k) for k in numbers)
        check_length(frame, member.lane.payload_bytes(moved_bytes))
        return numbers

    def push(self, member: Member, frame: Frame) -> None:
        """Take the shards, or the buffers, that a PUSH brings for the member's ticket.

        Those of a worker with a loss scale are held until `apply` or `skip` decides on all of them.
        """
        for k in self.shards_of(member, frame):
            if k != BUFFERS and k not in member.todo:
                raise ProtocolError(f"malformed frame: shard {k} was pushed already")
            member.lane.receive(k)
            member.weight = frame.weight
            member.bytes_in += member.lane.moved_bytes(k)
            if member.scaled:
                member.held.append(k)
            else:
                self._take(member, frame.ticket, k)
            member.todo.discard(k)

    def _take(self, member: Member, ticket: int, k: int) -> None:
        received = member.lane.received(k)
        if k == BUFFERS:
            self.buffers.push(member.place, received, member.is_alive)
        else:
            self.shards[k].push(member.place, ticket, received, member.is_alive, member.weight)

    def apply(self, member: Member, ticket: int) -> None:
        """Take what was held of the member's ticket, which must be all of it."""
        if member.todo or not member.scaled:
            raise ProtocolError("malformed frame: APPLY of a push that is not complete")
        for k in member.held:
            self._take(member, ticket, k)
        member.held.clear()

    def skip(self, member: Member, ticket: int) -> None:
        """Settle the member's ticket without gradients; what was held of it is dropped."""
        for k in sorted(member.todo.union(member.held) - {BUFFERS}):
            self.shards[k].push(member.place, ticket, None, member.is_alive)
        member.todo.clear()
        member.held.clear()

    def view(self, slot: int, shard: int, out: Tensor, alive: Callable[[], bool]) -> int:
        """Write a shard's weights for a worker; see Shard.view.

        Args:
            slot: Slot of the worker.
            shard: Number of the shard.
            out: Shape [n].
            alive: Whether the worker is still part of the run.
        """
        return self.shards[shard].view(slot, out, alive)

    def lend(
        self, slot: int, shard: int, spare: Tensor, alive: Callable[[], bool]
    ) -> AbstractContextManager[tuple[Tensor, int]]:
        """Return a context with a shard's weights for a worker; see Shard.lend.

        Args:
            slot: Slot of the worker.
            shard: Number of the shard.
            spare: Shape [n].
            alive: Whether the worker is still part of the run.
        """
        return self.shards[shard].lend(slot, spare, alive)

    def join(self, slot: int) -> None:
        """Have the worker in slot `slot` read all shards and take part."""
        for shard in self.shards.values():
            shard.join(slot)

    def leave(self, slot: int, lost: bool) -> None:
        """Nobody waits for `slot` any longer; `lost`: nor do its buffers count."""
        for shard in self.shards.values():
            shard.leave(slot)
        if lost and self.buffers is not None:
            self.buffers.lose(slot)

    def resume(
        self,
        make: MakeShard,
        shards: Mapping[int, dict[str, Any]],
        buffers: dict[str, Any] | None,
    ) -> None:
        """Restore every shard from its saved state (`Shard.state`, `BufferMean.state`).

        Args:
            make: Makes a shard.
            shards: Saved states by number.
            buffers: Saved state of the buffers, if any.
        """
        for k in self.mine:
            self._initial[k] = torch.empty_like(shards[k]["policy"]["weights"])
        self.make_shards(make)
        for k, shard in self.shards.items():
            shard.load(shards[k])
        if self.buffers is not None and buffers is not None:
            self.buffers.load(buffers)

    def taken(self) -> Once:
        """Return the tickets that all shards have taken."""
        return common(shard.taken for shard in self.shards.values())

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of the shards; lists have one element per shard of this server."""
        shards = list(self.shards.values())
        total: Counter[int] = sum((s.staleness for s in shards), Counter())
        return {
            "shard_numel": self.shard_numel,
            "updates": [s.policy.version for s in shards],
            "staleness": [_histogram(s.staleness) for s in shards],
            "staleness_all_shards": _histogram(total),
            "dropped": [s.dropped for s in shards],
            "apply_s": sum(s.apply_s for s in shards),
        }


class EpochLog:
    """Completed tickets; ends epochs and takes their snapshots.

    An epoch ends when as many tickets as it and those before it have are completed. It does not matter which:
    a worker may hold a ticket while others are epochs ahead. A run with a number of steps also notes the time
    of each step in the same way.
    """

    def __init__(self, plan: TicketPlan, writer: SnapshotWriter | None) -> None:
        self.ends: list[dict[str, float]] = []
        self.step_ends_s = array("d")
        self._plan, self._writer = plan, writer
        self._seen = Once()
        #: The next epoch ends when so many tickets are through.
        self._next_end = 0
        self._await_next()

    @property
    def complete(self) -> bool:
        """Whether all tickets of the plan are completed."""
        return len(self._seen) == len(self._plan)

    def resume(
        self, settled: Collection[int], ends: list[dict[str, float]], seconds: float, store: Store
    ) -> None:
        """Resume as if these tickets were completed here.

        An epoch that is over and was not noted ends now, `seconds` after the first ticket.

        Args:
            settled: Completed tickets.
            ends: Noted ends of epochs.
            seconds: Time since the first ticket.
            store: Has the shards.
        """
        for number in sorted(settled):
            self._seen.add(number)
        for end in ends:
            if self._next_end > len(self._seen):
                break
            self.ends.append(end)
            self._await_next()
        self._end_what_is_over(seconds, store)

    def count(self, number: int, seconds: float, store: Store) -> None:
        """Note that a ticket is completed.

        Args:
            number: Number of the ticket.
            seconds: Time since the first one was handed out.
            store: Has the shards.
        """
        if not self._seen.add(number):
            return
        if self._plan.steps and not len(self._seen) % self._plan.slices:
            self.step_ends_s.append(seconds)
        self._end_what_is_over(seconds, store)

    def _end_what_is_over(self, seconds: float, store: Store) -> None:
        if self.complete:
            for shard in store.shards.values():
                shard.finish()
        while len(self._seen) >= self._next_end and len(self.ends) < self._plan.epochs:
            self._end(len(self.ends), seconds, store)
            self._await_next()

    def _end(self, epoch: int, seconds: float, store: Store) -> None:
        self.ends.append({"epoch": epoch, "end_s": seconds})
        if self._writer is not None:
            buffers = None if store.buffers is None else store.buffers.mean()
            self._writer.take(epoch, seconds, list(store.shards.values()), buffers)

    def _await_next(self) -> None:
        if not self.complete:
            self._next_end += self._plan.tickets_of(len(self.ends))


def _histogram(counts: Counter[int]) -> list[int]:
    """Return `counts` as a list: element i is the number of times that i occurred."""
    return [counts[value] for value in range(max(counts, default=-1) + 1)]
