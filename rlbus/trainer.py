"""The trainer's side of rlbus: wait for the fleet, give it new weights, read what became of it.

```python
async with rlbus.connect("nats://...", namespace="prod") as bus:
    trainer = bus.trainer()
    await trainer.wait_ready(world_size=16)
    report = await trainer.update_weights(model, version=step)
```
Invariants: one update at a time; nothing is sent that wasn't announced; whatever ends an update, the process group is
either whole (and used again by the next update) or left. The event loop is never blocked: what reads weights or uses
the group runs in threads.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from rlbus._catching_up import CatchUpService
from rlbus._conversation import (
    FAILOVER_S,
    OUTAGE_S,
    Patience,
    ProgressHandler,
    ask,
    converse,
    fate_of,
    no_controller,
    show_progress,
    silences,
    take_back,
)
from rlbus._sending import SenderHalf, SenderState, SendOrder
from rlbus._snapshots import Kept, Snapshots
from rlbus._trainer_loras import TrainerLoras
from rlbus.bus import Bus
from rlbus.client import EVERYBODY, READY_DEADLINE_S, FleetClient, as_pause_mode
from rlbus.codec import MAX_MESSAGE_BYTES, encode
from rlbus.errors import (
    BrokenError,
    ConfigError,
    DeadlineError,
    FaultError,
    PartialError,
    PayloadTooLargeError,
    TransferError,
    refused,
)
from rlbus.reports import UpdateReport
from rlbus.schemas import (
    CatchUpTask,
    ControlReply,
    FaultCode,
    FleetView,
    OnFailure,
    OpProgress,
    OpResult,
    OpStatus,
    Outcome,
    PauseMode,
    PutManifestPage,
    Report,
    SenderSignal,
    SenderStep,
    SnapshotOffer,
    Target,
    TensorSpec,
    TensorSum,
    UpdateWeights,
    Version,
)
from rlbus.schemas.weights import MAX_VERSION_NUMBER
from rlbus.transfer.buckets import MAX_BUCKET_BYTES, MIN_BUCKET_BYTES
from rlbus.transfer.manifest import compare, digest, pages
from rlbus.transfer.one_pass import SharedReads, is_shared
from rlbus.transfer.plane import SenderPlane, WeightSource

# One bucket; the sender holds at most two beyond the source.
DEFAULT_BUCKET_BYTES = 16 * 1024 * 1024
UPDATE_DEADLINE_S = 600.0
# How long an update bears that no byte moves.
DEFAULT_STALL_S = 30.0
# A page of a manifest stays at half of what a message may have.
PAGE_BYTES = MAX_MESSAGE_BYTES // 2
PAGE_LIMIT_S = 10.0
# The first silence after which a page is sent again; it doubles up to PAGE_LIMIT_S.
PAGE_SILENCE_S = 1.0
# Before a page is sent again while the connection is down.
RECONNECT_PAUSE_S = 1.0
# A manifest that the controller forgot is sent again at most this often per update.
MAX_MANIFEST_RESENDS = 2

# A module, a state dict, a re-iterable source of (name, tensor), or an object with `specs()` that yields the same.
Weights = Any
T = TypeVar("T")

_log = logging.getLogger("rlbus.trainer")


class Trainer(TrainerLoras):
    """Gives the fleet of one namespace new weights. Made by `rlbus.connect(...).trainer()`, closed with it.

    `plane` is the data plane, owned and closed by the trainer. One trainer process per fleet sends at a time.
    `snapshots` is what it keeps of what it sent (None: nothing); from memory, workers that come back are brought to the
    fleet's version between updates, on this event loop.
    """

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        plane: SenderPlane,
        *,
        caller: str = "trainer",
        snapshots: Snapshots | None = None,
    ) -> None:
        self.fleet = FleetClient(bus, namespace, caller=caller)
        # The last version that some worker took from us, None before the first; the same of the draft model.
        self.version: Version | None = None
        self.draft_version: Version | None = None
        self._bus = bus
        self._namespace = namespace
        self._plane = plane
        self._caller = caller
        self._group = SenderState()
        self._put_digest: str | None = None
        self._running_op_id: str | None = None
        self._shared_reads = SharedReads()
        self._snapshots = Snapshots() if snapshots is None else snapshots
        self._catch_ups = CatchUpService(bus, self._snapshots, self._catch_up, lambda: self._running_op_id is not None)

    async def wait_ready(
        self,
        *,
        world_size: int | None = None,
        num_workers: int | None = None,
        target: Target = EVERYBODY,
        deadline_s: float = READY_DEADLINE_S,
        on_progress: ProgressHandler | None = None,
    ) -> FleetView:
        """Wait until the live workers have `world_size` ranks together, and/or are `num_workers`.

        Raises:
            DeadlineError: not there in time; says who or how many are missing. BrokenError: no controller came up.
        Cancel: the wait is taken back, which takes at most 5 s.
        """
        return await self.fleet.wait_ready(
            world_size=world_size,
            num_workers=num_workers,
            target=target,
            deadline_s=deadline_s,
            on_progress=on_progress,
        )

    async def update_weights(
        self,
        weights: Weights,
        *,
        version: int | Version,
        incarnation: int = 0,
        target: Target = EVERYBODY,
        require: int | None = None,
        on_failure: OnFailure | str = OnFailure.RETRY,
        pause_mode: PauseMode | str = PauseMode.KEEP,
        reset_prefix_cache: bool = True,
        allow_rollback: bool = False,
        deadline_s: float = UPDATE_DEADLINE_S,
        stall_s: float = DEFAULT_STALL_S,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        on_progress: ProgressHandler | None = None,
        check: bool = True,
        draft: bool = False,
    ) -> UpdateReport:
        """Give the fleet `weights` as `version`; returns when every worker has a final outcome.

        Args:
            weights: a module, a state dict, or a source of (name, tensor) that can be iterated more than once. It must
                not change until this returns.
            version: the step, above that of the update before; an int is a step of `incarnation`.
            require: how many workers have to end at the new version (None: all of the target).
            on_failure: "retry": when a worker is lost, the update is tried again on the others, up to 3 times in all
                and within `deadline_s`, and who ends behind is told in the report, not by an error. "stop": it is
                ended on everybody whom the loss has touched, and anything but a full success is an error. Weights that
                other ranks read with us (DTensors) can't be sent twice: there it is always "stop".
            pause_mode: what a pause does with requests in flight: keep, wait or abort.
            deadline_s: for all of it; `stall_s`: for no byte moving (with "retry" and several workers at least 12 s,
                within which it is found who holds the others up).
            bucket_bytes: size of what is sent at once; the memory used beyond the weights is twice that.
            on_progress: called on the loop as the update moves on.
            check: False returns a report that isn't ok instead of raising for it.
            draft: they are the draft model's (speculative decoding), with versions of its own. No snapshot is kept.

        Raises (before anything is sent for the first two):
            ConfigError: an argument makes no sense, or the source can't be read twice.
            RefusedError: another update of ours runs (BusyError), `version` isn't newer (VersionRegressionError), the
                tensors don't fit the engines' model (ManifestError names the first): nothing changed anywhere.
            PartialError: nobody is at the new version, or fewer than `require` (None: with "stop", fewer than all);
                `.report` has one outcome per worker, and what each was left in.
            DeadlineError: no report in time. BrokenError: no controller, or it went away.
        Cancel: the op is taken back and the group left, which takes at most 30 s (weights that other ranks read with us
            are read to their end, in at most 120 s). The controller then ends it as any other failed update: undone
            before the first byte, dirty and reported after it, done if it was committed.
        """
        started = asyncio.get_running_loop().time()
        op_id = self._bus.new_id()
        step = as_version(version, incarnation)
        given = await as_source(weights)
        specs, manifest = await _read(lambda: _manifest_of(given))
        policy = OnFailure.STOP if is_shared(given) else _as_on_failure(on_failure)
        try:
            async with self._alone(op_id), self._shared_reads.read_by_all(given) as source:
                if not allow_rollback:
                    _check_grows(step, self.draft_version if draft else self.version)
                await self._catch_ups.stop()
                request = UpdateWeights(
                    op_id=op_id,
                    deadline_s=_positive("deadline_s", deadline_s),
                    caller=self._caller,
                    version=step,
                    manifest_digest=manifest,
                    backend=self._plane.backend,
                    rendezvous=await self._plane.rendezvous(),
                    sender_id=self._plane.sender_id,
                    num_trainer_ranks=self._plane.num_ranks,
                    bucket_bytes=_bucket_bytes(bucket_bytes),
                    target=target,
                    require=require,
                    on_failure=policy,
                    pause_mode=as_pause_mode(pause_mode),
                    reset_prefix_cache=reset_prefix_cache,
                    allow_rollback=allow_rollback,
                    stall_s=_positive("stall_s", stall_s),
                    snapshot=SnapshotOffer() if draft else self._snapshots.offer(step, self._catch_ups.inbox),
                    is_draft=draft,
                )
                report, cause = await self._announce_and_run(request, source, specs, on_progress)
        except FaultError as exc:
            if check:
                raise
            took_s = asyncio.get_running_loop().time() - started
            return UpdateReport(_refused_report(op_id, step, exc, took_s, draft))
        if check and not (report.ok or _is_borne(report.report, require, policy)):
            _raise_for_update(report, cause)
        return report

    async def aclose(self) -> None:
        """Leave the group and free the data plane. Idempotent. Cancel: the plane may still be open."""
        await self._catch_ups.aclose()
        await self._plane.aclose()

    @asynccontextmanager
    async def _alone(self, op_id: str) -> AsyncIterator[None]:
        """While inside, `op_id` is the one update of this trainer. Raises: RefusedError."""
        if self._running_op_id is not None:
            running = self._running_op_id
            raise refused(FaultCode.BUSY, f"update {running} of this trainer still runs", op_id=running)
        self._running_op_id = op_id
        try:
            yield
        finally:
            self._running_op_id = None

    async def _announce_and_run(
        self,
        request: UpdateWeights,
        source: WeightSource,
        specs: tuple[TensorSpec, ...],
        on_progress: ProgressHandler | None,
    ) -> tuple[UpdateReport, BaseException | None]:
        """Announce what will be sent, then run the op; a manifest that the controller forgot is announced again."""
        _check_size(specs)
        for num_resends in range(MAX_MANIFEST_RESENDS + 1):
            await self._put_manifest(specs, request.manifest_digest)
            try:
                return await self._run(request, source, specs, on_progress)
            except FaultError as exc:
                if exc.code is not FaultCode.MANIFEST_UNKNOWN or num_resends == MAX_MANIFEST_RESENDS:
                    raise
                # Under the same op_id: a copy of the request that is still under way may begin now, and is then joined.
                self._put_digest = None
        raise AssertionError("the loop above returns or raises")

    async def _put_manifest(self, specs: Sequence[TensorSpec], manifest: str) -> None:
        if manifest == self._put_digest:
            return
        for page in pages(specs, PAGE_BYTES):
            message = PutManifestPage(op_id=self._bus.new_id(), deadline_s=PAGE_LIMIT_S, caller=self._caller, page=page)
            await self._put_page(message)
        self._put_digest = manifest

    async def _put_page(self, message: PutManifestPage) -> None:
        """One page, sent again while its answer is lost or nobody leads: a repeat changes nothing.

        For OUTAGE_S; that nobody listens at all is borne for FAILOVER_S.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for silence_s in silences(PAGE_SILENCE_S, PAGE_LIMIT_S):
            try:
                await ask(self._bus, self._namespace, message, limit_s=silence_s)
                return
            except BrokenError as exc:
                is_connected = self._bus.transport.is_connected
                if loop.time() >= began_s + (FAILOVER_S if is_connected else OUTAGE_S):
                    raise no_controller(self._namespace) if is_connected else exc from exc
                await asyncio.sleep(RECONNECT_PAUSE_S)
            except DeadlineError:
                if loop.time() >= began_s + OUTAGE_S:
                    raise

    async def _run(
        self,
        request: UpdateWeights,
        source: WeightSource,
        specs: tuple[TensorSpec, ...],
        on_progress: ProgressHandler | None,
    ) -> tuple[UpdateReport, BaseException | None]:
        """The op itself: hear the controller out while `SenderHalf` does what it says."""
        status: OpStatus | None = None
        if not request.is_catch_up and not request.is_draft:
            source = self._snapshots.record(request, source, specs)
        order = SendOrder(request.op_id, request.version, source, specs, request.bucket_bytes)
        half = SenderHalf(self._bus, self._namespace, self._plane, order, self._group, self._caller)

        def on_reply(reply: ControlReply) -> None:
            half.on_reply(reply)
            if isinstance(reply, OpProgress):
                show_progress(on_progress, reply)

        try:
            async with half:
                last = await self._hear_out(request, half, on_reply)
            status = last.report.status
        finally:
            self._group = half.state
            await self._snapshots.settle(request, source, specs, status)
        report = last.report
        if report.status in (OpStatus.OK, OpStatus.PARTIAL) and request.is_draft:
            self.draft_version = request.version
        elif report.status in (OpStatus.OK, OpStatus.PARTIAL) and not request.is_catch_up:
            self.version = request.version
        num_tensors, send_s = (0, 0.0) if half.sent is None else (half.sent.num_tensors, half.sent.send_s)
        return UpdateReport(report, num_tensors, send_s), half.cause

    async def _catch_up(self, kept: Kept, task: CatchUpTask) -> None:
        """Send a version again to some workers. Raises and Cancel: as `update_weights`."""
        assert kept.source is not None
        request = msgspec.structs.replace(
            kept.request,
            op_id=task.op_id,
            target=Target(workers=task.workers),
            require=None,
            allow_rollback=True,
            is_catch_up=True,
        )
        self._put_digest = None  # a controller that began since then may not have it
        await self._put_manifest(kept.specs, request.manifest_digest)
        report, cause = await self._run(request, kept.source, kept.specs, None)
        if not report.ok:
            _raise_for_update(report, cause)

    async def _hear_out(
        self, request: UpdateWeights, half: SenderHalf, on_reply: Callable[[ControlReply], None]
    ) -> OpResult:
        try:
            patience = Patience(nobody_s=FAILOVER_S, first_answer_s=OUTAGE_S)
            last = await converse(self._bus, self._namespace, request, on_reply=on_reply, patience=patience)
        except (asyncio.CancelledError, DeadlineError, BrokenError) as exc:
            # Nobody will tell us any more when to leave, and nobody here waits for the op.
            is_taken = await take_back(self._bus, self._namespace, request.op_id, self._caller)
            exc.add_note(fate_of("update", request.op_id, is_taken_back=is_taken))
            await half.leave("the trainer gave the update up")
            raise
        if not isinstance(last, OpResult):
            raise BrokenError(f"controller of namespace {self._namespace}", "answered an update without a report")
        return last


def as_version(version: int | Version, incarnation: int) -> Version:
    """The version that a caller means. Raises ConfigError: no whole numbers from 0 to MAX_VERSION_NUMBER."""
    meant = version if isinstance(version, Version) else Version(incarnation=incarnation, step=version)
    for number in (meant.step, meant.incarnation):
        if not _is_int(number):
            raise ConfigError("version", number, "use an int or a Version, of whole numbers")
        if not 0 <= number <= MAX_VERSION_NUMBER:
            raise ConfigError("version", str(meant), f"use numbers from 0 to {MAX_VERSION_NUMBER}")
    return meant


async def as_source(weights: Weights) -> WeightSource:
    """What `update_weights` was given, as a source of announced tensors. Cancel: leaves nothing.

    Raises: ConfigError: it is none of module, state dict, re-iterable source; or torch isn't installed.
    """
    if isinstance(weights, WeightSource):
        return weights
    try:
        from rlbus.transfer.source import weight_source
    except ImportError as exc:
        raise ConfigError("weights", type(weights).__name__, 'needs torch: pip install "rlbus[torch]"') from exc
    return await _read(lambda: weight_source(weights))


async def _read(work: Callable[[], T]) -> T:
    """Run what calls the user's source in a thread. Cancel: the thread goes on, its result is dropped.

    Raises: TransferError: it raised what is no Exception (SystemExit), which would end the event loop, not the update.
    """

    def guarded() -> T:
        try:
            return work()
        except Exception:
            raise
        except BaseException as exc:
            raise TransferError("read the weights", f"the source raised {type(exc).__name__}: {exc}") from exc

    return await asyncio.to_thread(guarded)


def _manifest_of(source: WeightSource) -> tuple[tuple[TensorSpec, ...], str]:
    specs = source.specs()
    if not specs:
        raise ConfigError("weights", "", "there is no tensor in it")
    compare(specs, specs)  # refuses a name that comes twice
    return specs, digest(specs)


def _check_size(specs: Sequence[TensorSpec]) -> None:
    """Refuse what could not be reported afterwards: all checksums have to fit one message."""
    sums = tuple(TensorSum(name=spec.name, checksum="0" * 16) for spec in specs)
    try:
        encode(SenderSignal(op_id="x" * 64, of_op_id="x" * 64, epoch=0, step=SenderStep.SENT, sums=sums))
    except PayloadTooLargeError as exc:
        message = f"{len(specs)} tensors are too many for one update: {exc}"
        raise refused(FaultCode.TOO_LARGE, message, num_tensors=len(specs)) from exc


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_grows(version: Version, last: Version | None) -> None:
    if last is not None and version < last:
        message = f"version {version} is older than {last}, which this trainer sent before; versions grow"
        raise refused(FaultCode.VERSION_REGRESSION, message, version=version, last=last)


def _bucket_bytes(value: int) -> int:
    if not _is_int(value) or not MIN_BUCKET_BYTES <= value <= MAX_BUCKET_BYTES:
        raise ConfigError("bucket_bytes", value, f"use a whole number from {MIN_BUCKET_BYTES} to {MAX_BUCKET_BYTES}")
    return value


def _is_borne(report: Report, require: int | None, on_failure: OnFailure | str) -> bool:
    """Whether a report that isn't ok is no error: training goes on with who is left, the rest is caught up."""
    is_borne = report.status is OpStatus.PARTIAL and require is None and on_failure == OnFailure.RETRY
    if is_borne:
        behind = ", ".join(o.worker for o in report.outcomes if o.outcome is not Outcome.OK)
        why = "" if report.fault is None else report.fault.message
        _log.warning("version %s is served without %s: %s", report.version, behind, why)
    return is_borne


def _as_on_failure(value: OnFailure | str) -> OnFailure:
    try:
        return OnFailure(value)
    except ValueError as exc:
        raise ConfigError("on_failure", value, 'use "retry" or "stop"') from exc


def _positive(name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise ConfigError(name, value, "use a number above 0")
    return value


def _refused_report(op_id: str, version: Version, error: FaultError, took_s: float, draft: bool) -> Report:
    """The report of an op that was never begun."""
    return Report(
        op_id=op_id,
        op="update_draft" if draft else "update_weights",
        status=OpStatus.REFUSED,
        outcomes=(),
        phases_s={},
        took_s=took_s,
        fault=error.fault,
        version=version,
    )


def _raise_for_update(report: UpdateReport, cause: BaseException | None) -> None:
    """As `raise_for_report`, with what went wrong on this side as the cause."""
    if cause is not None:
        raise PartialError(report.report) from cause
    report.raise_for_status()
