"""Updates that somebody else's trainer drives: the rules of any update, whatever the trainer and the backend say."""

import json
from pathlib import Path

import pytest

from rlbus.errors import FaultError
from rlbus.schemas import (
    ApplyUpdate,
    CommitWeights,
    Fault,
    FaultCode,
    FinishUpdate,
    InitTransfer,
    PauseGeneration,
    ResultStatus,
    ResumeGeneration,
    ShutdownTransfer,
    StartUpdate,
    TensorSpec,
    Version,
    WeightsData,
    WeightsState,
)
from rlbus.testing import run
from rlbus.workers.described import described
from rlbus.workers.engines.fake import DEFAULT_TENSORS, ROUTES, FakeEngine
from rlbus.workers.engines.fake_script import Step, failing
from rlbus.workers.engines.native import NATIVE_ROUTES, info_of
from rlbus.workers.ledger import Ledger
from rlbus.workers.testing import (
    COMPONENT,
    INSTANCE_ID,
    NAMESPACE,
    Rig,
    code_of,
    on_worker,
    updated,
    worker_on_bus,
)

pytestmark = pytest.mark.unit

V1, V2 = Version(step=1), Version(step=2)
INIT = InitTransfer(info=json.dumps({"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1}))


def brings(step: int) -> ApplyUpdate:
    """The bytes of version 0.`step`."""
    return ApplyUpdate(info=json.dumps({"step": step}))


def brings_whole(step: int, num_tensors: int = len(DEFAULT_TENSORS)) -> ApplyUpdate:
    """The same in vLLM's words, which name the first `num_tensors`."""
    specs = DEFAULT_TENSORS[:num_tensors]
    names = {"names": [s.name for s in specs], "dtype_names": [s.dtype for s in specs]}
    return ApplyUpdate(info=json.dumps({**names, "shapes": [s.shape for s in specs], "step": step}))


def weights(rig: Rig) -> tuple[WeightsState, Version | None]:
    """As the worker says."""
    return rig.agent.state.weights.state, rig.agent.state.weights.version


async def begun(rig: Rig) -> None:
    """Up to an open update."""
    for body in (INIT, PauseGeneration(), StartUpdate()):
        assert (await rig.send(body)).status is ResultStatus.OK


def test_a_foreign_update_is_whole_only_when_it_is_finished() -> None:
    """Updating from its first bytes on, clean at the version that its end names, flushed when it resumes."""

    async def scenario(rig: Rig) -> None:
        await begun(rig)
        assert weights(rig)[0] is WeightsState.CLEAN
        assert (await rig.send(brings(2))).status is ResultStatus.OK
        assert weights(rig) == (WeightsState.UPDATING, None)
        assert code_of(await rig.send(ResumeGeneration())) is FaultCode.BUSY
        result = await rig.send(FinishUpdate(version=V2))
        assert isinstance(result.data, WeightsData)
        assert weights(rig) == (WeightsState.CLEAN, V2)
        assert (await rig.send(ResumeGeneration())).status is ResultStatus.OK
        assert list(rig.engine.calls).count("flush_cache") == 1
        assert rig.engine.violations == []

    on_worker(scenario)


def test_without_a_name_it_is_the_next_step() -> None:
    """vLLM's own trainers may not say a version; all workers of a fleet count the same."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V2)
        await begun(rig)
        await rig.send(brings(3))
        await rig.send(FinishUpdate())
        assert rig.agent.state.weights.version == Version(step=3)

    on_worker(scenario)


@pytest.mark.parametrize("body", [brings(1), FinishUpdate(version=V1)], ids=["update", "finish"])
def test_nothing_is_received_or_finished_that_was_not_started(body: ApplyUpdate | FinishUpdate) -> None:
    """Refused before the engine is asked."""

    async def scenario(rig: Rig) -> None:
        await rig.send(INIT)
        await rig.send(PauseGeneration())
        assert code_of(await rig.send(body)) is FaultCode.WRONG_STATE
        assert not {"update_native", "finish_native"} & set(rig.engine.calls)

    on_worker(scenario)


def test_it_is_refused_while_the_engine_generates() -> None:
    """Also when somebody resumed the engine behind the agent's back."""

    async def scenario(rig: Rig) -> None:
        await rig.send(INIT)
        assert code_of(await rig.send(StartUpdate())) is FaultCode.WRONG_STATE
        await rig.send(PauseGeneration())
        rig.engine.requests.resume()
        assert code_of(await rig.send(StartUpdate())) is FaultCode.WRONG_STATE
        assert "start_native" not in rig.engine.calls

    on_worker(scenario)


@pytest.mark.parametrize("info", ["{", "7", "[]", '["a"]'])
def test_info_that_is_no_object_is_refused(info: str) -> None:
    """Nothing has changed."""

    async def scenario(rig: Rig) -> None:
        assert code_of(await rig.send(InitTransfer(info=info))) is FaultCode.BAD_MESSAGE
        await begun(rig)
        assert code_of(await rig.send(ApplyUpdate(info=info))) is FaultCode.BAD_MESSAGE
        assert rig.agent.state.weights.state is WeightsState.CLEAN

    on_worker(scenario)


@pytest.mark.parametrize(
    ("step", "state"),
    [(failing(after_parts=0), WeightsState.CLEAN), (failing(after_parts=1), WeightsState.DIRTY)],
    ids=["before the first tensor", "after it"],
)
def test_a_failed_one_leaves_what_was_or_torn_weights_and_no_open_update(step: Step, state: WeightsState) -> None:
    """SCENARIOS 5: the next update can start."""

    async def scenario(rig: Rig) -> None:
        await begun(rig)
        assert (await rig.send(brings(1))).status is ResultStatus.FAILED
        assert rig.agent.state.weights.state is state
        assert not rig.engine.is_native_open
        assert code_of(await rig.send(FinishUpdate(version=V1))) is FaultCode.WRONG_STATE
        assert (await rig.send(StartUpdate())).status is ResultStatus.OK
        assert (await rig.send(brings_whole(2))).status is ResultStatus.OK
        assert (await rig.send(FinishUpdate(version=V2))).status is ResultStatus.OK
        assert not rig.engine.is_torn

    on_worker(scenario, {"update_native": {1: step}})


# An engine that speaks of this call alone.
LIES = Step(fault=Fault(code=FaultCode.ENGINE_FAILED, message="scripted failure"), claims_touched=False)


@pytest.mark.parametrize(
    ("verb", "step", "body"),
    [
        ("update_native", {2: LIES}, brings(3)),
        ("finish_native", {1: LIES}, FinishUpdate(version=V2)),
        ("abort_update", {1: failing()}, StartUpdate()),
    ],
    ids=["another part", "its end", "another start"],
)
def test_what_fails_untouched_after_a_part_that_came_leaves_torn_weights(
    verb: str, step: dict[int, Step], body: ApplyUpdate | FinishUpdate | StartUpdate
) -> None:
    """The new bytes are in place, so the old version would be a lie; a whole update heals them."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V1)
        rig.engine.calls.clear()
        await begun(rig)
        assert (await rig.send(brings(2))).status is ResultStatus.OK
        assert (await rig.send(body)).status is ResultStatus.FAILED
        assert (weights(rig), rig.agent.state.weights.last_good) == ((WeightsState.DIRTY, None), V1)
        assert rig.agent.state.session is None
        assert code_of(await rig.send(ResumeGeneration())) is FaultCode.DIRTY
        await rig.send(StartUpdate())
        await rig.send(brings_whole(2))
        assert (await rig.send(FinishUpdate(version=V2))).status is ResultStatus.OK
        assert weights(rig) == (WeightsState.CLEAN, V2)

    on_worker(scenario, {verb: step})


def test_shutdown_over_a_second_part_that_waits_leaves_torn_weights() -> None:
    """The trainer never sends it: the engine says that nothing came, of that part."""

    async def scenario(rig: Rig) -> None:
        await begun(rig)
        assert (await rig.send(brings(2))).status is ResultStatus.OK
        stuck = rig.post(brings(3))
        await stuck.until(lambda sent: sent.is_accepted)
        assert (await rig.send(ShutdownTransfer())).status is ResultStatus.OK
        assert (await stuck.result()).status is ResultStatus.FAILED
        assert weights(rig) == (WeightsState.DIRTY, None)

    on_worker(scenario, {"update_native": {2: Step(hangs=True, claims_touched=False)}})


@pytest.mark.parametrize("is_late", [False, True], ids=["part", "second part"])
def test_failed_update_that_the_engine_does_not_close_is_not_finished_by_a_part(is_late: bool) -> None:
    """Nothing that came before the failure counts; the model as a whole heals, also within the same update."""

    async def scenario(rig: Rig) -> None:
        await begun(rig)
        if is_late:
            await rig.send(brings_whole(2))
        assert (await rig.send(brings(2))).status is ResultStatus.FAILED
        assert rig.agent.state.session is not None
        assert weights(rig)[0] is WeightsState.DIRTY
        assert (await rig.send(brings_whole(2, num_tensors=1))).status is ResultStatus.OK
        assert code_of(await rig.send(FinishUpdate(version=V2))) is FaultCode.TRANSFER_FAILED
        assert weights(rig) == (WeightsState.DIRTY, None)

    steps = {1 + is_late: failing(after_parts=1)}
    on_worker(scenario, {"update_native": steps, "abort_update": {1: failing()}})


@pytest.mark.parametrize(
    "body",
    [brings_whole(2, num_tensors=1), brings(2), ApplyUpdate(info='{"names": ["embed.weight"], "step": 2}')],
    ids=["one tensor", "who knows what", "a name alone"],
)
def test_torn_weights_are_not_healed_by_a_part_of_the_model(body: ApplyUpdate) -> None:
    """Audit of issue 4, 1: the finish fails, they stay torn and paused, and a whole update heals them."""

    async def scenario(rig: Rig) -> None:
        await begun(rig)
        assert (await rig.send(brings(1))).status is ResultStatus.FAILED
        assert (await rig.send(StartUpdate())).status is ResultStatus.OK
        assert (await rig.send(body)).status is ResultStatus.OK
        result = await rig.send(FinishUpdate(version=V2))
        assert (result.status, code_of(result)) == (ResultStatus.FAILED, FaultCode.TRANSFER_FAILED)
        assert weights(rig) == (WeightsState.DIRTY, None)
        assert rig.agent.state.session is None
        assert not rig.engine.is_native_open
        assert code_of(await rig.send(ResumeGeneration())) is FaultCode.DIRTY
        await rig.send(StartUpdate())
        await rig.send(brings_whole(2, num_tensors=3))
        await rig.send(brings_whole(2))
        assert (await rig.send(FinishUpdate(version=V2))).status is ResultStatus.OK
        assert weights(rig) == (WeightsState.CLEAN, V2)

    on_worker(scenario, {"update_native": {1: failing(after_parts=1)}})


def test_unknown_weights_get_no_name_from_a_part_of_the_model(tmp_path: Path) -> None:
    """A restarted worker: with a part of a new version in it the engine has a mixture that nobody ever had."""

    async def main() -> None:
        for life in (1, 2):
            ledger = Ledger.open(tmp_path, NAMESPACE, COMPONENT, INSTANCE_ID)
            assert ledger is not None
            with ledger:
                async with worker_on_bus(FakeEngine(routes=ROUTES | NATIVE_ROUTES), ledger=ledger) as rig:
                    if life == 1:
                        await updated(rig, V1)
                        continue
                    assert rig.agent.state.weights.state is WeightsState.UNKNOWN
                    await begun(rig)
                    assert (await rig.send(brings_whole(2, num_tensors=1))).status is ResultStatus.OK
                    result = await rig.send(FinishUpdate(version=V2))
                    assert (result.status, code_of(result)) == (ResultStatus.FAILED, FaultCode.TRANSFER_FAILED)
                    assert weights(rig) == (WeightsState.DIRTY, None)
                    await rig.send(StartUpdate())
                    await rig.send(brings_whole(2))
                    assert (await rig.send(FinishUpdate(version=V2))).status is ResultStatus.OK
                    assert weights(rig) == (WeightsState.CLEAN, V2)

    run(main())


def test_unknown_weights_take_what_a_trainer_says_where_nobody_can_tell_the_models_tensors(tmp_path: Path) -> None:
    """A restarted engine behind a backend of its own: nothing could ever prove that all came."""
    less = ROUTES - {"update_weights_from_distributed", "update_weights_from_disk"}

    async def main() -> None:
        for life, routes in ((1, ROUTES), (2, less)):
            ledger = Ledger.open(tmp_path, NAMESPACE, COMPONENT, INSTANCE_ID)
            assert ledger is not None
            with ledger:
                async with worker_on_bus(FakeEngine(routes=routes), ledger=ledger) as rig:
                    if life == 1:
                        await updated(rig, V1)
                        continue
                    assert rig.agent.state.weights.state is WeightsState.UNKNOWN
                    await begun(rig)
                    assert (await rig.send(brings(2))).status is ResultStatus.OK
                    assert (await rig.send(FinishUpdate(version=V2))).status is ResultStatus.OK
                    assert weights(rig) == (WeightsState.CLEAN, V2)

    run(main())


@pytest.mark.parametrize(
    "info",
    ["{", "7", "[7]", '{"names": ["a"]}', '{"names": ["a"], "dtype_names": ["float32"], "shapes": []}'],
)
def test_what_cannot_be_understood_describes_no_tensor(info: str) -> None:
    """So it heals nothing."""
    assert described(info) == ()


def test_a_list_of_descriptions_is_read_in_order() -> None:
    """With torch's prefix or without."""
    items = [{"names": [n], "dtype_names": ["torch.float32"], "shapes": [[2, 3]]} for n in ("a", "b")]
    expected = tuple(TensorSpec(name=n, dtype="float32", shape=(2, 3)) for n in ("a", "b"))
    assert described(json.dumps(items)) == expected


def test_a_start_gives_up_what_an_earlier_one_left_open() -> None:
    """Its trainer is gone; what it brought is torn until the new one is finished."""

    async def scenario(rig: Rig) -> None:
        await begun(rig)
        await rig.send(brings(1))
        assert (await rig.send(StartUpdate())).status is ResultStatus.OK
        assert rig.agent.state.weights.state is WeightsState.DIRTY
        assert code_of(await rig.send(FinishUpdate(version=V2))) is FaultCode.WRONG_STATE

    on_worker(scenario)


@pytest.mark.parametrize(
    ("parts", "left"), [(0, (WeightsState.CLEAN, V1)), (1, (WeightsState.DIRTY, None))], ids=["untouched", "touched"]
)
def test_the_init_of_a_successor_gives_up_what_a_dead_trainer_left_open(
    parts: int, left: tuple[WeightsState, Version | None]
) -> None:
    """As a start does, and a shutdown: else each pause of the successor would renew the lease that ends it."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V1)
        rig.engine.calls.clear()
        await begun(rig)
        for _ in range(parts):
            await rig.send(brings(2))
        await rig.send(PauseGeneration(owner="its successor", lease_s=600.0))
        assert (await rig.send(INIT)).status is ResultStatus.OK
        assert rig.agent.state.session is None
        assert not rig.engine.is_native_open
        assert weights(rig) == left
        for body in (StartUpdate(), brings_whole(3), FinishUpdate(version=V2), ResumeGeneration()):
            assert (await rig.send(body)).status is ResultStatus.OK
        assert weights(rig) == (WeightsState.CLEAN, V2)

    on_worker(scenario)


def test_an_init_that_makes_no_sense_gives_nothing_up() -> None:
    """It is refused before anything changes."""

    async def scenario(rig: Rig) -> None:
        await begun(rig)
        await rig.send(brings(1))
        assert code_of(await rig.send(InitTransfer(info="7"))) is FaultCode.BAD_MESSAGE
        assert (await rig.send(FinishUpdate(version=V1))).status is ResultStatus.OK

    on_worker(scenario)


def test_an_init_gives_up_a_failed_update_that_the_engine_did_not_close() -> None:
    """Of whichever kind: nobody goes on with it."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, rig.engine.tensors, "u", 1)
        await rig.receive(V1, rig.engine.tensors, "u", 1).result()
        assert rig.agent.state.session is not None
        assert weights(rig)[0] is WeightsState.DIRTY
        assert (await rig.send(INIT)).status is ResultStatus.OK
        assert rig.agent.state.session is None

    steps = {"receive_weights": {1: failing(after_parts=1)}, "abort_update": {1: failing()}}
    on_worker(scenario, steps)


def test_a_version_only_grows() -> None:
    """As with every update."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V2)
        await begun(rig)
        await rig.send(brings(1))
        assert code_of(await rig.send(FinishUpdate(version=V1))) is FaultCode.VERSION_REGRESSION

    on_worker(scenario)


def test_a_trainer_that_hangs_is_let_go_by_a_shutdown() -> None:
    """The stuck receive is released, the weights count as torn."""

    async def scenario(rig: Rig) -> None:
        await begun(rig)
        stuck = rig.post(brings(1))
        await stuck.until(lambda sent: sent.is_accepted)
        assert (await rig.send(ShutdownTransfer())).status is ResultStatus.OK
        assert (await stuck.result()).status is ResultStatus.FAILED
        assert rig.engine.native_info is None
        assert rig.agent.state.running is None

    on_worker(scenario, {"update_native": {1: Step(hangs=True, after_parts=1)}})


def test_it_and_an_update_of_rlbus_do_not_mix() -> None:
    """A commit of ours doesn't end it."""

    async def scenario(rig: Rig) -> None:
        await begun(rig)
        await rig.send(brings(1))
        assert code_of(await rig.send(CommitWeights(update_op_id="u", version=V1))) is FaultCode.WRONG_STATE

    on_worker(scenario)


def test_an_engine_without_it_refuses_every_part() -> None:
    """Nothing is emulated."""

    async def main() -> None:
        async with worker_on_bus(FakeEngine(routes=ROUTES - NATIVE_ROUTES)) as rig:
            for body in (INIT, ShutdownTransfer(), StartUpdate(), brings(1), FinishUpdate()):
                assert code_of(await rig.send(body)) is FaultCode.NO_ROUTE

    run(main())


@pytest.mark.parametrize("text", ["", "7", "[]", "[1]", "[" * 100_000])
def test_info_that_makes_no_sense_is_refused(text: str) -> None:
    """Whoever reads it, and however deep it is."""
    with pytest.raises(FaultError) as caught:
        info_of(text, may_be_list=True)
    assert caught.value.code is FaultCode.BAD_MESSAGE
    assert described(text) == ()
