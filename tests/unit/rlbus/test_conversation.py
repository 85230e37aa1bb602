"""One request to the controller: the limits of silence as a table, and short requests."""

import asyncio
from typing import Any

import msgspec
import pytest

from rlbus import subjects
from rlbus._conversation import Patience, _Wait, ask, check_finite, converse, op_name, take_back
from rlbus._transport import Message
from rlbus.bus import DEFAULT_MAX_QUEUED, Bus
from rlbus.errors import BrokenError, BusyError, ConfigError, DeadlineError, RLBusError, UnansweredError
from rlbus.schemas import (
    CancelOp,
    ControlRequest,
    Fault,
    FaultCode,
    FleetView,
    GetFleet,
    HistoryView,
    OpAccepted,
    OpProgress,
    OpResult,
    OpStatus,
    PauseFleet,
    Refusal,
    Report,
)
from rlbus.testing import LoopClock, MemoryBroker, run

pytestmark = pytest.mark.unit

SILENCE = DeadlineError("reply", 5.0)
NOBODY = BrokenError("subject", "nobody listens")
REQUEST = PauseFleet(op_id="o", deadline_s=100.0)
REPORT = Report(op_id="o", op="pause", status=OpStatus.OK, outcomes=(), phases_s={}, took_s=0.0)


@pytest.mark.parametrize(
    ("awaits", "heard_at", "error", "now", "ends_as"),
    [
        (False, None, NOBODY, 0.0, BrokenError),  # nobody there: at once
        (True, None, NOBODY, 50.0, None),  # whoever waits for the controller goes on
        (True, None, NOBODY, 100.0, BrokenError),  # until the deadline
        (False, None, SILENCE, 14.9, None),
        (False, None, SILENCE, 15.0, UnansweredError),  # no first answer
        (True, None, SILENCE, 99.0, None),
        (True, None, SILENCE, 100.0, UnansweredError),
        (False, 10.0, SILENCE, 39.9, None),
        (False, 10.0, NOBODY, 39.9, None),  # a controller that was heard may be restarting
        (False, 10.0, NOBODY, 40.0, BrokenError),  # lost
        (False, 194.0, SILENCE, 194.9, None),  # it undoes what was begun
        (False, 194.0, SILENCE, 195.0, DeadlineError),  # deadline and grace are over
    ],
)
def test_each_silence_ends_or_is_borne(
    awaits: bool, heard_at: float | None, error: DeadlineError | BrokenError, now: float, ends_as: type[RLBusError]
) -> None:
    """One row of the table: deadline 100 s, begun at 0 s."""

    async def body() -> RLBusError | None:
        async with Bus(MemoryBroker().connect(), clock=LoopClock()) as bus:
            wait = _Wait(bus, "n", REQUEST, Patience(awaits_controller=awaits), started=0.0, heard_at=heard_at)
            return wait.give_up(error, now)

    end = run(body())
    assert end is None if ends_as is None else type(end) is ends_as


@pytest.mark.parametrize(("now", "ends_as"), [(0.0, None), (7.9, None), (8.0, BrokenError)])
def test_a_program_that_outlives_a_controller_bears_that_nobody_listens_for_a_while(
    now: float, ends_as: type[RLBusError] | None
) -> None:
    """Until a standby has taken over; begun at 0 s, with 8 s of that patience."""

    async def body() -> RLBusError | None:
        async with Bus(MemoryBroker().connect(), clock=LoopClock()) as bus:
            return _Wait(bus, "n", REQUEST, Patience(nobody_s=8.0), started=0.0).give_up(NOBODY, now)

    end = run(body())
    assert end is None if ends_as is None else type(end) is ends_as


def test_the_first_silences_are_short_and_grow_until_the_controller_has_spoken() -> None:
    """One that doesn't lead says nothing, and the next one is soon there; one that has spoken is given its time."""

    async def body() -> list[float]:
        async with Bus(MemoryBroker().connect(), clock=LoopClock()) as bus:
            wait = _Wait(bus, "n", REQUEST, Patience(), started=0.0)
            limits_s = [wait.limit_s(0.0) for _ in range(5)]
            wait.heard_at = 1.0
            return [*limits_s, wait.limit_s(1.0), wait.limit_s(194.0)]

    assert run(body()) == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 1.0]


@pytest.mark.parametrize("awaits", [False, True])
def test_no_silence_before_the_first_reply_is_longer_than_what_is_left(awaits: bool) -> None:
    """Of the deadline, or of what a first answer may take; an op that has begun has its grace."""

    async def body() -> list[float]:
        async with Bus(MemoryBroker().connect(), clock=LoopClock()) as bus:
            patience = Patience(first_answer_s=4.0, retry_s=3.0, awaits_controller=awaits)
            wait = _Wait(bus, "n", msgspec.structs.replace(REQUEST, deadline_s=8.0), patience, started=0.0)
            waits = [wait.limit_s(0.0), wait.limit_s(1.0), wait.limit_s(3.0), wait.retry_s(3.5)]
            wait.heard_at = 3.0
            return [*waits, wait.limit_s(7.0), wait.retry_s(7.9)]

    assert run(body()) == ([1.0, 2.0, 4.0, 3.0, 5.0, 3.0] if awaits else [1.0, 2.0, 1.0, 0.5, 5.0, 3.0])


def test_a_disconnect_is_not_taken_for_a_missing_controller() -> None:
    """While our own connection is down nobody can be heard; that is borne like silence."""

    async def body() -> RLBusError | None:
        broker = MemoryBroker()
        transport = broker.connect()
        async with Bus(transport, clock=LoopClock()) as bus:
            broker.disconnect(transport)
            return _Wait(bus, "n", REQUEST, Patience(), started=0.0).give_up(BrokenError("bus", "not connected"), 1.0)

    assert run(body()) is None


@pytest.mark.parametrize(("gone_s", "ends_as"), [(28.0, OpResult), (31.0, BrokenError)])
def test_an_outage_of_our_own_is_not_held_against_the_controller(gone_s: float, ends_as: type[object]) -> None:
    """Who is back before it gives up gives the controller its whole time again: here it speaks 8 s later."""

    async def body() -> OpResult | FleetView | HistoryView | RLBusError:
        broker = MemoryBroker()
        transport = broker.connect()
        async with Bus(transport, clock=LoopClock()) as ours, Bus(broker.connect(), clock=LoopClock()) as theirs:
            loop = asyncio.get_running_loop()

            def on_request(request: ControlRequest, message: Message) -> None:
                assert message.reply is not None
                if loop.time() < 1.0:
                    theirs.publish(message.reply, OpAccepted(op_id=request.op_id))
                elif loop.time() > gone_s + 8.0:
                    theirs.publish(message.reply, OpResult(report=REPORT))

            theirs.subscribe(subjects.all_control("n"), ControlRequest, on_request)
            talking = asyncio.create_task(converse(ours, "n", REQUEST, on_reply=lambda _: None))
            await asyncio.sleep(0.5)
            broker.disconnect(transport)
            await asyncio.sleep(gone_s)
            broker.reconnect(transport)
            try:
                return await talking
            except RLBusError as exc:
                return exc

    assert type(run(body())) is ends_as


def test_a_repeat_is_the_same_request_unless_the_controller_was_awaited() -> None:
    """The controller refuses an op_id with another request; a wait keeps its own end whenever it is heard first."""

    async def body() -> list[float]:
        async with Bus(MemoryBroker().connect(), clock=LoopClock()) as bus:
            plain = _Wait(bus, "n", REQUEST, Patience(), started=0.0)
            awaiting = _Wait(bus, "n", REQUEST, Patience(awaits_controller=True), started=0.0)
            requests = [plain.request_at(60.0), awaiting.request_at(60.0), awaiting.request_at(200.0)]
            return [request.deadline_s for request in requests]

    assert run(body()) == [100.0, 40.0, 0.1]


def test_short_requests_are_answered_or_refused() -> None:
    """`ask` returns on OpAccepted, raises the class of a refusal; `take_back` swallows both."""
    seen: list[ControlRequest] = []

    async def body() -> None:
        broker = MemoryBroker()
        async with Bus(broker.connect(), clock=LoopClock()) as ours, Bus(broker.connect(), clock=LoopClock()) as theirs:

            def on_request(request: ControlRequest, message: Message) -> None:
                seen.append(request)
                assert message.reply is not None
                fault = Fault(code=FaultCode.BUSY, message="no")
                refusal = Refusal(op_id=request.op_id, fault=fault)
                theirs.publish(message.reply, OpAccepted(op_id=request.op_id) if len(seen) == 1 else refusal)

            theirs.subscribe(subjects.all_control("n"), ControlRequest, on_request)
            await ask(ours, "n", CancelOp(op_id="c1", of_op_id="o"), limit_s=1.0)
            with pytest.raises(BusyError):
                await ask(ours, "n", CancelOp(op_id="c2", of_op_id="o"), limit_s=1.0)
            await take_back(ours, "n", "o", "me")
            await take_back(ours, "nobody", "o", "me")
        assert isinstance(seen[2], CancelOp)
        assert (seen[2].of_op_id, seen[2].caller) == ("o", "me")
        assert len(seen) == 3

    run(body())


def test_taking_back_is_bounded_when_nobody_answers() -> None:
    """The caller is leaving; it must not hang on a controller that is silent."""

    async def body() -> float:
        broker = MemoryBroker()
        async with Bus(broker.connect(), clock=LoopClock()) as ours, Bus(broker.connect(), clock=LoopClock()) as theirs:
            theirs.subscribe(subjects.all_control("n"), ControlRequest, lambda _request, _message: None)
            await take_back(ours, "n", "o", "me")
            return asyncio.get_running_loop().time()

    assert run(body()) == pytest.approx(5.0)


def test_a_flood_of_replies_breaks_the_stream_and_not_the_conversation() -> None:
    """More than a stream holds come at once, the last one after them is lost: the request is repeated, and joins."""
    asked: list[str] = []
    told: list[int] = []

    async def body() -> OpResult | FleetView | HistoryView:
        broker = MemoryBroker()
        async with Bus(broker.connect(), clock=LoopClock()) as ours, Bus(broker.connect(), clock=LoopClock()) as theirs:

            def on_request(request: ControlRequest, message: Message) -> None:
                asked.append(request.op_id)
                assert message.reply is not None
                for done in range(DEFAULT_MAX_QUEUED + 100 if len(asked) == 1 else 1):
                    theirs.publish(message.reply, OpProgress(op_id=request.op_id, phase="pause", done=done))
                theirs.publish(message.reply, OpResult(report=REPORT))

            theirs.subscribe(subjects.all_control("n"), ControlRequest, on_request)
            return await converse(
                ours, "n", REQUEST, on_reply=lambda r: told.append(r.done) if isinstance(r, OpProgress) else None
            )

    assert run(body()) == OpResult(report=REPORT)
    assert asked == [REQUEST.op_id] * 2
    assert told == [*range(DEFAULT_MAX_QUEUED), 0]


def test_an_op_is_named_as_its_subject() -> None:
    """The tag of the request is the token."""
    assert (op_name(REQUEST), op_name(GetFleet(op_id="o"))) == ("pause", "status")


@pytest.mark.parametrize(
    ("name", "value"), [("deadline_s", "5"), ("deadline_s", None), ("lease_s", "60"), ("deadline_s", True)]
)
def test_seconds_that_are_no_number_are_refused_before_they_are_sent(name: str, value: Any) -> None:
    """The controller couldn't read the message. No lease at all is a hold."""

    async def body() -> None:
        async with Bus(MemoryBroker().connect(), clock=LoopClock()) as bus:
            request = msgspec.structs.replace(REQUEST, **{name: value})
            with pytest.raises(ConfigError, match=rf"^{name}.*: use a number of seconds"):
                await converse(bus, "test", request, on_reply=lambda _: None)

    run(body())
    check_finite("lease_s", None)
    check_finite("deadline_s", 5)
