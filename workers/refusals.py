"""Mutations that were refused. A second copy of one (the bus delivers it twice, a fan-out sends it again to who is
silent) is refused as the first was, also when it could be done by then: somebody was told that nothing happened, and
goes on from there.

A refusal that asks for a repeat (busy, a manifest that is missing) holds for copies of that command alone, which are
told by their expiry: a caller who had the answer, and asks again under the same op_id, sends a command of a new date.
"""

from collections import OrderedDict

from rlbus.schemas import AbortRequest, Command, Fault, FaultCode

# Of mutations, and of aborts of requests: as many of each as a worker's journal remembers of ops that ended.
MAX_KEPT = 512
# Op_id, hash of the body, and when the command expires: None if the refusal holds for a repeat of any date.
_Key = tuple[str, int, float | None]
# What is wrong with the message, and not with the op: another message under the same op_id may be right. Those that are
# out of date stay so by themselves.
_OF_MESSAGE = frozenset({FaultCode.BAD_MESSAGE, FaultCode.NOT_A_MEMBER, FaultCode.STALE_TERM, FaultCode.EXPIRED})


class Refusals:
    """The last refusals of one worker, at most `max_kept` of mutations and `max_kept` of aborts of requests."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._kept: OrderedDict[_Key, Fault] = OrderedDict()
        # Of aborts, of which there may be one for each request: none of them pushes out a mutation's.
        self._of_aborts: OrderedDict[_Key, Fault] = OrderedDict()

    def note(self, command: Command, why: Fault) -> None:
        """This command was refused."""
        if why.code in _OF_MESSAGE:
            return
        kept = self._kept_of(command)
        kept[command.op_id, hash(command.body), command.expires_at if why.retryable else None] = why
        if len(kept) > self._max_kept:
            kept.popitem(last=False)

    def find(self, command: Command) -> Fault | None:
        """Why this very command was refused before; None: it wasn't."""
        what, kept = (command.op_id, hash(command.body)), self._kept_of(command)
        return kept.get((*what, None)) or kept.get((*what, command.expires_at))

    def _kept_of(self, command: Command) -> OrderedDict[_Key, Fault]:
        return self._of_aborts if isinstance(command.body, AbortRequest) else self._kept
