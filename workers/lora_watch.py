"""Looks at the adapters that an engine has: for the heartbeats, for who asks, and for those that drain.

Invariant: one question at a time, each bounded: by `observe_s` for heartbeats, which would be late, by `list_s` for who
asks and for those that drain; what is answered is the engine's own list.
"""

import asyncio
import logging
from typing import Protocol

from rlbus.errors import EngineError
from rlbus.schemas import Fault, FaultCode, LorasData, LorasView
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.lora import LoraEngine, Resident
from rlbus.workers.loras import find, loras_data, summary
from rlbus.workers.moves import Action, Event, LorasSeen
from rlbus.workers.state import WorkerState

_log = logging.getLogger("rlbus.workers")

# After an unload at the end of a drain has failed: when it is tried again.
RETRY_S = 5.0


class Host(Protocol):
    """What this needs of the agent."""

    @property
    def state(self) -> WorkerState:
        """As it is now."""
        ...

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Feed the state machine; what it wants done."""
        ...

    def drain_ended(self, name: str, revision: int) -> None:
        """It has drained, its time is over, or nobody wants it: let it go, if nothing else runs."""
        ...


class LoraWatch:
    """The adapters of one engine as it says; of an engine that takes none (None) there is nothing to say."""

    def __init__(self, engine: LoraEngine | None, host: Host, config: AgentConfig) -> None:
        self._engine = engine
        self._host = host
        self._config = config
        # The engine's last answer; None before the first, and when the last question wasn't answered.
        self._last: tuple[Resident, ...] | None = None
        self._asking: asyncio.Task[tuple[Resident, ...] | None] | None = None
        # When each draining adapter was first seen so, in seconds of the loop, and when it is tried next.
        self._since_s: dict[tuple[str, int], float] = {}
        self._next_s: dict[tuple[str, int], float] = {}
        self._changed = asyncio.Event()

    def view(self) -> LorasView | None:
        """For a status."""
        return summary(self._host.state, self._last)

    def soon(self) -> None:
        """An adapter may be to go."""
        self._changed.set()

    async def answer(self, limit_s: float) -> LorasData:
        """What `list_loras` answers, for whoever waits so long; nobody waits for longer than `list_s`.

        Raises: EngineError: the engine doesn't say. Cancel: leaves nothing.
        """
        limit_s = min(limit_s, self._config.list_s)
        residents = await self._look_patiently(limit_s)
        if residents is None:
            message = f"the engine did not list its adapters within {limit_s:.3g} s; ask again"
            raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=message, retryable=True))
        return loras_data(self._host.state, residents)

    async def _look_patiently(self, limit_s: float) -> tuple[Resident, ...] | None:
        """Ask for so long, whoever else is asking: a heartbeat's question gives the engine less time."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + limit_s
        while True:
            is_anothers = self._asking is not None and not self._asking.done()
            asking = self.begin_look(self._config.list_s)
            residents = await self.end_look(asking, max(0.0, ends_s - loop.time()))
            if residents is not None or not is_anothers or loop.time() >= ends_s:
                return residents

    async def look(self) -> tuple[Resident, ...] | None:
        """Ask the engine, and tell the state machine; None if it doesn't answer.

        Cancel: the question goes on for the others who wait.
        """
        return await self.end_look(self.begin_look())

    def begin_look(self, limit_s: float | None = None) -> asyncio.Task[tuple[Resident, ...] | None] | None:
        """Ask the engine, if nobody is asking it already; the question, for `end_look`. None: for `observe_s`."""
        if self._engine is not None and (self._asking is None or self._asking.done()):
            self._asking = asyncio.get_running_loop().create_task(self._ask(self._engine, limit_s))
        return self._asking

    async def end_look(
        self, asking: asyncio.Task[tuple[Resident, ...] | None] | None, limit_s: float | None = None
    ) -> tuple[Resident, ...] | None:
        """The answer, or None without one. Cancel: the question goes on for the others who wait."""
        if asking is None:
            return None
        if not asking.done():
            # Bounded out here: an engine that doesn't let go when it is cancelled isn't asked a second time meanwhile.
            await asyncio.wait({asking}, timeout=self._config.observe_s if limit_s is None else limit_s)
        self._last = asking.result() if asking.done() and not asking.cancelled() else None
        return self._last

    async def _ask(self, engine: LoraEngine, limit_s: float | None) -> tuple[Resident, ...] | None:
        turn = self._host.state.lora_turn
        try:
            async with asyncio.timeout(self._config.observe_s if limit_s is None else limit_s):
                residents = await engine.list_loras()
        except Exception as exc:  # noqa: BLE001 - seen by everybody as adapters that nobody can tell
            _log.debug("the engine doesn't list its adapters: %s", exc)
            return None
        self._host.apply(LorasSeen(residents, turn))
        return residents

    async def run(self) -> None:
        """Unload what has drained, or came though nobody wants it, as long as the agent runs. Cancel: at any point."""
        if self._engine is None:
            return
        while True:
            while not self._draining():
                self._since_s.clear()
                self._next_s.clear()
                self._changed.clear()
                await self._changed.wait()
            await self._drain()
            await asyncio.sleep(self._config.lora_poll_s)

    def _draining(self) -> dict[tuple[str, int], float]:
        """How long each adapter that is to go may still take for it, in seconds."""
        return {a.key: a.drain_s or 0.0 for a in self._host.state.adapters if a.is_going}

    async def _drain(self) -> None:
        residents = await self._look_patiently(self._config.list_s)
        if residents is None:
            return
        now_s = asyncio.get_running_loop().time()
        draining = self._draining()
        for key in self._since_s.keys() - draining.keys():
            del self._since_s[key]  # it is gone, or was taken back; if it drains again, its time begins anew
        for key, limit_s in draining.items():
            if key not in self._since_s:
                # Whoever asked for it may ask again first.
                self._since_s[key] = now_s
                continue
            since_s = self._since_s[key]
            resident = find(residents, *key)
            is_idle = resident is not None and resident.num_in_flight == 0
            is_due = is_idle or now_s - since_s >= limit_s
            if is_due and self._host.state.running is None and now_s >= self._next_s.get(key, now_s):
                self._next_s[key] = now_s + RETRY_S
                self._host.drain_ended(*key)

    async def aclose(self) -> None:
        """Stop asking. Cancel: it was told to stop, and may not have."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking}, timeout=self._config.observe_s)
