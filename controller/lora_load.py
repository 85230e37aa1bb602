"""How a load of an adapter on a whole fleet goes on: `decide` takes what happened and says what is to be done. Pure.

check (each engine's own list: capacity, revision) -> pause all -> load on all -> settle (who gave no clear answer is
asked for its list) -> show (every list, then the frontend) -> resume. Whatever goes wrong before all show it: it is
unloaded again where it was loaded, what had to go for it is given back, and everybody is let go. A hot swap pauses
nobody. A catch-up pauses nobody either, and what one worker fails costs the others nothing.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec

from rlbus.controller.answers import StepAnswer
from rlbus.controller.causes import fault
from rlbus.controller.lora_state import (
    Answered,
    Ask,
    Began,
    Blame,
    Done,
    Has,
    LoadAction,
    LoadEvent,
    LoadPlan,
    LoadState,
    Seat,
    Stage,
    Wait,
    Waited,
    Watch,
    Watched,
    loaded_ids,
    shows,
)
from rlbus.schemas import (
    Fault,
    FaultCode,
    GetLoras,
    LoadLora,
    LorasData,
    LoraState,
    LoraView,
    Outcome,
    PauseGeneration,
    ResumeGeneration,
    UnloadLora,
    WorkerId,
    split_lora_id,
)

# Between two looks at lists that don't show the adapter yet, in seconds.
LOOK_AGAIN_S = 0.25

Decision = tuple[LoadState, LoadAction]


def initial(plan: LoadPlan) -> LoadState:
    """Before anybody was asked."""
    return LoadState(plan, Stage.CHECK, {w: Seat(w) for w in plan.workers})


def decide(state: LoadState, event: LoadEvent) -> Decision:
    """One step."""
    if isinstance(event, Began):
        return state, Ask(Stage.CHECK, Stage.CHECK, GetLoras(), state.plan.workers)
    # What the frontend said last says more than that there is no time left.
    problem = event.problem if isinstance(event, Watched) else None
    if state.stop is None and not state.is_committed:
        state = replace(state, stop=problem or event.stop)
    match event:
        case Answered(answers=answers):
            return _ANSWERED[state.stage](replace(state, is_late=event.is_late), answers)
        case Waited():
            return _undo(state) if state.causes else _look(state)
        case Watched():
            return _undo(state) if state.causes else _commit(state)


# -- before anything changes ------------------------------------------------------------------------------------------


def _checked(state: LoadState, answers: Any) -> Decision:
    plan = state.plan
    for worker, answer in answers.items():
        data = answer.data
        if not answer.is_ok or not isinstance(data, LorasData):
            state = _blame(state, worker, answer)
            continue
        view = _view_of(plan, data)
        problem = place_problem(plan, worker, data)
        if problem is not None:
            state = _blame(state, worker, StepAnswer(Outcome.REFUSED, problem))
        had = view is not None and shows(data, plan.name, plan.revision, plan.checksum)
        has, drains = Has.YES if had else Has.NO, view is not None and view.state is LoraState.DRAINING
        before = loaded_ids(data)
        state = _change(state, [worker], data=data, before=before, had=had, has=has, was_draining=drains)
    # What one worker refuses costs the others of a catch-up nothing; whatever stops it stops it before its load.
    if state.causes and (state.stop is not None or not plan.is_catch_up or not _lacking(state)):
        return replace(state, stage=Stage.DONE, failed_in=Stage.CHECK), Done()
    to_pause = tuple(w for w in plan.workers if w not in plan.held)
    if not _lacking(state) or plan.is_hot_swap or plan.is_catch_up or not to_pause:
        return _load(state)
    body = PauseGeneration(mode=plan.pause_mode, clear_cache=False, owner=plan.owner, lease_s=plan.lease_s)
    return replace(state, stage=Stage.PAUSE), Ask(Stage.PAUSE, Stage.PAUSE, body, to_pause)


def place_problem(plan: LoadPlan, worker: WorkerId, data: LorasData) -> Fault | None:
    """Why this engine can't take the adapter, by its own list; None: it can, as far as that tells.

    Idle older revisions of the name count as room if they may be evicted, the newest one if it is swapped.
    """
    view = _view_of(plan, data)
    if view is not None:
        if view.checksum == plan.checksum:
            return None
        whose = (
            "other bytes" if view.checksum is not None else "bytes that nobody there knows (not loaded by its agent)"
        )
        message = f"{worker} has {plan.id} with {whose}: unload it there, or take another revision"
        return fault(FaultCode.REVISION_TAKEN, message, worker=worker, lora=plan.id)
    if len(data.loras) < data.capacity:
        return None
    older = [v for v in data.loras if v.name == plan.name and v.revision is not None and v.revision < plan.revision]
    idle = [v for v in older if v.num_in_flight == 0 or v.state is LoraState.DRAINING]
    if (plan.evict_idle and idle) or (plan.is_hot_swap and older):
        return None
    listed = ", ".join(v.name if v.revision is None else f"{v.name}@{v.revision}" for v in data.loras)
    message = (
        f"{worker} has room for {data.capacity} adapters and has {listed}; unload one, or let idle ones be evicted"
    )
    # Requests end by themselves; of an adapter whose requests nobody counts that can't be told.
    busy = [v for v in older if plan.evict_idle and v.num_in_flight]
    passes = bool(busy) or any(v.state is LoraState.DRAINING for v in data.loras)
    return fault(FaultCode.NO_CAPACITY, message, retryable=passes, worker=worker, capacity=data.capacity)


def _paused(state: LoadState, answers: Any) -> Decision:
    for worker, answer in answers.items():
        if answer.outcome in (Outcome.OK, Outcome.UNKNOWN):  # may be paused: let go with the others
            state = _change(state, [worker], is_held=True, was_touched=True)
        if not answer.is_ok:
            state = _blame(state, worker, answer)
    return _undo(state) if state.causes else _load(state)


# -- the load ---------------------------------------------------------------------------------------------------------


def _load(state: LoadState) -> Decision:
    plan, lacking = state.plan, _lacking(state)
    if not lacking:
        return _show(state)
    body = LoadLora(
        name=plan.name,
        revision=plan.revision,
        checksum=plan.checksum,
        source=plan.source,
        hot_swap=plan.is_hot_swap,
        evict_idle=plan.evict_idle,
    )
    return replace(state, stage=Stage.LOAD), Ask(Stage.LOAD, Stage.LOAD, body, lacking)


def _loaded(state: LoadState, answers: Any) -> Decision:
    for worker, answer in answers.items():
        if answer.is_ok:
            data = answer.data if isinstance(answer.data, LorasData) else None
            state = _change(state, [worker], has=Has.YES, was_touched=True, data=data)
            continue
        state = _blame(state, worker, answer)
        if answer.outcome is not Outcome.REFUSED:
            state = _change(state, [worker], has=Has.MAYBE, was_touched=True)
    unclear = _of(state, Has.MAYBE)
    if unclear:
        return replace(state, stage=Stage.SETTLE), Ask(Stage.LOAD, Stage.SETTLE, GetLoras(), unclear, is_final=True)
    return _judge(state)


def _settled(state: LoadState, answers: Any) -> Decision:
    """The engine's own list says what became of a load that nobody heard the end of, or that went wrong."""
    plan = state.plan
    for worker, answer in answers.items():
        if not answer.is_ok or not isinstance(answer.data, LorasData):
            continue
        seat = state.seats[worker]
        assert seat.blame is not None
        if shows(answer.data, plan.name, plan.revision, plan.checksum):
            data = replace_cause(answer.data, seat.blame.fault)
            state = _change(state, [worker], has=Has.YES, data=data, blame=None)
        elif seat.blame.outcome is Outcome.FAILED and _view_of(plan, answer.data) is None:
            state = _change(state, [worker], has=Has.NO, data=answer.data)
    return _judge(state)


def replace_cause(data: LorasData, cause: Fault) -> LorasData:
    """What the engine has, and what went wrong on the way there."""
    return LorasData(
        loras=data.loras, capacity=data.capacity, hot_swap=data.hot_swap, evicted=data.evicted, cause=cause
    )


def _judge(state: LoadState) -> Decision:
    """Everybody has it, or nobody keeps it; after a catch-up, whoever has it: the fleet has it anyway."""
    if state.plan.is_catch_up:
        state = replace(state, is_committed=bool(_of(state, Has.YES)))
        return _undo(state) if _of(state, Has.MAYBE) else (replace(state, stage=Stage.DONE), Done())
    return _undo(state) if state.causes else _show(state)


# -- until all show it ------------------------------------------------------------------------------------------------


def _show(state: LoadState) -> Decision:
    if state.causes:
        return _undo(state)
    if not _hidden(state):
        return (replace(state, stage=Stage.FRONTEND), Watch(state.plan.id)) if _is_watched(state) else _commit(state)
    if state.stage is Stage.SHOW:
        return state, Wait(LOOK_AGAIN_S)
    return _look(state)


def _look(state: LoadState) -> Decision:
    state = replace(state, stage=Stage.SHOW, num_looks=state.num_looks + 1)
    return state, Ask(Stage.SHOW, f"{Stage.SHOW}-{state.num_looks}", GetLoras(), _hidden(state))


def _shown(state: LoadState, answers: Any) -> Decision:
    for worker, answer in answers.items():
        if answer.is_ok and isinstance(answer.data, LorasData):
            state = _change(state, [worker], data=answer.data)
    return _show(state)


def _is_watched(state: LoadState) -> bool:
    return state.plan.has_frontend and not state.plan.is_catch_up


def _hidden(state: LoadState) -> tuple[WorkerId, ...]:
    """Workers whose list doesn't show it yet."""
    plan = state.plan
    return tuple(w for w, s in state.seats.items() if not shows(s.data, plan.name, plan.revision, plan.checksum))


def _commit(state: LoadState) -> Decision:
    return _resume(replace(state, is_committed=True))


# -- back to what was -------------------------------------------------------------------------------------------------


def _undo(state: LoadState) -> Decision:
    """Unload it where this op has loaded it, or may have."""
    plan = state.plan
    state = replace(state, failed_in=str(state.stage if state.stage is not Stage.SETTLE else Stage.LOAD))
    kept = (Has.NO, Has.YES) if plan.is_catch_up else (Has.NO,)
    to_unload = tuple(w for w, s in state.seats.items() if s.has not in kept and not s.had)
    return _unload(replace(state, to_unload=to_unload))


def _unload(state: LoadState) -> Decision:
    """Those at once where nobody can be at work with it; then those where requests in flight are to end by themselves:
    a hot swap has moved them to it, or it was draining before, so they were promised their time.
    """
    plan = state.plan
    drained = tuple(w for w in state.to_unload if plan.is_hot_swap or state.seats[w].was_draining)
    at_once = tuple(w for w in state.to_unload if w not in drained)
    if not state.to_unload:
        return _give_back(state)
    body, step = UnloadLora(name=plan.name, revision=plan.revision, drain_s=0.0), str(Stage.UNLOAD)
    if not at_once:
        body, step = UnloadLora(name=plan.name, revision=plan.revision), f"{Stage.UNLOAD}-drain"
    ask = Ask("undo", step, body, at_once or drained, is_final=True, until_free=True)
    return replace(state, stage=Stage.UNLOAD, to_unload=drained if at_once else ()), ask


def _unloaded(state: LoadState, answers: Any) -> Decision:
    for worker, answer in answers.items():
        if not answer.is_ok:
            state = _blame(state, worker, answer, "undo")
            continue
        data = answer.data if isinstance(answer.data, LorasData) else state.seats[worker].data
        state = _change(state, [worker], has=Has.NO, data=data)
    return _unload(state)


def _give_back(state: LoadState) -> Decision:
    """What had to go for it, wherever it isn't any more: also where it never was, since its engine failed after it had
    made room.
    """
    lost: dict[str, list[WorkerId]] = {}
    for worker, seat in state.seats.items():
        if seat.data is not None and seat.was_touched and seat.has is Has.NO:
            for gone in sorted(seat.before - loaded_ids(seat.data) - {state.plan.id}):
                lost.setdefault(gone, []).append(worker)
    known = {i: tuple(workers) for i, workers in sorted(lost.items()) if i in state.plan.kept}
    for gone in sorted(set(lost) - set(known)):
        message = f"{gone} had to go for {state.plan.id}, and nobody knows where it came from: load it again"
        state = _without(state, lost[gone], fault(FaultCode.WRONG_STATE, message))
    return _restore(replace(state, to_restore=tuple(known.items())))


def _restore(state: LoadState) -> Decision:
    """Give back what had to go for it, one adapter after the other."""
    if state.is_late:
        state = _left_to_catch_up(state)
    if not state.to_restore:
        return _resume(state)
    (gone, workers), rest = state.to_restore[0], state.to_restore[1:]
    kept = state.plan.kept[gone]
    body = LoadLora(name=kept.name, revision=kept.revision, checksum=kept.checksum, source=kept.source)
    parts = split_lora_id(gone)
    assert parts is not None
    ask = Ask("undo", f"{Stage.RESTORE}-{len(rest)}", body, workers, is_final=True, until_free=True)
    return replace(state, stage=Stage.RESTORE, to_restore=rest, restoring=gone), ask


def _left_to_catch_up(state: LoadState) -> LoadState:
    """An engine that hung has used up the time. A worker that stays paused is worse than one that lacks an adapter."""
    for gone, workers in state.to_restore:
        message = f"{gone} had to go for {state.plan.id}, and there was no time to give it back: a catch-up does"
        state = _without(state, workers, fault(FaultCode.DEADLINE, message))
    return replace(state, to_restore=())


def _restored(state: LoadState, answers: Any) -> Decision:
    for worker, answer in answers.items():
        if answer.is_ok:
            continue
        assert answer.fault is not None
        text = f"{state.restoring} had to go for {state.plan.id}, and a catch-up gives it back: {answer.fault.message}"
        state = _without(state, [worker], msgspec.structs.replace(answer.fault, message=text))
    return _restore(state)


def _resume(state: LoadState) -> Decision:
    held = tuple(w for w, s in state.seats.items() if s.is_held)
    if not held:
        return replace(state, stage=Stage.DONE), Done()
    phase = Stage.RESUME if state.is_committed else "undo"
    ask = Ask(phase, Stage.RESUME, ResumeGeneration(), held, is_final=True, until_free=True)
    return replace(state, stage=Stage.RESUME), ask


def _resumed(state: LoadState, answers: Any) -> Decision:
    for worker, answer in answers.items():
        if answer.is_ok:
            state = _change(state, [worker], is_held=False)
        else:  # worse than whatever was the matter with it before: it stays paused
            state = _change(state, [worker], blame=None)
            phase = str(Stage.RESUME) if state.is_committed else "undo"
            state = _blame(state, worker, StepAnswer(Outcome.FAILED, answer.fault), phase)
    return replace(state, stage=Stage.DONE), Done()


_ANSWERED = {
    Stage.CHECK: _checked,
    Stage.PAUSE: _paused,
    Stage.LOAD: _loaded,
    Stage.SETTLE: _settled,
    Stage.SHOW: _shown,
    Stage.UNLOAD: _unloaded,
    Stage.RESTORE: _restored,
    Stage.RESUME: _resumed,
}


# -- seats ------------------------------------------------------------------------------------------------------------


def _change(state: LoadState, workers: Iterable[WorkerId], **fields: Any) -> LoadState:
    seats = dict(state.seats)
    for worker in workers:
        seats[worker] = replace(seats[worker], **fields)
    return replace(state, seats=seats)


def _blame(state: LoadState, worker: WorkerId, answer: StepAnswer, phase: str | None = None) -> LoadState:
    """Take down what went wrong, unless something did before."""
    if state.seats[worker].blame is not None and phase is None:
        return state
    why = answer.fault or fault(FaultCode.BAD_MESSAGE, "it answered with something else than its adapters")
    outcome = Outcome.FAILED if answer.is_ok else answer.outcome
    if phase is not None and outcome is Outcome.REFUSED:  # something of this op is left on it
        outcome = Outcome.FAILED
    return _change(state, [worker], blame=Blame(outcome, str(state.stage) if phase is None else phase, why))


def _without(state: LoadState, workers: Iterable[WorkerId], why: Fault) -> LoadState:
    """They lack what they had before, besides whatever went wrong on them first."""
    for worker in workers:
        first = state.seats[worker].blame
        both = why
        if first is not None:
            both = msgspec.structs.replace(first.fault, message=f"{first.fault.message}; {why.message}")
        state = _change(state, [worker], blame=Blame(Outcome.FAILED, "undo" if first is None else first.phase, both))
    return state


def _of(state: LoadState, has: Has) -> tuple[WorkerId, ...]:
    return tuple(w for w, s in state.seats.items() if s.has is has)


def _lacking(state: LoadState) -> tuple[WorkerId, ...]:
    return tuple(w for w, s in state.seats.items() if s.has is Has.NO and s.blame is None)


def _view_of(plan: LoadPlan, data: LorasData) -> LoraView | None:
    return next((v for v in data.loras if v.name == plan.name and v.revision == plan.revision), None)
