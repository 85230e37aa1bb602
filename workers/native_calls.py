"""The engine calls of an update that somebody else's trainer drives (`rlbus.schemas.native`)."""

from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from rlbus.schemas import (
    ApplyUpdate,
    FinishUpdate,
    InitTransfer,
    ResultData,
    ShutdownTransfer,
    StartUpdate,
    WeightsData,
    WeightsState,
    WeightsView,
)
from rlbus.workers.checks import next_version
from rlbus.workers.engines.base import Engine
from rlbus.workers.engines.native import NativeEngine, info_of
from rlbus.workers.moves import Action, Event, SessionClosed, Started
from rlbus.workers.state import WorkerState

NativeCommand = InitTransfer | ShutdownTransfer | StartUpdate | ApplyUpdate | FinishUpdate


class Surroundings(Protocol):
    """What these need of the agent."""

    @property
    def state(self) -> WorkerState:
        """As it is now."""
        ...

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Feed the state machine."""
        ...


async def perform(
    engine: Engine,
    op_id: str,
    body: NativeCommand,
    around: Surroundings,
    check_stands_still: Callable[[], Awaitable[None]],
) -> ResultData | None:
    """Call the engine as `body` asks for. Raises what the engine raises, and what `check_stands_still` does, which is
    awaited before the first byte. Cancel: passes on to the engine call.
    """
    # The route says that the engine has it, and is checked before.
    native = cast(NativeEngine, engine)
    match body:
        case InitTransfer():
            info = info_of(body.info)
            around.apply(Started(op_id))
            await native.init_native(info)
        case ShutdownTransfer():
            await _give_up_open(engine, around)
            around.apply(Started(op_id))
            await native.shutdown_native()
        case StartUpdate():
            await check_stands_still()
            await _give_up_open(engine, around)
            around.apply(Started(op_id))
            await native.start_native()
        case ApplyUpdate():
            info = info_of(body.info, may_be_list=True)
            await check_stands_still()
            around.apply(Started(op_id))
            await native.update_native(info)
        case FinishUpdate():
            version = next_version(around.state, body)
            await native.finish_native(version)
            weights = WeightsView(state=WeightsState.CLEAN, version=version, last_good=version)
            return WeightsData(weights=weights)
    return None


async def _give_up_open(engine: Engine, around: Surroundings) -> None:
    """Whoever opened it is gone, or says so now; what it brought is torn."""
    if around.state.session is not None:
        await engine.abort_update()
        around.apply(SessionClosed())
