"""Answers of a worker to a command: a sign of life, progress, and exactly one result.

A worker answers on `<reply>.<instance_id>`. `boot_id` tells a restarted worker's answer from its predecessor's.
"""

import enum

import msgspec

from rlbus.schemas.base import Data, Wire
from rlbus.schemas.faults import Fault
from rlbus.schemas.ids import BootId, InstanceId, OpId, Token
from rlbus.schemas.loras import LorasData
from rlbus.schemas.membership import Descriptor, WorkerStatus
from rlbus.schemas.sleeping import SleepTag
from rlbus.schemas.weights import TensorSum, WeightsView


class PausedData(Data, frozen=True, kw_only=True, tag="paused"):
    """After a pause: how many requests were ended, and how many are held until resume (None: engine can't count)."""

    num_aborted: int | None = None
    num_held: int | None = None


class AbortedData(Data, frozen=True, kw_only=True, tag="aborted"):
    """After an abort: how many requests were ended at once (None from an engine that doesn't count them), and how many
    will be at their first token.

    `num_aborted` is None from an engine that doesn't count. `num_left` is how many of those that were meant are in
    flight still, after an abort of all has waited for them with the entrance closed (None: the engine doesn't count).
    """

    num_aborted: int | None = None
    num_deferred: int = 0
    num_left: int | None = None


class JoinedData(Data, frozen=True, kw_only=True, tag="joined"):
    """After joining a group: the ranks as each process of the worker counts them, and the size that they see."""

    epoch: int
    ranks: tuple[int, ...]
    world_size: int


class ReceivedData(Data, frozen=True, kw_only=True, tag="received"):
    """After a transfer: what arrived, by the receiver's own count. `sums` is in manifest order.

    With several ranks in a worker, every rank received the same bytes; `sums` are those of the first, and ranks that
    disagree among themselves are a failure of the worker, never hidden here.
    """

    num_bytes: int
    num_tensors: int
    sums: tuple[TensorSum, ...]
    receive_s: float
    load_s: float


class WeightsData(Data, frozen=True, kw_only=True, tag="weights"):
    """State and version of the weights, after a commit, a reload, or when asked.

    `draft` is that of the draft model's, from a worker that has one.
    """

    weights: WeightsView
    draft: WeightsView | None = None


class ChecksumsData(Data, frozen=True, kw_only=True, tag="checksums"):
    """Checksums of what the engine holds, by the engine's own parameter names (its own algorithm, named)."""

    algorithm: str
    sums: tuple[TensorSum, ...]


class SleepData(Data, frozen=True, kw_only=True, tag="sleep"):
    """After a sleep or a wake: what sleeps now, sorted. `num_bytes` is what was freed or taken (None: can't tell).

    `num_aborted` is how many requests a sleep ended (None: the engine can't count).
    """

    asleep: tuple[SleepTag, ...]
    num_bytes: int | None = None
    num_aborted: int | None = None


class StatusData(Data, frozen=True, kw_only=True, tag="status"):
    """Descriptor and status, read now."""

    descriptor: Descriptor
    status: WorkerStatus


class OutcomeData(Data, frozen=True, kw_only=True, tag="outcome"):
    """What became of an op: still running, or its recorded result."""

    of_op_id: OpId
    running: bool
    status: "ResultStatus | None" = None
    fault: Fault | None = None


ResultData = (
    PausedData
    | AbortedData
    | JoinedData
    | ReceivedData
    | WeightsData
    | ChecksumsData
    | SleepData
    | StatusData
    | OutcomeData
    | LorasData
)


class ResultStatus(enum.StrEnum):
    """How a command ended on a worker."""

    OK = "ok"
    REFUSED = "refused"  # nothing changed
    FAILED = "failed"  # tried; the worker's status says what it left


class Answer(Wire, frozen=True, kw_only=True, tag_field="kind"):
    """Base of the three answers."""

    op_id: OpId
    component: Token
    instance_id: InstanceId
    boot_id: BootId


class Accepted(Answer, frozen=True, kw_only=True, tag="accepted"):
    """The command was validated and runs now. For `update_weights_from_distributed`: the receiver stands ready."""


# The phase of a transfer whose receiver stands.
RECEIVING = "receiving"


class Progress(Answer, frozen=True, kw_only=True, tag="progress"):
    """Sent at least every second while a command runs. `done` grows only with real progress; `unit` is its unit.

    It also says that the command was accepted, in case that was lost; for `update_weights_from_distributed` only in
    phase RECEIVING.
    """

    phase: str
    done: int = 0
    total: int | None = None
    unit: str = "bytes"


class Result(Answer, frozen=True, kw_only=True, tag="result"):
    """The one result of a command on one worker. A repeat of the op_id gets the same result again.

    `seq` is that of the worker's last announcement before it: those up to it are older, whenever they arrive.
    """

    status: ResultStatus
    fault: Fault | None = None
    data: ResultData | None = None
    took_s: float = msgspec.field(default=0.0)
    seq: int = 0


WorkerAnswer = Accepted | Progress | Result
