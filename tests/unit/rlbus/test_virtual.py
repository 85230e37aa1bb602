"""Virtual time: no waiting, no chance, and an error instead of a hang."""

import asyncio
import threading
import time

import pytest

from rlbus._virtual import LOOP_CLOCK_START, LoopClock, VirtualTimeLoop, hangs, run, sequential_ids
from rlbus.errors import BrokenError, DeadlineError

pytestmark = pytest.mark.unit


def now_s() -> float:
    return asyncio.get_running_loop().time()


def virtual_loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


def test_an_hour_of_sleep_takes_no_time_and_ends_at_the_exact_second() -> None:
    """Time moves from timer to timer."""

    async def scenario() -> list[float]:
        seen = [now_s()]
        for delay_s in (0.5, 3000.0, 0.25):
            await asyncio.sleep(delay_s)
            seen.append(now_s())
        return seen

    began_s = time.monotonic()
    assert run(scenario()) == [0.0, 0.5, 3000.5, 3000.75]
    assert time.monotonic() - began_s < 60


def test_time_stands_still_while_something_is_ready() -> None:
    """Turns of the loop cost no virtual time."""

    async def scenario() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return now_s()

    assert run(scenario()) == 0.0


def test_timers_fire_in_the_order_of_their_times() -> None:
    """Also across tasks, and the timeout of asyncio is virtual too."""

    async def scenario() -> list[str]:
        seen: list[str] = []

        async def after(delay_s: float, name: str) -> None:
            await asyncio.sleep(delay_s)
            seen.append(name)

        async with asyncio.TaskGroup() as tasks:
            for delay_s, name in ((3, "c"), (1, "a"), (2, "b")):
                tasks.create_task(after(delay_s, name))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.sleep(11)
        seen.append(str(now_s()))
        return seen

    assert run(scenario()) == ["a", "b", "c", "13.0"]


def test_a_wait_that_nobody_can_end_is_an_error_that_names_the_task() -> None:
    """Nothing scheduled and nothing outside: a deadlock, said at once."""

    async def waits_for_nobody() -> None:
        await asyncio.Event().wait()

    with pytest.raises(BrokenError, match=r"deadlock at 0 s.*waits_for_nobody"):
        run(waits_for_nobody())


def test_a_run_past_its_limit_is_an_error_and_its_tasks_are_cancelled() -> None:
    """A heartbeat that goes on for ever doesn't keep a test alive; its cleanup may still sleep."""
    ended: list[str] = []

    async def beats() -> None:
        try:
            for _ in range(1000):
                await asyncio.sleep(1)
        finally:
            await asyncio.sleep(1)
            ended.append("cleaned up")

    with pytest.raises(DeadlineError) as caught:
        run(beats(), timeout_s=50)
    assert caught.value.limit_s == 50
    assert ended == ["cleaned up"]


def test_executor_work_is_waited_for_and_moves_no_time() -> None:
    """A timer that is further away than the work takes doesn't fire before it."""

    async def scenario() -> tuple[str, float, bool]:
        timer = asyncio.ensure_future(asyncio.sleep(30))
        await asyncio.to_thread(time.sleep, 0.05)
        result = ("done", now_s(), timer.done())
        await timer
        return result

    assert run(scenario()) == ("done", 0.0, False)


def test_work_that_takes_longer_than_a_timer_moves_no_time_either() -> None:
    """Its thread may have got no CPU: what a test sees must not depend on that."""

    async def scenario() -> tuple[float, bool]:
        timer = asyncio.ensure_future(asyncio.sleep(0.01))
        await asyncio.to_thread(time.sleep, 0.2)
        result = (now_s(), timer.done())
        await timer
        return result

    assert run(scenario()) == (0.0, False)


def hung_until(release: threading.Event) -> None:
    """Work that says that it hangs."""
    with hangs():
        release.wait()


def test_timers_still_fire_while_executor_work_hangs() -> None:
    """Waited for in real time then, so a limit around blocked work works."""
    release = threading.Event()

    async def scenario() -> float:
        work = asyncio.get_running_loop().run_in_executor(None, hung_until, release)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(work), 0.05)
        release.set()
        await work
        return now_s()

    began_s = time.monotonic()
    assert run(scenario()) == 0.05
    assert time.monotonic() - began_s >= 0.05


def test_work_that_hangs_and_says_nothing_is_waited_for_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then timers pass it, too."""
    monkeypatch.setattr(VirtualTimeLoop, "patience_s", 0.2)
    release = threading.Event()

    async def scenario() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.to_thread(release.wait)), 0.05)
        release.set()
        return now_s()

    began_s = time.monotonic()
    assert run(scenario()) == 0.05
    assert time.monotonic() - began_s >= 0.2


@pytest.mark.parametrize("is_left", [False, True])
def test_work_beside_what_hangs_moves_no_time(is_left: bool) -> None:
    """Each for itself; also when what hangs was left behind."""
    release = threading.Event()

    async def scenario() -> list[float]:
        hung = asyncio.get_running_loop().run_in_executor(None, hung_until, release)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hung if is_left else asyncio.shield(hung), 0.0625)
        seen = [now_s()]
        timer = asyncio.ensure_future(asyncio.sleep(0.0625))
        await asyncio.to_thread(time.sleep, 0.2)
        seen.append(now_s())
        await timer
        release.set()
        return [*seen, now_s()]

    assert run(scenario()) == [0.0625, 0.0625, 0.125]


def test_a_thread_of_ones_own_can_wake_the_loop_under_real_work() -> None:
    """`real_work` says that somebody outside will call back."""

    async def scenario() -> tuple[str, float]:
        loop = virtual_loop()
        future: asyncio.Future[str] = loop.create_future()

        def work() -> None:
            time.sleep(0.05)
            loop.call_soon_threadsafe(future.set_result, "from outside")

        with loop.real_work():
            thread = threading.Thread(target=work)
            thread.start()
            result = await future
        thread.join()
        return result, now_s()

    assert run(scenario()) == ("from outside", 0.0)


def test_an_exception_of_the_coroutine_passes_through() -> None:
    """As does its return value in the others."""

    async def scenario() -> None:
        await asyncio.sleep(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run(scenario())


def test_the_loop_clock_follows_the_loop() -> None:
    """Dates and durations agree."""

    async def scenario() -> tuple[float, float]:
        clock = LoopClock()
        before = clock.now()
        await asyncio.sleep(12.5)
        return before, clock.now()

    assert run(scenario()) == (LOOP_CLOCK_START, LOOP_CLOCK_START + 12.5)


def test_sequential_ids_count_per_source() -> None:
    """Two sources don't share their count."""
    a, b = sequential_ids("op"), sequential_ids("op")
    assert [a(), a(), b()] == ["op-1", "op-2", "op-1"]
