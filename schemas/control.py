"""What trainers and people ask of the controller, and what it answers.

A request goes to `dyn.<ns>.controller.<op>` with a reply subject. The controller answers a short request with one
`Report` (or a `Refusal`), a long one with `OpAccepted`, any number of `OpProgress`, and one `OpResult`. An update has a
second party: the trainer, which the controller tells what to do through `SenderTask`s on the same reply subject, and
which answers through `SenderSignal`s on `dyn.<ns>.controller.sender`.
"""

import enum

from rlbus.schemas.acks import ResultData
from rlbus.schemas.base import Wire
from rlbus.schemas.faults import Fault
from rlbus.schemas.groups import GroupPlan, Rendezvous
from rlbus.schemas.ids import OpId, Token, WorkerId
from rlbus.schemas.lora_ops import FleetLora, ListLoras, LoadLoraFleet, LoraBehind, LoraResult, UnloadLoraFleet
from rlbus.schemas.membership import Descriptor, WorkerStatus
from rlbus.schemas.pausing import PauseMode
from rlbus.schemas.requests import Request, Target
from rlbus.schemas.sleeping import SleepTag
from rlbus.schemas.snapshots import SnapshotOffer
from rlbus.schemas.weights import ManifestPage, TensorSum, Version


class PauseFleet(Request, frozen=True, kw_only=True, tag="pause"):
    """Pause; if one worker fails, the others that acked are resumed again.

    `lease_s` is how long the pause holds, from the end of the op on; another pause by the same caller renews it. None:
    an explicit hold, until somebody resumes.
    """

    target: Target = Target()
    mode: PauseMode = PauseMode.KEEP
    clear_cache: bool = True
    lease_s: float | None = None


class ResumeFleet(Request, frozen=True, kw_only=True, tag="resume"):
    """Resume. Dirty workers refuse unless forced."""

    target: Target = Target()
    force: bool = False


class FlushFleet(Request, frozen=True, kw_only=True, tag="flush"):
    """Empty all caches."""

    target: Target = Target()


class AbortFleet(Request, frozen=True, kw_only=True, tag="abort"):
    """End requests in flight: those named, or all."""

    target: Target = Target()
    request_ids: tuple[str, ...] | None = None


class SleepFleet(Request, frozen=True, kw_only=True, tag="sleep"):
    """Give back the memory of `tags` (None: all); if one worker fails, those that did are woken again.

    Fields as in the command `Sleep`. With `level` 2 nothing can be woken to what it was: it isn't undone.
    """

    target: Target = Target()
    tags: tuple[SleepTag, ...] | None = None
    level: int = 1
    mode: PauseMode = PauseMode.ABORT


class WakeFleet(Request, frozen=True, kw_only=True, tag="wake"):
    """Take back the memory of `tags` (None: all that sleep). Ends no pause."""

    target: Target = Target()
    tags: tuple[SleepTag, ...] | None = None


class GetVersions(Request, frozen=True, kw_only=True, tag="versions"):
    """Ask each worker for state and version of its weights."""

    target: Target = Target()


class GetFleet(Request, frozen=True, kw_only=True, tag="status"):
    """Ask for the controller's view of the fleet. Answered with `FleetView`: one page of it, from after `after` on.

    `limit` is how many workers a page may have at most; it has fewer where they wouldn't fit into a message. None: all
    of them in one message, or a refusal (`too_large`), as who knows no pages expects.
    """

    limit: int | None = None
    after: WorkerId | None = None


class WaitReady(Request, frozen=True, kw_only=True, tag="wait_ready"):
    """Wait until the live workers' world sizes sum up to `world_size` (and/or there are `num_workers`).

    Answered with `FleetView`, or refused with `deadline` and a message that says who or how many are missing. `limit`
    is that of the first page, as in `GetFleet`, which asks for the others.
    """

    world_size: int | None = None
    num_workers: int | None = None
    target: Target = Target()
    limit: int | None = None


class PutManifestPage(Request, frozen=True, kw_only=True, tag="put_manifest"):
    """Give the controller one page of a manifest; it passes pages on to workers that lack them."""

    page: ManifestPage


class OnFailure(enum.StrEnum):
    """What an update does when a worker fails in it."""

    RETRY = "retry"  # abort everybody, and try again on those who are left, a bounded number of times
    STOP = "stop"  # commit on those that are complete and checked, report the rest


class UpdateWeights(Request, frozen=True, kw_only=True, tag="update_weights"):
    """Give the fleet new weights from the trainer's memory, over a process group.

    `num_trainer_ranks` ranks of the trainer come first in the group; rank 0 sends. `sender_id` names the trainer
    process: a group is reused only with the same one. `require` is the number of workers that have to end at the new
    version for the op to count as ok (None: all of the target). Every page of `manifest_digest` was put before.
    `snapshot` is what the trainer will keep of it. `is_catch_up`: `version` is the fleet's own, given again to the
    workers of `target` that don't have it; any other mutation takes its place. `is_draft`: they are the weights of the
    draft model, and `version` is the draft's own.
    """

    version: Version
    manifest_digest: str
    backend: str
    rendezvous: Rendezvous
    sender_id: Token
    num_trainer_ranks: int = 1
    bucket_bytes: int
    target: Target = Target()
    require: int | None = None
    on_failure: OnFailure = OnFailure.STOP
    pause_mode: PauseMode = PauseMode.KEEP
    reset_prefix_cache: bool = True
    allow_rollback: bool = False
    stall_s: float = 30.0
    snapshot: SnapshotOffer = SnapshotOffer()
    is_catch_up: bool = False
    is_draft: bool = False


class ReloadFleet(Request, frozen=True, kw_only=True, tag="reload"):
    """Give the fleet new weights from a safetensors folder that every worker can read.

    `is_catch_up` as in `UpdateWeights`. `sums_digest`: the folder has to have exactly these checksums (None: any).
    """

    path: str
    version: Version | None = None  # None: the fleet's next step
    target: Target = Target()
    pause_mode: PauseMode = PauseMode.KEEP
    allow_rollback: bool = False
    is_catch_up: bool = False
    sums_digest: str | None = None


class CancelOp(Request, frozen=True, kw_only=True, tag="cancel"):
    """Take an op back. It ends like any other failure: undone, or dirty and reported."""

    of_op_id: OpId


class SenderStep(enum.StrEnum):
    """What a trainer tells the controller during an update."""

    JOINED = "joined"  # in the group, proven by its collective
    SENT = "sent"  # everything sent; `sums` and `num_bytes` say what
    FAILED = "failed"  # gave up; `fault` says why
    ALIVE = "alive"  # it lives: at least every second, from the first reply to the end. `num_bytes` so far.


# The epoch of no group: they count from 1.
NO_EPOCH = 0


class SenderSignal(Request, frozen=True, kw_only=True, tag="sender"):
    """A step of the trainer in the update `of_op_id`. Answered with `OpAccepted`, or refused if nobody waits for it.

    `alive` is about the group that it joins or sends in, and proves that it heard that task; about `NO_EPOCH` while it
    has none. One that never says the latter is older, and its silence between two tasks means nothing. Who waits for a
    step of another trainer's update (`TransferFleet`) says that, too, every 2 s, and doesn't wait for the answer.
    """

    of_op_id: OpId
    epoch: int
    step: SenderStep
    num_bytes: int = 0
    sums: tuple[TensorSum, ...] = ()
    fault: Fault | None = None


class TransferStep(enum.StrEnum):
    """The steps of an update that somebody else's trainer drives, as `rlbus.schemas.native` has them."""

    INIT = "init"
    START = "start"
    UPDATE = "update"
    FINISH = "finish"
    SHUTDOWN = "shutdown"


# Those that nobody can go on from without their trainer. The others go forward: all was sent by then, or given up.
NEEDS_CALLER = frozenset({TransferStep.INIT, TransferStep.START, TransferStep.UPDATE})


class TransferFleet(Request, frozen=True, kw_only=True, tag="transfer"):
    """One step of an update in the words of vLLM's weight transfer, on every worker.

    `info` (init, update) is JSON as one server would be given it: a `rank_offset` in it becomes each worker's own, and
    a list is split by ranks. `start` pauses with `pause_mode` and a lease, `finish` resumes. `version` is what `finish`
    makes of it; None: the fleet's next step.
    """

    step: TransferStep
    info: str | None = None
    version: Version | None = None
    target: Target = Target()
    pause_mode: PauseMode = PauseMode.KEEP


class GetHistory(Request, frozen=True, kw_only=True, tag="history"):
    """Ask for the newest `limit` ops of the journal, or for one and its report. Answered with `HistoryView`.

    Refused with `unknown_op` when the journal doesn't have that one (any more).
    """

    limit: int = 20
    of_op_id: OpId | None = None


ControlRequest = (
    PauseFleet
    | ResumeFleet
    | FlushFleet
    | AbortFleet
    | SleepFleet
    | WakeFleet
    | GetVersions
    | GetFleet
    | WaitReady
    | PutManifestPage
    | UpdateWeights
    | ReloadFleet
    | CancelOp
    | SenderSignal
    | TransferFleet
    | GetHistory
    | LoadLoraFleet
    | UnloadLoraFleet
    | ListLoras
)


class Outcome(enum.StrEnum):
    """How an op ended on one worker."""

    OK = "ok"
    REFUSED = "refused"  # nothing changed
    FAILED = "failed"  # tried and failed
    UNDONE = "undone"  # done, and taken back because others failed
    UNKNOWN = "unknown"  # silence; nobody could say
    SKIPPED = "skipped"  # the op ended before this worker was asked


class WorkerOutcome(Wire, frozen=True, kw_only=True):
    """The outcome on one worker: what it was, why, and where the worker stands afterwards as far as known.

    `phase` is the step of the op in which it was decided.
    """

    worker: WorkerId
    outcome: Outcome
    phase: str
    fault: Fault | None = None
    data: ResultData | None = None
    took_s: float = 0.0


class OpStatus(enum.StrEnum):
    """How an op ended as a whole."""

    OK = "ok"  # every worker ok (or as many as `require` asked for)
    PARTIAL = "partial"  # some ok, some not
    FAILED = "failed"  # none ok
    REFUSED = "refused"  # not begun


class Report(Wire, frozen=True, kw_only=True):
    """How an op ended: one outcome per worker, the seconds of each phase in order, and the first cause.

    `num_attempts` and `epochs` (of the groups used, in order; `epoch` is the last) tell of tries that lost somebody.
    `paused_s` is how long engines stood still (first pause sent to last resume acked): what a user pays for an update.
    `lora` is what an op about adapters was about.
    """

    op_id: OpId
    op: str
    status: OpStatus
    outcomes: tuple[WorkerOutcome, ...]
    phases_s: dict[str, float]
    took_s: float
    fault: Fault | None = None
    version: Version | None = None
    epoch: int | None = None
    num_bytes: int = 0
    paused_s: float = 0.0
    num_attempts: int = 1
    epochs: tuple[int, ...] = ()
    lora: LoraResult | None = None


class Liveness(enum.StrEnum):
    """What heartbeats say of a worker."""

    ALIVE = "alive"
    SUSPECT = "suspect"  # silent for 2.5 intervals
    DEAD = "dead"  # silent for 4 intervals
    LEFT = "left"  # said goodbye


class MemberView(Wire, frozen=True, kw_only=True):
    """One worker as the controller sees it. `admitted` is derived; `reason` says why it isn't.

    `loras_behind` are adapters that the fleet has and this worker lacks, each with what is done about it. `loras_extra`
    ("policy@7") are those that it serves from bytes that an op has given, and that the fleet doesn't have there.
    """

    worker: WorkerId
    liveness: Liveness
    admitted: bool
    descriptor: Descriptor
    status: WorkerStatus
    boot_id: str
    age_s: float
    reason: str | None = None
    loras_behind: tuple[LoraBehind, ...] = ()
    loras_extra: tuple[str, ...] = ()


class FleetView(Wire, frozen=True, kw_only=True, tag_field="kind", tag="fleet"):
    """The controller's view of a namespace, or a page of it. `loras` are the adapters that the fleet has.

    `next` is the last worker of a page that isn't the last one: ask for what comes after it. `loras` are on the first.
    """

    namespace: Token
    term: int
    version: Version | None
    epoch: int | None
    op_id: OpId | None
    members: tuple[MemberView, ...]
    loras: tuple[FleetLora, ...] = ()
    next: WorkerId | None = None


class HistoryItem(Wire, frozen=True, kw_only=True):
    """One op of the journal. Dates in Unix seconds; `ended_at` and `status` are None while it runs.

    `term` is the leader that began it; `settled_by` the one that finished it or took it back after that leader was gone
    (None: nobody had to). `num_ok` of `num_workers` ended ok. `phase` is the last one that was written down. `what` is
    what it was about, of an op about adapters: "policy@7"; "forced" of a resume that didn't ask for clean weights.
    """

    op_id: OpId
    op: str
    caller: str
    term: int
    began_at: float
    phase: str
    num_workers: int
    ended_at: float | None = None
    status: OpStatus | None = None
    num_ok: int = 0
    version: Version | None = None
    epoch: int | None = None
    fault: Fault | None = None
    settled_by: int | None = None
    what: str | None = None


class HistoryView(Wire, frozen=True, kw_only=True, tag_field="kind", tag="history"):
    """The newest ops of a namespace, newest first; or one, with the `report` that its caller got (None: it runs)."""

    namespace: Token
    term: int
    items: tuple[HistoryItem, ...]
    report: Report | None = None


class OpAccepted(Wire, frozen=True, kw_only=True, tag_field="kind", tag="accepted"):
    """The request was validated and runs now."""

    op_id: OpId


class OpProgress(Wire, frozen=True, kw_only=True, tag_field="kind", tag="progress"):
    """Where an op stands; at least every second."""

    op_id: OpId
    phase: str
    done: int = 0
    total: int | None = None
    unit: str = "workers"


class JoinTask(Wire, frozen=True, kw_only=True, tag_field="kind", tag="join"):
    """To the trainer: join this group now, then signal `joined`. May be repeated; idempotent by epoch."""

    op_id: OpId
    plan: GroupPlan


class SendTask(Wire, frozen=True, kw_only=True, tag_field="kind", tag="send"):
    """To the trainer: every receiver stands ready, send now, then signal `sent`."""

    op_id: OpId
    epoch: int
    version: Version


class LeaveTask(Wire, frozen=True, kw_only=True, tag_field="kind", tag="leave"):
    """To the trainer: the group of `epoch` is broken or over; destroy it, abandoning a collective if need be."""

    op_id: OpId
    epoch: int
    reason: str


class OpResult(Wire, frozen=True, kw_only=True, tag_field="kind", tag="result"):
    """The end of an op."""

    report: Report


class Refusal(Wire, frozen=True, kw_only=True, tag_field="kind", tag="refusal"):
    """The request was not begun. Nothing changed."""

    op_id: OpId | None
    fault: Fault


ControlReply = OpAccepted | OpProgress | JoinTask | SendTask | LeaveTask | OpResult | Refusal | FleetView | HistoryView
