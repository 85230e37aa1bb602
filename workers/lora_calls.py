"""Loads and unloads of adapters against the engine, and how a call that went wrong is settled by the engine's own list.

Invariants: what the engine has is asked of the engine before and after; nothing is refused any more once something has
gone for the load; a call that raised or didn't come back counts as what the engine's list says, and as unsettled when
the engine doesn't say.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

from rlbus.errors import EngineError, FaultError, error_from_fault
from rlbus.schemas import Fault, FaultCode, LoadLora, LorasData, LoraSource, UnloadLora, lora_id
from rlbus.workers.checks import REFUSALS, fault
from rlbus.workers.engines.base import Engine
from rlbus.workers.engines.lora import LoraEngine, Resident
from rlbus.workers.loras import LoadPlan, adapter_of, find, loras_data, plan_load, sum_of
from rlbus.workers.moves import (
    Action,
    Event,
    LoraBegins,
    LoraDrains,
    LoraGone,
    LoraRefused,
    LorasSeen,
    LoraUnsettled,
    Started,
)
from rlbus.workers.state import WorkerState

_log = logging.getLogger("rlbus.workers")


class Files(Protocol):
    """Where an adapter's files come from, see `rlbus.workers.lora_files`."""

    async def bring(self, source: LoraSource, checksum: str, in_use: frozenset[str]) -> Path:
        """A folder with exactly those files, which nobody changes. Cancel: see there."""
        ...


class Surroundings(Protocol):
    """What a load or unload needs of the agent."""

    @property
    def state(self) -> WorkerState:
        """As it is now."""
        ...

    @property
    def lora_files(self) -> Files:
        """Of this worker."""
        ...

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Feed the state machine."""
        ...

    def accept(self) -> None:
        """Tell who waits that the command was validated and runs."""
        ...


def lora_engine(engine: Engine) -> LoraEngine:
    """The same engine as one that takes adapters; it lists LORA_ROUTES, so it implements that."""
    return cast(LoraEngine, engine)


async def load(engine: LoraEngine, op_id: str, body: LoadLora, around: Surroundings) -> LorasData:
    """Load an adapter, make room for it where that is allowed, and see that the engine has it.

    Raises what the engine raises; RefusedError before anything has changed. Cancel: `settle` follows.
    """
    residents = await engine.list_loras()
    plan = plan_load(around.state, body, residents)
    if isinstance(plan, Fault):
        raise error_from_fault(plan)
    around.accept()
    if plan.is_done:
        if all(a.key != (body.name, body.revision) or a.is_unwanted for a in around.state.adapters):
            # It was given up for lost, and had come all the same; or it was unwanted, and is wanted again.
            around.apply(LoraBegins(adapter_of(body, None)))
        _see(around, residents)
        return loras_data(around.state, residents)
    folder = await around.lora_files.bring(body.source, body.checksum, _in_use(around.state, residents))
    evicted, num_aborted = await _evict(engine, op_id, body.name, plan, around)
    around.apply(LoraBegins(adapter_of(body, plan.replaces), plan.replaces))
    try:
        await engine.load_lora(body.name, body.revision, folder, plan.replaces)
    except FaultError as exc:
        if exc.code in REFUSALS:
            around.apply(LoraRefused(body.name, body.revision))
        raise
    residents = await engine.list_loras()
    _see(around, residents)
    if find(residents, body.name, body.revision) is None:
        name = lora_id(body.name, body.revision)
        raise EngineError(fault(FaultCode.ENGINE_FAILED, f"the engine took {name}, and doesn't list it"))
    hot_swap = plan.replaces is not None
    return loras_data(around.state, residents, hot_swap=hot_swap, evicted=evicted, num_aborted=num_aborted)


def _in_use(state: WorkerState, residents: Sequence[Resident]) -> frozenset[str]:
    """The copies that the engine may read: an agent before this one may have brought them, for an engine that outlived
    it. Of one that doesn't say where it reads, what that agent has noted tells.
    """
    listed = {r.files for r in residents} | {sum_of(state, r) for r in residents}
    return frozenset(name for name in listed.union(a.checksum for a in state.adapters) if name)


async def _evict(
    engine: LoraEngine, op_id: str, name: str, plan: LoadPlan, around: Surroundings
) -> tuple[list[str], int]:
    """Let idle revisions go. One that got a request meanwhile loses it, and that is said."""
    num_aborted = 0
    for revision in plan.evicts:
        around.apply(Started(op_id))
        num_aborted += await _unload(engine, name, revision, around) or 0
    return [lora_id(name, revision) for revision in plan.evicts], num_aborted


async def unload(engine: LoraEngine, body: UnloadLora, around: Surroundings) -> LorasData:
    """Let an adapter go, or begin to drain it. Raises what the engine raises. Cancel: `settle` follows."""
    assert around.state.lora_info is not None
    resident = find(await engine.list_loras(), body.name, body.revision)
    num_aborted: int | None = 0
    if resident is not None and around.state.lora_info.can_drain:
        await engine.drain_lora(body.name, body.revision)
        resident = find(await engine.list_loras(), body.name, body.revision)
        if resident is not None and resident.num_in_flight and body.drain_s > 0:
            known = sum_of(around.state, resident)
            around.apply(LoraDrains(body.name, body.revision, body.drain_s, known))
            return loras_data(around.state, await _look(engine, around))
    if resident is not None:
        num_aborted = await _unload(engine, body.name, body.revision, around)
    residents = await _look(engine, around)
    if find(residents, body.name, body.revision) is not None:
        name = lora_id(body.name, body.revision)
        raise EngineError(fault(FaultCode.ENGINE_FAILED, f"the engine unloaded {name}, and still lists it"))
    return loras_data(around.state, residents, num_aborted=num_aborted or 0)


async def _unload(engine: LoraEngine, name: str, revision: int, around: Surroundings) -> int | None:
    num_aborted = await engine.unload_lora(name, revision)
    if num_aborted:
        _log.warning("unloading %s ended %d requests in flight", lora_id(name, revision), num_aborted)
    around.apply(LoraGone(name, revision, num_aborted))
    return num_aborted


async def _look(engine: LoraEngine, around: Surroundings) -> tuple[Resident, ...]:
    residents = await engine.list_loras()
    _see(around, residents)
    return residents


def _see(around: Surroundings, residents: Sequence[Resident]) -> None:
    around.apply(LorasSeen(tuple(residents), around.state.lora_turn, is_own=True))


async def settle(
    engine: LoraEngine,
    body: LoadLora | UnloadLora,
    cause: Fault,
    state: Callable[[], WorkerState],
    apply: Callable[[Event], object],
    limit_s: float,
) -> tuple[LorasData | None, Fault | None]:
    """What became of a load or unload whose call failed with `cause`: data if what was asked for is done all the same,
    else the fault to report, with detail `settled`.

    Cancel: leaves nothing.
    """
    name = lora_id(body.name, body.revision)
    try:
        async with asyncio.timeout(limit_s):
            residents = await engine.list_loras()
    except Exception as exc:  # noqa: BLE001 - whatever it is, the engine doesn't say; shown as "unsettled"
        _log.warning("what became of %s can't be told, the engine doesn't list its adapters: %s", name, exc)
        apply(unsettled(body))
        return None, _settled(cause, "unknown")
    apply(LorasSeen(residents, state().lora_turn, is_own=True))
    is_there = find(residents, body.name, body.revision) is not None
    if is_there is not isinstance(body, LoadLora):
        return None, _settled(cause, "not done")
    _log.warning("the engine's call failed (%s), and its list says that it is done: %s", cause.message, name)
    return loras_data(state(), residents, cause=cause), None


def unsettled(body: LoadLora | UnloadLora) -> LoraUnsettled:
    """Nobody knows what became of it. An unload is done once the engine says that there is something to unload."""
    return LoraUnsettled(body.name, body.revision, is_unwanted=isinstance(body, UnloadLora))


def _settled(cause: Fault, how: str) -> Fault:
    detail = {**cause.detail, "settled": how}
    return Fault(code=cause.code, message=cause.message, retryable=cause.retryable, detail=detail)
