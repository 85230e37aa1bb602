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
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from rlbus._announcing import Announced, Manifests, Weights, check_size, read_source
from rlbus._calls import Calls, one_call
from rlbus._catching_up import CatchUpService
from rlbus._conversation import (
    FAILOVER_S,
    OUTAGE_S,
    Patience,
    ProgressHandler,
    converse,
    fate_of,
    show_progress,
    take_back,
)
from rlbus._deadline import Deadline, check_seconds
from rlbus._sending import SenderHalf, SenderState, SendOrder
from rlbus._snapshots import Kept, Snapshots
from rlbus._trainer_loras import TrainerLoras
from rlbus.bus import Bus
from rlbus.client import EVERYBODY, READY_DEADLINE_S, FleetClient, as_pause_mode
from rlbus.errors import (
    BrokenError,
    ConfigError,
    DeadlineError,
    FaultError,
    PartialError,
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
    Report,
    SnapshotOffer,
    Target,
    TensorSpec,
    UpdateWeights,
    Version,
)
from rlbus.schemas.weights import MAX_VERSION_NUMBER
from rlbus.transfer.buckets import MAX_BUCKET_BYTES, MIN_BUCKET_BYTES
from rlbus.transfer.one_pass import SharedReads
from rlbus.transfer.plane import SenderPlane, WeightSource

# One bucket; the sender holds at most two beyond the source.
DEFAULT_BUCKET_BYTES = 16 * 1024 * 1024
UPDATE_DEADLINE_S = 600.0
# How long an update bears that no byte moves.
DEFAULT_STALL_S = 30.0
# A manifest that the controller forgot is sent again at most this often per update.
MAX_MANIFEST_RESENDS = 2

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
        # Those of `fleet` are ours.
        self._calls = Calls("trainer")
        self.fleet = FleetClient(bus, namespace, caller=caller, calls=self._calls)
        # The last version that some worker took from us, None before the first; the same of the draft model.
        self.version: Version | None = None
        self.draft_version: Version | None = None
        self._bus = bus
        self._namespace = namespace
        self._plane = plane
        self._caller = caller
        self._group = SenderState()
        self._manifests = Manifests(bus, namespace, caller)
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

    @one_call
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
            deadline_s: for all of it, from the call on: also for reading what the source has.
            stall_s: for no byte moving (with "retry" and several workers at least 12 s, within which it is found who
                holds the others up).
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
            ClosedError: the trainer is closed, or was meanwhile: as a cancel.
        Cancel: the op is taken back and the group left, which takes at most 30 s (weights that other ranks read with us
            are read to their end, in at most 120 s). The controller then ends it as any other failed update: undone
            before the first byte, dirty and reported after it, done if it was committed.
        """
        op_id = self._bus.new_id()
        step, limit_s, problem = _asked_for(version, incarnation, deadline_s)
        deadline = Deadline("update_weights", limit_s)
        given = await deadline.bound(read_source(weights), "the source still reads what it has")
        try:
            async with self._alone(op_id), self._shared_reads.read_by_all(given.source, given.is_shared) as source:
                if problem is not None:
                    raise problem
                policy = _as_on_failure(on_failure)
                if given.is_shared:
                    policy = OnFailure.STOP
                if not allow_rollback:
                    _check_grows(step, self.draft_version if draft else self.version)
                await deadline.bound(self._catch_ups.stop(), "a catch-up still runs")
                request = UpdateWeights(
                    op_id=op_id,
                    deadline_s=deadline.limit_s,
                    caller=self._caller,
                    version=step,
                    manifest_digest=given.digest,
                    backend=self._plane.backend,
                    rendezvous=await deadline.bound(self._plane.rendezvous(), "the data plane has no place to meet"),
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
                report, cause = await self._announce_and_run(request, source, given, deadline, on_progress)
        except FaultError as exc:
            if check:
                raise
            took_s = asyncio.get_running_loop().time() - (deadline.until_s - deadline.limit_s)
            return UpdateReport(_refused_report(op_id, step, exc, took_s, draft))
        if check and not (report.ok or _is_borne(report.report, require, policy)):
            _raise_for_update(report, cause)
        return report

    async def aclose(self) -> None:
        """End the calls that run, leave the group and free the data plane. Idempotent.

        A call that runs takes its op back first, as if it was cancelled. Cancel: what is left is closed first.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._plane.aclose)
            stack.push_async_callback(self._catch_ups.aclose)
            await self._calls.aclose()

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
        given: Announced,
        deadline: Deadline,
        on_progress: ProgressHandler | None,
    ) -> tuple[UpdateReport, BaseException | None]:
        """Announce what will be sent, then run the op; a manifest that the controller forgot is announced again."""
        check_size(given.specs)
        await self._manifests.put(given.specs, given.digest, deadline)
        request = msgspec.structs.replace(request, deadline_s=deadline.left_s())
        for num_resends in range(MAX_MANIFEST_RESENDS + 1):
            try:
                return await self._run(request, source, given.specs, deadline, on_progress)
            except FaultError as exc:
                if exc.code is not FaultCode.MANIFEST_UNKNOWN or num_resends == MAX_MANIFEST_RESENDS:
                    raise
                # The same request: a copy of it that is still under way may begin now, and is then joined.
                self._manifests.forget()
                await self._manifests.put(given.specs, given.digest, deadline)
        raise AssertionError("the loop above returns or raises")

    async def _run(
        self,
        request: UpdateWeights,
        source: WeightSource,
        specs: tuple[TensorSpec, ...],
        deadline: Deadline,
        on_progress: ProgressHandler | None,
    ) -> tuple[UpdateReport, BaseException | None]:
        """The op itself: hear the controller out while `SenderHalf` does what it says."""
        last: OpResult | None = None
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
            try:
                async with half:
                    last = await self._hear_out(request, half, deadline, on_reply)
                    self._note_version(request, last.report.status)
                status = last.report.status
            finally:
                self._group = half.state
                # Whoever is caught up by it has all the time that the update had.
                first = msgspec.structs.replace(request, deadline_s=deadline.limit_s)
                await self._snapshots.settle(first, source, specs, status)
        except asyncio.CancelledError as exc:
            if last is not None:
                exc.add_note(f"update op {request.op_id} had ended: {last.report.status.value}")
            raise
        report = last.report
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
        deadline = Deadline("catch-up", request.deadline_s)
        self._manifests.forget()  # a controller that began since then may not have it
        await self._manifests.put(kept.specs, request.manifest_digest, deadline)
        report, cause = await self._run(request, kept.source, kept.specs, deadline, None)
        if not report.ok:
            _raise_for_update(report, cause)

    async def _hear_out(
        self, request: UpdateWeights, half: SenderHalf, deadline: Deadline, on_reply: Callable[[ControlReply], None]
    ) -> OpResult:
        try:
            patience = Patience(nobody_s=FAILOVER_S, first_answer_s=min(OUTAGE_S, deadline.left_s()))
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

    def _note_version(self, request: UpdateWeights, status: OpStatus) -> None:
        if status not in (OpStatus.OK, OpStatus.PARTIAL):
            return
        if request.is_draft:
            self.draft_version = request.version
        elif not request.is_catch_up:
            self.version = request.version


def as_version(version: int | Version, incarnation: int) -> Version:
    """The version that a caller means.

    Raises: ConfigError: no whole numbers from 0 to MAX_VERSION_NUMBER; or two incarnations, of which one would be lost.
    """
    meant = version if isinstance(version, Version) else Version(incarnation=incarnation, step=version)
    if incarnation not in (0, meant.incarnation):
        raise ConfigError("incarnation", incarnation, f"version {meant} says another; give it once")
    for number in (meant.step, meant.incarnation):
        if not _is_int(number):
            raise ConfigError("version", number, "use an int or a Version, of whole numbers")
        if not 0 <= number <= MAX_VERSION_NUMBER:
            raise ConfigError("version", str(meant), f"use numbers from 0 to {MAX_VERSION_NUMBER}")
    return meant


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


def _asked_for(
    version: int | Version, incarnation: int, deadline_s: float
) -> tuple[Version, float, ConfigError | None]:
    """Version and deadline; and what is wrong with them, to be raised once ranks that read with us have been met."""
    try:
        return as_version(version, incarnation), _positive("deadline_s", deadline_s), None
    except ConfigError as exc:
        return Version(step=0), UPDATE_DEADLINE_S, exc


def _positive(name: str, value: float) -> float:
    check_seconds(name, value)
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
