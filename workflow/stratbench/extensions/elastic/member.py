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
from stratbench.extensions.servers.wire.frames import ProtocolError
from stratbench.extensions.servers.wire.handshake import JoinRefused, join_handshake, load_secret
from stratbench.extensions.servers.wire.transport import Closed, Connection, Silent, dial

#: A worker that finds all places taken asks again after so long; one that finds nobody ends after so long.
AGAIN_S, NOBODY_S = 30.0, 60.0


class Over(Exception):
    """Nothing is left for this worker: the training is over, or it is not admitted."""


class Gone(Over):
    """Its coordinator is gone, but the training is not over."""


class Seat:
    """Membership in the cell.

    `change` is set when the generation must stop after a step. `break_up` is called, from the listening
    thread, when the generation cannot continue.
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
        """Return the coordinator's next message. Raises Over at the end, and Gone without a coordinator."""
        message = self._messages.get()
        if message["what"] == "over":
            raise Over("the training is over")
        if message["what"] == "gone":
            raise Gone(message["reason"])
        return message

    def _listen(self) -> None:
        try:
            while True:
                message = hear(self._connection)
                if message["what"] == "change":
                    self.change.set()
                elif message["what"] == "broken":
                    self._break_up()
                else:
                    if message["what"] == "form":
                        self.change.clear()
                    self._messages.put(message)
        except (Closed, Silent, ProtocolError, ValueError) as error:
            self._ended.set()
            self._messages.put({"what": "gone", "reason": f"the coordinator is gone: {error}"})
            self._break_up()


def take_seat(
    folder: RunFolder, number: int, break_up: Callable[[], None], leaving: threading.Event
) -> Seat:
    """Join as worker `number`; wait while all slots are taken.

    Raises Over if it is not admitted.

    Args:
        folder: Run folder of the cell.
        number: Number of the worker.
        break_up: Breaks up the generation.
        leaving: Set when this worker must leave.
    """
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
                raise Over(f"worker {number} was not admitted: {error}") from None
            time.sleep(0.5)
    raise Over(f"worker {number} was asked to leave")
