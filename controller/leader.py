"""Who leads: the holder of a lease in the store. Everybody else stands by, and takes over when it ends.

Invariants: the revision of the lease's first write is the term, so each leader's is above all before; nobody compares
dates (the store counts the TTL, each process its own seconds since its last confirmed write); a leader stops acting
STEP_DOWN_S after it *sent* the last write that was confirmed, which is before the store lets anybody else in.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlbus._clock import Clock
from rlbus._kv import Kv
from rlbus.codec import decode, encode
from rlbus.errors import BrokenError, ConflictError, DeadlineError
from rlbus.schemas import Lease

_log = logging.getLogger("rlbus.controller")

LEASE_KEY = "lease"
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
                    self.tenure = Tenure(revision, revision, sent_s)
                    return self.tenure
                holder: Lease = decode(there.value, Lease, LEASE_KEY)
                if holder.holder == self._lease.holder:
                    # Taken in a try whose answer was lost: how long it still holds can't be known.
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
            if there is not None and decode(there.value, Lease, LEASE_KEY).holder == self._lease.holder:
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

    async def _judge_conflict(self, tenure: Tenure) -> str | None:
        """Another revision stands there: another holder's, or our own of a renewal whose answer was lost."""
        try:
            there = await self._kv.get(LEASE_KEY)
        except (BrokenError, DeadlineError):
            return None
        if there is None:
            return "it had ended"
        holder: Lease = decode(there.value, Lease, LEASE_KEY)
        if holder.holder != self._lease.holder:
            return f"{holder.name} leads now"
        # Not confirmed as of now: it was written by an earlier try. The next one will be.
        self.tenure = replace(tenure, revision=there.revision)
        return None
