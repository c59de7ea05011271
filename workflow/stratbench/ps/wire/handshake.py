"""The per-job secret, and the handshake that proves that server and worker know it.

The server starts with a nonce. The worker answers with its own nonce and an HMAC-SHA256 over both and its
description; the server answers likewise. A recorded handshake is useless: the next nonce differs. The keys of
the connection's frames follow from secret and nonces.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from pathlib import Path
from typing import Any

from stratbench.ps.wire.frames import Frame, Kind, ProtocolError
from stratbench.ps.wire.transport import Connection

NONCE_BYTES = 32
DIGEST_BYTES = 32
#: Most bytes of a HELLO or WELCOME; nothing longer is read from a peer that is not yet trusted.
HELLO_BYTES = 4096
_NO_KEY = b"\0" * 32  # the tag of a handshake frame only guards against accidents


class JoinRefused(ConnectionError):
    """The other side does not accept this connection, or is not what it should be."""


class JoinLater(JoinRefused):
    """The server has no free slot for this worker now; it may come again."""


def new_secret() -> bytes:
    """Return a fresh secret of 32 random bytes."""
    return os.urandom(32)


def write_secret(path: str | Path, secret: bytes) -> None:
    """Write `secret` as hex to a new file with mode 0600."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secret.hex())


def load_secret(path: str | Path) -> bytes:
    """Return the job's secret, from the file `path` that `write_secret` made.

    Raises ValueError when others may read the file, or when it holds no secret or too short a one;
    OSError when the file cannot be read.
    """
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        raise ValueError(f"{path}: mode {mode:04o} lets others read the secret; chmod 600 it")
    try:
        secret = bytes.fromhex(Path(path).read_text(encoding="utf-8").strip())
    except ValueError:
        raise ValueError(f"{path}: the secret is not hexadecimal") from None
    if len(secret) < 16:
        raise ValueError(f"{path}: a secret of at least 16 bytes is needed, got {len(secret)}")
    return secret


def _prove(secret: bytes, side: bytes, nonces: bytes, payload: bytes) -> bytes:
    return hmac.digest(secret, side + nonces + payload, hashlib.sha256)


def session_keys(secret: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Return the 32-byte keys of the frames from worker to server and from server to worker."""
    return (
        hmac.digest(secret, b"worker frames" + nonces, hashlib.sha256),
        hmac.digest(secret, b"server frames" + nonces, hashlib.sha256),
    )


def _said(connection: Connection, kind: Kind, least_bytes: int) -> bytes:
    frame = connection.receive()
    if frame.kind is Kind.ERR:
        reason = connection.read(frame.length).decode(errors="replace")
        raise JoinLater(reason) if frame.count else JoinRefused(reason)
    if frame.kind is not kind or frame.length < least_bytes:
        raise ProtocolError(f"{frame.kind.name} of {frame.length} bytes, expected {kind.name}")
    return connection.read(frame.length)


def _parsed(payload: bytes) -> dict[str, Any]:
    try:
        value = json.loads(payload)
    except ValueError:
        raise ProtocolError("malformed handshake: not JSON") from None
    if not isinstance(value, dict):
        raise ProtocolError("malformed handshake: not a JSON object")
    return value


def open_handshake(connection: Connection, secret: bytes) -> tuple[dict[str, Any], bytes]:
    """Challenge the peer, on the server; return its HELLO and both nonces.

    Raises:
        ProtocolError: When the peer does not know the secret or does not follow the protocol.
    """
    connection.use_keys(_NO_KEY, _NO_KEY, HELLO_BYTES)
    nonce = os.urandom(NONCE_BYTES)
    connection.send(Frame(Kind.CHALLENGE), nonce)
    body = _said(connection, Kind.HELLO, DIGEST_BYTES + NONCE_BYTES)
    digest, theirs = body[:DIGEST_BYTES], body[DIGEST_BYTES : DIGEST_BYTES + NONCE_BYTES]
    payload = body[DIGEST_BYTES + NONCE_BYTES :]
    if not hmac.compare_digest(digest, _prove(secret, b"worker", nonce + theirs, payload)):
        raise ProtocolError("the peer does not know this job's secret")
    return _parsed(payload), nonce + theirs


def accept_handshake(
    connection: Connection, secret: bytes, nonces: bytes, welcome: dict[str, Any], limit_bytes: int
) -> None:
    """Welcome the peer, on the server; further frames are authenticated with the connection's keys.

    Args:
        connection: Connection to the peer.
        secret: Secret of the job.
        nonces: Both nonces.
        welcome: Content of the WELCOME.
        limit_bytes: Maximum size of payloads.
    """
    payload = json.dumps(welcome).encode()
    connection.send(Frame(Kind.WELCOME), _prove(secret, b"server", nonces, payload) + payload)
    to_server, to_worker = session_keys(secret, nonces)
    connection.use_keys(to_worker, to_server, limit_bytes)


def join_handshake(connection: Connection, secret: bytes, hello: dict[str, Any]) -> dict[str, Any]:
    """Answer the challenge, on the worker; return the server's WELCOME.

    Args:
        connection: Connection to the server.
        secret: Secret of the job.
        hello: The worker's description.

    Raises:
        JoinRefused: With the server's reason, or when the server does not know the secret.
    """
    connection.use_keys(_NO_KEY, _NO_KEY, HELLO_BYTES)
    nonces = _said(connection, Kind.CHALLENGE, NONCE_BYTES)[:NONCE_BYTES] + os.urandom(NONCE_BYTES)
    payload = json.dumps(hello).encode()
    proof = _prove(secret, b"worker", nonces, payload)
    connection.send(Frame(Kind.HELLO), proof + nonces[NONCE_BYTES:] + payload)
    body = _said(connection, Kind.WELCOME, DIGEST_BYTES)
    payload = body[DIGEST_BYTES:]
    if not hmac.compare_digest(body[:DIGEST_BYTES], _prove(secret, b"server", nonces, payload)):
        raise JoinRefused("the server does not know this job's secret")
    welcome = _parsed(payload)
    to_server, to_worker = session_keys(secret, nonces)
    connection.use_keys(to_server, to_worker, int(welcome["limit_bytes"]))
    return welcome
