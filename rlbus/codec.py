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


def encode(message: Wire) -> bytes:
    """JSON bytes of a message.

    Raises:
        PayloadTooLargeError: over MAX_MESSAGE_BYTES. Split it (a manifest), or send less.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise PayloadTooLargeError(type(message).__name__, len(data), MAX_MESSAGE_BYTES)
    return data


def decode(data: bytes, as_type: type[T] | Any, subject: str) -> T:
    """Parse `data` as `as_type` (a Struct or a union of tagged Structs).

    Raises:
        DecodeError: it doesn't parse, or is over MAX_MESSAGE_BYTES; names the subject, the type and the field.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise DecodeError(subject, _name(as_type), f"{len(data)} bytes, over the limit of {MAX_MESSAGE_BYTES}")
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
