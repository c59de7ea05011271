"""Members of a run: each worker by its number, and its slot.

A worker's *number* is its name in files, in the log and the record, and on tickets. Its *slot* (`place`), 0
to W - 1, identifies it to policies and shards. In a gang the two are equal. Workers that come and go have a
unique number each, and the lowest free slot.
"""

from __future__ import annotations

from collections.abc import Collection

from stratbench.ps.member import Member
from stratbench.ps.wire.frames import ComeAgain, ProtocolError


class Membership:
    """Members of a gang: all join before it starts, each in the slot of its number, once.

    Not thread-safe: the server calls it under its lock.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.members: dict[int, Member] = {}  # by number
        self._at: dict[int, Member] = {}  # present or last worker of each slot

    @property
    def numbers(self) -> int:
        """A worker's number is below this."""
        return self.places

    def choose_place(self, number: int) -> int:
        """Return the slot for a worker that wants to join. ProtocolError if it cannot."""
        known = self.members.get(number)
        if known is not None:
            state = "is connected already" if known.alive else "was here and cannot come back"
            raise ProtocolError(f"worker {number} {state}")
        return number

    def enter(self, member: Member, slot: int) -> None:
        """`member` is at `slot` from now on."""
        member.place = slot
        self.members[member.worker] = self._at[slot] = member

    def at(self, slot: int) -> Member:
        """Return the present or last worker in slot `slot`."""
        return self._at[slot]

    @property
    def live(self) -> list[Member]:
        """Present workers, in order of arrival."""
        return [m for m in self.members.values() if m.alive]

    @property
    def ready(self) -> list[Member]:
        """Present workers that have asked for weights."""
        return [m for m in self.live if m.pulled]

    def may_start(self, n_lost: int) -> bool:
        """Return whether training may begin, `n_lost` having been lost before it."""
        return len(self.ready) + n_lost >= self.places

    def absent(self, lost: Collection[int]) -> set[int]:
        """Return the slots without a worker when training begins; `lost`: numbers of lost workers."""
        return set(lost)

    @property
    def all_gone(self) -> bool:
        """Whether no worker is present, and none will come."""
        return not self.live and len(self.members) >= self.places


class OpenMembership(Membership):
    """Workers that come, leave and return under another number, at most `places` at a time."""

    @property
    def numbers(self) -> int:
        return 1 << 31

    def choose_place(self, number: int) -> int:
        """Return the lowest free slot.

        ComeAgain if there is none.

        A present worker that has not asked for weights could not join all servers; it comes again.
        """
        known = self.members.get(number)
        if known is None or known.pulled:
            super().choose_place(number)
        elif known.alive:
            raise ComeAgain(f"worker {number} has not left yet; come again later")
        taken = {m.place for m in self.live}
        for slot in range(self.places):
            if slot not in taken:
                return slot
        raise ComeAgain(f"all {self.places} places are taken; come again later")

    def may_start(self, n_lost: int) -> bool:
        return bool(self.ready)

    def absent(self, lost: Collection[int]) -> set[int]:
        return set(range(self.places)) - {m.place for m in self.ready}

    @property
    def all_gone(self) -> bool:
        """False: workers may return until the training is over."""
        return False
