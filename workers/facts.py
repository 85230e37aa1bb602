"""The facts that a change of a worker's state amounts to. Pure."""

from rlbus.schemas import (
    GenerationPaused,
    GenerationResumed,
    ResumeGeneration,
    WeightsChanged,
    WeightsState,
    WorkerEvent,
)
from rlbus.workers.state import WorkerState


def facts(before: WorkerState, after: WorkerState, at: float) -> tuple[WorkerEvent, ...]:
    """Events to publish, in order. The op that they name is the one that was running."""
    op_id = None if before.running is None else before.running.op_id
    who = {"component": after.component, "instance_id": after.instance_id}
    found: list[WorkerEvent] = []
    if after.weights != before.weights:
        weights = after.weights
        found.append(WeightsChanged(**who, at=at, op_id=op_id, state=weights.state, version=weights.version))
    if after.pause is not None and after.pause != before.pause:
        found.append(GenerationPaused(**who, at=at, op_id=op_id, mode=after.pause.mode, owner=after.pause.owner))
    if before.pause is not None and after.pause is None:
        found.append(GenerationResumed(**who, at=at, op_id=op_id, forced=is_forced(before)))
    return tuple(found)


def is_forced(state: WorkerState) -> bool:
    """Whether a resume is running that a person forced over weights that aren't clean."""
    body = None if state.running is None else state.running.body
    return isinstance(body, ResumeGeneration) and body.force and state.weights.state is not WeightsState.CLEAN


def is_visible(before: WorkerState, after: WorkerState) -> bool:
    """Whether the change is worth an announcement at once. Which op runs shows in the next heartbeat: ops take
    milliseconds, and an update has ten of them.
    """
    return (before.weights, before.pause, before.epoch) != (after.weights, after.pause, after.epoch)
