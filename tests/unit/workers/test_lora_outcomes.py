"""What a worker refuses about adapters, and what it makes of calls of the engine that went wrong."""

import asyncio
import errno
import os
import random
from pathlib import Path

import pytest

from rlbus.schemas import (
    FaultCode,
    FolderSource,
    GetLoras,
    GetStatus,
    LoadLora,
    LoraLoaded,
    LoraState,
    ResultStatus,
    UnloadLora,
    Version,
)
from rlbus.testing import run
from rlbus.workers import lora_files
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import Step, failing
from rlbus.workers.engines.lora import Resident
from rlbus.workers.lora_testing import config_for, fake_adapter, load_of
from rlbus.workers.loras import sum_of
from rlbus.workers.state import WorkerState
from rlbus.workers.testing import Rig, code_of, updated, worker_on_bus
from tests.unit.workers.lora_stage import PROMPT, data_of, ids, listed, play, publish, threads_end

pytestmark = pytest.mark.unit


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


@pytest.mark.parametrize("is_asked_already", [False, True])
def test_an_engine_that_is_slow_to_list_has_longer_for_who_asks_than_for_a_heartbeat(
    tmp_path: Path, is_asked_already: bool
) -> None:
    """The worker says at once that it is at work on it, and its heartbeats go on, without a word of adapters."""

    async def scenario(rig: Rig) -> None:
        slow[0] = Step(latency_s=5.0)
        if is_asked_already:
            looking = asyncio.create_task(rig.agent.look_at_loras())
            await asyncio.sleep(0.1)
        num_told = len(rig.announcements)
        asked = rig.post(GetLoras())
        await asked.until(lambda sent: sent.is_accepted, 0.5)
        assert ids(data_of(await asked.result())) == {}
        assert len(rig.announcements) > num_told
        assert rig.last.status.loras is None
        if is_asked_already:
            await looking

    slow: dict[int, Step] = {}
    play(tmp_path, scenario, {"list_loras": slow}, heartbeat_s=0.5)


def test_who_asks_hears_all_the_while_that_the_worker_is_at_work_and_waits_no_longer_than_asked_for(
    tmp_path: Path,
) -> None:
    """An engine that never says: a sign of life at least every second, and the answer at the deadline or after 8 s."""

    async def scenario(rig: Rig) -> None:
        hung[0] = Step(hangs=True)
        for expires_in_s, limit in ((4.0, "4"), (20.0, "8")):
            asked = rig.post(GetLoras(), expires_in_s=expires_in_s)
            result = await asked.result()
            assert result.fault is not None
            assert result.fault.message == f"the engine did not list its adapters within {limit} s; ask again"
            assert len(asked.progress) >= int(limit) - 1

    hung: dict[int, Step] = {}
    play(tmp_path, scenario, {"list_loras": hung})


def test_a_question_that_a_heartbeat_gives_up_costs_nobody_else_the_list(tmp_path: Path) -> None:
    """Asked right behind it, for as long as it said."""

    async def scenario(rig: Rig) -> None:
        slow[0] = Step(latency_s=3.0)
        rig.post(GetStatus())
        assert ids(data_of(await rig.send(GetLoras()))) == {}
        slow[0] = Step(hangs=True)
        rig.post(GetStatus())
        began_s = asyncio.get_running_loop().time()
        assert (await rig.send(GetLoras(), expires_in_s=2.0)).status is ResultStatus.FAILED
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(2.0, abs=0.1)

    slow: dict[int, Step] = {}
    play(tmp_path, scenario, {"list_loras": slow})


def test_what_drains_goes_also_where_the_engine_is_slow_to_list(tmp_path: Path) -> None:
    """It takes longer than a heartbeat waits for."""

    async def scenario(rig: Rig) -> None:
        await rig.send(publish(tmp_path, 1))
        request = rig.engine.submit("r", PROMPT, 300, model="policy@1")  # 3 s
        await rig.send(UnloadLora(name="policy", revision=1))
        slow[0] = Step(latency_s=3.0)
        await request.ended.wait()
        await asyncio.sleep(20.0)
        assert rig.agent.state.adapters == ()

    slow: dict[int, Step] = {}
    play(tmp_path, scenario, {"list_loras": slow})


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
        threads_end()
        assert list((tmp_path / "cache").glob("*/*")) == []
        assert rig.agent.state.adapters == ()

    play(tmp_path, scenario)


def test_load_whose_files_find_no_room_on_the_disk_is_refused_before_the_engine_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was evicted for it; with room it goes well."""

    async def scenario(rig: Rig) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(lora_files, "_copy", full)
            refused = await rig.send(publish(tmp_path, 7))
        assert (refused.status, code_of(refused)) == (ResultStatus.REFUSED, FaultCode.WRONG_STATE)
        assert rig.engine.calls.count("load_lora") == 0
        assert (await rig.send(publish(tmp_path, 7))).status is ResultStatus.OK

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

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


@pytest.mark.parametrize("tells_files", [False, True])
def test_revision_that_was_there_before_the_agent_is_nobodys_proof(tmp_path: Path, tells_files: bool) -> None:
    """Its bytes aren't known, or are others, so a load of it isn't "done already"; after an unload it is loaded."""

    async def scenario(rig: Rig) -> None:
        rig.engine.loras.tells_files = tells_files
        unknown = load_of(fake_adapter(tmp_path / "unknown", "unknown"), 7)
        rig.engine.loras.load("policy", 7, tmp_path / "unknown", None)
        body = publish(tmp_path, 7)
        assert code_of(await rig.send(body)) is FaultCode.REVISION_TAKEN
        (view,) = data_of(await rig.send(GetLoras())).loras
        assert (view.revision, view.checksum) == (7, unknown.checksum if tells_files else None)
        await asyncio.sleep(1.0)
        status = rig.last.status.loras
        assert status is not None
        assert (status.ids, status.sums) == (("policy@7",), (unknown.checksum[:16] if tells_files else "",))
        await rig.send(UnloadLora(name="policy", revision=7))
        (view,) = data_of(await rig.send(body)).loras
        assert view.checksum == body.checksum

    play(tmp_path, scenario)


def test_an_adapter_that_an_agent_before_loaded_is_known_by_the_folder_that_its_engine_reads(tmp_path: Path) -> None:
    """A sidecar that was started again beside its server: the same load is done already, and only the same."""

    async def scenario(rig: Rig) -> None:
        body = publish(tmp_path, 7)
        rig.engine.loras.load("policy", 7, tmp_path / "policy-7", None)
        rig.engine.loras.foreign = ["theirs"]
        assert [view.checksum for view in (await listed(rig)).loras] == [body.checksum, None]
        assert (await rig.send(body)).status is ResultStatus.OK
        assert "load_lora" not in rig.engine.calls
        other = load_of(fake_adapter(tmp_path / "other", "other bytes"), 7)
        assert code_of(await rig.send(other)) is FaultCode.REVISION_TAKEN

    play(tmp_path, scenario)


def test_a_folder_that_isnt_named_as_our_copies_are_proves_nothing() -> None:
    """Whoever loaded it may have changed it since."""
    state = WorkerState(component="backend", instance_id="1", world_size=1, routes=frozenset())
    assert [sum_of(state, Resident("policy", 7, files=f)) for f in ("adapter", "A" * 64, "a" * 64 + "\n", None)] == [
        None
    ] * 4
    assert sum_of(state, Resident("policy", 7, files="a" * 64)) == "a" * 64
    assert sum_of(state, Resident("theirs", None, files="a" * 64)) is None


def test_adapter_that_came_after_it_was_given_up_is_known_when_it_is_loaded_again(tmp_path: Path) -> None:
    """SCENARIOS 34: its bytes are those that were asked for then; others are still refused."""

    async def scenario(rig: Rig) -> None:
        body = publish(tmp_path, 7)
        assert (await rig.send(body)).status is ResultStatus.FAILED
        rig.engine.loras.load("policy", 7, tmp_path / "policy-7", None)  # the engine had gone on by itself
        other = load_of(fake_adapter(tmp_path / "other", "other bytes"), 7)
        assert code_of(await rig.send(other)) is FaultCode.REVISION_TAKEN
        (view,) = data_of(await rig.send(body)).loras
        assert (view.state, view.checksum) == (LoraState.LOADED, body.checksum)
        assert [a.state for a in rig.agent.state.adapters] == [LoraState.LOADED]

    play(tmp_path, scenario, {"load_lora": {1: failing()}})


def test_name_of_a_load_that_the_engine_refused_is_free(tmp_path: Path) -> None:
    """Nothing of those bytes was ever there."""

    async def scenario(rig: Rig) -> None:
        refused = await rig.send(publish(tmp_path, 7))
        assert (refused.status, code_of(refused)) == (ResultStatus.REFUSED, FaultCode.MANIFEST_MISMATCH)
        assert rig.agent.state.adapters == ()
        better = load_of(fake_adapter(tmp_path / "better", "better"), 7)
        assert (await rig.send(better)).status is ResultStatus.OK

    play(tmp_path, scenario, {"load_lora": {1: failing(code=FaultCode.MANIFEST_MISMATCH)}})


def test_list_is_answered_beside_a_load_that_hangs(tmp_path: Path) -> None:
    """A query shares neither task nor lock with a mutation."""

    async def scenario(rig: Rig) -> None:
        loading = rig.post(publish(tmp_path, 1), expires_in_s=20.0)
        await loading.until(lambda sent: sent.is_accepted)
        await asyncio.sleep(1.0)
        assert ids(await listed(rig)) == {"policy@1": LoraState.UNSETTLED}
        assert (await loading.result()).status is ResultStatus.FAILED

    play(tmp_path, scenario, {"load_lora": {1: Step(hangs=True)}})
