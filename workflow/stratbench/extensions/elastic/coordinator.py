"""Coordinates the workers (members) of an elastic synchronous training, as they join and leave.

A generation is a set of members that take steps together in one process group. A ready worker waits until the
generation has stopped after a step; then all present members form the next generation. Its first rank is a
member with the most steps, which broadcasts its state to the others. If no member has a state, the first rank
reads the last checkpoint. A lost member breaks its generation: the others notice the failed collective, or
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
from typing import Any, Literal, NamedTuple

from stratbench.extensions.elastic.accounts.history import (
    EpochTotals,
    MemberHistory,
    TrainingGeneration,
)
from stratbench.extensions.elastic.talk import (
    SILENCE_S,
    WARM_UP_SILENCE_S,
    receive_message,
    send_heartbeats_until,
    send_message,
)
from stratbench.extensions.servers.wire.frames import SMALL_BYTES, ProtocolError
from stratbench.extensions.servers.wire.gate import Gate, Refusals
from stratbench.extensions.servers.wire.handshake import send_welcome_to_worker
from stratbench.extensions.servers.wire.transport import Closed, Connection, Listeners, Silent

log = logging.getLogger(__name__)

HANDSHAKE_S = 15.0
#: Workers join only after the training has run for this many times the seconds of its last pause. So pauses
#: stay a small part of the time.
STEPS_PER_PAUSE = 10.0
#: The cell fails after this number of successive generations without a step.
MAX_FAILED_GENERATIONS = 20
#: Reasons for which a worker is not admitted.
TRAINING_OVER, ALL_PLACES_TAKEN = "the training is over", "all places are taken; come again later"


@dataclass
class GroupMember:
    """A worker that the coordinator has admitted.

    Attributes:
        number: Number of the worker.
        place: Number of the slot that the worker occupies among the present workers, from 0.
        connection: Connection to the worker.
        state: `warming up` until the worker is `ready`; `training` in a generation; `stopped`
            between two generations; `finished` after it has left or the training has ended.
        steps_taken: Number of training steps that the worker's copy of the model has taken.
    """

    number: int
    place: int
    connection: Connection
    state: Literal["warming up", "ready", "training", "stopped", "finished"] = "warming up"
    steps_taken: int = 0


class NewestCheckpoint(NamedTuple):
    """Number of training steps of the newest checkpoint, and the results of epochs in it."""

    step: int
    epoch_entries: list[dict[str, Any]]


class Coordinator:
    """Admits the workers of one cell as members, and decides which of them train together."""

    def __init__(
        self,
        secret: bytes,
        listeners: Listeners,
        places: int,
        steps_per_epoch: int,
        find_checkpoint: Callable[[], NewestCheckpoint | None],
        epochs_done: int,
        on_epoch: Callable[[dict[str, Any]], None],
        ends_at: Callable[[float | None], bool],
    ) -> None:
        """Prepare to admit workers as members of the training.

        Args:
            secret: Secret of the job.
            listeners: Sockets on which members connect.
            places: Maximum number of members.
            steps_per_epoch: Steps of an epoch.
            find_checkpoint: Returns the newest checkpoint, or None without one.
            epochs_done: Number of completed epochs.
            on_epoch: Stores an epoch's results.
            ends_at: Returns whether an epoch with this score ends the training.
        """
        self._secret, self._listeners, self._places = secret, listeners, places
        self._find_checkpoint, self._on_epoch = find_checkpoint, on_epoch
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
        #: Called when a worker has joined, left or was lost.
        self.on_change: Callable[[], None] = lambda: None
        #: Called with the number of a lost worker.
        self.on_lost: Callable[[int], None] = lambda number: None
        self.history = MemberHistory()
        #: Set when the training is complete or cannot continue.
        self.done = threading.Event()
        #: Reason why the training cannot continue, or None.
        self.failure: str | None = None
        self.refusals = Refusals()
        self._gate = Gate(secret, HANDSHAKE_S, self.refusals, self._admit_member)

    def start_threads(self) -> None:
        """Start the threads that admit workers and coordinate the training."""
        for work in (
            lambda: self._gate.accept(self._listeners),
            lambda: send_heartbeats_until(self._stopped, self._list_member_connections),
            self._choose_next_action_periodically,
        ):
            threading.Thread(target=work, daemon=True).start()

    def get_divergence_reason(self) -> str | None:
        """Return the reason if the training has diverged, or None if all losses are finite."""
        for number, epoch in sorted(self.history.totals_by_epoch.items()):
            if not isfinite(epoch.loss_sum):
                return f"the training loss became {epoch.loss_sum} in epoch {number + 1}"
        return self._diverged

    def close(self) -> None:
        """Stop admitting workers, and close the connections to all members."""
        self._stopped.set()
        self._gate.close()
        self._listeners.close()
        for connection in self._list_member_connections():
            connection.close()

    @property
    def num_present_members(self) -> int:
        """Number of workers that are connected, during warm-up or training."""
        with self._lock:
            return len(self._members)

    @property
    def history_event_counts(self) -> tuple[int, ...]:
        """Numbers of events in the history, by which a caller sees whether it has changed.

        They stay equal if only times have changed.
        """
        with self._lock:
            h = self.history
            began = sum(g.began_unix_s is not None for g in h.generations)
            ended = sum(g.ended_unix_s is not None for g in h.generations)
            steps = int(sum(epoch.reported_steps for epoch in h.totals_by_epoch.values()))
            return (
                len(h.generations),
                began,
                ended,
                len(h.event_times_by_member),
                len(h.lost_members),
                steps,
            )

    def export_member_history(self) -> dict[str, Any]:
        """Return the history of members as a dict that JSON can store."""
        with self._lock:
            self.history.written_unix_s = time.time()
            return asdict(self.history)

    @property
    def has_training_begun(self) -> bool:
        """Whether a training step has begun since this launcher started."""
        return any(g.began_unix_s for g in self.history.generations)

    def _list_member_connections(self) -> list[Connection]:
        with self._lock:
            return [m.connection for m in self._members.values()]

    # ------------------------------------------------------------ workers that join and leave

    def _admit_member(
        self, connection: Connection, hello: dict[str, Any], nonces: bytes, transport: str
    ) -> Callable[[], None]:
        number = hello.get("number")
        if type(number) is not int or number < 0:
            raise ProtocolError(
                f"{number!r} is not the number of a worker; send a whole number from 0 on"
            )
        with self._lock:
            if self.done.is_set():
                raise ProtocolError(TRAINING_OVER)
            if number in self._known:
                raise ProtocolError(
                    f"worker {number} has joined before; each worker needs a new number"
                )
            free = set(range(self._places)) - {m.place for m in self._members.values()}
            if not free:
                raise ProtocolError(ALL_PLACES_TAKEN)
            slot = min(free)
            send_welcome_to_worker(
                connection,
                self._secret,
                nonces,
                {"place": slot, "limit_bytes": SMALL_BYTES},
                SMALL_BYTES,
            )
            self._known.add(number)
            member = self._members[number] = GroupMember(number, slot, connection)
            self.history.event_times_by_member[number] = {"admitted": time.time()}
        self.on_change()
        return lambda: self._serve_member(member)

    def _serve_member(self, member: GroupMember) -> None:
        connection = member.connection
        connection.silence_s, connection.vanished_s = WARM_UP_SILENCE_S, SILENCE_S
        try:
            while True:
                message = receive_message(connection)
                with self._lock:
                    self._handle_member_message(member, message)
                    self._choose_next_action()
        except (Closed, Silent, ProtocolError, KeyError, TypeError, ValueError) as error:
            log.info("worker %d: %s", member.number, error)
            connection.close()
            with self._lock:
                self._remove_lost_member(member)
                self._choose_next_action()
            self.on_change()

    def _remove_lost_member(self, member: GroupMember) -> None:
        if self._members.pop(member.number, None) is None:
            return  # the worker has left by itself before its connection ended
        if member.state != "finished":
            self.history.lost_members.append(member.number)
            self.on_lost(member.number)
        if member.state == "training":
            self._mark_generation_broken(f"worker {member.number} was lost")
            generation = self.history.generations[-1]
            # If all members are lost, none can report when the generation ended.
            if not self._list_training_members() and generation.ended_unix_s is None:
                generation.ended_unix_s = time.time()

    def _mark_generation_broken(self, cause: str) -> None:
        """Mark the current generation as broken, and tell its other members."""
        generation = self.history.generations[-1]
        if not generation.broken:
            generation.broken, self._cause = True, cause
            self._send_to_training_members("broken", generation=generation.number)

    def _send_to_training_members(self, kind: str, **values: Any) -> None:
        for other in self._list_training_members():
            with suppress(Closed):
                send_message(other.connection, kind, **values)

    def _list_training_members(self) -> list[GroupMember]:
        """Return the members that train in the current generation."""
        return [m for m in self._members.values() if m.state == "training"]

    # ------------------------------------------------------------ messages of members

    def _handle_member_message(self, member: GroupMember, message: dict[str, Any]) -> None:
        now_unix_s = time.time()
        match message["what"]:
            case "ready":
                member.state, member.connection.silence_s = "ready", SILENCE_S
                self.history.event_times_by_member[member.number]["ready"] = now_unix_s
            case "begun":
                self._record_member_start(member, message["pause_s"], now_unix_s)
            case "trained":
                self._add_epoch_reports(message, now_unix_s)
            case "stopped":
                self._record_member_stop(member, message, now_unix_s)
            case "epoch":
                self._store_epoch_results(message["entry"])
            case "through":
                member.state = "finished"
                self._finished = True
                self._add_epoch_reports(message, now_unix_s)
                self._record_generation_end(message["step"], now_unix_s)
            case "left":
                self.history.left_members.append(member.number)
                member.state = "finished"
            case other:
                raise ProtocolError(f"unknown message {other!r}")

    def _store_epoch_results(self, entry: dict[str, Any]) -> None:
        """Store the results of an epoch, unless they are stored. The cell fails if they cannot be written."""
        if entry["epoch"] == self._epochs_done + 1:
            try:
                self._on_epoch(entry)
            # The training must end, because the next epoch's results would be stored as those of this epoch.
            except OSError as error:
                self._fail_training(
                    f"the result of epoch {entry['epoch']} cannot be written: {error}"
                )
                return
            self._epochs_done += 1
            if entry["test_loss"] is None:
                self._diverged = f"the test loss of epoch {entry['epoch']} is no finite number"
            self._finished |= self._ends_at(entry["score"])

    def _fail_training(self, reason: str) -> None:
        self.failure = reason
        self.done.set()

    def _record_member_start(
        self, member: GroupMember, pause_s: float | None, now_unix_s: float
    ) -> None:
        generation = self.history.generations[-1]
        self.history.event_times_by_member[member.number].setdefault("first_step", now_unix_s)
        if generation.began_unix_s is None:
            generation.began_unix_s = generation.reported_unix_s = now_unix_s
        if pause_s is not None:
            longer_s = max(0.0, float(pause_s) - (generation.pause_s or 0.0))
            generation.pause_s = (generation.pause_s or 0.0) + longer_s
            # The pause counts towards the epoch of the step before it. After the last step there is no epoch.
            number = max(0, generation.from_step - 1) // self._per_epoch
            totals = self.history.totals_by_epoch.setdefault(number, EpochTotals())
            totals.pause_s += longer_s
            self._last_pause_s = generation.pause_s
            self._next_change = time.monotonic() + STEPS_PER_PAUSE * self._last_pause_s

    def _record_member_stop(
        self, member: GroupMember, message: dict[str, Any], now_unix_s: float
    ) -> None:
        member.steps_taken = int(message["holds"])
        self._add_epoch_reports(message, now_unix_s)
        if message["failed"]:
            self._mark_generation_broken(f"a collective failed at worker {member.number}")
        self._record_generation_end(message["step"], now_unix_s)
        if message["leaving"]:
            self.history.left_members.append(member.number)
            self._cause = f"worker {member.number} left"
            del self._members[member.number]
            with suppress(Closed):
                send_message(member.connection, "leave")
        else:
            member.state = "stopped"

    def _add_epoch_reports(self, message: dict[str, Any], now_unix_s: float) -> None:
        generation = self.history.generations[-1]
        generation.reported_unix_s = now_unix_s
        self.history.add_reported_steps(generation, message["epochs"])

    def _record_generation_end(self, step: int, now_unix_s: float) -> None:
        generation = self.history.generations[-1]
        generation.ended_unix_s = now_unix_s
        # A member that failed before it got the generation's state reports fewer steps than were taken.
        generation.to_step = max(step, generation.step_at_end)

    # ------------------------------------------------------------ decisions

    def _choose_next_action_periodically(self) -> None:
        while not self._stopped.wait(0.5):
            with self._lock:
                self._choose_next_action()

    def _choose_next_action(self) -> None:
        """End the training, stop the generation for new members, or form a new generation.

        Nothing happens if none of these is due.
        """
        if self.done.is_set():
            return
        inside = self._list_training_members()
        if self._finished and not inside:
            self.done.set()
            for member in self._members.values():
                with suppress(Closed):
                    send_message(member.connection, "over")
            return
        waiting = [m for m in self._members.values() if m.state == "ready"]
        if inside:
            if waiting and not self._changing and time.monotonic() >= self._next_change:
                self._changing = True
                self._cause = f"worker {', '.join(str(m.number) for m in waiting)} joined"
                self._send_to_training_members("change")
            return
        candidates = [m for m in self._members.values() if m.state in ("ready", "stopped")]
        if candidates:
            self._form_generation(candidates)

    def _form_generation(self, candidates: list[GroupMember]) -> None:
        """Tell the candidates to form a new generation. Rank 0 is one that has taken the most steps."""
        last = self.history.generations[-MAX_FAILED_GENERATIONS:]
        if len(last) == MAX_FAILED_GENERATIONS and all(g.began_unix_s is None for g in last):
            self._fail_training(
                f"{MAX_FAILED_GENERATIONS} times in a row the workers formed a group that broke before its "
                "first step"
            )
            return
        ranked = sorted(candidates, key=lambda m: (-m.steps_taken, m.number))
        checkpoint_step, entries = self._find_checkpoint() or NewestCheckpoint(0, [])
        load = checkpoint_step > ranked[0].steps_taken
        step = checkpoint_step if load else ranked[0].steps_taken
        for entry in entries if load else []:
            self._store_epoch_results(entry)
        generation = TrainingGeneration(
            number=len(self.history.generations),
            members=[m.number for m in ranked],
            from_step=step,
            cause=self._cause,
            formed_unix_s=time.time(),
            from_checkpoint=load,
        )
        self.history.generations.append(generation)
        self._changing, self._cause = False, "worker joined"
        # The name of the file through which members connect is new, because files of broken generations may
        # be left.
        meeting = secrets.token_hex(8)
        for rank, member in enumerate(ranked):
            member.state = "training"
            # If the connection is closed, the thread that serves this member marks the generation as broken.
            with suppress(Closed):
                send_message(
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
