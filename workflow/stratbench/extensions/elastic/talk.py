"""Messages between a coordinator and its members: JSON in frames of the parameter servers' wire."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from stratbench.extensions.servers.wire.frames import Frame, Kind, ProtocolError
from stratbench.extensions.servers.wire.transport import Closed, Connection

#: How often each side says that it lives, and after how much silence the other is given up, in seconds.
HEARTBEAT_S, SILENCE_S = 1.0, 10.0
#: The same of a worker that warms up: nobody waits for it, and loading may hold the interpreter lock.
WARM_UP_SILENCE_S = 60.0


def say(connection: Connection, what: str, **said: Any) -> None:
    """Send a message. Raises Closed."""
    connection.send(Frame(Kind.TALK), json.dumps({"what": what} | said).encode())


def hear(connection: Connection) -> dict[str, Any]:
    """Return the next message, without heartbeats. Raises Closed, Silent and ProtocolError."""
    while True:
        frame = connection.receive()
        if frame.kind is Kind.HEARTBEAT:
            continue
        text = connection.read(frame.length)
        if frame.kind is Kind.ERR:
            raise Closed(text.decode(errors="replace"))
        message = json.loads(text) if frame.kind is Kind.TALK else None
        if not isinstance(message, dict) or "what" not in message:
            raise ProtocolError(f"unexpected {frame.kind.name}")
        return message


def send_heartbeats_until(stopped: threading.Event, to: Callable[[], list[Connection]]) -> None:
    """Send a heartbeat on each of the connections, until `stopped` is set."""
    while not stopped.wait(HEARTBEAT_S):
        for connection in to():
            with suppress(Closed):  # its reader notices
                connection.send_if_free(Frame(Kind.HEARTBEAT))
