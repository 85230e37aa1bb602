"""Structs to bytes and back, with the subject in every error. The only place where wire bytes are parsed."""

from typing import Any, TypeVar

import msgspec

from rlbus.errors import DecodeError, PayloadTooLargeError
from rlbus.schemas.base import Wire

T = TypeVar("T")

# What one message may have at most, whatever the server would take. A page of a manifest aims at half of it.
MAX_MESSAGE_BYTES = 1_000_000

_encoder = msgspec.json.Encoder()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def encode(message: Wire, limit_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """JSON bytes of a message. Only what stays in this process may have another limit.

    Raises:
        PayloadTooLargeError: over `limit_bytes`. Split it (a manifest), or send less.
    """
    data = _encoder.encode(message)
    if len(data) > limit_bytes:
        raise PayloadTooLargeError(type(message).__name__, len(data), limit_bytes)
    return data


def decode(data: bytes, as_type: type[T] | Any, subject: str, limit_bytes: int = MAX_MESSAGE_BYTES) -> T:
    """Parse `data` as `as_type` (a Struct or a union of tagged Structs).

    Raises:
        DecodeError: it doesn't parse, or is over `limit_bytes`; names the subject, the type and the field.
    """
    if len(data) > limit_bytes:
        raise DecodeError(subject, _name(as_type), f"{len(data)} bytes, over the limit of {limit_bytes}")
    decoder = _decoders.get(as_type)
    if decoder is None:
        decoder = _decoders[as_type] = msgspec.json.Decoder(as_type)
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    except msgspec.MsgspecError as exc:
        raise DecodeError(subject, _name(as_type), str(exc)) from exc
    except (RecursionError, UnicodeDecodeError) as exc:
        raise DecodeError(subject, _name(as_type), f"{type(exc).__name__}") from exc


def _name(as_type: Any) -> str:
    return getattr(as_type, "__name__", "message")
