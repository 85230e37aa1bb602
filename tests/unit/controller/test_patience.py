"""What a worker does by itself fails no op of the fleet: whoever refuses a command for it is asked again."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlbus.controller.limits import HOUSEKEEPING_S
from rlbus.schemas import (
    AbortWeights,
    Command,
    FaultCode,
    Generation,
    LoadLora,
    OpStatus,
    PauseGeneration,
    PauseMode,
    ReceiveWeights,
    Report,
)
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller.lora_stage import adapter, on_fleet, serving, taker
from tests.unit.controller.scene import Scene, Worker, code_of, outcomes, w, worker

pytestmark = pytest.mark.unit

RUNNING, PAUSED = Generation.RUNNING, Generation.PAUSED
Op = Callable[[Scene, Path], Awaitable[Report]]


def slow(took_s: float, num: int = 3) -> list[Worker]:
    """Two workers; the first takes its time to let an adapter go, as often as `num`."""
    return [taker(1, {"unload_lora": {i: Step(latency_s=took_s) for i in range(1, num + 1)}}), taker(2)]


async def until_called(engine: FakeEngine, verb: str) -> None:
    """Once more than now."""
    before = engine.calls.count(verb)
    while engine.calls.count(verb) == before:  # noqa: ASYNC110 - an engine tells nobody
        await asyncio.sleep(0.05)


async def drained(scene: Scene, folder: Path, *names: str) -> None:
    """Worker 1 begins to let go of what was unloaded, and has drained now."""
    client, engine = scene.fleet.client, scene.fleet.workers[0].engine
    for name in names:
        await client.load_lora(name, adapter(folder / name, name))
        engine.submit(f"long-{name}", [1, 2], num_tokens=300, model=f"{name}@1")
    for name in names:
        report = await client.unload_lora(name, drain_s=600)
        assert report.lora is not None
        assert report.lora.num_draining == 1
    await until_called(engine, "unload_lora")


async def update(scene: Scene, _: Path) -> Report:
    return await scene.update(2)


OPS: dict[str, Op] = {
    "pause": lambda scene, _: scene.fleet.client.pause(check=False),
    "load": lambda scene, folder: scene.fleet.client.load_lora("other", adapter(folder / "b", "b"), check=False),
    "unload": lambda scene, _: scene.fleet.client.unload_lora("policy", revision=1, check=False),
    "sleep": lambda scene, _: scene.fleet.client.sleep(check=False),
    "flush": lambda scene, _: scene.fleet.client.flush(check=False),
    "update": update,
}


@pytest.mark.parametrize("op", OPS)
def test_an_op_waits_for_a_worker_that_lets_go_of_what_has_drained(tmp_path: Path, op: str) -> None:
    """The unload at the end of a drain is the worker's own: no op of the fleet is refused because of it."""

    async def scenario(scene: Scene) -> None:
        await drained(scene, tmp_path, "policy")
        began_s = asyncio.get_running_loop().time()
        report = await OPS[op](scene, tmp_path)
        assert (report.status, outcomes(report)) == (OpStatus.OK, {"1": "ok", "2": "ok"})
        assert 5.0 < asyncio.get_running_loop().time() - began_s < 15.0
        assert ("policy", 1) not in scene.fleet.workers[0].engine.loras.sums

    on_fleet(slow(8.0), scenario)


def test_the_others_don_t_wait_for_it(tmp_path: Path) -> None:
    """Each is done as soon as it can be: a load on the other worker ends before this one begins."""

    async def scenario(scene: Scene) -> None:
        await drained(scene, tmp_path, "policy")
        loading = asyncio.get_running_loop().create_task(
            scene.fleet.client.load_lora("b", adapter(tmp_path / "b", "b"), hot_swap=True)
        )
        await asyncio.sleep(3.0)
        assert serving(scene) == [[], ["b@1"]]
        assert outcomes(await loading) == {"1": "ok", "2": "ok"}

    slow_one = taker(1, {"unload_lora": {1: Step(latency_s=8.0)}}, can_hot_swap=True)
    on_fleet([slow_one, taker(2, can_hot_swap=True)], scenario)


def test_the_next_drained_adapter_waits_for_who_was_refused(tmp_path: Path) -> None:
    """Several have drained at the same time: an op comes in between, and doesn't wait for the last of them."""

    async def scenario(scene: Scene) -> None:
        await drained(scene, tmp_path, "a", "b", "c")
        began_s = asyncio.get_running_loop().time()
        assert (await scene.fleet.client.pause()).status is OpStatus.OK
        assert asyncio.get_running_loop().time() - began_s < 12.0

    on_fleet(slow(8.0), scenario)


def test_the_wait_is_bounded(tmp_path: Path) -> None:
    """An engine that clings to its own unload fails the op, which names what runs there."""

    async def scenario(scene: Scene) -> None:
        await drained(scene, tmp_path, "policy")
        began_s = asyncio.get_running_loop().time()
        report = await scene.fleet.client.pause(check=False, deadline_s=300)
        assert outcomes(report) == {"1": "refused", "2": "undone"}
        assert code_of(report, 1) is FaultCode.BUSY
        fault = next(o.fault for o in report.outcomes if o.worker == w(1))
        assert fault is not None
        assert "unload_lora, the worker's own" in fault.message
        assert HOUSEKEEPING_S - 2 < asyncio.get_running_loop().time() - began_s < HOUSEKEEPING_S + 2

    on_fleet([taker(1, {"unload_lora": {1: Step(hangs=True, clings_s=100.0)}}), taker(2)], scenario)


def test_who_cancels_such_an_op_learns_that_nothing_was_done_there(tmp_path: Path) -> None:
    """It has refused, which is no silence: nobody is asked what became of it."""

    async def scenario(scene: Scene) -> None:
        await drained(scene, tmp_path, "policy")
        loading = asyncio.get_running_loop().create_task(
            scene.fleet.client.load_lora("b", adapter(tmp_path / "b", "b"), check=False, op_id="op-b")
        )
        await asyncio.sleep(1.0)
        await scene.fleet.client.cancel("op-b")
        report = await loading
        assert outcomes(report) == {"1": "refused", "2": "undone"}
        assert await scene.addressed(LoadLora) == ["1", "2"]
        assert await scene.generations() == [RUNNING, RUNNING]

    on_fleet(slow(8.0), scenario)


def test_an_op_waits_for_a_worker_whose_lease_has_just_ended() -> None:
    """Its own resume is housekeeping, too."""

    async def scenario(scene: Scene) -> None:
        assert (await scene.fleet.client.pause(lease_s=2.0)).status is OpStatus.OK
        engine = scene.fleet.workers[0].engine
        await until_called(engine, "resume")
        report = await scene.fleet.client.pause()
        assert outcomes(report) == {"1": "ok", "2": "ok"}
        assert await scene.generations() == [PAUSED, PAUSED]
        assert await scene.addressed(PauseGeneration) == ["1", "2"]

    on_fleet([worker(1, {"resume": {1: Step(latency_s=3.0)}}), worker(2)], scenario)


# -- in a transfer the others stand ready meanwhile, and have a stall limit of their own -----------------------------


async def draining(scene: Scene, folder: Path) -> None:
    """An adapter of worker 1 drains, until an update aborts its requests."""
    client = scene.fleet.client
    await client.load_lora("policy", adapter(folder / "policy", "policy"))
    scene.fleet.workers[0].engine.submit("long", [1, 2], num_tokens=100_000, model="policy@1")
    await client.unload_lora("policy", drain_s=600)


def unloads_before_the_transfer(**step: Any) -> list[Worker]:
    """Three workers; the first begins its own unload after it has paused, while the second still pauses."""
    of_1 = {"unload_lora": {i: Step(**step) for i in range(1, 4)}}
    return [taker(1, of_1), taker(2, {"pause": {2: Step(latency_s=1.2)}}), taker(3)]


@pytest.mark.parametrize("stall_s", [30.0, 10.0])
@pytest.mark.parametrize("on_failure", ["retry", "stop"])
def test_a_transfer_blames_the_worker_that_stays_busy_and_not_those_that_stand_ready(
    tmp_path: Path, on_failure: str, stall_s: float
) -> None:
    """No byte moves before the last accepts: the wait for it ends before the others count as stalled."""

    async def scenario(scene: Scene) -> None:
        await draining(scene, tmp_path)
        report = await scene.update(2, pause_mode=PauseMode.ABORT, on_failure=on_failure, stall_s=stall_s)
        others = "ok" if on_failure == "retry" else "undone"
        assert {i: o for i, o in outcomes(report).items() if i != "1"} == {"2": others, "3": others}
        assert code_of(report, 1) is FaultCode.BUSY
        assert report.phases_s["transfer"] + report.phases_s.get("regroup", 0.0) < stall_s
        assert (await scene.generations())[1:] == [RUNNING, RUNNING]

    on_fleet(unloads_before_the_transfer(hangs=True, clings_s=100.0), scenario)


def test_a_transfer_still_waits_for_a_worker_that_is_done_in_time(tmp_path: Path) -> None:
    """A third of the others' stall limit costs nobody anything."""

    async def scenario(scene: Scene) -> None:
        await draining(scene, tmp_path)
        report = await scene.update(2, pause_mode=PauseMode.ABORT)
        assert (outcomes(report), report.num_attempts) == ({"1": "ok", "2": "ok", "3": "ok"}, 1)

    on_fleet(unloads_before_the_transfer(latency_s=10.0), scenario)


def test_a_cancelled_transfer_is_begun_on_nobody_any_more(tmp_path: Path) -> None:
    """Who was busy is not asked again after the end of the op was asked for."""
    sent: list[type[Any]] = []

    async def scenario(scene: Scene) -> None:
        await draining(scene, tmp_path)
        scene.spy("dyn.test.*.rl.>", Command, lambda command, _: sent.append(type(command.body)))
        updating = asyncio.get_running_loop().create_task(scene.update(2, pause_mode=PauseMode.ABORT))
        await asyncio.sleep(3.0)
        op_id = (await scene.fleet.client.glance()).op_id
        assert op_id is not None
        await scene.fleet.client.cancel(op_id)
        assert set(outcomes(await updating).values()) == {"undone"}
        assert ReceiveWeights in sent
        assert ReceiveWeights not in sent[sent.index(AbortWeights) :]
        assert "receive_weights" not in scene.fleet.workers[0].engine.calls
        assert await scene.generations() == [RUNNING, RUNNING, RUNNING]

    on_fleet(unloads_before_the_transfer(latency_s=6.0), scenario)
