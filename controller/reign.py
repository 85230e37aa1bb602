"""Standing by, leading, standing by again: the lease, the journal and the controller of one process put together."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from rlbus import subjects
from rlbus._kv import Kv
from rlbus._objects import Objects
from rlbus.bus import Bus
from rlbus.connecting import open_objects
from rlbus.controller.fence import FencedTransport
from rlbus.controller.journal import Journal
from rlbus.controller.leader import RETRY_S, LeaseHolder
from rlbus.controller.service import Controller, Settings
from rlbus.errors import BrokenError, DeadlineError
from rlbus.schemas import Lease

_log = logging.getLogger("rlbus.controller")

# Until the server has the subscriptions of a controller that begins, in seconds.
READY_S = 5.0
# Between two leaderships that end because workers have seen a larger term. Another leader on the same subjects, with a
# store of its own, would answer each of our terms with one of its.
OUTRANKED_PAUSE_S = 10.0


async def announce(controller: Controller, bus: Bus, on_ready: Callable[[Controller], None] | None) -> None:
    """Call `on_ready` once requests are taken. Raises: what `on_ready` raises. Cancel: leaves nothing."""
    await controller.ready.wait()
    try:
        await bus.barrier(READY_S)
    except (BrokenError, DeadlineError) as exc:
        _log.warning("the server doesn't confirm that requests arrive: %s", exc)
    _log.info("controller of namespace %s serves, term %d", controller.namespace, controller.term)
    if on_ready is not None:
        on_ready(controller)


async def reign(
    bus: Bus,
    kv: Kv,
    namespace: str,
    *,
    name: str,
    settings: Settings | None = None,
    on_ready: Callable[[Controller], None] | None = None,
    on_standby: Callable[[Lease], None] | None = None,
) -> None:
    """Lead `namespace` whenever nobody else does, until cancelled. `name` is shown to those that stand by.

    `on_ready` is called each time that this process leads, `on_standby` with the leader's lease when it doesn't.

    Raises: what breaks the controller itself.
    Cancel: the way to stop it: what runs is taken back within `settings.stop_s`, and the lease is released, so that a
        standby takes over at once. A second cancel drops what is being undone.
    """
    holder = LeaseHolder(kv, bus.clock, name=name)
    fenced = Bus(FencedTransport(bus.transport, lambda: holder.is_held), clock=bus.clock, new_id=bus.new_id)
    objects = open_objects(bus, namespace)
    # While nobody leads a client must not hear "nobody listens": there is a controller, which will lead in a moment.
    present = bus.transport.subscribe(subjects.all_control(namespace), lambda _: None)
    loop = asyncio.get_running_loop()
    pause_until_s = 0.0
    try:
        while True:
            tenure = await holder.acquire(on_standby)
            _log.info("this controller leads namespace %s, term %d", namespace, tenure.term)
            journal = Journal(kv, bus.clock, tenure.term)
            try:
                why, seen = await _lead(holder, journal, fenced, namespace, settings, on_ready, objects, pause_until_s)
                if seen is not None:
                    await holder.note_term(seen)
                    pause_until_s = loop.time() + OUTRANKED_PAUSE_S
            finally:
                await holder.release()
            _log.warning("this controller doesn't lead any more: %s; standing by", why)
            await asyncio.sleep(RETRY_S)
    finally:
        present.unsubscribe()
        objects.close()


async def _lead(
    holder: LeaseHolder,
    journal: Journal,
    bus: Bus,
    namespace: str,
    settings: Settings | None,
    on_ready: Callable[[Controller], None] | None,
    objects: Objects,
    pause_until_s: float,
) -> tuple[str, int | None]:
    """One leadership, from its first look into the journal until it is lost; why it was, and the larger term if it was
    for one (not for one that workers have seen before `pause_until_s`).
    """
    assert holder.tenure is not None
    term = holder.tenure.term
    loop = asyncio.get_running_loop()
    keeping = loop.create_task(holder.keep(), name="lease")
    tasks: list[asyncio.Task[Any]] = [keeping]
    try:
        while not await _is_open(journal):
            if keeping.done():
                return keeping.result(), None
            await asyncio.sleep(RETRY_S)
        if journal.newest_term > term:  # of a store whose last term was lost
            return f"the journal has term {journal.newest_term}, ours is {term}", journal.newest_term
        controller = Controller(bus, namespace, settings=settings, term=term, journal=journal, objects=objects)
        writing = loop.create_task(journal.run(), name="journal")
        announcing = loop.create_task(announce(controller, bus, on_ready), name="announce")
        outranked = loop.create_task(_outranked(controller, pause_until_s), name="outranked")
        tasks += [writing, announcing, outranked]
        why = await _serve(controller, journal, {keeping, writing, outranked})
        return why, controller.registry.newest_term if outranked.done() and holder.is_held else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _is_open(journal: Journal) -> bool:
    try:
        await journal.open()
    except (BrokenError, DeadlineError) as exc:
        _log.warning("the journal can't be read yet: %s", exc)
        return False
    return True


async def _outranked(controller: Controller, pause_until_s: float) -> str:
    """Wait until workers have seen a larger term, and the pause is over; says so. Cancel: leaves nothing."""
    await controller.outranked.wait()
    await asyncio.sleep(max(0.0, pause_until_s - asyncio.get_running_loop().time()))
    return f"workers have seen term {controller.registry.newest_term}, ours is {controller.term}"


async def _serve(controller: Controller, journal: Journal, ends: set[asyncio.Task[str]]) -> str:
    """Run the controller until one of `ends` does, each of which says why; that."""
    running = asyncio.get_running_loop().create_task(controller.run(), name="controller")
    is_lost = True
    try:
        waited: set[asyncio.Task[Any]] = {running, *ends}
        done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if running in done:
            running.result()
        return next(end.result() for end in ends if end in done)
    except asyncio.CancelledError:
        is_lost = False
        raise
    finally:
        if is_lost:
            controller.abandon()
        await _end(running)
        if not is_lost:
            await journal.flush()


async def _end(running: asyncio.Task[None]) -> None:
    """Cancel it and wait; a cancel meanwhile reaches it as its second."""
    running.cancel()
    try:
        await asyncio.wait({running})
    except asyncio.CancelledError:
        running.cancel()
        await asyncio.wait({running})
        raise
