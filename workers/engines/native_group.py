"""What a trainer of somebody else's says of a transfer that rlbus' own backend makes, in the fields of vLLM's NCCL one.

The trainer binds a store at `master_address`:`master_port` and is rank 0 of the group; this worker's ranks follow from
`rank_offset` on. Then the whole model comes in the order of `names`, in rlbus' buckets, as in any update of rlbus
(`rlbus.transfer`). `rlbus.workers.vllm_server.trainer` is such a trainer.
"""

from typing import Annotated, Any, Protocol

import msgspec

from rlbus.errors import FaultError, refused
from rlbus.schemas import Fault, FaultCode, GroupPlan, JoinedData, RankSpan, ReceivedData, Rendezvous, TensorSpec
from rlbus.schemas import Version as WeightsVersion
from rlbus.transfer.buckets import MAX_BUCKET_BYTES, MIN_BUCKET_BYTES
from rlbus.workers.engines.base import EngineInfo, ProgressFn, ReadyFn, ReceiveOrder, UpdateFailedError

# The epoch of every group that somebody else's trainer forms; those of a controller begin with 1.
EPOCH = 0
PREFIX = "rlbus/native"
# Source: rlbus.trainer.DEFAULT_BUCKET_BYTES and the default of GroupPlan.timeout_s.
BUCKET_BYTES = 16 << 20
TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 3600.0


class InitInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`init_info`. The first four are vLLM's; the rest has to be the trainer's own, so it sends it along.

    `group_id` tells groups apart that meet at one store, one after the other.
    """

    master_address: str
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, msgspec.Meta(ge=1)]
    world_size: Annotated[int, msgspec.Meta(ge=2)]
    group_id: Annotated[str, msgspec.Meta(max_length=64)] = "native"
    bucket_bytes: Annotated[int, msgspec.Meta(ge=MIN_BUCKET_BYTES, le=MAX_BUCKET_BYTES)] = BUCKET_BYTES
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT_S)] = TIMEOUT_S


class UpdateInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`update_info`. The first three are vLLM's; `stream_id` names this round, as the trainer does in its buckets."""

    names: tuple[str, ...]
    dtype_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    stream_id: Annotated[str, msgspec.Meta(max_length=128)] = ""


def plan_of(info: InitInfo) -> GroupPlan:
    """The group as all its members see it."""
    return GroupPlan(
        epoch=EPOCH,
        group_id=info.group_id,
        backend="gloo",
        num_trainer_ranks=1,
        world_size=info.world_size,
        spans=(),  # nobody here knows who has the other ranks
        rendezvous=Rendezvous(host=info.master_address, port=info.master_port, prefix=PREFIX),
        bucket_bytes=info.bucket_bytes,
        timeout_s=info.timeout_s,
    )


def specs_of(info: UpdateInfo) -> tuple[TensorSpec, ...]:
    """The manifest. Raises ValueError: the lists differ in length."""
    rows = zip(info.names, info.dtype_names, info.shapes, strict=True)
    return tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, dtype, shape in rows)


class Joining(Protocol):
    """What of an `Engine` makes a `GroupedNative`."""

    @property
    def info(self) -> EngineInfo:
        """See `Engine`."""
        ...

    def check_manifest(self, tensors: Any) -> None:
        """See `Engine`."""
        ...

    async def join_group(self, plan: GroupPlan, span: RankSpan) -> JoinedData:
        """See `Engine`."""
        ...

    async def leave_group(self) -> None:
        """See `Engine`."""
        ...

    async def receive_weights(self, order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
        """See `Engine`."""
        ...

    async def finish_update(self, version: WeightsVersion) -> None:
        """See `Engine`."""
        ...


class GroupedNative:
    """`NativeEngine` for an engine that receives over rlbus' own groups: its methods are those of the engine.

    One `update_native` brings the whole model: what it announces is compared with the model before anything comes, so
    a part of one is refused.
    """

    def __init__(self, engine: Joining) -> None:
        self._engine = engine
        self._bucket_bytes = BUCKET_BYTES
        # An earlier part of the update that is open is in place.
        self._is_touched = False

    def check_init(self, info: dict[str, Any]) -> None:
        """See `ChecksInit`."""
        self._parsed(info)

    async def init_native(self, info: dict[str, Any]) -> None:
        """See `NativeEngine`."""
        parsed, num_ranks = self._parsed(info), self._engine.info.world_size
        span = RankSpan(component="native", instance_id="0", first=parsed.rank_offset, num_ranks=num_ranks)
        self._bucket_bytes = parsed.bucket_bytes
        await self._engine.join_group(plan_of(parsed), span)

    async def shutdown_native(self) -> None:
        """See `NativeEngine`."""
        await self._engine.leave_group()

    async def start_native(self) -> None:
        """See `NativeEngine`. Nothing is opened before the first tensor is on its way."""
        self._is_touched = False

    async def update_native(self, info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """See `NativeEngine`. A list has one entry for each rank; here all ranks get the same."""
        try:
            entries = info if isinstance(info, list) else [info]
            if any(entry != entries[0] for entry in entries):
                raise ValueError("its entries differ, and every rank here receives the whole model")
            parsed = msgspec.convert(entries[0], UpdateInfo, strict=True)
            tensors = specs_of(parsed)
        except ValueError as exc:  # msgspec's is one
            why = Fault(code=FaultCode.BAD_MESSAGE, message=f"update_info: {exc}")
            raise UpdateFailedError(why, self._is_touched) from exc
        try:
            self._engine.check_manifest(tensors)
        except FaultError as exc:
            raise UpdateFailedError(exc.fault, self._is_touched) from exc
        order = ReceiveOrder(parsed.stream_id, EPOCH, WeightsVersion(), tensors, self._bucket_bytes)
        try:
            await self._engine.receive_weights(order, lambda: None, lambda done, total: None)
        except UpdateFailedError as exc:
            raise UpdateFailedError(exc.fault, exc.weights_touched or self._is_touched) from exc
        self._is_touched = True

    async def finish_native(self, version: WeightsVersion) -> None:
        """See `NativeEngine`."""
        await self._engine.finish_update(version)

    def _parsed(self, info: dict[str, Any]) -> InitInfo:
        """Raises RefusedError: a field is wrong, or the group has no room for this worker's ranks."""
        try:
            parsed = msgspec.convert(info, InitInfo, strict=True)
        except msgspec.ValidationError as exc:
            raise refused(FaultCode.BAD_MESSAGE, f"init_info: {exc}") from exc
        last = parsed.rank_offset + self._engine.info.world_size - 1
        if last >= parsed.world_size:
            have = f"this worker has ranks {parsed.rank_offset} to {last}"
            raise refused(FaultCode.BAD_MESSAGE, f"init_info: {have}, and world_size is {parsed.world_size}")
        return parsed
