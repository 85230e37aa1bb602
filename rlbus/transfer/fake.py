"""A data plane without tensors, for tests: both ends compute the same sums from names, versions and shapes."""

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlbus.errors import GroupBrokenError, TransferError
from rlbus.schemas import GroupPlan, Rendezvous, TensorSpec, TensorSum, Version
from rlbus.transfer.manifest import num_bytes
from rlbus.transfer.plane import ProgressFn, Sent, WeightSource


def fake_sum(name: str, version: Version, shape: Sequence[int] = ()) -> str:
    """16 hex digits that stand for the bytes of tensor `name` at `version`."""
    text = f"{name}|{version}|{','.join(str(dim) for dim in shape)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class FakeSource:
    """Announces `specs` and has no values."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = tuple(specs)

    def specs(self) -> tuple[TensorSpec, ...]:
        """What was given."""
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, None): a FakePlane doesn't read values."""
        return iter([(spec.name, None) for spec in self._specs])


@dataclass(slots=True)
class FakePlaneScript:
    """What a FakePlane does. Durations in seconds of the loop; `fail_*` is the problem that it reports.

    `send_parts` is how often progress is told; a fault comes after `fail_after_parts` of them: `fail_send` is the
    trainer's own, `break_send` that of the group. `wrong_sum_of` names a tensor whose sum is off.
    """

    join_s: float = 0.0
    send_s: float = 0.0
    send_parts: int = 1
    fail_join: str | None = None
    fail_send: str | None = None
    break_send: str | None = None
    fail_after_parts: int = 0
    wrong_sum_of: str | None = None


class FakePlane:
    """A SenderPlane that moves nothing. `calls` records what was asked of it, in order."""

    def __init__(self, script: FakePlaneScript | None = None, *, sender_id: str = "fake-sender") -> None:
        self.script = FakePlaneScript() if script is None else script
        self.calls: list[str] = []
        self.plan: GroupPlan | None = None
        self._sender_id = sender_id
        self._left: asyncio.Future[str] | None = None

    @property
    def backend(self) -> str:
        """ "fake"."""
        return "fake"

    @property
    def sender_id(self) -> str:
        """As given."""
        return self._sender_id

    @property
    def num_ranks(self) -> int:
        """One."""
        return 1

    async def rendezvous(self) -> Rendezvous:
        """A place where nobody listens. Cancel: leaves nothing."""
        return Rendezvous(host="127.0.0.1", port=1, prefix=self._sender_id)

    async def join(self, plan: GroupPlan) -> None:
        """Take `join_s`, then be a member, or fail as scripted. Cancel: no group."""
        await self.leave("another group is joined")
        self.calls.append(f"join {plan.epoch}")
        await self._take("join", self.script.join_s)
        if self.script.fail_join is not None:
            raise TransferError("join", self.script.fail_join)
        self.plan = plan

    async def send(
        self,
        source: WeightSource,
        specs: Sequence[TensorSpec],
        *,
        bucket_bytes: int,
        version: Version,
        stream_id: str,
        on_progress: ProgressFn,
    ) -> Sent:
        """Take `send_s` in `send_parts` steps, then tell the sums of `version`, or fail. Cancel: leaves nothing."""
        if self.plan is None:
            raise TransferError("send", "no group was joined")
        self.calls.append(f"send {stream_id} {version}")
        script = self.script
        total = sum(num_bytes(spec) for spec in specs)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for part in range(script.send_parts + 1):
            if script.fail_send is not None and part == script.fail_after_parts:
                raise TransferError("send", script.fail_send)
            if script.break_send is not None and part == script.fail_after_parts:
                raise GroupBrokenError("send", script.break_send)
            if part < script.send_parts:
                await self._take("send", script.send_s / script.send_parts)
                on_progress(total * (part + 1) // script.send_parts, total)
        sums = tuple(TensorSum(name=spec.name, checksum=self._sum(spec, version)) for spec in specs)
        return Sent(num_bytes=total, num_tensors=len(specs), sums=sums, send_s=loop.time() - began)

    async def leave(self, reason: str) -> None:
        """Drop the group; a join or send that runs fails. Cancel: leaves nothing."""
        if self.plan is not None or self._left is not None:
            self.calls.append("leave")
        self.plan = None
        if self._left is not None and not self._left.done():
            self._left.set_result(reason)

    async def aclose(self) -> None:
        """As leave. Cancel: leaves nothing."""
        await self.leave("closed")

    def _sum(self, spec: TensorSpec, version: Version) -> str:
        if spec.name == self.script.wrong_sum_of:
            return "0" * 16
        return fake_sum(spec.name, version, spec.shape)

    async def _take(self, operation: str, seconds: float) -> None:
        self._left = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                raise GroupBrokenError(operation, f"left the group: {await self._left}")
        except TimeoutError:
            return
        finally:
            self._left = None
