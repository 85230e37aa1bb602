"""What is decided in a load of an adapter, without any I/O: against workers that fail, lie and go silent by seed."""

import random
from dataclasses import dataclass, field

import pytest

from rlbus.controller.answers import StepAnswer
from rlbus.controller.causes import fault
from rlbus.controller.lora_load import decide, initial, place_problem
from rlbus.controller.lora_run import outcome_of
from rlbus.controller.lora_state import (
    Answered,
    Ask,
    Began,
    Done,
    Kept,
    LoadAction,
    LoadEvent,
    LoadPlan,
    LoadState,
    Wait,
    Waited,
    Watch,
    Watched,
)
from rlbus.schemas import (
    FaultCode,
    FolderSource,
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
    lora_id,
)

pytestmark = pytest.mark.unit

SUM, OLD_SUM = "1" * 64, "0" * 64
SOURCE = FolderSource(path="/a")
WORKERS = (WorkerId("backend/1"), WorkerId("backend/2"), WorkerId("backend/3"))
# A load that isn't decided after so many steps goes round in circles.
MAX_STEPS = 60


def plan_of(**changes: object) -> LoadPlan:
    values = {
        "name": "policy",
        "revision": 7,
        "checksum": SUM,
        "source": SOURCE,
        "workers": WORKERS,
        "owner": "op-pause",
        "lease_s": 30.0,
        "kept": {"policy@6": Kept("policy", 6, OLD_SUM, SOURCE)},
    }
    return LoadPlan(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class FakeWorker:
    """What one worker really has and does. `trouble`: how likely each answer is a bad one."""

    dice: random.Random
    trouble: float
    capacity: int = 2
    sums: dict[str, str] = field(default_factory=lambda: {"policy@6": OLD_SUM})
    is_paused: bool = False
    # A load that nobody heard the end of, and that still runs; the unload after it waits for it.
    late: Ask | None = None

    def data(self) -> LorasData:
        views = tuple(
            LoraView(name="policy", state=LoraState.LOADED, revision=int(i[7:]), checksum=c, num_in_flight=0)
            for i, c in sorted(self.sums.items())
        )
        return LorasData(loras=views, capacity=self.capacity)

    def answer(self, ask: Ask) -> StepAnswer:
        """Ok; or refused and not done, or failed, or silence, and then done or not."""
        is_bad = self.dice.random() < self.trouble and (not ask.is_final or isinstance(ask.body, GetLoras))
        if self.late is not None and isinstance(ask.body, UnloadLora):
            self.do(self.late)
        if is_bad and self.dice.random() < 0.4:
            return StepAnswer(Outcome.REFUSED, fault(FaultCode.WRONG_STATE, "scripted refusal"))
        outcome = self.dice.choice([Outcome.FAILED, Outcome.UNKNOWN])
        is_taken_back = outcome is Outcome.FAILED and isinstance(ask.body, PauseGeneration)  # by its agent
        if not is_bad or (self.dice.random() < 0.5 and not is_taken_back):
            self.do(ask)
        elif outcome is Outcome.UNKNOWN and isinstance(ask.body, LoadLora):
            self.late = ask
        if not is_bad:
            return StepAnswer(Outcome.OK, None, self.data())
        return StepAnswer(outcome, fault(FaultCode.ENGINE_FAILED, "scripted failure"))

    def do(self, ask: Ask) -> None:
        body = ask.body
        match body:
            case PauseGeneration():
                self.is_paused = True
            case ResumeGeneration():
                self.is_paused = False
            case LoadLora():
                if body.hot_swap:
                    self.sums.pop("policy@6", None)
                if len(self.sums) >= self.capacity and body.evict_idle:
                    self.sums.pop("policy@6", None)
                self.sums[lora_id(body.name, body.revision)] = body.checksum
            case UnloadLora():
                self.sums.pop(lora_id(body.name, body.revision), None)


def played(state: LoadState, workers: dict[WorkerId, FakeWorker], dice: random.Random, stop_at: int) -> LoadState:
    """Play it to its end; somebody takes it back at step `stop_at`."""
    stop = None
    state, action = decide(state, Began())
    for number in range(MAX_STEPS):
        if isinstance(action, Done):
            return state
        if number == stop_at:
            stop = fault(FaultCode.CANCELLED, "taken back")
        event = _event(action, workers, dice, stop)
        state, action = decide(state, event)
    raise AssertionError(f"not decided after {MAX_STEPS} steps: {state.stage}")


def _event(action: LoadAction, workers: dict[WorkerId, FakeWorker], dice: random.Random, stop: object) -> LoadEvent:
    match action:
        case Ask():
            return Answered({w: workers[w].answer(action) for w in action.workers}, stop)  # type: ignore[arg-type]
        case Wait():
            return Waited(stop)  # type: ignore[arg-type]
        case Watch():
            hidden = fault(FaultCode.DEADLINE, "not shown") if dice.random() < 0.3 else None
            return Watched(hidden, stop)  # type: ignore[arg-type]
        case Done():
            raise AssertionError("it is done")


@pytest.mark.parametrize("is_hot_swap", [False, True])
@pytest.mark.parametrize("evict_idle", [False, True])
def test_whatever_happens_all_have_it_or_nobody_and_nobody_stays_paused(is_hot_swap: bool, evict_idle: bool) -> None:
    """500 loads by seed: refusals, failures before and after the deed, silence, a frontend, a person who cancels."""
    ends: set[bool] = set()
    for seed in range(500):
        dice = random.Random(seed)
        workers = {w: FakeWorker(dice, trouble=dice.choice([0.0, 0.1, 0.4])) for w in WORKERS}
        if evict_idle:
            workers[WORKERS[0]].capacity = 1
        held = frozenset(WORKERS[2:] if seed % 3 == 0 else ())
        for worker in held:
            workers[worker].is_paused = True
        plan = plan_of(is_hot_swap=is_hot_swap, evict_idle=evict_idle, held=held, has_frontend=seed % 2 == 0)
        state = played(initial(plan), workers, dice, stop_at=dice.choice([0, 1, 2, 3, 99, 99, 99]))
        has_it = {"policy@7" in worker.sums for worker in workers.values()}
        assert has_it == {state.is_committed}, f"seed {seed}"
        assert {w for w, one in workers.items() if one.is_paused} == held, f"seed {seed}"
        if not state.is_committed:
            assert all("policy@6" in worker.sums for worker in workers.values()), f"seed {seed}: not given back"
            assert state.causes, f"seed {seed}"
        found = {outcome_of(state, seat).outcome for seat in state.seats.values()}
        assert (found == {Outcome.OK}) == state.is_committed, f"seed {seed}: {found}"
        ends.add(state.is_committed)
    assert ends == {True, False}


def test_who_had_it_before_never_loses_it() -> None:
    """The same load again, which fails on another worker: nothing is taken from who had it."""
    for seed in range(200):
        dice = random.Random(seed)
        workers = {w: FakeWorker(dice, trouble=0.3, capacity=3) for w in WORKERS}
        workers[WORKERS[0]].sums["policy@7"] = SUM
        played(initial(plan_of()), workers, dice, stop_at=99)
        assert workers[WORKERS[0]].sums["policy@7"] == SUM, f"seed {seed}"


def test_a_catch_up_pauses_nobody_and_one_failure_costs_the_others_nothing() -> None:
    """Whoever took it has it."""
    for seed in range(200):
        dice = random.Random(seed)
        workers = {w: FakeWorker(dice, trouble=0.0) for w in WORKERS}
        workers[WORKERS[1]].trouble = 1.0
        state = played(initial(plan_of(is_catch_up=True, has_frontend=True)), workers, dice, stop_at=99)
        for number in (0, 2):
            assert workers[WORKERS[number]].sums["policy@7"] == SUM, f"seed {seed}"
            assert outcome_of(state, state.seats[WORKERS[number]]).outcome is Outcome.OK
        assert not any(worker.is_paused for worker in workers.values())


def test_a_catch_up_that_gives_way_takes_nothing_back_and_waits_for_who_still_loads() -> None:
    """Another op takes its place: who has it keeps it, who still loads is waited for, so that it isn't busy then."""
    state, action = decide(initial(plan_of(is_catch_up=True)), Began())
    full, empty = (FakeWorker(random.Random(0), 0.0, sums=sums).data() for sums in ({"policy@7": SUM}, {}))
    state, action = decide(state, Answered({w: StepAnswer(Outcome.OK, None, empty) for w in WORKERS}))
    stop = fault(FaultCode.CANCELLED, "op 9 takes its place")
    answers = dict.fromkeys(WORKERS, StepAnswer(Outcome.UNKNOWN, stop))
    answers[WORKERS[0]] = StepAnswer(Outcome.OK, None, full)
    state, action = decide(state, Answered(answers, stop))
    assert isinstance(action, Ask)
    assert isinstance(action.body, GetLoras)
    settled = dict(zip(WORKERS[1:], (full, empty), strict=True))
    state, action = decide(state, Answered({w: StepAnswer(Outcome.OK, None, d) for w, d in settled.items()}, stop))
    assert isinstance(action, Ask)
    assert isinstance(action.body, UnloadLora)
    assert (action.workers, action.until_free) == (WORKERS[2:], True)
    state, action = decide(state, Answered({WORKERS[2]: StepAnswer(Outcome.OK, None, empty)}, stop))
    assert isinstance(action, Done)
    found = [outcome_of(state, state.seats[w]).outcome for w in WORKERS]
    assert found == [Outcome.OK, Outcome.OK, Outcome.UNKNOWN]


def test_a_catch_up_that_gives_way_before_its_load_sends_none() -> None:
    """Another op takes its place while the engines' lists are read: it must not find them busy with a load."""
    state, _ = decide(initial(plan_of(is_catch_up=True)), Began())
    empty = FakeWorker(random.Random(0), 0.0, sums={}).data()
    stop = fault(FaultCode.CANCELLED, "op 9 takes its place")
    state, action = decide(state, Answered({w: StepAnswer(Outcome.OK, None, empty) for w in WORKERS}, stop))
    assert isinstance(action, Done)
    assert state.causes == (stop,)
    assert {outcome_of(state, state.seats[w]).outcome for w in WORKERS} == {Outcome.SKIPPED}


def test_a_list_that_shows_it_late_is_looked_at_again() -> None:
    """Nobody is let go before every engine's own list has it."""
    state, action = decide(initial(plan_of()), Began())
    empty, full = LorasData(loras=(), capacity=2), FakeWorker(random.Random(0), 0.0, sums={"policy@7": SUM}).data()
    num_looks = 0
    while not isinstance(action, Done):
        if isinstance(action, Wait):
            state, action = decide(state, Waited())
            continue
        assert isinstance(action, Ask)
        num_looks += isinstance(action.body, GetLoras)
        data = full if num_looks > 4 else empty
        state, action = decide(state, Answered({w: StepAnswer(Outcome.OK, None, data) for w in action.workers}))
    assert state.is_committed
    assert num_looks == 5


def test_room_is_judged_by_the_engines_own_list() -> None:
    """A taken revision, a full engine, idle ones that may go, and one that only drains."""
    worker = WORKERS[0]

    def problem(*views: LoraView, capacity: int = 1, **changes: object) -> FaultCode | None:
        found = place_problem(plan_of(**changes), worker, LorasData(loras=views, capacity=capacity))
        return None if found is None else found.code

    def view(
        revision: int, num_in_flight: int | None = 0, checksum: str | None = OLD_SUM, name: str = "policy"
    ) -> LoraView:
        return LoraView(
            name=name, state=LoraState.LOADED, revision=revision, checksum=checksum, num_in_flight=num_in_flight
        )

    assert problem() is None
    assert problem(view(7, checksum=SUM)) is None
    assert problem(view(7)) is FaultCode.REVISION_TAKEN
    assert problem(view(7, checksum=None)) is FaultCode.REVISION_TAKEN, "it may be that of an earlier run"
    assert problem(view(6)) is FaultCode.NO_CAPACITY
    assert problem(view(6), evict_idle=True) is None
    assert problem(view(6, num_in_flight=2), evict_idle=True) is FaultCode.NO_CAPACITY
    assert problem(view(6, num_in_flight=None), evict_idle=True) is FaultCode.NO_CAPACITY
    assert problem(view(8), evict_idle=True) is FaultCode.NO_CAPACITY
    assert problem(view(1, name="judge"), evict_idle=True) is FaultCode.NO_CAPACITY
    assert problem(view(6, num_in_flight=2), is_hot_swap=True) is None


def test_no_room_passes_by_itself_where_only_requests_in_flight_keep_it() -> None:
    """An older revision that would go once it is idle, and whatever is being unloaded; nothing else."""

    def passes(*views: LoraView, **changes: object) -> bool:
        found = place_problem(plan_of(**changes), WORKERS[0], LorasData(loras=views, capacity=1))
        assert found is not None
        assert found.code is FaultCode.NO_CAPACITY
        return found.retryable

    def view(revision: int, num_in_flight: int | None, name: str = "policy", is_draining: bool = False) -> LoraView:
        state = LoraState.DRAINING if is_draining else LoraState.LOADED
        return LoraView(name=name, state=state, revision=revision, checksum=OLD_SUM, num_in_flight=num_in_flight)

    assert passes(view(6, 2), evict_idle=True)
    assert passes(view(1, 2, "judge", is_draining=True))
    assert not passes(view(6, 2))
    assert not passes(view(6, None), evict_idle=True)
    assert not passes(view(8, 2), evict_idle=True)
    assert not passes(view(1, 2, "judge"), evict_idle=True)


@pytest.mark.parametrize("is_catch_up", [False, True])
def test_an_adapter_of_bytes_that_nobody_knows_is_no_proof_of_a_load(is_catch_up: bool) -> None:
    """Its name is that of an earlier run's: refused and named, with what to do, and nothing is done to anybody."""
    views = (LoraView(name="policy", state=LoraState.LOADED, revision=7),)
    answer = StepAnswer(Outcome.OK, None, LorasData(loras=views, capacity=2))
    state, _ = decide(initial(plan_of(is_catch_up=is_catch_up)), Began())
    state, action = decide(state, Answered(dict.fromkeys(WORKERS, answer)))
    assert isinstance(action, Done)
    assert not state.is_committed
    found = outcome_of(state, state.seats[WORKERS[0]])
    assert found.outcome is Outcome.REFUSED
    assert found.fault is not None
    assert found.fault.code is FaultCode.REVISION_TAKEN
    assert found.fault.message.endswith("unload it there, or take another revision")
