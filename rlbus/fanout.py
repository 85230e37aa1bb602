"""One command to many workers: one publish per component, one outcome per worker.

The decisions are in `rlbus._gather`; here is the I/O. A fan-out owns one reply address, one timer and no task; answers
are decoded and counted in the callback, never awaited.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from rlbus import subjects
from rlbus._gather import SETTLE_GRACE_S, Gather, Gathered, Limits, Send, Verb, by_component, who
from rlbus._transport import Message
from rlbus.bus import Bus, Inbox
from rlbus.codec import MAX_MESSAGE_BYTES, decode, encode
from rlbus.errors import BrokenError, ClosedError, ConfigError, DecodeError, RLBusError
from rlbus.schemas import (
    Command,
    CommandBody,
    GetOutcome,
    InstanceId,
    WorkerAnswer,
    WorkerId,
    route_of,
    split_worker_id,
    worker_id,
)

__all__ = ["OVERTIME_S", "Gathered", "Limits", "Losses", "fanout"]

_log = logging.getLogger("rlbus.fanout")

# Instance ids in one broadcast at most: 10,000 of them are 230 kB. Fewer if the body leaves less room.
MAX_LISTED_MEMBERS = 10_000
# One id on the wire: 20 digits, two quotes, a comma.
MEMBER_BYTES = 23
# What `"members":[]` adds to the envelope, with room to spare.
MEMBERS_FRAME_BYTES = 64
# Publishes between two turns of the loop: 500 take about 1 ms. Source: facts/nats.md A1, "a publish loop never yields".
NUM_PUBLISHES_PER_TURN = 500

# The longest that a fan-out outlives its deadline, in seconds: who was silent is asked what became of it, and an answer
# that is announced is waited for.
OVERTIME_S = 2 * SETTLE_GRACE_S

OnAnswer = Callable[[WorkerId, WorkerAnswer], None]
OnOutcome = Callable[[Gathered], None]


class Losses:
    """Tells running fan-outs that a worker is gone. Who watches the fleet reports; each fan-out listens."""

    def __init__(self) -> None:
        self._listeners: dict[int, Callable[[WorkerId, str], None]] = {}
        self._num_listened = 0

    def report(self, worker: WorkerId, reason: str) -> None:
        """`worker` died, left or was restarted: whoever waits for it need not wait longer."""
        for listener in list(self._listeners.values()):
            listener(worker, reason)

    def listen(self, listener: Callable[[WorkerId, str], None]) -> Callable[[], None]:
        """Call `listener` at each report, until the returned function is called."""
        self._num_listened += 1
        key = self._num_listened
        self._listeners[key] = listener

        def stop() -> None:
            self._listeners.pop(key, None)

        return stop


async def fanout(
    bus: Bus,
    namespace: str,
    body: CommandBody,
    *,
    members: Sequence[WorkerId],
    op_id: str,
    term: int,
    limits: Limits,
    everybody: Mapping[str, int] | None = None,
    boots: Mapping[WorkerId, str] | None = None,
    lost: Losses | None = None,
    on_answer: OnAnswer | None = None,
    on_outcome: OnOutcome | None = None,
) -> dict[WorkerId, Gathered]:
    """Send one command to `members` and return one outcome for each, in their order.

    Ends within `limits.deadline_s` plus at most OVERTIME_S. The same command, with the same op_id, goes again
    by unicast to whoever is silent after a part of the ack limit, and after a reconnect.

    Args:
        everybody: component -> how many workers it has in all. A component of which all are addressed gets the command
            for "all" instead of a list.
        boots: boot ids as expected; a worker that answers with another one is reported as lost.
        lost: reports of workers that died meanwhile.
        on_answer: called, on the loop, with each answer that counts (no repeats, no strangers); must not wait or raise.
        on_outcome: called once per worker as soon as its outcome is fixed; must not wait or raise.

    Raises:
        BrokenError: not connected when it began; nothing was sent. ClosedError: the bus was closed meanwhile.
        PayloadTooLargeError: the command doesn't fit; nothing was sent.
    Cancel: the answers to come are dropped; workers go on with what they were sent.
    """
    if not members:
        return {}
    run = _Fanout(bus, namespace, body, members, op_id, term, limits, everybody, boots, on_answer, on_outcome)
    stops = [bus.watch_connection(run.on_connection)]
    if lost is not None:
        stops.append(lost.listen(run.on_lost))
    try:
        await run.run()
    finally:
        for stop in stops:
            stop()
        run.close()
    return {worker: run.gather.outcomes[worker] for worker in dict.fromkeys(members)}


class _Fanout:
    """The I/O around one Gather."""

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        body: CommandBody,
        members: Sequence[WorkerId],
        op_id: str,
        term: int,
        limits: Limits,
        everybody: Mapping[str, int] | None,
        boots: Mapping[WorkerId, str] | None,
        on_answer: OnAnswer | None,
        on_outcome: OnOutcome | None,
    ) -> None:
        self._bus = bus
        self._namespace = namespace
        self._op_id = op_id
        self._term = term
        self._limits = limits
        self._on_answer = on_answer
        self._on_outcome = on_outcome
        self._members = by_component(members)
        self._everybody = {} if everybody is None else everybody
        self._body = body
        self._route = route_of(body)
        self._loop = asyncio.get_running_loop()
        self._dropped_before = bus.transport.num_dropped
        self._expires_at = bus.clock.now() + limits.deadline_s
        self._unicast = encode(self._command(None))
        ask_id = bus.new_id()
        self._ask_id = ask_id
        self.gather = Gather(
            members=tuple(dict.fromkeys(members)),
            op_id=op_id,
            ask_id=ask_id,
            limits=limits,
            now_s=self._loop.time(),
            boots={} if boots is None else boots,
        )
        self._pending: list[Send] = []
        self._wake = asyncio.Event()
        self._sleeps_until_s = float("inf")
        self._error: RLBusError | None = None
        self._inbox: Inbox = bus.open_inbox(self._on_reply, self._on_closed)

    def close(self) -> None:
        self._inbox.close()
        num_dropped = self._bus.transport.num_dropped - self._dropped_before
        if num_dropped:
            # Whoever isn't heard is asked, and unknown in the end; this says that it may not be the worker's doing.
            _log.warning("%s: %d deliveries were lost on this side meanwhile", self._op_id, num_dropped)
        if self.gather.num_strangers or self.gather.num_duplicates:
            counts = (self.gather.num_strangers, self.gather.num_duplicates)
            _log.debug("%s: %d strangers, %d duplicates dropped", self._op_id, *counts)

    async def run(self) -> None:
        """Scatter, then gather until every worker has an outcome."""
        await self._scatter()
        gather = self.gather
        while gather.num_open:
            if self._error is not None:
                raise self._error
            await self._send_pending()
            await self._sleep_until(gather.wake_s)
            if self._loop.time() >= gather.wake_s - 1e-9:
                self._pending.extend(gather.on_time(self._loop.time()))
                self._tell_outcomes()

    async def _sleep_until(self, at_s: float) -> None:
        if self._pending or not self.gather.num_open or self._error is not None:
            return
        self._wake.clear()
        self._sleeps_until_s = at_s
        timer = self._loop.call_at(at_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    async def _scatter(self) -> None:
        """Publish to each component. Only the first publish may fail with BrokenError: then nothing was sent."""
        for number, (component, instance_ids) in enumerate(self._members.items()):
            try:
                if len(instance_ids) == 1:
                    self._publish_to(worker_id(component, instance_ids[0]), Verb.COMMAND)
                else:
                    await self._broadcast(number, component, instance_ids)
            except ConfigError as exc:
                for instance_id in instance_ids:
                    self.gather.on_unaddressable(worker_id(component, instance_id), str(exc))
                self._tell_outcomes()
            except BrokenError:
                if number == 0:
                    raise
                return
            await asyncio.sleep(0)

    async def _broadcast(self, number: int, component: str, instance_ids: list[str]) -> None:
        subject = subjects.command(self._namespace, component, self._route)
        reply = f"{self._inbox.reply}.all-{number}"
        for place, members in enumerate(self._lists(component, instance_ids)):
            data = self._unicast if members is None else encode(self._command(members))
            try:
                self._bus.transport.publish(subject, data, reply)
            except BrokenError:
                if place == 0:
                    raise
                return
            await asyncio.sleep(0)

    def _lists(self, component: str, instance_ids: list[str]) -> list[tuple[InstanceId, ...] | None]:
        if self._everybody.get(component) == len(instance_ids):
            return [None]
        limit_bytes = min(MAX_MESSAGE_BYTES, self._bus.transport.max_payload_bytes)
        room_bytes = limit_bytes - len(self._unicast) - MEMBERS_FRAME_BYTES
        step = max(1, min(MAX_LISTED_MEMBERS, room_bytes // MEMBER_BYTES))
        return [tuple(instance_ids[i : i + step]) for i in range(0, len(instance_ids), step)]

    async def _send_pending(self) -> None:
        sends, self._pending = self._pending, []
        for number, send in enumerate(sends, 1):
            try:
                self._publish_to(send.worker, send.verb)
            except ConfigError as exc:
                self.gather.on_unaddressable(send.worker, str(exc))
                self._tell_outcomes()
            except BrokenError:
                # Disconnected between decision and publish: the gather is told, and sends again after the reconnect.
                return
            if number % NUM_PUBLISHES_PER_TURN == 0:
                await asyncio.sleep(0)

    def _publish_to(self, worker: WorkerId, verb: Verb) -> None:
        component, instance_id = split_worker_id(worker)
        route, data = self._route, self._unicast
        if verb is not Verb.COMMAND:
            # Fresh dates: both come when the command itself may have expired.
            expires_at = max(self._expires_at, self._bus.clock.now() + self._limits.ack_s)
            ask = GetOutcome(of_op_id=self._op_id)
            is_ask = verb is Verb.ASK
            route = route_of(ask) if is_ask else route
            data = encode(
                Command(
                    op_id=self._ask_id if is_ask else self._op_id,
                    term=self._term,
                    expires_at=expires_at,
                    body=ask if is_ask else self._body,
                )
            )
        subject = subjects.command_to(self._namespace, component, route, instance_id)
        self._bus.transport.publish(subject, data, f"{self._inbox.reply}.{verb.value}-{component}-{instance_id}")

    def _command(self, members: tuple[InstanceId, ...] | None) -> Command:
        return Command(
            op_id=self._op_id, term=self._term, expires_at=self._expires_at, body=self._body, members=members
        )

    def _on_reply(self, message: Message, tail: str) -> None:
        if message.no_responders:
            self._on_nobody(tail)
            return
        try:
            answer: WorkerAnswer = decode(message.data, WorkerAnswer, message.subject)
        except DecodeError as exc:
            self._bus.count_bad(exc)
            return
        counts, actions = self.gather.on_answer(answer, self._loop.time())
        if not counts or self._on_answer is None:
            self._take(actions)
            return
        try:
            self._on_answer(who(answer), answer)
        finally:
            self._take(actions)

    def _on_nobody(self, tail: str) -> None:
        """503: `tail` is the last token of the reply address, which says what had been sent to whom."""
        verb, _, rest = tail.partition("-")
        if verb == "all":
            self._take(self.gather.on_nobody_of(list(self._members)[int(rest)]))
        elif verb == Verb.COMMAND.value:
            component, _, instance_id = rest.rpartition("-")
            self._take(self.gather.on_nobody(worker_id(component, instance_id), self._loop.time()))

    def on_lost(self, worker: WorkerId, reason: str) -> None:
        self.gather.on_lost(worker, reason)
        self._take([])

    def on_connection(self, is_connected: bool) -> None:
        if is_connected:
            self._take(self.gather.on_reconnected(self._loop.time()))
        else:
            self.gather.on_disconnected()

    def _on_closed(self) -> None:
        self._error = ClosedError("bus")
        self._wake.set()

    def _take(self, actions: list[Send]) -> None:
        """After each event: what is to be sent waits for `run`, which is woken only if it has something to do."""
        self._pending.extend(actions)
        self._tell_outcomes()
        gather = self.gather
        if self._pending or not gather.num_open or gather.wake_s < self._sleeps_until_s:
            self._wake.set()

    def _tell_outcomes(self) -> None:
        if self._on_outcome is not None:
            for gathered in self.gather.take_ended():
                self._on_outcome(gathered)
