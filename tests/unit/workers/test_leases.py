"""Leases of pauses, by table: what grants, renews and ends one, and what its end asks for."""

from dataclasses import replace

import pytest

from rlbus.schemas import (
    AbortWeights,
    Command,
    CommandBody,
    CommitWeights,
    FaultCode,
    FlushCache,
    GroupPlan,
    InitGroup,
    LoadWeights,
    PauseGeneration,
    PauseView,
    ReceiveWeights,
    Rendezvous,
    RenewLease,
    ResumeGeneration,
    Version,
    WeightsState,
    WeightsView,
    WorkView,
    route_of,
)
from rlbus.workers.leases import RETRY_S, work_of
from rlbus.workers.lifecycle import decide, served_routes
from rlbus.workers.moves import (
    Action,
    AnswerNow,
    Arrived,
    Ended,
    LeaseEnded,
    Refuse,
    Released,
    RunOwn,
    SessionClosed,
    TakeBack,
)
from rlbus.workers.state import Lease, Running, Session, WorkerState

pytestmark = pytest.mark.unit

NOW = 100.0
V1 = Version(step=1)
CLEAN = WeightsView(state=WeightsState.CLEAN, version=V1, last_good=V1)
DIRTY = WeightsView(state=WeightsState.DIRTY, last_good=V1)
UPDATING = WeightsView(state=WeightsState.UPDATING, last_good=V1)
ROUTES = served_routes(frozenset({"pause_generation", "resume_generation", "update_weights_from_distributed"}))
SERVING = WorkerState(component="backend", instance_id="7", world_size=1, routes=ROUTES, weights=CLEAN)
LEASED = replace(
    SERVING, pause=PauseView(owner="u-pause", mode="keep", since=90.0, expires_at=120.0), lease=Lease(30.0)
)
HELD = replace(SERVING, pause=PauseView(owner="ann", mode="keep", since=90.0))
OVER = replace(LEASED, lease=Lease(30.0, "e"))
OVER_IN_UPDATE = replace(LEASED, lease=Lease(30.0, "e", "u"))
SESSION = Session("u", V1, before=CLEAN)
RECEIVE = ReceiveWeights(update_op_id="u", epoch=3, version=V1, manifest_digest="d", bucket_bytes=8)
LOAD = LoadWeights(path="/w", version=V1)
RENEW = RenewLease(owner="u-pause", lease_s=30.0)
INIT = InitGroup(
    plan=GroupPlan(
        epoch=1,
        group_id="g",
        backend="fake",
        num_trainer_ranks=1,
        world_size=2,
        spans=(),
        rendezvous=Rendezvous(host="h", port=1, prefix="p"),
        bucket_bytes=8,
    )
)
RESUME = RunOwn("e-resume", ResumeGeneration())


def arrived(body: CommandBody, term: int = 0) -> Arrived:
    command = Command(op_id="op", term=term, expires_at=NOW + 1, body=body)
    return Arrived(command=command, route=route_of(body), is_unicast=True, now=NOW)


def after_pause(state: WorkerState, lease_s: float | None, owner: str = "bob") -> WorkerState:
    """A pause with this lease has just succeeded."""
    body = PauseGeneration(owner=owner, lease_s=lease_s)
    return decide(replace(state, running=Running("op", body)), Ended("op", NOW))[0]


@pytest.mark.parametrize(
    ("before", "lease_s", "lease", "expires_at"),
    [
        (SERVING, 30.0, Lease(30.0), NOW + 30.0),
        (SERVING, None, None, None),
        (LEASED, 5.0, Lease(5.0), NOW + 5.0),
        (LEASED, None, None, None),
        (OVER, 5.0, Lease(5.0), NOW + 5.0),
        (HELD, 5.0, None, None),  # a hold is ended by a resume, and by nothing less
    ],
)
def test_a_pause_grants_its_lease_when_the_engine_stands(
    before: WorkerState, lease_s: float | None, lease: Lease | None, expires_at: float | None
) -> None:
    """As a duration for the timer, and as a date for people; the last pause owns it."""
    after = after_pause(before, lease_s)
    assert after.pause is not None
    assert (after.pause.owner, after.lease, after.pause.expires_at) == ("bob", lease, expires_at)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, 86_401.0, float("inf")])
@pytest.mark.parametrize("state", [SERVING, LEASED])
def test_a_lease_that_no_worker_can_keep_is_refused(state: WorkerState, lease_s: float) -> None:
    """By a pause and by a renewal, before anything has changed."""
    for body in (PauseGeneration(owner="u-pause", lease_s=lease_s), RenewLease(owner="u-pause", lease_s=lease_s)):
        after, (action,) = decide(state, arrived(body))
        assert isinstance(action, Refuse)
        assert (action.fault.code, after) == (FaultCode.BAD_MESSAGE, state)


@pytest.mark.parametrize("running", [None, Running("a", RECEIVE), Running("a", LOAD)])
@pytest.mark.parametrize("before", [LEASED, OVER])
def test_a_renewal_is_taken_beside_whatever_runs(before: WorkerState, running: Running | None) -> None:
    """It counts from its arrival, also when the lease had ended and nothing was done about it yet."""
    after, actions = decide(replace(before, running=running), arrived(RENEW))
    assert actions == (AnswerNow(),)
    assert after.running == running
    assert after.lease == Lease(30.0)
    assert after.pause is not None
    assert (after.pause.expires_at, after.pause.since, after.pause.owner) == (NOW + 30.0, 90.0, "u-pause")


def test_a_renewal_without_a_lease_makes_a_hold_and_a_hold_has_nothing_to_renew() -> None:
    """Also for its own owner."""
    after, _ = decide(LEASED, arrived(RenewLease(owner="u-pause")))
    assert after.pause is not None
    assert (after.lease, after.pause.expires_at) == (None, None)
    assert decide(HELD, arrived(RenewLease(owner="ann", lease_s=3.0))) == (HELD, (AnswerNow(),))


@pytest.mark.parametrize(
    ("state", "body", "code"),
    [
        (SERVING, RENEW, FaultCode.WRONG_STATE),
        (LEASED, RenewLease(owner="other", lease_s=3.0), FaultCode.WRONG_STATE),
        (HELD, RENEW, FaultCode.WRONG_STATE),
        (replace(OVER, running=Running("e-resume", ResumeGeneration())), RENEW, FaultCode.WRONG_STATE),
        (replace(LEASED, term=2), RENEW, FaultCode.STALE_TERM),
    ],
    ids=["not paused", "another owner", "taken over", "already resuming", "an old controller"],
)
def test_only_who_holds_the_pause_renews_it(state: WorkerState, body: RenewLease, code: FaultCode) -> None:
    """Refused, and nothing has changed."""
    after, (action,) = decide(state, arrived(body))
    assert isinstance(action, Refuse)
    assert (action.fault.code, after) == (code, state)


ENDS: list[tuple[str, WorkerState, tuple[Action, ...]]] = [
    ("clean", LEASED, (RESUME,)),
    ("dirty", replace(LEASED, weights=DIRTY), ()),
    ("explicit hold", HELD, ()),
    ("not paused", SERVING, ()),
    (
        "open session",
        replace(LEASED, session=SESSION),
        (RunOwn("e-abort", AbortWeights(update_op_id="u", reason="x")),),
    ),
    ("touched transfer", replace(LEASED, weights=UPDATING, session=SESSION, running=Running("a", RECEIVE)), ()),
    ("a load", replace(LEASED, weights=UPDATING, session=SESSION, running=Running("a", LOAD)), ()),
    ("a flush", replace(LEASED, running=Running("a", FlushCache())), ()),
    ("a pause", replace(LEASED, running=Running("a", PauseGeneration())), ()),
]


@pytest.mark.parametrize(("state", "expected"), [e[1:] for e in ENDS], ids=[e[0] for e in ENDS])
def test_the_end_of_a_lease_resumes_clean_weights_when_nothing_runs(
    state: WorkerState, expected: tuple[Action, ...]
) -> None:
    """A session that is open is closed first; dirty weights, and what runs, are left alone."""
    after, actions = decide(state, LeaseEnded("e", NOW))
    assert [_body(a) for a in actions] == [_body(a) for a in expected]
    if actions:
        (action,) = actions
        assert isinstance(action, RunOwn)
        assert after.running == Running(action.op_id, action.body, NOW, is_own=True)
    else:
        assert after.running == state.running


def _body(action: Action) -> object:
    assert isinstance(action, RunOwn)
    return action.op_id, type(action.body)


@pytest.mark.parametrize("weights", [CLEAN, DIRTY])
def test_a_transfer_that_has_not_begun_is_taken_back(weights: WeightsView) -> None:
    """Nobody will send; it would keep the engine paused up to its deadline."""
    state = replace(LEASED, weights=weights, session=SESSION, running=Running("a", RECEIVE))
    after, (action,) = decide(state, LeaseEnded("e", NOW))
    assert isinstance(action, TakeBack)
    assert (action.op_id, action.fault.code) == ("a", FaultCode.CANCELLED)
    assert after.running == state.running


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (OVER, RESUME),
        (replace(OVER, weights=DIRTY), None),
        (LEASED, None),
        (HELD, None),
        (SERVING, None),
    ],
)
def test_what_ran_when_the_lease_ended_is_waited_for(state: WorkerState, expected: RunOwn | None) -> None:
    """Then the engine is resumed, if its weights are clean."""
    busy = replace(state, running=Running("a", FlushCache()))
    after, actions = decide(busy, Released("a", NOW))
    assert actions == (() if expected is None else (expected,))
    assert (after.running is None) is (expected is None)


def test_what_is_queued_goes_first() -> None:
    """The lease is looked at again after it."""
    queued = Running("b", ResumeGeneration())
    state = replace(OVER, running=Running("a", PauseGeneration()), queued=queued)
    assert decide(state, Released("a", NOW)) == (replace(state, running=queued, queued=None), ())


def test_a_session_is_closed_and_then_clean_weights_are_resumed() -> None:
    """Untouched ones go on as they were; touched ones are dirty and stay."""
    closing = Running("e-abort", AbortWeights(update_op_id="u", reason="x"))
    untouched = decide(replace(OVER_IN_UPDATE, session=SESSION, running=closing), SessionClosed())[0]
    assert decide(untouched, Released("e-abort", NOW))[1] == (RESUME,)
    touched = decide(replace(OVER, session=SESSION, weights=UPDATING, running=closing), SessionClosed())[0]
    after, actions = decide(touched, Released("e-abort", NOW))
    assert (after.weights, after.running, actions) == (DIRTY, None, ())


@pytest.mark.parametrize(
    ("state", "op_id"),
    [(OVER, "e-resume"), (replace(OVER_IN_UPDATE, session=SESSION), "e-abort")],
)
def test_an_end_that_fails_is_tried_again_a_moment_later(state: WorkerState, op_id: str) -> None:
    """The engine refused to resume, or to close its session: never in a hot loop, never given up."""
    after, actions = decide(replace(state, running=Running(op_id, ResumeGeneration())), Released(op_id, NOW))
    assert (after.lease, after.running, actions) == (Lease(RETRY_S), None, ())
    (again,) = decide(after, LeaseEnded("f", NOW))[1]
    assert isinstance(again, RunOwn)
    assert again.op_id == op_id.replace("e-", "f-")


def test_a_resume_ends_the_lease() -> None:
    """Whoever asked for it."""
    body = ResumeGeneration()
    after, _ = decide(replace(LEASED, running=Running("op", body)), Ended("op", NOW))
    assert (after.pause, after.lease) == (None, None)


@pytest.mark.parametrize(
    ("body", "is_declared"), [(RECEIVE, True), (LOAD, True), (INIT, True), (FlushCache(), False), (RENEW, False)]
)
def test_work_that_may_block_is_declared(body: CommandBody, is_declared: bool) -> None:
    """SCENARIOS 21: a collective and a large load, with route and lease."""
    view = WorkView(route=route_of(body), since=7.0, lease_s=30.0)
    assert work_of(Running("op", body, 7.0), 30.0) == (view if is_declared else None)
    assert work_of(None, 30.0) is None


def test_who_can_be_paused_can_be_renewed() -> None:
    """The route comes with the engine's."""
    assert "renew_lease" in ROUTES
    assert "renew_lease" not in served_routes(frozenset())


def test_an_update_that_begins_after_the_lease_ended_is_left_alone() -> None:
    """Torn weights kept the worker paused; whoever heals them is alive, and is not cut off by an old lease."""
    torn = decide(replace(LEASED, weights=DIRTY), LeaseEnded("e", NOW))[0]
    healing = replace(torn, weights=UPDATING, session=SESSION, running=Running("a", RECEIVE))
    assert decide(replace(healing, weights=DIRTY), LeaseEnded("f", NOW))[1] == ()
    after, actions = decide(healing, Released("a", NOW))
    assert (after.session, after.running, actions) == (SESSION, None, ())
    received = replace(after, session=replace(SESSION, is_received=True))
    assert SESSION.version is not None
    commit = CommitWeights(update_op_id="u", version=SESSION.version)
    clean = decide(replace(received, running=Running("c", commit)), Ended("c", NOW))[0]
    assert clean.lease == Lease(RETRY_S)  # time to flush; then it resumes by itself
    assert decide(clean, Released("c", NOW))[1] == ()
