"""Frames of the parameter-server protocol, the same over TCP and next to shared memory.

A frame is a fixed binary header, authenticated with the connection's key, and `length` bytes of payload.
Nothing is ever unpickled; a length is checked before anything is read or allocated.
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
#: Ticket number of the warm-up's exchanges, which change and count nothing.
NO_TICKET = -1
#: Most bytes of a payload that is not weights or gradients (text, JSON, a ticket).
SMALL_BYTES = 64 * 1024

_FIELDS = struct.Struct("<2sBBIIqqQdQ")
MAC_BYTES = 8
HEADER_BYTES = _FIELDS.size + MAC_BYTES
_TICKET = struct.Struct("<QIII")


class Kind(IntEnum):
    """Kind of a frame. C: sent by workers (clients), S: by servers."""

    CHALLENGE = 1  # S  first frame of a connection: the server's nonce
    HELLO = 2  # C  who I am and what my model looks like; proves the secret
    WELCOME = 3  # S  how shards are cut; proves the secret
    MEMORY = 4  # C  shared memory: its file descriptor travels beside this frame
    INIT = 5  # S  send me your initial weights; C  here is one shard of them
    PULL = 6  # C  ready to start; send the weights and my first ticket
    PUSH = 7  # C  gradients of `count` shards, or the buffers
    SKIP = 8  # C  the ticket's gradients overflowed: settle it without them, drop what was pushed
    OK = 9  # S  weights of `count` shards
    TICKET = 10  # S  the next batch
    WAIT = 11  # S  no batch now, but one may come; C  relayed to the other servers
    DONE = 12  # S  the training is over; C  relayed to the other servers of an elastic run
    ACK = 13  # S  a server other than 0 has all of the ticket's gradients
    SETTLE = 14  # C  relays an ACK to server 0
    HEARTBEAT = 15  # both
    ERR = 16  # S  why the run, or this worker's part in it, is over; `count` 1: come again later;
    #          C  relayed to other servers
    BYE = 17  # C  leaving in order, with the worker's own measurements
    TALK = 32  # both: JSON, between an elastic cell's coordinator and its members
    APPLY = 18  # C  none of the ticket's gradients has overflowed: apply what was pushed
    # Of elastic runs:
    LEAVE = 19  # C  leaving before the end, as BYE: give my ticket to another
    EVAL = 20  # S  no batch: evaluate the state that the servers kept after epoch `shard`
    SCORE = 21  # C  what that evaluation gave


class ProtocolError(Exception):
    """A frame is invalid; the text describes the error."""


class ComeAgain(ProtocolError):
    """A worker cannot join now, and may come again later: it has done nothing wrong."""


class Frame(NamedTuple):
    """A frame's header. `length` bytes of payload follow it."""

    kind: Kind
    shard: int = 0  # first shard, or BUFFERS
    count: int = 0  # shards in this frame
    ticket: int = NO_TICKET
    version: int = 0  # smallest version among the shards
    length: int = 0
    weight: float = 1.0  # of a PUSH: what it weighs among those that it is averaged with


class Header:
    """Packs and checks the headers of one direction of one connection.

    Sequence numbers start at 0 and rise by one a frame. The tag is keyed BLAKE2b over the fields,
    so a frame of another connection, direction or run is refused; payloads are not authenticated
    (what the network must be trusted for: docs/parameter-server.md).
    """

    def __init__(self, key: bytes) -> None:
        """`key`: 32 bytes, of this connection and direction (see `handshake.session_keys`)."""
        self._mac = hashlib.blake2b(digest_size=MAC_BYTES, key=key)
        self.seq = 0

    def _tag(self, fields: bytes | memoryview) -> bytes:
        mac = self._mac.copy()
        mac.update(fields)
        return mac.digest()

    def pack(self, frame: Frame) -> bytes:
        """Return the header's bytes; advances the sequence number."""
        fields = _FIELDS.pack(MAGIC, PROTOCOL, *frame, self.seq)
        self.seq += 1
        return fields + self._tag(fields)

    def unpack(self, head: bytes | bytearray, limit_bytes: int) -> tuple[Frame, bool]:
        """Return the frame and whether it is a replay, whose payload must be discarded.

        Raises ProtocolError for anything this connection's peer cannot have sent now.
        """
        magic, protocol, *fields, seq = _FIELDS.unpack_from(head)
        if magic != MAGIC:
            raise ProtocolError(f"malformed frame: begins with {magic!r}, expected {MAGIC!r}")
        if protocol != PROTOCOL:
            raise ProtocolError(f"malformed frame: protocol {protocol}, expected {PROTOCOL}")
        tag = self._tag(memoryview(head)[: _FIELDS.size])
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
        epoch: Its epoch.
        step: Its step.
        slice_: Its slice of the step.
    """
    return _TICKET.pack(number, epoch, step, slice_)


def unpack_ticket(payload: bytes) -> tuple[int, int, int, int]:
    """(number, epoch, step, slice); raises ProtocolError when the length is wrong."""
    if len(payload) != _TICKET.size:
        raise ProtocolError(f"malformed ticket: {len(payload)} bytes, expected {_TICKET.size}")
    return _TICKET.unpack(payload)
