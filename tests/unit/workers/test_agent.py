"""The agent on a bus in memory: commands, refusals, queries, announcements, the end."""

import asyncio
import json
from typing import Any

import pytest

from rlbus import subjects
from rlbus.codec import MAX_MESSAGE_BYTES
from rlbus.schemas import (
    AbortedData,
    AbortRequest,
    Accepted,
    CommandRefused,
    FaultCode,
    FlushCache,
    Generation,
    GenerationPaused,
    GetOutcome,
    GetStatus,
    GetVersion,
    Goodbye,
    Hello,
    OutcomeData,
    PausedData,
    PauseGeneration,
    PauseMode,
    PrepareWeightsUpdate,
    Result,
    ResultStatus,
    ResumeGeneration,
    StatusData,
    TensorSpec,
    Version,
    WeightsData,
)
from rlbus.testing import Faults, MemoryTransport, run
from rlbus.workers.engines.fake import DEFAULT_TENSORS, FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.testing import (
    COMPONENT,
    INSTANCE_ID,
    NAMESPACE,
    Rig,
    Sent,
    code_of,
    on_worker,
    worker_on_bus,
)

pytestmark = pytest.mark.unit

V1, V2, V3 = Version(step=1), Version(step=2), Version(step=3)
PROMPT = (1, 2, 3)


def test_pause_is_accepted_then_ends_with_one_result() -> None:
    """A mutation answers accepted at once and one result with the engine's data."""

    async def scenario(rig: Rig) -> None:
        sent = rig.post(PauseGeneration(mode=PauseMode.KEEP), op_id="p1")
        result = await sent.result()
        assert [type(a) for a in sent.answers] == [Accepted, Result]
        assert (result.status, result.data) == (ResultStatus.OK, PausedData(num_aborted=0, num_held=0))
        assert (result.op_id, result.component, result.instance_id) == ("p1", COMPONENT, INSTANCE_ID)
        assert result.boot_id == rig.agent.boot_id
        pause = rig.agent.state.pause
        assert pause is not None
        assert (pause.owner, pause.mode) == ("p1", "keep")

    on_worker(scenario)


def test_queries_and_aborts_are_answered_during_a_mutation() -> None:
    """Status, outcome, version, hello and abort don't wait for what runs."""

    async def scenario(rig: Rig) -> None:
        rig.engine.submit("r1", PROMPT, 10_000)
        slow = rig.post(FlushCache(), op_id="slow")
        await slow.until(lambda s: s.is_accepted)
        began_s = asyncio.get_running_loop().time()
        status = (await rig.send(GetStatus())).data
        assert isinstance(status, StatusData)
        assert (status.status.op_id, status.status.generation) == ("slow", Generation.RUNNING)
        outcome = (await rig.send(GetOutcome(of_op_id="slow"))).data
        assert outcome == OutcomeData(of_op_id="slow", running=True)
        assert isinstance((await rig.send(GetVersion())).data, WeightsData)
        assert isinstance((await rig.send(Hello())).data, StatusData)
        assert (await rig.send(AbortRequest())).data == AbortedData(num_aborted=1)
        assert asyncio.get_running_loop().time() - began_s < 0.1
        assert slow.results == []

    on_worker(scenario, {"flush_cache": {1: Step(latency_s=50.0)}})


def test_repeat_of_an_ended_op_gets_its_recorded_result() -> None:
    """Also late, also from an older term: "refused" would say that nothing had changed."""

    async def scenario(rig: Rig) -> None:
        first = await rig.send(FlushCache(), op_id="f", term=3)
        again = await rig.send(FlushCache(), op_id="f", term=1, expires_in_s=-5.0)
        assert again == first
        assert rig.engine.calls.count("flush_cache") == 1
        outcome = (await rig.send(GetOutcome(of_op_id="f"), term=3)).data
        assert outcome == OutcomeData(of_op_id="f", running=False, status=ResultStatus.OK)

    on_worker(scenario)


def test_same_op_id_for_another_command_is_a_bad_message() -> None:
    """An op_id names one command."""

    async def scenario(rig: Rig) -> None:
        await rig.send(FlushCache(), op_id="f")
        assert code_of(await rig.send(PauseGeneration(), op_id="f")) is FaultCode.BAD_MESSAGE
        assert "pause" not in rig.engine.calls

    on_worker(scenario)


def test_outcome_of_an_unheard_op_is_unknown() -> None:
    """A refused op changed nothing and has no record either."""

    async def scenario(rig: Rig) -> None:
        assert code_of(await rig.send(GetOutcome(of_op_id="never"))) is FaultCode.UNKNOWN_OP
        await rig.send(ResumeGeneration(), op_id="late", expires_in_s=-1.0)
        assert code_of(await rig.send(GetOutcome(of_op_id="late"))) is FaultCode.UNKNOWN_OP

    on_worker(scenario)


def test_stale_and_foreign_commands_change_nothing() -> None:
    """Expired, of an old term, for others, on the wrong subject: refused before any engine call."""

    async def scenario(rig: Rig) -> None:
        await rig.send(FlushCache(), term=5)
        assert code_of(await rig.send(PauseGeneration(), term=4)) is FaultCode.STALE_TERM
        assert code_of(await rig.send(PauseGeneration(), term=5, expires_in_s=-0.001)) is FaultCode.EXPIRED
        assert code_of(await rig.send(PauseGeneration(), term=5, members=("8",))) is FaultCode.NOT_A_MEMBER
        wrong = await rig.send(PauseGeneration(), term=5, route="flush_cache")
        assert code_of(wrong) is FaultCode.BAD_MESSAGE
        assert [c for c in rig.engine.calls if c not in ("start", "observe")] == ["flush_cache"]

    on_worker(scenario)


def test_a_result_tells_how_many_announcements_came_before_it() -> None:
    """So that one of those that is read later doesn't count as newer."""

    async def scenario(rig: Rig) -> None:
        assert (await rig.send(GetVersion())).seq == 1
        await rig.send(Hello())
        await asyncio.sleep(1.0)
        assert (await rig.send(GetVersion())).seq == 2

    on_worker(scenario)


def test_broadcast_to_others_is_not_answered() -> None:
    """Who isn't on the member list stays silent: the sender doesn't count it, and a fleet would answer as one."""

    async def scenario(rig: Rig) -> None:
        others = rig.post(PauseGeneration(), members=("8", "9"), is_broadcast=True)
        mine = rig.post(PauseGeneration(), members=("8", INSTANCE_ID), is_broadcast=True)
        assert (await mine.result()).status is ResultStatus.OK
        assert others.answers == []

    on_worker(scenario)


def test_prepare_without_the_manifest_asks_for_it() -> None:
    """manifest_unknown is retryable with the same op_id, once the pages are there."""

    async def scenario(rig: Rig) -> None:
        body = PrepareWeightsUpdate(version=V1, manifest_digest="0" * 64)
        refused = await rig.send(body, op_id="p")
        assert code_of(refused) is FaultCode.MANIFEST_UNKNOWN
        assert refused.fault is not None
        assert refused.fault.retryable
        assert (await rig.prepare(V1, DEFAULT_TENSORS)).status is ResultStatus.OK

    on_worker(scenario)


def test_prepare_names_the_first_tensor_that_does_not_fit() -> None:
    """A manifest for another model is refused, naming the tensor; nothing is prepared."""

    async def scenario(rig: Rig) -> None:
        bad = (*DEFAULT_TENSORS[:1], TensorSpec(name="layers.0.weight", dtype="float32", shape=(16, 17)))
        refused = await rig.prepare(V1, bad)
        assert (refused.status, code_of(refused)) == (ResultStatus.REFUSED, FaultCode.MANIFEST_MISMATCH)
        assert refused.fault is not None
        assert refused.fault.detail["tensor"] == "layers.0.weight"
        assert rig.agent.state.prepared is None

    on_worker(scenario)


def test_manifest_whose_checksums_fit_no_message_is_refused_before_anything() -> None:
    """What could never be reported is not begun."""

    async def scenario(rig: Rig) -> None:
        many = tuple(TensorSpec(name=f"t{'x' * 60}{i}", dtype="float32", shape=(1,)) for i in range(12_000))
        assert code_of(await rig.prepare(V1, many)) is FaultCode.TOO_LARGE

    on_worker(scenario)


def test_route_that_the_engine_does_not_have_is_refused() -> None:
    """Never emulated in silence; the descriptor doesn't list it either."""

    async def main() -> None:
        engine = FakeEngine(routes=frozenset({"pause_generation", "resume_generation"}))
        async with worker_on_bus(engine) as rig:
            assert code_of(await rig.send(FlushCache())) is FaultCode.NO_ROUTE
            assert code_of(await rig.prepare(V1, DEFAULT_TENSORS)) is FaultCode.NO_ROUTE
            assert rig.agent.descriptor.routes == (
                "get_outcome",
                "get_status",
                "get_weight_version",
                "hello",
                "pause_generation",
                "renew_lease",
                "resume_generation",
            )

    run(main())


@pytest.mark.parametrize(
    ("data", "op_id", "code"),
    [
        (b'{"op_id":"x1","term":1,"expires_at":1e12,"body":{"route":"nope"}}', "x1", FaultCode.BAD_MESSAGE),
        (b'{"op_id":"x2","term":"one"', "x2", FaultCode.BAD_MESSAGE),
        (b'{"op_id":"x3","pad":"' + b"a" * MAX_MESSAGE_BYTES + b'"}', "x3", FaultCode.TOO_LARGE),
    ],
)
def test_bad_message_is_refused_to_its_sender_if_that_can_be_read_out(data: bytes, op_id: str, code: FaultCode) -> None:
    """Counted, logged, answered; the agent lives on."""

    async def scenario(rig: Rig) -> None:
        sent = Sent(op_id)
        subject = subjects.command_to(NAMESPACE, COMPONENT, "flush_cache", INSTANCE_ID)
        rig.bus.transport.publish(subject, data, rig.inbox(sent))
        result = await sent.result()
        assert (result.op_id, result.status, code_of(result)) == (op_id, ResultStatus.REFUSED, code)
        status = (await rig.send(GetStatus())).data
        assert isinstance(status, StatusData)
        assert status.status.num_refused_messages == 1
        refused = [e for e in rig.events if isinstance(e, CommandRefused)]
        assert [(e.op_id, e.route) for e in refused] == [(op_id, "flush_cache")]

    on_worker(scenario)


def test_flood_of_garbage_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The counter has them all, the log and the events at most one a second."""

    async def scenario(rig: Rig) -> None:
        subject = subjects.command_to(NAMESPACE, COMPONENT, "flush_cache", INSTANCE_ID)
        for junk in (b"", b"\xff\xfe", b"[" * 10_000, b"null", b'{"op_id": 3}') * 20:
            rig.bus.transport.publish(subject, junk)
        status = (await rig.send(GetStatus())).data
        assert isinstance(status, StatusData)
        assert status.status.num_refused_messages == 100
        assert len([e for e in rig.events if isinstance(e, CommandRefused)]) == 1

    on_worker(scenario)
    assert caplog.text.count("refused") <= 2


def ask_routes(rig: Rig, query: bytes) -> list[dict[str, Any]]:
    """What comes back on the plain reply subject, once something has."""
    got: list[dict[str, Any]] = []
    reply = f"my.reply.{len(query)}"
    rig.bus.transport.subscribe(reply, lambda message: got.append(json.loads(message.data)))
    rig.bus.transport.publish(f"dyn.{NAMESPACE}.{COMPONENT}.rl.routes", query, reply)
    return got


def test_dynamos_routes_query_is_answered_as_dynamo_does() -> None:
    """Sorted, each once, with what is under /engine/ and no other key."""

    async def scenario(rig: Rig) -> None:
        [answer] = await after(rig, ask_routes(rig, b'{"method": "routes"}'))
        assert set(answer) == {"status", "routes", "world_size"}
        assert (answer["status"], answer["world_size"]) == ("ok", 1)
        assert answer["routes"] == sorted(set(answer["routes"]))
        assert {"liveness_probe", "pause_generation", "update_weights_from_disk"} <= set(answer["routes"])
        assert not {"prepare_weights_update", "put_manifest", "update_weights_from_tensor"} & set(answer["routes"])

    on_worker(scenario)


@pytest.mark.parametrize(
    "query", [b'{"method": "reload"}', b'{"method": 1}', b'{"method": ""}', b'{"method": "routes", "kwargs": 1}']
)
def test_another_method_is_refused_in_dynamos_shape(query: bytes) -> None:
    """The bus has no caller-chosen methods."""

    async def scenario(rig: Rig) -> None:
        [answer] = await after(rig, ask_routes(rig, query))
        assert answer["status"] == "error"
        assert answer["message"]

    on_worker(scenario)


@pytest.mark.parametrize("query", [b"", b"{}", b"[]", b"\xff", b"[" * 100_000])
def test_a_query_that_names_no_method_is_answered_with_the_descriptor(query: bytes) -> None:
    """For rlbus' own parts."""

    async def scenario(rig: Rig) -> None:
        [answer] = await after(rig, ask_routes(rig, query))
        assert answer["instance_id"] == rig.agent.descriptor.instance_id
        assert "prepare_weights_update" in answer["routes"]

    on_worker(scenario)


async def after(rig: Rig, got: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers, once the worker has been through what came before."""
    await rig.send(GetVersion())
    return got


def test_announcements_come_at_start_on_change_as_heartbeat_and_as_goodbye() -> None:
    """seq grows, the boot id stays, and the interval is moved by at most a fifth."""

    async def main() -> None:
        engine = FakeEngine()
        async with worker_on_bus(engine) as rig:
            await asyncio.sleep(0.01)
            assert rig.last.seq == 1
            first = rig.last.status
            assert (first.generation, first.pause) == (Generation.RUNNING, None)
            await rig.send(PauseGeneration(owner="alice"))
            await asyncio.sleep(0.1)
            second = rig.last.status
            assert second.pause is not None
            assert (second.generation, second.pause.owner) == (Generation.PAUSED, "alice")
            seq = rig.last.seq
            await asyncio.sleep(50.0)
            assert 50 / 6 <= rig.last.seq - seq <= 50 / 4
            assert {a.boot_id for a in rig.announcements} == {rig.agent.boot_id}
            announcements = rig.announcements
            bus = rig.bus
            await bus.barrier(1.0)
            rig.agent.stop("test")
            await asyncio.sleep(1.0)
            assert announcements[-1] == Goodbye(
                boot_id=rig.agent.boot_id, component=COMPONENT, instance_id=INSTANCE_ID, reason="test"
            )
            paused = [e for e in rig.events if isinstance(e, GenerationPaused)]
            assert [(e.owner, e.mode) for e in paused] == [("alice", "keep")]

    run(main())


def test_worker_announces_itself_again_after_a_reconnect_and_when_greeted() -> None:
    """A controller that was away, or is new, needn't wait for the heartbeat."""

    async def scenario(rig: Rig) -> None:
        await asyncio.sleep(0.2)
        seq = rig.last.seq
        transport = rig.worker_bus.transport
        rig.broker.disconnect(transport)  # type: ignore[arg-type]
        await asyncio.sleep(1.0)
        rig.broker.reconnect(transport)  # type: ignore[arg-type]
        await asyncio.sleep(0.2)
        assert rig.last.seq > seq
        seq = rig.last.seq
        await rig.send(Hello())
        await asyncio.sleep(0.2)
        assert rig.last.seq == seq + 1

    on_worker(scenario)


def test_result_that_could_not_leave_is_there_for_the_repeat() -> None:
    """A mutation that ends while the bus is away is not lost."""

    async def scenario(rig: Rig) -> None:
        sent = rig.post(FlushCache(), op_id="f")
        await sent.until(lambda s: s.is_accepted)
        transport = rig.worker_bus.transport
        rig.broker.disconnect(transport)  # type: ignore[arg-type]
        await asyncio.sleep(10.0)
        rig.broker.reconnect(transport)  # type: ignore[arg-type]
        await asyncio.sleep(1.0)
        assert sent.results == []
        assert (await rig.send(FlushCache(), op_id="f")).status is ResultStatus.OK
        assert rig.engine.calls.count("flush_cache") == 1

    on_worker(scenario, {"flush_cache": {1: Step(latency_s=5.0)}})


def test_engine_that_does_not_answer_is_unknown_within_a_second() -> None:
    """Heartbeats and status go on; the question is not asked twice at once."""

    async def scenario(rig: Rig) -> None:
        await asyncio.sleep(0.01)
        began_s = asyncio.get_running_loop().time()
        status = (await rig.send(GetStatus())).data
        assert isinstance(status, StatusData)
        assert status.status.generation is Generation.UNKNOWN
        assert asyncio.get_running_loop().time() - began_s <= 1.1
        seq = rig.last.seq
        await asyncio.sleep(30.0)
        assert rig.last.seq >= seq + 3

    on_worker(scenario, {"observe": {n: Step(hangs=True) for n in range(2, 100)}})


def test_stop_lets_a_running_mutation_end_and_then_says_goodbye() -> None:
    """What ends within the drain time gets its result; what doesn't is cancelled and says so."""

    async def main() -> None:
        for latency_s, status in ((2.0, ResultStatus.OK), (1000.0, ResultStatus.FAILED)):
            engine = FakeEngine(FakeScript({"flush_cache": {1: Step(latency_s=latency_s)}}))
            async with worker_on_bus(engine) as rig:
                sent = rig.post(FlushCache(), expires_in_s=5000.0)
                await sent.until(lambda s: s.is_accepted)
                rig.agent.stop()
                assert (await sent.result()).status is status
                await asyncio.sleep(1.0)
                assert isinstance(rig.announcements[-1], Goodbye)

    run(main())


def test_repeated_abort_of_requests_counts_once() -> None:
    """Aborts of requests are remembered by op_id too, though they run beside mutations."""

    async def scenario(rig: Rig) -> None:
        rig.engine.submit("r1", PROMPT, 10_000)
        first = rig.post(AbortRequest(request_ids=("r1", "unknown")), op_id="a")
        second = rig.post(AbortRequest(request_ids=("r1", "unknown")), op_id="a")
        assert (await first.result()).data == AbortedData(num_aborted=1)
        assert (await second.result()).data == AbortedData(num_aborted=1)
        assert rig.engine.calls.count("abort") == 1

    on_worker(scenario)


def test_duplicated_and_reordered_commands_run_once_each() -> None:
    """Whatever the bus does to them, an op_id has one effect and one result."""

    async def scenario(rig: Rig) -> None:
        transport = rig.worker_bus.transport
        assert isinstance(transport, MemoryTransport)
        transport.faults = Faults(duplicate=1.0, reorder=0.3, only="dyn.*.*.rl.>")
        for step in range(1, 21):
            sent = rig.post(FlushCache(), op_id=f"f{step}")
            results = {(await sent.result()).took_s}
            await asyncio.sleep(0.1)
            assert results == {r.took_s for r in sent.results}
            assert sent.results[0].status is ResultStatus.OK
        assert rig.engine.calls.count("flush_cache") == 20

    on_worker(scenario)


def test_asking_for_a_manifest_is_no_refusal_to_worry_about() -> None:
    """Each new shape of model begins with `manifest_unknown`: answered, but neither counted nor published."""

    async def scenario(rig: Rig) -> None:
        result = await rig.send(PrepareWeightsUpdate(version=Version(step=1), manifest_digest="new"))
        assert code_of(result) is FaultCode.MANIFEST_UNKNOWN
        assert rig.agent.status().num_refused_messages == 0
        assert not [e for e in rig.events if isinstance(e, CommandRefused)]

    on_worker(scenario)
