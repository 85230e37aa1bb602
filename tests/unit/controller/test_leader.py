"""Who leads: decisions about a lease, with late renewals, lost answers and clocks that disagree."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rlbus._kv import CALL_LIMIT_S, Entry, NoStoreError
from rlbus.codec import encode
from rlbus.controller.leader import (
    KNOWN_S,
    LEASE_KEY,
    NO_STORE_S,
    POLL_S,
    RENEW_S,
    RETRY_S,
    RETURN_S,
    STEP_DOWN_S,
    TERM_KEY,
    TTL_S,
    LeaseHolder,
    Tenure,
    leader_of,
)
from rlbus.controller.succession import LOOK_S
from rlbus.errors import BrokenError, DeadlineError
from rlbus.schemas import Lease, TermMark
from rlbus.testing import Faults, LoopClock, MemoryBroker, MemoryKv, MemoryTransport, run

pytestmark = pytest.mark.unit

# The promise of issue 3, in seconds.
FAILOVER_S = 5.0


class SkewedClock:
    """A date that is wrong by so many seconds."""

    def __init__(self, skew_s: float) -> None:
        self.skew_s = skew_s

    def now(self) -> float:
        """The wrong date."""
        return LoopClock().now() + self.skew_s


@pytest.mark.parametrize(
    ("age_s", "is_over", "renews"),
    [
        (0.0, False, False),
        (RENEW_S - 0.01, False, False),
        (RENEW_S, False, True),
        (STEP_DOWN_S - 0.01, False, True),
        (STEP_DOWN_S, True, True),
        (TTL_S, True, True),
        (3600.0, True, True),
    ],
)
def test_a_tenure_by_the_seconds_since_its_last_confirmed_write(age_s: float, is_over: bool, renews: bool) -> None:
    """It ends here before the store lets anybody else in, and is renewed several times before that."""
    tenure = Tenure(term=7, revision=9, confirmed_s=100.0)
    assert (tenure.is_over(100.0 + age_s), 100.0 + age_s >= tenure.next_write_s()) == (is_over, renews)


def test_a_renewal_keeps_the_term() -> None:
    """Only the revision moves on, and the time is that of sending."""
    assert Tenure(7, 9, 100.0).renewed(12, 101.0) == Tenure(7, 12, 101.0)


def test_the_limits_fit_together() -> None:
    """Two tries of a renewal fit before stepping down, which is before the lease ends; a standby needs under 5 s."""
    assert RENEW_S + 2 * CALL_LIMIT_S + RETRY_S < STEP_DOWN_S < TTL_S
    assert TTL_S + 0.5 + POLL_S + LOOK_S < FAILOVER_S


def with_two(scenario: Callable[[MemoryTransport, LeaseHolder, LeaseHolder], Coroutine[Any, Any, None]]) -> None:
    """Two that may lead, "a" an hour ahead in its date and "b" an hour behind; the connection is a's."""

    async def main() -> None:
        broker = MemoryBroker()
        near, far = broker.connect("a"), broker.connect("b")
        a = LeaseHolder(MemoryKv(near), SkewedClock(3600.0), name="a")
        b = LeaseHolder(MemoryKv(far), SkewedClock(-3600.0), name="b")
        await scenario(near, a, b)

    run(main())


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_one_leads_and_the_other_stands_by_whatever_their_dates_are() -> None:
    """Renewed for a minute, nobody else gets in; b is told once who leads."""

    async def scenario(_: MemoryTransport, a: LeaseHolder, b: LeaseHolder) -> None:
        told: list[str] = []
        await a.acquire()
        keeping = asyncio.create_task(a.keep())
        waiting = asyncio.create_task(b.acquire(lambda lease: told.append(lease.name)))
        await asyncio.sleep(60.0)
        assert (a.is_held, b.is_held, waiting.done(), told) == (True, False, False, ["a"])
        keeping.cancel()
        stopped_s = now_s()
        tenure = await waiting
        assert TTL_S - RENEW_S <= now_s() - stopped_s <= TTL_S + POLL_S + 0.01
        assert (a.is_held, b.is_held) == (False, True)
        assert a.tenure is not None
        assert tenure.term > a.tenure.revision

    with_two(scenario)


def test_released_it_is_free_at_once() -> None:
    """A clean stop costs one poll."""

    async def scenario(_: MemoryTransport, a: LeaseHolder, b: LeaseHolder) -> None:
        first = await a.acquire()
        waiting = asyncio.create_task(b.acquire())
        await asyncio.sleep(1.0)
        began_s = now_s()
        await a.release()
        assert not a.is_held
        assert (await waiting).term > first.term
        assert now_s() - began_s <= POLL_S + 0.01

    with_two(scenario)


def test_renewals_whose_answers_are_lost_dont_cost_the_lease_if_one_is_heard_in_time() -> None:
    """The store took a write that nobody confirmed: the next try finds it as our own, and goes on from there."""

    async def scenario(near: MemoryTransport, a: LeaseHolder, _: LeaseHolder) -> None:
        first = await a.acquire()
        keeping = asyncio.create_task(a.keep())
        await asyncio.sleep(RENEW_S - 0.1)
        # The question gets through, its answer takes longer than anybody waits.
        near.faults = Faults(delay_s=(0.4, 0.4), only="$KV.>")
        await asyncio.sleep(0.9)
        near.faults = Faults()
        await asyncio.sleep(10.0)
        assert (a.is_held, keeping.done()) == (True, False)
        assert a.tenure is not None
        assert (a.tenure.term, a.tenure.revision > first.revision) == (first.term, True)
        keeping.cancel()

    with_two(scenario)


def test_one_that_cant_renew_knows_it_is_over_before_the_store_does() -> None:
    """Cut off: no longer held STEP_DOWN_S after the last confirmed write, and the other gets in only afterwards."""

    async def scenario(near: MemoryTransport, a: LeaseHolder, b: LeaseHolder) -> None:
        await a.acquire()
        keeping = asyncio.create_task(a.keep())
        waiting = asyncio.create_task(b.acquire())
        await asyncio.sleep(10.5)
        near.broker.partition(near)
        while a.is_held:  # noqa: ASYNC110 - the state is what is watched
            await asyncio.sleep(0.01)
        assert not waiting.done()
        assert "wasn't renewed" in await keeping
        await waiting
        assert (a.is_held, b.is_held) == (False, True)

    with_two(scenario)


def test_one_that_slept_too_long_finds_the_other_and_isnt_fooled_by_its_own_key() -> None:
    """Nothing ran here for a while (SIGSTOP): its very next look at the lease says no, without asking the store."""

    async def scenario(_: MemoryTransport, a: LeaseHolder, b: LeaseHolder) -> None:
        await a.acquire()
        await asyncio.sleep(TTL_S)  # nobody keeps it meanwhile
        assert not a.is_held
        await b.acquire()
        assert await a.keep() == "it wasn't renewed for 3.0 s"

    with_two(scenario)


def test_a_lease_of_somebody_else_in_its_place_is_lost_at_once() -> None:
    """Whoever holds the key leads, however sure we are."""

    async def scenario(near: MemoryTransport, a: LeaseHolder, _: LeaseHolder) -> None:
        tenure = await a.acquire()
        kv = MemoryKv(near)
        await kv.delete(LEASE_KEY, tenure.revision)
        await kv.create(LEASE_KEY, encode(Lease(holder="x", name="other", since=0.0)), ttl_s=TTL_S)
        assert await a.keep() == "other leads now"
        assert not a.is_held

    with_two(scenario)


def test_a_leader_takes_a_term_above_the_one_that_workers_have_seen() -> None:
    """Whoever leads next: the one that was told, or another one, also much later."""

    async def scenario(_: MemoryTransport, a: LeaseHolder, b: LeaseHolder) -> None:
        first = await a.acquire()
        await a.note_term(1_000)
        await a.release()
        second = await b.acquire()
        await asyncio.sleep(TTL_S)  # it dies, and nothing but the store remembers its term
        third = await a.acquire()
        assert first.term < 1_000 < second.term < third.term

    with_two(scenario)


def test_a_term_that_couldnt_be_noted_is_still_known_to_the_process() -> None:
    """The store is silent at that moment: who was told takes a larger one all the same."""

    async def scenario(near: MemoryTransport, a: LeaseHolder, _: LeaseHolder) -> None:
        await a.acquire()
        near.broker.partition(near)
        await a.note_term(1_000)
        near.broker.heal(near)
        assert (await a.acquire()).term > 1_000

    with_two(scenario)


def test_no_two_leaders_share_a_term_while_answers_of_the_store_are_lost() -> None:
    """Terms only grow, whoever takes them, and whatever of it was heard."""

    async def scenario(near: MemoryTransport, a: LeaseHolder, b: LeaseHolder) -> None:
        near.faults = Faults(drop=0.3, only="$KV.>")
        terms: list[int] = []
        for number in range(40):
            holder = (a, b)[number % 2]
            terms.append((await holder.acquire()).term)
            await holder.note_term(terms[-1] + number % 3)
            await asyncio.sleep(TTL_S)
        assert terms == sorted(set(terms))

    with_two(scenario)


def test_a_last_term_that_cant_be_read_is_written_anew() -> None:
    """It costs nobody the leadership."""

    async def scenario(near: MemoryTransport, a: LeaseHolder, _: LeaseHolder) -> None:
        await MemoryKv(near).create(TERM_KEY, b"{")
        assert (await a.acquire()).term == 2
        there = await MemoryKv(near).get(TERM_KEY)
        assert there is not None
        assert there.value == encode(TermMark(term=2))

    with_two(scenario)


def test_a_leader_that_lives_is_told_from_a_lease_that_ends() -> None:
    """Whoever must be alone asks: one that renews leads, one that was killed a moment ago doesn't."""

    async def scenario(near: MemoryTransport, a: LeaseHolder, _: LeaseHolder) -> None:
        kv = MemoryKv(near)
        assert await leader_of(kv) is None
        await a.acquire()
        keeping = asyncio.create_task(a.keep())
        there = await leader_of(kv)
        assert there is not None
        assert there.name == "a"
        keeping.cancel()
        assert await leader_of(kv) is None

    with_two(scenario)


@pytest.mark.parametrize("back_s", [1.0, RETURN_S - 1.0])
def test_a_leader_is_found_that_comes_back_to_a_server_which_was_away_before_anybody_asked(back_s: float) -> None:
    """Its lease has ended, so the store is empty but for the term; whoever asks has met no trouble."""

    async def scenario(near: MemoryTransport, a: LeaseHolder, _: LeaseHolder) -> None:
        leading = asyncio.create_task(lead(a))
        await asyncio.sleep(RENEW_S / 2)
        near.broker.disconnect(near)
        await asyncio.sleep(2 * TTL_S)
        asyncio.get_running_loop().call_later(back_s, near.broker.reconnect, near)
        there = await leader_of(MemoryKv(near.broker.connect("asking")))
        assert there is not None
        assert there.name == "a"
        leading.cancel()

    with_two(scenario)


def test_a_leader_is_found_by_a_store_that_answers_late() -> None:
    """An answer that is lost, or later than a call may take, doesn't let anybody begin beside who leads."""

    class LateKv(MemoryKv):
        """Of three questions in turn it answers the last."""

        num_asked = 0

        async def get(self, key: str) -> Entry | None:
            self.num_asked += 1
            if self.num_asked % 3:
                await asyncio.sleep(CALL_LIMIT_S)
                raise DeadlineError("the store's answer", CALL_LIMIT_S)
            return await super().get(key)

    async def scenario(near: MemoryTransport, a: LeaseHolder, _: LeaseHolder) -> None:
        await a.acquire()
        keeping = asyncio.create_task(a.keep())
        there = await leader_of(LateKv(near))
        assert there is not None
        assert there.name == "a"
        keeping.cancel()

    with_two(scenario)


async def lead(holder: LeaseHolder) -> None:
    """As a controller does: whenever the lease is lost, it is taken again."""
    while True:
        await holder.acquire()
        await holder.keep()


@pytest.mark.parametrize("cut_after_s", [0.0, 0.1, 0.3])  # before the first look, and after it
@pytest.mark.parametrize("away_s", [0.5, 2.5, 3.0, 6.0])
def test_a_leader_is_found_by_a_store_that_is_away_for_a_moment(cut_after_s: float, away_s: float) -> None:
    """Its lease has ended meanwhile, and it is connected again after whoever asks."""

    async def scenario(near: MemoryTransport, a: LeaseHolder, _: LeaseHolder) -> None:
        asking = near.broker.connect("asking")
        leading = asyncio.create_task(lead(a))
        await asyncio.sleep(RENEW_S / 2)
        for transport, late_s in ((near, min(away_s, RETURN_S - 1.0)), (asking, 0.0)):
            asyncio.get_running_loop().call_later(cut_after_s, near.broker.disconnect, transport)
            asyncio.get_running_loop().call_later(cut_after_s + away_s + late_s, near.broker.reconnect, transport)
        await asyncio.sleep(0.01)
        there = await leader_of(MemoryKv(asking))
        assert there is not None
        assert there.name == "a"
        leading.cancel()

    with_two(scenario)


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("after_s", [0.0, 1.5])
def test_a_store_that_stays_away_doesnt_say_that_nobody_leads(is_silent: bool, after_s: float) -> None:
    """Nor is it asked for ever."""

    async def scenario(near: MemoryTransport, a: LeaseHolder, _: LeaseHolder) -> None:
        await a.acquire()
        asking = near.broker.connect("asking")
        lose = near.broker.partition if is_silent else near.broker.disconnect
        began_s = now_s()
        asyncio.get_running_loop().call_later(after_s, lose, asking)
        await asyncio.sleep(0.01)
        with pytest.raises(BrokenError, match="whether a controller leads by it can't be told"):
            await leader_of(MemoryKv(asking))
        assert KNOWN_S <= now_s() - began_s <= KNOWN_S + CALL_LIMIT_S + POLL_S + 0.01

    with_two(scenario)


class RecoveringKv(MemoryKv):
    """It isn't there yet, between these seconds of the loop."""

    absent_s = (0.0, 0.0)

    async def get(self, key: str) -> Entry | None:
        """As long as it isn't there it says so."""
        if self.absent_s[0] <= now_s() < self.absent_s[1]:
            raise NoStoreError("JetStream", "stream not found")
        return await super().get(key)


def test_nobody_leads_at_once_in_an_empty_store_and_nearly_at_once_without_one() -> None:
    """A controller that must be alone isn't kept waiting where nobody can lead."""

    async def scenario(near: MemoryTransport, _: LeaseHolder, __: LeaseHolder) -> None:
        began_s = now_s()
        assert await leader_of(MemoryKv(near)) is None
        assert now_s() - began_s < POLL_S
        kv = RecoveringKv(near)
        kv.absent_s = (now_s(), now_s() + 3600.0)
        began_s = now_s()
        assert await leader_of(kv) is None
        assert NO_STORE_S <= now_s() - began_s <= NO_STORE_S + POLL_S + 0.01

    with_two(scenario)


@pytest.mark.parametrize(("begins_s", "length_s"), [(0.0, NO_STORE_S / 2), (0.1, 3 * NO_STORE_S)])
def test_a_leader_is_found_by_a_store_that_recovers_a_moment_after_its_server(begins_s: float, length_s: float) -> None:
    """Whoever has seen a lease doesn't believe that there is no store, however long it is said."""

    async def scenario(near: MemoryTransport, a: LeaseHolder, _: LeaseHolder) -> None:
        leading = asyncio.create_task(lead(a))
        await asyncio.sleep(RENEW_S / 2)
        kv = RecoveringKv(near)
        kv.absent_s = (now_s() + begins_s, now_s() + begins_s + length_s)
        there = await leader_of(kv)
        assert there is not None
        assert there.name == "a"
        leading.cancel()

    with_two(scenario)


def test_a_lease_that_was_taken_without_an_answer_is_given_back_and_taken_anew() -> None:
    """How long it still holds can't be known, so its term isn't used."""

    async def scenario(near: MemoryTransport, a: LeaseHolder, _: LeaseHolder) -> None:
        near.faults = Faults(delay_s=(0.25, 0.25), only="$KV.>")
        taking = asyncio.create_task(a.acquire())
        await asyncio.sleep(0.8)  # the look was answered, the write is done, and its answer is on the way
        near.broker.partition(near)
        await asyncio.sleep(0.5)
        near.broker.heal(near)
        near.faults = Faults()
        lost = await MemoryKv(near).get(LEASE_KEY)
        assert (lost is not None, taking.done()) == (True, False)
        tenure = await taking
        there = await MemoryKv(near).get(LEASE_KEY)
        assert there is not None
        assert lost is not None
        assert (a.is_held, there.revision, tenure.term > lost.revision) == (True, tenure.revision, True)

    with_two(scenario)
