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
#: Ticket number of frames in the warm-up, which change no weights and are not counted.
NO_TICKET = -1
#: Maximum bytes of a payload other than weights and gradients (text, JSON, a ticket).
SMALL_BYTES = 64 * 1024

_FIELDS = struct.Struct("<2sBBIIqqQdQ")
MAC_BYTES = 8
HEADER_BYTES = _FIELDS.size + MAC_BYTES
_TICKET = struct.Struct("<QIII")


class Kind(IntEnum):
    """Kind of a frame. C: sent by workers (clients), S: by servers."""

    CHALLENGE = 1  # S: the server's nonce, the first frame of a connection
    HELLO = 2  # C: description of the worker and its model, with a proof of the secret
    WELCOME = 3  # S: the bounds of all shards, with a proof of the secret
    MEMORY = 4  # C: the file descriptor of shared memory, sent together with this frame
    INIT = 5  # S: request for the worker's initial weights; C: one shard of them
    PULL = 6  # C: the worker is ready to start, and asks for weights and its first ticket
    PUSH = 7  # C: gradients of `count` shards, or the float buffers
    SKIP = 8  # C: a gradient of the ticket overflowed: complete it without gradients
    OK = 9  # S: weights of `count` shards
    TICKET = 10  # S: the next ticket
    WAIT = 11  # S: no ticket is free now, but one may follow; C: forwarded to the other servers
    DONE = 12  # S: the training is over; C: forwarded to the other servers of an elastic run
    ACK = 13  # S: a server other than 0 has all gradients of the ticket
    SETTLE = 14  # C: an ACK, forwarded to server 0
    HEARTBEAT = 15  # S and C: sign of life while nothing else is sent
    ERR = 16  # S: why the run, or this worker's part in it, is over. `count` 1: the worker may join later.
    #          C: forwarded to the other servers
    BYE = 17  # C: the worker leaves after the end of the training, with its measured waiting time
    TALK = 32  # S and C: JSON, between the coordinator of an elastic cell and its workers
    APPLY = 18  # C: no gradient of the ticket overflowed: apply them
    # In elastic runs only:
    LEAVE = (
        19  # C: the worker leaves before the end, with its waiting time; its ticket goes to another
    )
    EVAL = 20  # S: request to evaluate the snapshot of epoch `shard`, in place of a ticket
    SCORE = 21  # C: result of that evaluation


class ProtocolError(Exception):
    """A frame is invalid; the text describes the error."""


class ComeAgain(ProtocolError):
    """A worker cannot join now, but may try again later."""


class Frame(NamedTuple):
    """Header of a frame of the parameter-server protocol."""

    kind: Kind
    shard: int = 0  # number of the first shard, or `BUFFERS`
    count: int = 0  # number of shards
    ticket: int = NO_TICKET
    version: int = 0  # lowest version among the shards of the frame
    length: int = 0  # bytes of payload that follow the header
    weight: float = 1.0  # weight of a push in an average over pushes


class Header:
    """Packs and checks the headers of one direction of a connection.

    Sequence numbers start at 0 and increase by one per frame. The tag is keyed BLAKE2b over the fields, so
    that a frame of another connection, direction or run is refused. Payloads are not authenticated
    (docs/parameter-server-protocol.md says why).
    """

    def __init__(self, key: bytes) -> None:
        """Start with the key of this connection and direction, 32 bytes (`derive_session_keys`)."""
        self._mac = hashlib.blake2b(digest_size=MAC_BYTES, key=key)
        self.seq = 0

    def _compute_tag(self, fields: bytes | memoryview) -> bytes:
        mac = self._mac.copy()
        mac.update(fields)
        return mac.digest()

    def pack_frame(self, frame: Frame) -> bytes:
        """Return the bytes of a header, and advance the sequence number."""
        fields = _FIELDS.pack(MAGIC, PROTOCOL, *frame, self.seq)
        self.seq += 1
        return fields + self._compute_tag(fields)

    def unpack_frame(self, head: bytes | bytearray, limit_bytes: int) -> tuple[Frame, bool]:
        """Return the frame, and whether it is a repetition, whose payload must be discarded.

        Raises:
            ProtocolError: If the peer of this connection cannot have sent this frame now.
        """
        magic, protocol, *fields, seq = _FIELDS.unpack_from(head)
        if magic != MAGIC:
            raise ProtocolError(f"malformed frame: begins with {magic!r}, expected {MAGIC!r}")
        if protocol != PROTOCOL:
            raise ProtocolError(f"malformed frame: protocol {protocol}, expected {PROTOCOL}")
        tag = self._compute_tag(memoryview(head)[: _FIELDS.size])
        if not hmac.compare_digest(bytes(head[_FIELDS.size :]), tag):
            raise ProtocolError("malformed frame: its tag does not fit this connection")
        try:
            frame = Frame(Kind(fields[0]), *fields[1:])
        except ValueError:
            raise ProtocolError(f"malformed frame: unknown kind {fields[0]}") from None
        if not 0 <= frame.weight < math.inf:
            raise ProtocolError(f"malformed frame: weight {frame.weight}")
        if frame.length > limit_bytes:
            raise ProtocolError(f"oversized frame: {frame.length} bytes, at most {limit_bytes}")
        if seq > self.seq:
            raise ProtocolError(f"malformed frame: number {seq}, expected {self.seq}")
        if seq < self.seq:
            return frame, True
        self.seq += 1
        return frame, False


def pack_ticket(number: int, epoch: int, step: int, slice_: int) -> bytes:
    """Return the payload of a TICKET frame.

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
        raise ProtocolError(f"malformed ticket: {len(payload)} bytes, expected {_TICKET.size}")
    return _TICKET.unpack(payload)
