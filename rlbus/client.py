"""FleetClient: what a trainer, an orchestrator or the CLI asks of the controller.

Every verb is an op with an `op_id`; a lost reply costs nothing, since the request is sent again with the same `op_id`
and joins the op that runs. A verb returns the op's report, or raises.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from rlbus import subjects
from rlbus._calls import Calls, one_call
from rlbus._conversation import (
    CONTROLLER,
    DEFAULT_PATIENCE,
    Patience,
    ProgressHandler,
    cancel_op,
    converse,
    fate_of,
    goes_on,
    op_name,
    show_progress,
    take_back,
)
from rlbus._paging import PAGE_WORKERS, AskPage, whole_view
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.errors import BrokenError, ConfigError, DeadlineError
from rlbus.lora_verbs import LoraVerbs
from rlbus.reports import raise_for_report
from rlbus.schemas import (
    AbortFleet,
    CancelOp,
    ControllerEvent,
    ControlReply,
    ControlRequest,
    FleetView,
    FlushFleet,
    GetFleet,
    GetHistory,
    GetVersions,
    HistoryView,
    OpProgress,
    OpResult,
    PauseFleet,
    PauseMode,
    ReloadFleet,
    Report,
    ResumeFleet,
    SleepFleet,
    SleepTag,
    Target,
    TransferFleet,
    TransferStep,
    Version,
    WaitReady,
    WakeFleet,
    WorkerId,
)

EVERYBODY = Target()
# Host copies of large models take their time.
SLEEP_DEADLINE_S = 120.0
# Defaults of deadlines, in seconds: a fleet verb, a question, a reload (engines read gigabytes), a fleet coming up.
VERB_DEADLINE_S = 30.0
QUESTION_DEADLINE_S = 10.0
RELOAD_DEADLINE_S = 600.0
# A step of another trainer's update: forming a group, or receiving a large model over it.
TRANSFER_DEADLINE_S = 1800.0
READY_DEADLINE_S = 300.0
# Events that may wait in a watcher before it counts as too slow and is ended with BrokenError.
MAX_QUEUED_EVENTS = 4096


def as_pause_mode(mode: PauseMode | str) -> PauseMode:
    """The mode that a caller means. Raises ConfigError for a word that is none."""
    try:
        return PauseMode(mode)
    except ValueError as exc:
        raise ConfigError("pause mode", mode, "use keep, wait or abort") from exc


def as_sleep_tags(tags: Iterable[SleepTag | str] | None) -> tuple[SleepTag, ...] | None:
    """The set of tags that a caller means, None for all. Raises ConfigError for a word that is none, or no word."""
    if tags is None:
        return None
    known = ", ".join(SleepTag)
    if isinstance(tags, str):
        raise ConfigError("tags", tags, f"give a list of {known}")
    try:
        meant = tuple(sorted({SleepTag(tag) for tag in tags}))
    except ValueError as exc:
        raise ConfigError("tags", str(exc), f"use {known}") from exc
    if not meant:
        raise ConfigError("tags", "none", f"name some of {known}, or leave them out for all")
    return meant


class EventStream:
    """The controller's facts as they come; get one from `FleetClient.watch`. Iterate it, or call `next`."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[ControllerEvent] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self._overflowed = False

    def offer(self, event: ControllerEvent, _message: Message) -> None:
        """Take one event; called by the bus, never blocks."""
        if self._events.full():
            self._overflowed = True
        else:
            self._events.put_nowait(event)

    async def next(self, limit_s: float) -> ControllerEvent:
        """The next event.

        Raises:
            DeadlineError: none within `limit_s`.
            BrokenError: more than MAX_QUEUED_EVENTS came unread, so some are lost; read the state anew.
        Cancel: no event is lost.
        """
        if self._overflowed and self._events.empty():
            raise BrokenError("event stream", f"over {MAX_QUEUED_EVENTS} events came unread, and some are lost")
        try:
            async with asyncio.timeout(limit_s):
                return await self._events.get()
        except TimeoutError as exc:
            raise DeadlineError("waiting for an event", limit_s) from exc


class FleetClient(LoraVerbs):
    """Asks the controller of one namespace. Made by `rlbus.connect(...)` as `.fleet`; it owns nothing to close.

    `caller` is shown in events and in the log of who did what. `calls` are those that whoever made it ends when it is
    closed; they raise ClosedError then.
    """

    def __init__(self, bus: Bus, namespace: str, *, caller: str = "python", calls: Calls | None = None) -> None:
        self.bus = bus
        self.namespace = namespace
        self.caller = caller
        self._calls = Calls("fleet client") if calls is None else calls

    async def pause(
        self,
        target: Target = EVERYBODY,
        *,
        mode: PauseMode | str = PauseMode.KEEP,
        clear_cache: bool = True,
        lease_s: float | None = None,
        deadline_s: float = VERB_DEADLINE_S,
        op_id: str | None = None,
        on_progress: ProgressHandler | None = None,
        check: bool = True,
    ) -> Report:
        """Hold engines still; if one fails, the others are resumed again.

        `lease_s` seconds after it they resume by themselves, unless their weights are unclean; the same call again
        renews that. None holds them until `resume`, also when the caller dies.

        Args (of every verb): `target` which workers; `op_id` to join an op that was begun before; `on_progress` is
        called on the loop while the op runs; `check=False` returns a report that isn't ok instead of raising.

        Raises (as every verb does): RefusedError tree: refused, nothing changed. PartialError: failed or partial.
            ConfigError: a word is none, or a number is nan or infinite.
            DeadlineError: not ended within `deadline_s`. BrokenError: no controller, or it went away meanwhile.
            ClosedError: the session or trainer is closed, or was meanwhile: as a cancel.
        Cancel (every verb): the controller is asked to take the op back, which takes at most 5 s, and ends it by
            itself: a pause is undone (one that had ended by then holds), a reload is undone up to its loading and
            finished after that; of a resume, flush or abort, workers go on with what they were sent.
        """
        request = PauseFleet(
            op_id=self._op_id(op_id),
            deadline_s=deadline_s,
            caller=self.caller,
            target=target,
            mode=as_pause_mode(mode),
            clear_cache=clear_cache,
            lease_s=lease_s,
        )
        return await self._run(request, on_progress, check)

    async def resume(
        self,
        target: Target = EVERYBODY,
        *,
        force: bool = False,
        deadline_s: float = VERB_DEADLINE_S,
        op_id: str | None = None,
        on_progress: ProgressHandler | None = None,
        check: bool = True,
    ) -> Report:
        """Let engines generate again. Dirty ones refuse unless `force`, which is logged. Raises, Cancel: see pause."""
        request = ResumeFleet(
            op_id=self._op_id(op_id), deadline_s=deadline_s, caller=self.caller, target=target, force=force
        )
        return await self._run(request, on_progress, check)

    async def flush(
        self,
        target: Target = EVERYBODY,
        *,
        deadline_s: float = VERB_DEADLINE_S,
        op_id: str | None = None,
        on_progress: ProgressHandler | None = None,
        check: bool = True,
    ) -> Report:
        """Empty every cache of the engines. Raises, Cancel: see pause."""
        return await self._run(
            FlushFleet(op_id=self._op_id(op_id), deadline_s=deadline_s, caller=self.caller, target=target),
            on_progress,
            check,
        )

    async def abort(
        self,
        target: Target = EVERYBODY,
        *,
        request_ids: Sequence[str] | None = None,
        deadline_s: float = VERB_DEADLINE_S,
        op_id: str | None = None,
        on_progress: ProgressHandler | None = None,
        check: bool = True,
    ) -> Report:
        """End requests in flight: those named, or all. Raises, Cancel: see pause."""
        ids = None if request_ids is None else tuple(request_ids)
        request = AbortFleet(
            op_id=self._op_id(op_id), deadline_s=deadline_s, caller=self.caller, target=target, request_ids=ids
        )
        return await self._run(request, on_progress, check)

    async def sleep(
        self,
        target: Target = EVERYBODY,
        *,
        tags: Iterable[SleepTag | str] | None = None,
        level: int = 1,
        mode: PauseMode | str = PauseMode.ABORT,
        deadline_s: float = SLEEP_DEADLINE_S,
        op_id: str | None = None,
        on_progress: ProgressHandler | None = None,
        check: bool = True,
    ) -> Report:
        """Let engines give back the memory of `tags` ("weights", "kv_cache"; None: all); if one fails, the others are
        woken again. They generate nothing while any tag sleeps, and no update comes to weights that sleep.

        `level` 1 keeps the weights in host memory. 2 discards them: they are dirty until an update or a reload, and a
        sleep that half succeeds isn't undone. Raises: see pause. Cancel: it is undone like a pause.
        """
        request = SleepFleet(
            op_id=self._op_id(op_id),
            deadline_s=deadline_s,
            caller=self.caller,
            target=target,
            tags=as_sleep_tags(tags),
            level=level,
            mode=as_pause_mode(mode),
        )
        return await self._run(request, on_progress, check)

    async def wake(
        self,
        target: Target = EVERYBODY,
        *,
        tags: Iterable[SleepTag | str] | None = None,
        deadline_s: float = SLEEP_DEADLINE_S,
        op_id: str | None = None,
        on_progress: ProgressHandler | None = None,
        check: bool = True,
    ) -> Report:
        """Let engines take back the memory of `tags` (None: all that sleep). Whoever is awake then, and isn't paused,
        generates. Raises, Cancel: see pause; workers go on with what they were sent.
        """
        request = WakeFleet(
            op_id=self._op_id(op_id),
            deadline_s=deadline_s,
            caller=self.caller,
            target=target,
            tags=as_sleep_tags(tags),
        )
        return await self._run(request, on_progress, check)

    async def versions(
        self,
        target: Target = EVERYBODY,
        *,
        deadline_s: float = QUESTION_DEADLINE_S,
        check: bool = True,
    ) -> Report:
        """Ask each worker for its weights; each outcome's data is `WeightsData`. Raises, Cancel: see pause."""
        return await self._run(
            GetVersions(op_id=self.bus.new_id(), deadline_s=deadline_s, caller=self.caller, target=target), None, check
        )

    async def reload(
        self,
        path: str,
        target: Target = EVERYBODY,
        *,
        version: Version | None = None,
        pause_mode: PauseMode | str = PauseMode.KEEP,
        allow_rollback: bool = False,
        deadline_s: float = RELOAD_DEADLINE_S,
        op_id: str | None = None,
        on_progress: ProgressHandler | None = None,
        check: bool = True,
    ) -> Report:
        """Load a safetensors folder that every worker can read. `version` None: the fleet's next step.

        Raises, Cancel: see pause.
        """
        request = ReloadFleet(
            op_id=self._op_id(op_id),
            deadline_s=deadline_s,
            caller=self.caller,
            path=path,
            target=target,
            version=version,
            pause_mode=as_pause_mode(pause_mode),
            allow_rollback=allow_rollback,
        )
        return await self._run(request, on_progress, check)

    async def transfer(
        self,
        step: TransferStep | str,
        info: str | None = None,
        target: Target = EVERYBODY,
        *,
        version: Version | None = None,
        pause_mode: PauseMode | str = PauseMode.KEEP,
        deadline_s: float = TRANSFER_DEADLINE_S,
        op_id: str | None = None,
        on_progress: ProgressHandler | None = None,
        check: bool = True,
    ) -> Report:
        """One step of an update that another trainer drives; see `rlbus.schemas.TransferFleet`, and `sync_client`.

        Raises, Cancel: see pause. Of an update that is cancelled, who has received is torn until the next one; a finish
        or a shutdown goes on to its end, unless it is taken back by `cancel`.
        """
        request = TransferFleet(
            op_id=self._op_id(op_id),
            deadline_s=deadline_s,
            caller=self.caller,
            step=TransferStep(step),
            info=info,
            version=version,
            target=target,
            pause_mode=as_pause_mode(pause_mode),
        )
        return await self._run(request, on_progress, check)

    async def status(self, *, deadline_s: float = QUESTION_DEADLINE_S) -> FleetView:
        """The controller's view of the fleet, asked for page by page. Raises: see pause. Cancel: leaves nothing."""
        ask_page = self._pages(deadline_s)
        return await whole_view(await ask_page(None), ask_page)

    async def glance(self, *, deadline_s: float = QUESTION_DEADLINE_S) -> FleetView:
        """The same of one worker at most: who leads, the fleet's version, what runs. Costs the same for any fleet.

        Raises: see pause. Cancel: leaves nothing.
        """
        return await self._pages(deadline_s, num_workers=1)(None)

    async def history(
        self, limit: int = 20, *, of_op_id: str | None = None, deadline_s: float = QUESTION_DEADLINE_S
    ) -> HistoryView:
        """The newest ops of the controllers' journal; or that one, with its report. Cancel: leaves nothing.

        Raises: as pause; WrongStateError: the controller keeps none. FaultError: it has no such op (any more).
        """
        request = GetHistory(
            op_id=self.bus.new_id(), deadline_s=deadline_s, caller=self.caller, limit=limit, of_op_id=of_op_id
        )
        last = await self._converse(request, None, DEFAULT_PATIENCE)
        if not isinstance(last, HistoryView):
            raise BrokenError(CONTROLLER, "answered a question about its journal with something else")
        return last

    async def wait_ready(
        self,
        *,
        world_size: int | None = None,
        num_workers: int | None = None,
        target: Target = EVERYBODY,
        deadline_s: float = READY_DEADLINE_S,
        on_progress: ProgressHandler | None = None,
    ) -> FleetView:
        """Wait until the live workers' world sizes sum up to `world_size`, and/or there are `num_workers`.

        It also waits for the controller itself to come up.

        Raises:
            DeadlineError: not there within `deadline_s`; says who or how many are missing.
            BrokenError: no controller came up in that time. RefusedError: the request makes no sense.
        Cancel: the wait is taken back, which takes at most 5 s.
        """
        request = WaitReady(
            op_id=self.bus.new_id(),
            deadline_s=deadline_s,
            caller=self.caller,
            world_size=world_size,
            num_workers=num_workers,
            target=target,
            limit=PAGE_WORKERS,
        )
        first = await self._view(request, on_progress, Patience(awaits_controller=True))
        return await whole_view(first, self._pages(QUESTION_DEADLINE_S))

    @one_call
    async def cancel(self, op_id: str, *, deadline_s: float = QUESTION_DEADLINE_S) -> None:
        """Take an op back. It ends like any other failure, and its report goes to who asked for it.

        Sent again while no answer comes.

        Raises:
            RefusedError: no such op (`unknown_op`), or it has ended by now, maybe by this call (a lost answer).
            DeadlineError: no answer in that time. BrokenError: nobody listens, or we are disconnected all the time.
        Cancel: the request may have been taken.
        """
        request = CancelOp(op_id=self.bus.new_id(), deadline_s=deadline_s, caller=self.caller, of_op_id=op_id)
        await cancel_op(self.bus, self.namespace, request, most_silence_s=DEFAULT_PATIENCE.silence_s)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[EventStream]:
        """The controller's facts from now on. Events may be lost: what counts is in `status` and in reports.

        Cancel: the subscription ends.
        """
        events = EventStream()
        subscription = self.bus.subscribe(subjects.controller_events(self.namespace), ControllerEvent, events.offer)
        try:
            yield events
        finally:
            subscription.unsubscribe()

    def _op_id(self, op_id: str | None) -> str:
        return self.bus.new_id() if op_id is None else op_id

    async def _run(self, request: ControlRequest, on_progress: ProgressHandler | None, check: bool) -> Report:
        """Ask for an op and return its report."""
        last = await self._converse(request, on_progress, DEFAULT_PATIENCE)
        if not isinstance(last, OpResult):
            raise BrokenError(CONTROLLER, f"answered {op_name(request)} with a view of the fleet instead of a report")
        if check:
            raise_for_report(last.report)
        return last.report

    def _pages(self, deadline_s: float, *, num_workers: int = PAGE_WORKERS) -> AskPage:
        """Asks for pages of the fleet's view, within `deadline_s` for all of them."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + deadline_s

        async def ask_page(after: WorkerId | None) -> FleetView:
            left_s = min(deadline_s, round(until_s - loop.time(), 3))
            request = GetFleet(
                op_id=self.bus.new_id(), deadline_s=left_s, caller=self.caller, limit=num_workers, after=after
            )
            if left_s <= 0:
                raise DeadlineError(op_name(request), deadline_s, f"the fleet's view isn't complete; after {after}")
            return await self._view(request, None, DEFAULT_PATIENCE)

        return ask_page

    async def _view(
        self, request: ControlRequest, on_progress: ProgressHandler | None, patience: Patience
    ) -> FleetView:
        """Ask a question that is answered with a view of the fleet."""
        last = await self._converse(request, on_progress, patience)
        if not isinstance(last, FleetView):
            raise BrokenError(CONTROLLER, f"answered {op_name(request)} with a report instead of a view of the fleet")
        return last

    @one_call
    async def _converse(
        self, request: ControlRequest, on_progress: ProgressHandler | None, patience: Patience
    ) -> OpResult | FleetView | HistoryView:
        """Send, hear out, and take the op back when our caller is cancelled, unless it goes on without one."""

        def on_reply(reply: ControlReply) -> None:
            if isinstance(reply, OpProgress):
                show_progress(on_progress, reply)

        try:
            return await converse(self.bus, self.namespace, request, on_reply=on_reply, patience=patience)
        except asyncio.CancelledError as exc:
            if goes_on(request):
                exc.add_note(f"{op_name(request)} op {request.op_id} goes on to its end")
            elif not isinstance(request, GetFleet | GetHistory):
                # Only a waiting caller would hear it otherwise; the CLI shows it after Ctrl-C.
                is_taken = await take_back(self.bus, self.namespace, request.op_id, self.caller)
                exc.add_note(fate_of(op_name(request), request.op_id, is_taken_back=is_taken))
            raise
