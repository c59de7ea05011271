"""Tickets: the batches of a run, handed out on demand and completed exactly once each."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Ticket(NamedTuple):
    """One slice of one global batch: a piece of work that server 0 assigns to a worker.

    It has its number in the run, its epoch, the step of the epoch, and the slice of the step. All start at 0.
    """

    number: int
    epoch: int
    step: int
    slice: int


class Evaluation(NamedTuple):
    """Request that a worker evaluates the weights at the end of `epoch`. It replaces a ticket."""

    epoch: int


@dataclass(frozen=True)
class TicketPlan:
    """All tickets of a run: the slices of all global batches of all epochs.

    Each global batch is cut into `slices_per_step` tickets. If `steps` is not None, the run ends after this
    number of global batches, within its last epoch.
    """

    epochs: int
    steps_per_epoch: int
    slices_per_step: int
    steps: int | None = None

    def __post_init__(self) -> None:
        most = self.epochs * self.steps_per_epoch
        if self.steps is not None and not most - self.steps_per_epoch < self.steps <= most:
            raise ValueError(
                f"steps = {self.steps} of {self} must end within the last epoch: from "
                f"{most - self.steps_per_epoch + 1} to {most}"
            )
        if min(self.epochs, self.steps_per_epoch, self.slices_per_step) < 1:
            raise ValueError(
                f"epochs, steps_per_epoch and slices_per_step must be at least 1 in {self}"
            )

    def __len__(self) -> int:
        return (self.steps or self.epochs * self.steps_per_epoch) * self.slices_per_step

    def count_epoch_tickets(self, epoch: int) -> int:
        """Return the number of tickets of an epoch."""
        whole = self.steps_per_epoch * self.slices_per_step
        return min(whole, len(self) - epoch * whole)

    def get_ticket(self, number: int) -> Ticket:
        """Return the ticket with number `number` in the run.

        Raises:
            IndexError: If the plan has no such ticket.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"the run has no ticket {number}, only 0 to {len(self) - 1}")
        step, slice_ = divmod(number, self.slices_per_step)
        epoch, step = divmod(step, self.steps_per_epoch)
        return Ticket(number, epoch, step, slice_)

    def compute_global_step(self, number: int) -> int:
        """Return the step of the run, counted from 0, to which a ticket belongs."""
        return number // self.slices_per_step


class CompactIntSet:
    """A set of numbers from 0 that are added about in order. It needs little memory."""

    def __init__(self, floor: int = 0, above: Iterable[int] = ()) -> None:
        #: The lowest number that is not in the set.
        self.floor = floor
        self._above: set[int] = set()
        for number in above:
            self.add(number)

    @property
    def numbers_above_floor(self) -> set[int]:
        """A copy of the numbers in the set that are not below `floor`."""
        return set(self._above)

    def __contains__(self, number: int) -> bool:
        return number < self.floor or number in self._above

    def __len__(self) -> int:
        return self.floor + len(self._above)

    def __iter__(self) -> Iterator[int]:
        yield from range(self.floor)
        yield from sorted(self._above)

    def add(self, number: int) -> bool:
        """Add a number, and return False if the set already had the number."""
        if number in self:
            return False
        self._above.add(number)
        while self.floor in self._above:
            self._above.remove(self.floor)
            self.floor += 1
        return True


def intersect_sets(sets: Iterable[CompactIntSet]) -> CompactIntSet:
    """Return the numbers that are in all of these sets. At least one set is required."""
    sets = list(sets)
    floor = min(one.floor for one in sets)
    further = [set(range(floor, one.floor)) | one.numbers_above_floor for one in sets]
    return CompactIntSet(floor, set.intersection(*further))


#: Values of `Tickets.settled_by` that are no worker's number. FRESH: the ticket is not completed. EARLIER:
#: the ticket was completed before the servers were started again.
FRESH, EARLIER = -1, -2


class Tickets:
    """The state of all tickets of a run: not handed out, held by a worker, or completed.

    Not thread-safe: the server calls its methods under a lock.

    A worker gets the slice whose number is its slot, while that slice of the step is free. Otherwise it gets
    the free slice with the lowest number. So workers in lockstep get the same slice in each step.
    """

    def __init__(self, plan: TicketPlan, n_servers: int = 1) -> None:
        """Start with all tickets not handed out.

        Args:
            plan: All tickets of the run.
            n_servers: Servers that must have all gradients of a ticket before it is completed.
        """
        self.plan = plan
        self.settled_by = array("i", [FRESH]) * len(plan)
        self.n_settled = 0
        self.reassigned: list[dict[str, int]] = []
        self._next_step = 0
        self._fresh: list[int] = []
        # Numbers of tickets to hand out again, each with the number of the lost worker that had it.
        self._returned: deque[tuple[int, int]] = deque()
        # Number of the worker that has a ticket, by ticket.
        self._worker_by_ticket: dict[int, int] = {}
        self._n_servers = n_servers
        # The servers that have received all gradients of a ticket, by ticket.
        self._servers_by_ticket: dict[int, set[int]] = {}

    @property
    def are_all_completed(self) -> bool:
        """Whether every ticket of the plan is completed."""
        return self.n_settled == len(self.plan)

    def list_held_tickets(self, worker: int) -> list[int]:
        """Return the numbers of the tickets that a worker has at present, in ascending order."""
        return sorted(
            number for number, holder in self._worker_by_ticket.items() if holder == worker
        )

    def take_next_ticket(self, worker: int, slot: int | None = None) -> Ticket | None:
        """Hand the next ticket to a worker, or return None if no ticket is free.

        Args:
            worker: Number of the worker.
            slot: Slot of the worker, whose slice it gets while that is free. None: its number.
        """
        number: int | None
        if self._returned:
            number, loser = self._returned.popleft()
            self.reassigned.append({"ticket": number, "from": loser, "to": worker})
        else:
            number = self._take_unassigned_ticket_number(worker if slot is None else slot)
            if number is None:
                return None
        self._worker_by_ticket[number] = worker
        return self.plan.get_ticket(number)

    def _take_unassigned_ticket_number(self, slot: int) -> int | None:
        """Take a ticket that no worker has had, and return its number. None if all are taken.

        The ticket is that of slice `slot` of the step if it is free, else of the first free slice. A slot is
        a worker's place in the run, from 0.
        """
        slices = self.plan.slices_per_step
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

    def record_received_gradients(self, worker: int, ticket_number: int, server: int = 0) -> None:
        """Record that a server has received all gradients of a ticket.

        The ticket is completed once all servers have recorded it.

        Args:
            worker: Number of the worker that computed the gradients.
            ticket_number: Number of the ticket.
            server: Number of the server.

        Raises:
            KeyError: If the worker does not hold the ticket.
        """
        if self._worker_by_ticket.get(ticket_number) != worker:
            raise KeyError(f"worker {worker} does not have ticket {ticket_number} at present")
        servers = self._servers_by_ticket.setdefault(ticket_number, set())
        servers.add(server)
        if len(servers) < self._n_servers:
            return
        del self._worker_by_ticket[ticket_number], self._servers_by_ticket[ticket_number]
        self.settled_by[ticket_number] = worker
        self.n_settled += 1

    def mark_completed_before_restart(self, completed: Collection[int]) -> None:
        """Mark tickets as completed that were completed before the servers were started again."""
        for number in completed:
            self.settled_by[number] = EARLIER
        self.n_settled = len(completed)

    def take_back_tickets(self, worker: int) -> list[int]:
        """Take back the tickets of a lost worker, and return their numbers.

        Other workers get these tickets.
        """
        lost = self.list_held_tickets(worker)
        for number in lost:
            del self._worker_by_ticket[number]
            self._servers_by_ticket.pop(number, None)
            self._returned.append((number, worker))
        return lost
