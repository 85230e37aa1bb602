"""What a caller of this process gets from the agent: the rules of the bus, and a result as a value."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rlbus.errors import ClosedError
from rlbus.schemas import (
    FaultCode,
    FlushCache,
    GetVersion,
    InitTransfer,
    LoadWeights,
    PauseGeneration,
    PauseMode,
    RenewLease,
    Result,
    ResultStatus,
    ResumeGeneration,
    Version,
    WeightsData,
)
from rlbus.workers.engines.fake_script import Step
from rlbus.workers.entrance import MAX_JOIN_S, MAX_LIMIT_S
from rlbus.workers.journal import MAX_REPLIES
from rlbus.workers.testing import Rig, code_of, on_worker

pytestmark = pytest.mark.unit


def test_a_pause_by_a_local_caller_has_its_owner_and_its_lease_and_ends_by_itself() -> None:
    """No worker stays paused because whoever paused it is gone."""

    async def scenario(rig: Rig) -> None:
        result = await rig.agent.entrance.submit(PauseGeneration(), caller="http:me", lease_s=10.0, limit_s=5.0)
        assert result.status is ResultStatus.OK
        pause = rig.agent.state.pause
        assert pause is not None
        assert pause.owner == "http:me"
        assert pause.expires_at == pytest.approx(rig.worker_bus.clock.now() + 10.0, abs=1.0)
        renewed = await rig.agent.entrance.submit(RenewLease(owner="x"), caller="http:me", lease_s=20.0, limit_s=5.0)
        assert renewed.status is ResultStatus.OK
        await asyncio.sleep(15.0)
        assert rig.agent.state.pause is not None
        await asyncio.sleep(10.0)
        assert rig.agent.state.pause is None

    on_worker(scenario)


def test_the_same_op_id_joins_whether_it_came_by_bus_or_not() -> None:
    """One engine call, one result for all who ask."""

    async def scenario(rig: Rig) -> None:
        sent = rig.post(FlushCache(), op_id="one")
        await sent.until(lambda s: s.is_accepted)
        joined = rig.agent.entrance.submit(FlushCache(), caller="a", op_id="one", limit_s=5.0)
        again = rig.agent.entrance.submit(FlushCache(), caller="b", op_id="one", limit_s=5.0)
        results = await asyncio.gather(joined, again)
        assert {r.status for r in (*results, await sent.result())} == {ResultStatus.OK}
        assert rig.engine.calls.count("flush_cache") == 1
        later = await rig.agent.entrance.submit(FlushCache(), caller="c", op_id="one", limit_s=5.0)
        assert later == results[0]

    on_worker(scenario, {"flush_cache": {0: Step(latency_s=1.0)}})


def test_another_mutation_meanwhile_is_busy_and_names_the_op() -> None:
    """Rule 2, for callers of either side."""

    async def scenario(rig: Rig) -> None:
        first = asyncio.create_task(rig.agent.entrance.submit(FlushCache(), caller="a", op_id="slow", limit_s=5.0))
        await asyncio.sleep(0.1)
        second = await rig.agent.entrance.submit(PauseGeneration(), caller="b", limit_s=5.0)
        assert code_of(second) is FaultCode.BUSY
        assert second.fault is not None
        assert second.fault.detail["op_id"] == "slow"
        assert code_of(await rig.send(PauseGeneration())) is FaultCode.BUSY
        assert (await first).status is ResultStatus.OK

    on_worker(scenario, {"flush_cache": {0: Step(latency_s=1.0)}})


def test_a_query_is_answered_beside_a_mutation() -> None:
    """Status never waits."""

    async def scenario(rig: Rig) -> None:
        slow = asyncio.create_task(rig.agent.entrance.submit(FlushCache(), caller="a", limit_s=5.0))
        await asyncio.sleep(0.1)
        result = await rig.agent.entrance.submit(GetVersion(), caller="b", limit_s=5.0)
        assert isinstance(result.data, WeightsData)
        assert not slow.done()
        await slow

    on_worker(scenario, {"flush_cache": {0: Step(latency_s=1.0)}})


def test_a_caller_that_goes_away_leaves_its_op_running_and_its_outcome_behind() -> None:
    """Like a sender on the bus that no longer listens."""

    async def scenario(rig: Rig) -> None:
        gone = asyncio.create_task(rig.agent.entrance.submit(FlushCache(), caller="a", op_id="left", limit_s=5.0))
        await asyncio.sleep(0.1)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert rig.agent.answers.num_listeners == 0
        assert rig.agent.state.running is not None
        again = await rig.agent.entrance.submit(FlushCache(), caller="a", op_id="left", limit_s=5.0)
        assert again.status is ResultStatus.OK
        assert rig.engine.calls.count("flush_cache") == 1

    on_worker(scenario, {"flush_cache": {0: Step(latency_s=1.0)}})


def test_an_op_that_takes_too_long_ends_at_its_limit() -> None:
    """Every operation ends."""

    async def scenario(rig: Rig) -> None:
        result = await rig.agent.entrance.submit(FlushCache(), caller="a", limit_s=2.0)
        assert code_of(result) is FaultCode.DEADLINE

    on_worker(scenario, {"flush_cache": {0: Step(latency_s=60.0)}})


@pytest.mark.parametrize("op_id", ["", "a b", "x" * 65, "a.b"])
def test_an_op_id_that_is_no_token_is_refused(op_id: str) -> None:
    """The decoder of the bus decides here, too."""

    async def scenario(rig: Rig) -> None:
        result = await rig.agent.entrance.submit(FlushCache(), caller="a", op_id=op_id, limit_s=2.0)
        assert code_of(result) is FaultCode.BAD_MESSAGE
        assert result.status is ResultStatus.REFUSED
        assert rig.agent.status().num_refused_messages == 1

    on_worker(scenario)


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("inf"), float("nan"), 86_401.0])
def test_a_limit_that_is_none_is_refused(limit_s: float) -> None:
    """Nothing waits without a deadline."""

    async def scenario(rig: Rig) -> None:
        result = await rig.agent.entrance.submit(FlushCache(), caller="a", limit_s=limit_s)
        assert code_of(result) is FaultCode.BAD_MESSAGE

    on_worker(scenario)


def test_a_load_needs_a_pause_as_on_the_bus() -> None:
    """All callers go through the agent's rules."""

    async def scenario(rig: Rig) -> None:
        body = LoadWeights(path="/nowhere", version=Version(step=1))
        result = await rig.agent.entrance.submit(body, caller="a", limit_s=2.0)
        assert code_of(result) is FaultCode.WRONG_STATE

    on_worker(scenario)


def test_a_local_caller_speaks_in_the_term_of_the_controller_that_was_heard_last() -> None:
    """It takes the lead from nobody, and isn't shut out by anybody."""

    async def scenario(rig: Rig) -> None:
        await rig.send(PauseGeneration(), term=7)
        result = await rig.agent.entrance.submit(ResumeGeneration(), caller="a", limit_s=2.0)
        assert result.status is ResultStatus.OK
        assert rig.agent.state.term == 7
        assert (await rig.send(PauseGeneration(mode=PauseMode.KEEP), term=7)).status is ResultStatus.OK

    on_worker(scenario)


def test_as_many_callers_wait_for_one_op_as_an_op_has_addresses() -> None:
    """Waiting is bounded; the others are told so at once."""

    async def scenario(rig: Rig) -> None:
        def ask() -> Coroutine[Any, Any, Result]:
            return rig.agent.entrance.submit(FlushCache(), caller="a", op_id="slow", limit_s=5.0)

        results = await asyncio.gather(*(ask() for _ in range(MAX_REPLIES + 4)))
        assert [code_of(r) for r in results].count(FaultCode.BUSY) == 4

    on_worker(scenario, {"flush_cache": {0: Step(latency_s=1.0)}})


def test_nobody_waits_for_an_agent_that_has_ended() -> None:
    """A stop refuses new requests, and settles those that wait."""

    async def scenario(rig: Rig) -> None:
        waiting = asyncio.create_task(rig.agent.entrance.submit(FlushCache(), caller="a", limit_s=100.0))
        await asyncio.sleep(0.1)
        rig.agent.stop()
        await asyncio.sleep(0.1)
        with pytest.raises(ClosedError):
            await rig.agent.entrance.submit(FlushCache(), caller="b", limit_s=1.0)
        result: Result = await waiting
        assert code_of(result) is FaultCode.CANCELLED

    on_worker(scenario, {"flush_cache": {0: Step(latency_s=60.0)}})


def test_who_waits_for_an_agent_that_ends_without_a_result_is_told_so() -> None:
    """Before it runs nothing is taken, and afterwards nobody makes results any more."""

    async def scenario(rig: Rig) -> None:
        entrance = rig.agent.entrance
        waiting = asyncio.create_task(entrance.submit(FlushCache(), caller="a", limit_s=100.0))
        await asyncio.sleep(0.1)
        entrance.abandon()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await entrance.submit(GetVersion(), caller="a", limit_s=1.0)

    on_worker(scenario, {"flush_cache": {0: Step(latency_s=5.0)}})


def test_a_group_that_nobody_joins_holds_the_place_for_a_short_time_only() -> None:
    """Audit of issue 4, 16: whatever the caller allows; then the next op has its turn."""

    async def scenario(rig: Rig) -> None:
        entrance, loop = rig.agent.entrance, asyncio.get_running_loop()
        began_s = loop.time()
        result = await entrance.submit(InitTransfer(info="{}"), caller="http:me", limit_s=MAX_LIMIT_S)
        assert code_of(result) is FaultCode.DEADLINE
        assert MAX_JOIN_S <= loop.time() - began_s < MAX_JOIN_S + 60.0
        assert (await entrance.submit(PauseGeneration(), caller="b", limit_s=5.0)).status is ResultStatus.OK

    on_worker(scenario, {"init_native": {0: Step(hangs=True)}})


def test_a_caller_that_is_called_as_an_ops_pause_holds_nothing() -> None:
    """Audit of issue 4, 18: an update would take its hold for a pause of its own, and end it."""

    async def scenario(rig: Rig) -> None:
        result = await rig.agent.entrance.submit(PauseGeneration(), caller="http:eval-pause", limit_s=5.0)
        assert code_of(result) is FaultCode.BAD_MESSAGE
        assert rig.agent.state.pause is None

    on_worker(scenario)
