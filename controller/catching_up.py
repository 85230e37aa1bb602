"""Brings workers that are behind to the fleet's version while nothing else runs: `catch_up` decides, this does it.

A snapshot in the trainer's memory is asked for at the trainer's inbox, and comes as an ordinary update of just those
workers; one on disk is a reload of just those workers, which needs no trainer. Invariants: at most one at a time, and
only when no other mutation runs; the fleet's version and snapshot are never changed by it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from rlbus.bus import Bus
from rlbus.controller import catch_up
from rlbus.controller.catch_up import Attempts
from rlbus.controller.desk import Desk
from rlbus.controller.op_ids import derive
from rlbus.controller.registry import Member, Registry
from rlbus.errors import BrokenError, RLBusError
from rlbus.schemas import (
    CatchUpTask,
    ControlReply,
    FleetSnapshot,
    FleetView,
    MemberView,
    MutationRequest,
    Refusal,
    ReloadFleet,
    SnapshotKind,
    SnapshotOffer,
    Target,
    TensorSum,
    UpdateWeights,
    Version,
    WorkerId,
)
from rlbus.transfer.sums import sums_digest

_log = logging.getLogger("rlbus.controller")

CALLER = "catch-up"
# Between two looks at who is behind, in seconds: it goes over the whole fleet.
LOOK_S = 0.5
# How long a trainer may take to answer a task, and to begin what it accepted.
ASK_S = 3.0
BEGIN_S = 10.0
# For reading a folder; a catch-up from memory has the deadline of the update that the snapshot is of.
RELOAD_DEADLINE_S = 600.0


@dataclass(slots=True)
class _Current:
    """A catch-up that was asked for. `until_s`: when it has to have begun, in loop time."""

    op_id: str
    workers: tuple[WorkerId, ...]
    kind: SnapshotKind
    until_s: float
    why: str | None = None


class CatchUps:
    """The catch-ups of one controller; `tick` it. `reload` begins a request of ours as if it had come in."""

    def __init__(self, bus: Bus, registry: Registry, desk: Desk, reload: Callable[[ReloadFleet], None]) -> None:
        # What can bring a worker to the fleet's version; None: nothing was committed that we know of.
        self.snapshot: FleetSnapshot | None = None
        self._bus = bus
        self._registry = registry
        self._desk = desk
        self._reload = reload
        self._attempts: Attempts = {}
        self._current: _Current | None = None
        self._asking: asyncio.Task[None] | None = None
        self._look_at_s = float("-inf")

    def committed(self, version: Version, request: MutationRequest, sums: Sequence[TensorSum] = ()) -> None:
        """The fleet is at `version` because of `request`; `sums` are the trainer's checksums, empty if unknown."""
        if not isinstance(request, UpdateWeights):
            self.snapshot = FleetSnapshot(version=version, offer=SnapshotOffer())
            return
        known = self.snapshot
        if not sums and known is not None and known.version == version and known.offer == request.snapshot:
            return  # a leader before us knew more of it
        self.snapshot = FleetSnapshot(
            version=version,
            offer=request.snapshot,
            backend=request.backend,
            pause_mode=request.pause_mode,
            sums_digest=sums_digest(sums) if sums else None,
        )

    def expected_sums(self, request: UpdateWeights | ReloadFleet) -> str | None:
        """The digest that a catch-up has to have; None: this is none, or nobody knows."""
        return self.snapshot.sums_digest if request.is_catch_up and self.snapshot is not None else None

    def tick(self, now_s: float) -> None:
        """See how the running one goes on, or begin one. Called several times a second."""
        if self._current is not None:
            self._check(self._current, now_s)
            return
        if self._desk.mutation is not None:
            self._look_at_s = now_s + catch_up.SETTLE_S
            return
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        behind = [m for m in self._registry.members() if catch_up.is_behind(self._registry, m)]
        self._attempts = catch_up.refreshed(self._attempts, behind, now_s)
        snapshot = self.snapshot
        if snapshot is None or catch_up.obstacle(snapshot, self._registry.version) is not None:
            return
        workers = catch_up.chosen(self._attempts, behind, snapshot, now_s)
        if workers:
            self._begin(snapshot, workers, now_s)

    def explain(self, view: FleetView) -> FleetView:
        """The view, with what is done about each worker that is behind."""
        now_s = asyncio.get_running_loop().time()
        return msgspec.structs.replace(view, members=tuple(self._explained(m, now_s) for m in view.members))

    async def aclose(self) -> None:
        """Ask nobody any more. Cancel: leaves nothing."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, snapshot: FleetSnapshot, workers: tuple[WorkerId, ...], now_s: float) -> None:
        offer, op_id = snapshot.offer, derive(self._bus.new_id(), CALLER)
        _log.info("op %s: catching up %s from %s", op_id, ", ".join(workers), offer.kind.value)
        self._current = current = _Current(op_id, workers, offer.kind, now_s + BEGIN_S)
        if offer.kind is SnapshotKind.MEMORY:
            task = CatchUpTask(op_id=op_id, version=snapshot.version, workers=workers)
            asking = self._ask(current, offer.inbox or "", task)
            self._asking = asyncio.get_running_loop().create_task(asking, name=f"ask for {op_id}")
            return
        self._reload(
            ReloadFleet(
                op_id=op_id,
                deadline_s=RELOAD_DEADLINE_S,
                caller=CALLER,
                path=offer.path or "",
                version=snapshot.version,
                target=Target(workers=workers),
                pause_mode=snapshot.pause_mode,
                allow_rollback=True,
                is_catch_up=True,
                sums_digest=snapshot.sums_digest,
            )
        )

    async def _ask(self, current: _Current, inbox: str, task: CatchUpTask) -> None:
        try:
            answer: ControlReply = await self._bus.request(inbox, task, ControlReply, limit_s=ASK_S)
        except BrokenError as exc:
            current.why = f"the trainer that keeps version {task.version} is gone ({exc.problem})"
        except RLBusError as exc:
            current.why = f"the trainer that keeps version {task.version} doesn't answer ({exc})"
        else:
            current.why = answer.fault.message if isinstance(answer, Refusal) else None

    def _check(self, current: _Current, now_s: float) -> None:
        if self._desk.running(current.op_id) is not None:
            return
        report = self._desk.report_of(current.op_id)
        if report is not None:
            self._attempts = catch_up.after_report(self._attempts, current.workers, report, now_s)
        elif current.why is not None or now_s >= current.until_s:
            why = current.why or f"it wasn't begun within {BEGIN_S:g} s"
            _log.warning("op %s: %s", current.op_id, why)
            self._attempts = catch_up.after_failure(self._attempts, current.workers, why, now_s)
        else:
            return
        self._current = None

    def _explained(self, view: MemberView, now_s: float) -> MemberView:
        member: Member | None = self._registry.get(view.worker)
        if view.admitted or member is None or not catch_up.is_behind(self._registry, member):
            return view
        version = self._registry.version
        text = catch_up.note(member, version, self.snapshot, self._attempts.get(view.worker), now_s)
        current = self._current
        if current is not None and view.worker in current.workers:
            text = f"catching up to {version} from the trainer's {current.kind.value}"
        elif (running := self._desk.mutation) is not None:
            text = f"waits for {running.op.name} ({running.op.op_id}), which runs" if text.startswith("is ") else text
        return msgspec.structs.replace(view, reason=f"{view.reason}; {text}")
