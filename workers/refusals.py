"""Mutations that were refused. A second copy of one (the bus delivers it twice, whoever asked asks again) is refused as
the first was, also when it could be done by then: somebody was told that nothing happened, and goes on from there.
"""

from collections import OrderedDict

from rlbus.schemas import Command, Fault, FaultCode

# As many as a worker's journal remembers of ops that ended.
MAX_KEPT = 512
# What is wrong with the message, and not with the op: another message under the same op_id may be right. Those that are
# out of date stay so by themselves.
_OF_MESSAGE = frozenset({FaultCode.BAD_MESSAGE, FaultCode.NOT_A_MEMBER, FaultCode.STALE_TERM, FaultCode.EXPIRED})


class Refusals:
    """The last refusals of one worker, at most `max_kept`. Retryable ones (busy) aren't kept: they ask for a repeat."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._kept: OrderedDict[tuple[str, int], Fault] = OrderedDict()

    def note(self, op_id: str, body_hash: int, why: Fault) -> None:
        """This command was refused."""
        if why.retryable or why.code in _OF_MESSAGE:
            return
        self._kept[op_id, body_hash] = why
        if len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)

    def find(self, command: Command) -> Fault | None:
        """Why this very command was refused before; None: it wasn't."""
        return self._kept.get((command.op_id, hash(command.body)))
