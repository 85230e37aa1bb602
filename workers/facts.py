"""The facts that a change of a worker's state amounts to. Pure."""

from rlbus.schemas import (
    WHOLE,
    GenerationPaused,
    GenerationResumed,
    PauseView,
    ResumeGeneration,
    SleepChanged,
    WeightsChanged,
    WorkerEvent,
)
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
    return tuple(found)


def _kind(pause: PauseView | None) -> object:
    """A pause without its expiry, which a renewal moves every few seconds; whether it has one counts."""
    return None if pause is None else (pause.owner, pause.mode, pause.since, pause.expires_at is None)


def is_forced(state: WorkerState) -> bool:
    """Whether a resume is running that a person forced over torn weights."""
    body = None if state.running is None else state.running.body
    return isinstance(body, ResumeGeneration) and body.force and state.weights.state not in WHOLE


def is_visible(before: WorkerState, after: WorkerState) -> bool:
    """Whether the change is worth an announcement at once. Which op runs shows in the next heartbeat: ops take
    milliseconds, and an update has ten of them. Not so work that may block the heartbeats: it is declared beforehand.
    """
    return _visible(before) != _visible(after)


def _visible(state: WorkerState) -> object:
    return state.weights, _kind(state.pause), state.epoch, state.asleep, work_of(state.running, 0.0)
