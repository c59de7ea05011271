"""Sends and receives messages between a coordinator and its members, as JSON in frames."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from stratbench.extensions.servers.wire.frames import Frame, Kind, ProtocolError
from stratbench.extensions.servers.wire.transport import Closed, Connection

#: Seconds between two heartbeats, and seconds of silence after which the other side counts as lost.
HEARTBEAT_S, SILENCE_S = 1.0, 10.0
#: Seconds of silence after which a worker in its warm-up counts as lost: loading may hold the interpreter
#: lock.
WARM_UP_SILENCE_S = 60.0


def send_message(connection: Connection, what: str, **said: Any) -> None:
    """Send a message of kind `what` with further values. Raises Closed if the connection is closed."""
    connection.send(Frame(Kind.TALK), json.dumps({"what": what} | said).encode())


def receive_message(connection: Connection) -> dict[str, Any]:
    """Wait for the next message other than a heartbeat. Raises Closed, Silent and ProtocolError."""
    while True:
        frame = connection.receive()
        if frame.kind is Kind.HEARTBEAT:
            continue
        text = connection.read_payload(frame.length)
        if frame.kind is Kind.ERR:
            raise Closed(text.decode(errors="replace"))
        message = json.loads(text) if frame.kind is Kind.TALK else None
        if not isinstance(message, dict) or "what" not in message:
            raise ProtocolError(f"unexpected frame {frame.kind.name} instead of a message")
        return message


def send_heartbeats_until(stopped: threading.Event, to: Callable[[], list[Connection]]) -> None:
    """Send a heartbeat on each connection every HEARTBEAT_S seconds, until `stopped` is set."""
    while not stopped.wait(HEARTBEAT_S):
        for connection in to():
            with suppress(Closed):  # the thread that reads from this connection notices the end
                connection.send_if_free(Frame(Kind.HEARTBEAT))
