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
    try:
        while True:
            tenure = await holder.acquire(on_standby)
            _log.info("this controller leads namespace %s, term %d", namespace, tenure.term)
            journal = Journal(kv, bus.clock, tenure.term)
            try:
                why = await _lead(holder, journal, fenced, namespace, settings, on_ready, objects)
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
) -> str:
    """One leadership, from its first look into the journal until it is lost; why it was."""
    assert holder.tenure is not None
    term = holder.tenure.term
    loop = asyncio.get_running_loop()
    keeping = loop.create_task(holder.keep(), name="lease")
    tasks: list[asyncio.Task[Any]] = [keeping]
    try:
        while not await _is_open(journal):
            if keeping.done():
                return keeping.result()
            await asyncio.sleep(RETRY_S)
        controller = Controller(bus, namespace, settings=settings, term=term, journal=journal, objects=objects)
        writing = loop.create_task(journal.run(), name="journal")
        announcing = loop.create_task(announce(controller, bus, on_ready), name="announce")
        tasks += [writing, announcing]
        return await _serve(controller, journal, keeping, writing)
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


async def _serve(
    controller: Controller,
    journal: Journal,
    keeping: asyncio.Task[str],
    writing: asyncio.Task[str],
) -> str:
    """Run the controller until the lease is lost, or the journal is somebody else's; why."""
    running = asyncio.get_running_loop().create_task(controller.run(), name="controller")
    is_lost = True
    try:
        waited: set[asyncio.Task[Any]] = {running, keeping, writing}
        done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if running in done:
            running.result()
        return keeping.result() if keeping in done else writing.result()
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
