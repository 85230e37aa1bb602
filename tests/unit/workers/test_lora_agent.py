"""Loads and unloads of adapters through the agent's rules, with the fake engine, in virtual time."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rlbus.schemas import (
    FaultCode,
    GetStatus,
    LoraDraining,
    LoraLoaded,
    LoraState,
    LoraUnloaded,
    PauseGeneration,
    ResultStatus,
    ResumeGeneration,
    Sleep,
    StatusData,
    UnloadLora,
    WakeUp,
)
from rlbus.testing import run
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_loras import UnknownModelError
from rlbus.workers.engines.fake_script import failing
from rlbus.workers.engines.lora import LoraInfo
from rlbus.workers.lora_testing import config_for, fake_adapter, load_of
from rlbus.workers.testing import Rig, code_of, worker_on_bus
from tests.unit.workers.lora_stage import LONG, PROMPT, data_of, ids, listed, play, publish, told

pytestmark = pytest.mark.unit


def test_loaded_adapter_is_listed_named_and_announced(tmp_path: Path) -> None:
    """In the answer, the list, the status, an event; and requests can name it."""

    async def scenario(rig: Rig) -> None:
        body = publish(tmp_path, 7)
        loaded = await rig.send(body)
        assert loaded.status is ResultStatus.OK
        assert (await listed(rig)).loras == data_of(loaded).loras
        (view,) = data_of(loaded).loras
        assert (view.name, view.revision, view.checksum, view.num_in_flight) == ("policy", 7, body.checksum, 0)
        status = (await rig.send(GetStatus())).data
        assert isinstance(status, StatusData)
        assert status.status.loras is not None
        assert status.status.loras.ids == ("policy@7",)
        assert [e.revision for e in rig.events if isinstance(e, LoraLoaded)] == [7]
        named = rig.engine.submit("a", PROMPT, 3, model="policy@7")
        newest = rig.engine.submit("b", PROMPT, 3, model="policy")
        base = rig.engine.submit("c", PROMPT, 3)
        await base.ended.wait()
        assert named.tokens == newest.tokens != base.tokens

    play(tmp_path, scenario)


def test_heartbeat_says_which_adapters_there_are_and_a_restarted_engine_has_none(tmp_path: Path) -> None:
    """They are gone with the engine, and the status says so."""

    async def main() -> None:
        for _ in range(2):
            engine = FakeEngine()
            async with worker_on_bus(engine, config=config_for(tmp_path)) as rig:
                await asyncio.sleep(1.0)
                assert told(rig) == (4, ())
                await rig.send(publish(tmp_path, 7))
                await asyncio.sleep(1.0)
                assert told(rig) == (4, ("policy@7",))

    run(main())


def test_files_that_an_agent_before_brought_stay_as_long_as_the_engine_has_the_adapter(tmp_path: Path) -> None:
    """A sidecar that was started again knows of no adapter yet; the server reads them again when it needs room."""

    async def scenario(rig: Rig) -> None:
        before = publish(tmp_path, 6)
        assert (await rig.send(before)).status is ResultStatus.OK
        rig.agent._state = replace(rig.agent.state, adapters=())
        assert (await rig.send(publish(tmp_path, 7))).status is ResultStatus.OK
        kept = {p.name for p in (tmp_path / "cache").glob("*/*")}
        assert before.checksum in kept
        assert len(kept) == 2

    play(tmp_path, scenario, lora_cache_bytes=15)


def test_same_load_again_is_ok_and_changes_nothing(tmp_path: Path) -> None:
    """Under another op_id, with the same bytes."""

    async def scenario(rig: Rig) -> None:
        await rig.send(publish(tmp_path, 7))
        again = await rig.send(publish(tmp_path, 7))
        assert again.status is ResultStatus.OK
        assert ids(data_of(again)) == {"policy@7": LoraState.LOADED}
        assert rig.engine.calls.count("load_lora") == 1

    play(tmp_path, scenario)


@pytest.mark.parametrize("is_unloaded", [False, True])
def test_other_bytes_under_a_known_revision_are_refused(tmp_path: Path, is_unloaded: bool) -> None:
    """SCENARIOS 31: a name@revision is never reused, not even after it was unloaded."""

    async def scenario(rig: Rig) -> None:
        await rig.send(publish(tmp_path, 7))
        if is_unloaded:
            await rig.send(UnloadLora(name="policy", revision=7))
        other = load_of(fake_adapter(tmp_path / "other", "other bytes"), 7)
        assert code_of(await rig.send(other)) is FaultCode.REVISION_TAKEN
        assert rig.engine.calls.count("load_lora") == 1

    play(tmp_path, scenario)


def test_prefix_of_one_revision_is_never_served_to_another(tmp_path: Path) -> None:
    """SCENARIOS 31: a prompt that revision 1 and the base model have cached is computed anew for revision 2."""

    async def scenario(rig: Rig) -> None:
        async def tokens(name: str, model: str | None) -> list[int]:
            request = rig.engine.submit(name, PROMPT, 4, model=model)
            await request.ended.wait()
            return request.tokens

        await rig.send(publish(tmp_path, 1))
        first = [await tokens("a", "policy@1"), await tokens("b", None)]
        await rig.send(publish(tmp_path, 2))
        second = await tokens("c", "policy@2")
        rig.engine.requests.flush()
        assert second == await tokens("d", "policy@2")
        assert second not in first
        assert await tokens("e", "policy") == second
        assert [await tokens("f", "policy@1"), await tokens("g", None)] == first

    play(tmp_path, scenario)


@pytest.mark.parametrize("can_hot_swap", [True, False])
def test_hot_swap_is_done_and_said_only_where_the_engine_can(tmp_path: Path, can_hot_swap: bool) -> None:
    """SCENARIOS 31: with it the older revision is gone, and its requests go on; without it both stay."""

    async def scenario(rig: Rig) -> None:
        await rig.send(publish(tmp_path, 1))
        request = rig.engine.submit("r", PROMPT, LONG, model="policy@1")
        swapped = data_of(await rig.send(publish(tmp_path, 2, hot_swap=True)))
        assert swapped.hot_swap is can_hot_swap
        assert set(ids(swapped)) == ({"policy@2"} if can_hot_swap else {"policy@1", "policy@2"})
        assert request.adapter == ("policy@2" if can_hot_swap else "policy@1")
        assert request.finish is None

    play(tmp_path, scenario, loras=LoraInfo(4, can_hot_swap=can_hot_swap))


def test_full_worker_refuses_with_a_code_of_its_own(tmp_path: Path) -> None:
    """SCENARIOS 35: it says how many fit and which are there; an unload makes room."""

    async def scenario(rig: Rig) -> None:
        for revision in (1, 2):
            assert (await rig.send(publish(tmp_path, revision))).status is ResultStatus.OK
        full = await rig.send(publish(tmp_path, 3))
        assert (full.status, code_of(full)) == (ResultStatus.REFUSED, FaultCode.NO_CAPACITY)
        assert full.fault is not None
        assert full.fault.detail == {"capacity": "2", "loaded": "policy@1, policy@2"}
        await rig.send(UnloadLora(name="policy", revision=1))
        assert set(ids(data_of(await rig.send(publish(tmp_path, 3))))) == {"policy@2", "policy@3"}

    play(tmp_path, scenario, loras=LoraInfo(2))


def test_twenty_revisions_fit_into_four_places_when_idle_ones_may_go(tmp_path: Path) -> None:
    """SCENARIOS 35: the oldest idle one goes; others stay; all in use: `no_capacity`, no hang."""

    async def scenario(rig: Rig) -> None:
        await rig.send(publish(tmp_path, 1, "other"))
        for revision in range(1, 21):
            loaded = data_of(await rig.send(publish(tmp_path, revision, evict_idle=True)))
            assert len(loaded.loras) <= 4
            assert loaded.evicted == (() if revision <= 3 else (f"policy@{revision - 3}",))
        assert set(ids(loaded)) == {"other@1", "policy@18", "policy@19", "policy@20"}
        for revision in (18, 19, 20):
            rig.engine.submit(f"r{revision}", PROMPT, LONG, model=f"policy@{revision}")
        full = await rig.send(publish(tmp_path, 21, evict_idle=True))
        assert full.fault is not None
        assert (full.fault.code, full.fault.retryable) == (FaultCode.NO_CAPACITY, True)  # requests end
        assert len((await listed(rig)).loras) == 4

    play(tmp_path, scenario)


def test_adapter_of_somebody_else_takes_a_place_and_is_never_evicted(tmp_path: Path) -> None:
    """What the engine has counts, not what we have put there."""

    async def scenario(rig: Rig) -> None:
        rig.engine.loras.foreign = ["theirs"]
        await rig.send(publish(tmp_path, 1))
        full = await rig.send(publish(tmp_path, 2, "another", evict_idle=True))
        assert full.fault is not None
        assert (full.fault.code, full.fault.retryable) == (FaultCode.NO_CAPACITY, False)
        views = {v.name: v for v in (await listed(rig)).loras}
        assert (views["theirs"].revision, views["theirs"].checksum) == (None, None)

    play(tmp_path, scenario, loras=LoraInfo(2))


def test_unload_waits_for_its_requests_while_other_commands_go_on(tmp_path: Path) -> None:
    """SCENARIOS 32: `draining` at once, no new request, never the base model; gone when the last one has ended."""

    async def scenario(rig: Rig) -> None:
        for revision in (1, 2):
            await rig.send(publish(tmp_path, revision))
        request = rig.engine.submit("r", PROMPT, 3000, model="policy@1")  # 30 s
        draining = data_of(await rig.send(UnloadLora(name="policy", revision=1)))
        assert ids(draining) == {"policy@1": LoraState.DRAINING, "policy@2": LoraState.LOADED}
        with pytest.raises(UnknownModelError):
            rig.engine.submit("late", PROMPT, 3, model="policy@1")
        for body in (PauseGeneration(), ResumeGeneration(), publish(tmp_path, 3)):
            assert (await rig.send(body)).status is ResultStatus.OK
        assert request.finish is None
        await asyncio.sleep(1.0)
        assert rig.last.status.loras is not None
        assert rig.last.status.loras.num_draining == 1
        await request.ended.wait()
        assert request.finish == "length"
        await asyncio.sleep(2.0)
        assert set(ids(await listed(rig))) == {"policy@2", "policy@3"}
        assert [e.num_aborted for e in rig.events if isinstance(e, LoraUnloaded)] == [0]
        assert [e.revision for e in rig.events if isinstance(e, LoraDraining)] == [1]

    play(tmp_path, scenario)


def test_drain_ends_at_its_limit_and_says_how_many_requests_it_ended(tmp_path: Path) -> None:
    """Bounded, also when the engine is paused and nothing can end by itself."""

    async def scenario(rig: Rig) -> None:
        await rig.send(publish(tmp_path, 1))
        request = rig.engine.submit("r", PROMPT, LONG, model="policy@1")
        await rig.send(PauseGeneration())
        await rig.send(UnloadLora(name="policy", revision=1, drain_s=20.0))
        await asyncio.sleep(19.0)
        assert request.finish is None
        await asyncio.sleep(2.0)
        assert request.finish == "abort"
        assert (await listed(rig)).loras == ()
        assert [e.num_aborted for e in rig.events if isinstance(e, LoraUnloaded)] == [1]

    play(tmp_path, scenario)


def test_drain_of_zero_seconds_ends_requests_at_once(tmp_path: Path) -> None:
    """And says how many."""

    async def scenario(rig: Rig) -> None:
        await rig.send(publish(tmp_path, 1))
        request = rig.engine.submit("r", PROMPT, LONG, model="policy@1")
        gone = data_of(await rig.send(UnloadLora(name="policy", revision=1, drain_s=0.0)))
        assert (gone.loras, gone.num_aborted, request.finish) == ((), 1, "abort")

    play(tmp_path, scenario)


def test_load_of_a_draining_revision_takes_it_back(tmp_path: Path) -> None:
    """It isn't read again, and stays when its requests have ended."""

    async def scenario(rig: Rig) -> None:
        await rig.send(publish(tmp_path, 1))
        request = rig.engine.submit("r", PROMPT, 500, model="policy@1")
        await rig.send(UnloadLora(name="policy", revision=1))
        back = data_of(await rig.send(publish(tmp_path, 1)))
        assert ids(back) == {"policy@1": LoraState.LOADED}
        await request.ended.wait()
        await asyncio.sleep(5.0)
        assert ids(await listed(rig)) == {"policy@1": LoraState.LOADED}

    play(tmp_path, scenario)


def test_unload_that_fails_after_a_drain_is_tried_again(tmp_path: Path) -> None:
    """Not in a storm: some seconds apart."""

    async def scenario(rig: Rig) -> None:
        await rig.send(publish(tmp_path, 1))
        request = rig.engine.submit("r", PROMPT, 100, model="policy@1")
        await rig.send(UnloadLora(name="policy", revision=1))
        await request.ended.wait()
        await asyncio.sleep(3.0)
        assert rig.engine.calls.count("unload_lora") == 1
        assert ids(await listed(rig)) == {"policy@1": LoraState.DRAINING}
        await asyncio.sleep(5.0)
        assert (await listed(rig)).loras == ()

    play(tmp_path, scenario, {"unload_lora": {1: failing()}})


def test_unload_of_what_isnt_there_is_ok(tmp_path: Path) -> None:
    """Whoever didn't hear the answer asks again."""

    async def scenario(rig: Rig) -> None:
        gone = await rig.send(UnloadLora(name="policy", revision=9))
        assert (gone.status, data_of(gone).loras) == (ResultStatus.OK, ())

    play(tmp_path, scenario)


def test_no_adapter_comes_or_goes_while_the_weights_sleep(tmp_path: Path) -> None:
    """Audit of issue 4, 2: it would be written into memory that is given back."""

    async def scenario(rig: Rig) -> None:
        assert (await rig.send(publish(tmp_path, 7))).status is ResultStatus.OK
        assert (await rig.send(Sleep())).status is ResultStatus.OK
        assert code_of(await rig.send(publish(tmp_path, 8))) is FaultCode.ASLEEP
        gone = UnloadLora(name="policy", revision=7, drain_s=0.0)
        assert code_of(await rig.send(gone)) is FaultCode.ASLEEP
        assert (await rig.send(WakeUp())).status is ResultStatus.OK
        assert (await rig.send(publish(tmp_path, 8))).status is ResultStatus.OK
        assert list(ids(await listed(rig))) == ["policy@7", "policy@8"]

    play(tmp_path, scenario)
