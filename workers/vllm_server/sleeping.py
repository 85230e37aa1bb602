"""Sleep of a vLLM engine, in vLLM's words, with what vLLM doesn't promise by itself.

vLLM puts both tags to sleep together, or the KV cache alone of an engine without requests; it can't say which tags
sleep, and starts to generate by itself when the last one wakes. So the tags are kept here, compared with what vLLM
says of being asleep at all, and a pause follows every wake of the last tag on its heels: vLLM's core takes both before
its next step. Other users of vLLM's own sleep routes are not seen. Source: vllm 0.32, v1/engine/core.py.

No vLLM for CPUs has a sleep; what is here was run on a stand-in only.
"""

import asyncio
from typing import Any

from rlbus.errors import EngineError, refused
from rlbus.schemas import Fault, FaultCode, PauseMode, SleepTag
from rlbus.workers.vllm_server.calls import EngineCalls

# Copying weights to the host and back; a terabyte at 10 GB/s.
SLEEP_S = 120.0
# A pause, or a question.
CALL_S = 30.0
BOTH = frozenset(SleepTag)
KV_CACHE = frozenset({SleepTag.KV_CACHE})


class Sleeping:
    """The sleep of one engine."""

    def __init__(self, llm: Any, calls: EngineCalls) -> None:
        self._llm = llm
        self._calls = calls
        # What was put to sleep and not woken through here.
        self._told: frozenset[SleepTag] = frozenset()

    @property
    def told(self) -> frozenset[SleepTag]:
        """What sleeps, without asking vLLM."""
        return self._told

    async def asleep(self) -> frozenset[SleepTag]:
        """What sleeps now. Raises: EngineError. Cancel: leaves nothing."""
        if self._told and not await self._calls.ask("is_sleeping", self._llm.is_sleeping, CALL_S):
            self._told = frozenset()  # somebody else has woken it
        return self._told

    def check(self, tags: frozenset[SleepTag]) -> None:
        """Raise a refused error (bad_message) for tags that vLLM can't put to sleep as things are."""
        after, has_weights = self._told | tags, SleepTag.WEIGHTS in self._told
        if after not in (BOTH, KV_CACHE) or (has_weights and not tags <= self._told):
            text = "vLLM puts the weights to sleep with the KV cache or after it; name both tags, or kv_cache alone"
            raise refused(FaultCode.BAD_MESSAGE, text, tags=", ".join(sorted(tags)))

    async def sleep(self, tags: frozenset[SleepTag], level: int, mode: PauseMode) -> None:
        """Put an engine to sleep that was paused in `mode`; `check` has passed. Cancel: it may sleep."""
        after = self._told | tags
        # In doubt they sleep, until a wake has succeeded.
        self._told = after
        if after == KV_CACHE:
            release = self._llm.release_kv_cache_memory
            await self._calls.hold("release_kv_cache_memory", release, SLEEP_S, is_paused=True)
            return
        # What a wait was for is over; vLLM would wait for what came since.
        word = PauseMode.ABORT if mode is PauseMode.ABORT else PauseMode.KEEP
        await self._calls.hold("sleep", lambda: self._llm.sleep(level, word.value), SLEEP_S, is_paused=True)

    async def wake_up(self, tags: frozenset[SleepTag]) -> None:
        """Wake those of `tags` that sleep; the engine stands still afterwards, as before.

        Raises: EngineError. Cancel: some may be awake.
        """
        names = sorted(tag.value for tag in tags & self._told)
        if not names:
            return
        left = self._told - tags
        if left:
            await self._calls.hold("wake_up", lambda: self._llm.wake_up(names), SLEEP_S, is_paused=True)
        else:
            await self._calls.hold("wake_up", lambda: self._wake_still(names), SLEEP_S, is_paused=True)
            if not await self._calls.ask("is_paused", self._llm.is_paused, CALL_S):
                text = "the engine was resumed by somebody else while it woke"
                raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text, retryable=True))
        self._told = left

    async def _wake_still(self, names: list[str]) -> None:
        """Both are sent before either is answered."""
        pausing = self._llm.pause_generation(mode=PauseMode.KEEP.value, clear_cache=False)
        await asyncio.gather(self._llm.wake_up(names), pausing)
