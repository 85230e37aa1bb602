"""Updates that somebody else's trainer sends through a transfer backend of vLLM's own (nccl, ipc, ...).

What the trainer says goes to vLLM as it is; rlbus adds its rules, and honesty about failures: vLLM doesn't tell whether
a failed call has changed anything, so once it was asked to receive, the weights count as touched. Nothing can end a
call in which vLLM waits for a trainer that never comes: an engine that doesn't come back is lost (`EngineCalls`).
Run on stand-ins only: vLLM has no such backend on CPUs.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from rlbus.errors import EngineDeadError, EngineError, FaultError
from rlbus.schemas import Fault, FaultCode, Version
from rlbus.workers.engines.base import UpdateFailedError
from rlbus.workers.vllm_server.calls import EngineCalls
from rlbus.workers.vllm_server.exchange import TORN
from rlbus.workers.vllm_server.ranks import CALL_S
from rlbus.workers.vllm_server.updates import LOAD_S, TRANSFER_S

# vLLM waits so long for the trainer's store, and engines that never come back are given up after it.
# Source: vllm 0.32, StatelessProcessGroup.create, store_timeout 300 s.
JOIN_S = 330.0


class PassedNative:
    """`NativeEngine` on vLLM's AsyncLLM. `abort` is `Engine.abort_update` for it."""

    def __init__(self, llm: Any, calls: EngineCalls) -> None:
        self._llm = llm
        self._calls = calls
        # There may be one to leave.
        self._may_have_group = False
        # An update was begun, and neither finished nor aborted; vLLM's own session is open; weights may have changed.
        self._is_begun = False
        self._is_open = False
        self._is_touched = False

    async def init_native(self, info: dict[str, Any]) -> None:
        """See `NativeEngine`. vLLM's engine answers nothing else until the trainer has come, or JOIN_S have passed."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.shutdown_native()
        self._may_have_group = True
        request = WeightTransferInitRequest(init_info=info)
        try:
            await self._calls.hold(
                "init_weight_transfer_engine", lambda: self._llm.init_weight_transfer_engine(request), JOIN_S
            )
        except EngineDeadError:
            raise
        except EngineError as exc:
            raise EngineError(msgspec.structs.replace(exc.fault, code=FaultCode.GROUP_FAILED)) from exc

    async def shutdown_native(self) -> None:
        """See `NativeEngine`. A call that still waits for the trainer has to come back first."""
        self._calls.call_back()
        if not self._may_have_group:
            return
        await self._calls.hold("shutdown_weight_transfer_engine", self._llm.shutdown_weight_transfer_engine, CALL_S)
        self._may_have_group = False

    async def start_native(self) -> None:
        """See `NativeEngine`. vLLM takes the layers apart already; an abort puts them together unchanged."""
        self._is_begun, self._is_touched = True, False
        await self._start()

    async def update_native(self, info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """See `NativeEngine`. A list has one entry for each rank."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if not self._is_open:
            fault = Fault(code=FaultCode.WRONG_STATE, message="no update was started in the engine")
            raise UpdateFailedError(fault, weights_touched=self._is_touched)
        request = WeightTransferUpdateRequest(update_info=info)
        self._is_touched = True

        async def update() -> None:
            try:
                await self._llm.update_weights(request)
            except Exception:
                self._is_open = False  # vLLM closes its session when the call fails
                raise

        await self._tried("update_weights", update, TRANSFER_S)

    async def finish_native(self, version: Version) -> None:
        """See `NativeEngine`."""
        await self._tried("finish_weight_update", self._finish, LOAD_S)
        try:
            await self._label(str(version))
        except FaultError as exc:
            raise UpdateFailedError(exc.fault, weights_touched=True) from exc
        self._is_begun = False

    async def abort(self) -> None:
        """Close what is open; weights that may be torn are labelled so. Idempotent.

        Raises: EngineError, EngineDeadError. Cancel: called again, it finishes.
        """
        if not self._is_begun:
            return
        self._calls.call_back()
        await self._calls.settle(CALL_S)
        if self._is_touched:
            await self._label(TORN)
        if not self._is_open:
            # Layers of a failed update have no memory; this gives them what they had (facts/vllm-cpu.md 4).
            await self._start()
        await self._calls.hold("finish_weight_update", self._finish, LOAD_S, is_paused=True)
        self._is_begun = False

    async def _start(self) -> None:
        async def start() -> None:
            await self._llm.start_weight_update()
            self._is_open = True

        await self._calls.hold("start_weight_update", start, CALL_S, is_paused=True)

    async def _finish(self) -> None:
        await self._llm.finish_weight_update()
        self._is_open = False

    async def _label(self, label: str) -> None:
        await self._calls.ask("update_weight_version", lambda: self._llm.update_weight_version(label), CALL_S)

    async def _tried(self, what: str, call: Callable[[], Awaitable[None]], limit_s: float) -> None:
        try:
            await self._calls.hold(what, call, limit_s, is_paused=True)
        except FaultError as exc:
            raise UpdateFailedError(exc.fault, weights_touched=True) from exc
