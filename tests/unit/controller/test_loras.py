"""Adapters on a whole fleet: all have it or nobody, whatever goes wrong; revisions are for ever."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rlbus.adapter import AdapterError
from rlbus.connecting import open_objects
from rlbus.errors import CapacityError, ConfigError, PartialError, RefusedError
from rlbus.schemas import (
    FaultCode,
    Generation,
    LoadLora,
    LorasData,
    OpStatus,
    PauseGeneration,
    Report,
    ResumeGeneration,
)
from rlbus.testing import Faults, MemoryTransport
from rlbus.workers.engines.fake_loras import UnknownModelError
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.lora_stage import adapter, listed, on_fleet, serving, taker, takers
from tests.unit.controller.scene import Scene, outcomes, w

pytestmark = pytest.mark.unit

RUNNING, PAUSED = Generation.RUNNING, Generation.PAUSED


def test_a_load_pauses_all_loads_on_all_and_lets_all_go(tmp_path: Path) -> None:
    """The folder reaches workers that can't read it through the bus's store; the report says under which name."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.load_lora("policy", folder)
        assert (report.status, outcomes(report)) == (OpStatus.OK, {"1": "ok", "2": "ok"})
        assert report.lora is not None
        assert (report.lora.ids, report.lora.hot_swap) == (("policy@1",), False)
        assert serving(scene) == [["policy@1"], ["policy@1"]]
        assert await scene.generations() == [RUNNING, RUNNING]
        assert [await scene.addressed(b) for b in (PauseGeneration, ResumeGeneration)] == [["1", "2"]] * 2
        assert list(report.phases_s) == ["plan", "check", "pause", "load", "resume"]
        view = await scene.fleet.client.status()
        assert [(one.name, one.revision) for one in view.loras] == [("policy", 1)]
        assert listed(await scene.fleet.client.loras()) == {"1": ["policy@1"], "2": ["policy@1"]}

    on_fleet(takers(1, 2), scenario)


def test_a_shared_folder_is_read_by_the_workers_themselves(tmp_path: Path) -> None:
    """Only below their roots: a worker without them refuses, and nobody keeps it."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.load_lora("policy", folder, shared=True, check=False)
        assert outcomes(report) == {"1": "undone", "2": "refused"}
        assert report.status is OpStatus.FAILED
        assert serving(scene) == [[], []]
        assert await scene.generations() == [RUNNING, RUNNING]
        assert (await scene.fleet.client.status()).loras == ()

    on_fleet([taker(1, roots=[tmp_path]), taker(2)], scenario)


def test_revisions_count_up_and_stand_for_the_same_bytes_for_ever(tmp_path: Path) -> None:
    """SCENARIOS 31: a name is never used again for other bytes, also not after it was unloaded."""
    one, two = adapter(tmp_path / "1", "one"), adapter(tmp_path / "2", "two")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", one)
        second = await client.load_lora("policy", two)
        assert second.lora is not None
        assert second.lora.ids == ("policy@2",)
        assert serving(scene) == [["policy@1", "policy@2"]] * 2
        again = await client.load_lora("policy", two, revision=2)
        assert outcomes(again) == {"1": "ok", "2": "ok"}
        await client.unload_lora("policy", revision=2)
        with pytest.raises(RefusedError, match="policy@2 stands for other bytes") as caught:
            await client.load_lora("policy", one, revision=2)
        assert caught.value.code is FaultCode.REVISION_TAKEN
        await client.load_lora("policy", one, revision=7)
        eighth = await client.load_lora("policy", two)
        assert eighth.lora is not None
        assert eighth.lora.ids == ("policy@8",)

    on_fleet(takers(1, 2), scenario)


def test_a_worker_that_fails_costs_the_others_their_new_adapter(tmp_path: Path) -> None:
    """Rolled back, each with its outcome; the number isn't given again."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        with pytest.raises(PartialError) as caught:
            await scene.fleet.client.load_lora("policy", folder)
        report: Report = caught.value.report
        assert outcomes(report) == {"1": "undone", "2": "failed", "3": "undone"}
        assert report.fault is not None
        assert report.fault.detail["worker"] == w(2)
        assert serving(scene) == [[], [], []]
        assert await scene.generations() == [RUNNING] * 3
        report = await scene.fleet.client.load_lora("policy", folder)
        assert report.lora is not None
        assert report.lora.ids == ("policy@2",)

    on_fleet([taker(1), taker(2, {"load_lora": {1: failing()}}), taker(3)], scenario)


def test_a_load_that_failed_after_it_was_done_is_settled_by_the_engines_own_list(tmp_path: Path) -> None:
    """SCENARIOS 34: the engine has it, whatever its answer said; the first cause is kept beside the outcome."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.load_lora("policy", folder)
        assert outcomes(report) == {"1": "ok", "2": "ok"}
        data = report.outcomes[1].data
        assert isinstance(data, LorasData)
        assert data.cause is not None
        assert serving(scene) == [["policy@1"]] * 2

    on_fleet([taker(1), taker(2, {"load_lora": {1: replace(failing(), does_it=True)}})], scenario)


def test_an_answer_that_is_lost_is_settled_too(tmp_path: Path) -> None:
    """SCENARIOS 34: worker 2 does it, and its answers are dropped for a while."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        scene.at(LoadLora, lambda: scene.cut(2))
        loading = asyncio.create_task(client.load_lora("policy", folder, check=False))
        await asyncio.sleep(8.0)
        scene.heal(2)
        report = await loading
        assert outcomes(report)["2"] in ("ok", "unknown")
        everywhere = {tuple(ids) for ids in serving(scene)}
        assert len(everywhere) == 1, "all have it, or nobody"
        assert await scene.generations() == [RUNNING, RUNNING]

    on_fleet(takers(1, 2), scenario)


def test_a_full_engine_is_found_before_anything_changes(tmp_path: Path) -> None:
    """Nobody is paused for it, and the fault names the worker and its room."""
    one, two = adapter(tmp_path / "1", "one"), adapter(tmp_path / "2", "two")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", one)
        scene.commands.clear()
        with pytest.raises(CapacityError, match=r"backend/2 has room for 1 adapters and has policy@1") as caught:
            await client.load_lora("policy", two)
        assert caught.value.capacity == 1
        assert await scene.addressed(PauseGeneration) == []
        assert serving(scene) == [["policy@1"]] * 2

    on_fleet([taker(1), taker(2, capacity=1)], scenario)


def test_idle_older_revisions_make_room_and_leave_the_fleet(tmp_path: Path) -> None:
    """SCENARIOS 35: one adapter a step never piles up; what had to go is not given back by the catch-up."""

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        for step in range(1, 21):
            report = await client.load_lora("policy", adapter(tmp_path / str(step), f"{step:03}"), evict_idle=True)
            assert report.lora is not None
            assert report.lora.ids == (f"policy@{step}",)
            assert len(serving(scene)[0]) <= 4
        assert report.lora is not None
        assert report.lora.evicted == ("policy@16",)
        assert serving(scene) == [[f"policy@{r}" for r in (17, 18, 19, 20)]] * 2
        await asyncio.sleep(30.0)
        view = await client.status()
        assert [one.revision for one in view.loras] == [17, 18, 19, 20]
        assert [m.loras_behind for m in view.members] == [(), ()]

    on_fleet(takers(1, 2), scenario)


def test_a_hot_swap_pauses_nobody_and_needs_every_engine(tmp_path: Path) -> None:
    """Reported as what it was: one engine without caches by revision makes it an ordinary load."""
    one, two = adapter(tmp_path / "1", "one"), adapter(tmp_path / "2", "two")

    async def swapped(scene: Scene) -> None:
        await scene.fleet.client.load_lora("policy", one)
        scene.commands.clear()
        report = await scene.fleet.client.load_lora("policy", two, hot_swap=True)
        assert report.lora is not None
        assert (report.lora.hot_swap, report.lora.evicted, report.paused_s) == (True, ("policy@1",), 0.0)
        assert await scene.addressed(PauseGeneration) == []
        assert serving(scene) == [["policy@2"]] * 2

    async def ordinary(scene: Scene) -> None:
        await scene.fleet.client.load_lora("policy", one)
        scene.commands.clear()
        report = await scene.fleet.client.load_lora("policy", two, hot_swap=True)
        assert report.lora is not None
        assert (report.lora.hot_swap, report.lora.evicted) == (False, ())
        assert await scene.addressed(PauseGeneration) == ["1", "2"]
        assert serving(scene) == [["policy@1", "policy@2"]] * 2

    on_fleet(takers(1, 2, can_hot_swap=True), swapped)
    on_fleet([taker(1, can_hot_swap=True), taker(2)], ordinary)


def test_a_hot_swap_that_fails_on_one_gives_the_others_the_old_revision_back(tmp_path: Path) -> None:
    """What was replaced in place is loaded again from where it came from."""
    one, two = adapter(tmp_path / "1", "one"), adapter(tmp_path / "2", "two")

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.load_lora("policy", one)
        report = await scene.fleet.client.load_lora("policy", two, hot_swap=True, check=False)
        assert outcomes(report) == {"1": "undone", "2": "failed"}
        assert serving(scene) == [["policy@1"]] * 2

    second = {"load_lora": {2: failing()}}
    on_fleet([taker(1, can_hot_swap=True), taker(2, second, can_hot_swap=True)], scenario)


def test_an_unload_waits_for_no_request_and_ends_none(tmp_path: Path) -> None:
    """SCENARIOS 32: a request in flight keeps its adapter; new ones are refused, and it goes when that one ends."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", folder)
        engine = scene.fleet.workers[0].engine
        request = engine.submit("long", [1, 2], num_tokens=300, model="policy@1")
        report = await client.unload_lora("policy", revision=1)
        assert report.lora is not None
        assert (report.lora.ids, report.lora.num_draining) == (("policy@1",), 1)
        assert listed(await client.loras()) == {"1": ["policy@1 draining"], "2": []}
        with pytest.raises(UnknownModelError):
            engine.submit("late", [1], num_tokens=1, model="policy@1")
        await request.ended.wait()
        await asyncio.sleep(2.0)
        assert listed(await client.loras()) == {"1": [], "2": []}
        assert request.finish == "length"

    on_fleet(takers(1, 2), scenario)


def test_a_name_without_a_revision_unloads_all_of_them(tmp_path: Path) -> None:
    """And one that isn't loaded says what is."""

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        for step in (1, 2):
            await client.load_lora("policy", adapter(tmp_path / str(step), str(step)))
        await client.load_lora("judge", adapter(tmp_path / "j", "judge"))
        report = await client.unload_lora("policy")
        assert report.lora is not None
        assert report.lora.ids == ("policy@1", "policy@2")
        assert serving(scene) == [["judge@1"]] * 2
        with pytest.raises(RefusedError, match="no revision of policy is loaded; the fleet has judge@1"):
            await client.unload_lora("policy")

    on_fleet(takers(1, 2), scenario)


def test_an_unload_whose_answer_says_it_failed_is_settled_by_the_list(tmp_path: Path) -> None:
    """SCENARIOS 34: what is gone is gone."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.load_lora("policy", folder)
        report = await scene.fleet.client.unload_lora("policy", drain_s=0.0)
        assert outcomes(report) == {"1": "ok", "2": "ok"}
        assert serving(scene) == [[], []]
        assert (await scene.fleet.client.status()).loras == ()

    broken = {"unload_lora": {1: replace(failing(), does_it=True)}}
    on_fleet([taker(1), taker(2, broken)], scenario)


def test_mixed_loads_and_unloads_of_one_name_run_one_at_a_time(tmp_path: Path) -> None:
    """SCENARIOS 33: whoever comes meanwhile is told who runs; the end is that of the last one that was acknowledged."""
    folders = [adapter(tmp_path / str(i), str(i)) for i in range(3)]

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", folders[0], revision=1)
        ended: list[tuple[str, Report]] = []
        refusals: list[FaultCode] = []

        async def one(number: int) -> None:
            await asyncio.sleep(0.05 * number)
            what = "unload" if number % 2 else "load"
            try:
                if what == "load":
                    report = await client.load_lora("policy", folders[0], revision=1, check=False)
                else:
                    report = await client.unload_lora("policy", revision=1, check=False)
            except RefusedError as exc:
                refusals.append(exc.code)
            else:
                ended.append((what, report))

        await asyncio.gather(*(one(number) for number in range(20)))
        assert set(refusals) == {FaultCode.BUSY}
        good = [what for what, report in ended if report.status is OpStatus.OK]
        expected = ["policy@1"] if good[-1] == "load" else []
        assert serving(scene) == [expected] * 2

    flaky = {"load_lora": {3: failing()}, "unload_lora": {2: Step(latency_s=0.2)}}
    on_fleet([taker(1, {"load_lora": {n: Step(latency_s=0.1) for n in range(2, 9)}}), taker(2, flaky)], scenario)


def test_a_load_that_is_cancelled_is_taken_back(tmp_path: Path) -> None:
    """In the middle of a slow load: unloaded where it was done, and where it still ran, and everybody goes on."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        loading = asyncio.create_task(scene.fleet.client.load_lora("policy", folder, check=False, op_id="slow"))
        await asyncio.sleep(2.0)
        await scene.fleet.client.cancel("slow")
        report = await loading
        assert report.status is OpStatus.FAILED
        assert report.fault is not None
        assert report.fault.code is FaultCode.CANCELLED
        assert serving(scene) == [[], []]
        assert await scene.generations() == [RUNNING, RUNNING]

    on_fleet([taker(1), taker(2, {"load_lora": {1: Step(latency_s=10.0)}})], scenario)


def test_who_was_held_before_stays_held(tmp_path: Path) -> None:
    """A person's pause isn't ended by a load."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.pause()
        await scene.fleet.client.load_lora("policy", folder)
        assert serving(scene) == [["policy@1"]]
        assert await scene.generations() == [PAUSED]

    on_fleet(takers(1), scenario)


def test_a_worker_that_comes_back_is_given_what_the_fleet_has(tmp_path: Path) -> None:
    """It lacks it visibly until then; nobody else is touched."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", folder)
        scene.commands.clear()
        async with taker(3)(scene.fleet.broker) as late:
            await client.wait_ready(num_workers=3)
            view = (await scene.fleet.members())[w(3)]
            assert [(b.id, b.note) for b in view.loras_behind] == [("policy@1", "is given it next")]
            await asyncio.sleep(5.0)
            assert sorted(late.engine.loras.sums) == [("policy", 1)]
            assert (await scene.fleet.members())[w(3)].loras_behind == ()
            assert await scene.addressed(PauseGeneration) == []
            assert await scene.addressed(LoadLora) == ["3"]

    on_fleet(takers(1, 2), scenario)


def test_a_catch_up_of_an_adapter_gives_way_to_any_other_op(tmp_path: Path) -> None:
    """Nobody is told `busy` because of it, and it is done after all."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        await client.load_lora("policy", folder)
        async with taker(3, {"load_lora": {0: Step(latency_s=3.0)}})(scene.fleet.broker) as late:
            await client.wait_ready(num_workers=3)
            await asyncio.sleep(1.5)
            assert (await scene.fleet.members())[w(3)].loras_behind[0].note == "is given it now"
            report = await client.pause()
            assert outcomes(report) == {"1": "ok", "2": "ok", "3": "ok"}
            await client.resume()
            await asyncio.sleep(10.0)
            assert sorted(late.engine.loras.sums) == [("policy", 1)]

    on_fleet(takers(1, 2), scenario)


@pytest.mark.parametrize("seed", range(6))
def test_a_bus_that_loses_messages_changes_nothing_of_that(tmp_path: Path, seed: int) -> None:
    """One in ten of a worker's messages is dropped, one in ten comes twice: all have it or nobody, and it ends."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        for rig in scene.fleet.workers:
            transport = rig.worker_bus.transport
            assert isinstance(transport, MemoryTransport)
            transport.faults = Faults(drop=0.1, duplicate=0.1, delay_s=(0.0, 0.05 * (1 + seed)))
        for step in range(4):
            report = await client.load_lora("policy", folder, revision=1 + step, check=False)
            found = [[i for i in ids if i == f"policy@{1 + step}"] for ids in serving(scene)]
            assert found in ([[f"policy@{1 + step}"]] * 2, [[], []]), report
            assert (found[0] != []) == (report.status is OpStatus.OK), report
            assert await scene.generations() == [RUNNING, RUNNING]

    on_fleet(takers(1, 2), scenario)


def test_what_can_t_be_given_is_shown_with_the_reason_and_tried_again(tmp_path: Path) -> None:
    """Its object is gone from the store: visible, never silent, and not in a tight loop."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        report = await client.load_lora("policy", folder)
        assert report.lora is not None
        assert report.lora.checksum is not None
        await open_objects(client.bus, "test").delete(report.lora.checksum)
        async with taker(3)(scene.fleet.broker):
            await client.wait_ready(num_workers=3)
            await asyncio.sleep(60.0)
            (behind,) = (await scene.fleet.members())[w(3)].loras_behind
            assert "isn't in the bus's store" in behind.note
            assert "tried again in" in behind.note
            num_tries = sum(isinstance(c.body, LoadLora) for c, _ in scene.commands)
            assert 3 <= num_tries <= 10

    on_fleet(takers(1, 2), scenario)


def test_what_is_unloaded_frees_the_store_unless_somebody_needs_it(tmp_path: Path) -> None:
    """Two names for the same bytes share one object, which goes with the second."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        objects = open_objects(client.bus, "test")
        report = await client.load_lora("policy", folder)
        await client.load_lora("judge", folder)
        assert report.lora is not None
        assert report.lora.checksum is not None
        await client.unload_lora("policy")
        assert await objects.look(report.lora.checksum) is not None
        await client.unload_lora("judge")
        assert await objects.look(report.lora.checksum) is None

    on_fleet(takers(1), scenario)


def test_a_load_that_fails_frees_the_store(tmp_path: Path) -> None:
    """A retry puts it again."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        report = await client.load_lora("policy", folder, check=False)
        assert report.lora is not None
        assert report.lora.checksum is not None
        assert await open_objects(client.bus, "test").look(report.lora.checksum) is None
        await client.load_lora("policy", folder)
        assert serving(scene) == [["policy@2"]]

    on_fleet([taker(1, {"load_lora": {1: failing()}})], scenario)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"name": "policy@7"}, "give the revision apart"),
        ({"name": "../policy"}, "use 1 to 64"),
        ({"revision": 0}, "use 1 to"),
        ({"pause_mode": "stop"}, "keep, wait or abort"),
        ({"folder": Path("relative"), "shared": True}, "absolute path"),
    ],
)
def test_bad_arguments_never_leave_the_client(tmp_path: Path, arguments: dict[str, object], problem: str) -> None:
    """Each names what to write instead."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        given = {"name": "policy", "folder": folder, **arguments}
        with pytest.raises(ConfigError, match=problem):
            await scene.fleet.client.load_lora(**given)  # type: ignore[arg-type]

    on_fleet(takers(1), scenario)


def test_a_folder_that_is_no_adapter_is_refused_here(tmp_path: Path) -> None:
    """Names the file that is missing."""

    async def scenario(scene: Scene) -> None:
        with pytest.raises(AdapterError, match=r"adapter_config\.json"):
            await scene.fleet.client.load_lora("policy", tmp_path)

    on_fleet(takers(1), scenario)
