"""Mutations that were refused. A second copy of one (the bus delivers it twice, a fan-out sends it again to who is
silent) is refused as the first was, also when it could be done by then: somebody was told that nothing happened, and
goes on from there.

A refusal that asks for a repeat (busy, a manifest that is missing) holds for copies of that command alone, which are
told by their expiry: a caller who had the answer, and asks again under the same op_id, sends a command of a new date.
"""

from collections import OrderedDict

from rlbus.schemas import Command, Fault, FaultCode

# As many as a worker's journal remembers of ops that ended.
MAX_KEPT = 512
# What is wrong with the message, and not with the op: another message under the same op_id may be right. Those that are
# out of date stay so by themselves.
_OF_MESSAGE = frozenset({FaultCode.BAD_MESSAGE, FaultCode.NOT_A_MEMBER, FaultCode.STALE_TERM, FaultCode.EXPIRED})


class Refusals:
    """The last refusals of one worker, at most `max_kept`."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._max_kept = max_kept
        # The last part of a key: when the command expires, None if the refusal holds for a repeat of any date.
        self._kept: OrderedDict[tuple[str, int, float | None], Fault] = OrderedDict()

    def note(self, command: Command, why: Fault) -> None:
        """This command was refused."""
        if why.code in _OF_MESSAGE:
            return
        self._kept[command.op_id, hash(command.body), command.expires_at if why.retryable else None] = why
        if len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)

    def find(self, command: Command) -> Fault | None:
        """Why this very command was refused before; None: it wasn't."""
        what = command.op_id, hash(command.body)
        return self._kept.get((*what, None)) or self._kept.get((*what, command.expires_at))
