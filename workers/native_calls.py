"""The engine calls of an update that somebody else's trainer drives (`rlbus.schemas.native`)."""

from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from rlbus.errors import FaultError
from rlbus.schemas import (
    ApplyUpdate,
    FaultCode,
    FinishUpdate,
    InitTransfer,
    ResultData,
    ShutdownTransfer,
    StartUpdate,
    WeightsData,
    WeightsState,
    WeightsView,
)
from rlbus.workers.checks import fault, next_version
from rlbus.workers.engines.base import Engine, UpdateFailedError
from rlbus.workers.engines.native import ChecksInit, NativeEngine, info_of
from rlbus.workers.moves import Action, Event, SessionClosed, Started
from rlbus.workers.state import WorkerState

NativeCommand = InitTransfer | ShutdownTransfer | StartUpdate | ApplyUpdate | FinishUpdate


# Who serves one of these can tell what its model consists of.
_CHECKED_ROUTES = frozenset({"update_weights_from_distributed", "update_weights_from_disk"})


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
            if isinstance(engine, ChecksInit):
                engine.check_init(info)
            await _give_up_open(engine, around)
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
            _check_heals(engine, around.state)
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


def _check_heals(engine: Engine, state: WorkerState) -> None:
    """Weights that were torn are whole again only if everything came; with unknown ones a part makes a mixture.

    Of an engine that can't tell its model's tensors nothing can be proven: there torn weights stay torn, and unknown
    ones, which may be as whole as any, are what its trainer says.
    Raises: UpdateFailedError: the update is closed, and they are torn.
    """
    assert state.session is not None
    before, tensors = state.session.before, state.session.tensors
    if before.state is WeightsState.CLEAN:
        return
    if before.state is WeightsState.UNKNOWN and not _CHECKED_ROUTES & engine.info.routes:
        return
    try:
        engine.check_manifest(tensors)
    except FaultError as exc:
        message = (
            f"the weights were {before.state.value}, and this update didn't bring all of them ({exc.fault.message}); "
            "send every tensor, with names, dtype_names and shapes, or load a folder"
        )
        why = fault(FaultCode.TRANSFER_FAILED, message, num_tensors=len(tensors))
        raise UpdateFailedError(why, weights_touched=True) from exc
