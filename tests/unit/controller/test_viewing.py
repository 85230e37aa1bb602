"""How the fleet is told to people and clients: all of it, however many messages that takes."""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from rlbus._conversation import DEFAULT_PATIENCE
from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.controller.registry import Registry
from rlbus.controller.service import Controller
from rlbus.controller.testing import announcement, controller_on_bus
from rlbus.controller.viewing import Head, members_after, page_of, view_of
from rlbus.errors import RefusedError
from rlbus.schemas import FaultCode, FleetView, GetFleet, Target, Version, WorkerId
from rlbus.testing import LoopClock, MemoryBroker, run, sequential_ids
from tests.unit.controller.http.side import http_side

pytestmark = pytest.mark.unit

HEAD = Head(term=9, epoch=None, op_id="op")
# More than fit into one message.
NUM_MANY = 2000


def registry_of(num: int) -> Registry:
    """A registry of so many workers."""
    registry = Registry("test")
    for n in range(num):
        registry.hear(announcement(f"backend/{n + 1}"), 0.0)
    return registry


def on_large_fleet(
    scenario: Callable[[Controller, FleetClient, MemoryBroker], Coroutine[Any, Any, None]], num: int = NUM_MANY
) -> None:
    """A controller that has heard of `num` workers, and who asks it."""

    async def main() -> None:
        broker = MemoryBroker()
        async with (
            controller_on_bus(broker) as controller,
            Bus(broker.connect(), clock=LoopClock(), new_id=sequential_ids("op")) as bus,
        ):
            for n in range(num):
                controller.registry.hear(announcement(f"backend/{n + 1}"), LoopClock().now())
            await scenario(controller, FleetClient(bus, "test", caller="test"), broker)

    run(main())


def test_a_view_shows_liveness_admission_and_age() -> None:
    """What `rlbus status` prints."""
    registry = Registry("test")
    registry.hear(announcement("backend/1", epoch=4), 0.0)
    view = view_of(registry, registry.members(), 2.0, HEAD)
    (member,) = view.members
    assert (view.term, view.op_id, member.admitted, member.age_s, registry.max_epoch) == (9, "op", True, 2.0, 4)


def test_a_view_that_exceeds_a_message_is_told_in_pages() -> None:
    """DESIGN 3: what is a list is split; every worker is there once, in order, and so is wait_ready's answer."""

    async def scenario(controller: Controller, fleet: FleetClient, _: MemoryBroker) -> None:
        names = [m.worker for m in controller.registry.members()]
        assert len(msgspec.json.encode(controller.view())) > 1_000_000
        view = await fleet.status()
        assert [m.worker for m in view.members] == names
        assert view.next is None
        ready = await fleet.wait_ready(num_workers=NUM_MANY, target=Target(components=("backend",)))
        assert [m.worker for m in ready.members] == names

    on_large_fleet(scenario)


def test_http_answers_for_a_fleet_whose_view_exceeds_a_message() -> None:
    """Every question of it needs the view."""

    async def scenario(_: Controller, __: FleetClient, broker: MemoryBroker) -> None:
        async with http_side(broker) as client:
            paths = ("/weight_info", "/v1/models", "/is_paused", "/get_world_size", "/health")
            assert [(await client.get(path)).status_code for path in paths] == [200] * len(paths)
            assert len((await client.get("/v1/rl/workers")).json()["workers"]) == NUM_MANY

    on_large_fleet(scenario)


def test_who_asks_for_no_pages_gets_all_in_one_message_or_is_refused() -> None:
    """Clients from before there were pages would take the first for everything."""

    async def scenario(controller: Controller, fleet: FleetClient, _: MemoryBroker) -> None:
        old = GetFleet(op_id="old")
        subject = "dyn.test.controller.status"
        answer = await fleet.bus.request(subject, old, FleetView, limit_s=1.0)
        assert (len(answer.members), answer.next) == (300, None)

    on_large_fleet(scenario, 300)

    async def too_many(controller: Controller, fleet: FleetClient, _: MemoryBroker) -> None:
        with pytest.raises(RefusedError) as caught:
            await fleet._view(GetFleet(op_id="old"), None, DEFAULT_PATIENCE)
        assert caught.value.fault.code is FaultCode.TOO_LARGE

    on_large_fleet(too_many)


def test_a_page_has_at_most_as_many_as_were_asked_for_and_names_where_the_next_begins() -> None:
    """The last has no next; a worker that went in between is no reason to miss or repeat another."""
    registry = registry_of(5)
    seen: list[WorkerId] = []
    after: WorkerId | None = None
    for expected in (2, 2, 1):
        members = members_after(registry.members(), after)
        view = page_of(view_of(registry, members[:3], 0.0, HEAD), 2, 100_000)
        assert len(view.members) == expected
        seen.extend(m.worker for m in view.members)
        after = view.next
    assert (after, seen) == (None, [m.worker for m in registry.members()])
    left = members_after(registry.members(), WorkerId("backend/25"))
    assert [m.worker for m in left] == ["backend/3", "backend/4", "backend/5"]


def test_a_page_is_cut_by_its_bytes_and_never_empty() -> None:
    """Workers with many adapters take more room; one that is over the limit by itself goes alone."""
    registry = registry_of(5)
    view = view_of(registry, registry.members(), 0.0, HEAD)
    one = len(msgspec.json.encode(view.members[0]))
    page = page_of(view, 5, len(msgspec.json.encode(msgspec.structs.replace(view, members=()))) + 2 * one + 10)
    assert (len(page.members), page.next) == (2, "backend/2")
    assert len(page_of(view, 5, 1).members) == 1


def test_a_fleet_that_changes_between_pages_is_asked_for_anew() -> None:
    """A new leader or version: the pages before would tell of another fleet than those after."""

    async def scenario(controller: Controller, fleet: FleetClient, _: MemoryBroker) -> None:
        pages: list[WorkerId | None] = []
        tell = controller._viewing.page

        def counted(limit: int | None, after: WorkerId | None = None) -> FleetView:
            pages.append(after)
            if len(pages) == 3:
                controller.registry.committed(Version(step=1))
            return tell(limit, after)

        controller._viewing.page = counted  # type: ignore[method-assign]
        view = await fleet.status()
        assert pages.count(None) == 2
        assert len(view.members) == NUM_MANY
        assert not any(m.admitted for m in view.members)

    on_large_fleet(scenario)
