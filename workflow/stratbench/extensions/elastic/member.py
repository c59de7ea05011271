"""A worker's connection to its cell's coordinator, with a thread that listens."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.elastic.coordinator import FULL
from stratbench.extensions.elastic.talk import SILENCE_S, hear, say, send_heartbeats_until
from stratbench.ps.wire.frames import ProtocolError
from stratbench.ps.wire.handshake import JoinRefused, join_handshake, load_secret
from stratbench.ps.wire.transport import Closed, Connection, Silent, dial

#: A worker that finds all places taken asks again after so long; one that finds nobody ends after so long.
AGAIN_S, NOBODY_S = 30.0, 60.0


class Over(Exception):
    """There is nothing to do for this worker: the training is over, or nobody lets it in."""


class Gone(Over):
    """Its coordinator is gone: the training is not over."""


class Seat:
    """A place among the members of the cell.

    `change` is set when the generation shall stop after a step. `break_up` is called, from the listening
    thread, when the generation cannot go on.
    """

    def __init__(self, connection: Connection, place: int, break_up: Callable[[], None]) -> None:
        self.place = place
        self.change = threading.Event()
        self._connection, self._break_up = connection, break_up
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._ended = threading.Event()
        connection.silence_s = SILENCE_S
        for work in (
            self._listen,
            lambda: send_heartbeats_until(self._ended, lambda: [connection]),
        ):
            threading.Thread(target=work, daemon=True).start()

    def say(self, what: str, **said: Any) -> None:
        """Tell the coordinator. Raises Gone where there is none any more."""
        try:
            say(self._connection, what, **said)
        except Closed as error:
            raise Gone(str(error)) from None

    def next(self) -> dict[str, Any]:
        """The coordinator's next message. Raises Over where that says that all is over, Gone without one."""
        said = self._messages.get()
        if said["what"] == "over":
            raise Over("the training is over")
        if said["what"] == "gone":
            raise Gone(said["reason"])
        return said

    def _listen(self) -> None:
        try:
            while True:
                said = hear(self._connection)
                if said["what"] == "change":
                    self.change.set()
                elif said["what"] == "broken":
                    self._break_up()
                else:
                    if said["what"] == "form":
                        self.change.clear()
                    self._messages.put(said)
        except (Closed, Silent, ProtocolError, ValueError) as error:
            self._ended.set()
            self._messages.put({"what": "gone", "reason": f"the coordinator is gone: {error}"})
            self._break_up()


def take_seat(
    folder: RunFolder, number: int, break_up: Callable[[], None], leaving: threading.Event
) -> Seat:
    """Be let in as worker `number`; waits while all places are taken. Raises Over where nobody lets it in."""
    deadline = time.monotonic() + NOBODY_S
    while not leaving.is_set():
        try:
            connection = Connection(dial(folder.rendezvous, 0, "auto", deadline)[0])
            connection.deadline = time.monotonic() + 15.0
            welcome = join_handshake(connection, load_secret(folder.secret), {"number": number})
            connection.deadline = None
            return Seat(connection, int(welcome["place"]), break_up)
        except JoinRefused as refused:
            if FULL not in str(refused):
                raise Over(str(refused)) from None
            leaving.wait(AGAIN_S)
            deadline = time.monotonic() + NOBODY_S
        except (OSError, ValueError, Closed, Silent, ProtocolError) as error:
            if time.monotonic() > deadline:
                raise Over(f"nobody lets worker {number} in: {error}") from None
            time.sleep(0.5)
    raise Over(f"worker {number} was asked to leave")
