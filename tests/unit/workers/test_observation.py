"""What the engine says, and how it differs from what it was told."""

import asyncio

import pytest

from rlbus.schemas import (
    FlushCache,
    Generation,
    PauseGeneration,
    PauseView,
    Version,
    WeightsState,
    WeightsView,
)
from rlbus.testing import run
from rlbus.workers.engines.base import NO_LABEL, Observed
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step, failing
from rlbus.workers.observation import NO_ANSWER, Observer, drift
from rlbus.workers.state import Running, WorkerState

pytestmark = pytest.mark.unit

V1 = Version(step=1)
IDLE = WorkerState(component="c", instance_id="1", world_size=1, routes=frozenset())
PAUSE = PauseView(owner="bob", mode="keep", since=0.0)
HAS_V1 = WeightsView(state=WeightsState.CLEAN, version=V1)


def state(pause: PauseView | None = None, weights: WeightsView | None = None, body: object = None) -> WorkerState:
    """A state as commanded."""
    running = None if body is None else Running("op", body)  # type: ignore[arg-type]
    return WorkerState(
        component="c",
        instance_id="1",
        world_size=1,
        routes=frozenset(),
        pause=pause,
        weights=IDLE.weights if weights is None else weights,
        running=running,
    )


@pytest.mark.parametrize(
    ("commanded", "observed", "words"),
    [
        (state(), Observed(Generation.RUNNING), None),
        (state(PAUSE), Observed(Generation.PAUSED), None),
        (state(PAUSE), NO_ANSWER, None),
        (state(PAUSE), Observed(Generation.RUNNING), "paused by bob, but the engine is running"),
        (state(), Observed(Generation.PAUSED), "commanded to run, but the engine is paused"),
        (state(None, None, PauseGeneration()), Observed(Generation.PAUSED), None),
        (state(None, None, FlushCache()), Observed(Generation.PAUSED), "commanded to run, but the engine is paused"),
        (state(None, HAS_V1), Observed(Generation.RUNNING, "0.1"), None),
        (state(None, HAS_V1), Observed(Generation.RUNNING, None), None),
        (state(), Observed(Generation.RUNNING, "default"), None),
        (state(), Observed(Generation.RUNNING, NO_LABEL), None),
        (
            state(None, HAS_V1),
            Observed(Generation.RUNNING, NO_LABEL),
            "committed version 0.1, but the engine has no label",
        ),
        (state(None, HAS_V1, FlushCache()), Observed(Generation.RUNNING, NO_LABEL), None),
        (
            state(None, HAS_V1),
            Observed(Generation.RUNNING, "0.2"),
            "committed version 0.1, but the engine says 0.2",
        ),
    ],
)
def test_drift_is_said_in_words(commanded: WorkerState, observed: Observed, words: str | None) -> None:
    """And not while a pause or resume is just changing it."""
    assert drift(commanded, observed) == words


def test_silent_engine_is_asked_once_and_bounded() -> None:
    """Everybody who waits gets `unknown` in time; an engine that clings isn't asked again meanwhile."""

    async def main() -> None:
        engine = FakeEngine(FakeScript({"observe": {1: Step(hangs=True, clings_s=10.0)}}))
        observer = Observer(engine, 1.0)
        loop = asyncio.get_running_loop()
        answers = await asyncio.gather(*(observer.observe() for _ in range(5)))
        assert answers == [NO_ANSWER] * 5
        assert loop.time() == pytest.approx(1.0)
        assert await observer.observe() == NO_ANSWER
        assert engine.calls.count("observe") == 1
        await asyncio.sleep(20.0)
        assert (await observer.observe()).generation is Generation.RUNNING
        assert observer.last.generation is Generation.RUNNING
        await observer.aclose()

    run(main())


@pytest.mark.parametrize("commands", [("run", "run"), ("paused", "run")])
def test_answer_from_before_a_command_is_not_announced_after_it(commands: tuple[str, str]) -> None:
    """The engine is asked once more, where what it was told changed while it answered."""

    async def main() -> None:
        engine = FakeEngine(FakeScript())
        observer = Observer(engine, 1.0)
        told = iter(commands)
        assert (await observer.observe_as_told(lambda: next(told))).generation is Generation.RUNNING
        assert engine.calls.count("observe") == (1 if commands[0] == commands[1] else 2)
        await observer.aclose()

    run(main())


def test_failing_engine_is_unknown() -> None:
    """Its error is for the log, not for whoever asks."""

    async def main() -> None:
        observer = Observer(FakeEngine(FakeScript({"observe": {1: failing()}})), 1.0)
        assert await observer.observe() == NO_ANSWER
        await observer.aclose()

    run(main())


def test_question_that_is_asked_anew_meanwhile_disturbs_nobody() -> None:
    """Whoever waits for one question gets its answer, also when the next one has begun before they wake up."""

    async def main() -> None:
        observer = Observer(FakeEngine(FakeScript({"observe": {0: Step(latency_s=0.5)}})), 1.0)

        async def twice() -> list[Observed]:
            return [await observer.observe(), await observer.observe()]

        answers, other = await asyncio.gather(twice(), observer.observe())
        assert {a.generation for a in (*answers, other)} == {Generation.RUNNING}
        await observer.aclose()

    run(main())
