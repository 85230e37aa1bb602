"""What the controller hears of workers, and what follows: membership, events on the bus, who waits for whom."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.controller.greeting import Greeter
from rlbus.controller.op import tell_event
from rlbus.controller.registry import Change, Collided, Gone, Joined, Registry
from rlbus.controller.screening import problem_of
from rlbus.controller.waiting import WaitingRoom
from rlbus.schemas import Announcement, WorkerId, WorkerJoined, WorkerLeft, WorkerMessage, worker_id

_log = logging.getLogger("rlbus.controller")

# Refused announcements are logged at most this often, in seconds; all are counted.
REFUSAL_LOG_S = 10.0


class Hearing:
    """Feeds the registry. `components` are greeted after each reconnect; `on_lost` is told of each worker that is gone
    or was restarted, and why, `on_heard` of each sign of life. Nothing here waits.
    """

    def __init__(
        self,
        bus: Bus,
        registry: Registry,
        greeter: Greeter,
        components: Sequence[str],
        waiting: WaitingRoom,
        *,
        on_lost: Callable[[WorkerId, str], None],
        on_heard: Callable[[WorkerId], None],
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._namespace = registry.namespace
        self._greeter = greeter
        self._components = tuple(components)
        self._waiting = waiting
        self._on_lost = on_lost
        self._on_heard = on_heard
        self._is_check_due = False
        self._logged_refusal_at_s = float("-inf")

    def tick(self) -> None:
        """Time has passed: who is silent for too long is suspect, then gone."""
        self._take(self._registry.tick(asyncio.get_running_loop().time()))

    def on_message(self, message: WorkerMessage, raw: Message) -> None:
        """An announcement or a goodbye; what is about somebody else than its subject says is refused."""
        problem = problem_of(message, raw.subject, self._namespace)
        if problem is not None:
            self._refuse_worker(raw.subject, problem)
            return
        self._take(self._registry.hear(message, asyncio.get_running_loop().time()))
        if isinstance(message, Announcement):
            self._on_heard(worker_id(message.descriptor.component, message.descriptor.instance_id))

    def _refuse_worker(self, subject: str, problem: str) -> None:
        self._registry.num_refused += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_refusal_at_s >= REFUSAL_LOG_S:
            self._logged_refusal_at_s = now_s
            _log.warning("refused a message on %s: %s (%d so far)", subject, problem, self._registry.num_refused)

    def on_connection(self, is_connected: bool) -> None:
        """While we are disconnected, nobody's silence counts."""
        now_s = asyncio.get_running_loop().time()
        if is_connected:
            self._registry.reconnected(now_s)
            self._greeter.greet((*self._components, *self._registry.components()))
        else:
            _log.warning("disconnected from the bus; nobody's silence counts until we are back")
            self._registry.disconnected(now_s)

    def _take(self, changes: Sequence[Change]) -> None:
        """What follows from a change of the membership."""
        for change in changes:
            member, at = change.member, self._bus.clock.now()
            component, instance_id = member.descriptor.component, member.descriptor.instance_id
            if isinstance(change, Joined):
                _log.info("%s joined (%s, boot %s)", member.worker, member.descriptor.engine, member.boot_id)
                joined = WorkerJoined(at=at, component=component, instance_id=instance_id, boot_id=member.boot_id)
                tell_event(self._bus, self._namespace, joined)
                if change.is_reboot:
                    self._on_lost(member.worker, "it was restarted")
                if not self._greeter.has_greeted(component):
                    self._greeter.greet((component,))
            elif isinstance(change, Gone):
                _log.warning("%s is gone: %s", member.worker, change.reason)
                left = WorkerLeft(at=at, component=component, instance_id=instance_id, reason=change.reason)
                tell_event(self._bus, self._namespace, left)
                self._on_lost(member.worker, change.reason)
            elif isinstance(change, Collided):
                _log.error("%s: %s", member.worker, change.reason)
        if changes and not self._is_check_due and not self._waiting.is_empty:
            self._is_check_due = True
            asyncio.get_running_loop().call_soon(self._check_waiting)

    def _check_waiting(self) -> None:
        self._is_check_due = False
        self._waiting.check()
