"""The state machine, by table: which command is admitted in which state, and what each end leaves."""

from dataclasses import replace
from typing import Any

import pytest

from rlbus.schemas import (
    AbortRequest,
    AbortWeights,
    Command,
    CommandBody,
    CommitWeights,
    DestroyGroup,
    Fault,
    FaultCode,
    FlushCache,
    FolderSource,
    GetChecksums,
    GetOutcome,
    GetStatus,
    GetVersion,
    GroupPlan,
    Hello,
    InitGroup,
    LoadLora,
    LoadWeights,
    ManifestPage,
    PauseGeneration,
    PauseView,
    PrepareWeightsUpdate,
    PutManifest,
    RankSpan,
    ReceiveWeights,
    Rendezvous,
    ResumeGeneration,
    TensorSpec,
    UnloadLora,
    Version,
    WeightsState,
    WeightsView,
    route_of,
)
from rlbus.workers.journal import Record, digest_of
from rlbus.workers.lifecycle import MAX_TERM, decide, is_mutation, served_routes, takes_back
from rlbus.workers.moves import (
    AnswerNow,
    Arrived,
    Cleanup,
    Ended,
    FirstByte,
    Flushed,
    GroupLeft,
    Ignore,
    Join,
    Refuse,
    Released,
    Replay,
    Run,
    SessionClosed,
    Started,
)
from rlbus.workers.state import Prepared, Running, Session, WorkerState

pytestmark = pytest.mark.unit

V1, V2 = Version(step=1), Version(step=2)
NOW = 100.0
CLEAN_V2 = WeightsView(state=WeightsState.CLEAN, version=V2, last_good=V2)
CLEAN_V1 = WeightsView(state=WeightsState.CLEAN, version=V1, last_good=V1)
UPDATING = WeightsView(state=WeightsState.UPDATING, last_good=V1)
DIRTY = WeightsView(state=WeightsState.DIRTY, last_good=V1)
TENSORS = (TensorSpec(name="w", dtype="float32", shape=(2,)),)
PAUSE = PauseView(owner="u", mode="keep", since=1.0)
PREPARED = Prepared("u-prepare", V2, "d", TENSORS)
FAULT = Fault(code=FaultCode.ENGINE_FAILED, message="x")


def plan(epoch: int = 3, **changes: Any) -> GroupPlan:
    """A group of one trainer rank and two of this worker."""
    fields: dict[str, Any] = {
        "epoch": epoch,
        "group_id": "g",
        "backend": "fake",
        "num_trainer_ranks": 1,
        "world_size": 3,
        "spans": (RankSpan(component="backend", instance_id="7", first=1, num_ranks=2),),
        "rendezvous": Rendezvous(host="h", port=1, prefix="p"),
        "bucket_bytes": 16,
    }
    return GroupPlan(**(fields | changes))


PREPARE = PrepareWeightsUpdate(version=V2, manifest_digest="d")
RECEIVE = ReceiveWeights(update_op_id="u", epoch=3, version=V2, manifest_digest="d", bucket_bytes=16)
COMMIT = CommitWeights(update_op_id="u", version=V2)
ABORT = AbortWeights(update_op_id="u", reason="r")
LOAD = LoadWeights(path="/w", version=V2)
LOAD_LORA = LoadLora(name="policy", revision=7, checksum="1" * 64, source=FolderSource(path="/a"))
ROUTES = served_routes(
    frozenset(
        {
            "pause_generation",
            "resume_generation",
            "flush_cache",
            "abort_request",
            "update_weights_from_distributed",
            "update_weights_from_disk",
            "get_weight_checksums",
            "set_weight_version",
            "load_lora",
            "unload_lora",
        }
    )
)
FRESH = WorkerState(component="backend", instance_id="7", world_size=2, routes=ROUTES, backends=("fake",))
SERVING = replace(FRESH, weights=CLEAN_V1)
STILL = replace(SERVING, pause=PAUSE)
READY = replace(STILL, epoch=3, newest_epoch=3, prepared=PREPARED)
OPEN = replace(
    READY, weights=UPDATING, prepared=None, session=Session("u", V2, CLEAN_V1, is_received=True), owes_flush=True
)
TORN = replace(SERVING, weights=DIRTY, pause=PAUSE)


def arrived(body: CommandBody, **changes: Any) -> Arrived:
    """A command that is fine in itself."""
    envelope: dict[str, Any] = {"op_id": "op", "term": 0, "expires_at": NOW + 1, "members": None}
    envelope |= {k: changes.pop(k) for k in tuple(changes) if k in envelope}
    known = TENSORS if isinstance(body, PrepareWeightsUpdate) else None
    fields: dict[str, Any] = {"route": route_of(body), "is_unicast": True, "now": NOW, "tensors": known}
    return Arrived(command=Command(body=body, **envelope), **(fields | changes))


def refusal(state: WorkerState, event: Arrived) -> FaultCode | None:
    """The code of the refusal, None if the command was admitted; a refused one has changed nothing."""
    after, (action,) = decide(state, event)
    if isinstance(action, Refuse):
        assert after == replace(state, term=after.term)
        return action.fault.code
    return None


def running(state: WorkerState, body: CommandBody, op_id: str = "op") -> WorkerState:
    """The state with `body` in progress, its engine calls begun."""
    return decide(replace(state, running=Running(op_id, body)), Started(op_id))[0]


ENVELOPES: list[tuple[str, WorkerState, Arrived, FaultCode | None]] = [
    ("fine", FRESH, arrived(FlushCache()), None),
    ("the very last moment", FRESH, arrived(FlushCache(), expires_at=NOW + 1e-6), None),
    ("expired", FRESH, arrived(FlushCache(), expires_at=NOW), FaultCode.EXPIRED),
    ("expired query", FRESH, arrived(GetVersion(), expires_at=NOW - 5), FaultCode.EXPIRED),
    ("old term", replace(FRESH, term=2), arrived(FlushCache(), term=1), FaultCode.STALE_TERM),
    ("same term", replace(FRESH, term=2), arrived(FlushCache(), term=2), None),
    ("for me", FRESH, arrived(FlushCache(), members=("6", "7")), None),
    ("for others, by unicast", FRESH, arrived(FlushCache(), members=("6",)), FaultCode.NOT_A_MEMBER),
    ("for nobody", FRESH, arrived(FlushCache(), members=()), FaultCode.NOT_A_MEMBER),
    ("wrong subject", FRESH, arrived(FlushCache(), route="hello"), FaultCode.BAD_MESSAGE),
    ("no such route", replace(FRESH, routes=frozenset({"hello"})), arrived(FlushCache()), FaultCode.NO_ROUTE),
    ("outside problem", FRESH, arrived(FlushCache(), outside=FAULT), FaultCode.ENGINE_FAILED),
]


@pytest.mark.parametrize(("state", "event", "code"), [e[1:] for e in ENVELOPES], ids=[e[0] for e in ENVELOPES])
def test_envelope_is_checked_first(state: WorkerState, event: Arrived, code: FaultCode | None) -> None:
    """Expiry, term, members, subject and route, whatever the body."""
    assert refusal(state, event) is code


STATES: list[tuple[str, WorkerState, CommandBody, FaultCode | None]] = [
    ("pause", FRESH, PauseGeneration(), None),
    ("pause again", READY, PauseGeneration(), None),
    ("resume clean", READY, ResumeGeneration(), None),
    ("resume what runs", FRESH, ResumeGeneration(), None),
    ("resume dirty", TORN, ResumeGeneration(), FaultCode.DIRTY),
    ("resume dirty by force", TORN, ResumeGeneration(force=True), None),
    ("resume an open update", OPEN, ResumeGeneration(), FaultCode.BUSY),
    ("resume an open update by force", OPEN, ResumeGeneration(force=True), None),
    ("resume the unknown", replace(FRESH, weights=WeightsView(state=WeightsState.UNKNOWN)), ResumeGeneration(), None),
    ("prepare", SERVING, PREPARE, None),
    ("prepare the same", SERVING, PrepareWeightsUpdate(version=V1, manifest_digest="d"), FaultCode.VERSION_REGRESSION),
    (
        "prepare older",
        replace(SERVING, weights=WeightsView(state=WeightsState.CLEAN, version=V2, last_good=V2)),
        PrepareWeightsUpdate(version=V1, manifest_digest="d"),
        FaultCode.VERSION_REGRESSION,
    ),
    ("rollback", SERVING, PrepareWeightsUpdate(version=V1, manifest_digest="d", allow_rollback=True), None),
    ("heal with the last good one", TORN, PrepareWeightsUpdate(version=V1, manifest_digest="d"), None),
    (
        "heal with an older one",
        TORN,
        PrepareWeightsUpdate(version=Version(step=0), manifest_digest="d"),
        FaultCode.VERSION_REGRESSION,
    ),
    ("new incarnation", SERVING, PrepareWeightsUpdate(version=Version(incarnation=1), manifest_digest="d"), None),
    ("right base", SERVING, PrepareWeightsUpdate(version=V2, manifest_digest="d", base_version=V1), None),
    (
        "wrong base",
        SERVING,
        PrepareWeightsUpdate(version=V2, manifest_digest="d", base_version=V2),
        FaultCode.WRONG_STATE,
    ),
    (
        "base of torn weights",
        TORN,
        PrepareWeightsUpdate(version=V2, manifest_digest="d", base_version=V1),
        FaultCode.WRONG_STATE,
    ),
    ("join", FRESH, InitGroup(plan=plan()), None),
    ("join again", READY, InitGroup(plan=plan()), None),
    ("join an older epoch", READY, InitGroup(plan=plan(2)), FaultCode.STALE_EPOCH),
    ("join one older than the last", replace(READY, epoch=None), InitGroup(plan=plan(2)), FaultCode.STALE_EPOCH),
    ("join an older epoch of a newer term", replace(READY, epoch_term=-1), InitGroup(plan=plan(2)), None),
    ("join without a span", FRESH, InitGroup(plan=plan(spans=(), world_size=1)), FaultCode.NOT_A_MEMBER),
    (
        "join with the wrong size",
        replace(FRESH, world_size=1),
        InitGroup(plan=plan()),
        FaultCode.BAD_MESSAGE,
    ),
    ("join with a gap", FRESH, InitGroup(plan=plan(num_trainer_ranks=2)), FaultCode.BAD_MESSAGE),
    ("join with a rank too many", FRESH, InitGroup(plan=plan(world_size=4)), FaultCode.BAD_MESSAGE),
    ("join without a trainer", FRESH, InitGroup(plan=plan(num_trainer_ranks=0)), FaultCode.BAD_MESSAGE),
    ("join by another backend", FRESH, InitGroup(plan=plan(backend="nccl")), FaultCode.NO_ROUTE),
    ("destroy", READY, DestroyGroup(epoch=3), None),
    ("destroy what isn't there", FRESH, DestroyGroup(epoch=3), None),
    ("receive", READY, RECEIVE, None),
    ("receive running", replace(READY, pause=None), RECEIVE, FaultCode.WRONG_STATE),
    ("receive without a group", replace(READY, epoch=None), RECEIVE, FaultCode.STALE_EPOCH),
    ("receive of another group", replace(READY, epoch=4), RECEIVE, FaultCode.STALE_EPOCH),
    ("receive unprepared", replace(READY, prepared=None), RECEIVE, FaultCode.WRONG_STATE),
    (
        "receive another manifest",
        replace(READY, prepared=replace(PREPARED, manifest_digest="e")),
        RECEIVE,
        FaultCode.WRONG_STATE,
    ),
    ("receive another version", replace(READY, prepared=replace(PREPARED, version=V1)), RECEIVE, FaultCode.WRONG_STATE),
    (
        "receive in buckets of nothing",
        READY,
        ReceiveWeights(update_op_id="u", epoch=3, version=V2, manifest_digest="d", bucket_bytes=0),
        FaultCode.BAD_MESSAGE,
    ),
    ("commit", OPEN, COMMIT, None),
    (
        "commit twice",
        replace(SERVING, weights=WeightsView(state=WeightsState.CLEAN, version=V2), committed_op_id="u"),
        COMMIT,
        None,
    ),
    ("commit nothing", READY, COMMIT, FaultCode.WRONG_STATE),
    ("commit another update", OPEN, CommitWeights(update_op_id="w", version=V2), FaultCode.WRONG_STATE),
    ("commit another version", OPEN, CommitWeights(update_op_id="u", version=V1), FaultCode.WRONG_STATE),
    ("abort", OPEN, ABORT, None),
    ("abort nothing", FRESH, ABORT, None),
    ("load", STILL, LOAD, None),
    ("load running", SERVING, LOAD, FaultCode.WRONG_STATE),
    ("load over torn weights", TORN, LOAD, None),
    ("load over an open update", OPEN, LOAD, None),
    (
        "load the same version",
        replace(SERVING, pause=PAUSE),
        LoadWeights(path="/w", version=V1),
        FaultCode.VERSION_REGRESSION,
    ),
]


@pytest.mark.parametrize(("state", "body", "code"), [s[1:] for s in STATES], ids=[s[0] for s in STATES])
def test_command_is_admitted_or_refused_by_state(state: WorkerState, body: CommandBody, code: FaultCode | None) -> None:
    """Wholly before the first side effect."""
    assert refusal(state, arrived(body)) is code


def test_unknown_manifest_is_refused_before_anything_is_prepared() -> None:
    """And may be tried again."""
    state, (action,) = decide(SERVING, arrived(PREPARE, tensors=None))
    assert isinstance(action, Refuse)
    assert (action.fault.code, action.fault.retryable) == (FaultCode.MANIFEST_UNKNOWN, True)
    assert state.prepared is None


def test_broadcast_for_others_is_ignored() -> None:
    """No answer and no new term: it is none of our business."""
    event = arrived(FlushCache(), members=("6",), is_unicast=False, term=9)
    assert decide(FRESH, event) == (FRESH, (Ignore(),))


def test_newer_term_is_kept_also_when_busy() -> None:
    """Its predecessor is refused from now on."""
    busy = replace(FRESH, running=Running("a", FlushCache()))
    state, (action,) = decide(busy, arrived(PauseGeneration(), term=5))
    assert isinstance(action, Refuse)
    assert (action.fault.code, action.fault.detail["op_id"]) == (FaultCode.BUSY, "a")
    assert state == replace(busy, term=5)
    assert refusal(state, arrived(GetVersion(), term=4)) is FaultCode.STALE_TERM


def test_a_query_raises_no_term() -> None:
    """Whoever only looks takes nobody's place."""
    assert decide(FRESH, arrived(GetVersion(), term=5)) == (FRESH, (AnswerNow(),))


@pytest.mark.parametrize("body", [FlushCache(), GetVersion()])
def test_a_term_beyond_reason_is_refused_and_not_kept(body: CommandBody) -> None:
    """Nobody could lead after it."""
    assert refusal(FRESH, arrived(body, term=MAX_TERM)) is None
    state, (action,) = decide(FRESH, arrived(body, term=MAX_TERM + 1))
    assert isinstance(action, Refuse)
    assert (state, action.fault.code) == (FRESH, FaultCode.BAD_MESSAGE)


def test_repeat_joins_replays_or_is_an_abuse() -> None:
    """By op_id first, and then by body; expiry and term don't matter any more."""
    body = FlushCache()
    record = Record("op", "flush_cache", digest_of(body))
    late = arrived(body, expires_at=NOW - 9, record=record)
    assert decide(replace(FRESH, term=7), late)[1] == (Join(record),)
    record.result = object()  # type: ignore[assignment]
    assert decide(replace(FRESH, term=7), late)[1] == (Replay(record),)
    assert refusal(FRESH, arrived(PauseGeneration(), record=record)) is FaultCode.BAD_MESSAGE


@pytest.mark.parametrize(
    "body",
    [
        Hello(),
        GetStatus(),
        GetOutcome(of_op_id="x"),
        GetVersion(),
        AbortRequest(),
        PutManifest(page=ManifestPage(digest="d", page=0, num_pages=1, tensors=())),
    ],
)
def test_queries_aborts_and_pages_run_beside_a_mutation(body: CommandBody) -> None:
    """They never wait for it and never block it."""
    busy = replace(FRESH, running=Running("a", PauseGeneration()))
    assert decide(busy, arrived(body)) == (busy, (AnswerNow(),))
    assert not is_mutation(body)


TAKE_BACKS: list[tuple[CommandBody, CommandBody, bool]] = [
    (ABORT, RECEIVE, True),
    (AbortWeights(update_op_id="w", reason="r"), RECEIVE, False),
    (DestroyGroup(epoch=3), RECEIVE, True),
    (DestroyGroup(epoch=4), RECEIVE, False),
    (DestroyGroup(epoch=3), InitGroup(plan=plan(3)), True),
    (DestroyGroup(epoch=2), InitGroup(plan=plan(3)), False),
    (ABORT, COMMIT, False),
    (ABORT, PauseGeneration(), False),
    (ResumeGeneration(), PauseGeneration(), True),
    (PauseGeneration(), ResumeGeneration(), False),
    (ReceiveWeights(update_op_id="u", epoch=3, version=V2, manifest_digest="d", bucket_bytes=16), RECEIVE, False),
    (UnloadLora(name="policy", revision=7), LOAD_LORA, True),
    (UnloadLora(name="policy", revision=6), LOAD_LORA, False),
    (UnloadLora(name="other", revision=7), LOAD_LORA, False),
    (LOAD_LORA, UnloadLora(name="policy", revision=7), False),
]


@pytest.mark.parametrize(("body", "current", "is_taken"), TAKE_BACKS)
def test_only_the_end_of_the_same_thing_takes_it_back(body: CommandBody, current: CommandBody, is_taken: bool) -> None:
    """Everything else is busy; and only one can wait for it."""
    assert takes_back(body, current) is is_taken
    busy = replace(READY, running=Running("a", current))
    state, (action,) = decide(busy, arrived(body))
    if is_taken:
        assert action == Run(takes_back="a")
        assert state.queued == Running("op", body, NOW)
        assert refusal(state, arrived(body, op_id="third")) is FaultCode.BUSY
        assert decide(state, Released("a", NOW))[0].running == Running("op", body, NOW)
    else:
        assert isinstance(action, Refuse)


UNTOUCHED = Ended("op", NOW, FAULT, False)
TOUCHED = Ended("op", NOW, FAULT, True)
CLOSE = (Cleanup.CLOSE_SESSION,)
ALL = (Cleanup.CLOSE_SESSION, Cleanup.LEAVE_GROUP)
ENDS: list[tuple[str, WorkerState, CommandBody, Ended, WeightsView, tuple[Cleanup, ...]]] = [
    ("receive untouched", READY, RECEIVE, UNTOUCHED, CLEAN_V1, ALL),
    ("receive touched", READY, RECEIVE, TOUCHED, DIRTY, ALL),
    ("receive ok", READY, RECEIVE, Ended("op", NOW), UPDATING, ()),
    ("receive over torn, untouched", replace(READY, weights=DIRTY), RECEIVE, UNTOUCHED, DIRTY, ALL),
    ("commit ok", OPEN, COMMIT, Ended("op", NOW), CLEAN_V2, ()),
    ("commit failed", OPEN, COMMIT, TOUCHED, DIRTY, CLOSE),
    ("staged commit failed", OPEN, COMMIT, UNTOUCHED, CLEAN_V1, CLOSE),
    ("load ok", TORN, LOAD, Ended("op", NOW), CLEAN_V2, ()),
    ("load untouched", STILL, LOAD, UNTOUCHED, CLEAN_V1, CLOSE),
    ("load torn", STILL, LOAD, TOUCHED, DIRTY, CLOSE),
    ("pause failed", SERVING, PauseGeneration(), UNTOUCHED, CLEAN_V1, (Cleanup.RESUME,)),
    ("second pause failed", READY, PauseGeneration(), UNTOUCHED, CLEAN_V1, ()),
    ("resume failed", READY, ResumeGeneration(), UNTOUCHED, CLEAN_V1, ()),
    ("join failed", SERVING, InitGroup(plan=plan()), UNTOUCHED, CLEAN_V1, (Cleanup.LEAVE_GROUP,)),
    ("flush failed", OPEN, FlushCache(), UNTOUCHED, UPDATING, ()),
    ("checksums", SERVING, GetChecksums(), Ended("op", NOW), CLEAN_V1, ()),
]


@pytest.mark.parametrize(
    ("state", "body", "end", "weights", "cleanup"), [e[1:] for e in ENDS], ids=[e[0] for e in ENDS]
)
def test_end_leaves_these_weights_and_this_to_clean_up(
    state: WorkerState, body: CommandBody, end: Ended, weights: WeightsView, cleanup: tuple[Cleanup, ...]
) -> None:
    """Before the first byte what was; after it, or in doubt, dirty."""
    after, actions = decide(running(state, body), end)
    assert (after.weights, actions) == (weights, cleanup)
    assert after.running == Running("op", body)
    assert decide(after, SessionClosed())[0].weights in (weights, DIRTY)


def test_received_update_that_fails_and_stays_open_is_not_committed_after_all() -> None:
    """Its first commit failed, and so did the engine's abort: only that can be tried again."""
    after, _ = decide(running(OPEN, COMMIT), TOUCHED)
    after = replace(after, running=None)
    assert after.session is not None
    assert refusal(after, arrived(COMMIT)) is FaultCode.WRONG_STATE
    assert refusal(after, arrived(ABORT)) is None


def test_reload_that_cannot_give_up_what_was_received_leaves_torn_weights() -> None:
    """Over an update of ours that nobody committed."""
    received, _ = decide(running(READY, RECEIVE), Ended("op", NOW))
    loading = replace(received, running=Running("load", LOAD))
    after, actions = decide(loading, Ended("load", NOW, FAULT))
    assert (after.weights, actions) == (DIRTY, CLOSE)


def test_first_byte_makes_weights_updating_and_owes_a_flush() -> None:
    """Only that of the running transfer; an abandoned one's comes too late."""
    state = running(READY, RECEIVE)
    assert state.weights == CLEAN_V1
    assert decide(state, FirstByte("other"))[0] == state
    touched, _ = decide(state, FirstByte("op"))
    assert (touched.weights, touched.owes_flush) == (UPDATING, True)
    assert decide(SERVING, FirstByte("op"))[0] == SERVING
    assert not decide(touched, Flushed())[0].owes_flush


def test_closed_session_of_what_was_received_is_dirty() -> None:
    """Received and never committed."""
    state, _ = decide(OPEN, SessionClosed())
    assert (state.weights, state.session) == (DIRTY, None)


def test_pause_keeps_its_time_and_takes_the_last_owner() -> None:
    """`since` is when generation stopped; without an owner it is the op itself."""
    state, _ = decide(running(SERVING, PauseGeneration()), Ended("op", NOW))
    assert state.pause == PauseView(owner="op", mode="keep", since=NOW)
    again = running(replace(state, running=None), PauseGeneration(owner="bob"), "op2")
    assert decide(again, Ended("op2", NOW + 5))[0].pause == PauseView(owner="bob", mode="keep", since=NOW)


def test_group_is_left_while_the_next_is_joined_and_after_destroy() -> None:
    """A stale destroy doesn't touch the present group."""
    assert running(READY, InitGroup(plan=plan(4))).epoch is None
    joined, _ = decide(running(READY, InitGroup(plan=plan(4))), Ended("op", NOW))
    assert joined.epoch == 4
    assert decide(running(READY, DestroyGroup(epoch=2)), Ended("op", NOW))[0].epoch == 3
    assert decide(running(READY, DestroyGroup(epoch=3)), Ended("op", NOW))[0].epoch is None
    assert decide(READY, GroupLeft())[0].epoch is None


def test_a_late_command_to_join_is_refused_after_a_newer_join_that_failed() -> None:
    """The controller gave that group up before it asked for the newer one (seeds 523 and 3555 of the simulation)."""
    begun = running(FRESH, InitGroup(plan=plan(5)))
    failed, _ = decide(begun, Ended("op", NOW, fault=Fault(code=FaultCode.GROUP_FAILED, message="drawn")))
    assert (failed.epoch, failed.newest_epoch) == (None, 5)
    assert refusal(replace(failed, running=None), arrived(InitGroup(plan=plan(4)))) is FaultCode.STALE_EPOCH
    assert refusal(replace(failed, running=None), arrived(InitGroup(plan=plan(6)))) is None


@pytest.mark.parametrize(("op_id", "is_kept"), [("u", False), ("w", True)])
def test_abort_drops_only_what_was_prepared_for_its_update(op_id: str, is_kept: bool) -> None:
    """Ops of an update carry its op_id as their beginning."""
    body = AbortWeights(update_op_id=op_id, reason="r")
    state, _ = decide(running(READY, body), Ended("op", NOW))
    assert (state.prepared is not None) is is_kept


def test_routes_of_an_update_come_together() -> None:
    """Who can receive can also prepare, join, commit and abort; who can't has none of them."""
    with_update = served_routes(frozenset({"update_weights_from_distributed"}))
    assert {"put_manifest", "prepare_weights_update", "abort_weights_update", "hello"} <= with_update
    assert served_routes(frozenset()) == {"hello", "get_status", "get_outcome", "get_weight_version"}


def test_a_resume_over_a_pause_keeps_its_own_rules() -> None:
    """Torn weights refuse it also while another pause is in progress; with force it takes the pause back."""
    busy = replace(STILL, weights=DIRTY, running=Running("a", PauseGeneration()))
    assert refusal(busy, arrived(ResumeGeneration())) is FaultCode.DIRTY
    assert decide(busy, arrived(ResumeGeneration(force=True)))[1] == (Run(takes_back="a"),)
