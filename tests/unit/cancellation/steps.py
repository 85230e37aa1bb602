"""Cancel something at the k-th turn of the event loop, for each k until it has ended by itself; all in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from rlbus.controller.testing import Fleet, fleet_on_bus
from rlbus.schemas import ControllerEvent, Generation, OpEnded, OpStarted, OpStatus, Version, WeightsState
from rlbus.testing import VirtualTimeLoop
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from rlbus.workers.testing import Rig
from tests.unit.controller import scene
from tests.unit.controller.scene import FedPlane, Worker

# Virtual seconds that one round may take, and the turns after which nothing is cancelled any more.
ROUND_S = 3600.0
MAX_TURNS = 5000


class SteppedLoop(VirtualTimeLoop):
    """Counts its turns, and calls `on_turn` before each while it is set."""

    def __init__(self) -> None:
        super().__init__(ROUND_S)
        self.on_turn: Callable[[], None] | None = None

    def _run_once(self) -> None:
        if self.on_turn is not None:
            self.on_turn()
        super()._run_once()  # type: ignore[misc]


@dataclass
class Cancelled:
    """How the task ended: whether something was cancelled meanwhile, how many seconds after its begin (`after_s`), and
    the seconds that its ending took then.
    """

    task: "asyncio.Task[Any]"
    was_asked: bool = False
    after_s: float = 0.0
    took_s: float = 0.0


async def disturbed_at(
    turn: int, work: Coroutine[Any, Any, Any], disturb: Callable[[], Any] | None = None
) -> Cancelled:
    """Run `work` as a task and call `disturb` (None: cancel it) at its loop's turn number `turn`, if it still runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)
    end = Cancelled(loop.create_task(work, name="the disturbed one"))
    disturb = end.task.cancel if disturb is None else disturb
    num_turns, began_s, asked_s = 0, loop.time(), loop.time()

    def count() -> None:
        nonlocal num_turns, asked_s
        num_turns += 1
        if num_turns == turn and not end.task.done():
            asked_s, end.was_asked = loop.time(), True
            disturb()

    loop.on_turn = count
    try:
        await asyncio.wait({end.task})
    finally:
        loop.on_turn = None
    end.after_s, end.took_s = asked_s - began_s, loop.time() - asked_s
    return end


async def cancelled_at(turn: int, work: Coroutine[Any, Any, Any]) -> Cancelled:
    """Run `work` as a task that is cancelled at its loop's turn number `turn`, unless it has ended before.

    Raises AssertionError if it swallows the cancellation; what it raises itself if it wasn't cancelled.
    """
    end = await disturbed_at(turn, work)
    if not end.was_asked:
        end.task.result()
    assert end.task.cancelled() == end.was_asked, f"turn {turn}: {end.task}"
    return end


@dataclass
class World:
    """A fleet at version 6, generating, and what the controller said of its ops."""

    fleet: Fleet[Rig]
    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def on_event(self, event: ControllerEvent, _: object) -> None:
        """Take down the beginnings and ends of ops."""
        if isinstance(event, OpStarted):
            self.started.append(event.op_id)
        elif isinstance(event, OpEnded):
            self.ended.append(event.op_id)

    async def until_idle(self, limit_s: float) -> None:
        """Until the controller runs nothing; TimeoutError after `limit_s`."""
        async with asyncio.timeout(limit_s):
            while (await self.fleet.client.status()).op_id is not None:  # noqa: ASYNC110 - bounded
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)

    async def states(self) -> list[tuple[WeightsState, Version | None, Generation]]:
        """Of each worker: weights as its agent has them, and what its engine does."""
        return [
            (weights.state, weights.version, (await rig.engine.observe()).generation)
            for rig in self.fleet.workers
            for weights in [rig.agent.status().weights]
        ]


def turns(
    workers: Callable[[], list[Worker]],
    round_of: Callable[[World, int], Awaitable[bool]],
    *,
    step: int = 1,
    is_new: bool = False,
) -> int:
    """Play `round_of(world, turn)` on a fresh fleet for each `turn`, until it says that nothing was cancelled any more.

    `step` is between two turns that are tried. `is_new`: the fleet had no update yet.

    After each round every op that began has ended once, no task is left over, and no engine saw its contract violated.
    Returns how many rounds were cancelled.
    """
    for number, turn in enumerate(range(1, MAX_TURNS, step)):
        with asyncio.Runner(loop_factory=SteppedLoop) as runner:
            if not runner.run(_play(workers(), round_of, turn, is_new)):
                return number
    raise AssertionError(f"not done after {MAX_TURNS} turns")


async def _play(
    workers: list[Worker], round_of: Callable[[World, int], Awaitable[bool]], turn: int, is_new: bool
) -> bool:
    scene._planes.append(FedPlane())
    before = asyncio.all_tasks()
    try:
        async with AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(fleet_on_bus(workers, plane=scene._planes[-1]))
            world = World(fleet)
            fleet.client.bus.subscribe("dyn.test.controller.event.>", ControllerEvent, world.on_event)
            if not is_new:
                assert (await fleet.update(6, DEFAULT_TENSORS)).status is OpStatus.OK
            await asyncio.sleep(1.0)
            idle = asyncio.all_tasks()
            was_cancelled = await round_of(world, turn)
            await asyncio.sleep(1.0)
            assert sorted(world.started) == sorted(world.ended), f"turn {turn}"
            left = {t for t in asyncio.all_tasks() - idle if not t.done()}
            assert left == set(), f"turn {turn}"
            assert [r.engine.violations for r in fleet.workers] == [[] for _ in workers], f"turn {turn}"
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before, f"turn {turn}"
        return was_cancelled
    finally:
        scene._planes.clear()
