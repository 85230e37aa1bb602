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
from rlbus.workers.vllm_server.exchange import RankDraft, RankOutcome
from rlbus.workers.vllm_server.model import expected_of, expected_tensors

_log = logging.getLogger("rlbus.workers")

# The one kind of draft that is a whole model of its own. Others (EAGLE, MTP) run on tensors of the target, which an
# update would have to keep shared. Source: vllm 0.32, v1/spec_decode/llm_base_proposer.py, `_maybe_share_embeddings`.
METHOD = "draft_model"
# Those that speculate without any weights. Source: vllm 0.32, config/speculative.py.
WEIGHTLESS = frozenset({"ngram", "ngram_gpu", "suffix"})


def draft_of(config: Any, label: str | None = None) -> RankDraft | None:
    """What a VllmConfig speculates with, if with anything; whose weights have that label."""
    speculative = getattr(config, "speculative_config", None)
    if speculative is None:
        return None
    own = speculative.draft_model_config
    return RankDraft(
        method=str(speculative.method),
        model="" if own is None else str(own.model),
        revision=None if own is None else own.revision,
        num_stages=config.parallel_config.pipeline_parallel_size,
        label=label,
    )


def expected_draft(llm: Any) -> ExpectedTensors | None:
    """What a full update of the draft consists of; None if there is none, or it can't be updated: the log says why.

    Blocking, up to seconds: call it in a thread.
    """
    draft = draft_of(llm.vllm_config)
    if draft is None or not _can_be_updated(draft):
        return None
    if not hasattr(llm, "start_draft_weight_update"):
        _log.info("updates of the draft model are off: this vLLM has none")
        return None
    return _told(expected_tensors(llm.vllm_config.speculative_config.draft_model_config))


def expected_from(draft: RankDraft) -> ExpectedTensors | None:
    """The same from outside, by what the ranks say."""
    return _told(expected_of(draft.model, draft.revision)) if _can_be_updated(draft) else None


def _can_be_updated(draft: RankDraft) -> bool:
    why = None
    if draft.method != METHOD or not draft.model:
        why = f"speculation by {draft.method!r} has no whole model of its own"
    elif draft.num_stages > 1:
        why = "with pipeline parallelism only the last ranks have it"
    if why is not None:
        _log.info("updates of the draft model are off: %s", why)
    return why is None


def _told(expected: ExpectedTensors | None) -> ExpectedTensors | None:
    if expected is not None:
        _log.info("updates of the draft model are checked against %s", expected.source)
    return expected


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
