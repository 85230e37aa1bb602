"""The closed set of fault codes, and the record that carries one over the wire."""

import enum

import msgspec

from rlbus.schemas.base import Wire


class FaultCode(enum.StrEnum):
    """Why something was refused or failed. `rlbus.errors` maps each code to one exception class."""

    # Refused: nothing changed on whoever says so.
    BAD_MESSAGE = "bad_message"  # doesn't parse, or its parts contradict each other
    TOO_LARGE = "too_large"  # over a named size limit
    NO_ROUTE = "no_route"  # this engine doesn't serve the route
    NOT_A_MEMBER = "not_a_member"  # addressed to others, or not in the group
    EXPIRED = "expired"  # expires_at had passed when it arrived
    STALE_TERM = "stale_term"  # a newer controller has spoken
    STALE_EPOCH = "stale_epoch"  # another process group than the current one
    BUSY = "busy"  # another mutation runs; detail["op_id"] names it, detail["own"] says that it is the worker's own
    WRONG_STATE = "wrong_state"  # e.g. an update of a worker that isn't paused
    ASLEEP = "asleep"  # memory that it needs sleeps; detail["tags"] names what to wake
    DIRTY = "dirty"  # weights are torn; only a full update or a reload helps
    VERSION_REGRESSION = "version_regression"  # not newer than what is served, and no rollback asked for
    MANIFEST_UNKNOWN = "manifest_unknown"  # the digest names a manifest that hasn't been sent yet
    MANIFEST_MISMATCH = "manifest_mismatch"  # detail["tensor"] names the first tensor that doesn't fit
    NO_WORKER = "no_worker"  # the request addresses nobody
    UNKNOWN_OP = "unknown_op"  # no record of that op_id
    NO_CAPACITY = "no_capacity"  # every place for an adapter is taken; detail["capacity"] is how many there are
    REVISION_TAKEN = "revision_taken"  # this name@revision stands for other bytes; use a new revision
    # Failed: tried, and something may have changed.
    ENGINE_FAILED = "engine_failed"  # the engine raised
    ENGINE_DEAD = "engine_dead"  # the engine is gone and has to be restarted
    TRANSFER_FAILED = "transfer_failed"  # the process group broke, or bytes didn't come
    GROUP_FAILED = "group_failed"  # the process group could not be formed
    CHECKSUM_MISMATCH = "checksum_mismatch"  # detail["tensor"] names the first tensor that differs
    FLUSH_FAILED = "flush_failed"  # a cache could not be emptied
    SENDER_FAILED = "sender_failed"  # the trainer gave up, or went away
    NO_ACK = "no_ack"  # silence within the ack limit
    STALLED = "stalled"  # no progress within the stall limit
    DEADLINE = "deadline"  # not finished within the deadline
    NOT_RECORDED = "not_recorded"  # the controller could not write it into its journal, and so didn't begin
    CONTROLLER_LOST = "controller_lost"  # the controller died in it; its successor settled what it found
    WORKER_LOST = "worker_lost"  # the worker died or said goodbye meanwhile
    CANCELLED = "cancelled"  # whoever asked took it back
    INTERNAL = "internal"  # a bug of ours; the log of the one who says it has the traceback


class Fault(Wire, frozen=True, kw_only=True):
    """What went wrong, as data. Never a repr or a traceback.

    `message` says what failed and what to do; `detail` has the values (op_id, tensor, limit_s, ...) as text.
    `retryable` means: the same request may succeed later without anybody changing anything else.
    """

    code: FaultCode
    message: str
    retryable: bool = False
    detail: dict[str, str] = msgspec.field(default_factory=dict)
