"""What an engine and the processes of its further ranks say to each other: JSON, one message a line, over pipes.

A request has an `id`, its answers the same. `Leave` has no answer. At the end of its input a rank's process ends.
"""

from typing import Any

import msgspec

from rlbus.schemas import Fault, GroupPlan, ReceivedData, TensorSpec, TensorSum
from rlbus.schemas import Version as WeightsVersion
from rlbus.workers.torch_lm.rank import Seat

# Longest line: a manifest of a million tensors.
MAX_LINE_BYTES = 1 << 28


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag_field="ask"):
    """Base of the requests."""

    id: int


class Join(Ask, frozen=True, kw_only=True, tag="join"):
    """`Rank.join`; answered with a seat."""

    plan: GroupPlan
    rank: int


class Leave(Ask, frozen=True, kw_only=True, tag="leave"):
    """`Rank.leave`; at once, beside whatever runs."""

    reason: str


class Receive(Ask, frozen=True, kw_only=True, tag="receive"):
    """`Rank.receive`; answered with Standing, Advanced, and what was received."""

    update_op_id: str
    epoch: int
    version: WeightsVersion
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int


class Stage(Ask, frozen=True, kw_only=True, tag="stage"):
    """`Rank.stage`."""

    path: str


class Apply(Ask, frozen=True, kw_only=True, tag="apply"):
    """`Rank.apply`."""


class Discard(Ask, frozen=True, kw_only=True, tag="discard"):
    """`Rank.discard`."""


class Sum(Ask, frozen=True, kw_only=True, tag="sum"):
    """`Rank.checksums`; answered with sums."""


class Sleep(Ask, frozen=True, kw_only=True, tag="sleep"):
    """`Rank.sleep`; answered with a number of bytes."""

    keeps: bool


class Wake(Ask, frozen=True, kw_only=True, tag="wake"):
    """`Rank.wake`; answered with a number of bytes."""


AnyAsk = Join | Leave | Receive | Stage | Apply | Discard | Sum | Sleep | Wake


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="loaded"):
    """The process has its model. Its first message."""


class Standing(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="standing"):
    """The receiver stands."""

    id: int


class Advanced(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="advanced"):
    """So many bytes have come."""

    id: int
    done: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="done"):
    """The one end of a request. With a fault, `touched` says whether weights may have changed (None: not an update)."""

    id: int
    fault: Fault | None = None
    touched: bool | None = None
    seat: Seat | None = None
    received: ReceivedData | None = None
    sums: tuple[TensorSum, ...] | None = None
    num_bytes: int | None = None


AnySay = Loaded | Standing | Advanced | Done

_encoder = msgspec.json.Encoder()
_asks: msgspec.json.Decoder[AnyAsk] = msgspec.json.Decoder(AnyAsk)
_says: msgspec.json.Decoder[AnySay] = msgspec.json.Decoder(AnySay)


def line(message: Any) -> bytes:
    """A message as it goes over the pipe."""
    return _encoder.encode(message) + b"\n"


def ask_of(data: bytes) -> AnyAsk:
    """A request. Raises: msgspec.MsgspecError."""
    return _asks.decode(data)


def say_of(data: bytes) -> AnySay:
    """What a rank says. Raises: msgspec.MsgspecError."""
    return _says.decode(data)
