"""Frames of the parameter-server protocol, identical for TCP and shared memory.

A frame is a binary header of fixed size, authenticated with the connection's key, and `length` bytes of
payload. Nothing is unpickled. A length is checked before anything is read or allocated.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"PS"
PROTOCOL = 4
#: Shard number of the model's float buffers (BatchNorm running statistics).
BUFFERS = 0xFFFFFFFF
#: Ticket number of frames in the warm-up. These frames change no weights and are not counted.
NO_TICKET = -1
#: Maximum bytes of a payload that is not weights, gradients or buffers: a text, JSON or a ticket.
SMALL_BYTES = 64 * 1024

_FIELDS = struct.Struct("<2sBBIIqqQdQ")
MAC_BYTES = 8
HEADER_BYTES = _FIELDS.size + MAC_BYTES
_TICKET = struct.Struct("<QIII")


class Kind(IntEnum):
    """Kind of a frame. Each comment names its sender: a server or a client (worker)."""

    CHALLENGE = 1  # Server: the server's nonce, in the first frame of a connection
    # Client: description of the worker and its model, with a proof that it knows the secret.
    HELLO = 2
    WELCOME = 3  # Server: description of the server's shards, with a proof that it knows the secret
    MEMORY = 4  # Client: a frame that comes with the file descriptor of the shared memory
    INIT = 5  # Server: request for the worker's initial weights. Client: the initial weights of one shard
    # Client: request for weights and the first ticket, because the worker is ready to start.
    PULL = 6
    PUSH = 7  # Client: gradients of `count` shards, or the float buffers
    SKIP = 8  # Client: a gradient of the ticket overflowed. So the ticket causes no update
    OK = 9  # Server: weights of `count` shards
    TICKET = 10  # Server: the worker's next ticket
    WAIT = 11  # Server: no ticket is free at present. Client: the same, for the other servers
    DONE = 12  # Server: the training is over. Client: the same, for the other servers of an elastic run
    ACK = 13  # Server: a server other than 0 has received all gradients of the ticket
    SETTLE = 14  # Client: the content of an ACK, for server 0
    HEARTBEAT = 15  # Server and client: sign of life while nothing else is sent
    # Server: the reason for which the run, or this worker's part in it, is over. With `count` 1, the worker
    # may join later. Client: the same, for the other servers.
    ERR = 16
    BYE = 17  # Client: the worker leaves after the training, and reports how long it waited for servers
    TALK = 32  # Server and client: JSON between the coordinator of an elastic cell and its workers
    APPLY = 18  # Client: no gradient of the ticket overflowed. So the servers apply the gradients
    # Client: the elastic worker leaves before the end, and reports how long it waited for servers.
    LEAVE = 19
    # Server: request to evaluate the snapshot of epoch `shard`, in place of an elastic worker's ticket.
    EVAL = 20
    SCORE = 21  # Client: the results of an evaluation that EVAL has requested


class ProtocolError(Exception):
    """Error for a frame that the protocol does not allow. The message gives the reason."""


class ComeAgain(ProtocolError):
    """Error for a worker that cannot join at present, but may try again later."""


class Frame(NamedTuple):
    """Header of a frame of the parameter-server protocol."""

    kind: Kind
    shard: int = 0  # number of the frame's first shard, or `BUFFERS`
    count: int = 0  # number of the frame's shards
    ticket: int = NO_TICKET
    version: int = 0  # lowest version of the weights of the frame's shards
    length: int = 0  # number of bytes of the payload, which follows the header
    weight: float = 1.0  # weight of the frame's gradients in an average of pushes


class Header:
    """Packs or checks the headers of frames in one direction of a connection.

    Sequence numbers start at 0 and increase by one per frame. The tag is keyed BLAKE2b over the fields, so
    that a frame of another connection, direction or run is refused. Payloads are not authenticated
    (docs/parameter-server-protocol.md has the reason).
    """

    def __init__(self, key: bytes) -> None:
        """Set the key of this connection and direction, which has 32 bytes (`derive_session_keys`)."""
        self._mac = hashlib.blake2b(digest_size=MAC_BYTES, key=key)
        self.seq = 0

    def _compute_header_tag(self, fields: bytes | memoryview) -> bytes:
        mac = self._mac.copy()
        mac.update(fields)
        return mac.digest()

    def pack_frame(self, frame: Frame) -> bytes:
        """Return a frame's header as bytes, and advance the sequence number."""
        fields = _FIELDS.pack(MAGIC, PROTOCOL, *frame, self.seq)
        self.seq += 1
        return fields + self._compute_header_tag(fields)

    def unpack_frame(self, head: bytes | bytearray, limit_bytes: int) -> tuple[Frame, bool]:
        """Return the frame of a header, and whether the peer sent this frame before.

        The caller must discard the payload of a repeated frame.

        Raises:
            ProtocolError: If the peer of this connection cannot have sent this frame now.
        """
        magic, protocol, *fields, seq = _FIELDS.unpack_from(head)
        if magic != MAGIC:
            raise ProtocolError(f"malformed frame: it begins with {magic!r}, expected {MAGIC!r}")
        if protocol != PROTOCOL:
            raise ProtocolError(
                f"malformed frame: protocol version {protocol}, expected {PROTOCOL}"
            )
        tag = self._compute_header_tag(memoryview(head)[: _FIELDS.size])
        if not hmac.compare_digest(bytes(head[_FIELDS.size :]), tag):
            raise ProtocolError(
                "malformed frame: its authentication tag is wrong for this connection"
            )
        try:
            frame = Frame(Kind(fields[0]), *fields[1:])
        except ValueError:
            raise ProtocolError(f"malformed frame: its kind {fields[0]} is unknown") from None
        if not 0 <= frame.weight < math.inf:
            raise ProtocolError(
                f"malformed frame: its weight {frame.weight} is negative or not finite"
            )
        if frame.length > limit_bytes:
            raise ProtocolError(
                f"oversized frame: it has {frame.length} bytes of payload, at most {limit_bytes}"
            )
        if seq > self.seq:
            raise ProtocolError(f"malformed frame: sequence number {seq}, expected {self.seq}")
        if seq < self.seq:
            return frame, True
        self.seq += 1
        return frame, False


def pack_ticket(number: int, epoch: int, step: int, slice_: int) -> bytes:
    """Return the payload of a TICKET frame with these numbers of a ticket.

    Args:
        number: Number of the ticket.
        epoch: Epoch of the ticket.
        step: Step of the epoch.
        slice_: Slice of the step.
    """
    return _TICKET.pack(number, epoch, step, slice_)


def unpack_ticket(payload: bytes) -> tuple[int, int, int, int]:
    """Return a ticket's number, epoch, step and slice from a TICKET frame's payload.

    Raises:
        ProtocolError: If the payload has the wrong length.
    """
    if len(payload) != _TICKET.size:
        raise ProtocolError(
            f"malformed ticket: it has {len(payload)} bytes, expected {_TICKET.size}"
        )
    return _TICKET.unpack(payload)
