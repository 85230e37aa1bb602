"""What a sender announces: names, dtypes and shapes of all tensors, in the order in which they will be sent.

A manifest is named by its digest, so both ends can tell that they mean the same list without sending it again, and
its pages, when it is larger than one message, never mix with those of another.
"""

import hashlib
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from rlbus.errors import ManifestError, PayloadTooLargeError, RLBusError, refused
from rlbus.schemas import FaultCode, ManifestPage, TensorSpec

# Bytes of one element, by dtype as torch spells it without the prefix. Source: torch 2.13, `torch.dtype.itemsize`.
DTYPE_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}

# Bounds of a ManifestBook. 8 manifests of 100,000 tensors are about 150 MB of Python objects at worst.
MAX_MANIFESTS = 8
MAX_PARTIAL_MANIFESTS = 4
MAX_PAGES = 256
# What a page has beside its tensors: digest, two numbers, field names.
_PAGE_FRAME_BYTES = 256

_encoder = msgspec.json.Encoder()


def num_bytes(spec: TensorSpec) -> int:
    """Bytes of the tensor's elements.

    Raises:
        ManifestError: a dtype that isn't in DTYPE_BYTES, or a negative dimension.
    """
    item_bytes = DTYPE_BYTES.get(spec.dtype)
    if item_bytes is None:
        raise _mismatch(spec.name, "dtype", f"dtype {spec.dtype} can't be sent; known are {', '.join(DTYPE_BYTES)}")
    if any(dim < 0 for dim in spec.shape):
        raise _mismatch(spec.name, "shape", f"shape {list(spec.shape)} has a negative dimension")
    return math.prod(spec.shape) * item_bytes


def digest(tensors: Sequence[TensorSpec]) -> str:
    """SHA-256 in hex over the canonical JSON of the list, `[["name","dtype",[dim,...]],...]` without white space."""
    return hashlib.sha256(_encoder.encode(list(tensors))).hexdigest()


def pages(tensors: Sequence[TensorSpec], max_bytes: int) -> tuple[ManifestPage, ...]:
    """Cut a manifest into pages whose JSON has at most `max_bytes` bytes each. At least one page, also when empty.

    Raises:
        PayloadTooLargeError: one tensor's entry alone doesn't fit a page.
    """
    whole = digest(tensors)
    slices = list(_slices(tensors, max_bytes - _PAGE_FRAME_BYTES)) or [()]
    return tuple(
        ManifestPage(digest=whole, page=page, num_pages=len(slices), tensors=part) for page, part in enumerate(slices)
    )


def _slices(tensors: Sequence[TensorSpec], max_bytes: int) -> Iterator[tuple[TensorSpec, ...]]:
    part: list[TensorSpec] = []
    used_bytes = 0
    for spec in tensors:
        entry_bytes = len(_encoder.encode(spec)) + 1
        if entry_bytes > max_bytes:
            raise PayloadTooLargeError(f"manifest entry of {spec.name[:80]!r}", entry_bytes, max_bytes)
        if part and used_bytes + entry_bytes > max_bytes:
            yield tuple(part)
            part, used_bytes = [], 0
        part.append(spec)
        used_bytes += entry_bytes
    if part:
        yield tuple(part)


def compare(
    expected: Sequence[TensorSpec],
    announced: Sequence[TensorSpec],
    *,
    accepts: Callable[[str, str], bool] = operator.eq,
) -> None:
    """Check that `announced` has exactly the tensors of `expected`, in any order.

    Args:
        accepts: (expected dtype, announced dtype) -> whether the engine can take it; by default only equal ones.

    Raises:
        ManifestError: code manifest_mismatch; detail `tensor` is the first bad one, in announced order and then, for
            missing ones, in expected order; detail `reason` is duplicate, unexpected, shape, dtype or missing.
    """
    by_name = {spec.name: spec for spec in expected}
    seen: set[str] = set()
    for spec in announced:
        if spec.name in seen:
            raise _mismatch(spec.name, "duplicate", "it is announced twice")
        seen.add(spec.name)
        own = by_name.get(spec.name)
        if own is None:
            raise _mismatch(spec.name, "unexpected", "the model has no such tensor")
        if own.shape != spec.shape:
            text = f"shape {list(spec.shape)} is announced, the model has {list(own.shape)}"
            raise _mismatch(spec.name, "shape", text)
        if not accepts(own.dtype, spec.dtype):
            raise _mismatch(spec.name, "dtype", f"dtype {spec.dtype} is announced, the model has {own.dtype}")
    for spec in expected:
        if spec.name not in seen:
            raise _mismatch(spec.name, "missing", "the model needs it and it isn't announced")


def _mismatch(tensor: str, reason: str, text: str) -> RLBusError:
    message = f"tensor {tensor!r}: {text}"
    error = refused(FaultCode.MANIFEST_MISMATCH, message, tensor=tensor, reason=reason)
    assert isinstance(error, ManifestError)
    return error


@dataclass(slots=True)
class _Partial:
    """Pages of a manifest that isn't complete yet."""

    num_pages: int
    parts: dict[int, tuple[TensorSpec, ...]] = field(default_factory=dict)


class ManifestBook:
    """The manifests that a process knows, by digest: at most MAX_MANIFESTS, the least recently used go first."""

    def __init__(self) -> None:
        self._complete: OrderedDict[str, tuple[TensorSpec, ...]] = OrderedDict()
        self._partial: OrderedDict[str, _Partial] = OrderedDict()

    def get(self, digest: str) -> tuple[TensorSpec, ...] | None:
        """The manifest of `digest`, None while pages are missing (or after it was forgotten)."""
        tensors = self._complete.get(digest)
        if tensors is not None:
            self._complete.move_to_end(digest)
        return tensors

    def add(self, page: ManifestPage) -> bool:
        """Keep a page; whether the manifest is complete now. A repeat changes nothing.

        Raises:
            RefusedError: bad_message: the page contradicts itself or an earlier one, or the complete list isn't what
                `digest` names (its pages are dropped then). too_large: over MAX_PAGES.
        """
        if self.get(page.digest) is not None:
            return True
        if page.num_pages > MAX_PAGES:
            text = f"manifest of {page.num_pages} pages; at most {MAX_PAGES} are kept"
            raise refused(FaultCode.TOO_LARGE, text, num_pages=page.num_pages)
        if not 0 <= page.page < page.num_pages:
            raise refused(FaultCode.BAD_MESSAGE, f"page {page.page} of {page.num_pages} can't be", page=page.page)
        partial = self._partial.setdefault(page.digest, _Partial(page.num_pages))
        if partial.num_pages != page.num_pages:
            text = f"manifest {page.digest[:16]} has {partial.num_pages} pages, this one says {page.num_pages}"
            raise refused(FaultCode.BAD_MESSAGE, text)
        partial.parts[page.page] = page.tensors
        self._partial.move_to_end(page.digest)
        if len(partial.parts) == partial.num_pages:
            self._finish(page.digest)
            return True
        while len(self._partial) > MAX_PARTIAL_MANIFESTS:
            self._partial.popitem(last=False)
        return False

    def put(self, tensors: Sequence[TensorSpec]) -> str:
        """Keep a manifest that is known as a whole; its digest."""
        whole = digest(tensors)
        self._keep(whole, tuple(tensors))
        return whole

    def _finish(self, whole: str) -> None:
        parts = self._partial.pop(whole).parts
        tensors = tuple(spec for page in sorted(parts) for spec in parts[page])
        actual = digest(tensors)
        if actual != whole:
            raise refused(FaultCode.BAD_MESSAGE, f"the pages of manifest {whole[:16]} have the digest {actual[:16]}")
        self._keep(whole, tensors)

    def _keep(self, whole: str, tensors: tuple[TensorSpec, ...]) -> None:
        self._complete[whole] = tensors
        self._complete.move_to_end(whole)
        while len(self._complete) > MAX_MANIFESTS:
            self._complete.popitem(last=False)
