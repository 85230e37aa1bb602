"""However much goes wrong at the end of an op, it ends, within a time that its caller knows."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from rlbus import subjects
from rlbus._conversation import DEFAULT_PATIENCE
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.controller.answers import StepAnswer
from rlbus.controller.asking import Asker
from rlbus.controller.limits import ENDING_S, ENDING_STEP_S, OVERRUN_S, ending_step_until_s, limits_until
from rlbus.controller.line import Line
from rlbus.controller.op import Op
from rlbus.errors import BrokenError
from rlbus.schemas import (
    ControllerEvent,
    Generation,
    OpEnded,
    Outcome,
    PauseFleet,
    Report,
    ResumeGeneration,
    Version,
    worker_id,
)
from rlbus.testing import LoopClock, MemoryBroker, run
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller import scene
from tests.unit.controller.scene import Scene, Steps, play, worker

pytestmark = pytest.mark.unit

DEADLINE_S = 20.0
# What an engine is called for at the end of an update that failed.
ENDING = ("abort_update", "flush_cache", "resume", "leave_group")
# It doesn't let go either when it is told to.
HANGS = {0: Step(hangs=True, clings_s=300.0)}


@pytest.mark.parametrize(
    "verbs",
    [
        ["resume"],
        ["flush_cache"],
        ["finish_update"],
        ["finish_update", "flush_cache", "resume"],
        ["finish_update", "abort_update", "flush_cache", "resume", "leave_group"],
        ["receive_weights", "abort_update", "flush_cache", "resume", "leave_group"],
        ["pause", "resume"],
    ],
    ids="-".join,
)
def test_an_update_ends_within_the_bound_whatever_hangs(verbs: list[str]) -> None:
    """One of two engines hangs in each of these calls, and in everything that would take it back."""
    steps: Steps = dict.fromkeys(verbs, HANGS)

    async def hang(s: Scene) -> None:
        began_s = asyncio.get_running_loop().time()
        report = await s.update(7, deadline_s=DEADLINE_S)
        took_s = asyncio.get_running_loop().time() - began_s
        assert took_s < DEADLINE_S + OVERRUN_S
        assert len(report.outcomes) == 2
        assert "1" in scene.outcomes(report)

    play([worker(1, steps), worker(2)], hang)


@pytest.mark.parametrize("verb", ["pause", "flush", "resume"])
def test_a_verb_ends_within_the_bound_when_an_engine_hangs(verb: str) -> None:
    """Also what is undone on the others."""
    steps: Steps = dict.fromkeys(("pause", "flush_cache", "resume"), HANGS)

    async def hang(s: Scene) -> None:
        began_s = asyncio.get_running_loop().time()
        report: Report = await getattr(s.fleet.client, verb)(deadline_s=DEADLINE_S, check=False)
        assert asyncio.get_running_loop().time() - began_s < DEADLINE_S + OVERRUN_S
        assert len(report.outcomes) == 2

    play([worker(1, steps), worker(2)], hang)


def op_end(s: Scene) -> asyncio.Future[float]:
    """When the next op ends, in loop time."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[float] = loop.create_future()

    def hear(event: ControllerEvent, _: Message) -> None:
        if isinstance(event, OpEnded) and not ended.done():
            ended.set_result(loop.time())

    s.spy(subjects.controller_events("test"), ControllerEvent, hear)
    return ended


def test_an_op_that_was_taken_back_doesn_t_wait_for_its_deadline() -> None:
    """What has to be done at its end has its time from then on, and not from a deadline that is minutes away."""
    steps: Steps = {"receive_weights": {1: Step(hangs=True)}, "abort_update": HANGS, "resume": HANGS}

    async def taken_back(s: Scene) -> None:
        loop, ended = asyncio.get_running_loop(), op_end(s)
        update = asyncio.create_task(s.update(7, deadline_s=600.0))
        await asyncio.sleep(5.0)
        update.cancel()
        stopped_s = loop.time()
        await asyncio.wait({update})
        assert await ended - stopped_s < OVERRUN_S

    play([worker(1, steps), worker(2)], taken_back)


@pytest.mark.parametrize("verb", ["finish_update", "flush_cache", "resume"])
def test_an_update_that_is_taken_back_while_it_is_completed_doesn_t_wait_for_its_deadline(verb: str) -> None:
    """One engine hangs there, with minutes left; the other one, which has the new version, generates."""

    async def taken_back(s: Scene) -> None:
        loop, ended = asyncio.get_running_loop(), op_end(s)
        update = asyncio.create_task(s.update(7, deadline_s=600.0))
        await asyncio.sleep(5.0)
        update.cancel()
        await asyncio.wait({update})
        stopped_s = loop.time()
        assert await ended - stopped_s < OVERRUN_S
        assert (await s.generations())[1] is Generation.RUNNING

    play([worker(1, {verb: HANGS}), worker(2)], taken_back)


def test_a_reload_that_is_taken_back_while_it_ends_doesn_t_wait_for_its_deadline(tmp_path: Path) -> None:
    """As an update."""
    FakeEngine().save(tmp_path, Version(step=7))

    async def taken_back(s: Scene) -> None:
        loop, ended = asyncio.get_running_loop(), op_end(s)
        reload = asyncio.create_task(s.fleet.client.reload(str(tmp_path), version=Version(step=7), deadline_s=600.0))
        await asyncio.sleep(5.0)
        reload.cancel()
        await asyncio.wait({reload})
        stopped_s = loop.time()
        assert await ended - stopped_s < OVERRUN_S

    config = AgentConfig(weight_roots=(str(tmp_path),))
    play([worker(1, {"flush_cache": HANGS}, config=config), worker(2, config=config)], taken_back)


def test_an_update_that_failed_early_doesn_t_wait_for_its_deadline() -> None:
    """Nobody took it back; what failed has to be ended all the same, and that has its time from then on."""
    steps: Steps = {"receive_weights": {1: failing(after_parts=0)}, **dict.fromkeys(ENDING, HANGS)}

    async def fails(s: Scene) -> None:
        began_s = asyncio.get_running_loop().time()
        report = await s.update(7, deadline_s=600.0)
        assert asyncio.get_running_loop().time() - began_s < OVERRUN_S
        assert scene.outcomes(report)["1"] == "failed"

    play([worker(1, steps), worker(2)], fails)


def test_a_pause_that_failed_early_doesn_t_wait_for_its_deadline() -> None:
    """One refuses, and the other one, which was paused, is busy with something when it is to be let go."""
    busy: Steps = {"resume": HANGS}

    async def fails(s: Scene) -> None:
        began_s = asyncio.get_running_loop().time()
        report = await s.fleet.client.pause(deadline_s=600.0, check=False)
        assert asyncio.get_running_loop().time() - began_s < OVERRUN_S
        assert scene.outcomes(report) == {"1": "failed", "2": "unknown"}

    play([worker(1, {"pause": {1: failing()}}), worker(2, busy)], fails)


class Absent:
    """A line on which the first `num_broken` fan-outs find no connection."""

    term = 1

    def __init__(self, num_broken: int) -> None:
        self.num_broken = num_broken

    async def ask(self, _body: object, workers: list[str], *, on_outcome: Any, **_: object) -> None:
        """See `Line`."""
        if self.num_broken:
            self.num_broken -= 1
            raise BrokenError("bus", "not connected")
        for one in workers:
            on_outcome(one, StepAnswer(Outcome.OK))


def test_a_step_that_begins_when_the_time_is_used_up_bears_a_short_disconnect() -> None:
    """Who is paused must not stay so because one publish failed."""

    async def late() -> StepAnswer:
        async with Bus(MemoryBroker().connect(), clock=LoopClock()) as bus:
            op = Op(bus, "test", PauseFleet(op_id="o", deadline_s=10.0), "pause")
            await asyncio.sleep(10.0 + ENDING_S)
            who = worker_id("backend", "1")
            asker = Asker(op, cast(Line, Absent(num_broken=3)))
            return (await asker.until_free("undo", "undo", ResumeGeneration(), [who]))[who]

    assert run(late()).is_ok


def test_the_caller_hears_out_the_longest_op() -> None:
    """Its patience after the deadline is longer than what an op may take after it."""
    assert DEFAULT_PATIENCE.grace_s > OVERRUN_S


def test_a_step_at_the_end_has_a_moment_even_when_the_time_is_used_up() -> None:
    """A healthy worker must not stay paused because another one took all of it; no part of it is kept for later."""
    assert ending_step_until_s(10.0, 50.0) == 50.0 + ENDING_STEP_S
    assert ending_step_until_s(100.0, 50.0) == 100.0
    assert limits_until(55.0, 50.0, is_ending=True).ack_s == ENDING_STEP_S
    assert limits_until(55.0, 50.0).ack_s < ENDING_STEP_S
    assert limits_until(10.0, 50.0).deadline_s < 0.1
