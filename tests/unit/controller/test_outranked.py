"""Workers that have seen a larger term than the leader's: it takes one above that (SCENARIOS 11)."""

import asyncio
from collections.abc import Sequence

import pytest

from rlbus.bus import Bus
from rlbus.controller.op_ids import derive_step
from rlbus.controller.registry import MAX_SEEN_TERM
from rlbus.controller.reign import OUTRANKED_PAUSE_S
from rlbus.schemas import (
    Command,
    CommandBody,
    FaultCode,
    FlushCache,
    Generation,
    Hello,
    OpStatus,
    ReceiveWeights,
    Version,
    route_of,
)
from rlbus.testing import MemoryKv
from tests.unit.controller.failover_stage import Stage, play
from tests.unit.controller.scene import worker

pytestmark = pytest.mark.unit

FAR = 1_000_000


async def speak(stage: Stage, term: int, body: CommandBody, instances: Sequence[int] = (1,)) -> None:
    """What a controller of this term says to these workers, and nobody else hears."""
    bus = Bus(stage.broker.connect("other"))
    for instance in instances:
        name = derive_step("x", term, str(instance))
        command = Command(op_id=name, term=term, expires_at=2e9, body=body)
        bus.publish(f"dyn.test.backend.rl.{route_of(body)}.{instance}", command)
    await asyncio.sleep(0.01)
    await bus.aclose()


def terms(stage: Stage) -> list[int]:
    """Of each leadership, over all processes, in their order."""
    return sorted(controller.term for process in stage.processes for controller in process.led)


async def led_above(stage: Stage, term: int, num_workers: int) -> None:
    """Until somebody leads under a larger term, and knows the workers."""
    async with asyncio.timeout(6.0):
        while max(terms(stage)) <= term:  # noqa: ASYNC110 - the state is what is watched
            await asyncio.sleep(0.05)
    await stage.client.wait_ready(num_workers=num_workers, deadline_s=6.0)


def test_a_leader_steers_again_after_a_controller_that_ran_with_single() -> None:
    """That one's term is far above; so is the leader's a moment later, and its standby's, which leads after it."""

    async def scenario(stage: Stage) -> None:
        assert (await stage.update(6)).status is OpStatus.OK
        await speak(stage, FAR, FlushCache(), (1, 2))
        await led_above(stage, FAR, 2)
        assert (await stage.client.pause()).status is OpStatus.OK
        assert (await stage.client.resume()).status is OpStatus.OK
        view = await stage.client.status()
        assert (view.term > FAR, view.version, [m.admitted for m in view.members]) == (
            True,
            Version(step=6),
            [True] * 2,
        )
        stage.kill(await stage.leader())
        await led_above(stage, view.term, 2)
        assert (await stage.update(7)).status is OpStatus.OK

    play([worker(1), worker(2)], scenario)


def test_a_new_leader_hears_at_its_hello_that_workers_have_seen_a_larger_term() -> None:
    """It doesn't wait for a heartbeat: what was left behind is settled under a term that workers take."""

    async def scenario(stage: Stage) -> None:
        speaking: list[asyncio.Task[None]] = []

        def on_command(command: Command) -> None:
            if isinstance(command.body, ReceiveWeights) and not speaking:
                stage.kill(stage.processes[0])
                speaking.append(asyncio.create_task(speak(stage, FAR, Hello(), (1, 2))))

        stage.on_command = on_command
        report = await stage.update(7)
        assert max(terms(stage)) > FAR
        assert report.fault is not None
        assert report.fault.code is FaultCode.CONTROLLER_LOST
        assert {o.worker: o.outcome.value for o in report.outcomes} == {"backend/1": "undone", "backend/2": "undone"}
        assert await stage.generations() == [Generation.RUNNING] * 2

    play([worker(1), worker(2)], scenario)


def test_two_workers_that_have_seen_different_terms_cost_one_change() -> None:
    """The leader goes above the largest."""

    async def scenario(stage: Stage) -> None:
        await speak(stage, FAR, Hello(), (1,))
        await speak(stage, 2 * FAR, Hello(), (2,))
        await led_above(stage, 2 * FAR, 2)
        assert (await stage.client.flush()).status is OpStatus.OK
        assert [term > 2 * FAR for term in terms(stage)] == [False, True]

    play([worker(1), worker(2)], scenario)


def test_a_leader_whose_workers_hear_another_one_doesnt_change_all_the_time() -> None:
    """Somebody with a store of its own leads on the same subjects, and goes above each of our terms."""

    async def scenario(stage: Stage) -> None:
        for _ in range(int(6 * OUTRANKED_PAUSE_S)):
            await speak(stage, max(terms(stage)) + 10, FlushCache())
            await asyncio.sleep(1.0)
        assert 4 <= len(terms(stage)) <= 14  # of two processes, each at most once in the pause
        assert terms(stage) == sorted(set(terms(stage)))

    play([worker(1)], scenario)


def test_a_term_that_only_nonsense_reaches_moves_nobody() -> None:
    """The worker says that it refuses us, as before; the others are steered."""

    async def scenario(stage: Stage) -> None:
        await speak(stage, MAX_SEEN_TERM + 1, Hello(), (1,))
        await asyncio.sleep(10.0)
        report = await stage.client.flush(check=False)
        assert {o.worker: o.outcome.value for o in report.outcomes} == {"backend/1": "refused", "backend/2": "ok"}
        assert len(terms(stage)) == 1

    play([worker(1), worker(2)], scenario)


def test_a_leader_goes_above_the_terms_of_a_journal_whose_last_term_is_lost() -> None:
    """Or it could write nothing over what the leaders before it wrote."""

    async def scenario(stage: Stage) -> None:
        await speak(stage, FAR, Hello(), (1,))
        await led_above(stage, FAR, 1)
        assert (await stage.update(6)).status is OpStatus.OK
        kv = MemoryKv(stage.broker.connect("hand"))
        there = await kv.get("term")
        assert there is not None
        await kv.delete("term", there.revision)
        stage.kill(await stage.leader())
        before = max(terms(stage))
        await led_above(stage, before, 1)
        assert (await stage.update(7)).status is OpStatus.OK

    play([worker(1)], scenario)
