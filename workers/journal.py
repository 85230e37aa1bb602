"""What became of each op on this worker: the running ones, and the last results.

Invariants: a running record is never dropped; an op that was refused has no record, since it changed nothing and may be
tried again under the same op_id (copies of it are known to `refusals`). With a ledger, outcomes outlive the process:
what had ended is answered as it was recorded, what was running is over and was not run again.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from rlbus.schemas import Command, CommandBody, Result, route_of
from rlbus.workers.ledger import BESIDE_ROUTES, Began, Ledger, Over, interrupted

# Ended mutations that are remembered, and as many ops that ran beside them. An update takes about ten ops of a worker,
# so this is the history of some 50 updates, while a controller asks for an outcome within seconds.
MAX_ENDED = 512
# Different reply addresses that one op answers. One sender uses one address per attempt.
MAX_REPLIES = 16


@dataclass(slots=True)
class Record:
    """One op: what it is, who waits for it, how far it is, and its result once it has ended."""

    op_id: str
    route: str
    # Tells a repeat from another command under the same op_id; the body itself (a page of a manifest) isn't kept.
    digest: str
    replies: list[str] = field(default_factory=list)
    # Loop time when it began, in seconds.
    began_s: float = 0.0
    is_accepted: bool = False
    phase: str = ""
    # Written by any thread, read by the ticker: progress in `unit`s.
    done: int = 0
    total: int | None = None
    unit: str = "bytes"
    # None while it runs.
    result: Result | None = None
    # Known to the ledger.
    is_kept: bool = False

    def add_reply(self, reply: str | None) -> bool:
        """Answer there, too. False if no more addresses fit."""
        if reply is None or reply in self.replies:
            return True
        if len(self.replies) >= MAX_REPLIES:
            return False
        self.replies.append(reply)
        return True


def digest_of(body: CommandBody) -> str:
    """Of a command's body; the same in every process."""
    return hashlib.blake2b(msgspec.msgpack.encode(body), digest_size=8).hexdigest()


class Journal:
    """Outcomes by op_id, at most `max_ended` of mutations and `max_ended` of what runs beside them, the oldest dropped
    first; running ones on top.
    """

    def __init__(self, max_ended: int = MAX_ENDED) -> None:
        self._max_ended = max_ended
        self._running: dict[str, Record] = {}
        self._ended: OrderedDict[str, Record] = OrderedDict()
        # Those of BESIDE_ROUTES.
        self._beside: OrderedDict[str, Record] = OrderedDict()
        self._ledger: Ledger | None = None

    def keep_in(self, ledger: Ledger, component: str, instance_id: str, boot_id: str) -> None:
        """Take over what the process before has left, and write there from now on. Called once, at the start."""
        self._ledger = ledger
        lost = [interrupted(began, boot_id) for began in ledger.past.running.values()]
        for over in (*ledger.past.over.values(), *ledger.past.beside.values(), *lost):
            record = Record(over.op_id, over.route, over.digest, is_accepted=True, is_kept=over in lost)
            self.end(record, _result(over, component, instance_id))

    def give_up(self, component: str, instance_id: str, boot_id: str) -> None:
        """Whatever still runs is over: its agent has ended, and nobody will say how it went."""
        for record in self.running:
            began = Began(record.op_id, record.route, record.digest)
            self.end(record, _result(interrupted(began, boot_id), component, instance_id))

    def begin(self, command: Command, reply: str | None, now_s: float, *, is_kept: bool = True) -> Record:
        """Open the record of an op that is about to run. `is_kept` False: nobody needs it after a restart."""
        record = Record(command.op_id, route_of(command.body), digest_of(command.body), began_s=now_s)
        record.add_reply(reply)
        self._running[command.op_id] = record
        if is_kept and self._ledger is not None:
            record.is_kept = True
            self._ledger.began(record.op_id, record.route, record.digest)
        return record

    def end(self, record: Record, result: Result) -> None:
        """Close a record with its one result, and drop the oldest ended one of its kind if there are too many."""
        record.result = result
        self._running.pop(record.op_id, None)
        ended = self._beside if record.route in BESIDE_ROUTES else self._ended
        ended[record.op_id] = record
        if record.is_kept and self._ledger is not None:
            self._ledger.over(result, record.route, record.digest)
        while len(ended) > self._max_ended:
            ended.popitem(last=False)

    def forget(self, record: Record) -> None:
        """Drop the record of an op that was refused after all: nothing has changed, a repeat is tried anew."""
        self._running.pop(record.op_id, None)
        if record.is_kept and self._ledger is not None:
            self._ledger.forgot(record.op_id)

    def find(self, op_id: str) -> Record | None:
        """The record of an op, running or ended."""
        return self._running.get(op_id) or self._ended.get(op_id) or self._beside.get(op_id)

    @property
    def running(self) -> tuple[Record, ...]:
        """The records that have no result yet, in the order in which they began."""
        return tuple(self._running.values())


def _result(over: Over, component: str, instance_id: str) -> Result:
    """What is answered of an op of an earlier process: by the boot that knew it, and without its data."""
    return Result(
        op_id=over.op_id,
        component=component,
        instance_id=instance_id,
        boot_id=over.boot_id,
        status=over.status,
        fault=over.fault,
    )
