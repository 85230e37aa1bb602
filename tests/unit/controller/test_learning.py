"""What an answered command says about a worker's status, by table."""

from typing import Any

import pytest

from rlbus.controller.grouping import new_plan
from rlbus.controller.learning import status_after
from rlbus.controller.testing import V6, V7, announcement, plan_of
from rlbus.schemas import (
    SHORT_SUM_CHARS,
    CommitWeights,
    DestroyGroup,
    FinishUpdate,
    FlushCache,
    Generation,
    GetLoras,
    GetVersion,
    InitGroup,
    LoadWeights,
    LorasData,
    LoraState,
    LorasView,
    LoraView,
    PauseGeneration,
    PauseMode,
    PauseView,
    ReceiveWeights,
    RenewLease,
    Result,
    ResultStatus,
    ResumeGeneration,
    Sleep,
    SleepData,
    SleepTag,
    WakeUp,
    WeightsData,
    WeightsState,
    WeightsView,
    WorkView,
)

pytestmark = pytest.mark.unit

PLAN = new_plan(plan_of("backend/1"), plan_of("backend/1").candidates)
HELD = PauseView(owner="ann", mode="keep", since=5.0)
LEASED = PauseView(owner="ann", mode="keep", since=5.0, expires_at=8.0)
CLEAN = WeightsView(state=WeightsState.CLEAN, version=V7, last_good=V7)
RECEIVE = ReceiveWeights(update_op_id="u", epoch=1, version=V7, manifest_digest="d", bucket_bytes=1)


def result(status: ResultStatus = ResultStatus.OK, data: Any = None) -> Result:
    return Result(op_id="u-x", component="backend", instance_id="1", boot_id="b", status=status, data=data)


@pytest.mark.parametrize(
    ("before", "body", "data", "expected"),
    [
        ({}, Sleep(), SleepData(asleep=(SleepTag.WEIGHTS,)), {"asleep": (SleepTag.WEIGHTS,)}),
        ({"asleep": (SleepTag.WEIGHTS,)}, WakeUp(), SleepData(asleep=()), {"asleep": ()}),
        ({}, FinishUpdate(version=V7), WeightsData(weights=CLEAN), {"weights": CLEAN}),
        (
            {},
            PauseGeneration(mode=PauseMode.WAIT),
            None,
            {"generation": Generation.PAUSED, "pause": PauseView(owner="u-x", mode="wait", since=9.0)},
        ),
        (
            {"pause": HELD},
            PauseGeneration(owner="bob"),
            None,
            {"pause": PauseView(owner="bob", mode="keep", since=5.0)},
        ),
        (
            {"pause": HELD, "generation": Generation.PAUSED},
            ResumeGeneration(),
            None,
            {"pause": None, "generation": Generation.RUNNING},
        ),
        ({}, InitGroup(plan=PLAN), None, {"epoch": 1}),
        ({"epoch": 3}, DestroyGroup(epoch=3), None, {"epoch": None}),
        ({"epoch": 4}, DestroyGroup(epoch=3), None, {"epoch": 4}),
        (
            {"weights": WeightsView(state=WeightsState.CLEAN, version=V6)},
            RECEIVE,
            None,
            {"weights": WeightsView(state=WeightsState.UPDATING, last_good=V6)},
        ),
        ({}, CommitWeights(update_op_id="u", version=V7), None, {"weights": CLEAN}),
        ({}, LoadWeights(path="/w", version=V7), None, {"weights": CLEAN}),
        ({}, GetVersion(), WeightsData(weights=CLEAN), {"weights": CLEAN}),
        ({"epoch": 2}, FlushCache(), None, {"epoch": 2}),
    ],
)
def test_an_answer_shows_what_the_command_did(
    before: dict[str, Any], body: Any, data: Any, expected: dict[str, Any]
) -> None:
    """Until the worker says so itself."""
    status = announcement("backend/1", **before).status
    after = status_after(status, body, result(data=data), 9.0)
    assert {name: getattr(after, name) for name in expected} == expected


@pytest.mark.parametrize("has_sums", [True, False])
def test_a_list_of_adapters_shows_them_with_their_bytes(has_sums: bool) -> None:
    """One that came in the place of another isn't taken for one of other bytes; older agents tell no sums."""
    one, two = "1" * 64, "2" * 64
    before = LorasView(ids=("a@1",), capacity=2, sums=(one[:SHORT_SUM_CHARS],) if has_sums else ())
    views = (
        LoraView(name="b", state=LoraState.DRAINING, revision=1, checksum=one),
        LoraView(name="a", state=LoraState.LOADED, revision=2, checksum=two),
    )
    status = announcement("backend/1", loras=before).status
    after = status_after(status, GetLoras(), result(data=LorasData(loras=views, capacity=2)), 9.0)
    sums = (two[:SHORT_SUM_CHARS],) if has_sums else ()
    assert after.loras == LorasView(ids=("a@2",), capacity=2, sums=sums, num_draining=1)


def test_a_list_of_adapters_shows_them_where_heartbeats_say_nothing() -> None:
    """The engine is too slow for those, and has answered."""
    views = (LoraView(name="a", state=LoraState.LOADED, revision=2, checksum="2" * 64),)
    status = announcement("backend/1").status
    assert status.loras is None
    after = status_after(status, GetLoras(), result(data=LorasData(loras=views, capacity=2)), 9.0)
    assert after.loras == LorasView(ids=("a@2",), capacity=2, sums=("2" * SHORT_SUM_CHARS,))


@pytest.mark.parametrize("status", [ResultStatus.REFUSED, ResultStatus.FAILED])
def test_a_command_that_was_not_done_shows_nothing(status: ResultStatus) -> None:
    """What it left is the worker's to say."""
    before = announcement("backend/1").status
    assert status_after(before, PauseGeneration(), result(status), 9.0) is before


@pytest.mark.parametrize(
    ("pause", "body", "expires_at"),
    [
        (None, PauseGeneration(owner="ann", lease_s=30.0), 39.0),
        (LEASED, PauseGeneration(owner="ann", lease_s=30.0), 39.0),
        (LEASED, PauseGeneration(owner="ann"), None),
        (HELD, PauseGeneration(owner="ann", lease_s=30.0), None),
        (LEASED, RenewLease(owner="ann", lease_s=30.0), 39.0),
        (LEASED, RenewLease(owner="ann"), None),
        (HELD, RenewLease(owner="ann", lease_s=30.0), None),
    ],
)
def test_a_pause_and_a_renewal_show_when_the_lease_ends(
    pause: PauseView | None, body: PauseGeneration | RenewLease, expires_at: float | None
) -> None:
    """As the worker itself decides: an explicit hold stays one."""
    status = announcement("backend/1", pause=pause).status
    after = status_after(status, body, result(), 9.0)
    assert after.pause == PauseView(
        owner="ann", mode="keep", since=9.0 if pause is None else 5.0, expires_at=expires_at
    )


@pytest.mark.parametrize(
    ("route", "status", "is_over"),
    [
        ("update_weights_from_disk", ResultStatus.OK, True),
        ("update_weights_from_disk", ResultStatus.FAILED, True),
        ("update_weights_from_disk", ResultStatus.REFUSED, False),
        ("init_weights_update_group", ResultStatus.FAILED, False),
    ],
)
def test_an_answer_ends_the_excuse_of_the_work_that_it_is_about(
    route: str, status: ResultStatus, is_over: bool
) -> None:
    """SCENARIOS 21: an error answer counts at once; a refused second one says nothing about the first."""
    before = announcement("backend/1", work=WorkView(route=route, since=0.0, lease_s=30.0)).status
    after = status_after(before, LoadWeights(path="/w", version=V7), result(status), 9.0)
    assert (after.work is None) is is_over
