"""Tracks the workers of a run: which worker has which number and slot.

A worker's *number* identifies it in files, logs, records and tickets. Its *slot* (`place`), from 0 to W - 1,
identifies it to policies and shards. In a gang both are equal. An elastic worker gets a new number and the
lowest free slot each time it joins.
"""

from __future__ import annotations

from collections.abc import Collection

from stratbench.extensions.servers.ps.member import Member
from stratbench.extensions.servers.wire.frames import ComeAgain, ProtocolError


class Membership:
    """Slots of workers that all join before the training starts, and do not return.

    A worker's slot is its number. The class is not thread-safe: the server calls its methods under a lock.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.members: dict[int, Member] = {}  # members by worker number
        # The present worker of each slot, or the slot's last worker if none is present.
        self._last_member_by_slot: dict[int, Member] = {}

    @property
    def worker_number_limit(self) -> int:
        """Exclusive upper bound of the workers' numbers."""
        return self.places

    def choose_slot(self, worker: int) -> int:
        """Return the slot for a worker that wants to join.

        Raises:
            ProtocolError: If the worker has joined before.
        """
        known = self.members.get(worker)
        if known is not None:
            state = "is connected already" if known.alive else "was here and cannot come back"
            raise ProtocolError(f"worker {worker} {state}")
        return worker

    def add_member(self, member: Member, slot: int) -> None:
        """Put a new worker into a slot."""
        member.place = slot
        self.members[member.worker] = self._last_member_by_slot[slot] = member

    def get_member(self, slot: int) -> Member:
        """Return the present worker of a slot. If none is present, return the slot's last worker."""
        return self._last_member_by_slot[slot]

    @property
    def live_members(self) -> list[Member]:
        """The workers that are connected, in order of arrival."""
        return [m for m in self.members.values() if m.alive]

    @property
    def ready_members(self) -> list[Member]:
        """The connected workers that have asked for weights."""
        return [m for m in self.live_members if m.is_ready_to_start]

    def may_training_start(self, n_lost_workers: int) -> bool:
        """Return whether the training may begin after `n_lost_workers` were lost."""
        return len(self.ready_members) + n_lost_workers >= self.places

    def list_slots_empty_at_start(self, lost_workers: Collection[int]) -> set[int]:
        """Return the slots that have no worker when the training begins.

        Args:
            lost_workers: Numbers of the workers that were lost before the training.
        """
        return set(lost_workers)

    @property
    def has_no_members_left(self) -> bool:
        """Whether no worker is connected and none can still join."""
        return not self.live_members and len(self.members) >= self.places


class OpenMembership(Membership):
    """Slots of elastic workers, which join and leave at any time, each time with a new number.

    At most `places` workers are present at once.
    """

    @property
    def worker_number_limit(self) -> int:
        return 1 << 31

    def choose_slot(self, worker: int) -> int:
        """Return the lowest slot that has no present worker.

        A connected worker that has not asked for weights may join again: another server had refused it.

        Raises:
            ComeAgain: If no slot is free, or if the worker's old connection still exists.
        """
        known = self.members.get(worker)
        if known is None or known.is_ready_to_start:
            super().choose_slot(worker)
        elif known.alive:
            raise ComeAgain(f"worker {worker} is still connected; try again later")
        taken = {m.place for m in self.live_members}
        for slot in range(self.places):
            if slot not in taken:
                return slot
        raise ComeAgain(f"the cell has {self.places} slots, and all have workers; try again later")

    def may_training_start(self, n_lost_workers: int) -> bool:
        return bool(self.ready_members)

    def list_slots_empty_at_start(self, lost_workers: Collection[int]) -> set[int]:
        return set(range(self.places)) - {m.place for m in self.ready_members}

    @property
    def has_no_members_left(self) -> bool:
        """Always False, because elastic workers may join until the training is over."""
        return False
