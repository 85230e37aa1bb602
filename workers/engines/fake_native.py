"""The fake engine's end of an update that somebody else's trainer drives. Scripted verbs are named as the methods."""

import asyncio
from typing import Any

from rlbus.schemas import Fault, FaultCode, TensorSpec, Version
from rlbus.workers.engines.base import UpdateFailedError
from rlbus.workers.engines.fake_requests import Scheduler
from rlbus.workers.engines.fake_script import Step
from rlbus.workers.engines.native import NATIVE_ROUTES

__all__ = ["NATIVE_ROUTES", "WithNative"]


class WithNative:
    """What makes the fake engine a `NativeEngine`; mixed into it."""

    tensors: tuple[TensorSpec, ...]
    requests: Scheduler
    violations: list[str]
    epoch: int | None
    label: Version | None
    native_info: dict[str, Any] | None
    is_native_open: bool
    _has_native_part: bool
    _released: asyncio.Event

    def _note(self, verb: str) -> Step:
        raise NotImplementedError

    async def _play(self, verb: str) -> None:
        raise NotImplementedError

    async def _spoil(self, step: Step, is_touched: bool) -> None:
        raise NotImplementedError

    def _write(self, spec: TensorSpec, version: Version) -> None:
        raise NotImplementedError

    async def init_native(self, info: dict[str, Any]) -> None:
        """See `NativeEngine`. Any `info` will do."""
        self.epoch, self.native_info = None, None
        await self._play("init_native")
        self.native_info = info

    async def shutdown_native(self) -> None:
        """See `NativeEngine`."""
        self.native_info, self.is_native_open = None, False
        self._released.set()
        await self._play("shutdown_native")

    async def start_native(self) -> None:
        """See `NativeEngine`."""
        await self._play("start_native")
        self.is_native_open, self._has_native_part = True, False

    async def update_native(self, info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """See `NativeEngine`. Each item brings the bytes of version 0.`step` for the tensors in `names`, or all."""
        step = self._note("update_native")
        await asyncio.sleep(step.latency_s)
        if self.native_info is None or not self.is_native_open:
            raise UpdateFailedError(
                Fault(code=FaultCode.ENGINE_FAILED, message="no transfer was begun"), weights_touched=False
            )
        if not self.requests.is_paused:
            self.violations.append("update_native while running")
        self._released.clear()
        for item in info if isinstance(info, list) else [info]:
            names = item.get("names", [spec.name for spec in self.tensors])
            for index, spec in enumerate(spec for spec in self.tensors if spec.name in names):
                if index == step.after_parts:
                    await self._spoil(step, is_touched=self._has_native_part or index > 0)
                self._write(spec, Version(step=item["step"]))
            self._has_native_part = True

    async def finish_native(self, version: Version) -> None:
        """See `NativeEngine`."""
        step = self._note("finish_native")
        await asyncio.sleep(step.latency_s)
        if step.fault is not None:
            raise UpdateFailedError(step.fault, step.claims_touched is not False)
        self.is_native_open, self.label = False, version
