"""An engine that was found generating on torn weights is stopped, by an op of the agent's own, until that is done."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from rlbus.schemas import PauseGeneration, ResultStatus
from rlbus.workers.adoption import own_pause
from rlbus.workers.draft import is_whole
from rlbus.workers.engines.found import Found
from rlbus.workers.journal import Journal
from rlbus.workers.leases import RETRY_S
from rlbus.workers.state import WorkerState


class Host(Protocol):
    """What this needs of the agent."""

    journal: Journal

    @property
    def state(self) -> WorkerState:
        """As it is now."""
        ...

    def submit(self, op_id: str, body: PauseGeneration) -> None:
        """Take a command of the agent's own."""
        ...


class TornFound:
    """`begin` once, when commands can be taken; `cancel` at the end."""

    def __init__(self, host: Host, found: Found | None, new_id: Callable[[], str]) -> None:
        self._host = host
        self._found = found
        self._new_id = new_id
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Pause it, if it has to be. Whoever forces it to generate afterwards is left alone."""
        own = None if self._found is None else own_pause(self._found, self._new_id())
        if own is None:
            return
        self._host.submit(*own)
        self._look_later(own[0])

    def cancel(self) -> None:
        """Nothing is tried any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self, op_id: str) -> None:
        self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._look, op_id)

    def _look(self, op_id: str) -> None:
        record, state = self._host.journal.find(op_id), self._host.state
        if record is not None and record.result is None:
            self._look_later(op_id)
            return
        is_done = record is not None and record.result is not None and record.result.status is ResultStatus.OK
        if not is_done and state.pause is None and not is_whole(state):
            self.begin()
