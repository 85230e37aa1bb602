"""When a worker announces itself."""

import asyncio
import itertools

import pytest

from rlbus.testing import run
from rlbus.workers.heartbeat import MIN_GAP_S, Heartbeat

pytestmark = pytest.mark.unit


async def beats_of(heartbeat_s: float, wanted_at_s: tuple[float, ...], until_s: float, seed: str = "1") -> list[float]:
    """Times of the beats."""
    loop = asyncio.get_running_loop()
    times: list[float] = []

    async def beat() -> None:
        times.append(loop.time())

    heartbeat = Heartbeat(beat, heartbeat_s, 0.2, seed)
    running = loop.create_task(heartbeat.run())
    for at_s in wanted_at_s:
        loop.call_at(at_s, heartbeat.soon)
    await asyncio.sleep(until_s)
    running.cancel()
    return times


def test_beats_come_at_once_and_then_within_a_fifth_of_the_interval() -> None:
    """The same seed gives the same times, another seed others."""
    times = run(beats_of(5.0, (), 1000.0))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert all(4.0 <= gap <= 6.0 for gap in gaps)
    assert max(gaps) - min(gaps) > 1.0
    assert times == run(beats_of(5.0, (), 1000.0))
    assert times != run(beats_of(5.0, (), 1000.0, seed="2"))


def test_changes_within_the_gap_are_announced_together() -> None:
    """The first at once, the rest with the next beat after the gap; none is lost."""
    times = run(beats_of(5.0, (1.0, 1.01, 1.02, 1.03), 2.0))
    assert times == pytest.approx([0.0, 1.0, 1.0 + MIN_GAP_S])
