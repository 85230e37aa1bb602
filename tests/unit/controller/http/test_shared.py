"""Ops that several callers wait for, or nobody any more."""

import asyncio

import pytest

from rlbus.controller.http import shared
from rlbus.controller.http.shared import GRACE_S, SharedOps
from rlbus.errors import BusyError, ClosedError
from rlbus.schemas import OpStatus, Report
from rlbus.testing import run

pytestmark = pytest.mark.unit

REPORT = Report(op_id="x", op="pause", status=OpStatus.OK, outcomes=(), phases_s={}, took_s=0.0)


class Op:
    """Takes 100 s; counts how often it began and was taken back."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_cancelled = 0

    async def __call__(self) -> Report:
        """Run."""
        self.num_begun += 1
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return REPORT


def test_the_same_request_joins_the_op_that_runs() -> None:
    """SCENARIOS 3: whose read time-out fired asks again, and one op ran."""

    async def main() -> None:
        ops, op = SharedOps(), Op()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50):
                await ops.join("a", op)
        await asyncio.sleep(GRACE_S - 1)
        assert await ops.join("a", op) is REPORT
        assert (op.num_begun, op.num_cancelled) == (1, 0)

    run(main())


def test_an_op_that_nobody_waits_for_is_taken_back() -> None:
    """After the grace, once; the next request begins anew."""

    async def main() -> None:
        ops, op = SharedOps(), Op()
        waiting = asyncio.ensure_future(ops.join("a", op))
        other = asyncio.ensure_future(ops.join("a", op))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.sleep(2 * GRACE_S)
        assert op.num_cancelled == 0  # the other one still waits
        other.cancel()
        await asyncio.sleep(GRACE_S + 1)
        assert op.num_cancelled == 1
        assert await ops.join("a", op) is REPORT
        assert op.num_begun == 2

    run(main())


def test_who_asks_again_while_the_op_is_taken_back_begins_a_new_one() -> None:
    """Taking it back takes the controller some seconds; what is left of it is still ended at the close."""

    async def main() -> None:
        ops = SharedOps()
        begun: list[str] = []

        async def op() -> Report:
            begun.append("begun")
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                await asyncio.sleep(5)
                begun.append("taken back")
                raise
            return REPORT

        waiting = asyncio.ensure_future(ops.join("a", op))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.sleep(GRACE_S + 1)
        again = asyncio.ensure_future(ops.join("a", op))
        await asyncio.sleep(5)
        assert begun == ["begun", "begun", "taken back"]
        joined = asyncio.ensure_future(ops.join("a", op))  # the second is still there, though the first has gone
        assert await again is REPORT
        assert await joined is REPORT
        assert len(begun) == 3
        left = asyncio.ensure_future(ops.join("b", op))
        await asyncio.sleep(1)
        left.cancel()
        await asyncio.sleep(GRACE_S + 1)
        await ops.aclose()
        assert begun[3:] == ["begun", "taken back"]

    run(main())


def test_ops_that_are_taken_back_count_until_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that hang up must not begin more than the bound."""
    monkeypatch.setattr(shared, "MAX_OPS", 1)

    async def main() -> None:
        ops = SharedOps()

        async def op() -> Report:
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(5)
            return REPORT

        waiting = asyncio.ensure_future(ops.join("a", op))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.sleep(GRACE_S + 1)
        with pytest.raises(BusyError):
            await ops.join("a", op)
        await asyncio.sleep(5)
        assert await ops.join("a", op) is REPORT

    run(main())


def test_other_requests_have_ops_of_their_own_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it they are told to come later."""
    monkeypatch.setattr(shared, "MAX_OPS", 2)

    async def main() -> None:
        ops, op = SharedOps(), Op()
        waiting = [asyncio.ensure_future(ops.join(key, op)) for key in ("a", "b")]
        await asyncio.sleep(1)
        with pytest.raises(BusyError):
            await ops.join("c", op)
        await asyncio.gather(*waiting)
        assert op.num_begun == 2

    run(main())


def test_an_error_reaches_everybody_and_is_not_kept() -> None:
    """Nor does one that nobody waits for end up as a warning."""

    async def main() -> None:
        ops = SharedOps()

        async def fails() -> Report:
            await asyncio.sleep(1)
            raise ClosedError("bus")

        ended = await asyncio.gather(ops.join("a", fails), ops.join("a", fails), return_exceptions=True)
        assert [type(e) for e in ended] == [ClosedError, ClosedError]
        lost = asyncio.ensure_future(ops.join("a", fails))
        await asyncio.sleep(0.5)
        lost.cancel()
        await asyncio.sleep(5)

    run(main())


def test_closing_takes_back_what_runs() -> None:
    """Whoever waits hears of it."""

    async def main() -> None:
        ops, op = SharedOps(), Op()
        waiting = asyncio.ensure_future(ops.join("a", op))
        await asyncio.sleep(1)
        await ops.aclose()
        await ops.aclose()
        assert op.num_cancelled == 1
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(main())
