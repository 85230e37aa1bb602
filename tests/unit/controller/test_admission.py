"""What is refused before it begins, by table; and what an update starts from."""

from typing import Any

import msgspec
import pytest

from rlbus.controller import admission
from rlbus.controller.grouping import new_plan
from rlbus.controller.registry import Registry
from rlbus.controller.testing import TENSORS, V6, V7, announcement, plan_of, request_of
from rlbus.controller.update_state import Group
from rlbus.schemas import (
    FaultCode,
    Generation,
    PauseView,
    ReloadFleet,
    Target,
    TensorSpec,
    Version,
    WeightsState,
    WeightsView,
    WorkerId,
)
from rlbus.transfer.manifest import pages

pytestmark = pytest.mark.unit

ALL = Target()


def fleet(*messages: Any) -> Registry:
    registry = Registry("test")
    for message in messages:
        registry.hear(message, 0.0)
    return registry


def at(version: Version | None, state: WeightsState = WeightsState.CLEAN) -> WeightsView:
    return WeightsView(state=state, version=version)


GOOD = announcement("backend/1")


@pytest.mark.parametrize(
    ("changes", "worker", "code", "says"),
    [
        ({}, GOOD, None, ""),
        ({"require": 1}, GOOD, None, ""),
        ({"require": 0}, GOOD, FaultCode.BAD_MESSAGE, "require is 0, the target has 1 workers"),
        ({"require": 2}, GOOD, FaultCode.BAD_MESSAGE, "require is 2, the target has 1 workers"),
        ({"bucket_bytes": 15}, GOOD, FaultCode.BAD_MESSAGE, "bucket_bytes is 15; use 16 to 1073741824"),
        ({"bucket_bytes": 10**12}, GOOD, FaultCode.BAD_MESSAGE, "bucket_bytes is 1000000000000; use 16 to 1073741824"),
        (
            {"version": Version(step=2**53 + 1)},
            GOOD,
            FaultCode.BAD_MESSAGE,
            f"version is 0.{2**53 + 1}; use numbers from 0 to {2**53}",
        ),
        ({"num_trainer_ranks": 0}, GOOD, FaultCode.BAD_MESSAGE, "num_trainer_ranks is 0, at least 1 is needed"),
        ({"stall_s": 0.0}, GOOD, FaultCode.BAD_MESSAGE, "stall_s is 0; use more than 0 and at most 86400 seconds"),
        ({"version": Version(step=-1)}, GOOD, FaultCode.BAD_MESSAGE, f"version is 0.-1; use numbers from 0 to {2**53}"),
        (
            {"backend": "nccl"},
            GOOD,
            FaultCode.NO_ROUTE,
            "backend/1 can't join a nccl group; its backends: fake",
        ),
        (
            {},
            announcement("backend/1", routes=("hello",)),
            FaultCode.NO_ROUTE,
            "backend/1 (fake) doesn't serve update_weights_from_distributed",
        ),
        (
            {},
            announcement("backend/1", world_size=0),
            FaultCode.WRONG_STATE,
            "backend/1 says that its world size is 0",
        ),
    ],
)
def test_an_update_that_cannot_be_is_refused_with_the_reason(
    changes: dict[str, Any], worker: Any, code: FaultCode | None, says: str
) -> None:
    """Before anything is sent to anybody."""
    registry = fleet(worker)
    found = admission.check_update(registry, request_of(**changes), registry.addressable(ALL), TENSORS)
    assert (None if found is None else found.code, "" if found is None else found.message) == (code, says)


def test_a_verb_that_some_do_not_serve_is_refused_with_who_can_not_and_who_can() -> None:
    """So that whoever asked can address the others, without looking for them."""
    plain = [announcement(f"backend/{number}", routes=("hello",)) for number in range(1, 11)]
    able = announcement("vllm/1", routes=("hello", "load_lora"))
    members = fleet(*plain, able).addressable(ALL)
    found = admission.check_route(members, "load_lora")
    assert found is not None
    assert found.code is FaultCode.NO_ROUTE
    assert found.message.startswith("backend/1 (fake), backend/")
    assert found.message.endswith(
        " and 2 more don't serve load_lora; address those that do (--worker, --component): vllm/1"
    )
    assert admission.check_route(members, "hello") is None


def test_an_unknown_manifest_and_an_unknown_dtype_are_refused() -> None:
    """The first can be put and tried again, the second can't be sent at all."""
    registry = fleet(GOOD)
    members = registry.addressable(ALL)
    unknown = admission.check_update(registry, request_of(), members, None)
    odd = admission.check_update(registry, request_of(), members, (TensorSpec(name="x", dtype="int3", shape=(1,)),))
    assert unknown is not None
    assert (unknown.code, unknown.retryable) == (FaultCode.MANIFEST_UNKNOWN, True)
    assert odd is not None
    assert (odd.code, odd.detail["tensor"]) == (FaultCode.MANIFEST_MISMATCH, "x")


@pytest.mark.parametrize(
    ("version", "allow_rollback", "code"),
    [
        (Version(step=8), False, None),
        (Version(incarnation=1, step=0), False, None),
        (V7, False, FaultCode.VERSION_REGRESSION),
        (V6, False, FaultCode.VERSION_REGRESSION),
        (V6, True, None),
    ],
)
def test_a_version_has_to_be_newer_or_a_rollback(
    version: Version, allow_rollback: bool, code: FaultCode | None
) -> None:
    """SCENARIOS 11 and 12: ordered by incarnation and step."""
    registry = fleet(announcement("backend/1", weights=at(V7)))
    found = admission.check_version(registry, registry.addressable(ALL), version, allow_rollback=allow_rollback)
    assert (None if found is None else found.code) == code


def test_the_fleets_own_version_may_go_to_workers_that_lack_it() -> None:
    """So a torn or late worker is caught up without a new version."""
    registry = fleet(
        announcement("backend/1", weights=at(V7)), announcement("backend/2", weights=at(None, WeightsState.DIRTY))
    )
    torn = registry.addressable(Target(workers=(WorkerId("backend/2"),)))
    everybody = registry.addressable(ALL)
    assert admission.check_version(registry, torn, V7, allow_rollback=False) is None
    assert admission.check_version(registry, everybody, V7, allow_rollback=False) is not None


@pytest.mark.parametrize(
    ("fleet_version", "asked", "expected"),
    [
        (None, None, Version(step=1)),
        (Version(incarnation=2, step=4), None, Version(incarnation=2, step=5)),
        (V7, Version(step=20), Version(step=20)),
    ],
)
def test_a_reload_is_the_fleets_next_step_unless_it_names_one(
    fleet_version: Version | None, asked: Version | None, expected: Version
) -> None:
    """Within the fleet's incarnation."""
    registry = fleet(announcement("backend/1", weights=at(fleet_version)))
    assert admission.reload_version(registry, ReloadFleet(op_id="r", path="/w", version=asked)) == expected


def test_a_target_without_anybody_says_what_is_there() -> None:
    """The likely mistake is a component's name."""
    found = admission.check_target(fleet(GOOD), Target(components=("decode",)))
    assert found is not None
    assert found.message == "the target matches no worker that is there (components seen: backend)"
    empty = admission.check_target(fleet(), ALL)
    assert empty is not None
    assert empty.message == "no worker is there (components seen: none)"


def test_named_workers_have_to_be_there() -> None:
    """An op on a list doesn't silently become one on a part of it."""
    found = admission.check_target(fleet(GOOD), Target(workers=(WorkerId("backend/1"), WorkerId("backend/9"))))
    assert found is not None
    assert (found.code, found.message) == (FaultCode.NO_WORKER, "can't address backend/9: never seen")


@pytest.mark.parametrize(
    ("owner", "generation", "expected"),
    [
        ("ann", Generation.PAUSED, True),
        ("u-pause", Generation.PAUSED, False),
        ("ann", Generation.RUNNING, False),
    ],
)
def test_a_hold_is_a_pause_that_is_not_an_ops_own(owner: str, generation: Generation, expected: bool) -> None:
    """What a failed update left paused is let go by the next; what a person holds isn't."""
    pause = PauseView(owner=owner, mode="keep", since=1.0)
    registry = fleet(announcement("backend/1", generation=generation, pause=pause))
    assert bool(admission.held(registry.addressable(ALL))) is expected


def plan_for(registry: Registry, current: Group | None = None, stall_s: float = 30.0) -> Any:
    return admission.plan_update(
        registry,
        request_of(stall_s=stall_s),
        registry.addressable(ALL),
        TENSORS,
        pages(TENSORS, 100_000),
        current,
        60.0,
    )


def test_ranks_follow_component_and_number_not_the_text_of_the_number() -> None:
    """backend/10 comes after backend/9."""
    registry = fleet(*(announcement(w) for w in ("decode/1", "backend/10", "backend/9")))
    plan = plan_for(registry)
    assert [c.worker for c in plan.candidates] == ["backend/9", "backend/10", "decode/1"]
    assert (plan.total_bytes, plan.group_timeout_s) == (32, 60.0)
    assert plan_for(registry, stall_s=90.0).group_timeout_s == 90.0


def test_a_new_epoch_is_above_every_one_that_any_worker_named() -> None:
    """Also above those of a controller before this one."""
    assert plan_for(fleet(announcement("backend/1", epoch=41))).next_epoch == 42


@pytest.mark.parametrize(
    ("second", "is_whole", "leavers"),
    [
        (announcement("backend/2", epoch=1), True, ["backend/1", "backend/2"]),
        (announcement("backend/2", epoch=None), False, ["backend/1", "backend/2"]),
        (announcement("backend/2", epoch=1, boot_id="new"), False, ["backend/1", "backend/2"]),
        (None, False, ["backend/1"]),
    ],
)
def test_a_group_is_whole_only_if_each_of_its_workers_says_so(second: Any, is_whole: bool, leavers: list[str]) -> None:
    """In the same process, and still in that epoch."""
    candidates = plan_of("backend/1", "backend/2")
    group = Group(
        new_plan(candidates, candidates.candidates),
        "sender",
        {WorkerId("backend/1"): "boot", WorkerId("backend/2"): "boot"},
    )
    messages = [announcement("backend/1", epoch=1), *([] if second is None else [second])]
    plan = plan_for(fleet(*messages), group)
    assert (plan.is_whole, list(plan.leavers)) == (is_whole, leavers)


@pytest.mark.parametrize(("deadline_s", "is_good"), [(0.1, True), (86_400.0, True), (0.0, False), (1e6, False)])
def test_a_deadline_is_a_positive_number_that_can_be_kept(deadline_s: float, is_good: bool) -> None:
    """Nothing here waits for longer than a day."""
    assert (admission.check_deadline(deadline_s) is None) is is_good


def test_requests_are_data_and_stay_as_they_are() -> None:
    """A plan carries the request itself."""
    registry = fleet(GOOD)
    assert plan_for(registry).request == msgspec.structs.replace(request_of(), stall_s=30.0)
