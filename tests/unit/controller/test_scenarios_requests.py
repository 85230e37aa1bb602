"""What goes wrong in this field (SCENARIOS.md): requests before, during and after an update.

Real agents, controller and trainer on a bus in memory, under virtual time. The fake engines' tokens depend on the
weights that made them and on the weights under which the prompt was cached.
"""

import asyncio

import pytest

from rlbus.schemas import OpStatus, PauseMode, Version
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_requests import FakeRequest
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller.scene import RUNNING, Scene, Steps, outcomes, play, w, worker

pytestmark = pytest.mark.unit

SLOW: Steps = {"receive_weights": {0: Step(transfer_s=2.0)}}


def engine_of(scene: Scene, number: int = 1) -> FakeEngine:
    return scene.fleet.workers[number - 1].engine


async def stamp(engine: FakeEngine, name: str) -> str:
    """The signature of the weights that generate now, by generating with them."""
    probe = engine.submit(f"probe-{name}", (0,), 1)
    await probe.ended.wait()
    return probe.spans[0].signature


async def until_paused(engine: FakeEngine) -> None:
    for _ in range(3000):
        if engine.requests.is_paused and not engine.requests.is_in_step:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engine isn't paused after 30 s")


def spans(request: FakeRequest) -> list[tuple[str, int, int]]:
    return [(s.signature, s.start, s.end) for s in request.spans]


def test_each_request_shows_the_weights_that_made_its_tokens() -> None:
    """SCENARIOS 10: submitted before, during and after an update; the worker's own span, first and last token."""

    async def scenario(scene: Scene) -> None:
        await scene.update(6)
        engine = engine_of(scene)
        v6 = await stamp(engine, "6")
        before = engine.submit("before", (1,), 3)
        await before.ended.wait()
        across = engine.submit("across", (2,), 400)
        updating = asyncio.create_task(scene.update(7))
        await until_paused(engine)
        num_before = len(across.tokens)
        during = engine.submit("during", (3,), 5)
        assert (await scene.fleet.client.status()).version == Version(step=6)
        assert (await updating).status is OpStatus.OK
        after = engine.submit("after", (4,), 5)
        for request in (across, during, after):
            await request.ended.wait()
        v7 = await stamp(engine, "7")
        assert v6 != v7
        assert spans(before) == [(v6, 0, 3)]
        assert spans(across) == [(v6, 0, num_before), (v7, num_before, 400)]
        assert spans(during) == spans(after) == [(v7, 0, 5)]

    play([worker(1, SLOW)], scenario)


def test_an_update_that_keeps_requests_cuts_none_of_them() -> None:
    """SCENARIOS 13: 16 streams, pause keep, update, new version, resume: no abort, and none reported."""

    async def scenario(scene: Scene) -> None:
        engine = engine_of(scene)
        streams = [engine.submit(f"s{n}", (n,), 300) for n in range(16)]
        await asyncio.sleep(0.5)
        report = await scene.update(7, pause_mode=PauseMode.KEEP)
        assert (report.status, await scene.generations()) == (OpStatus.OK, [RUNNING])
        for stream in streams:
            await stream.ended.wait()
        assert [(s.finish, len(s.tokens)) for s in streams] == [("length", 300)] * 16
        assert "abort" not in engine.calls

    play([worker(1, SLOW)], scenario)


@pytest.mark.parametrize("is_reset", [True, False], ids=["the update flushes", "nobody asks for it"])
def test_a_prompt_that_was_cached_under_the_old_weights_is_computed_under_the_new(is_reset: bool) -> None:
    """SCENARIOS 14: as on a worker that never saw it; a flush that the caller leaves out is owed until the resume."""

    async def scenario(scene: Scene) -> None:
        await scene.update(6)
        cached, fresh = engine_of(scene, 1), engine_of(scene, 2)
        await cached.submit("old", (7, 8, 9), 4).ended.wait()
        held = cached.submit("held", (7, 8, 9), 400)
        await asyncio.sleep(0.5)
        await scene.update(7, reset_prefix_cache=is_reset)
        again, first = cached.submit("new", (7, 8, 9), 4), fresh.submit("new", (7, 8, 9), 4)
        for request in (again, first, held):
            await request.ended.wait()
        assert again.tokens == first.tokens
        assert held.prefix == again.prefix == first.prefix

    play([worker(1, SLOW), worker(2, SLOW)], scenario)


def test_no_step_of_the_engine_overlaps_the_first_write() -> None:
    """SCENARIOS 26: a step takes 300 ms beyond the pause; its answer waits for it, and `play` checks each write."""

    async def scenario(scene: Scene) -> None:
        engine = engine_of(scene)
        stream = engine.submit("s", (1,), 10)
        await asyncio.sleep(0.35)
        assert engine.requests.is_in_step
        report = await scene.update(7)
        assert report.status is OpStatus.OK
        assert report.paused_s > 0.2
        await stream.ended.wait()
        assert engine.violations == []

    play([worker(1, step_s=0.3)], scenario)


def test_requests_that_reach_a_paused_engine_of_several_ranks_do_not_hold_the_update_up() -> None:
    """SCENARIOS 27: 50 of them queue, no rank steps, the update completes, and all 50 finish after the resume."""

    async def scenario(scene: Scene) -> None:
        engine = engine_of(scene)
        await scene.fleet.client.pause(mode=PauseMode.KEEP)
        late = [engine.submit(f"r{n}", (n,), 5) for n in range(50)]
        began_s = asyncio.get_running_loop().time()
        assert (await scene.update(7)).status is OpStatus.OK
        assert asyncio.get_running_loop().time() - began_s < 5.0
        assert [len(r.tokens) for r in late] == [0] * 50
        await scene.fleet.client.resume()
        for request in late:
            await request.ended.wait()
        assert {(r.finish, len(r.tokens), len(r.spans)) for r in late} == {("length", 5, 1)}

    play([worker(1, SLOW, world_size=2)], scenario)


def test_a_sample_that_is_kept_over_two_updates_has_a_segment_per_version() -> None:
    """SCENARIOS 30, "continue": each segment carries its own version, without gap or overlap."""

    async def scenario(scene: Scene) -> None:
        engine = engine_of(scene)
        sample = engine.submit("s", (1,), 300)
        stamps = []
        for step in (2, 4, 6):
            await asyncio.sleep(0.5)
            assert (await scene.update(step, pause_mode=PauseMode.KEEP)).status is OpStatus.OK
            stamps.append(await stamp(engine, str(step)))
        await sample.ended.wait()
        assert [s.signature for s in sample.spans][1:] == stamps
        assert [s.start for s in sample.spans] == [0, *(s.end for s in sample.spans[:-1])]
        assert (sample.spans[-1].end, sample.finish) == (300, "length")

    play([worker(1)], scenario)


def test_a_sample_that_an_update_cut_is_never_continued() -> None:
    """SCENARIOS 30, "drop on abort": it ends with what it has, of one version, over any number of updates."""

    async def scenario(scene: Scene) -> None:
        engine = engine_of(scene)
        sample = engine.submit("s", (1,), 300)
        await asyncio.sleep(0.5)
        assert (await scene.update(2, pause_mode=PauseMode.ABORT)).status is OpStatus.OK
        num_tokens = len(sample.tokens)
        assert (await scene.update(4, pause_mode=PauseMode.ABORT)).status is OpStatus.OK
        await asyncio.sleep(5.0)
        assert 0 < num_tokens == len(sample.tokens)
        assert (sample.finish, len(sample.spans)) == ("abort", 1)
        assert not {*engine.requests.running, *engine.requests.waiting}

    play([worker(1)], scenario)


def test_a_request_that_was_sent_by_an_old_view_waits_at_the_worker() -> None:
    """SCENARIOS 41: a router with a view 500 ms old picks a worker in an update; it runs whole on the new weights."""

    async def scenario(scene: Scene) -> None:
        await scene.update(6)
        engine = engine_of(scene)
        view = await scene.fleet.members()
        updating = asyncio.create_task(scene.update(7))
        await until_paused(engine)
        await asyncio.sleep(0.5)
        assert view[w(1)].admitted
        assert not (await scene.fleet.members())[w(1)].admitted
        late = engine.submit("late", (1, 2), 5)
        assert outcomes(await updating) == {"1": "ok"}
        await late.ended.wait()
        assert spans(late) == [(await stamp(engine, "7"), 0, 5)]

    play([worker(1, SLOW)], scenario)


def test_a_worker_that_is_full_of_streams_acks_a_pause_within_a_second() -> None:
    """SCENARIOS 51: 2000 of them; the pause waits neither behind them nor for them, and loses none."""

    async def scenario(scene: Scene) -> None:
        engine = engine_of(scene)
        streams = [engine.submit(f"s{n}", (n,), 1000) for n in range(2000)]
        await asyncio.sleep(0.1)
        began_s = asyncio.get_running_loop().time()
        await scene.fleet.client.pause(mode=PauseMode.KEEP)
        assert asyncio.get_running_loop().time() - began_s < 1.0
        num_tokens = {len(s.tokens) for s in streams}
        await asyncio.sleep(1.0)
        assert {len(s.tokens) for s in streams} == num_tokens
        assert {s.finish for s in streams} == {None}
        await scene.fleet.client.resume()

    play([worker(1)], scenario)
