"""Coordinates the members of an elastic synchronous training, again whenever one joins or leaves.

A generation is a set of members that take steps together, by a process group of their own. A ready worker
waits until the generation has stopped after a step; then all present members form the next one. Its first
rank is a member with the most steps, which gives its state to the others. If none has a state, it is read
from the last checkpoint. A lost member breaks its generation: the others notice by the failed collective, or
get a message, and repeat the step.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Literal

from stratbench.extensions.elastic.accounts.history import EpochTotals, Generation, History
from stratbench.extensions.elastic.talk import (
    SILENCE_S,
    WARM_UP_SILENCE_S,
    hear,
    say,
    send_heartbeats_until,
)
from stratbench.extensions.servers.wire.frames import SMALL_BYTES, ProtocolError
from stratbench.extensions.servers.wire.gate import Gate, Refusals
from stratbench.extensions.servers.wire.handshake import accept_handshake
from stratbench.extensions.servers.wire.transport import Closed, Connection, Listeners, Silent

log = logging.getLogger(__name__)

HANDSHAKE_S = 15.0
#: Members are let in again only after so many times the last pause: stops take a tenth of the time at most.
STEPS_PER_PAUSE = 10.0
#: Generations that may break, one after the other, before any of them takes a step.
MAX_IN_VAIN = 20
#: What a member is told that comes when nothing is left to do, or when all places are taken.
OVER, FULL = "the training is over", "all places are taken; come again later"


def reaches(score: float | None, target: float | None, better: str) -> bool:
    """Return whether a score is as good as the target, if there is one.

    Args:
        score: The score, if known.
        target: The target, if any.
        better: `higher` or `lower`.
    """
    if score is None or target is None:
        return False
    return score >= target if better == "higher" else score <= target


@dataclass
class GroupMember:
    """An admitted worker. `step`: the number of steps in its state."""

    number: int
    place: int
    connection: Connection
    state: Literal["warming up", "ready", "inside", "stopped", "through"] = "warming up"
    step: int = 0


class Coordinator:
    """The members of one cell, from `start` to `close`."""

    def __init__(
        self,
        secret: bytes,
        listeners: Listeners,
        places: int,
        steps_per_epoch: int,
        checkpoint: Callable[[], tuple[int, list[dict[str, Any]]] | None],
        epochs_done: int,
        on_epoch: Callable[[dict[str, Any]], None],
        ends_at: Callable[[float | None], bool],
    ) -> None:
        """Wait for members.

        Args:
            secret: Secret of the job.
            listeners: Sockets on which members connect.
            places: Maximum number of members.
            steps_per_epoch: Steps of an epoch.
            checkpoint: Returns the steps of the newest checkpoint, with results of earlier epochs that
                may not have been reported; None without one.
            epochs_done: Number of completed epochs.
            on_epoch: Stores an epoch's results.
            ends_at: Returns whether the training is over once an epoch has this score.
        """
        self._secret, self._listeners, self._places = secret, listeners, places
        self._checkpoint, self._on_epoch = checkpoint, on_epoch
        self._epochs_done, self._per_epoch = epochs_done, steps_per_epoch
        self._members: dict[int, GroupMember] = {}
        self._known: set[int] = set()
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._changing = False
        self._cause = "start"
        self._next_change = 0.0
        self._last_pause_s = 0.0
        self._finished, self._ends_at = False, ends_at
        self._diverged: str | None = None
        #: Called when a member has come or gone, and with the number of one that was lost.
        self.on_change: Callable[[], None] = lambda: None
        self.on_lost: Callable[[int], None] = lambda number: None
        self.history = History()
        #: Set once all steps are taken and evaluated, or the cell cannot go on.
        self.done = threading.Event()
        #: Why the cell cannot go on; None: it can.
        self.failure: str | None = None
        self.refusals = Refusals()
        self._gate = Gate(secret, HANDSHAKE_S, self.refusals, self._enter)

    def start(self) -> None:
        """Let members in from now on."""
        for work in (
            lambda: self._gate.accept(self._listeners),
            lambda: send_heartbeats_until(self._stopped, self._connections),
            self._consider_often,
        ):
            threading.Thread(target=work, daemon=True).start()

    def diverged(self) -> str | None:
        """Return a sentence on a value that was not finite, or None."""
        for number, epoch in sorted(self.history.epochs.items()):
            if not isfinite(epoch.loss):
                return f"the training loss became {epoch.loss} in epoch {number + 1}"
        return self._diverged

    def close(self) -> None:
        """Admit no more workers, and disconnect all."""
        self._stopped.set()
        self._gate.close()
        self._listeners.close()
        for connection in self._connections():
            connection.close()

    @property
    def present(self) -> int:
        """Number of present members, in warm-up or in training."""
        with self._lock:
            return len(self._members)

    @property
    def changes(self) -> tuple[int, ...]:
        """Another value when the history has changed in more than seconds."""
        with self._lock:
            h = self.history
            began = sum(g.began_unix_s is not None for g in h.generations)
            ended = sum(g.ended_unix_s is not None for g in h.generations)
            steps = int(sum(epoch.steps for epoch in h.epochs.values()))
            return len(h.generations), began, ended, len(h.dates), len(h.lost), steps

    def facts(self) -> dict[str, Any]:
        """Return the history as plain values."""
        with self._lock:
            self.history.seen_unix_s = time.time()
            return asdict(self.history)

    @property
    def has_begun(self) -> bool:
        """Whether a step was taken in this incarnation."""
        return any(g.began_unix_s for g in self.history.generations)

    def _connections(self) -> list[Connection]:
        with self._lock:
            return [m.connection for m in self._members.values()]

    # ------------------------------------------------------------ coming and going

    def _enter(
        self, connection: Connection, hello: dict[str, Any], nonces: bytes, transport: str
    ) -> Callable[[], None]:
        number = hello.get("number")
        if type(number) is not int or number < 0:
            raise ProtocolError(f"{number!r} is no number of a worker")
        with self._lock:
            if self.done.is_set():
                raise ProtocolError(OVER)
            if number in self._known:
                raise ProtocolError(f"worker {number} was here before; numbers never come again")
            free = set(range(self._places)) - {m.place for m in self._members.values()}
            if not free:
                raise ProtocolError(FULL)
            slot = min(free)
            accept_handshake(
                connection,
                self._secret,
                nonces,
                {"place": slot, "limit_bytes": SMALL_BYTES},
                SMALL_BYTES,
            )
            self._known.add(number)
            member = self._members[number] = GroupMember(number, slot, connection)
            self.history.dates[number] = {"admitted": time.time()}
        self.on_change()
        return lambda: self._attend(member)

    def _attend(self, member: GroupMember) -> None:
        connection = member.connection
        connection.silence_s, connection.vanished_s = WARM_UP_SILENCE_S, SILENCE_S
        try:
            while True:
                message = hear(connection)
                with self._lock:
                    self._heard(member, message)
                    self._consider()
        except (Closed, Silent, ProtocolError, KeyError, TypeError, ValueError) as error:
            log.info("worker %d: %s", member.number, error)
            connection.close()
            with self._lock:
                self._gone(member)
                self._consider()
            self.on_change()

    def _gone(self, member: GroupMember) -> None:
        if self._members.pop(member.number, None) is None:
            return  # it has left
        if member.state != "through":
            self.history.lost.append(member.number)
            self.on_lost(member.number)
        if member.state == "inside":
            self._break(f"worker {member.number} was lost")
            generation = self.history.generations[-1]
            if not self._inside() and generation.ended_unix_s is None:  # nobody can tell more of it
                generation.ended_unix_s = time.time()

    def _break(self, cause: str) -> None:
        """Note that the others of the generation cannot continue."""
        generation = self.history.generations[-1]
        if not generation.broken:
            generation.broken, self._cause = True, cause
            self._tell_inside("broken", generation=generation.number)

    def _tell_inside(self, what: str, **said: Any) -> None:
        for other in self._inside():
            with suppress(Closed):
                say(other.connection, what, **said)

    def _inside(self) -> list[GroupMember]:
        return [m for m in self._members.values() if m.state == "inside"]

    # ------------------------------------------------------------ what members say

    def _heard(self, member: GroupMember, message: dict[str, Any]) -> None:
        now = time.time()
        match message["what"]:
            case "ready":
                member.state, member.connection.silence_s = "ready", SILENCE_S
                self.history.dates[member.number]["ready"] = now
            case "begun":
                self._begun(member, message["pause_s"], now)
            case "trained":
                self._add_epochs(message, now)
            case "stopped":
                self._stopped_at(member, message, now)
            case "epoch":
                self._evaluated(message["entry"])
            case "through":
                member.state = "through"
                self._finished = True
                self._add_epochs(message, now)
                self._end_generation(message["step"], now)
            case "left":
                self.history.left.append(member.number)
                member.state = "through"
            case other:
                raise ProtocolError(f"unknown message {other!r}")

    def _evaluated(self, entry: dict[str, Any]) -> None:
        """Store the results of an epoch, once. If that fails, the cell cannot continue."""
        if entry["epoch"] == self._epochs_done + 1:
            try:
                self._on_epoch(entry)
            except OSError as error:  # a full disk: a later epoch would stand in this one's place
                self._fail(f"the result of epoch {entry['epoch']} cannot be kept: {error}")
                return
            self._epochs_done += 1
            if entry["test_loss"] is None:
                self._diverged = f"the test loss of epoch {entry['epoch']} is no finite number"
            self._finished |= self._ends_at(entry["score"])

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self.done.set()

    def _begun(self, member: GroupMember, pause_s: float | None, now: float) -> None:
        generation = self.history.generations[-1]
        self.history.dates[member.number].setdefault("first_step", now)
        if generation.began_unix_s is None:
            generation.began_unix_s = generation.told_unix_s = now
        if pause_s is not None:
            longer_s = max(0.0, float(pause_s) - (generation.pause_s or 0.0))
            generation.pause_s = (generation.pause_s or 0.0) + longer_s
            # There may be no epoch after the last step.
            number = max(0, generation.from_step - 1) // self._per_epoch
            first = self.history.epochs.setdefault(number, EpochTotals())
            first.pause_s += longer_s
            self._last_pause_s = generation.pause_s
            self._next_change = time.monotonic() + STEPS_PER_PAUSE * self._last_pause_s

    def _stopped_at(self, member: GroupMember, message: dict[str, Any], now: float) -> None:
        member.step = int(message["holds"])
        self._add_epochs(message, now)
        if message["failed"]:
            self._break(f"a collective failed at worker {member.number}")
        self._end_generation(message["step"], now)
        if message["leaving"]:
            self.history.left.append(member.number)
            self._cause = f"worker {member.number} left"
            del self._members[member.number]
            with suppress(Closed):
                say(member.connection, "leave")
        else:
            member.state = "stopped"

    def _add_epochs(self, message: dict[str, Any], now: float) -> None:
        generation = self.history.generations[-1]
        generation.told_unix_s = now
        self.history.add_steps(generation, message["epochs"])

    def _end_generation(self, step: int, now: float) -> None:
        generation = self.history.generations[-1]
        generation.ended_unix_s = now
        # A member that never got the generation's state has one of its own.
        generation.to_step = max(step, generation.stop)

    # ------------------------------------------------------------ deciding

    def _consider_often(self) -> None:
        while not self._stopped.wait(0.5):
            with self._lock:
                self._consider()

    def _consider(self) -> None:
        """Act on a change, or on elapsed time."""
        if self.done.is_set():
            return
        inside = self._inside()
        if self._finished and not inside:
            self.done.set()
            for member in self._members.values():
                with suppress(Closed):
                    say(member.connection, "over")
            return
        waiting = [m for m in self._members.values() if m.state == "ready"]
        if inside:
            if waiting and not self._changing and time.monotonic() >= self._next_change:
                self._changing = True
                self._cause = f"worker {', '.join(str(m.number) for m in waiting)} joined"
                self._tell_inside("change")
            return
        candidates = [m for m in self._members.values() if m.state in ("ready", "stopped")]
        if candidates:
            self._form(candidates)

    def _form(self, candidates: list[GroupMember]) -> None:
        """Have these members form a generation, the one with most steps first."""
        last = self.history.generations[-MAX_IN_VAIN:]
        if len(last) == MAX_IN_VAIN and all(g.began_unix_s is None for g in last):
            self._fail(f"{MAX_IN_VAIN} times in a row the workers met and could not begin")
            return
        ranked = sorted(candidates, key=lambda m: (-m.step, m.number))
        checkpoint_step, entries = self._checkpoint() or (0, [])
        load = checkpoint_step > ranked[0].step
        step = checkpoint_step if load else ranked[0].step
        for entry in entries if load else []:
            self._evaluated(entry)
        generation = Generation(
            number=len(self.history.generations),
            members=[m.number for m in ranked],
            from_step=step,
            cause=self._cause,
            formed_unix_s=time.time(),
            from_checkpoint=load,
        )
        self.history.generations.append(generation)
        self._changing, self._cause = False, "worker joined"
        meeting = secrets.token_hex(
            8
        )  # those of an earlier launcher, or of a broken generation, may be left
        for rank, member in enumerate(ranked):
            member.state = "inside"
            with suppress(Closed):  # its reader breaks the generation
                say(
                    member.connection,
                    "form",
                    generation=generation.number,
                    meeting=meeting,
                    rank=rank,
                    world=len(ranked),
                    step=step,
                    load=load and rank == 0,
                    epochs_done=self._epochs_done,
                )
