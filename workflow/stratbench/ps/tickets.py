"""Tickets: the batches of a run, handed out on demand and completed exactly once each."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Ticket(NamedTuple):
    """One slice of one global batch. `step` counts within the epoch; all numbers start at 0."""

    number: int
    epoch: int
    step: int
    slice: int


class Evaluation(NamedTuple):
    """Request to evaluate the servers' state after `epoch`, in place of a ticket."""

    epoch: int


@dataclass(frozen=True)
class TicketPlan:
    """Every batch of a run: `epochs` x `steps_per_epoch` global batches x `slices` of each.

    With `steps`, so many global batches: the last epoch is left before its end.
    """

    epochs: int
    steps_per_epoch: int
    slices: int
    steps: int | None = None

    def __post_init__(self) -> None:
        most = self.epochs * self.steps_per_epoch
        if self.steps is not None and not most - self.steps_per_epoch < self.steps <= most:
            raise ValueError(f"{self.steps} steps do not end in the last of the epochs of {self}")
        if min(self.epochs, self.steps_per_epoch, self.slices) < 1:
            raise ValueError(f"a plan needs epochs, steps_per_epoch, slices >= 1, got {self}")

    def __len__(self) -> int:
        return (self.steps or self.epochs * self.steps_per_epoch) * self.slices

    def tickets_of(self, epoch: int) -> int:
        """Return the number of tickets of an epoch."""
        whole = self.steps_per_epoch * self.slices
        return min(whole, len(self) - epoch * whole)

    def ticket(self, number: int) -> Ticket:
        """Ticket `number`; raises IndexError outside 0..len-1."""
        if not 0 <= number < len(self):
            raise IndexError(f"ticket {number} is outside the plan's 0..{len(self) - 1}")
        step, slice_ = divmod(number, self.slices)
        epoch, step = divmod(step, self.steps_per_epoch)
        return Ticket(number, epoch, step, slice_)

    def global_step(self, number: int) -> int:
        """Return steps of the run before ticket `number`'s, over all epochs."""
        return number // self.slices


class Once:
    """A set of integers that grows mostly in order, stored compactly."""

    def __init__(self, floor: int = 0, above: Iterable[int] = ()) -> None:
        self._floor = floor  # everything below is in the set
        self._above: set[int] = set()
        for number in above:
            self.add(number)

    @property
    def floor(self) -> int:
        """Every number below it is in the set."""
        return self._floor

    @property
    def above(self) -> set[int]:
        """The others in the set; a copy."""
        return set(self._above)

    def __contains__(self, number: int) -> bool:
        return number < self._floor or number in self._above

    def __len__(self) -> int:
        return self._floor + len(self._above)

    def __iter__(self) -> Iterator[int]:
        yield from range(self._floor)
        yield from sorted(self._above)

    def add(self, number: int) -> bool:
        """Add `number`; False if it was there already."""
        if number in self:
            return False
        self._above.add(number)
        while self._floor in self._above:
            self._above.remove(self._floor)
            self._floor += 1
        return True


def common(sets: Iterable[Once]) -> Once:
    """Return the numbers that are in all of these sets, at least one of which is required."""
    sets = list(sets)
    floor = min(one.floor for one in sets)
    further = [set(range(floor, one.floor)) | one.above for one in sets]
    return Once(floor, set.intersection(*further))


#: In place of the worker that completed a ticket: none; or one of an earlier incarnation of the server.
FRESH, EARLIER = -1, -2


class Tickets:
    """The holders of tickets.

    Not thread-safe: the server calls it under its lock.

    A worker gets its own slice of the step (slice number = its slot) while that is free. So runs in lockstep
    give every worker the same slice each time. Otherwise it gets the lowest.
    """

    def __init__(self, plan: TicketPlan, n_servers: int = 1) -> None:
        """Start with all tickets of a plan.

        `n_servers` servers must have all of a ticket's gradients before it is completed.
        """
        self.plan = plan
        self.settled_by = array("i", [FRESH]) * len(plan)
        self.n_settled = 0
        self.reassigned: list[dict[str, int]] = []
        self._next_step = 0
        self._fresh: list[int] = []
        self._returned: deque[tuple[int, int]] = deque()  # (ticket, the worker that lost it)
        self._held: dict[int, int] = {}  # ticket -> worker
        self._n_servers = n_servers
        self._there: dict[int, set[int]] = {}  # ticket -> servers that have all of it

    @property
    def all_settled(self) -> bool:
        """Whether every ticket of the plan is completed."""
        return self.n_settled == len(self.plan)

    def held_by(self, worker: int) -> list[int]:
        """Return numbers of the tickets that `worker` holds, in order."""
        return sorted(number for number, holder in self._held.items() if holder == worker)

    def take(self, worker: int, slot: int | None = None) -> Ticket | None:
        """Return the next ticket for `worker`.

        Return None while all others are in flight or completed.

        `slot` is the slot whose slice it gets while that is free, by default that of its number.
        """
        if self._returned:
            number, loser = self._returned.popleft()
            self.reassigned.append({"ticket": number, "from": loser, "to": worker})
        else:
            number = self._take_fresh(worker if slot is None else slot)
            if number is None:
                return None
        self._held[number] = worker
        return self.plan.ticket(number)

    def _take_fresh(self, slot: int) -> int | None:
        slices = self.plan.slices
        while not self._fresh:
            first = self._next_step * slices
            if first >= len(self.plan):
                return None
            self._fresh = [n for n in range(first, first + slices) if self.settled_by[n] == FRESH]
            self._next_step += 1
        own = self._fresh[0] // slices * slices + slot
        number = own if own in self._fresh else self._fresh[0]
        self._fresh.remove(number)
        return number

    def settle(self, worker: int, number: int, server: int = 0) -> None:
        """Note that `server` has all gradients of a ticket.

        It is completed once all servers have them.

        Args:
            worker: Number of the worker.
            number: Number of the ticket.
            server: Number of the server.

        Raises:
            KeyError: If `worker` does not hold it.
        """
        if self._held.get(number) != worker:
            raise KeyError(f"worker {worker} does not hold ticket {number}")
        servers = self._there.setdefault(number, set())
        servers.add(server)
        if len(servers) < self._n_servers:
            return
        del self._held[number], self._there[number]
        self.settled_by[number] = worker
        self.n_settled += 1

    def resume(self, settled: Collection[int]) -> None:
        """Resume a run in which the tickets of these numbers are completed."""
        for number in settled:
            self.settled_by[number] = EARLIER
        self.n_settled = len(settled)

    def give_back(self, worker: int) -> list[int]:
        """Return what a lost worker holds to the pool; the tickets' numbers."""
        lost = self.held_by(worker)
        for number in lost:
            del self._held[number]
            self._there.pop(number, None)
            self._returned.append((number, worker))
        return lost
