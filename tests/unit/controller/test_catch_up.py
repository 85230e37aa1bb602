"""Who is behind, and when it is caught up: the decisions alone."""

from typing import Any

import pytest

from rlbus.controller.catch_up import (
    FIRST_RETRY_S,
    GATHER_S,
    MAX_AT_ONCE,
    MAX_RETRY_S,
    SETTLE_S,
    Attempt,
    after_failure,
    after_report,
    chosen,
    is_behind,
    misfit,
    note,
    obstacle,
    refreshed,
)
from rlbus.controller.causes import fault
from rlbus.controller.registry import Member, Registry
from rlbus.controller.testing import V6, V7, announcement
from rlbus.schemas import (
    FaultCode,
    FleetSnapshot,
    Generation,
    Goodbye,
    OpStatus,
    Outcome,
    Report,
    SnapshotKind,
    SnapshotOffer,
    WeightsState,
    WeightsView,
    WorkerId,
    WorkerOutcome,
)

pytestmark = pytest.mark.unit

MEMORY = FleetSnapshot(version=V7, offer=SnapshotOffer(kind=SnapshotKind.MEMORY, inbox="i"), backend="fake")
DISK = FleetSnapshot(version=V7, offer=SnapshotOffer(kind=SnapshotKind.DISK, path="/s/0.7"))
CLEAN7 = WeightsView(state=WeightsState.CLEAN, version=V7)


def registry_of(**weights: WeightsView) -> Registry:
    """A fleet at version 7, with such workers (`w1` is "backend/1")."""
    registry = Registry("test")
    registry.committed(V7)
    for name, view in weights.items():
        registry.hear(announcement(f"backend/{name[1:]}", weights=view), 0.0)
    return registry


def member_of(registry: Registry, number: int) -> Member:
    """Worker "backend/<number>"."""
    member = registry.get(WorkerId(f"backend/{number}"))
    assert member is not None
    return member


def behind(count: int, **changes: Any) -> tuple[Member, ...]:
    """So many members without a version."""
    registry = Registry("test")
    for number in range(1, count + 1):
        registry.hear(announcement(f"backend/{number}", **changes), 0.0)
    return registry.members()


def report_of(status: OpStatus, code: FaultCode = FaultCode.ENGINE_FAILED, **outcomes: Outcome) -> Report:
    """How a catch-up ended, by worker."""
    why = fault(code, "no room")
    listed = tuple(
        WorkerOutcome(
            worker=WorkerId(f"backend/{name[1:]}"),
            outcome=outcome,
            phase="transfer",
            fault=why if outcome is Outcome.FAILED else None,
        )
        for name, outcome in outcomes.items()
    )
    cause = None if status is OpStatus.OK else why
    return Report(op_id="o", op="update_weights", status=status, outcomes=listed, phases_s={}, took_s=1.0, fault=cause)


def w(number: int) -> WorkerId:
    return WorkerId(f"backend/{number}")


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (CLEAN7, False),
        (WeightsView(state=WeightsState.CLEAN), True),
        (WeightsView(state=WeightsState.CLEAN, version=V6), True),
        (WeightsView(state=WeightsState.UNKNOWN), True),
        (WeightsView(state=WeightsState.DIRTY, last_good=V7), True),
        (WeightsView(state=WeightsState.UPDATING, last_good=V6), True),
    ],
)
def test_whoever_lacks_the_fleets_version_is_behind(weights: WeightsView, expected: bool) -> None:
    """A version that it had before it was torn doesn't count."""
    registry = registry_of(w1=weights)
    assert is_behind(registry, member_of(registry, 1)) is expected


def test_nobody_is_behind_a_fleet_that_has_no_version() -> None:
    """Nobody has updated anything."""
    registry = Registry("test")
    registry.hear(announcement("backend/1"), 0.0)
    assert not is_behind(registry, member_of(registry, 1))


def test_nobody_is_caught_up_who_is_gone_suspect_or_there_twice() -> None:
    """They can't be addressed, or might not answer."""
    registry = registry_of(w1=WeightsView(state=WeightsState.CLEAN), w2=WeightsView(state=WeightsState.CLEAN))
    registry.hear(Goodbye(boot_id="boot", component="backend", instance_id="1"), 1.0)
    assert not is_behind(registry, member_of(registry, 1))
    assert is_behind(registry, member_of(registry, 2))
    registry.tick(13.0)
    assert not is_behind(registry, member_of(registry, 2))


def test_a_worker_has_to_be_behind_for_a_while() -> None:
    """An update that is about to begin has it in."""
    members = behind(1)
    attempts = refreshed({}, members, 10.0)
    assert chosen(attempts, members, MEMORY, 10.0) == ()
    assert chosen(attempts, members, MEMORY, 10.0 + SETTLE_S) == (w(1),)


def test_those_that_come_together_go_together_within_bounds() -> None:
    """One waits for others that come after it, but not for long, and not for more than fit."""
    members = behind(MAX_AT_ONCE + 5)
    attempts = refreshed({}, members[:1], 0.0)
    attempts = refreshed(attempts, members, SETTLE_S)
    assert chosen(attempts, members, MEMORY, SETTLE_S) == ()
    late = {**attempts, members[1].worker: Attempt("boot", 100.0)}
    assert len(chosen(late, members, MEMORY, SETTLE_S + GATHER_S)) == MAX_AT_ONCE
    assert len(chosen(attempts, members, MEMORY, 2 * SETTLE_S)) == MAX_AT_ONCE


def test_who_has_failed_goes_alone() -> None:
    """So that it fails nobody else's a second time."""
    members = behind(3)
    attempts = {m.worker: Attempt("boot", float(i), num_failed=1) for i, m in enumerate(members)}
    assert chosen(attempts, members, MEMORY, 10.0) == (w(1),)
    attempts[w(3)] = Attempt("boot", 5.0)
    assert chosen(attempts, members, MEMORY, 10.0) == (w(3),)


def test_who_is_busy_or_does_not_answer_is_left_alone() -> None:
    """It is looked at again."""
    for changes in ({"op_id": "own-abort"}, {"generation": Generation.UNKNOWN}):
        members = behind(1, **changes)
        assert chosen(refreshed({}, members, 0.0), members, MEMORY, 10.0) == ()


def test_each_failure_doubles_the_wait_up_to_a_bound() -> None:
    """1, 2, 4, ... 60 s."""
    attempts: Any = {w(1): Attempt("boot", 0.0)}
    waits = []
    for _ in range(9):
        attempts = after_failure(attempts, [w(1)], "nobody there", 0.0)
        waits.append(attempts[w(1)].next_s)
    assert waits == [FIRST_RETRY_S * 2**n for n in range(6)] + [MAX_RETRY_S] * 3


def test_only_who_failed_is_made_to_wait() -> None:
    """The others were taken back because of it; who is fine counts no failure at all."""
    attempts = {w(n): Attempt("boot", 0.0) for n in (1, 2, 3)}
    report = report_of(OpStatus.PARTIAL, w1=Outcome.OK, w2=Outcome.FAILED, w3=Outcome.UNDONE)
    after = after_report(attempts, [w(1), w(2), w(3)], report, 10.0)
    assert [after[w(n)].num_failed for n in (1, 2, 3)] == [0, 1, 0]
    assert after[w(2)] == Attempt("boot", 10.0 + FIRST_RETRY_S, 1, "no room")
    assert after[w(3)].next_s == 10.0 + SETTLE_S


def test_all_wait_when_it_was_none_of_them() -> None:
    """The trainer failed, say: tried again and again at once it would be no use to anybody."""
    attempts = {w(n): Attempt("boot", 0.0) for n in (1, 2)}
    report = report_of(OpStatus.FAILED, w1=Outcome.UNDONE, w2=Outcome.SKIPPED)
    after = after_report(attempts, [w(1), w(2)], report, 10.0)
    assert [after[w(n)].num_failed for n in (1, 2)] == [1, 1]


def test_a_catch_up_that_was_taken_back_counts_for_nothing() -> None:
    """Something else took its place."""
    attempts = {w(1): Attempt("boot", 0.0), w(2): Attempt("boot", 3.0)}
    report = report_of(OpStatus.FAILED, FaultCode.CANCELLED, w1=Outcome.FAILED)
    after = after_report(attempts, [w(1)], report, 10.0)
    assert after == {w(1): Attempt("boot", 10.0 + SETTLE_S), w(2): Attempt("boot", 3.0)}


def test_another_boot_begins_anew_and_who_is_not_behind_any_more_is_forgotten() -> None:
    """What an earlier process couldn't do says nothing about this one."""
    members = behind(2)
    attempts = {w(1): Attempt("before", 99.0, 5, "no room"), w(3): Attempt("boot", 0.0)}
    assert refreshed(attempts, members, 0.0) == {n: Attempt("boot", SETTLE_S) for n in (w(1), w(2))}
    known = {w(1): Attempt("boot", 99.0, 5, "no room"), w(2): Attempt("boot", 1.0)}
    assert refreshed(known, members, 50.0) == known


def test_only_a_snapshot_of_the_fleets_version_is_one() -> None:
    """Not of one before it, and none is none."""
    assert obstacle(MEMORY, V7) is None
    none = FleetSnapshot(version=V7, offer=SnapshotOffer())
    for snapshot in (None, none, FleetSnapshot(version=V6, offer=MEMORY.offer)):
        assert obstacle(snapshot, V7) == "waits for the next update: the trainer keeps no snapshot of this version"


def test_who_can_not_take_a_snapshot_is_not_given_it() -> None:
    """An engine without the route, or without the group's backend; from disk no group is needed."""
    (able,) = behind(1, routes=("update_weights_from_distributed", "update_weights_from_disk"), backends=("nccl",))
    assert misfit(able, MEMORY) == "can't join a fake group"
    assert misfit(able, DISK) is None
    (plain,) = behind(1, routes=())
    assert misfit(plain, DISK) == "waits for the next update: it doesn't serve update_weights_from_disk"
    assert chosen(refreshed({}, [plain], 0.0), [plain], MEMORY, 10.0) == ()


def test_the_note_says_what_is_done_about_a_worker() -> None:
    """In the order of what a person has to know."""
    (member,) = behind(1)
    assert note(member, V7, None, None, 0.0).startswith("waits for the next update: the trainer keeps no snapshot")
    assert note(member, V7, DISK, None, 0.0).startswith("waits for the next update: it doesn't serve")
    assert note(member, V7, MEMORY, Attempt("boot", 0.0), 0.0) == "is caught up next"
    failed = Attempt("boot", 14.0, 3, "no room")
    text = "catching it up failed 3 times (no room); tried again in 4 s, or with the next update"
    assert note(member, V7, MEMORY, failed, 10.0) == text
