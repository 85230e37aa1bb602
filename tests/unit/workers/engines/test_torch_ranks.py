"""Calls on every rank at once, with ranks that fail, hang, or disagree; no torch, no process."""

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest

pytest.importorskip("torch")

from rlbus.errors import EngineDeadError, TornWeightsError
from rlbus.schemas import Fault, FaultCode, ReceivedData, TensorSum
from rlbus.testing import run
from rlbus.workers.engines.base import UpdateFailedError
from rlbus.workers.engines.torch_rank import OwnRank
from rlbus.workers.engines.torch_ranks import (
    CANCEL_S,
    LOCAL_S,
    RELEASE_S,
    SETTLE_S,
    Ranks,
    Slowest,
    Standing,
    agreed,
    check_equal,
    first_bad,
)
from rlbus.workers.torch_lm.rank import Rank

pytestmark = pytest.mark.unit


class Scripted:
    """A rank whose calls take as long as they are told, end when the group is left unless they cling, or fail."""

    def __init__(self, took_s: float = 0.0, *, clings: bool = False, error: Exception | None = None) -> None:
        self._took_s = took_s
        self._clings = clings
        self._error = error
        self._left = asyncio.Event()
        self.reasons: list[str] = []
        self.is_killed = False

    async def call(self) -> str:
        """What every rank is asked for."""
        if not self._clings:
            leaving = asyncio.ensure_future(self._left.wait())
            await asyncio.wait({leaving}, timeout=self._took_s)
            leaving.cancel()
        else:
            await asyncio.sleep(self._took_s)
        if self._left.is_set() and not self._clings:
            raise _failed("the group was left", touched=True)
        if self._error is not None:
            raise self._error
        return "ok"

    def leave(self, reason: str) -> None:
        """Remember why."""
        self.reasons.append(reason)
        self._left.set()

    def kill(self) -> None:
        """Remember it."""
        self.is_killed = True


def _failed(message: str, *, touched: bool) -> UpdateFailedError:
    return UpdateFailedError(Fault(code=FaultCode.TRANSFER_FAILED, message=message), touched)


def ranks_of(*scripted: Scripted) -> tuple[Ranks, list[Coroutine[Any, Any, str]]]:
    """The ranks, and the call on each."""
    ranks = Ranks()
    ranks.all.extend(scripted)  # type: ignore[arg-type]
    return ranks, [one.call() for one in scripted]


def received(*sums: str) -> ReceivedData:
    """By one rank, of tensors a, b, ..."""
    table = tuple(TensorSum(name=name, checksum=s) for name, s in zip("ab", sums, strict=False))
    return ReceivedData(num_bytes=8, num_tensors=len(table), sums=table, receive_s=0.1, load_s=0.0)


def test_results_come_in_order_of_ranks() -> None:
    """Nobody is left, nothing is killed."""

    async def main() -> None:
        slow, fast = Scripted(3.0), Scripted(1.0)
        ranks, calls = ranks_of(slow, fast)
        assert await ranks.in_group(calls, None, "why") == ["ok", "ok"]
        assert slow.reasons == fast.reasons == []
        assert not ranks.has_stray

    run(main())


def test_one_that_fails_lets_the_others_go_after_a_moment() -> None:
    """They end by leaving the group; the first error stays the first."""

    async def main() -> None:
        bad, stuck = Scripted(1.0, error=_failed("broken", touched=False)), Scripted(1000.0)
        ranks, calls = ranks_of(bad, stuck)
        began = asyncio.get_running_loop().time()
        results = await ranks.in_group(calls, None, "another rank failed")
        assert asyncio.get_running_loop().time() - began == pytest.approx(1.0 + SETTLE_S)
        assert stuck.reasons == ["another rank failed"]
        fault = first_bad(results)
        assert fault is not None
        assert fault.message == "broken"
        assert not stuck.is_killed

    run(main())


def test_others_that_fail_alike_within_the_moment_keep_the_group() -> None:
    """A sender that gave up in order is no reason to break it."""

    async def main() -> None:
        ranks, calls = ranks_of(*(Scripted(t, error=_failed("gave up", touched=True)) for t in (1.0, 1.5)))
        await ranks.in_group(calls, None, "why")
        assert [rank.reasons for rank in ranks.all] == [[], []]  # type: ignore[attr-defined]

    run(main())


def test_rank_that_clings_is_killed_and_counts_as_dead() -> None:
    """After its time; until its call is over nothing else may change weights."""

    async def main() -> None:
        bad, clinging = Scripted(error=_failed("broken", touched=False)), Scripted(1000.0, clings=True)
        ranks, calls = ranks_of(bad, clinging)
        results = await ranks.in_group(calls, None, "why")
        assert isinstance(results[1], EngineDeadError)
        await asyncio.sleep(0)
        assert clinging.is_killed
        assert ranks.has_stray
        began = asyncio.get_running_loop().time()
        await ranks.wait_for_stray()
        assert asyncio.get_running_loop().time() - began == pytest.approx(RELEASE_S)
        await asyncio.sleep(1000.0)
        assert not ranks.has_stray

    run(main())


def test_own_thread_that_is_stuck_for_good_makes_the_engine_a_dead_one() -> None:
    """It can't be killed; the process has to be, and is, by what supervises it."""
    own = OwnRank(cast(Rank, object()))
    own.check_alive()
    own.kill()
    with pytest.raises(EngineDeadError, match="started again"):
        own.check_alive()


def test_join_that_takes_too_long_is_ended() -> None:
    """On every rank."""

    async def main() -> None:
        ranks, calls = ranks_of(Scripted(1000.0), Scripted(1000.0))
        results = await ranks.in_group(calls, 60.0, "too late")
        assert [type(r) for r in results] == [UpdateFailedError, UpdateFailedError]

    run(main())


def test_cancelled_call_leaves_the_group_and_waits_a_little() -> None:
    """Within the patience of the agent; who clings is killed later."""

    async def main() -> None:
        good, clinging = Scripted(1000.0), Scripted(1000.0, clings=True)
        ranks, calls = ranks_of(good, clinging)
        call = asyncio.ensure_future(ranks.in_group(calls, None, "why"))
        await asyncio.sleep(1.0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert asyncio.get_running_loop().time() == pytest.approx(1.0 + CANCEL_S)
        assert good.reasons == ["the call was cancelled"]
        assert ranks.has_stray
        await asyncio.sleep(RELEASE_S)
        assert clinging.is_killed
        assert not good.is_killed
        await asyncio.sleep(1000.0)

    run(main())


def test_local_work_has_its_bound_too() -> None:
    """A dead disk doesn't hold the engine for ever; one rank's failure doesn't cut another's work short."""

    async def main() -> None:
        bad, slow = Scripted(error=_failed("no such file", touched=False)), Scripted(100.0)
        ranks, calls = ranks_of(bad, slow)
        assert (await ranks.on_all(calls))[1] == "ok"
        stuck = Scripted(2 * LOCAL_S, clings=True)
        ranks, calls = ranks_of(stuck)
        [result] = await ranks.on_all(calls)
        assert isinstance(result, EngineDeadError)
        await asyncio.sleep(0)
        assert stuck.is_killed
        await asyncio.sleep(2 * LOCAL_S)

    run(main())


def test_cancelled_local_work_is_known_until_it_is_over() -> None:
    """Nothing is killed for it."""

    async def main() -> None:
        slow = Scripted(10.0)
        ranks, calls = ranks_of(slow)
        call = asyncio.ensure_future(ranks.on_all(calls))
        await asyncio.sleep(1.0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ranks.has_stray
        await asyncio.sleep(10.0)
        assert not ranks.has_stray
        assert not slow.is_killed

    run(main())


def test_ready_is_said_once_when_the_last_stands() -> None:
    """Not before."""
    said: list[int] = []
    standing = Standing(3, lambda: said.append(1))
    for expected in ([], [], [1]):
        standing.stands()
        assert said == expected


def test_progress_is_that_of_the_slowest_and_only_grows() -> None:
    """With the engine's own total."""
    told: list[tuple[int, int]] = []
    progress = Slowest(2, 10, lambda done, total: told.append((done, total)))
    for index, done in ((0, 5), (1, 3), (0, 10), (1, 3), (1, 10)):
        progress.advance(index, done, 0)
    assert told == [(3, 10), (10, 10)]


def test_agreed_data_is_the_first_ranks() -> None:
    """When all have the same sums."""
    assert agreed([received("1", "2"), received("1", "2")]) == received("1", "2")


def test_ranks_that_received_other_bytes_fail_naming_the_tensor() -> None:
    """Touched, and never hidden."""
    with pytest.raises(UpdateFailedError) as caught:
        agreed([received("1", "2"), received("1", "3")])
    assert caught.value.fault.code is FaultCode.CHECKSUM_MISMATCH
    assert caught.value.fault.detail == {"tensor": "b"}
    assert caught.value.weights_touched
    with pytest.raises(TornWeightsError, match="rank 1"):
        check_equal([received("1").sums, received("2").sums])


@pytest.mark.parametrize(
    ("results", "touched"),
    [
        ([_failed("x", touched=False), _failed("y", touched=False)], False),
        ([_failed("x", touched=False), _failed("y", touched=True)], True),
        ([_failed("x", touched=False), received("1")], True),
        ([_failed("x", touched=False), RuntimeError("y")], True),
    ],
)
def test_one_touched_rank_touches_the_worker(results: list[ReceivedData | BaseException], touched: bool) -> None:
    """Doubt counts as touched; the fault is the first one's."""
    with pytest.raises(UpdateFailedError) as caught:
        agreed(results)
    assert caught.value.weights_touched is touched
    assert caught.value.fault.message == "x"
