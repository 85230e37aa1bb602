"""An adapter that is unloaded while its load still runs, whatever becomes of that load: nobody serves it in the end."""

import asyncio
from pathlib import Path

import pytest

from rlbus.schemas import FaultCode, LoraState, ResultStatus, UnloadLora
from rlbus.workers.engines.fake_script import Step, failing
from rlbus.workers.testing import Rig, code_of
from tests.unit.workers.lora_stage import data_of, ids, listed, play, publish

pytestmark = pytest.mark.unit

UNLOAD = UnloadLora(name="policy", revision=7)
# Long enough for the worker to look, and to unload by itself.
SOON_S = 3.0


def serving(rig: Rig) -> list[tuple[str, int]]:
    return list(rig.engine.loras.sums)


def test_an_unload_ends_the_load_of_the_same_adapter(tmp_path: Path) -> None:
    """At once, and the worker is free; another adapter's unload is busy."""

    async def scenario(rig: Rig) -> None:
        loading = rig.post(publish(tmp_path, 7))
        await loading.until(lambda sent: sent.is_accepted)
        await asyncio.sleep(1.0)
        assert code_of(await rig.send(UnloadLora(name="policy", revision=6))) is FaultCode.BUSY
        began_s = asyncio.get_running_loop().time()
        unloaded = await rig.send(UNLOAD)
        assert (unloaded.status, data_of(unloaded).loras) == (ResultStatus.OK, ())
        assert asyncio.get_running_loop().time() - began_s < 1.0
        assert code_of(await loading.result()) is FaultCode.CANCELLED
        await asyncio.sleep(120.0)
        assert serving(rig) == []
        assert (await rig.send(publish(tmp_path, 7))).status is ResultStatus.OK

    play(tmp_path, scenario, {"load_lora": {1: Step(latency_s=100.0)}})


def test_an_adapter_that_comes_after_its_unload_is_unloaded_by_the_worker(tmp_path: Path) -> None:
    """The engine can't be interrupted, and doesn't say what it has before its load has ended."""
    silent: dict[int, Step] = {}

    async def scenario(rig: Rig) -> None:
        loading = rig.post(publish(tmp_path, 7))
        await loading.until(lambda sent: sent.is_accepted)
        await asyncio.sleep(1.0)
        silent[0] = failing("it still loads")
        unloaded = await rig.send(UNLOAD)
        assert unloaded.status is ResultStatus.FAILED
        await asyncio.sleep(30.0)
        rig.engine.loras.load("policy", 7, tmp_path / "policy-7", None)  # the engine had gone on by itself
        del silent[0]
        await asyncio.sleep(SOON_S)
        assert serving(rig) == []
        assert rig.agent.state.adapters == ()

    play(tmp_path, scenario, {"load_lora": {1: Step(latency_s=100.0)}, "list_loras": silent})


def test_an_adapter_whose_load_clings_goes_when_that_has_ended(tmp_path: Path) -> None:
    """The unload says that it failed, not that it was refused: it is still to come."""

    async def scenario(rig: Rig) -> None:
        loading = rig.post(publish(tmp_path, 7))
        await loading.until(lambda sent: sent.is_accepted)
        await asyncio.sleep(1.0)
        unloaded = await rig.send(UNLOAD, expires_in_s=5.0)
        assert (unloaded.status, code_of(unloaded)) == (ResultStatus.FAILED, FaultCode.BUSY)
        assert serving(rig) == [("policy", 7)]
        await asyncio.sleep(20.0 + SOON_S)
        assert serving(rig) == []

    play(tmp_path, scenario, {"load_lora": {1: Step(does_it=True, hangs=True, clings_s=20.0)}})


def test_an_adapter_that_is_wanted_again_stays(tmp_path: Path) -> None:
    """The last word counts: it was loaded again before the worker saw that it had come."""
    silent: dict[int, Step] = {}

    async def scenario(rig: Rig) -> None:
        body = publish(tmp_path, 7)
        await rig.send(body)
        silent[0] = failing("no list")
        assert (await rig.send(UNLOAD)).status is ResultStatus.FAILED
        del silent[0]
        assert (await rig.send(body)).status is ResultStatus.OK
        await asyncio.sleep(SOON_S)
        assert ids(await listed(rig)) == {"policy@7": LoraState.LOADED}

    play(tmp_path, scenario, {"list_loras": silent})
