"""Sends and receives messages between a coordinator and elastic workers, as JSON in frames."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from stratbench.extensions.servers.wire.frames import Frame, Kind, ProtocolError
from stratbench.extensions.servers.wire.transport import Closed, Connection

#: Seconds between two heartbeats of a process.
HEARTBEAT_S = 1.0
#: Seconds without a message or heartbeat after which the other process counts as lost.
SILENCE_S = 10.0
#: Seconds without a message after which a worker in its warm-up counts as lost. It sends no heartbeat while
#: an import holds the interpreter lock.
WARM_UP_SILENCE_S = 60.0


def send_message(connection: Connection, kind: str, **values: Any) -> None:
    """Send a message of a kind with named values. Raises Closed if the connection is closed."""
    connection.send(Frame(Kind.TALK), json.dumps({"what": kind} | values).encode())


def receive_message(connection: Connection) -> dict[str, Any]:
    """Wait for the next message, and return it. Heartbeats are skipped.

    Raises:
        Closed: If the other process has closed the connection.
        Silent: If the other process counts as lost.
        ProtocolError: If the message has another format.
    """
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


def send_heartbeats_until(
    stopped: threading.Event, list_connections: Callable[[], list[Connection]]
) -> None:
    """Send a heartbeat on each listed connection every HEARTBEAT_S seconds, until `stopped` is set."""
    while not stopped.wait(HEARTBEAT_S):
        for connection in list_connections():
            # The thread that reads from this connection handles its end.
            with suppress(Closed):
                connection.send_unless_busy(Frame(Kind.HEARTBEAT))
