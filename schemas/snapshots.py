"""What a trainer keeps of a committed version, so that a worker that is behind can be brought to it."""

import enum

from rlbus.schemas.base import Wire
from rlbus.schemas.ids import OpId, WorkerId
from rlbus.schemas.pausing import PauseMode
from rlbus.schemas.weights import Version


class SnapshotKind(enum.StrEnum):
    """Where a trainer keeps what it sent last."""

    NONE = "none"  # nowhere: who is behind waits for the next update
    MEMORY = "memory"  # a copy in its host memory, sent again over a process group
    DISK = "disk"  # a safetensors folder that the workers can read


class SnapshotOffer(Wire, frozen=True, kw_only=True):
    """What a trainer will have kept once its update is committed.

    `inbox` (memory) is the subject on which it takes a `CatchUpTask`; `path` (disk) is the folder, as the trainer sees
    it.
    """

    kind: SnapshotKind = SnapshotKind.NONE
    inbox: str | None = None
    path: str | None = None


class FleetSnapshot(Wire, frozen=True, kw_only=True):
    """The offer that came with the fleet's version. `sums_digest` is that of the committed checksums (None: unknown).

    `backend` and `pause_mode` are those of the update that it came with.
    """

    version: Version
    offer: SnapshotOffer
    backend: str = ""
    pause_mode: PauseMode = PauseMode.KEEP
    sums_digest: str | None = None


class CatchUpTask(Wire, frozen=True, kw_only=True, tag_field="kind", tag="catch_up"):
    """To the trainer's inbox: give `workers` the snapshot of `version`, as an update with this `op_id`.

    Answered with `OpAccepted`, or with a `Refusal` that says why not. A repeat changes nothing.
    """

    op_id: OpId
    version: Version
    workers: tuple[WorkerId, ...]
