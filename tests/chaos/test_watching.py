"""What is read from samples and events, without any process."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from rlbus.bus import Bus
from rlbus.schemas import (
    Descriptor,
    FleetView,
    Generation,
    GenerationPaused,
    InstanceId,
    Liveness,
    MemberView,
    Version,
    WeightsState,
    WeightsView,
    WorkerId,
    WorkerStatus,
)
from rlbus.testing import LoopClock, MemoryBroker, run
from tests.chaos.brake import HOLD_S, POLL_S, Brake
from tests.chaos.promises import Standing, Torn
from tests.chaos.watching import (
    Sample,
    Watch,
    false_admissions,
    is_at,
    paused,
    repeated,
    standing_in,
    stood_still,
    torn_in,
)

pytestmark = pytest.mark.unit


def member(step: int, *, admitted: bool = True, state: WeightsState = WeightsState.CLEAN) -> MemberView:
    """A worker at `step`."""
    return MemberView(
        worker=WorkerId("backend/1"),
        liveness=Liveness.ALIVE,
        admitted=admitted,
        descriptor=Descriptor(
            namespace="chaos",
            component="backend",
            instance_id=InstanceId("1"),
            engine="fake",
            model="m",
            world_size=1,
            routes=(),
        ),
        status=WorkerStatus(
            generation=Generation.RUNNING if admitted else Generation.PAUSED,
            weights=WeightsView(state=state, version=Version(incarnation=0, step=step)),
        ),
        boot_id="b",
        age_s=0.0,
    )


def view_of(state: WeightsState, last_good: int) -> WeightsView:
    """Weights that aren't clean."""
    return WeightsView(state=state, last_good=Version(step=last_good))


def sample(at_s: float, one: MemberView, fleet_step: int) -> Sample:
    """The controller's word with one worker."""
    view = FleetView(
        namespace="chaos",
        term=1,
        version=Version(incarnation=0, step=fleet_step),
        epoch=None,
        op_id=None,
        members=(one,),
    )
    return Sample(at_s, view)


def test_serving_counts_from_the_first_sample_that_lasts() -> None:
    """A worker that was admitted, lost it, and got it back serves from then on."""

    async def main() -> None:
        watch = Watch(Bus(MemoryBroker().connect(), clock=LoopClock()), "chaos")
        serving = [True, False, True, True]
        watch.samples = [sample(float(i), member(2, admitted=ok), 2) for i, ok in enumerate(serving)]
        assert watch.first(lambda s: s.is_admitted(("backend/1",), 2), since_s=0.5) == 1.5
        watch.samples.append(sample(4.0, member(2, admitted=False), 2))
        assert watch.first(lambda s: s.is_admitted(("backend/1",), 2), since_s=0.5) is None

    run(main())


def test_only_the_asked_step_counts_as_serving() -> None:
    """Admitted at an older one is something else, and so is somebody unknown."""
    assert is_at(member(2), 2)
    assert not is_at(member(1), 2)
    assert not is_at(None, 2)
    assert not sample(0.0, member(2), 2).is_admitted(("backend/1", "backend/2"), 2)


def test_admission_with_other_weights_is_found() -> None:
    """Behind the fleet, or not clean; whoever isn't admitted may be either."""
    assert false_admissions([sample(0.0, member(2), 2), sample(1.0, member(1, admitted=False), 2)]) == ()
    assert false_admissions([sample(0.0, member(1), 2)]) == ("backend/1 clean 0.1",)
    assert false_admissions([sample(0.0, member(2, state=WeightsState.DIRTY), 2)]) == ("backend/1 dirty 0.2",)


def test_who_was_torn_is_read_from_every_sample() -> None:
    """With what it said that it had before, and whether it was let go; also when it is healed by the end."""
    torn = member(2, admitted=False, state=WeightsState.DIRTY)
    torn = replace(torn, status=replace(torn.status, weights=view_of(WeightsState.DIRTY, last_good=1)))
    clean = member(2)
    assert torn_in([sample(0.0, clean, 2)]) == ()
    assert torn_in([sample(0.0, torn, 2), sample(1.0, clean, 2)]) == (Torn("backend/1", 1, False),)
    running = replace(torn, status=replace(torn.status, generation=Generation.RUNNING))
    assert torn_in([sample(0.0, running, 2)]) == (Torn("backend/1", 1, True),)
    assert torn_in([sample(0.0, replace(torn, admitted=True), 2)]) == (Torn("backend/1", 1, True),)
    assert torn_in([sample(0.0, replace(torn, liveness=Liveness.LEFT), 2)]) == ()


def test_how_a_worker_stands_is_read_from_one_sample() -> None:
    """State and step of its weights, and whether it runs; who is gone doesn't stand."""
    assert standing_in(sample(0.0, member(2), 2)) == {"backend/1": Standing("clean", 2, True)}
    torn = member(2, admitted=False)
    torn = replace(torn, status=replace(torn.status, weights=view_of(WeightsState.DIRTY, last_good=1)))
    assert standing_in(sample(0.0, torn, 2)) == {"backend/1": Standing("dirty", None, False)}
    assert standing_in(sample(0.0, replace(member(2), liveness=Liveness.DEAD), 2)) == {}


def test_a_step_that_changed_a_worker_twice_is_found() -> None:
    """By the op that the worker's own events name."""
    event = GenerationPaused(
        component="backend", instance_id=InstanceId("1"), at=0.0, op_id="a", mode="keep", owner="a"
    )
    other = GenerationPaused(
        component="backend", instance_id=InstanceId("2"), at=0.0, op_id="a", mode="keep", owner="a"
    )
    assert repeated([event, other]) == ()
    assert repeated([event, other, event]) == ("a on backend/1",)


def test_a_standstill_is_read_from_terms_and_from_gaps() -> None:
    """More terms than the case itself takes, or no word for longer."""

    seen = [sample(float(i), member(1), 1) for i in range(3)]
    calm = [*seen[:2], Sample(2.0, replace(seen[2].view, term=2))]
    assert stood_still(calm, 1, 1.5) == ""
    assert stood_still(calm, 0, 1.5) == "1 more terms than it takes"
    assert stood_still(calm, 1, 1.0) == "no word of the controller for 1.0 s"
    assert stood_still([], 0, 1.0) == ""


def test_who_is_left_paused_is_read_from_the_last_sample() -> None:
    """What was paused before that is over."""
    still, running = member(2, admitted=False), member(2)
    assert paused([sample(0.0, running, 2), sample(1.0, still, 2)]) == ("backend/1",)
    assert paused([sample(0.0, still, 2), sample(1.0, running, 2)]) == ()
    assert paused([]) == ()


def test_a_blow_falls_in_the_message_that_it_waits_for_and_only_once() -> None:
    """Not before, not later; the phase that was announced last is noted."""

    async def main() -> None:
        watch = Watch(Bus(MemoryBroker().connect(), clock=LoopClock()), "chaos")
        blows = []
        watch.arm(lambda w: w.is_held, lambda: blows.append(watch.phase))
        watch.phase = "transfer"
        assert blows == []
        watch.on_held()
        watch.on_held()
        assert blows == ["transfer"]
        assert watch.struck_in == "transfer"
        assert await watch.until_struck(0.1)

    run(main())


def test_a_blow_may_wait_for_the_brake() -> None:
    """Then the phase is the one that the held controller names, whatever was announced by then."""

    async def main() -> None:
        watch = Watch(Bus(MemoryBroker().connect(), clock=LoopClock()), "chaos")
        watch.arm(lambda w: w.held_in is not None, lambda: None)
        watch.phase = "transfer"
        assert not await watch.until_struck(0.1)
        watch.arm(lambda w: w.held_in is not None, lambda: None)
        watch.on_braked("commit")
        assert watch.struck_in == "commit"

    run(main())


def test_a_braked_controller_waits_before_the_command_it_is_armed_for(tmp_path: Path) -> None:
    """Not before others; until it is let go; and never longer than HOLD_S."""

    async def main() -> None:
        brake = Brake(tmp_path)
        await brake.hold("CommitWeights", "commit")
        brake.arm("CommitWeights")
        await brake.hold("PauseGeneration", "pause")
        assert brake.reached() is None
        holding = asyncio.create_task(brake.hold("CommitWeights", "commit"))
        await asyncio.sleep(HOLD_S / 2)
        assert (brake.reached(), holding.done()) == ("commit", False)
        brake.let_go()
        await asyncio.sleep(2 * POLL_S)
        assert holding.done()
        brake.arm("CommitWeights")
        assert brake.reached() is None
        began_s = asyncio.get_running_loop().time()
        await brake.hold("CommitWeights", "commit")
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(HOLD_S, abs=2 * POLL_S)
        brake.let_go()
        brake.let_go()

    run(main())
