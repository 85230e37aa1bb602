"""Commands from the controller to workers, one Struct per route, and the envelope around them.

Published on `dyn.<ns>.<component>.rl.<route>` (to every worker of a component) or `...rl.<route>.<id>` (to one). The
`route` tag of the body equals the route token of the subject. Names of routes that Dynamo also has are Dynamo's.
"""

from rlbus.schemas.base import Body, Wire
from rlbus.schemas.groups import GroupPlan
from rlbus.schemas.ids import InstanceId, OpId
from rlbus.schemas.loras import GetLoras, LoadLora, UnloadLora
from rlbus.schemas.native import ApplyUpdate, FinishUpdate, InitTransfer, ShutdownTransfer, StartUpdate
from rlbus.schemas.pausing import PauseMode
from rlbus.schemas.sleeping import Sleep, WakeUp
from rlbus.schemas.weights import ManifestPage, Version


class Hello(Body, frozen=True, kw_only=True, tag="hello"):
    """Ask everybody to announce themselves now (a controller that is new or was disconnected)."""


class GetStatus(Body, frozen=True, kw_only=True, tag="get_status"):
    """Ask for descriptor and status, read from the engine now. Answered with `StatusData`."""


class GetOutcome(Body, frozen=True, kw_only=True, tag="get_outcome"):
    """Ask what became of an op. Answered with that op's recorded result, its progress, or `unknown_op`."""

    of_op_id: OpId


class PauseGeneration(Body, frozen=True, kw_only=True, tag="pause_generation"):
    """Stop generating. Done only when no step runs any more. `owner` is shown in status; None means the op itself.

    `lease_s` is how long it holds without a `RenewLease`, from when it is done; then the worker resumes by itself if
    its weights are clean. None: an explicit hold, which only a resume ends. A pause with a lease over an explicit hold
    leaves it one.
    """

    mode: PauseMode = PauseMode.KEEP
    clear_cache: bool = True
    owner: str | None = None
    lease_s: float | None = None


class RenewLease(Body, frozen=True, kw_only=True, tag="renew_lease"):
    """Let the pause of `owner` hold for `lease_s` from now on; None makes it an explicit hold.

    Answered at once, beside whatever runs. Refused with `wrong_state` if `owner` doesn't hold the pause (any more).
    """

    owner: str
    lease_s: float | None = None


class ResumeGeneration(Body, frozen=True, kw_only=True, tag="resume_generation"):
    """Generate again. Refused with `dirty` unless weights are clean, or `force` is set (which is logged as such)."""

    force: bool = False


class FlushCache(Body, frozen=True, kw_only=True, tag="flush_cache"):
    """Empty prefix, multimodal and encoder caches. Fails with `flush_failed` if one of them could not be."""


class AbortRequest(Body, frozen=True, kw_only=True, tag="abort_request"):
    """End requests now: those named, or all when `request_ids` is None."""

    request_ids: tuple[str, ...] | None = None


class PutManifest(Body, frozen=True, kw_only=True, tag="put_manifest"):
    """One page of a manifest. Kept by digest; a repeat changes nothing."""

    page: ManifestPage


class PrepareWeightsUpdate(Body, frozen=True, kw_only=True, tag="prepare_weights_update"):
    """Check, without any side effect, that this update could be applied: manifest, version, base.

    `base_version` None accepts any. Refused with `manifest_unknown` until every page of `manifest_digest` is there.
    """

    version: Version
    manifest_digest: str
    base_version: Version | None = None
    allow_rollback: bool = False


class PrepareDraftUpdate(PrepareWeightsUpdate, frozen=True, kw_only=True, tag="prepare_draft_update"):
    """The same for the draft model of speculative decoding, whose manifest and versions are its own.

    Served by engines that have one. What it prepares is received, committed and aborted as any update.
    """


class InitGroup(Body, frozen=True, kw_only=True, tag="init_weights_update_group"):
    """Join the process group with every rank of the worker's span and prove it by one tiny collective."""

    plan: GroupPlan


class DestroyGroup(Body, frozen=True, kw_only=True, tag="destroy_weights_update_group"):
    """Leave the process group of `epoch`, whatever state it is in. Nothing to leave is not an error."""

    epoch: int


class ReceiveWeights(Body, frozen=True, kw_only=True, tag="update_weights_from_distributed"):
    """Receive every tensor of the manifest over the group, in order, in buckets, and load them.

    Precondition: paused, prepared for this version, member of `epoch`. From the first byte on, the weights are
    `updating`; a failure leaves them `dirty`. Answered with `ReceivedData`. The version isn't published before
    `CommitWeights`. `update_op_id` names the update that this belongs to, so that prepare, receive, commit and abort
    (each with an op_id of its own) can be told from those of another update. `is_draft`: prepared as a draft's.
    """

    update_op_id: OpId
    epoch: int
    version: Version
    manifest_digest: str
    bucket_bytes: int
    is_draft: bool = False


class CommitWeights(Body, frozen=True, kw_only=True, tag="commit_weights_update"):
    """The checksums agreed: finish the session, become clean at `version`. A repeat is ok and changes nothing."""

    update_op_id: OpId
    version: Version


class AbortWeights(Body, frozen=True, kw_only=True, tag="abort_weights_update"):
    """End an open update session. Before the first byte: back to what was. After it: dirty, session closed."""

    update_op_id: OpId
    reason: str


class PrepareReload(Body, frozen=True, kw_only=True, tag="prepare_weights_reload"):
    """Check, without any side effect, that this folder could be loaded: root, files, tensors, version.

    Refused with `manifest_mismatch` if it is missing, incomplete, or doesn't fit the model. Needs no pause.
    `sums_digest`: its tensors are read, and their checksums have to have this digest (`rlbus.transfer.sums`), too.
    """

    path: str
    version: Version
    allow_rollback: bool = False
    sums_digest: str | None = None


class LoadWeights(Body, frozen=True, kw_only=True, tag="update_weights_from_disk"):
    """Load a safetensors folder that the worker can read (below one of its configured roots), and become clean.

    Precondition: paused. `version` is what the worker publishes afterwards. `is_named` False: nobody has said which
    version the folder is, this is the next one, and `SetVersion` may name it.
    """

    path: str
    version: Version
    allow_rollback: bool = False
    is_named: bool = True


class GetVersion(Body, frozen=True, kw_only=True, tag="get_weight_version"):
    """Ask for the weights' state and version. Answered with `WeightsData`."""


class SetVersion(Body, frozen=True, kw_only=True, tag="set_weight_version"):
    """Say which version the weights are that the worker has: for orchestrators that name them after an update.

    Refused unless the weights are clean and came without a name, or have this one already; and no older than what is
    served unless `allow_rollback`. Nothing is loaded.
    """

    version: Version
    allow_rollback: bool = False


class GetChecksums(Body, frozen=True, kw_only=True, tag="get_weight_checksums"):
    """Ask the engine for checksums of what it holds now, or of what its draft model does. Answered with
    `ChecksumsData`.
    """

    is_draft: bool = False


CommandBody = (
    Hello
    | GetStatus
    | GetOutcome
    | PauseGeneration
    | RenewLease
    | ResumeGeneration
    | FlushCache
    | AbortRequest
    | PutManifest
    | PrepareWeightsUpdate
    | PrepareDraftUpdate
    | InitGroup
    | DestroyGroup
    | ReceiveWeights
    | CommitWeights
    | AbortWeights
    | PrepareReload
    | LoadWeights
    | GetVersion
    | SetVersion
    | InitTransfer
    | ShutdownTransfer
    | StartUpdate
    | ApplyUpdate
    | FinishUpdate
    | GetChecksums
    | Sleep
    | WakeUp
    | LoadLora
    | UnloadLora
    | GetLoras
)


class Command(Wire, frozen=True, kw_only=True):
    """The envelope: which op, by which leader, valid until when, for whom, and what.

    `expires_at` is in Unix seconds: a command that arrives later is refused, since NATS clients may deliver a
    publish of the past after a reconnect (facts/nats.md A3). `members` None addresses every worker of the subject.
    """

    op_id: OpId
    term: int
    expires_at: float
    body: CommandBody
    members: tuple[InstanceId, ...] | None = None


def route_of(body: CommandBody) -> str:
    """The route token of a body: its tag, which is also the last subject token before the instance id."""
    tag = type(body).__struct_config__.tag
    assert isinstance(tag, str)
    return tag


# Routes that never change anything; they are answered at once, beside whatever runs.
QUERY_ROUTES = frozenset({"hello", "get_status", "get_outcome", "get_weight_version"})
# What a worker with a draft model serves beside the routes of any update.
DRAFT_ROUTE = "prepare_draft_update"
