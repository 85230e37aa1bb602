"""Loads and unloads of adapters through the agent's rules, with the fake engine, in virtual time."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlbus.schemas import (
    FaultCode,
    FolderSource,
    GetLoras,
    GetStatus,
    LoadLora,
    LoraDraining,
    LoraLoaded,
    LorasData,
    LoraState,
    LoraUnloaded,
    PauseGeneration,
    Result,
    ResultStatus,
    ResumeGeneration,
    StatusData,
    UnloadLora,
    Version,
    lora_id,
)
from rlbus.testing import run
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_loras import UnknownModelError
from rlbus.workers.engines.fake_script import FakeScript, Step, failing
from rlbus.workers.engines.lora import LoraInfo
from rlbus.workers.lora_testing import config_for, fake_adapter, load_of
from rlbus.workers.testing import Rig, code_of, updated, worker_on_bus

pytestmark = pytest.mark.unit

PROMPT = (1, 2, 3)
LONG = 10_000


def play(
    root: Path,
    scenario: Callable[[Rig], Coroutine[Any, Any, None]],
    steps: Mapping[str, Mapping[int, Step]] | None = None,
    loras: LoraInfo | None = None,
    **settings: float,
) -> None:
    """Run a scenario against a worker that may load from `root`."""

    async def main() -> None:
        info = LoraInfo(4, can_hot_swap=True) if loras is None else loras
        engine = FakeEngine(FakeScript({} if steps is None else steps), loras=info)
        async with worker_on_bus(engine, config=config_for(root, **settings)) as rig:
            await scenario(rig)
        assert engine.violations == []

    run(main())


def publish(root: Path, revision: int, name: str = "policy", **options: bool) -> LoadLora:
    """The load of a revision with bytes of its own."""
    return load_of(fake_adapter(root / f"{name}-{revision}", f"{name} {revision}"), revision, name, **options)


def data_of(result: Result) -> LorasData:
    """What an answer says of the adapters."""
    assert isinstance(result.data, LorasData), result.fault
    return result.data


def ids(data: LorasData) -> dict[str, LoraState]:
    """The adapters of an answer."""
    return {v.name if v.revision is None else lora_id(v.name, v.revision): v.state for v in data.loras}


async def listed(rig: Rig) -> LorasData:
    """What the engine has now."""
    return data_of(await rig.send(GetLoras()))


def told(rig: Rig) -> tuple[int, tuple[str, ...]]:
    """Capacity and adapters in the last heartbeat."""
    view = rig.last.status.loras
    assert view is not None
    return view.capacity, view.ids


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
        assert code_of(await rig.send(publish(tmp_path, 21, evict_idle=True))) is FaultCode.NO_CAPACITY
        assert len((await listed(rig)).loras) == 4

    play(tmp_path, scenario)


def test_adapter_of_somebody_else_takes_a_place_and_is_never_evicted(tmp_path: Path) -> None:
    """What the engine has counts, not what we have put there."""

    async def scenario(rig: Rig) -> None:
        rig.engine.loras.foreign = ["theirs"]
        await rig.send(publish(tmp_path, 1))
        full = await rig.send(publish(tmp_path, 2, "another", evict_idle=True))
        assert code_of(full) is FaultCode.NO_CAPACITY
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


@pytest.mark.parametrize("how", [failing(), Step(hangs=True)], ids=["raises", "hangs"])
@pytest.mark.parametrize("does_it", [True, False], ids=["done", "not done"])
def test_load_that_went_wrong_is_settled_by_the_engines_own_list(tmp_path: Path, how: Step, does_it: bool) -> None:
    """SCENARIOS 34: done all the same is ok, with the cause; not done is failed, and the next try works."""
    step = Step(does_it=does_it, fault=how.fault, hangs=how.hangs)

    async def scenario(rig: Rig) -> None:
        result = await rig.send(publish(tmp_path, 7), expires_in_s=5.0)
        code = FaultCode.DEADLINE if how.hangs else FaultCode.ENGINE_FAILED
        if does_it:
            assert result.status is ResultStatus.OK
            cause = data_of(result).cause
            assert cause is not None
            assert cause.code is code
            assert ids(data_of(result)) == {"policy@7": LoraState.LOADED}
        else:
            assert (result.status, code_of(result)) == (ResultStatus.FAILED, code)
            assert result.fault is not None
            assert result.fault.detail["settled"] == "not done"
            assert (await listed(rig)).loras == ()
        assert (await rig.send(publish(tmp_path, 7))).status is ResultStatus.OK

    play(tmp_path, scenario, {"load_lora": {1: step}})


@pytest.mark.parametrize("does_it", [True, False], ids=["done", "not done"])
def test_unload_that_went_wrong_is_settled_by_the_engines_own_list(tmp_path: Path, does_it: bool) -> None:
    """SCENARIOS 34: the reverse; a retry of one that is done is ok and doesn't loop on the same error."""

    async def scenario(rig: Rig) -> None:
        await rig.send(publish(tmp_path, 7))
        result = await rig.send(UnloadLora(name="policy", revision=7))
        assert result.status is (ResultStatus.OK if does_it else ResultStatus.FAILED)
        again = await rig.send(UnloadLora(name="policy", revision=7))
        assert (again.status, data_of(again).loras) == (ResultStatus.OK, ())

    play(tmp_path, scenario, {"unload_lora": {1: Step(does_it=does_it, fault=failing().fault)}})


def test_outcome_that_nobody_can_tell_is_unsettled_until_the_engine_says(tmp_path: Path) -> None:
    """SCENARIOS 34: neither ok nor gone; the first cause stays; the next look settles it."""

    async def scenario(rig: Rig) -> None:
        result = await rig.send(publish(tmp_path, 7))
        assert result.fault is not None
        assert result.fault.code is FaultCode.ENGINE_FAILED
        assert result.fault.message == "scripted failure"
        assert result.fault.detail["settled"] == "unknown"
        assert [a.state for a in rig.agent.state.adapters] == [LoraState.UNSETTLED]
        other = load_of(fake_adapter(tmp_path / "other", "other bytes"), 7)
        assert code_of(await rig.send(other)) is FaultCode.REVISION_TAKEN
        assert ids(await listed(rig)) == {"policy@7": LoraState.LOADED}
        assert [a.state for a in rig.agent.state.adapters] == [LoraState.LOADED]
        assert [e.revision for e in rig.events if isinstance(e, LoraLoaded)] == [7]

    # The first look is the heartbeat's, the second that before the load, the third the one that should settle it.
    silent = failing("no list")
    play(tmp_path, scenario, {"load_lora": {1: Step(does_it=True, fault=failing().fault)}, "list_loras": {3: silent}})


def test_list_that_the_engine_doesnt_give_is_a_failure_and_never_a_cached_list(tmp_path: Path) -> None:
    """In the answer, and in the status, which then doesn't speak of adapters."""

    async def scenario(rig: Rig) -> None:
        result = await rig.send(GetLoras())
        assert (result.status, code_of(result)) == (ResultStatus.FAILED, FaultCode.ENGINE_FAILED)
        assert rig.agent.status().loras is None

    play(tmp_path, scenario, {"list_loras": {2: Step(hangs=True)}})


def test_twenty_loads_and_unloads_of_one_name_at_once_run_one_at_a_time(tmp_path: Path) -> None:
    """SCENARIOS 33: with random failures; the end is what the last acknowledged op says."""
    steps = {n: failing() for n in (2, 5, 6)}

    async def scenario(rig: Rig) -> None:
        chance = random.Random(1)
        acknowledged: list[tuple[float, bool]] = []

        async def one(number: int) -> None:
            is_load = number % 2 == 0
            body = publish(tmp_path, 7) if is_load else UnloadLora(name="policy", revision=7)
            while True:
                await asyncio.sleep(chance.random())
                result = await rig.send(body)
                if code_of(result) is not FaultCode.BUSY:
                    break
            if result.status is ResultStatus.OK:
                acknowledged.append((asyncio.get_running_loop().time(), is_load))

        await asyncio.gather(*(one(number) for number in range(20)))
        assert (len((await listed(rig)).loras) == 1) is acknowledged[-1][1]

    slow = Step(latency_s=0.2)
    play(tmp_path, scenario, {"load_lora": {0: slow, **steps}, "unload_lora": {0: slow, **steps}})


@pytest.mark.parametrize("name", ["policy@7", "a/b", "..", "-x", "", "a" * 65, "a\n"])
def test_name_that_is_none_is_refused_before_anything_happens(tmp_path: Path, name: str) -> None:
    """As a message that doesn't parse."""

    async def scenario(rig: Rig) -> None:
        sent = rig.post(LoadLora(name=name, revision=1, checksum="0" * 64, source=FolderSource(path=str(tmp_path))))
        assert code_of(await sent.result()) is FaultCode.BAD_MESSAGE
        assert "load_lora" not in rig.engine.calls

    play(tmp_path, scenario)


@pytest.mark.parametrize("way", ["elsewhere", "dots", "link", "link inside", "no roots"])
def test_folder_outside_of_the_roots_is_refused(tmp_path: Path, way: str) -> None:
    """Links are followed, also those of the files in it."""
    root = tmp_path / "root"
    secret = fake_adapter(tmp_path / "secret", "secret")
    root.mkdir()
    path = {"elsewhere": secret, "dots": root / ".." / "secret", "link": root / "link", "no roots": secret}.get(way)
    if way == "link":
        (root / "link").symlink_to(secret)
    if way == "link inside":
        path = fake_adapter(root / "inside", "x")
        (path / "adapter_model.safetensors").unlink()
        (path / "adapter_model.safetensors").symlink_to(secret / "adapter_model.safetensors")
    assert path is not None
    body = load_of(path, 1)

    async def main() -> None:
        config = config_for(root)
        if way == "no roots":
            config = config_for(root).__class__()
        async with worker_on_bus(FakeEngine(), config=config) as rig:
            refused = await rig.send(body)
            assert (refused.status, code_of(refused)) == (ResultStatus.REFUSED, FaultCode.WRONG_STATE)
            assert "load_lora" not in rig.engine.calls

    run(main())


@pytest.mark.parametrize("what", ["missing", "other bytes", "one file"])
def test_folder_that_isnt_what_was_announced_is_refused(tmp_path: Path, what: str) -> None:
    """Nothing has changed, and nothing is kept of it."""
    body = publish(tmp_path, 1)
    folder = tmp_path / "policy-1"
    if what == "other bytes":
        fake_adapter(folder, "changed since")
    if what == "one file":
        (folder / "adapter_config.json").unlink()
    if what == "missing":
        folder.rename(tmp_path / "gone")

    async def scenario(rig: Rig) -> None:
        refused = await rig.send(body)
        assert (refused.status, code_of(refused)) == (ResultStatus.REFUSED, FaultCode.MANIFEST_MISMATCH)
        assert list((tmp_path / "cache").iterdir()) == []
        assert rig.agent.state.adapters == ()

    play(tmp_path, scenario)


def test_load_onto_torn_weights_is_refused_and_an_unload_is_not(tmp_path: Path) -> None:
    """An update that tore the weights: `dirty`; while it is open: `busy`. Afterwards adapters are as they were."""

    async def scenario(rig: Rig) -> None:
        await rig.send(publish(tmp_path, 1))
        tensors = rig.engine.tensors
        await rig.until_paused(Version(step=1), tensors)
        failed = await rig.receive(Version(step=1), tensors).result()
        assert failed.status is ResultStatus.FAILED
        assert code_of(await rig.send(publish(tmp_path, 2))) is FaultCode.DIRTY
        await rig.send(UnloadLora(name="policy", revision=1))
        assert (await listed(rig)).loras == ()
        await rig.until_paused(Version(step=2), tensors, "v", epoch=2)
        await rig.receive(Version(step=2), tensors, "v", epoch=2).result()
        assert code_of(await rig.send(publish(tmp_path, 2))) is FaultCode.BUSY
        assert code_of(await rig.send(UnloadLora(name="policy", revision=1))) is FaultCode.BUSY
        await rig.commit(Version(step=2), "v")
        assert (await rig.send(publish(tmp_path, 2))).status is ResultStatus.OK

    play(tmp_path, scenario, {"receive_weights": {1: failing(code=FaultCode.TRANSFER_FAILED, after_parts=2)}})


def test_adapters_stay_over_an_update_of_the_base_weights(tmp_path: Path) -> None:
    """And answer from the new ones."""

    async def scenario(rig: Rig) -> None:
        await rig.send(publish(tmp_path, 1))
        before = rig.engine.submit("a", PROMPT, 4, model="policy@1")
        await before.ended.wait()
        await updated(rig, Version(step=1))
        assert ids(await listed(rig)) == {"policy@1": LoraState.LOADED}
        after = rig.engine.submit("b", PROMPT, 4, model="policy@1")
        await after.ended.wait()
        assert after.tokens != before.tokens

    play(tmp_path, scenario)


def test_engine_that_takes_no_adapters_has_no_route_for_them(tmp_path: Path) -> None:
    """Refused, and never emulated; its status doesn't speak of adapters."""

    async def main() -> None:
        engine = FakeEngine(routes=frozenset({"pause_generation", "resume_generation"}))
        async with worker_on_bus(engine, config=config_for(tmp_path)) as rig:
            for body in (publish(tmp_path, 1), UnloadLora(name="policy", revision=1), GetLoras()):
                assert code_of(await rig.send(body)) is FaultCode.NO_ROUTE
            assert rig.last.status.loras is None

    run(main())


def test_list_is_answered_beside_a_load_that_hangs(tmp_path: Path) -> None:
    """A query shares neither task nor lock with a mutation."""

    async def scenario(rig: Rig) -> None:
        loading = rig.post(publish(tmp_path, 1), expires_in_s=20.0)
        await loading.until(lambda sent: sent.is_accepted)
        await asyncio.sleep(1.0)
        assert ids(await listed(rig)) == {"policy@1": LoraState.UNSETTLED}
        assert (await loading.result()).status is ResultStatus.FAILED

    play(tmp_path, scenario, {"load_lora": {1: Step(hangs=True)}})
