"""Weights in a simulated run: what trainers send, what snapshots keep, and what engines really hold."""

import asyncio
import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

from rlbus._snapshots import Snapshots
from rlbus.schemas import LORA_ROUTES, GroupPlan, JoinedData, RankSpan, SnapshotKind, TensorSpec, Version
from rlbus.transfer.fake import FakePlane, FakePlaneScript, FakeRecording
from rlbus.transfer.plane import ProgressFn, Sent, WeightSource
from rlbus.workers.engines.base import ReceiveOrder
from rlbus.workers.engines.fake import INITIAL, ROUTES, FakeEngine
from rlbus.workers.engines.fake_requests import FakeRequest
from rlbus.workers.engines.fake_script import FakeScript
from tests.simulation.engine_faults import DrawnScript
from tests.simulation.truth import Boot, Truth

TENSORS = (
    TensorSpec(name="a", dtype="float32", shape=(4, 4)),
    TensorSpec(name="b", dtype="float32", shape=(4,)),
    TensorSpec(name="c", dtype="float32", shape=(2, 2)),
)
# How long a step of a simulated engine takes, in seconds.
STEP_S = 0.2
# Part of the crashes of a trainer in mid-send after which receivers hang instead of noticing.
HANG_PART = 0.5
# Folders with weights: snapshots of trainers, and those that somebody gives to the fleet.
ROOT = "/weights"
KEPT = f"{ROOT}/kept"
GIVEN = f"{ROOT}/given"


class Fabric:
    """The data plane between trainer and engines: by group and op, what is sent; engines wait for it."""

    def __init__(self) -> None:
        # Folders that everybody can read: the version of the weights in each.
        self.folders: dict[str, Version] = {}
        self._streams: dict[tuple[str, str], asyncio.Future[tuple[Version, int | None]]] = {}

    def stream(self, group_id: str, op_id: str) -> asyncio.Future[tuple[Version, int | None]]:
        """(the version that is sent, how many tensors until the sender gives up; None: all)."""
        key = (group_id, op_id)
        if key not in self._streams:
            self._streams[key] = asyncio.get_running_loop().create_future()
        return self._streams[key]

    def end(self, group_id: str, op_id: str, version: Version, num_tensors: int | None) -> None:
        """What was sent, in the end."""
        stream = self.stream(group_id, op_id)
        if not stream.done():
            stream.set_result((version, num_tensors))


class SimPlane(FakePlane):
    """The trainer's end of the fabric."""

    def __init__(self, fabric: Fabric, sender_id: str, send_s: float, rng: random.Random) -> None:
        super().__init__(FakePlaneScript(send_s=send_s, send_parts=2), sender_id=sender_id)
        self._fabric = fabric
        self._rng = rng

    async def send(
        self,
        source: WeightSource,
        specs: Any,
        *,
        bucket_bytes: int,
        version: Version,
        stream_id: str,
        on_progress: ProgressFn,
    ) -> Sent:
        """As FakePlane; one that is cut off leaves receivers with a part, or hanging."""
        group_id = "" if self.plan is None else self.plan.group_id
        op_id = stream_id
        try:
            sent = await super().send(
                source, specs, bucket_bytes=bucket_bytes, version=version, stream_id=stream_id, on_progress=on_progress
            )
        except BaseException:
            if self._rng.random() >= HANG_PART:
                self._fabric.end(group_id, op_id, version, self._rng.randrange(len(TENSORS)))
            raise
        self._fabric.end(group_id, op_id, version, None)
        return sent


class SimEngine(FakeEngine):
    """A fake engine whose weights come from the fabric, and which notes what really happens to it."""

    def __init__(self, truth: Truth, boot: Boot, fabric: Fabric, script: DrawnScript, world_size: int) -> None:
        super().__init__(
            cast(FakeScript, script),
            world_size=world_size,
            tensors=TENSORS,
            routes=ROUTES - LORA_ROUTES,  # no scenario loads an adapter, and the watch over them costs time
            step_s=STEP_S,
            feed=self._from_trainer,
        )
        self._truth = truth
        self._boot = boot
        self._fabric = fabric
        self._group_id = ""
        self._coming: Version | None = None
        self._num_requests = 0
        # The process is gone: what its remains do is nobody's business.
        self.is_crashed = False

    @property
    def is_dead(self) -> bool:
        """Whether it died by itself."""
        return self._is_dead

    @property
    def truth_version(self) -> Version | None:
        """The version of every weight; None: torn."""
        held = set(self.held.values())
        return held.pop() if len(held) == 1 else None

    async def join_group(self, plan: GroupPlan, span: RankSpan) -> JoinedData:
        """See `Engine`."""
        self._group_id = ""
        if not self.is_crashed:
            self._truth.joined(self._boot, plan.epoch)
        joined = await super().join_group(plan, span)
        self._group_id = plan.group_id
        return joined

    async def load_weights(self, path: str, version: Version) -> None:
        """See `Engine`."""
        self._coming = None
        await super().load_weights(path, version)
        if not self.is_crashed:
            self._truth.committed(self._boot, version, self.held, "", is_given=path.startswith(f"{GIVEN}/"))

    async def finish_update(self, version: Version) -> None:
        """See `Engine`."""
        update_op_id = "" if self.session is None else self.session.update_op_id
        await super().finish_update(version)
        if not self.is_crashed:
            self._truth.committed(self._boot, version, self.held, update_op_id)

    def generate(self, num_tokens: int) -> None:
        """Take a request of so many tokens."""
        self._num_requests += 1
        # Few prompts, so that caches are hit.
        prompt = (self._num_requests % 3,)
        requests: list[FakeRequest] = []
        requests.append(self.submit(f"r{self._num_requests}", prompt, num_tokens, lambda: self._on_token(requests[0])))

    def _on_token(self, request: FakeRequest) -> None:
        if not self.is_crashed:
            label = INITIAL if self.label is None else self.label
            is_stale = request.prefix != request.spans[-1].signature
            self._truth.token(self._boot, label, self.held.values(), is_stale)

    def _note(self, verb: str) -> Any:
        if verb not in ("observe", "start", "check_manifest") and not self.is_crashed:
            self._truth.called(self._boot, verb)
        return super()._note(verb)

    async def _from_trainer(self, order: ReceiveOrder) -> int | None:
        stream = self._fabric.stream(self._group_id, order.update_op_id)
        self._coming, num_tensors = await asyncio.shield(stream)
        return num_tensors

    def _read(self, path: str) -> Version:
        if path not in self._fabric.folders:
            raise FileNotFoundError(path)
        return self._fabric.folders[path]

    def _write(self, spec: TensorSpec, version: Version, is_draft: bool = False) -> None:
        super()._write(spec, version if self._coming is None else self._coming, is_draft)


class SimDisk:
    """Records what is sent into a folder that everybody can read."""

    def __init__(self, fabric: Fabric, version: Version, specs: Sequence[TensorSpec]) -> None:
        self._fabric = fabric
        self._version = version
        self._taken = FakeRecording(specs)

    def begin(self) -> None:
        """See `Recording`."""
        self._taken.begin()

    def take(self, name: str, tensor: Any) -> None:
        """See `Recording`."""
        self._taken.take(name, tensor)

    def finish(self) -> None:
        """See `Recording`."""
        self._taken.finish()
        self._fabric.folders[f"{KEPT}/{self._version}"] = self._version

    def discard(self) -> None:
        """See `Recording`."""
        self._fabric.folders.pop(f"{KEPT}/{self._version}", None)


def snapshots(kind: SnapshotKind, fabric: Fabric) -> Snapshots:
    """What a trainer keeps of what it sends."""
    if kind is SnapshotKind.NONE:
        return Snapshots()
    if kind is SnapshotKind.MEMORY:
        return Snapshots(kind, lambda _, specs: FakeRecording(specs))

    def tidy(versions: Collection[Version]) -> None:
        for path, version in list(fabric.folders.items()):
            if path.startswith(f"{KEPT}/") and version not in versions:
                del fabric.folders[path]

    return Snapshots(kind, lambda version, specs: SimDisk(fabric, version, specs), Path(KEPT), tidy)
