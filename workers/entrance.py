"""The local entrance to an agent: a request of this process (an HTTP caller's) becomes a command like one of the bus.

Invariants: nothing gets around the agent's rules, which see an envelope with op_id, term and expiry, checked by the
same decoder; a caller that goes away ends nothing: its op goes on to its own end or deadline, a pause that it made to
the end of its lease, and whoever sends the same op_id again joins, or gets what became of it.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

import msgspec

from rlbus.bus import Bus
from rlbus.codec import decode, encode
from rlbus.errors import ClosedError, DeadlineError, DecodeError, PayloadTooLargeError
from rlbus.schemas import (
    Command,
    CommandBody,
    Descriptor,
    Fault,
    FaultCode,
    InitTransfer,
    PauseGeneration,
    RenewLease,
    Result,
    ResultStatus,
    WorkerAnswer,
    route_of,
)
from rlbus.workers.answers import Answers
from rlbus.workers.checks import fault
from rlbus.workers.config import AgentConfig
from rlbus.workers.moves import Cleanup
from rlbus.workers.sleeping import PAUSE_SUFFIX
from rlbus.workers.state import WorkerState

# Longest time that a caller may give an op, in seconds.
MAX_LIMIT_S = 86_400.0
# Longest time that an op may hold the worker's one place while it waits for a trainer to join, in seconds: nothing else
# can run meanwhile, and one that comes later asks again. Source: vLLM's own rendezvous, seconds once both are there.
MAX_JOIN_S = 120.0
# Largest request. More than a message of the bus may have: a caller's own metadata of a large model doesn't travel on.
MAX_REQUEST_BYTES = 16 << 20
# After everything else that the agent may do at the end of an op: for the loop to come round, in seconds.
SPARE_S = 1.0


class Host(Protocol):
    """What the entrance needs of the agent."""

    answers: Answers
    descriptor: Descriptor

    @property
    def state(self) -> WorkerState:
        """As it is now."""
        ...

    def take(self, command: Command, reply: str | None, route: str) -> None:
        """Take a command that is addressed to this worker alone; answers go to `reply`."""
        ...


@dataclass(frozen=True, slots=True)
class Waiting:
    """One caller who waits for its op."""

    op_id: str
    result: asyncio.Future[Result]

    def on_answer(self, answer: WorkerAnswer) -> None:
        """Take the result; signs of life are for callers who can't see that this process lives."""
        if isinstance(answer, Result) and not self.result.done():
            self.result.set_result(answer)


class Entrance:
    """Takes requests while it is open. One per agent, which opens it while it runs."""

    def __init__(self, host: Host, bus: Bus, config: AgentConfig) -> None:
        self._host = host
        self._bus = bus
        self._config = config
        self._is_open = False
        # As many as can wait for one mutation (journal.MAX_REPLIES) and for queries (beside.MAX_SIDE_TASKS).
        self._waiting: set[asyncio.Future[Result]] = set()

    def open(self) -> None:
        """Requests are taken from now on."""
        self._is_open = True

    def close(self) -> None:
        """No new ones; those that wait get their results, as long as the agent still makes them."""
        self._is_open = False

    def abandon(self) -> None:
        """The agent has ended: nobody answers any more. Idempotent."""
        self.close()
        for result in self._waiting:
            if not result.done():
                result.set_exception(ClosedError("the worker's agent"))

    async def submit(
        self, body: CommandBody, *, caller: str, lease_s: float | None = None, op_id: str | None = None, limit_s: float
    ) -> Result:
        """Have a command carried out, and return its one result, as a sender on the bus would get it.

        Args:
            caller: who asks; owner of a pause that this makes, and of a lease that it renews.
            lease_s: how long such a pause holds without renewal, in seconds; None is an explicit hold. Of no meaning
                for other commands.
            op_id: the same again joins the first; None makes a new one.
            limit_s: how long the op may take. After it, it is ended like any op whose deadline has passed. Waiting for
                a trainer's group ends after MAX_JOIN_S already.

        Raises:
            ClosedError: the agent doesn't run (any more); what has become of an op that ran is in the ledger.
            DeadlineError: there is no result even after everything that may follow a deadline; ask for its outcome.
        Cancel: the op goes on (see above); only its result isn't waited for.
        """
        if not self._is_open:
            raise ClosedError("the worker's agent")
        if isinstance(body, InitTransfer):
            limit_s = min(limit_s, MAX_JOIN_S)
        used = self._bus.new_id() if op_id is None else op_id
        command = Command(
            op_id=used,
            term=self._host.state.term,
            expires_at=self._bus.clock.now() + limit_s,
            body=_owned(body, caller, lease_s),
            members=(self._host.descriptor.instance_id,),
        )
        if problem := self._problem(command, caller, limit_s):
            return self._refusal(command, problem)
        waiting = Waiting(used, asyncio.get_running_loop().create_future())
        self._waiting.add(waiting.result)
        reply = self._host.answers.listen(waiting.on_answer)
        config = self._config
        patience_s = limit_s + config.release_s + config.cancel_s + len(Cleanup) * config.undo_s + SPARE_S
        try:
            self._host.take(command, reply, route_of(body))
            async with asyncio.timeout(patience_s):
                return await waiting.result
        except TimeoutError:
            raise DeadlineError(f"{route_of(body)} {used}", patience_s, "its outcome is not known") from None
        finally:
            self._host.answers.unlisten(reply)
            self._waiting.discard(waiting.result)

    def _problem(self, command: Command, caller: str, limit_s: float) -> Fault | None:
        """Why this can't be taken: what the decoder of the bus says, and the bounds of this entrance."""
        if caller.endswith(PAUSE_SUFFIX):
            text = f"a caller can't be called {caller!r}: names that end with {PAUSE_SUFFIX} are for ops of rlbus"
            return fault(FaultCode.BAD_MESSAGE, text, caller=caller)
        if not 0 < limit_s <= MAX_LIMIT_S:
            text = f"a limit of {limit_s:g} s; use more than 0 and at most {MAX_LIMIT_S:g}"
            return fault(FaultCode.BAD_MESSAGE, text, limit_s=limit_s)
        try:
            data = encode(command, MAX_REQUEST_BYTES)
            decode(data, Command, "a local caller's request", MAX_REQUEST_BYTES)
        except PayloadTooLargeError as exc:
            return fault(FaultCode.TOO_LARGE, str(exc), size_bytes=exc.size_bytes, limit_bytes=exc.limit_bytes)
        except DecodeError as exc:
            return fault(FaultCode.BAD_MESSAGE, exc.problem)
        return None

    def _refusal(self, command: Command, why: Fault) -> Result:
        """Counted and logged like any refusal; without the op_id, which may be none that others can read."""
        answers = self._host.answers
        answers.refuse(None, (), why, route_of(command.body), self._bus.clock.now())
        return answers.build(command.op_id, ResultStatus.REFUSED, fault=why)


def _owned(body: CommandBody, caller: str, lease_s: float | None) -> CommandBody:
    """The same for `caller`: whatever it holds, it holds in its own name and for so long."""
    match body:
        case PauseGeneration() | RenewLease():
            return msgspec.structs.replace(body, owner=caller, lease_s=lease_s)
    return body
