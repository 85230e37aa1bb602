"""How an unload of adapters on a whole fleet goes on: `decide` takes what happened and says what is to be done. Pure.

One revision after the other: everybody lets it go (requests in flight may keep it for a while, which is no failure),
and who gave no clear answer is asked for its list, which settles it. Nobody is paused, and nothing is taken back: an
adapter that half of the fleet has is one that the next unload finishes, and that nobody is given again by itself.
"""

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from rlbus.controller.answers import StepAnswer
from rlbus.controller.lora_state import Answered, Ask, Blame, Done
from rlbus.schemas import (
    Fault,
    GetLoras,
    LorasData,
    LoraState,
    Outcome,
    UnloadLora,
    WorkerId,
)

# New requests can't name it any more: it has been let go.
DRAINING = LoraState.DRAINING


class Stage(enum.StrEnum):
    """What is awaited."""

    UNLOAD = "unload"
    SETTLE = "settle"


@dataclass(frozen=True, slots=True)
class UnloadPlan:
    """What an unload starts from: one name, and those of its revisions that are to go."""

    name: str
    revisions: tuple[int, ...]
    workers: tuple[WorkerId, ...]
    drain_s: float


@dataclass(frozen=True, slots=True)
class UnloadState:
    """One unload. `place` is the revision that is being unloaded, `gone` those that nobody serves any more, `partly`
    those that somebody has let go, or may have, and others still serve, or may.

    `now` is what went wrong with this one, `blames` what went wrong first on each worker with those before. `data` is
    what its engine said last.
    """

    plan: UnloadPlan
    place: int = 0
    stage: Stage = Stage.UNLOAD
    gone: tuple[int, ...] = ()
    partly: tuple[int, ...] = ()
    now: Mapping[WorkerId, Blame] = field(default_factory=dict)
    blames: Mapping[WorkerId, Blame] = field(default_factory=dict)
    data: Mapping[WorkerId, LorasData] = field(default_factory=dict)
    stop: Fault | None = None

    @property
    def revision(self) -> int:
        """The one that is being unloaded."""
        return self.plan.revisions[self.place]

    @property
    def num_draining(self) -> int:
        """Workers where requests still hold one of them."""
        return sum(
            any(v.name == self.plan.name and v.state is LoraState.DRAINING for v in data.loras)
            for data in self.data.values()
        )


Decision = tuple[UnloadState, Ask | Done]


def begin(plan: UnloadPlan) -> Decision:
    """The first step."""
    return _ask(UnloadState(plan))


def decide(state: UnloadState, event: Answered) -> Decision:
    """One step."""
    if event.stop is not None and state.stop is None:
        state = replace(state, stop=event.stop)
    if state.stage is Stage.UNLOAD:
        return _unloaded(state, event.answers)
    return _settled(state, event.answers)


def _ask(state: UnloadState) -> Decision:
    body = UnloadLora(name=state.plan.name, revision=state.revision, drain_s=state.plan.drain_s)
    ask = Ask("unload", f"unload-{state.revision}", body, state.plan.workers)
    return replace(state, stage=Stage.UNLOAD, now={}), ask


def _unloaded(state: UnloadState, answers: Mapping[WorkerId, StepAnswer]) -> Decision:
    state = _take(state, answers)
    now: dict[WorkerId, Blame] = {}
    for worker, answer in answers.items():
        if not answer.is_ok:
            assert answer.fault is not None
            now[worker] = Blame(answer.outcome, "unload", answer.fault)
    state = replace(state, now=now)
    unclear = tuple(w for w, blame in now.items() if blame.outcome is not Outcome.REFUSED)
    if not unclear:
        return _next(state)
    ask = Ask("unload", f"settle-{state.revision}", GetLoras(), unclear, is_final=True)
    return replace(state, stage=Stage.SETTLE), ask


def _settled(state: UnloadState, answers: Mapping[WorkerId, StepAnswer]) -> Decision:
    state = _take(state, answers)
    listed = {w: a.data for w, a in answers.items() if isinstance(a.data, LorasData)}
    there = {w: found for w, data in listed.items() if (found := _state_of(state, data)) not in (None, DRAINING)}
    now = {w: blame for w, blame in state.now.items() if w in there or w not in listed}
    return _next(replace(state, now=now), {w for w, found in there.items() if found is LoraState.LOADED})


def _next(state: UnloadState, still: Collection[WorkerId] = ()) -> Decision:
    """`still`: who is known to serve it as before, besides those that refused."""
    kept = {w for w, blame in state.now.items() if blame.outcome is Outcome.REFUSED or w in still}
    if not state.now:
        state = replace(state, gone=(*state.gone, state.revision))
    elif not kept.issuperset(state.plan.workers):
        state = replace(state, partly=(*state.partly, state.revision))
    state = replace(state, blames={**state.now, **state.blames})
    if state.stop is not None or state.place + 1 == len(state.plan.revisions):
        return state, Done()
    return _ask(replace(state, place=state.place + 1))


def _take(state: UnloadState, answers: Mapping[WorkerId, StepAnswer]) -> UnloadState:
    said = {w: a.data for w, a in answers.items() if isinstance(a.data, LorasData)}
    return replace(state, data={**state.data, **said})


def _state_of(state: UnloadState, data: LorasData) -> LoraState | None:
    """What that engine does with it; None: it hasn't got it."""
    wanted = (state.plan.name, state.revision)
    return next((v.state for v in data.loras if (v.name, v.revision) == wanted), None)
