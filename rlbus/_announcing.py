"""Before anything is sent: what a source has is read, in a thread, and the controller is told it as a manifest."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlbus._conversation import FAILOVER_S, OUTAGE_S, ask, no_controller, silences
from rlbus._deadline import Deadline
from rlbus.bus import Bus
from rlbus.codec import MAX_MESSAGE_BYTES, encode
from rlbus.errors import (
    BrokenError,
    ConfigError,
    DeadlineError,
    PayloadTooLargeError,
    TransferError,
    UnansweredError,
    refused,
)
from rlbus.schemas import FaultCode, PutManifestPage, SenderSignal, SenderStep, TensorSpec, TensorSum
from rlbus.transfer.bounded import run_in_thread
from rlbus.transfer.manifest import compare, digest, pages
from rlbus.transfer.one_pass import is_shared
from rlbus.transfer.plane import WeightSource

# A page of a manifest stays at half of what a message may have.
PAGE_BYTES = MAX_MESSAGE_BYTES // 2
PAGE_LIMIT_S = 10.0
# The first silence after which a page is sent again; it doubles up to PAGE_LIMIT_S.
PAGE_SILENCE_S = 1.0
# Before a page is sent again while the connection is down.
RECONNECT_PAUSE_S = 1.0

# A module, a state dict, a re-iterable source of (name, tensor), or an object with `specs()` that yields the same.
Weights = Any
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Announced:
    """What was read of a source, once and in a thread: asking it anew may read it all, on whatever thread asks.

    `is_shared`: other ranks have to read it with us.
    """

    source: WeightSource
    specs: tuple[TensorSpec, ...]
    digest: str
    is_shared: bool


async def read_source(weights: Weights) -> Announced:
    """What `update_weights` was given, as a source of announced tensors.

    Raises: ConfigError: it is none of module, state dict, re-iterable source; there is no tensor in it; or torch isn't
        installed. ManifestError: a name comes twice. TransferError: it raised what is no Exception (SystemExit), which
        would end the event loop, not the update. Whatever else it raises.
    Cancel: the thread goes on, its result is dropped.
    """
    return await run_in_thread(lambda: _guarded(lambda: _announced(weights)), name="rlbus reading weights")


def _guarded(read: Callable[[], T]) -> T:
    try:
        return read()
    except Exception:
        raise
    except BaseException as exc:
        raise TransferError("read the weights", f"the source raised {type(exc).__name__}: {exc}") from exc


def _announced(weights: Weights) -> Announced:
    source = _as_source(weights)
    specs = source.specs()
    if not specs:
        raise ConfigError("weights", "", "there is no tensor in it")
    compare(specs, specs)  # refuses a name that comes twice
    return Announced(source, specs, digest(specs), is_shared(source))


def _as_source(weights: Weights) -> WeightSource:
    if isinstance(weights, WeightSource):
        return weights
    try:
        from rlbus.transfer.source import weight_source
    except ImportError as exc:
        raise ConfigError("weights", type(weights).__name__, 'needs torch: pip install "rlbus[torch]"') from exc
    return weight_source(weights)


def check_size(specs: Sequence[TensorSpec]) -> None:
    """Refuse what could not be reported afterwards: all checksums have to fit one message. Raises: RefusedError."""
    sums = tuple(TensorSum(name=spec.name, checksum="0" * 16) for spec in specs)
    try:
        encode(SenderSignal(op_id="x" * 64, of_op_id="x" * 64, epoch=0, step=SenderStep.SENT, sums=sums))
    except PayloadTooLargeError as exc:
        message = f"{len(specs)} tensors are too many for one update: {exc}"
        raise refused(FaultCode.TOO_LARGE, message, num_tensors=len(specs)) from exc


class Manifests:
    """Tells the controller of `namespace` what will be sent, and remembers what it was told last."""

    def __init__(self, bus: Bus, namespace: str, caller: str) -> None:
        self._bus = bus
        self._namespace = namespace
        self._caller = caller
        self._told: str | None = None

    def forget(self) -> None:
        """The controller may not have it any more."""
        self._told = None

    async def put(self, specs: Sequence[TensorSpec], manifest: str, deadline: Deadline) -> None:
        """Tell it all pages, unless it has them.

        Raises: FaultError: refused. BrokenError: no controller. UnansweredError: it is silent. Each at `deadline` at
            the latest.
        Cancel: it may have some of the pages, which change nothing.
        """
        if manifest == self._told:
            return
        for page in pages(specs, PAGE_BYTES):
            message = PutManifestPage(op_id=self._bus.new_id(), deadline_s=PAGE_LIMIT_S, caller=self._caller, page=page)
            await self._put_page(message, deadline)
        self._told = manifest

    async def _put_page(self, message: PutManifestPage, deadline: Deadline) -> None:
        """One page, sent again while its answer is lost or nobody leads: a repeat changes nothing.

        For OUTAGE_S; that nobody listens at all is borne for FAILOVER_S.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        silent_until_s = min(began_s + OUTAGE_S, deadline.until_s)
        for silence_s in silences(PAGE_SILENCE_S, PAGE_LIMIT_S):
            try:
                limit_s = max(0.001, min(silence_s, silent_until_s - loop.time()))
                await ask(self._bus, self._namespace, message, limit_s=limit_s)
                return
            except BrokenError as exc:
                is_connected = self._bus.transport.is_connected
                until_s = min(silent_until_s, began_s + FAILOVER_S) if is_connected else silent_until_s
                left_s = until_s - loop.time()
                if left_s <= 0 and is_connected:
                    raise no_controller(self._namespace) from exc
                if left_s <= 0:
                    raise
                await asyncio.sleep(min(RECONNECT_PAUSE_S, left_s))
            except DeadlineError as exc:
                if loop.time() >= silent_until_s:
                    problem = f"the controller of namespace {self._namespace} doesn't answer: {exc}"
                    raise UnansweredError(deadline.operation, min(deadline.limit_s, OUTAGE_S), problem) from exc
