"""The secret of a job, and the handshake by which server and worker prove that they know it.

The server starts with a nonce. The worker answers with its own nonce and an HMAC-SHA256 over both nonces and
its description. The server answers likewise. A recorded handshake cannot be used again, since nonces differ.
The keys of the connection's frames are derived from secret and nonces.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from pathlib import Path
from typing import Any

from stratbench.extensions.servers.wire.frames import Frame, Kind, ProtocolError
from stratbench.extensions.servers.wire.transport import Connection

NONCE_BYTES = 32
DIGEST_BYTES = 32
#: Maximum bytes of HELLO and WELCOME. From a peer that has not proved its secret, nothing longer is read.
HELLO_BYTES = 4096
#: Key of the frames of the handshake. With it, their tags only detect accidental changes.
_NO_KEY = b"\0" * 32


class JoinRefused(ConnectionError):
    """Error if a server does not accept this worker, or does not know the job's secret."""


class JoinLater(JoinRefused):
    """Error if a server has no free slot for this worker at present. The worker may try again."""


def make_secret() -> bytes:
    """Return a fresh secret of 32 random bytes."""
    return os.urandom(32)


def write_secret(path: str | Path, secret: bytes) -> None:
    """Write `secret` as hex to a new file with mode 0600."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secret.hex())


def load_secret(path: str | Path) -> bytes:
    """Return the job's secret from a file that `write_secret` has written.

    Raises:
        ValueError: If other users may read the file, or if its secret is missing or too short.
        OSError: If the file cannot be read.
    """
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        raise ValueError(f"{path}: mode {mode:04o} lets others read the secret; chmod 600")
    try:
        secret = bytes.fromhex(Path(path).read_text(encoding="utf-8").strip())
    except ValueError:
        raise ValueError(f"{path}: the secret is not hexadecimal") from None
    if len(secret) < 16:
        raise ValueError(f"{path}: the secret has {len(secret)} bytes, expected at least 16")
    return secret


def _compute_proof(secret: bytes, side: bytes, nonces: bytes, payload: bytes) -> bytes:
    return hmac.digest(secret, side + nonces + payload, hashlib.sha256)


def derive_session_keys(secret: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Return the keys of frames to the server and of frames to the worker.

    Each key has 32 bytes.
    """
    return (
        hmac.digest(secret, b"worker frames" + nonces, hashlib.sha256),
        hmac.digest(secret, b"server frames" + nonces, hashlib.sha256),
    )


def _receive_payload(connection: Connection, kind: Kind, min_bytes: int) -> bytes:
    frame = connection.receive()
    if frame.kind is Kind.ERR:
        reason = connection.read_payload(frame.length).decode(errors="replace")
        raise JoinLater(reason) if frame.count else JoinRefused(reason)
    if frame.kind is not kind or frame.length < min_bytes:
        raise ProtocolError(
            f"malformed handshake: {frame.kind.name} with {frame.length} bytes, "
            f"expected {kind.name} with at least {min_bytes}"
        )
    return connection.read_payload(frame.length)


def _parse_json_object(payload: bytes) -> dict[str, Any]:
    try:
        value = json.loads(payload)
    except ValueError:
        raise ProtocolError("malformed handshake: the payload is no JSON") from None
    if not isinstance(value, dict):
        raise ProtocolError("malformed handshake: the payload is no JSON object")
    return value


def challenge_worker(connection: Connection, secret: bytes) -> tuple[dict[str, Any], bytes]:
    """Check that a worker knows the secret, and return its HELLO and both nonces.

    A server calls this function.

    Raises:
        ProtocolError: If the worker does not know the secret or does not follow the protocol.
    """
    connection.set_frame_keys(_NO_KEY, _NO_KEY, HELLO_BYTES)
    nonce = os.urandom(NONCE_BYTES)
    connection.send(Frame(Kind.CHALLENGE), nonce)
    body = _receive_payload(connection, Kind.HELLO, DIGEST_BYTES + NONCE_BYTES)
    digest, theirs = body[:DIGEST_BYTES], body[DIGEST_BYTES : DIGEST_BYTES + NONCE_BYTES]
    payload = body[DIGEST_BYTES + NONCE_BYTES :]
    if not hmac.compare_digest(digest, _compute_proof(secret, b"worker", nonce + theirs, payload)):
        raise ProtocolError("the peer does not know this job's secret")
    return _parse_json_object(payload), nonce + theirs


def send_welcome_to_worker(
    connection: Connection, secret: bytes, nonces: bytes, welcome: dict[str, Any], limit_bytes: int
) -> None:
    """Send WELCOME to a worker, and authenticate all later frames. A server calls this function.

    Args:
        connection: Connection to the worker.
        secret: Secret of the job.
        nonces: Nonces of server and worker, concatenated.
        welcome: Content of the WELCOME.
        limit_bytes: Maximum size of later payloads, in bytes.
    """
    payload = json.dumps(welcome).encode()
    connection.send(
        Frame(Kind.WELCOME), _compute_proof(secret, b"server", nonces, payload) + payload
    )
    to_server, to_worker = derive_session_keys(secret, nonces)
    connection.set_frame_keys(to_worker, to_server, limit_bytes)


def answer_server_challenge(
    connection: Connection, secret: bytes, hello: dict[str, Any]
) -> dict[str, Any]:
    """Answer the challenge of a server, and return its WELCOME. A worker calls this function.

    Args:
        connection: Connection to the server.
        secret: Secret of the job.
        hello: The worker's description of itself and its model.

    Raises:
        JoinRefused: If the server refuses the worker, with its reason, or does not know the secret.
    """
    connection.set_frame_keys(_NO_KEY, _NO_KEY, HELLO_BYTES)
    nonces = _receive_payload(connection, Kind.CHALLENGE, NONCE_BYTES)[:NONCE_BYTES] + os.urandom(
        NONCE_BYTES
    )
    payload = json.dumps(hello).encode()
    proof = _compute_proof(secret, b"worker", nonces, payload)
    connection.send(Frame(Kind.HELLO), proof + nonces[NONCE_BYTES:] + payload)
    body = _receive_payload(connection, Kind.WELCOME, DIGEST_BYTES)
    payload = body[DIGEST_BYTES:]
    if not hmac.compare_digest(
        body[:DIGEST_BYTES], _compute_proof(secret, b"server", nonces, payload)
    ):
        raise JoinRefused("the server does not know this job's secret")
    welcome = _parse_json_object(payload)
    to_server, to_worker = derive_session_keys(secret, nonces)
    connection.set_frame_keys(to_server, to_worker, int(welcome["limit_bytes"]))
    return welcome
