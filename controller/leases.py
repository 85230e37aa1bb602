"""Renews the leases of an op's pauses as long as the op runs; they end by themselves if the controller dies."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from rlbus.controller.line import Line
from rlbus.controller.op_ids import derive_step
from rlbus.errors import RLBusError
from rlbus.fanout import Limits
from rlbus.schemas import RenewLease, WorkerId

_log = logging.getLogger("rlbus.controller")

# How long a pause of an op holds without renewal, in seconds: what engines whose weights are clean stand still at most
# after their controller died. Above a failover, so that whoever takes over (under 5 s) still finds everybody paused.
LEASE_S = 30.0
# Between two renewals: two of them may get lost.
RENEW_S = 10.0
# How long one renewal is waited for; the next doesn't wait for who is silent.
LIMIT_S = 5.0
# What an op that has ended leaves on workers that must not generate beside a newer version: until the next update,
# which takes the pause over. Not for ever: that is a person's right. Source: the longest lease that workers take.
KEPT_S = 86_400.0


@contextlib.asynccontextmanager
async def renewing(
    line: Line, op_id: str, owner: str, paused: Callable[[], Sequence[WorkerId]], *, lease_s: float = LEASE_S
) -> AsyncIterator[None]:
    """Renew, every RENEW_S, the leases of `owner` on whoever is in `paused()` then, until the context ends.

    Cancel: the renewal in progress is dropped; what was sent counts.
    """
    task = asyncio.get_running_loop().create_task(
        _renew(line, op_id, owner, paused, lease_s), name=f"leases of {op_id}"
    )
    try:
        yield
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(ended, Exception):
            _log.error("op %s: leases were not renewed: a bug", op_id, exc_info=ended)


async def keep(line: Line, op_id: str, owner: str, workers: Sequence[WorkerId]) -> None:
    """Leave these paused after the op: their weights are clean, but others generate with newer ones.

    Cancel: as `renewing`. Who doesn't hear it resumes when its lease ends, at its old version and not admitted.
    """
    if workers:
        await _ask(line, op_id, RenewLease(owner=owner, lease_s=KEPT_S), workers, "keep")


async def _renew(line: Line, op_id: str, owner: str, paused: Callable[[], Sequence[WorkerId]], lease_s: float) -> None:
    loop = asyncio.get_running_loop()
    number, next_s = 0, loop.time()
    while True:
        next_s = max(next_s + RENEW_S, loop.time())
        await asyncio.sleep(next_s - loop.time())
        workers = tuple(paused())
        if not workers:
            continue
        number += 1
        await _ask(line, op_id, RenewLease(owner=owner, lease_s=lease_s), workers, f"renew-{number}")


async def _ask(line: Line, op_id: str, body: RenewLease, workers: Sequence[WorkerId], step: str) -> None:
    limits = Limits(ack_s=LIMIT_S, stall_s=LIMIT_S, deadline_s=LIMIT_S)
    try:
        answers = await line.ask(body, workers, op_id=derive_step(op_id, line.term, step), limits=limits)
    except RLBusError as exc:
        # Not connected, say: the next one may get through, and if none does the workers go on without us.
        _log.warning("op %s: the leases of %d workers were not renewed: %s", op_id, len(workers), exc)
        return
    for worker, answer in answers.items():
        if answer.fault is not None:
            _log.warning("op %s: the lease of %s was not renewed: %s", op_id, worker, answer.fault.message)
