"""Weights that all ranks of a trainer read together: once in each update, whatever becomes of it."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlbus.errors import BusyError, ConfigError, PartialError, RefusedError, TransferError
from rlbus.schemas import ReceiveWeights, Version
from rlbus.transfer import one_pass
from rlbus.transfer.fake import FakeSource
from rlbus.transfer.one_pass import OnePass, SharedReads
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from rlbus.workers.engines.fake_script import Step, failing
from tests.unit.controller.scene import Scene, play, worker

pytestmark = pytest.mark.unit


class Shared(FakeSource):
    """Counts the tensors that were read."""

    is_shared = True

    def __init__(self) -> None:
        super().__init__(DEFAULT_TENSORS)
        self.num_read = 0

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """As FakeSource."""
        for pair in super().__iter__():
            self.num_read += 1
            yield pair


ALL = len(DEFAULT_TENSORS)


def test_it_is_read_once_when_all_goes_well() -> None:
    """As any other."""

    async def update(s: Scene) -> None:
        source = Shared()
        assert (await s.fleet.trainer.update_weights(source, version=1)).ok
        assert source.num_read == ALL

    play([worker(1), worker(2)], update)


def test_an_update_that_breaks_is_not_tried_again_with_what_the_others_would_not_read_again() -> None:
    """A worker dies in the broadcast: one attempt, and the source is read to its end."""

    async def update(s: Scene) -> None:
        source = Shared()
        s.at(ReceiveWeights, lambda: s.cut(2))
        with pytest.raises(PartialError) as caught:
            await s.fleet.trainer.update_weights(source, version=1, deadline_s=60.0)
        assert caught.value.report.num_attempts == 1
        assert source.num_read == ALL
        s.heal(2)
        await asyncio.sleep(30.0)
        again = Shared()
        assert (await s.fleet.trainer.update_weights(again, version=2)).ok
        assert again.num_read == ALL

    play(
        [worker(1, {"receive_weights": {1: Step(hangs=True)}}), worker(2, {"receive_weights": {1: failing()}})], update
    )


def test_it_is_read_also_when_nothing_is_sent() -> None:
    """The others do, and would wait for us in their next collective."""

    async def refused(s: Scene) -> None:
        assert (await s.fleet.trainer.update_weights(Shared(), version=5)).ok
        source = Shared()
        with pytest.raises(RefusedError):
            await s.fleet.trainer.update_weights(source, version=Version(step=3))
        assert source.num_read == ALL

    play([worker(1)], refused)


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": -1},
        {"version": 1, "deadline_s": "5"},
        {"version": 1, "on_failure": "x"},
        {"version": 1, "stall_s": 0},
    ],
)
def test_it_is_read_also_when_an_argument_makes_no_sense(wrong: dict[str, Any]) -> None:
    """The others have begun; a caller who corrects it and calls again would be one read behind them."""

    async def update(s: Scene) -> None:
        source = Shared()
        with pytest.raises(ConfigError):
            await s.fleet.trainer.update_weights(source, **wrong)
        assert source.num_read == ALL

    play([worker(1)], update)


def test_a_second_read_is_refused() -> None:
    """It would pair with what the others read next."""
    once = OnePass(Shared())
    assert len(list(once)) == ALL
    with pytest.raises(TransferError, match="once in each update"):
        list(once)


def test_a_source_that_fails_on_the_way_to_its_end_replaces_no_error() -> None:
    """There is nobody to tell any more."""

    class Broken(Shared):
        def __iter__(self) -> Iterator[tuple[str, Any]]:
            yield from ()
            raise SystemExit("no memory")

    async def body() -> None:
        with pytest.raises(KeyError):
            async with SharedReads().read_by_all(Broken(), True):
                raise KeyError("the update's own")

    asyncio.run(body())


def test_a_cancelled_update_goes_on_reading_and_the_next_begins_after_it() -> None:
    """Two reads at a time would pair in any order with what the others read one after the other."""
    order: list[str] = []
    gate = threading.Event()

    class Slow(Shared):
        def __iter__(self) -> Iterator[tuple[str, Any]]:
            for pair in FakeSource.__iter__(self):
                gate.wait(60.0)
                order.append(pair[0])
                yield pair

    async def body() -> None:
        reads, source = SharedReads(), Slow()

        async def refused() -> None:
            async with reads.read_by_all(source, True):
                raise KeyError("refused")

        first = asyncio.ensure_future(refused())
        await asyncio.sleep(0.0)
        for _ in range(3):
            first.cancel()
            await asyncio.sleep(0.01)
        assert not first.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        async with reads.read_by_all(source, True) as once:
            assert len(list(once)) == ALL
        assert order == [spec.name for spec in DEFAULT_TENSORS] * 2

    asyncio.run(body())


def test_a_read_that_never_ends_is_in_the_way_of_the_next_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks are gone: nothing that is read with them can be trusted any more."""
    monkeypatch.setattr(one_pass, "READ_REST_S", 0.05)
    gate = threading.Event()

    class Stuck(Shared):
        def __iter__(self) -> Iterator[tuple[str, Any]]:
            gate.wait(60.0)
            return super().__iter__()

    async def body() -> None:
        reads = SharedReads()
        with pytest.raises(KeyError):
            async with reads.read_by_all(Stuck(), True):
                raise KeyError("refused")
        with pytest.raises(TransferError, match="start the trainer anew"):
            async with reads.read_by_all(Shared(), True):
                pass
        gate.set()

    asyncio.run(body())


def test_an_update_beside_another_is_refused_and_reads_nothing() -> None:
    """The one that runs is reading."""

    async def both(s: Scene) -> None:
        first = asyncio.ensure_future(s.fleet.trainer.update_weights(Shared(), version=1))
        await asyncio.sleep(0.0)
        source = Shared()
        with pytest.raises(BusyError):
            await s.fleet.trainer.update_weights(source, version=2)
        assert source.num_read == 0
        assert (await first).ok

    play([worker(1)], both)
