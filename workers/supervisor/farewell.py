"""What a supervisor tells the bus of a process that can't say it any more: that it has ended.

Without it a killed worker would count as alive until its heartbeats are missed (12 to 20 s), and be sent rollouts.
Best effort: when it isn't heard, the missing heartbeats say the same, later.
"""

import asyncio
import logging
import secrets
from types import TracebackType

from rlbus import subjects
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.errors import RLBusError
from rlbus.schemas import Goodbye
from rlbus.workers.config import Identity

_log = logging.getLogger("rlbus.workers")

# How long one farewell may take, its connection included, in seconds: later the heartbeats are missed anyhow.
FAREWELL_S = 5.0
# How long the goodbye may take to the server and back, in seconds.
ECHO_S = 2.0


def new_boot_id() -> str:
    """What one life of a process is called (64 random bits): its announcements carry it, and so does its farewell."""
    return secrets.token_hex(8)


class Farewells:
    """Says goodbye for the dead processes of one worker. A context, which lets what is under way come to its end."""

    def __init__(self, bus_config: BusConfig, identity: Identity) -> None:
        self._bus_config = bus_config
        self._identity = identity
        # At most one for each start, and a start takes longer than FAREWELL_S or is slowed down by the restart policy.
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Farewells":
        """Cancel: leaves nothing."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Each farewell has its limit; the last one, of a worker that isn't started again, counts most.

        Cancel: they are dropped.
        """
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            for task in self._tasks:
                task.cancel()

    def say(self, boot_id: str, reason: str) -> None:
        """The process of that boot has ended. Returns at once."""
        task = asyncio.get_running_loop().create_task(self._say(boot_id, reason), name=f"farewell of {boot_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _say(self, boot_id: str, reason: str) -> None:
        who = self._identity
        goodbye = Goodbye(boot_id=boot_id, component=who.component, instance_id=who.instance_id, reason=reason)
        subject = subjects.worker(self._bus_config.namespace, who.component, who.instance_id)
        try:
            async with asyncio.timeout(FAREWELL_S):
                name = f"supervisor-{who.component}-{who.instance_id}"
                async with await connect_bus(self._bus_config, name=name) as bus:
                    bus.publish(subject, goodbye)
                    await bus.barrier(ECHO_S)
        except (RLBusError, TimeoutError) as exc:
            _log.info("nobody was told of the end of boot %s: %s", boot_id, exc)
