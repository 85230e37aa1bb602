"""How an agent leaves an engine that outlives it: not standing still for an op whose pause nobody renews any more."""

from rlbus.workers.config import AgentConfig
from rlbus.workers.draft import is_whole
from rlbus.workers.engines.base import Engine
from rlbus.workers.engines.found import FoundEngine
from rlbus.workers.mutations import within
from rlbus.workers.state import WorkerState


async def let_go(engine: Engine, state: WorkerState, config: AgentConfig) -> None:
    """What the end of the lease would have done, now: flush and resume, if the weights are whole and nothing sleeps. An
    explicit hold stays. Bounded, and never raises for the engine. Cancel: the engine may be left paused.
    """
    is_leased = state.pause is not None and state.lease is not None
    if not isinstance(engine, FoundEngine) or not is_leased or state.asleep:
        return
    if state.session is not None or not is_whole(state):
        return

    async def resume() -> None:
        if state.owes_flush:
            await engine.flush_cache()
        await engine.resume()

    await within(resume(), config.undo_s, config.cancel_s, "letting the engine go")
