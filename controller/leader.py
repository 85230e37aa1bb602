"""Who leads: the holder of a lease in the store. Everybody else stands by, and takes over when it ends.

Invariants: a term is taken by writing it over the last one that was taken, by compare-and-set and always above it, so
no two are the same and none goes back; it is also at least the revision of the lease's first write, and above each that
a worker was seen to know (`LeaseHolder.note_term`). Nobody compares dates (the store counts the TTL, each process its
own seconds since its last confirmed write); a leader stops acting STEP_DOWN_S after it *sent* the last write that was
confirmed, which is before the store lets anybody else in.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlbus._clock import Clock
from rlbus._kv import Entry, Kv, NoStoreError
from rlbus.codec import decode, encode
from rlbus.errors import BrokenError, ConflictError, DeadlineError, DecodeError
from rlbus.schemas import Lease, TermMark

_log = logging.getLogger("rlbus.controller")

LEASE_KEY = "lease"
TERM_KEY = "term"
# Source of these four: issue 3 wants a standby that serves within 5 s of the leader's death. The worst case is TTL_S,
# POLL_S, the journal and a round of hellos (controller.succession: 0.3 s, up to 1 s when an op was left behind), and
# what a loaded machine adds; 3.0 to 3.3 s were measured without an op. facts/nats.md C21 has 6, 2 and 4 s, which can't
# do it. Two tries of a renewal (rlbus._kv.CALL_LIMIT_S) fit before STEP_DOWN_S. The price: a leader whose store is
# silent for 2.2 s gives up what it runs, which is then settled as if it had died.
TTL_S = 3
RENEW_S = 0.7
STEP_DOWN_S = 2.2
POLL_S = 0.2
# Before a renewal that failed is tried again.
RETRY_S = 0.2
# For whoever must be alone. How long a store that is away or silent is asked, before it can't be told who leads.
# Source: a server that is started again takes a few seconds, and then each of those that it lost up to RETURN_S.
KNOWN_S = 20.0
# When a leader that was cut off has its lease again after the store's return, at the latest. Source: rlbus._supervised,
# BACKOFF_MAX_S, and what connecting and taking the lease need.
RETURN_S = 6.0
# How long it has to be said that there is no store. Source: a server takes connections a moment before it has recovered
# its streams (tests/integration/test_kv_contract.py).
NO_STORE_S = 1.0


@dataclass(frozen=True, slots=True)
class Tenure:
    """One leadership. `confirmed_s` is when the last confirmed write was sent, in loop time."""

    term: int
    revision: int
    confirmed_s: float

    def is_over(self, now_s: float) -> bool:
        """Whether the holder must not act any more, as far as it can know by itself."""
        return now_s >= self.confirmed_s + STEP_DOWN_S

    def next_write_s(self) -> float:
        """When to renew."""
        return self.confirmed_s + RENEW_S

    def renewed(self, revision: int, sent_s: float) -> "Tenure":
        """After a confirmed write that was sent at `sent_s`."""
        return replace(self, revision=revision, confirmed_s=sent_s)


class LeaseHolder:
    """One process' claim. `acquire`, then run `keep` beside what the leader does, `release` at a clean end."""

    def __init__(self, kv: Kv, clock: Clock, *, name: str) -> None:
        self.tenure: Tenure | None = None
        # The largest term that workers were seen to know.
        self._seen_term = 0
        self._kv = kv
        self._lease = Lease(holder=uuid.uuid4().hex, name=name, since=clock.now())

    @property
    def is_held(self) -> bool:
        """Whether this process may act as the leader, at this moment."""
        return self.tenure is not None and not self.tenure.is_over(asyncio.get_running_loop().time())

    async def acquire(self, on_standby: Callable[[Lease], None] | None = None) -> Tenure:
        """Wait until the lease is free, as long as it takes, and take it. `on_standby` is called if another has it.

        Cancel: the lease may have been taken; it ends by itself.
        """
        loop = asyncio.get_running_loop()
        is_told = False
        while True:
            try:
                there = await self._kv.get(LEASE_KEY)
                if there is None:
                    sent_s = loop.time()
                    revision = await self._kv.create(LEASE_KEY, encode(self._lease), ttl_s=TTL_S)
                    self.tenure = await self._with_term(Tenure(0, revision, sent_s))
                    if self.tenure is not None:
                        return self.tenure
                    continue
                holder = _holder(there)
                if holder.holder == self._lease.holder:
                    # Taken in a try whose answer was lost (how long it still holds can't be known), or without a term.
                    await self._kv.delete(LEASE_KEY, there.revision)
                    continue
                if not is_told and on_standby is not None:
                    on_standby(holder)
                is_told = True
            except ConflictError:
                pass  # somebody was faster
            except (BrokenError, DeadlineError) as exc:
                _log.info("standing by; the lease can't be read: %s", exc)
            await asyncio.sleep(POLL_S)

    async def note_term(self, seen: int) -> None:
        """Workers have seen this term: whoever leads next takes one above it, and this process in any case.

        Cancel: it may be written down.
        """
        self._seen_term = max(self._seen_term, seen)
        try:
            await self._take_term(0)
        except (BrokenError, ConflictError, DeadlineError) as exc:
            _log.warning("that workers have seen term %d isn't written down: %s", seen, exc)

    async def keep(self) -> str:
        """Renew until it is lost; says why. From then on `is_held` is false.

        Cancel: it isn't renewed any more.
        """
        loop = asyncio.get_running_loop()
        while True:
            tenure = self.tenure
            assert tenure is not None
            await asyncio.sleep(max(0.0, tenure.next_write_s() - loop.time()))
            why = await self._renew(tenure)
            while why is None and self.tenure is tenure:
                await asyncio.sleep(RETRY_S)
                why = await self._renew(tenure)
            if why is not None:
                self.tenure = None
                return why

    async def release(self) -> None:
        """Let the next one in at once. A failure is logged: it then ends by itself. Cancel: it may be released."""
        tenure, self.tenure = self.tenure, None
        if tenure is None:
            return
        try:
            # Read first: a renewal may have been under way when it was cancelled.
            there = await self._kv.get(LEASE_KEY)
            if there is not None and _holder(there).holder == self._lease.holder:
                await self._kv.delete(LEASE_KEY, there.revision)
        except (BrokenError, ConflictError, DeadlineError) as exc:
            _log.info("the lease wasn't released: %s", exc)

    async def _renew(self, tenure: Tenure) -> str | None:
        """One try; why the lease is lost, or None: `tenure` was replaced, or it is worth another try."""
        sent_s = asyncio.get_running_loop().time()
        if tenure.is_over(sent_s):
            return f"it wasn't renewed for {sent_s - tenure.confirmed_s:.1f} s"
        try:
            revision = await self._kv.update(LEASE_KEY, encode(self._lease), tenure.revision, ttl_s=TTL_S)
        except ConflictError:
            return await self._judge_conflict(tenure)
        except (BrokenError, DeadlineError) as exc:
            _log.warning("the lease isn't renewed: %s", exc)
            return None
        self.tenure = tenure.renewed(revision, sent_s)
        return None

    async def _with_term(self, tenure: Tenure) -> Tenure | None:
        """Of a lease that was just taken; None: no term could be taken as long as it holds."""
        loop = asyncio.get_running_loop()
        while not tenure.is_over(loop.time()):
            try:
                term = await self._take_term(tenure.revision)
            except (BrokenError, ConflictError, DeadlineError) as exc:
                _log.warning("no term is taken yet: %s", exc)
                await asyncio.sleep(RETRY_S)
                continue
            return None if tenure.is_over(loop.time()) else replace(tenure, term=term)
        return None

    async def _take_term(self, at_least: int) -> int:
        """A term above all that were taken or seen, written down. Raises: as `Kv.update`; it may be taken then."""
        there = await self._kv.get(TERM_KEY)
        taken = 0 if there is None else _taken(there.value)
        term = max(at_least, taken + 1, self._seen_term + 1)
        value = encode(TermMark(term=term))
        if there is None:
            await self._kv.create(TERM_KEY, value)
        else:
            await self._kv.update(TERM_KEY, value, there.revision)
        return term

    async def _judge_conflict(self, tenure: Tenure) -> str | None:
        """Another revision stands there: another holder's, or our own of a renewal whose answer was lost."""
        try:
            there = await self._kv.get(LEASE_KEY)
        except (BrokenError, DeadlineError):
            return None
        if there is None:
            return "it had ended"
        holder = _holder(there)
        if holder.holder != self._lease.holder:
            return f"{holder.name} leads now"
        # Not confirmed as of now: it was written by an earlier try. The next one will be.
        self.tenure = replace(tenure, revision=there.revision)
        return None


async def leader_of(kv: Kv) -> Lease | None:
    """Who leads, and lives: a lease that its holder doesn't renew is waited out. None: nobody, or there is no store.

    A leader's lease may end while the store is away; it takes it again afterwards, which is waited for.

    Raises: BrokenError: the store is away, or silent, for KNOWN_S: it can't be told.
    Cancel: leaves nothing.
    """
    loop = asyncio.get_running_loop()
    gives_up_s = loop.time() + KNOWN_S
    seen: Entry | None = None
    # Since when the store answers, or says that it isn't there; and for how long it has to answer to be believed.
    steady_s: float | None = None
    absent_s: float | None = None
    patience_s = 0.0
    while True:
        try:
            there = await kv.get(LEASE_KEY)
            # The server may have been away before we asked, and who led by it is on its way back.
            is_first = there is None and seen is None and patience_s < RETURN_S
            if is_first and await kv.get(TERM_KEY) is not None:
                patience_s = RETURN_S
        except (BrokenError, DeadlineError) as exc:
            now_s = loop.time()
            steady_s, patience_s = None, RETURN_S
            if isinstance(exc, NoStoreError) and seen is None:
                absent_s = now_s if absent_s is None else absent_s
                if now_s - absent_s >= NO_STORE_S:
                    _log.info("no leader is found: %s", exc)
                    return None
            else:
                absent_s = None
            if now_s >= gives_up_s:
                problem = f"it doesn't answer steadily, so whether a controller leads by it can't be told: {exc}"
                raise BrokenError("store of the lease", problem) from exc
        else:
            now_s = loop.time()
            absent_s = None
            steady_s = now_s if steady_s is None else steady_s
            if there is not None:
                is_renewed = seen is not None and there.revision != seen.revision
                seen, patience_s = there, max(patience_s, TTL_S + POLL_S)
                if is_renewed:
                    return _holder(there)
            if now_s - steady_s >= patience_s:
                return None if there is None else _holder(there)
        await asyncio.sleep(POLL_S)


def _holder(there: Entry) -> Lease:
    lease: Lease = decode(there.value, Lease, LEASE_KEY)
    return lease


def _taken(value: bytes) -> int:
    try:
        mark: TermMark = decode(value, TermMark, TERM_KEY)
    except DecodeError as exc:
        _log.error("the last term can't be read: %s; going on above what workers have seen", exc)
        return 0
    return mark.term
