"""Connects an elastic worker to its cell's coordinator, and receives messages on a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.elastic.coordinator import ALL_PLACES_TAKEN
from stratbench.extensions.elastic.talk import (
    SILENCE_S,
    receive_message,
    send_heartbeats_until,
    send_message,
)
from stratbench.extensions.servers.wire.frames import ProtocolError
from stratbench.extensions.servers.wire.handshake import (
    JoinRefused,
    answer_server_challenge,
    load_secret,
)
from stratbench.extensions.servers.wire.transport import (
    Closed,
    Connection,
    Silent,
    connect_to_server,
)

#: Seconds after which a worker tries again to join, if all places were taken.
AGAIN_S = 30.0
#: Seconds without an answer of the coordinator after which a worker no longer tries to join.
NOBODY_S = 60.0


class WorkerNotNeeded(Exception):
    """The worker has nothing to do: the training is over, or does not admit it."""


class CoordinatorLost(WorkerNotNeeded):
    """The coordinator no longer answers, although the training is not over."""


class WorkerMembership:
    """A worker's connection to the coordinator of its cell, as a member of the training.

    `change` is set when the generation must stop after the present step. The receiving thread calls
    `break_up_group` when the generation cannot continue, because another member was lost.
    """

    def __init__(
        self, connection: Connection, place: int, break_up_group: Callable[[], None]
    ) -> None:
        self.place = place
        self.change = threading.Event()
        self._connection, self._break_up_group = connection, break_up_group
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._ended = threading.Event()
        connection.silence_s = SILENCE_S
        for work in (
            self._receive_messages,
            lambda: send_heartbeats_until(self._ended, lambda: [connection]),
        ):
            threading.Thread(target=work, daemon=True).start()

    def send_message(self, kind: str, **values: Any) -> None:
        """Send a message to the coordinator. Raises CoordinatorLost if the connection is closed."""
        try:
            send_message(self._connection, kind, **values)
        except Closed as error:
            raise CoordinatorLost(str(error)) from None

    def wait_for_message(self) -> dict[str, Any]:
        """Wait for the coordinator's next message, and return it.

        Raises:
            WorkerNotNeeded: If the training is over.
            CoordinatorLost: If the coordinator does not answer any more.
        """
        message = self._messages.get()
        if message["what"] == "over":
            raise WorkerNotNeeded("the training is over")
        if message["what"] == "gone":
            raise CoordinatorLost(message["reason"])
        return message

    def _receive_messages(self) -> None:
        try:
            while True:
                message = receive_message(self._connection)
                if message["what"] == "change":
                    self.change.set()
                elif message["what"] == "broken":
                    self._break_up_group()
                else:
                    if message["what"] == "form":
                        self.change.clear()
                    self._messages.put(message)
        except (Closed, Silent, ProtocolError, ValueError) as error:
            self._ended.set()
            self._messages.put({"what": "gone", "reason": f"the coordinator is gone: {error}"})
            self._break_up_group()


def join_as_member(
    folder: RunFolder,
    worker_number: int,
    break_up_group: Callable[[], None],
    leave_requested: threading.Event,
) -> WorkerMembership:
    """Join the training of a cell as worker `worker_number`. Wait while all places are taken.

    Raises WorkerNotNeeded if the worker is not admitted.

    Args:
        folder: Run folder of the cell.
        worker_number: Number of the worker.
        break_up_group: Breaks up the process group of this worker.
        leave_requested: Set when this worker must leave.
    """
    deadline = time.monotonic() + NOBODY_S
    while not leave_requested.is_set():
        try:
            connection = Connection(
                connect_to_server(folder.server_rendezvous_path, 0, "auto", deadline)[0]
            )
            connection.deadline = time.monotonic() + 15.0
            welcome = answer_server_challenge(
                connection, load_secret(folder.job_secret_path), {"number": worker_number}
            )
            connection.deadline = None
            return WorkerMembership(connection, int(welcome["place"]), break_up_group)
        except JoinRefused as refused:
            if ALL_PLACES_TAKEN not in str(refused):
                raise WorkerNotNeeded(str(refused)) from None
            leave_requested.wait(AGAIN_S)
            deadline = time.monotonic() + NOBODY_S
        except (OSError, ValueError, Closed, Silent, ProtocolError) as error:
            if time.monotonic() > deadline:
                raise WorkerNotNeeded(
                    f"worker {worker_number} was not admitted to the training: {error}"
                ) from None
            time.sleep(0.5)
    raise WorkerNotNeeded(
        f"worker {worker_number} got a signal to leave before it was admitted to the training"
    )
