"""The facts that a change of a worker's state amounts to. Pure."""

from typing import Any

from rlbus.schemas import (
    DraftChanged,
    GenerationPaused,
    GenerationResumed,
    LoraDraining,
    LoraLoaded,
    LoraState,
    LoraUnloaded,
    PauseView,
    ResumeGeneration,
    SleepChanged,
    WeightsChanged,
    WorkerEvent,
)
from rlbus.workers.draft import is_whole
from rlbus.workers.leases import is_resuming, work_of
from rlbus.workers.state import WorkerState


def facts(before: WorkerState, after: WorkerState, at: float) -> tuple[WorkerEvent, ...]:
    """Events to publish, in order. The op that they name is the one that was running."""
    op_id = None if before.running is None else before.running.op_id
    who = {"component": after.component, "instance_id": after.instance_id}
    found: list[WorkerEvent] = []
    if after.weights != before.weights:
        weights = after.weights
        found.append(WeightsChanged(**who, at=at, op_id=op_id, state=weights.state, version=weights.version))
    if after.draft is not None and after.draft != before.draft:
        draft = after.draft
        found.append(DraftChanged(**who, at=at, op_id=op_id, state=draft.state, version=draft.version))
    if after.pause is not None and _kind(after.pause) != _kind(before.pause):
        pause = after.pause
        paused = GenerationPaused(
            **who, at=at, op_id=op_id, mode=pause.mode, owner=pause.owner, expires_at=pause.expires_at
        )
        found.append(paused)
    if before.pause is not None and after.pause is None:
        lease_ended = is_resuming(before)
        owner = before.pause.owner
        resumed = GenerationResumed(
            **who, at=at, op_id=op_id, forced=is_forced(before), lease_ended=lease_ended, owner=owner
        )
        found.append(resumed)
    if after.asleep != before.asleep:
        found.append(SleepChanged(**who, at=at, op_id=op_id, asleep=tuple(sorted(after.asleep))))
    if after.adapters != before.adapters:
        found.extend(_about_adapters(before, after, {**who, "at": at, "op_id": op_id}))
    return tuple(found)


def _about_adapters(before: WorkerState, after: WorkerState, common: dict[str, Any]) -> list[WorkerEvent]:
    """One that was never loaded for sure has nothing to tell."""
    found: list[WorkerEvent] = []
    old, new = {a.key: a for a in before.adapters}, {a.key: a for a in after.adapters}
    gone = after.adapter_gone if after.adapter_gone is not before.adapter_gone else None
    for (name, revision), adapter in old.items():
        if adapter.was_loaded and (name, revision) not in new:
            is_told = gone is not None and (gone.name, gone.revision) == (name, revision)
            num_aborted = gone.num_aborted if gone is not None and is_told else None
            found.append(LoraUnloaded(**common, name=name, revision=revision, num_aborted=num_aborted))
    for key, adapter in new.items():
        then = old.get(key)
        # One that is first seen as it goes was loaded by an agent before this one.
        is_found = then is None and adapter.state is LoraState.DRAINING
        if adapter.checksum is not None and adapter.was_loaded and not (is_found or (then and then.was_loaded)):
            found.append(
                LoraLoaded(
                    **common,
                    name=adapter.name,
                    revision=adapter.revision,
                    checksum=adapter.checksum,
                    hot_swap=adapter.hot_swap,
                )
            )
        if adapter.state is LoraState.DRAINING and (then is None or then.state is not LoraState.DRAINING):
            found.append(LoraDraining(**common, name=adapter.name, revision=adapter.revision))
    return found


def _kind(pause: PauseView | None) -> object:
    """A pause without its expiry, which a renewal moves every few seconds; whether it has one counts."""
    return None if pause is None else (pause.owner, pause.mode, pause.since, pause.expires_at is None)


def is_forced(state: WorkerState) -> bool:
    """Whether a resume is running that a person forced over torn weights."""
    body = None if state.running is None else state.running.body
    return isinstance(body, ResumeGeneration) and body.force and not is_whole(state)


def is_visible(before: WorkerState, after: WorkerState) -> bool:
    """Whether the change is worth an announcement at once. Which op runs shows in the next heartbeat: ops take
    milliseconds, and an update has ten of them. Not so work that may block the heartbeats: it is declared beforehand.
    """
    return _visible(before) != _visible(after)


def _visible(state: WorkerState) -> object:
    commanded = state.weights, state.draft, _kind(state.pause), state.epoch, state.asleep, state.adapters
    return state.term, commanded, work_of(state.running, 0.0)
