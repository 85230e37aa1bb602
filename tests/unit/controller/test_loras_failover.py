"""Adapters and controllers that die: the next one finishes or takes back, and gives no revision twice."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlbus.controller import journal
from rlbus.controller.limits import OVERRUN_S
from rlbus.errors import RefusedError
from rlbus.schemas import (
    Command,
    Generation,
    GetLoras,
    LoadLora,
    OpStatus,
    PauseGeneration,
    ResumeGeneration,
    Target,
    UnloadLora,
)
from rlbus.testing import MemoryTransport
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.failover_stage import Stage, play
from tests.unit.controller.lora_stage import adapter, taker, takers
from tests.unit.controller.scene import outcomes, w

pytestmark = pytest.mark.unit

RUNNING = Generation.RUNNING
FIRST = Target(workers=(w(1),))


def serving(stage: Stage) -> list[list[str]]:
    return [sorted(f"{n}@{r}" for n, r in rig.engine.loras.sums) for rig in stage.workers]


def killing(stage: Stage, body: type[Any], after_s: float = 0.0) -> Callable[[Command], None]:
    """Kill the leader when it sends such a command, or a moment later."""

    def look(command: Command) -> None:
        if isinstance(command.body, body) and not stage.processes[0].is_killed:
            asyncio.get_running_loop().call_later(after_s, stage.kill, stage.processes[0])

    return look


async def settled(stage: Stage) -> None:
    """Until a leader runs nothing any more."""
    async with asyncio.timeout(120.0):
        while True:
            await stage.leader()
            if (await stage.client.status()).op_id is None:
                return
            await asyncio.sleep(0.1)


def test_the_next_controller_knows_what_the_fleet_has_and_gives_no_revision_twice(tmp_path: Path) -> None:
    """Also one that was unloaded; and the same number for other bytes is refused."""
    one, two = adapter(tmp_path / "1", "one"), adapter(tmp_path / "2", "two")

    async def scenario(stage: Stage) -> None:
        await stage.client.load_lora("policy", one)
        await stage.client.load_lora("policy", two)
        await stage.client.unload_lora("policy", revision=2)
        await asyncio.sleep(1.0)
        stage.kill(stage.processes[0])
        await stage.leader()
        assert [x.revision for x in (await stage.client.status()).loras] == [1]
        with pytest.raises(RefusedError, match="policy@2 stands for other bytes"):
            await stage.client.load_lora("policy", one, revision=2)
        report = await stage.client.load_lora("policy", two)
        assert report.lora is not None
        assert report.lora.ids == ("policy@3",)
        assert serving(stage) == [["policy@1", "policy@3"]] * 2

    play(takers(1, 2), scenario)


def test_a_load_that_everybody_has_when_its_controller_dies_is_finished(tmp_path: Path) -> None:
    """Nobody is left paused, and it is the fleet's."""
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        stage.on_command = killing(stage, ResumeGeneration)
        report = await stage.client.load_lora("policy", folder, check=False)
        await settled(stage)
        assert outcomes(report) == {"1": "ok", "2": "ok"}
        assert report.lora is not None
        assert report.lora.ids == ("policy@1",)
        assert serving(stage) == [["policy@1"]] * 2
        assert await stage.generations() == [RUNNING, RUNNING]
        assert [x.revision for x in (await stage.client.status()).loras] == [1]

    play(takers(1, 2), scenario)


def test_a_load_that_still_runs_when_its_controller_dies_is_waited_for_and_finished(tmp_path: Path) -> None:
    """Nothing is thrown away that is about to be done everywhere."""
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        stage.on_command = killing(stage, LoadLora, 0.5)
        report = await stage.client.load_lora("policy", folder, check=False)
        await settled(stage)
        assert outcomes(report) == {"1": "ok", "2": "ok"}
        assert serving(stage) == [["policy@1"]] * 2
        assert await stage.generations() == [RUNNING, RUNNING]

    slow = {"load_lora": {0: Step(latency_s=15.0)}}
    play([taker(1), taker(2, slow)], scenario)


@pytest.mark.parametrize(("body", "after_s"), [(PauseGeneration, 0.0), (LoadLora, 0.0), (LoadLora, 1.0)])
def test_a_load_that_not_everybody_has_is_taken_back(tmp_path: Path, body: type[Any], after_s: float) -> None:
    """Killed while it pauses, and while one is done and the other still loads."""
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        stage.on_command = killing(stage, body, after_s)
        report = await stage.client.load_lora("policy", folder, check=False)
        await settled(stage)
        assert report.status in (OpStatus.FAILED, OpStatus.REFUSED)
        assert serving(stage) == [[], []]
        assert await stage.generations() == [RUNNING, RUNNING]
        assert (await stage.client.status()).loras == ()
        again = await stage.client.load_lora("policy", folder)
        assert again.lora is not None
        assert again.lora.ids == ("policy@2",), "the number of the one that was taken back isn't given again"

    broken = {1: replace(failing(), latency_s=3.0)} if body is LoadLora else {}
    play([taker(1, {"load_lora": {1: Step(latency_s=2.0)}}), taker(2, {"load_lora": broken})], scenario)


@pytest.mark.parametrize("can_drain", [False, True])
def test_a_worker_that_keeps_what_is_taken_back_is_no_undone_one(tmp_path: Path, can_drain: bool) -> None:
    """Its engine fails to unload it: the report says that it still has it, and how it goes."""
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        stage.on_command = killing(stage, LoadLora, 1.0)
        report = await stage.client.load_lora("policy", folder, check=False)
        await settled(stage)
        assert outcomes(report) == {"1": "failed", "2": "undone"}
        (why,) = [o.fault for o in report.outcomes if o.fault is not None]
        assert why.message.startswith("it still has policy@1")
        assert why.message.endswith("unloads it by itself once it can" if can_drain else "unload it")
        if can_drain:
            await asyncio.sleep(5.0)
        else:
            assert serving(stage) == [["policy@1"], []]
            await stage.client.unload_lora("policy")
        assert serving(stage) == [[], []]

    broken = {"load_lora": {1: replace(failing(), latency_s=3.0)}}
    play([taker(1, {"unload_lora": {1: failing()}}, can_drain=can_drain), taker(2, broken)], scenario)


def test_a_catch_up_that_is_left_behind_says_who_has_it(tmp_path: Path) -> None:
    """The fleet has it, so whoever got it keeps it."""
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        await stage.client.load_lora("policy", folder)
        for rig in stage.workers:
            rig.engine.loras.sums.clear()
        stage.on_command = killing(stage, LoadLora, 1.0)
        await asyncio.sleep(15.0)
        await settled(stage)
        (item,) = [i for i in (await stage.client.history()).items if i.term == 1 and i.op == "lora_catch_up"]
        report = (await stage.client.history(of_op_id=item.op_id)).report
        assert report is not None
        assert outcomes(report) == {"1": "ok", "2": "undone"}

    broken = {"load_lora": {2: replace(failing(), latency_s=3.0)}}
    play([taker(1), taker(2, broken)], scenario)


@pytest.mark.parametrize("how", ["evict_idle", "hot_swap"])
def test_what_had_to_go_for_a_load_that_is_finished_is_not_given_back(tmp_path: Path, how: str) -> None:
    """Every engine has the new revision in the place of the old one; so does the fleet."""
    one, two = adapter(tmp_path / "1", "1"), adapter(tmp_path / "2", "2")

    async def scenario(stage: Stage) -> None:
        await stage.client.load_lora("policy", one)
        stage.on_command = killing(stage, LoadLora, 0.5)
        evicts, swaps = how == "evict_idle", how == "hot_swap"
        report = await stage.client.load_lora("policy", two, evict_idle=evicts, hot_swap=swaps, check=False)
        await settled(stage)
        assert outcomes(report) == {"1": "ok", "2": "ok"}
        assert report.lora is not None
        assert (report.lora.ids, report.lora.evicted) == (("policy@2",), ("policy@1",))
        await asyncio.sleep(60.0)
        assert serving(stage) == [["policy@2"]] * 2
        view = await stage.client.status()
        assert [x.revision for x in view.loras] == [2]
        assert [m.loras_behind for m in view.members] == [(), ()]

    slow = {"load_lora": {2: Step(latency_s=5.0)}}
    info = {"capacity": 1} if how == "evict_idle" else {"can_hot_swap": True}
    play([taker(n, slow, **info) for n in (1, 2)], scenario)


def test_an_unload_is_finished_by_the_next_controller(tmp_path: Path) -> None:
    """It only goes forward."""
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        await stage.client.load_lora("policy", folder)
        stage.on_command = killing(stage, UnloadLora)
        report = await stage.client.unload_lora("policy", check=False)
        await settled(stage)
        assert outcomes(report) == {"1": "ok", "2": "ok"}
        assert serving(stage) == [[], []]
        assert (await stage.client.status()).loras == ()

    play(takers(1, 2), scenario)


def test_an_unload_whose_controller_and_worker_die_together_is_not_taken_back(tmp_path: Path) -> None:
    """Nobody knows what became of it on that one; the others are given nothing."""
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        await stage.client.load_lora("policy", folder)
        transport = stage.workers[2].worker_bus.transport
        assert isinstance(transport, MemoryTransport)

        def look(command: Command) -> None:
            if isinstance(command.body, UnloadLora) and not stage.processes[0].is_killed:
                stage.broker.partition(transport)
                stage.kill(stage.processes[0])

        stage.on_command = look
        report = await stage.client.unload_lora("policy", check=False)
        await settled(stage)
        assert outcomes(report) == {"1": "ok", "2": "ok", "3": "unknown"}
        assert report.lora is not None
        assert report.lora.partly == ("policy@1",)
        await asyncio.sleep(60.0)
        assert serving(stage)[:2] == [[], []]

    play(takers(1, 2, 3), scenario)


def test_an_unload_of_many_revisions_ends_in_time_at_the_next_controller(tmp_path: Path) -> None:
    """One engine hangs in each of them: who lets its moment pass isn't asked again, the others go on."""
    num_revisions = 30
    folders = [adapter(tmp_path / str(n), f"{n}-") for n in range(num_revisions)]

    async def scenario(stage: Stage) -> None:
        for folder in folders:
            await stage.client.load_lora("policy", folder)
        stage.on_command = killing(stage, UnloadLora)
        began_s = asyncio.get_running_loop().time()
        report = await stage.client.unload_lora("policy", deadline_s=30.0, check=False)
        await settled(stage)
        assert outcomes(report) == {"1": "ok", "2": "failed"}
        assert asyncio.get_running_loop().time() - began_s < 30.0 + OVERRUN_S
        assert list(map(len, serving(stage))) == [0, num_revisions]

    hangs = {n: Step(hangs=True) for n in range(1, 400)}
    room = num_revisions + 1
    play([taker(1, capacity=room), taker(2, {"drain_lora": hangs}, capacity=room)], scenario)


def test_what_an_unload_that_was_stopped_at_the_next_controller_did_not_ask_for_stays_the_fleets(
    tmp_path: Path,
) -> None:
    """Ctrl-C while it hangs in the first one."""
    folders = [adapter(tmp_path / str(n), f"{n}-") for n in range(3)]

    async def scenario(stage: Stage) -> None:
        for folder in folders:
            await stage.client.load_lora("policy", folder)
        stage.on_command = killing(stage, UnloadLora)
        unloading = asyncio.ensure_future(stage.client.unload_lora("policy", check=False))
        await asyncio.sleep(1.0)
        await stage.leader()
        await asyncio.sleep(1.0)
        op_id = (await stage.client.status()).op_id
        assert op_id is not None
        await stage.client.cancel(op_id)
        report = await unloading
        await settled(stage)
        assert report.lora is not None
        assert (report.lora.ids, report.lora.partly) == ((), ("policy@1",))
        assert [x.revision for x in (await stage.client.status()).loras] == [2, 3]

    hangs = {n: Step(hangs=True) for n in range(1, 400)}
    play([taker(1), taker(2, {"drain_lora": hangs})], scenario)


def test_a_load_for_more_workers_that_is_finished_is_meant_for_them_all(tmp_path: Path) -> None:
    """The fleet had it before, for one of them."""
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        await stage.client.load_lora("policy", folder, target=FIRST)
        stage.on_command = killing(stage, LoadLora, 0.5)
        report = await stage.client.load_lora("policy", folder, revision=1, check=False)
        await settled(stage)
        assert outcomes(report) == {"1": "ok", "2": "ok"}
        assert [x.target for x in (await stage.client.status()).loras] == [Target()]
        stage.workers[1].engine.loras.sums.clear()
        await asyncio.sleep(60.0)
        assert serving(stage) == [["policy@1"], ["policy@1"]]

    play([taker(1), taker(2, {"load_lora": {1: Step(latency_s=8.0)}})], scenario)


def test_a_load_for_more_workers_that_is_taken_back_leaves_it_with_those_who_had_it(tmp_path: Path) -> None:
    """And with nobody for whom it isn't meant."""
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        await stage.client.load_lora("policy", folder, target=FIRST)
        stage.on_command = killing(stage, LoadLora, 1.0)
        report = await stage.client.load_lora("policy", folder, revision=1, check=False)
        await settled(stage)
        assert outcomes(report) == {"1": "ok", "2": "undone", "3": "undone"}
        assert serving(stage) == [["policy@1"], [], []]
        assert [x.target for x in (await stage.client.status()).loras] == [FIRST]

    broken = {"load_lora": {1: replace(failing(), latency_s=3.0)}}
    play([taker(1), taker(2), taker(3, broken)], scenario)


@pytest.mark.parametrize("tells_files", [False, True])
def test_what_a_load_would_have_been_refused_for_is_not_taken_by_the_next_controller(
    tmp_path: Path, tells_files: bool
) -> None:
    """Killed in the check, while a worker has other bytes under that name."""
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        loras = stage.workers[1].engine.loras
        loras.sums["policy", 7], loras.tells_files = "e" * 64, tells_files
        stage.on_command = killing(stage, GetLoras)
        report = await stage.client.load_lora("policy", folder, revision=7, check=False)
        await settled(stage)
        assert outcomes(report) == {"1": "undone", "2": "undone"}
        assert serving(stage) == [[], ["policy@7"]]

    play(takers(1, 2), scenario)


def test_history_says_which_adapter(tmp_path: Path) -> None:
    """Beside who asked for it and how it ended."""
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        await stage.client.load_lora("policy", folder)
        await stage.client.unload_lora("policy")
        items = (await stage.client.history()).items
        assert [(i.op, i.what) for i in items] == [("lora_unload", "policy@1"), ("lora_load", "policy@1")]

    play(takers(1), scenario)


def test_the_number_of_a_failed_load_stays_given_when_the_journal_has_forgotten_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a controller that comes later, which knows what was written down alone."""
    monkeypatch.setattr(journal, "MAX_ENTRIES", 2)
    folder = adapter(tmp_path / "a")

    async def scenario(stage: Stage) -> None:
        failed = await stage.client.load_lora("policy", folder, check=False)
        assert failed.status is OpStatus.FAILED
        for _ in range(3):
            await stage.client.flush()
        await asyncio.sleep(1.0)
        stage.kill(stage.processes[0])
        await stage.leader()
        report = await stage.client.load_lora("policy", folder)
        assert report.lora is not None
        assert report.lora.ids == ("policy@2",)

    play([taker(1), taker(2, {"load_lora": {1: failing()}})], scenario)
