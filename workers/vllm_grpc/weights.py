"""The calls of `rlbus.workers.vllm_server.updates.Updates`, made over gRPC instead of on vLLM's AsyncLLM.

`Updates` keeps the whole order of an update; what is here only carries its calls. Reloads and questions, for which the
service has no call, go to rlbus's transfer backend in the ranks. A refusal is a plain failure here: in an update no
answer of the server promises that nothing has changed. What failed inside the ranks is no FaultError, so that whoever
made the call (`EngineCalls`) judges it as what AsyncLLM raises: several ranks may be out of step then.
"""

from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec

from rlbus.errors import EngineDeadError, EngineError, FaultError
from rlbus.schemas import Fault, FaultCode
from rlbus.workers.vllm_grpc.control import CALL_S, Control
from rlbus.workers.vllm_grpc.faults import as_engine_error
from rlbus.workers.vllm_server.exchange import TORN, CallFolder, Exchange, RankOutcome
from rlbus.workers.vllm_server.updates import LOAD_S, TRANSFER_S

T = TypeVar("T")
# A call's own deadline, beyond that of whoever waits for it: it is dropped only long after it was given up.
LATE_S = 60.0


class CollectiveError(Exception):
    """A call of all ranks raised inside vLLM, or nobody knows how it ended."""


class GrpcWeights:
    """Speaks as AsyncLLM does, as far as `Updates` asks. `num_ranks` answer each call through `exchange`."""

    def __init__(self, control: Control, exchange: Exchange, num_ranks: int) -> None:
        self._control = control
        self._exchange = exchange
        self._num_ranks = num_ranks

    async def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> None:
        """The methods of vLLM's workers that `Updates` calls by name.

        Raises: CollectiveError, EngineError, EngineDeadError. Cancel: the ranks may do it all the same.
        """
        match method:
            case "init_weight_transfer_engine":
                call = self._control.init_transfer(_json(kwargs["init_info"]), CALL_S + LATE_S)
            case "update_weights":
                call = self._control.update_weights(_json(kwargs["update_info"]), TRANSFER_S + LATE_S)
            case "reload_weights":
                await self._reload(kwargs["weights_path"])
                return
            case _:
                raise AssertionError(f"no call of the service stands for {method}")
        await _as_vllm_raises(call)

    async def start_weight_update(self) -> None:
        """Open a session. Raises: CollectiveError, EngineError, EngineDeadError. Cancel: it may be open."""
        await _as_vllm_raises(self._control.start_update(CALL_S + LATE_S))

    async def start_draft_weight_update(self) -> None:
        """Open one about the draft model. Raises: as `start_weight_update`. Cancel: it may be open."""
        await _as_vllm_raises(self._control.start_draft_update(CALL_S + LATE_S))

    async def finish_weight_update(self) -> None:
        """Close the session. Raises: CollectiveError, EngineError, EngineDeadError. Cancel: it may be closed."""
        await _as_vllm_raises(self._control.finish_update(LOAD_S + LATE_S))

    async def update_weight_version(self, label: str) -> None:
        """Label the weights. Raises: CollectiveError, EngineError, EngineDeadError. Cancel: they may be labelled."""
        await _as_vllm_raises(self._control.set_version(label))

    async def ask(self, question: str, limit_s: float) -> list[RankOutcome | None]:
        """What every rank answers to a question (`exchange.HELLO`, ...); None is a rank whose answer can't be seen.

        Raises: CollectiveError, EngineError, EngineDeadError. Cancel: the ranks may go on answering.
        """
        folder = self._exchange.open(question)
        try:
            info = {"folder": folder.path, "ask": question}
            await _as_vllm_raises(self._control.init_transfer(_json(info), limit_s))
            return [folder.outcome(question, rank) for rank in range(self._num_ranks)]
        finally:
            folder.remove()

    async def _reload(self, path: str) -> None:
        """A session of its own, in which every rank loads the folder. Like vLLM's reload it is over when it returns;
        unlike it, an engine whose load failed runs again, torn.
        """
        # That there is no folder, or no label, isn't a failure inside the ranks.
        folder = self._exchange.open("reload")
        try:
            # The ranks load on when we are gone, and the label of before would then be a lie.
            await self._control.set_version(TORN)
            await _as_vllm_raises(self._load(path, folder))
        except EngineError:
            raise
        except FaultError as exc:
            raise as_engine_error(exc) from exc
        finally:
            folder.remove()

    async def _load(self, path: str, folder: CallFolder) -> None:
        await self._control.start_update(CALL_S)
        await self._control.update_weights(_json({"folder": folder.path, "path": path}), LOAD_S)
        await self._control.finish_update(LOAD_S)
        for step in ("receive", "finish"):
            outcomes = (folder.outcome(step, rank) for rank in range(self._num_ranks))
            for rank, outcome in enumerate(outcomes):
                _check(rank, outcome)


def _check(rank: int, outcome: RankOutcome | None) -> None:
    fault = outcome.fault if outcome is not None else None
    if outcome is None or fault is not None:
        text = "doesn't say how it ended" if fault is None else fault.message
        message = f"rank {rank} of the engine: {text}"
        raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=message))


def _json(info: dict[str, Any]) -> bytes:
    return msgspec.json.encode(info)


async def _as_vllm_raises(call: Awaitable[T]) -> T:
    try:
        return await call
    except EngineDeadError:
        raise
    except FaultError as exc:
        if exc.code is FaultCode.ENGINE_FAILED:
            raise CollectiveError(exc.fault.message) from exc
        raise as_engine_error(exc) from exc
