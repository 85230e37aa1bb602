"""What a worker knows of its adapters, and which loads and unloads it refuses. Pure.

Invariants: a name@revision that was ever loaded here stands for one checksum; an adapter that was asked for is in the
state from before the engine is told, and stays, unsettled, until the engine's own list says what became of it; an
answer of the engine that is older than the last change decides nothing.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlbus.schemas import (
    MAX_LORAS,
    SHORT_SUM_CHARS,
    WHOLE,
    Fault,
    FaultCode,
    LoadLora,
    LorasData,
    LoraState,
    LorasView,
    LoraView,
    SleepTag,
    UnloadLora,
    lora_id,
)
from rlbus.workers.checks import asleep_problem, fault
from rlbus.workers.engines.lora import Resident
from rlbus.workers.moves import (
    DrainEnded,
    LoraBegins,
    LoraDrains,
    LoraEvent,
    LoraGone,
    LoraRefused,
    LorasSeen,
    LoraUnsettled,
    RunOwn,
)
from rlbus.workers.state import Adapter, AdapterGone, Running, WorkerState

# Checksums of name@revision that are remembered; one a step, this is the history of a long run.
MAX_KNOWN = 1024
# Adapters in a heartbeat; all are in the answer to `list_loras`.
MAX_STATUS_IDS = 64
# After somebody was refused because of the unload that ends a drain, the next one waits so long for him to ask again,
# in seconds. Source: rlbus.controller.limits.RETRY_S, with room for a slow bus.
GIVE_WAY_S = 2.0
# The name of a folder of rlbus's own copies, see `rlbus.workers.lora_files`.
_SUM = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a load means: nothing (`is_done`), or these older revisions go, or give their place, for it."""

    is_done: bool = False
    replaces: int | None = None
    evicts: tuple[int, ...] = ()


# --- refusals


def check_load(state: WorkerState, body: LoadLora) -> Fault | None:
    """Why this adapter can't be loaded in this state, or None."""
    name = lora_id(body.name, body.revision)
    if problem := _asleep(state, f"loading {name}") or _open_update(state, f"loading {name}"):
        return problem
    if state.weights.state not in WHOLE:
        message = (
            f"weights are {state.weights.state.value}: no adapter is loaded onto them before an update or a reload"
        )
        return fault(FaultCode.DIRTY, message, state=state.weights.state.value, last_good=state.weights.last_good)
    known = known_sum(state, body.name, body.revision)
    if known is not None and known != body.checksum:
        message = f"{name} stands for other bytes here (checksum {known[:12]}); publish them as a new revision"
        return fault(FaultCode.REVISION_TAKEN, message, known=known, checksum=body.checksum)
    return None


def known_sum(state: WorkerState, name: str, revision: int) -> str | None:
    """The checksum that a name@revision stands for here; None: it was never loaded."""
    return next((s for n, r, s in state.known_sums if (n, r) == (name, revision)), None)


def sum_of(state: WorkerState, resident: Resident) -> str | None:
    """The checksum of the bytes that an adapter of the engine was loaded from; None: nobody knows it.

    The folder proves it, which outlives an agent: rlbus's own copies are named by their checksum, and nobody changes
    them. Else it is what this agent has loaded under that name, or one before it.
    """
    if resident.revision is None:
        return None
    if resident.files is not None and _SUM.fullmatch(resident.files):
        return resident.files
    key = (resident.name, resident.revision)
    own = next((adapter.checksum for adapter in state.adapters if adapter.key == key), None)
    return own or known_sum(state, *key) or next((s for n, r, s in state.found_sums if (n, r) == key), None)


def check_unload(state: WorkerState, body: UnloadLora) -> Fault | None:
    """Why this adapter can't be unloaded in this state, or None."""
    what = f"unloading {lora_id(body.name, body.revision)}"
    return _asleep(state, what) or _open_update(state, what)


def _asleep(state: WorkerState, what: str) -> Fault | None:
    """An engine whose weights sleep has given their memory back, and an adapter's with it."""
    asleep = state.asleep & {SleepTag.WEIGHTS}
    return asleep_problem(asleep, what) if asleep else None


def _open_update(state: WorkerState, what: str) -> Fault | None:
    if state.session is None:
        return None
    update = state.session.update_op_id
    message = f"update {update} is open; commit or abort it before {what}"
    return fault(FaultCode.BUSY, message, op_id=update, open=update, retryable=True)


def plan_load(state: WorkerState, body: LoadLora, residents: Sequence[Resident]) -> LoadPlan | Fault:
    """How to make room for an adapter among those that the engine has; a fault if there is none."""
    assert state.lora_info is not None
    info, own = state.lora_info, find(residents, body.name, body.revision)
    if own is not None:
        return _taken(body, sum_of(state, own)) or LoadPlan(is_done=not own.is_draining)
    same = [r for r in residents if r.name == body.name and r.revision is not None]
    older = [r for r in _by_age(state, same) if r.revision is not None and r.revision < body.revision]
    swappable = [r.revision for r in older if r.revision is not None and not r.is_draining]
    if body.hot_swap and info.can_hot_swap and swappable:
        return LoadPlan(replaces=max(swappable))
    num_over = len(residents) + 1 - min(info.capacity, MAX_LORAS)
    if num_over <= 0:
        return LoadPlan()
    idle = tuple(r.revision for r in older if r.revision is not None and r.num_in_flight == 0)
    if body.evict_idle and len(idle) >= num_over:
        return LoadPlan(evicts=idle[:num_over])
    has = ", ".join(sorted(_text(r) for r in residents)[:MAX_STATUS_IDS])
    why = "none of them is an idle older revision" if body.evict_idle else "unload one first, or allow evict_idle"
    message = f"{lora_id(body.name, body.revision)} doesn't fit: all {info.capacity} places are taken ({has}); {why}"
    # Requests end by themselves; of an adapter whose requests nobody counts that can't be told.
    ending = [r for r in residents if r.is_draining or (body.evict_idle and r in older and r.num_in_flight is not None)]
    return fault(FaultCode.NO_CAPACITY, message, retryable=len(ending) >= num_over, capacity=info.capacity, loaded=has)


def _taken(body: LoadLora, has: str | None) -> Fault | None:
    """Why an adapter that is there isn't the one that is to be loaded."""
    name = lora_id(body.name, body.revision)
    if has is None:
        message = f"{name} is there, and not by this agent: nobody knows from which bytes; unload it first"
        return fault(FaultCode.REVISION_TAKEN, message, checksum=body.checksum)
    if has != body.checksum:
        message = f"{name} is there, and not by this agent, with other bytes (checksum {has[:12]}); unload it first"
        return fault(FaultCode.REVISION_TAKEN, message, known=has, checksum=body.checksum)
    return None


def _by_age(state: WorkerState, residents: Sequence[Resident]) -> list[Resident]:
    """In the order in which they were loaded; those that aren't ours first."""
    order = {adapter.key: index for index, adapter in enumerate(state.adapters)}
    return sorted(residents, key=lambda r: (order.get((r.name, r.revision or 0), -1), r.revision or 0))


def find(residents: Sequence[Resident], name: str, revision: int) -> Resident | None:
    """That adapter among those that the engine has."""
    return next((r for r in residents if (r.name, r.revision) == (name, revision)), None)


def adapter_of(body: LoadLora, replaces: int | None) -> Adapter:
    """The adapter that a load is about, before the engine was told."""
    return Adapter(body.name, body.revision, body.checksum, LoraState.UNSETTLED, hot_swap=replaces is not None)


# --- events


def lora_event(state: WorkerState, event: LoraEvent) -> tuple[WorkerState, tuple[RunOwn, ...]]:
    """What an event about adapters makes of the state, and what is to be done."""
    match event:
        case LorasSeen():
            return _seen(state, event), ()
        case DrainEnded():
            return _drain_ended(state, event)
        case LoraBegins():
            return _begins(state, event), ()
        case LoraDrains():
            return _drains(state, event), ()
        case LoraRefused():
            return _refused(state, event.name, event.revision), ()
        case LoraUnsettled():
            return _unsettled(state, event), ()
        case LoraGone():
            key = (event.name, event.revision)
            kept = tuple(a for a in state.adapters if a.key != key)
            found = tuple(k for k in state.found_sums if k[:2] != key)
            gone = AdapterGone(event.name, event.revision, event.num_aborted)
            turn = state.lora_turn + 1
            return replace(state, adapters=kept, found_sums=found, adapter_gone=gone, lora_turn=turn), ()


def _begins(state: WorkerState, event: LoraBegins) -> WorkerState:
    adapter = event.adapter
    before = next((a for a in state.adapters if a.key == adapter.key), adapter)
    kept = tuple(a for a in state.adapters if a.key != adapter.key)
    known = state.known_sums
    is_new = known_sum(state, *adapter.key) is None
    if is_new and adapter.checksum is not None:
        # Also for one that then fails: it may yet be in the engine.
        known = (*known, (*adapter.key, adapter.checksum))[-MAX_KNOWN:]
    adapters = (*kept, replace(adapter, was_loaded=before.was_loaded, is_new=is_new))
    return replace(state, adapters=adapters, known_sums=known, lora_turn=state.lora_turn + 1)


def _refused(state: WorkerState, name: str, revision: int) -> WorkerState:
    """As before: one that was there still is, as the engine will say; one that was not isn't."""
    key = (name, revision)
    is_new = any(a.key == key and a.is_new for a in state.adapters)
    known = tuple(k for k in state.known_sums if not is_new or k[:2] != key)
    kept = tuple(a for a in state.adapters if a.was_loaded or a.key != key)
    return replace(state, adapters=kept, known_sums=known, lora_turn=state.lora_turn + 1)


def _drains(state: WorkerState, event: LoraDrains) -> WorkerState:
    """Also one that an agent before this one has loaded: this one has to end its drain."""
    if all(a.key != (event.name, event.revision) for a in state.adapters):
        found = Adapter(event.name, event.revision, event.checksum, LoraState.DRAINING, was_loaded=True)
        state = replace(state, adapters=(*state.adapters, found))
    return _changed(
        state, event, lambda a: replace(a, state=LoraState.DRAINING, drain_s=event.drain_s, is_unwanted=False)
    )


def _unsettled(state: WorkerState, event: LoraUnsettled) -> WorkerState:
    def change(adapter: Adapter) -> Adapter:
        is_unwanted = adapter.is_unwanted or event.is_unwanted
        return replace(adapter, state=LoraState.UNSETTLED, drain_s=None, is_unwanted=is_unwanted)

    return _changed(state, event, change)


def _changed(
    state: WorkerState, event: LoraDrains | LoraUnsettled, change: Callable[[Adapter], Adapter]
) -> WorkerState:
    key = (event.name, event.revision)
    changed = tuple(change(a) if a.key == key else a for a in state.adapters)
    return replace(state, adapters=changed, lora_turn=state.lora_turn + 1)


def _seen(state: WorkerState, event: LorasSeen) -> WorkerState:
    """The engine's list decides what is there; whether one drains, the engine says, too."""
    if event.turn != state.lora_turn or (is_changing(state) and not event.is_own):
        return state
    seen: list[Adapter] = []
    for adapter in state.adapters:
        resident = find(event.residents, *adapter.key)
        if resident is None:
            continue
        is_draining = resident.is_draining
        drain_s = (0.0 if adapter.drain_s is None else adapter.drain_s) if is_draining else None
        to = LoraState.DRAINING if is_draining else LoraState.LOADED
        seen.append(replace(adapter, state=to, was_loaded=True, is_new=False, drain_s=drain_s))
    found = tuple(k for k in state.found_sums if find(event.residents, *k[:2]) is not None)
    is_same = tuple(seen) == state.adapters and found == state.found_sums
    return state if is_same else replace(state, adapters=tuple(seen), found_sums=found)


def is_changing(state: WorkerState) -> bool:
    """Whether a load or unload is running: only what that one sees counts then."""
    return state.running is not None and isinstance(state.running.body, LoadLora | UnloadLora)


def _drain_ended(state: WorkerState, event: DrainEnded) -> tuple[WorkerState, tuple[RunOwn, ...]]:
    body = UnloadLora(name=event.name, revision=event.revision, drain_s=0.0)
    is_going = any(a.key == (event.name, event.revision) and a.is_going for a in state.adapters)
    is_wanted = state.refused_at is not None and 0 <= event.now - state.refused_at < GIVE_WAY_S
    if state.running is not None or not is_going or is_wanted or check_unload(state, body) is not None:
        return state, ()  # it is looked at again
    running = Running(event.op_id, body, since=event.now, is_own=True)
    return replace(state, running=running), (RunOwn(event.op_id, body),)


# --- what is said


def views(state: WorkerState, residents: Sequence[Resident]) -> tuple[LoraView, ...]:
    """Every adapter that the engine has, and those of which nobody knows yet, in the order of their names."""
    found: list[LoraView] = []
    for resident in residents:
        found.append(
            LoraView(
                name=resident.name,
                state=LoraState.DRAINING if resident.is_draining else LoraState.LOADED,
                revision=resident.revision,
                checksum=sum_of(state, resident),
                num_in_flight=resident.num_in_flight,
            )
        )
    for adapter in state.adapters:
        if adapter.state is LoraState.UNSETTLED and find(residents, *adapter.key) is None:
            found.append(
                LoraView(name=adapter.name, state=adapter.state, revision=adapter.revision, checksum=adapter.checksum)
            )
    found.sort(key=lambda v: (v.name, v.revision or 0))
    return tuple(found[:MAX_LORAS])


def loras_data(
    state: WorkerState,
    residents: Sequence[Resident],
    *,
    hot_swap: bool = False,
    evicted: Sequence[str] = (),
    num_aborted: int = 0,
    cause: Fault | None = None,
) -> LorasData:
    """The answer to a command about adapters."""
    assert state.lora_info is not None
    return LorasData(
        loras=views(state, residents),
        capacity=state.lora_info.capacity,
        hot_swap=hot_swap,
        evicted=tuple(evicted),
        num_aborted=num_aborted,
        cause=cause,
    )


def summary(state: WorkerState, residents: Sequence[Resident] | None) -> LorasView | None:
    """What a heartbeat says of the adapters; None: the engine takes none, or hasn't said."""
    info = state.lora_info
    if info is None or residents is None:
        return None
    served = sorted((r for r in residents if not r.is_draining), key=_text)[:MAX_STATUS_IDS]
    return LorasView(
        ids=tuple(_text(r) for r in served),
        capacity=info.capacity,
        num_draining=sum(r.is_draining for r in residents),
        can_drain=info.can_drain,
        can_hot_swap=info.can_hot_swap,
        sums=tuple((sum_of(state, r) or "")[:SHORT_SUM_CHARS] for r in served),
    )


def _text(resident: Resident) -> str:
    return resident.name if resident.revision is None else lora_id(resident.name, resident.revision)
