"""Who is in the fleet, by table: liveness, boots, admission, versions, and who is missing."""

from typing import Any

import pytest

from rlbus.controller import registry as registry_module
from rlbus.controller.liveness import MAX_INTERVAL_S
from rlbus.controller.registry import FORGET_AFTER_S, MAX_SEEN_TERM, Gone, Joined, Registry, Updated
from rlbus.controller.testing import V6, V7, announcement
from rlbus.schemas import (
    Generation,
    Goodbye,
    Liveness,
    PauseView,
    Target,
    Version,
    WeightsState,
    WeightsView,
    WorkerId,
    WorkView,
)

pytestmark = pytest.mark.unit

W1, W2, W3 = WorkerId("backend/1"), WorkerId("backend/2"), WorkerId("backend/3")
ALL = Target()


def clean(version: Version | None) -> WeightsView:
    return WeightsView(state=WeightsState.CLEAN, version=version, last_good=version)


def fleet(*messages: Any) -> Registry:
    registry = Registry("test")
    for message in messages:
        registry.hear(message, 0.0)
    return registry


def liveness(registry: Registry, worker: WorkerId = W1) -> Liveness:
    member = registry.get(worker)
    assert member is not None
    return member.liveness


def reason(registry: Registry, worker: WorkerId = W1) -> str | None:
    member = registry.get(worker)
    assert member is not None
    return registry.unadmitted(member)


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [
        (0.0, Liveness.ALIVE),
        (12.4, Liveness.ALIVE),
        (12.5, Liveness.SUSPECT),
        (19.9, Liveness.SUSPECT),
        (20.0, Liveness.DEAD),
        (500.0, Liveness.DEAD),
    ],
)
def test_silence_is_judged_by_the_workers_own_interval(age_s: float, expected: Liveness) -> None:
    """Suspect after 2.5 intervals of 5 s, dead after 4."""
    registry = fleet(announcement("backend/1"))
    registry.tick(age_s)
    assert liveness(registry) is expected


@pytest.mark.parametrize(
    ("lease_s", "age_s", "expected"),
    [
        (30.0, 20.0, Liveness.ALIVE),
        (30.0, 29.9, Liveness.ALIVE),
        (30.0, 30.0, Liveness.SUSPECT),
        (30.0, 37.4, Liveness.SUSPECT),
        (30.0, 37.5, Liveness.DEAD),
        (3.0, 12.4, Liveness.ALIVE),  # shorter than what everybody may
        (3.0, 20.0, Liveness.DEAD),
        (1e9, 120.0, Liveness.SUSPECT),  # nobody is excused for ever
        (-5.0, 20.0, Liveness.DEAD),
    ],
)
def test_declared_work_excuses_silence_for_its_lease(lease_s: float, age_s: float, expected: Liveness) -> None:
    """SCENARIOS 21: suspect when the lease is over, dead as long after it as usual."""
    work = WorkView(route="update_weights_from_distributed", since=0.0, lease_s=lease_s)
    registry = fleet(announcement("backend/1", work=work))
    registry.tick(age_s)
    assert liveness(registry) is expected


def test_each_heartbeat_renews_the_lease_of_declared_work_and_the_end_of_it_ends_the_excuse() -> None:
    """SCENARIOS 21: measured from when the message came, by our clock alone."""
    work = WorkView(route="update_weights_from_disk", since=1e12, lease_s=30.0)
    registry = fleet(announcement("backend/1", work=work))
    registry.hear(announcement("backend/1", seq=2, work=work), 25.0)
    registry.tick(54.0)
    assert liveness(registry) is Liveness.ALIVE
    registry.hear(announcement("backend/1", seq=3), 54.0)
    registry.tick(75.0)
    assert liveness(registry) is Liveness.DEAD


def test_an_error_counts_at_once_whatever_work_was_declared() -> None:
    """SCENARIOS 21: a goodbye, a restart, and an answer that ends the work."""
    work = WorkView(route="update_weights_from_disk", since=0.0, lease_s=30.0)
    registry = fleet(announcement("backend/1", work=work))
    (change,) = registry.hear(announcement("backend/1", boot_id="new", seq=1, work=work), 1.0)
    assert isinstance(change, Joined)
    assert change.is_reboot
    registry.hear(Goodbye(boot_id="new", component="backend", instance_id="1", reason="engine died"), 2.0)
    assert liveness(registry) is Liveness.LEFT


def test_a_worker_with_a_longer_interval_may_be_silent_longer() -> None:
    """Each worker is held to what it announced itself."""
    registry = fleet(announcement("backend/1"), announcement("backend/2", interval_s=30.0))
    registry.tick(30.0)
    assert (liveness(registry), liveness(registry, W2)) == (Liveness.DEAD, Liveness.ALIVE)


def test_an_interval_beyond_reason_is_cut() -> None:
    """Nobody can claim to be alive for ever."""
    registry = fleet(announcement("backend/1", interval_s=1e9))
    registry.tick(4 * MAX_INTERVAL_S)
    assert liveness(registry) is Liveness.DEAD


def test_death_is_told_once_and_a_heartbeat_brings_the_worker_back() -> None:
    """Gone, then nothing, then Joined again under the same boot."""
    registry = fleet(announcement("backend/1"))
    changes = registry.tick(21.0)
    assert [type(c) for c in changes] == [Gone]
    assert registry.tick(22.0) == ()
    assert registry.addressable(ALL) == ()
    back = registry.hear(announcement("backend/1", seq=2), 23.0)
    assert [type(c) for c in back] == [Joined]
    assert liveness(registry) is Liveness.ALIVE


def test_a_late_or_repeated_announcement_changes_nothing() -> None:
    """A larger seq of the same boot wins over a smaller one that arrives later."""
    registry = fleet(announcement("backend/1", seq=5, weights=clean(V6)))
    assert registry.hear(announcement("backend/1", seq=5), 1.0) == ()
    assert registry.hear(announcement("backend/1", seq=4), 1.0) == ()
    assert [type(c) for c in registry.hear(announcement("backend/1", seq=6), 1.0)] == [Updated]


def test_a_new_boot_replaces_the_old_for_good() -> None:
    """The restarted worker counts from its first seq; what the old process still says is dropped."""
    registry = fleet(announcement("backend/1", boot_id="old", seq=90))
    (change,) = registry.hear(announcement("backend/1", boot_id="new", seq=1), 1.0)
    assert isinstance(change, Joined)
    assert change.is_reboot
    assert registry.hear(announcement("backend/1", boot_id="old", seq=91), 2.0) == ()
    member = registry.get(W1)
    assert member is not None
    assert member.boot_id == "new"


def test_a_boot_that_was_replaced_is_heard_again_when_its_successor_is_dead() -> None:
    """Its predecessor's first message came late, and looked like a newer boot's; the one that still speaks lives."""
    registry = fleet(announcement("backend/1", boot_id="now", seq=5))
    registry.hear(announcement("backend/1", boot_id="before", seq=1), 1.0)
    assert registry.hear(announcement("backend/1", boot_id="now", seq=6), 2.0) == ()
    registry.tick(100.0)
    (change,) = registry.hear(announcement("backend/1", boot_id="now", seq=7), 100.0)
    assert isinstance(change, Joined)
    assert not change.is_reboot
    assert registry.hear(announcement("backend/1", boot_id="before", seq=2), 101.0) == ()
    member = registry.get(W1)
    assert member is not None
    assert (member.boot_id, member.gone) == ("now", None)


def test_a_goodbye_takes_a_worker_out_at_once_and_only_its_own_boot_may_say_it() -> None:
    """The goodbye of a process that was replaced is not that of its successor."""
    registry = fleet(announcement("backend/1", boot_id="new"))
    assert registry.hear(Goodbye(boot_id="old", component="backend", instance_id="1"), 1.0) == ()
    (change,) = registry.hear(Goodbye(boot_id="new", component="backend", instance_id="1"), 1.0)
    assert isinstance(change, Gone)
    assert liveness(registry) is Liveness.LEFT
    assert registry.hear(announcement("backend/1", boot_id="new", seq=2), 2.0) == ()


def test_silence_that_everybody_shared_kills_nobody() -> None:
    """SCENARIOS 22: while our own connection is down ages stand still, and start again when it is back."""
    registry = fleet(announcement("backend/1"), announcement("backend/2"))
    registry.disconnected(5.0)
    assert registry.tick(100.0) == ()
    registry.reconnected(100.0)
    assert registry.tick(112.0) == ()
    assert {m.liveness for m in registry.members()} == {Liveness.ALIVE}
    assert {type(c) for c in registry.tick(121.0)} == {Gone}


def test_who_was_dead_before_a_disconnect_stays_dead() -> None:
    """A reconnect excuses silence, it raises nobody."""
    registry = fleet(announcement("backend/1"))
    registry.tick(30.0)
    registry.disconnected(31.0)
    registry.reconnected(60.0)
    assert liveness(registry) is Liveness.DEAD


def test_an_announcement_of_another_namespace_is_refused() -> None:
    """A descriptor that contradicts its subject is not this fleet's."""
    registry = fleet(announcement("backend/1", namespace="other"))
    assert (registry.members(), registry.num_refused) == ((), 1)


def test_the_dead_are_forgotten_after_a_while() -> None:
    """A view doesn't grow with every restart for ever."""
    registry = fleet(announcement("backend/1"))
    registry.tick(21.0)
    registry.tick(FORGET_AFTER_S + 1)
    assert registry.members() == ()


def test_a_full_registry_lets_the_longest_dead_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on members never keeps a live worker out for a dead one."""
    monkeypatch.setattr(registry_module, "MAX_MEMBERS", 2)
    registry = fleet(announcement("backend/1"))
    registry.tick(21.0)
    registry.hear(announcement("backend/2"), 21.0)
    registry.hear(announcement("backend/3"), 21.0)
    assert [m.worker for m in registry.members()] == [W2, W3]
    registry.hear(announcement("backend/4"), 21.0)
    assert ([m.worker for m in registry.members()], registry.num_refused) == ([W2, W3], 1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"weights": WeightsView(state=WeightsState.UNKNOWN)}, None),
        ({"weights": WeightsView(state=WeightsState.UNKNOWN, last_good=V6)}, "weights are unknown"),
        ({"weights": WeightsView(state=WeightsState.DIRTY)}, "weights are dirty"),
        ({"weights": WeightsView(state=WeightsState.UPDATING)}, "weights are updating"),
        ({"generation": Generation.UNKNOWN}, "generation is unknown"),
        (
            {"generation": Generation.PAUSED, "pause": PauseView(owner="ann", mode="keep", since=1.0)},
            "generation is paused by ann",
        ),
    ],
)
def test_before_the_first_update_everybody_clean_and_running_is_admitted(
    changes: dict[str, Any], expected: str | None
) -> None:
    """A fleet version of None: what the engines were started with is the fleet's weights."""
    assert reason(fleet(announcement("backend/1", **changes))) == expected


def test_only_the_fleets_version_is_admitted() -> None:
    """SCENARIOS 8: alive but behind isn't enough; neither is a fresh worker that has no version at all."""
    registry = fleet(
        announcement("backend/1", weights=clean(V7)),
        announcement("backend/2", weights=clean(V6)),
        announcement("backend/3"),
    )
    assert registry.version == V7
    assert reason(registry, W1) is None
    assert reason(registry, W2) == "version 0.6, the fleet is at 0.7"
    assert reason(registry, W3) == "version none, the fleet is at 0.7"


def test_a_suspect_worker_is_not_admitted_but_still_addressed() -> None:
    """No new rollouts to who may be dying; ops still reach it."""
    registry = fleet(announcement("backend/1"))
    registry.tick(13.0)
    assert reason(registry) == "silent for more than 2.5 of its intervals"
    assert [m.worker for m in registry.addressable(ALL)] == [W1]


def test_the_fleet_version_grows_by_incarnation_and_then_by_step() -> None:
    """SCENARIOS 11: versions are ordered pairs."""
    registry = fleet(announcement("backend/1", weights=clean(Version(incarnation=1, step=1))))
    registry.hear(announcement("backend/2", weights=clean(Version(incarnation=0, step=99))), 1.0)
    assert registry.version == Version(incarnation=1, step=1)


def test_a_rollback_holds_although_others_still_announce_the_newer_version() -> None:
    """Who stayed at the version that was given up doesn't pull the fleet back to it, and is not admitted."""
    registry = fleet(announcement("backend/1", weights=clean(V7)), announcement("backend/2", weights=clean(V7)))
    registry.committed(Version(step=5))
    registry.hear(announcement("backend/1", seq=2, weights=clean(Version(step=5))), 1.0)
    registry.hear(announcement("backend/2", seq=2, weights=clean(V7)), 1.0)
    assert registry.version == Version(step=5)
    assert reason(registry, W2) == "version 0.7, the fleet is at 0.5"
    registry.committed(Version(step=8))
    registry.hear(announcement("backend/2", seq=3, weights=clean(Version(step=9))), 2.0)
    assert registry.version == Version(step=9)


def test_two_workers_with_one_system_url_are_not_both_addressed() -> None:
    """SCENARIOS 25: the later claim is refused, and stands when the first is gone."""
    registry = fleet(
        announcement("backend/1", system_url="http://h:8000"), announcement("backend/2", system_url="http://h:8000")
    )
    assert [m.worker for m in registry.addressable(ALL)] == [W1]
    assert reason(registry, W2) == "its system_url http://h:8000 is already that of backend/1"
    registry.hear(announcement("backend/2", seq=2, system_url="http://h:8000"), 18.0)
    registry.tick(21.0)
    assert [m.worker for m in registry.addressable(ALL)] == [W2]


def test_a_worker_that_changes_its_url_gives_the_old_one_free() -> None:
    """A claim is that of the present announcement."""
    registry = fleet(announcement("backend/1", boot_id="x", system_url="http://h:1"))
    registry.hear(announcement("backend/1", boot_id="y", system_url="http://h:2"), 1.0)
    registry.hear(announcement("backend/2", system_url="http://h:1"), 1.0)
    assert [m.worker for m in registry.addressable(ALL)] == [W1, W2]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (ALL, ["backend/1", "backend/2", "decode/1"]),
        (Target(components=("backend",)), ["backend/1", "backend/2"]),
        (Target(workers=(W2,)), ["backend/2"]),
        (Target(components=("decode",), workers=(W1,)), ["backend/1", "decode/1"]),
        (Target(components=("nobody",)), []),
    ],
)
def test_a_target_names_all_or_components_or_workers(target: Target, expected: list[str]) -> None:
    """Both kinds of names add up."""
    registry = fleet(announcement("decode/1"), announcement("backend/2"), announcement("backend/1"))
    assert [m.worker for m in registry.addressable(target)] == expected


def test_named_workers_that_cannot_be_addressed_come_with_the_reason() -> None:
    """Never seen, dead, left: each in its own words."""
    registry = fleet(announcement("backend/1"))
    registry.tick(21.0)
    assert registry.unaddressable(Target(workers=(W1, W2))) == {W1: "dead: silent for 21 s", W2: "never seen"}


def test_the_missing_are_named_and_counted() -> None:
    """SCENARIOS 16: what the fleet lacks, who is there, and who isn't counted."""
    registry = fleet(announcement("backend/1", world_size=2))
    registry.tick(19.0)
    registry.hear(announcement("backend/2", world_size=4), 19.0)
    registry.tick(25.0)
    missing = registry.missing(ALL, world_size=8, num_workers=None)
    assert missing == "world size is 4 of 8; there: backend/2 (4); not counted: backend/1 (dead: silent for 25 s)"
    assert registry.missing(ALL, world_size=4, num_workers=1) is None
    named = registry.missing(Target(workers=(W2, W3)), world_size=None, num_workers=2)
    assert named == "1 of 2 workers are there; missing backend/3 (never seen); there: backend/2 (4)"


def test_what_an_answer_showed_counts_until_the_next_announcement() -> None:
    """Only for the boot that answered."""
    registry = fleet(announcement("backend/1"))
    member = registry.get(W1)
    assert member is not None
    paused = announcement("backend/1", generation=Generation.PAUSED).status
    registry.learn(W1, "other", paused)
    assert reason(registry) is None
    registry.learn(W1, "boot", paused)
    assert reason(registry) == "generation is paused"
    registry.hear(announcement("backend/1", seq=2), 1.0)
    assert reason(registry) is None


@pytest.mark.parametrize(
    ("gap_s", "expected"),
    [(0.25, Liveness.DEAD), (2.0, Liveness.DEAD), (2.1, Liveness.ALIVE), (60.0, Liveness.ALIVE)],
)
def test_a_registry_that_stood_still_itself_declares_nobody_dead(gap_s: float, expected: Liveness) -> None:
    """A tick later than eight of its intervals: what was said meanwhile hasn't been read yet."""
    registry = Registry("test", tick_s=0.25)
    registry.hear(announcement("backend/1"), 0.0)
    registry.tick(20.0 - gap_s)
    registry.hear(announcement("backend/2"), 20.0 - gap_s)
    registry.tick(20.0)
    assert liveness(registry) is expected


def test_who_stays_silent_after_we_stood_still_dies_all_the_same() -> None:
    """The ages restart, they don't end."""
    registry = Registry("test", tick_s=0.25)
    registry.hear(announcement("backend/1"), 0.0)
    registry.tick(0.25)
    registry.tick(60.0)
    for quarter in range(1, 81):
        registry.tick(60.0 + quarter / 4)
    assert liveness(registry) is Liveness.DEAD


def test_an_announcement_sent_before_an_answer_does_not_replace_what_the_answer_showed() -> None:
    """They come on two subscriptions, so the older may be read later."""
    registry = fleet(announcement("backend/1"))
    paused = announcement("backend/1", generation=Generation.PAUSED).status
    registry.learn(W1, "boot", paused, 3)
    assert registry.hear(announcement("backend/1", seq=3), 1.0) == ()
    assert reason(registry) == "generation is paused"
    registry.hear(announcement("backend/1", seq=4), 1.0)
    assert reason(registry) is None


def test_whom_nobody_heard_is_left_out_until_it_announces_itself() -> None:
    """Suspect at once, also after a tick and a reconnect of ours."""
    registry = fleet(announcement("backend/1"), announcement("backend/2"))
    registry.unheard(W1)
    registry.tick(1.0)
    registry.reconnected(1.0)
    registry.tick(2.0)
    assert liveness(registry) is Liveness.SUSPECT
    assert reason(registry) == "nobody listened on its subject when it was last sent a command"
    assert [m.worker for m in registry.addressable(ALL)] == [W2]
    registry.hear(announcement("backend/1", seq=2), 3.0)
    assert (liveness(registry), reason(registry)) == (Liveness.ALIVE, None)


def test_the_newest_term_is_the_largest_that_a_worker_may_say() -> None:
    """What only nonsense reaches is not believed: terms must not be used up."""
    registry = Registry("test", term=5)
    for number, term in enumerate((6, 9, MAX_SEEN_TERM + 1, 2**53 - 1, 7)):
        registry.hear(announcement(f"backend/{number + 1}", term=term), 0.0)
    assert registry.newest_term == 9


def test_a_worker_that_has_seen_a_newer_term_refuses_us_and_says_so() -> None:
    """Every command of ours would be refused as stale."""
    registry = Registry("test", term=5)
    registry.hear(announcement("backend/1", term=6), 0.0)
    registry.hear(announcement("backend/2", term=5), 0.0)
    assert reason(registry) == "refuses this controller: it has seen term 6, ours is 5"
    assert reason(registry, W2) is None
