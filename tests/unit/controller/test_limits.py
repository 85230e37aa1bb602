"""However much goes wrong at the end of an op, it ends, within a time that its caller knows."""

import asyncio

import pytest

from rlbus import subjects
from rlbus._conversation import DEFAULT_PATIENCE
from rlbus._transport import Message
from rlbus.controller.limits import ENDING_STEP_S, OVERRUN_S, limits_until
from rlbus.schemas import ControllerEvent, OpEnded, Report
from rlbus.workers.engines.fake_script import Step
from tests.unit.controller import scene
from tests.unit.controller.scene import Scene, Steps, play, worker

pytestmark = pytest.mark.unit

DEADLINE_S = 20.0
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


def test_an_op_that_was_taken_back_doesn_t_wait_for_its_deadline() -> None:
    """What has to be done at its end has its time from then on, and not from a deadline that is minutes away."""
    steps: Steps = {"receive_weights": {1: Step(hangs=True)}, "abort_update": HANGS, "resume": HANGS}

    async def taken_back(s: Scene) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[float] = loop.create_future()

        def hear(event: ControllerEvent, _: Message) -> None:
            if isinstance(event, OpEnded):
                ended.set_result(loop.time())

        s.spy(subjects.controller_events("test"), ControllerEvent, hear)
        update = asyncio.create_task(s.update(7, deadline_s=600.0))
        await asyncio.sleep(5.0)
        update.cancel()
        stopped_s = loop.time()
        await asyncio.wait({update})
        assert await ended - stopped_s < OVERRUN_S

    play([worker(1, steps), worker(2)], taken_back)


def test_the_caller_hears_out_the_longest_op() -> None:
    """Its patience after the deadline is longer than what an op may take after it."""
    assert DEFAULT_PATIENCE.grace_s > OVERRUN_S


def test_a_step_at_the_end_has_a_moment_even_when_the_time_is_used_up() -> None:
    """A healthy worker must not stay paused because another one took all of it."""
    assert limits_until(10.0, 50.0, is_ending=True).deadline_s == ENDING_STEP_S
    assert limits_until(10.0, 50.0).deadline_s < 0.1
