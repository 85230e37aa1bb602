"""The draft model of a vLLM server (speculative decoding): whether its weights can be replaced, and what they are.

vLLM updates a draft by its own transfer engine, told at the start which model a session is about. Source: vllm 0.32,
v1/worker/gpu_worker.py.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from rlbus.errors import EngineError, refused
from rlbus.schemas import ChecksumsData, Fault, FaultCode
from rlbus.workers.vllm_server.calls import CHECKSUM_S, EngineCalls
from rlbus.workers.vllm_server.checkpoint import ExpectedTensors
from rlbus.workers.vllm_server.checksums import checksums_data
from rlbus.workers.vllm_server.exchange import RankOutcome
from rlbus.workers.vllm_server.model import expected_tensors

_log = logging.getLogger("rlbus.workers")

# The one kind of draft that is a whole model of its own. Others (EAGLE, MTP) run on tensors of the target, which an
# update would have to keep shared. Source: vllm 0.32, v1/spec_decode/llm_base_proposer.py, `_maybe_share_embeddings`.
METHOD = "draft_model"


def expected_draft(llm: Any) -> ExpectedTensors | None:
    """What a full update of the draft consists of; None if there is none, or it can't be updated: the log says why.

    Blocking, up to seconds: call it in a thread.
    """
    config = llm.vllm_config
    speculative = getattr(config, "speculative_config", None)
    if speculative is None:
        return None
    why = _obstacle(llm, speculative)
    if why is not None:
        _log.info("updates of the draft model are off: %s", why)
        return None
    expected = expected_tensors(speculative.draft_model_config)
    if expected is not None:
        _log.info("updates of the draft model are checked against %s", expected.source)
    return expected


def _obstacle(llm: Any, speculative: Any) -> str | None:
    if speculative.method != METHOD or speculative.draft_model_config is None:
        return f"speculation by {speculative.method!r} has no whole model of its own"
    if llm.vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "with pipeline parallelism only the last ranks have it"
    if not hasattr(llm, "start_draft_weight_update"):
        return "this vLLM has no updates of draft models"
    return None


class DraftSums:
    """Asks the ranks what their draft models hold. `ask` has each answer from the model that a session is about."""

    def __init__(self, llm: Any, calls: EngineCalls, ask: Callable[[], Awaitable[list[RankOutcome | None]]]) -> None:
        self._llm = llm
        self._calls = calls
        self._ask = ask

    async def read(self, is_draft_open: bool | None) -> ChecksumsData:
        """The checksums now. `is_draft_open`: whose update is open (None: nobody's, and one is opened to look).

        Raises: RefusedError (busy): the target's is; EngineError. Cancel: the engine goes on computing them.
        """
        if is_draft_open is False:
            text = "an update of the target's weights is open; commit or abort it first"
            raise refused(FaultCode.BUSY, text)
        look = self._ask if is_draft_open else self._look
        # One call: however its caller ends, the next one waits until the session that it opened is closed.
        outcomes = await self._calls.hold("checksums of the draft model", look, CHECKSUM_S)
        for outcome in outcomes:
            if outcome is None or outcome.fault is not None:
                text = "a rank doesn't say" if outcome is None or outcome.fault is None else outcome.fault.message
                raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=f"checksums of the draft model: {text}"))
        return checksums_data(pair for outcome in outcomes if outcome for pair in outcome.digests.items())

    async def _look(self) -> list[RankOutcome | None]:
        await self._llm.start_draft_weight_update()
        try:
            return await self._ask()
        finally:
            await self._llm.finish_weight_update()
