"""Processes that are stopped for a while, as by SIGSTOP or a machine that swaps, and the loop that makes it possible.

All parties of a run share one event loop. Each has a `Gate`; what it does (its tasks, its timers, what it hears) goes
through it, and waits in order while it is closed. The world's time goes on meanwhile: who wakes up finds its timers
overdue, its messages waiting and its leases over.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any

from rlbus._memory import MemoryTransport
from rlbus.testing import VirtualTimeLoop


class Gate:
    """What one process does passes here."""

    def __init__(self) -> None:
        self.is_closed = False
        # What waits: a callback, and the handle that can cancel it.
        self._held: list[tuple[Callable[[], object], asyncio.Handle | None, Context]] = []

    def close(self) -> None:
        """The process stands still from now on."""
        self.is_closed = True

    def open(self) -> None:
        """It goes on, with everything that came meanwhile, in order."""
        if not self.is_closed:
            return
        self.is_closed = False
        loop = asyncio.get_running_loop()
        held, self._held = self._held, []
        for callback, handle, context in held:
            loop.call_soon(self._late, callback, handle, context=context)

    def enter(self, callback: Callable[[], object]) -> None:
        """Run something that comes from outside, a message say, as this process; later if it stands still."""
        if self.is_closed:
            context = copy_context()
            context.run(GATE.set, self)
            self._held.append((callback, None, context))
            return
        with self.inside():
            callback()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """While inside, tasks and timers that are made are this process' own."""
        token = GATE.set(self)
        try:
            yield
        finally:
            GATE.reset(token)

    def run(self, callback: Callable[[], object], cell: list[asyncio.Handle], context: Context) -> None:
        """A callback of the loop is due."""
        if self.is_closed:
            self._held.append((callback, cell[0], context))
        else:
            callback()

    def _late(self, callback: Callable[[], object], handle: asyncio.Handle | None) -> None:
        if handle is None or not handle.cancelled():
            callback()


# Which process the running code belongs to; tasks and timers inherit it. None: the world.
GATE: ContextVar[Gate | None] = ContextVar("simulation_gate", default=None)


class SimulationLoop(VirtualTimeLoop):
    """Runs what goes to a thread at once instead: threads would end when they like, and runs would differ."""

    is_without_threads = True

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """As in asyncio, with the work done already."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as exc:  # noqa: BLE001 - whoever awaits the future gets it
            future.set_exception(exc)
        return future


class StoppableLoop(SimulationLoop):
    """Also asks the gates. Slower, so it is used only for runs in which somebody is stopped."""

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As in asyncio, through the gate of whoever asks for it."""
        context = copy_context() if context is None else context
        gate = context.get(GATE)
        if gate is None or getattr(callback, "__self__", None) is gate:
            return super().call_soon(callback, *args, context=context)
        cell: list[asyncio.Handle] = []
        cell.append(super().call_soon(gate.run, lambda: callback(*args), cell, context, context=context))
        return cell[0]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As in asyncio, through the gate of whoever asks for it."""
        context = copy_context() if context is None else context
        gate = context.get(GATE)
        if gate is None:
            return super().call_at(when, callback, *args, context=context)
        cell: list[asyncio.Handle] = []
        timer = super().call_at(when, gate.run, lambda: callback(*args), cell, context, context=context)
        cell.append(timer)
        return timer


def gated(transport: MemoryTransport, gate: Gate) -> None:
    """What comes over `transport` goes through `gate`. Call it before anybody uses the connection."""
    deliver, on_reconnect, on_disconnect = transport._deliver, transport.on_reconnect, transport.on_disconnect

    def delivered(*what: Any) -> None:
        gate.enter(lambda: deliver(*what))

    transport._deliver = delivered  # type: ignore[method-assign, assignment]
    transport.on_reconnect = lambda handler: on_reconnect(lambda: gate.enter(handler))  # type: ignore[method-assign]
    transport.on_disconnect = lambda handler: on_disconnect(lambda: gate.enter(handler))  # type: ignore[method-assign]
