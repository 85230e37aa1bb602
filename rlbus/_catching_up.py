"""The trainer's side of a catch-up from memory: takes the controller's tasks, one at a time, while no update runs."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from rlbus._snapshots import Kept, Snapshots
from rlbus._transport import Message
from rlbus.bus import Bus, Inbox
from rlbus.codec import decode
from rlbus.errors import DecodeError, RLBusError
from rlbus.schemas import CatchUpTask, Fault, FaultCode, OpAccepted, Refusal

_log = logging.getLogger("rlbus.trainer")

Run = Callable[[Kept, CatchUpTask], Coroutine[Any, Any, None]]


class CatchUpService:
    """Answers `CatchUpTask`s out of `snapshots`; `run` does one. `is_busy`: an update runs, which goes first."""

    def __init__(self, bus: Bus, snapshots: Snapshots, run: Run, is_busy: Callable[[], bool]) -> None:
        self._bus = bus
        self._snapshots = snapshots
        self._run = run
        self._is_busy = is_busy
        self._inbox: Inbox | None = None
        self._op_id: str | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def inbox(self) -> str:
        """Where tasks are taken from now on, until `aclose`."""
        if self._inbox is None:
            self._inbox = self._bus.open_inbox(self._on_message)
        return self._inbox.reply

    async def stop(self) -> None:
        """End the catch-up that runs, if one does: it is taken back, which takes as long as that of an update.

        Cancel: it still ends.
        """
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})

    async def aclose(self) -> None:
        """Take no more tasks, and end what runs. Idempotent. Cancel: as `stop`."""
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None
        await self.stop()

    def _on_message(self, message: Message, _tail: str) -> None:
        if message.no_responders or message.reply is None:
            return
        try:
            task: CatchUpTask = decode(message.data, CatchUpTask, message.subject)
        except DecodeError as exc:
            self._bus.count_bad(exc)
            return
        problem = self._begin(task)
        answer = OpAccepted(op_id=task.op_id) if problem is None else Refusal(op_id=task.op_id, fault=problem)
        try:
            self._bus.publish(message.reply, answer)
        except RLBusError as exc:  # it is asked again, under another op_id if this one has ended
            _log.warning("catch-up %s: it isn't answered: %s", task.op_id, exc)

    def _begin(self, task: CatchUpTask) -> Fault | None:
        """Begin it; why it can't be. A repeat changes nothing."""
        is_running = self._task is not None and not self._task.done()
        if is_running and self._op_id == task.op_id:
            return None
        if is_running or self._is_busy():
            return Fault(code=FaultCode.BUSY, message="the trainer is sending something else", retryable=True)
        kept = self._snapshots.get(task.version)
        if kept is None:
            message = f"the trainer has no snapshot of version {task.version}"
            return Fault(code=FaultCode.UNKNOWN_OP, message=message)
        self._op_id = task.op_id
        self._task = asyncio.get_running_loop().create_task(self._try(kept, task), name=f"catch-up {task.op_id}")
        return None

    async def _try(self, kept: Kept, task: CatchUpTask) -> None:
        workers = ", ".join(task.workers)
        _log.info("catch-up %s: sending version %s again to %s", task.op_id, task.version, workers)
        try:
            await self._run(kept, task)
        except RLBusError as exc:
            _log.warning("catch-up %s of %s: %s", task.op_id, workers, exc)
        except Exception:  # noqa: BLE001 - nobody awaits it: the log has it, and the controller asks again
            _log.exception("catch-up %s of %s", task.op_id, workers)
