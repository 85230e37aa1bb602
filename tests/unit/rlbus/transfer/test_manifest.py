"""Manifests are named by digest, travel in pages, and are compared tensor by tensor."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlbus.codec import encode
from rlbus.errors import FaultError, ManifestError, PayloadTooLargeError
from rlbus.schemas import FaultCode, ManifestPage, TensorSpec
from rlbus.transfer.manifest import (
    DTYPE_BYTES,
    MAX_MANIFESTS,
    MAX_PAGES,
    MAX_PARTIAL_MANIFESTS,
    ManifestBook,
    compare,
    digest,
    num_bytes,
    pages,
)

pytestmark = pytest.mark.unit

A = TensorSpec(name="a", dtype="float32", shape=(2, 3))
B = TensorSpec(name="b", dtype="bfloat16", shape=())
C = TensorSpec(name="c", dtype="int8", shape=(0, 5))


def test_digest_is_the_sha256_of_canonical_json() -> None:
    """Others can compute it: no white space, fields as an array, in order."""
    text = b'[["a","float32",[2,3]],["b","bfloat16",[]]]'
    assert digest([A, B]) == hashlib.sha256(text).hexdigest()
    assert digest([B, A]) != digest([A, B])


@pytest.mark.parametrize(("spec", "expected"), [(A, 24), (B, 2), (C, 0)])
def test_num_bytes_counts_elements_times_their_size(spec: TensorSpec, expected: int) -> None:
    """Scalars have one element, a zero dimension none."""
    assert num_bytes(spec) == expected


def test_dtype_sizes_are_torchs() -> None:
    """Every dtype that this torch has is in the table with its size."""
    for name, item_bytes in DTYPE_BYTES.items():
        assert getattr(torch, name).itemsize == item_bytes


@pytest.mark.parametrize(("dtype", "shape", "reason"), [("float31", (1,), "dtype"), ("int8", (-1,), "shape")])
def test_a_spec_that_makes_no_sense_is_refused(dtype: str, shape: tuple[int, ...], reason: str) -> None:
    """An unknown dtype and a negative dimension name the tensor."""
    with pytest.raises(ManifestError) as caught:
        num_bytes(TensorSpec(name="x", dtype=dtype, shape=shape))
    assert caught.value.tensor == "x"
    assert caught.value.fault.detail["reason"] == reason


@given(st.lists(st.builds(TensorSpec, name=st.text(max_size=40), dtype=st.just("int8"), shape=st.just((1,)))))
def test_pages_put_together_are_the_manifest(tensors: list[TensorSpec]) -> None:
    """Each page stays within its size, and a book that has all of them knows the manifest."""
    parts = pages(tensors, 600)
    book = ManifestBook()
    for page in reversed(parts):
        assert len(encode(page)) <= 600
        is_complete = book.add(page)
    assert is_complete
    assert book.get(digest(tensors)) == tuple(tensors)


def test_an_entry_larger_than_a_page_is_refused() -> None:
    """It names the tensor and both sizes."""
    with pytest.raises(PayloadTooLargeError, match="xxx") as caught:
        pages([TensorSpec(name="x" * 500, dtype="int8", shape=())], 600)
    assert caught.value.limit_bytes == 600 - 256


@pytest.mark.parametrize(
    ("announced", "tensor", "reason"),
    [
        ([A, B, A, C], "a", "duplicate"),
        ([A, TensorSpec(name="z", dtype="int8", shape=()), B, C], "z", "unexpected"),
        ([A, TensorSpec(name="b", dtype="bfloat16", shape=(1,)), C], "b", "shape"),
        ([A, TensorSpec(name="b", dtype="float16", shape=()), C], "b", "dtype"),
        ([C, A], "b", "missing"),
        ([], "a", "missing"),
    ],
)
def test_compare_names_the_first_bad_tensor(announced: list[TensorSpec], tensor: str, reason: str) -> None:
    """Code, tensor and reason say what is wrong."""
    with pytest.raises(ManifestError) as caught:
        compare([A, B, C], announced)
    assert caught.value.code is FaultCode.MANIFEST_MISMATCH
    assert caught.value.fault.detail == {"tensor": tensor, "reason": reason}


def test_compare_takes_any_order_and_what_the_engine_converts() -> None:
    """Order doesn't matter; `accepts` widens which dtypes do."""
    compare([A, B, C], [C, B, A])
    wide = TensorSpec(name="b", dtype="float32", shape=())
    compare(
        [A, B],
        [wide, A],
        accepts=lambda expected, announced: (expected, announced) == ("bfloat16", "float32") or expected == announced,
    )


def _refused(book: ManifestBook, page: ManifestPage) -> FaultCode:
    with pytest.raises(FaultError) as caught:
        book.add(page)
    return caught.value.code


def test_a_page_that_contradicts_itself_or_others_is_refused() -> None:
    """Page numbers out of range, another page count, another content than the digest, too many pages."""
    book = ManifestBook()
    whole = digest([A, B])
    assert _refused(book, ManifestPage(digest=whole, page=2, num_pages=2, tensors=(A,))) is FaultCode.BAD_MESSAGE
    assert (
        _refused(book, ManifestPage(digest=whole, page=0, num_pages=MAX_PAGES + 1, tensors=())) is FaultCode.TOO_LARGE
    )
    assert not book.add(ManifestPage(digest=whole, page=0, num_pages=2, tensors=(A,)))
    assert _refused(book, ManifestPage(digest=whole, page=1, num_pages=3, tensors=(B,))) is FaultCode.BAD_MESSAGE
    assert _refused(book, ManifestPage(digest=whole, page=1, num_pages=2, tensors=(C,))) is FaultCode.BAD_MESSAGE
    assert book.get(whole) is None
    assert not book.add(ManifestPage(digest=whole, page=1, num_pages=2, tensors=(B,)))
    assert book.add(ManifestPage(digest=whole, page=0, num_pages=2, tensors=(A,)))
    assert book.get(whole) == (A, B)


def test_the_book_forgets_the_least_recently_used() -> None:
    """It is bounded in complete and in partial manifests."""
    book = ManifestBook()
    many = [[TensorSpec(name=f"t{i}", dtype="int8", shape=())] for i in range(MAX_MANIFESTS + 1)]
    digests = [book.put(tensors) for tensors in many[:-1]]
    assert book.get(digests[0]) is not None
    last = book.put(many[-1])
    assert book.get(digests[1]) is None
    assert book.get(digests[0]) is not None
    assert book.get(last) == tuple(many[-1])
    for i in range(MAX_PARTIAL_MANIFESTS + 1):
        book.add(ManifestPage(digest=str(i), page=0, num_pages=2, tensors=(A,)))
    whole = digest([A, B])
    assert not book.add(ManifestPage(digest=whole, page=0, num_pages=2, tensors=(A,)))
    assert book.add(ManifestPage(digest=whole, page=1, num_pages=2, tensors=(B,)))
