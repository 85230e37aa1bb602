"""What the engine says of itself, asked within a bound, and how it differs from what was commanded."""

import asyncio
import logging
from collections.abc import Callable

from rlbus.schemas import Generation, PauseGeneration, ResumeGeneration, Sleep, SleepTag, WakeUp, WeightsState
from rlbus.workers.engines.base import NO_LABEL, Engine, Observed
from rlbus.workers.state import WorkerState

_log = logging.getLogger("rlbus.workers")

# What may change generation and sleep while it runs.
_SWITCHING = PauseGeneration | ResumeGeneration | Sleep | WakeUp
NO_ANSWER = Observed(Generation.UNKNOWN)


class Observer:
    """Asks the engine how it is: one question at a time, shared by all who want to know, each bounded by `limit_s`."""

    def __init__(self, engine: Engine, limit_s: float) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._asking: asyncio.Task[Observed] | None = None
        # The last answer; unknown before the first.
        self.last = NO_ANSWER

    async def observe(self) -> Observed:
        """The engine's answer, or unknown if there is none within the limit. Never raises for the engine's sake.

        Cancel: the question goes on for the others who wait.
        """
        asking = self._asking
        if asking is None or asking.done():
            asking = self._asking = asyncio.get_running_loop().create_task(self._ask())
        # The bound is out here: an engine that doesn't let go when cancelled is not asked a second time meanwhile.
        # While we wait, somebody else may have begun the next question; ours is still this one.
        done, _ = await asyncio.wait({asking}, timeout=self._limit_s)
        answered = bool(done) and not asking.cancelled()
        self.last = asking.result() if answered else NO_ANSWER
        return self.last

    async def observe_as_told(self, told: Callable[[], object]) -> Observed:
        """The same, asked once more if what the engine was told became another thing meanwhile: an answer from before
        a resume would be announced as a pause that nobody commanded.

        Cancel: as `observe`.
        """
        before = told()
        observed = await self.observe()
        return observed if told() == before else await self.observe()

    async def _ask(self) -> Observed:
        try:
            async with asyncio.timeout(self._limit_s) as bound:
                observed = await self._engine.observe()
        except Exception as exc:  # noqa: BLE001 - shown to everybody as generation "unknown"
            _log.debug("the engine can't be observed: %s", exc)
            return NO_ANSWER
        # One that doesn't let go in time says how it was seconds ago, and may have been resumed since.
        return NO_ANSWER if bound.expired() else observed

    async def aclose(self) -> None:
        """Stop asking. Cancel: it was told to stop, and may not have."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking}, timeout=self._limit_s)


def drift(state: WorkerState, observed: Observed) -> str | None:
    """Where what the engine says differs from what it was told, in words; None if nowhere, or while it changes."""
    parts: list[str] = []
    is_switching = state.running is not None and isinstance(state.running.body, _SWITCHING)
    if not is_switching:
        if state.pause is not None and observed.generation is Generation.RUNNING:
            parts.append(f"paused by {state.pause.owner}, but the engine is running")
        sleeps = bool(state.asleep or observed.asleep)
        if state.pause is None and observed.generation is Generation.PAUSED and not sleeps:
            parts.append("commanded to run, but the engine is paused")
        if observed.generation is not Generation.UNKNOWN and observed.asleep != state.asleep:
            parts.append(f"told to have asleep {_listed(state.asleep)}, but asleep is {_listed(observed.asleep)}")
    version, label = state.weights.version, observed.weight_version
    is_settled = state.weights.state is WeightsState.CLEAN and state.running is None
    if is_settled and version is not None and label is not None and label != str(version):
        says = "has no label" if label == NO_LABEL else f"says {label}"
        parts.append(f"committed version {version}, but the engine {says}")
    return "; ".join(parts) or None


def _listed(tags: frozenset[SleepTag]) -> str:
    return ", ".join(sorted(tags)) or "nothing"
