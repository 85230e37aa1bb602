"""Headers tell one stream from another, and a bucket that is due from one that isn't."""

import pytest

from rlbus.errors import TransferError
from rlbus.transfer.stream import (
    HEADER_BYTES,
    MAX_REASON_BYTES,
    Header,
    check_header,
    pack_header,
    parse_header,
    stream_token,
)

pytestmark = pytest.mark.unit

TOKEN = stream_token("op-1", 3)
DUE = Header(TOKEN, 4, 1000)


@pytest.mark.parametrize(
    "header", [DUE, Header(TOKEN, 0, 0, give_up="the source raised ü"), Header(TOKEN, 2**40, 2**50)]
)
def test_a_header_survives_the_wire(header: Header) -> None:
    """Fixed size, and the same again."""
    data = pack_header(header)
    assert len(data) == HEADER_BYTES
    assert parse_header(data) == header


def test_the_layout_stays() -> None:
    """Golden bytes: magic, token, index, size, flags, length of the reason, reason, zeros."""
    data = pack_header(Header(bytes(range(16)), 1, 2, give_up="no"))
    fields = (
        b"rlbus\x00\x00\x01" + bytes(range(16)) + b"\x01" + bytes(7) + b"\x02" + bytes(7) + b"\x01\0\0\0\x02\0\0\0no"
    )
    assert data == fields.ljust(256, b"\0")


def test_a_long_reason_is_cut_and_garbage_refused() -> None:
    """Neither end can be made to read beyond the header."""
    cut = parse_header(pack_header(Header(TOKEN, 0, 0, give_up="é" * 500))).give_up
    assert cut is not None
    assert cut.startswith("é" * (MAX_REASON_BYTES // 2))
    for data in (b"", bytes(HEADER_BYTES), pack_header(DUE)[:-1], pack_header(DUE) + b"x"):
        with pytest.raises(TransferError, match="no bucket header"):
            parse_header(data)


def test_tokens_differ_by_op_and_epoch() -> None:
    """A stream of an earlier update, or of an earlier group, is another."""
    tokens = {stream_token("op-1", 3), stream_token("op-1", 4), stream_token("op-2", 3), stream_token("1:op", 3)}
    assert len(tokens) == 4


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (Header(stream_token("op-0", 3), 4, 1000), "stale stream"),
        (Header(stream_token("op-0", 3), 4, 0, give_up="x"), "stale stream"),
        (Header(TOKEN, 5, 1000), "bucket 5 came where 4 was due"),
        (Header(TOKEN, 4, 1001), "1001 bytes, by the manifest it has 1000"),
        (Header(TOKEN, 4, 0, give_up="out of memory"), "the sender gave up: out of memory"),
    ],
)
def test_what_is_not_due_is_refused(header: Header, problem: str) -> None:
    """Each by what differs."""
    check_header(DUE, DUE)
    with pytest.raises(TransferError, match=problem):
        check_header(header, DUE)
