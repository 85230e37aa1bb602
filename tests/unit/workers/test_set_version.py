"""Naming the weights that a worker has: for orchestrators that say the version after their update."""

import pytest

from rlbus.schemas import (
    ApplyUpdate,
    FaultCode,
    FinishUpdate,
    InitTransfer,
    PauseGeneration,
    ResultStatus,
    SetVersion,
    StartUpdate,
    Version,
    WeightsData,
    WeightsState,
)
from rlbus.workers.engines.fake import ROUTES, FakeEngine
from rlbus.workers.engines.fake_script import Step, failing
from rlbus.workers.testing import Rig, code_of, on_worker, updated

pytestmark = pytest.mark.unit

V1, V2 = Version(step=1), Version(step=2)


async def unnamed(rig: Rig) -> None:
    """Weights whose version nobody has named: another trainer's update that doesn't say which it was."""
    for body in (InitTransfer(info="{}"), PauseGeneration(), StartUpdate(), ApplyUpdate(info='{"step": 1}')):
        assert (await rig.send(body)).status is ResultStatus.OK
    assert (await rig.send(FinishUpdate())).status is ResultStatus.OK


def test_weights_that_nobody_has_named_can_be_named() -> None:
    """The worker, its engine and its announcement say the same, and no drift."""

    async def scenario(rig: Rig) -> None:
        await unnamed(rig)
        result = await rig.send(SetVersion(version=V2))
        assert isinstance(result.data, WeightsData)
        assert rig.agent.state.weights.version == V2
        await rig.agent.observe()
        status = rig.agent.status()
        assert (status.weights.version, status.drift) == (V2, None)
        assert rig.engine.label == V2

    on_worker(scenario)


def test_weights_that_have_a_name_get_no_other() -> None:
    """Audit of issue 4, 3: a worker that is behind can't be called the fleet's version, and so be admitted."""

    async def scenario(rig: Rig) -> None:
        assert code_of(await rig.send(SetVersion(version=V2))) is FaultCode.WRONG_STATE  # as it was started
        await updated(rig, V1)
        assert (await rig.send(SetVersion(version=V1))).status is ResultStatus.OK
        for allow_rollback in (False, True):
            body = SetVersion(version=V2, allow_rollback=allow_rollback)
            assert code_of(await rig.send(body)) is FaultCode.WRONG_STATE
        assert rig.agent.state.weights.version == V1
        await unnamed(rig)
        assert (await rig.send(SetVersion(version=V2))).status is ResultStatus.OK
        assert code_of(await rig.send(SetVersion(version=Version(step=3)))) is FaultCode.WRONG_STATE

    on_worker(scenario)


def test_a_name_only_grows_unless_a_rollback_is_meant() -> None:
    """As the versions of updates; the same again is ok."""

    async def scenario(rig: Rig) -> None:
        await updated(rig, V2)
        await unnamed(rig)
        assert code_of(await rig.send(SetVersion(version=V1))) is FaultCode.VERSION_REGRESSION
        assert rig.agent.state.weights.version == Version(step=3)
        assert (await rig.send(SetVersion(version=V1, allow_rollback=True))).status is ResultStatus.OK
        assert rig.agent.state.weights.version == V1

    on_worker(scenario)


def test_torn_weights_get_no_name() -> None:
    """No engine serves torn or unknown weights, whatever somebody calls them."""

    async def scenario(rig: Rig) -> None:
        await rig.until_paused(V1, rig.engine.tensors, "u", 1)
        await rig.receive(V1, rig.engine.tensors).result()
        assert rig.agent.state.weights.state is WeightsState.DIRTY
        assert code_of(await rig.send(SetVersion(version=V2))) is FaultCode.DIRTY
        assert rig.agent.state.weights.state is WeightsState.DIRTY

    on_worker(scenario, {"receive_weights": {0: failing(after_parts=2)}})


def test_weights_of_which_nobody_knows_get_none_either() -> None:
    """A restarted engine's: a reload says what they are."""

    async def scenario(rig: Rig) -> None:
        before = rig.agent.state.weights
        assert before.state is WeightsState.CLEAN
        await rig.until_paused(V2, rig.engine.tensors, "u", 1)
        receiving = rig.receive(V2, rig.engine.tensors)
        await receiving.until(lambda s: s.is_accepted)
        assert code_of(await rig.send(SetVersion(version=V2))) is FaultCode.BUSY
        await receiving.result()
        assert code_of(await rig.send(SetVersion(version=V2))) is FaultCode.WRONG_STATE

    on_worker(scenario, {"receive_weights": {0: Step(transfer_s=1.0)}})


def test_an_engine_that_refuses_leaves_the_name() -> None:
    """What was before still is."""

    async def scenario(rig: Rig) -> None:
        await unnamed(rig)
        assert code_of(await rig.send(SetVersion(version=V2))) is FaultCode.ENGINE_FAILED
        assert rig.agent.state.weights.version == V1

    on_worker(scenario, {"label_weights": {0: failing()}})


def test_an_engine_without_labels_does_not_serve_it() -> None:
    """It isn't emulated."""
    engine = FakeEngine(routes=ROUTES - {"set_weight_version"})
    assert "set_weight_version" not in engine.info.routes
