"""A command that was refused once isn't done when a second copy of it comes."""

import asyncio

import pytest

from rlbus.schemas import (
    AbortRequest,
    Command,
    CommandBody,
    Fault,
    FaultCode,
    FlushCache,
    InitGroup,
    PauseGeneration,
    PrepareWeightsUpdate,
    PutManifest,
    ResultStatus,
    Sleep,
    Version,
    route_of,
)
from rlbus.transfer.manifest import digest, pages
from rlbus.workers.agent import Agent
from rlbus.workers.beside import MAX_SIDE_TASKS
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from rlbus.workers.engines.fake_script import Step
from rlbus.workers.journal import MAX_REPLIES
from rlbus.workers.refusals import Refusals
from rlbus.workers.testing import COMPONENT, INSTANCE_ID, NAMESPACE, PAGE_BYTES, Rig, code_of, on_worker

pytestmark = pytest.mark.unit

V1 = Version(step=1)
BUSY = Fault(code=FaultCode.BUSY, message="m", retryable=True)


def command(op_id: str = "op", expires_at: float = 10.0, body: CommandBody | None = None) -> Command:
    """One as it may be sent twice."""
    return Command(op_id=op_id, term=1, expires_at=expires_at, body=FlushCache() if body is None else body)


def test_a_second_copy_of_a_refused_command_is_refused_though_it_could_be_done_by_then() -> None:
    """Whoever asked was told that nothing happened, and goes on from there. Another op may do it."""

    async def scenario(rig: Rig) -> None:
        await rig.send(InitGroup(plan=rig.plan(1)))
        await rig.prepare(V1, DEFAULT_TENSORS)
        first = await rig.receive(V1, DEFAULT_TENSORS, epoch=1).result()
        await rig.send(PauseGeneration())
        again = await rig.receive(V1, DEFAULT_TENSORS, epoch=1).result()
        assert (first.status, again.status, again.fault) == (ResultStatus.REFUSED, ResultStatus.REFUSED, first.fault)
        assert "receive_weights" not in rig.engine.calls

    on_worker(scenario)


def test_a_late_copy_of_a_command_that_found_the_worker_busy_is_refused_as_the_first_was() -> None:
    """It is free by then, and nobody would wake it. The same op, asked for again at another time, is done; who asks for
    that then, by whatever copy, hears so.
    """

    async def scenario(rig: Rig) -> None:
        running = rig.post(FlushCache())
        await running.until(lambda sent: sent.is_accepted)
        until = rig.bus.clock.now() + 30.0
        first = await rig.send(Sleep(), op_id="s")
        assert code_of(first) is FaultCode.BUSY
        await running.result()
        await asyncio.sleep(1.0)
        late = await rig.send(Sleep(), op_id="s", expires_in_s=until - rig.bus.clock.now())
        assert (late.status, late.fault) == (ResultStatus.REFUSED, first.fault)
        assert not rig.engine.memory.asleep
        assert (await rig.send(Sleep(), op_id="s", expires_in_s=30.0)).status is ResultStatus.OK
        late = await rig.send(Sleep(), op_id="s", expires_in_s=until - rig.bus.clock.now())
        assert late.status is ResultStatus.OK

    on_worker(scenario, {"flush_cache": {1: Step(latency_s=1.0)}})


def test_a_late_copy_of_a_prepare_that_lacked_its_manifest_is_refused_as_the_first_was() -> None:
    """The pages are there by then, and the repeat is another op."""

    async def scenario(rig: Rig) -> None:
        body = PrepareWeightsUpdate(version=V1, manifest_digest=digest(DEFAULT_TENSORS))
        until = rig.bus.clock.now() + 30.0
        assert code_of(await rig.send(body, op_id="p")) is FaultCode.MANIFEST_UNKNOWN
        for page in pages(DEFAULT_TENSORS, PAGE_BYTES):
            await rig.send(PutManifest(page=page))
        await asyncio.sleep(1.0)
        late = await rig.send(body, op_id="p", expires_in_s=until - rig.bus.clock.now())
        assert code_of(late) is FaultCode.MANIFEST_UNKNOWN
        assert rig.agent.state.prepared is None
        assert (await rig.send(body, op_id="p-again")).status is ResultStatus.OK

    on_worker(scenario)


def test_a_late_copy_of_an_abort_of_requests_is_refused_as_the_first_was() -> None:
    """It is no mutation, and changes as much."""

    async def scenario(rig: Rig) -> None:
        until = rig.bus.clock.now() + 30.0
        many = [rig.post(AbortRequest()) for _ in range(MAX_SIDE_TASKS)]
        assert code_of(await rig.send(AbortRequest(), op_id="a")) is FaultCode.BUSY
        for sent in many:
            await sent.result()
        late = await rig.send(AbortRequest(), op_id="a", expires_in_s=until - rig.bus.clock.now())
        assert code_of(late) is FaultCode.BUSY
        assert rig.engine.calls.count("abort") == MAX_SIDE_TASKS

    on_worker(scenario, {"abort": {0: Step(latency_s=1.0)}})


def test_one_too_many_who_joins_an_op_does_not_make_it_a_refused_one() -> None:
    """It runs, and whoever asks later gets what became of it."""

    async def scenario(rig: Rig) -> None:
        until = rig.bus.clock.now() + 30.0
        sent = [rig.post(FlushCache(), op_id="f") for _ in range(MAX_REPLIES + 1)]
        assert code_of(await sent[-1].result()) is FaultCode.BUSY
        assert (await sent[0].result()).status is ResultStatus.OK
        late = rig.post(FlushCache(), op_id="f", expires_in_s=until - rig.bus.clock.now())
        assert (await late.result()).status is ResultStatus.OK

    on_worker(scenario, {"flush_cache": {1: Step(latency_s=1.0)}})


def test_the_agent_that_follows_in_the_same_process_refuses_the_copy_too() -> None:
    """Its sender may have heard the first one's refusal."""

    async def scenario(rig: Rig) -> None:
        refused = command(expires_at=rig.bus.clock.now() + 30.0)
        rig.agent.refusals.note(refused, BUSY)
        heir = Agent(
            rig.engine,
            rig.worker_bus,
            namespace=NAMESPACE,
            component=COMPONENT,
            instance_id=INSTANCE_ID,
            before=rig.agent,
        )
        heir.take(refused, None, route_of(FlushCache()))
        await asyncio.sleep(1.0)
        assert "flush_cache" not in rig.engine.calls

    on_worker(scenario)


def test_a_message_that_was_wrong_in_itself_says_nothing_of_the_op() -> None:
    """Another one under the same op_id may be right."""
    refusals = Refusals()
    refusals.note(command(), Fault(code=FaultCode.EXPIRED, message="m"))
    assert refusals.find(command()) is None


def test_what_asks_for_a_repeat_holds_for_copies_of_that_command_alone() -> None:
    """One of another date is a new try, whose own copies are refused with it; what is refused for good stays so."""
    refusals = Refusals()
    refusals.note(command(expires_at=10.0), BUSY)
    assert refusals.find(command(expires_at=10.0)) == BUSY
    assert refusals.find(command(expires_at=11.0)) is None
    assert refusals.find(command(body=PauseGeneration())) is None
    refusals.note(command(expires_at=11.0), BUSY)
    assert [refusals.find(command(expires_at=at)) for at in (10.0, 11.0)] == [BUSY, BUSY]
    never = Fault(code=FaultCode.WRONG_STATE, message="m")
    refusals.note(command(expires_at=12.0), never)
    assert refusals.find(command(expires_at=13.0)) == never


def test_refused_aborts_of_requests_never_push_out_a_mutations_refusal() -> None:
    """There may be one for each request."""
    refusals, never = Refusals(max_kept=2), Fault(code=FaultCode.WRONG_STATE, message="m")
    refusals.note(command("mutation"), never)
    for number in range(3):
        refusals.note(command(f"op-{number}", body=AbortRequest()), never)
    assert refusals.find(command("mutation")) == never
    assert [refusals.find(command(f"op-{n}", body=AbortRequest())) is None for n in range(3)] == [True, False, False]


def test_only_the_last_ones_are_remembered() -> None:
    """The memory is bounded."""
    refusals = Refusals(max_kept=2)
    for number in range(3):
        refusals.note(command(f"op-{number}"), Fault(code=FaultCode.WRONG_STATE, message="m"))
    assert [refusals.find(command(f"op-{number}")) is None for number in range(3)] == [True, False, False]
