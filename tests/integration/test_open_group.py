"""Groups are joined within a bound, and whoever keeps one from forming is named."""

import asyncio
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch

from rlbus.errors import ClosedError, ConfigError, DeadlineError, TransferError
from rlbus.schemas import GroupPlan, RankSpan, Rendezvous, Version
from rlbus.transfer import group as group_module
from rlbus.transfer import meeting as meeting_module
from rlbus.transfer.bounded import GiveUp
from rlbus.transfer.group import Group, open_group, prove
from rlbus.transfer.meeting import host_store
from rlbus.transfer.source import weight_source
from rlbus.transfer.torch_plane import TorchPlane
from tests.integration.test_server import listening_ports
from tests.tries import best_of, in_time

pytestmark = [pytest.mark.integration, pytest.mark.alone]

# What a wait of a second or less may take on a busy machine; the plans' own time is far longer.
SOON_S = 40.0


@pytest.fixture
def place() -> Iterator[Rendezvous]:
    """A store that lives as long as the test."""
    store = host_store("127.0.0.1")
    yield Rendezvous(host="127.0.0.1", port=store.port, prefix="p")
    del store


class StandingClock:
    """`time` of the joins of a test: it stands until the test moves it, so that a busy machine's pauses don't count."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._num_pauses: Counter[int] = Counter()

    def monotonic(self) -> float:
        """What time it is for a join."""
        return self._now_s

    def sleep(self, pause_s: float) -> None:
        """The pause between two looks of a rank that waits, in real time."""
        self._num_pauses[threading.get_ident()] += 1
        time.sleep(pause_s)

    def until_waiting(self, num_ranks: int) -> None:
        """Until so many ranks wait, and each has looked again since the last of them came."""
        until_s = time.monotonic() + SOON_S
        for _ in range(2):
            before = self._num_pauses.copy()
            while sum(num > before[rank] for rank, num in list(self._num_pauses.items())) < num_ranks:
                assert time.monotonic() < until_s
                time.sleep(0.002)

    def move(self, by_s: float) -> None:
        """Let time pass."""
        self._now_s += by_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    """Instead of the real one."""
    clock = StandingClock()
    for module in (group_module, meeting_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


def plan_at(place: Rendezvous, size: int = 2, *, epoch: int = 1, timeout_s: float = 60.0) -> GroupPlan:
    return GroupPlan(
        epoch=epoch,
        group_id="g",
        backend="gloo",
        num_trainer_ranks=1,
        world_size=size,
        spans=(
            RankSpan(component="decode", instance_id="7", first=1, num_ranks=1),
            RankSpan(component="decode", instance_id="9", first=2, num_ranks=size - 2),
        ),
        rendezvous=place,
        bucket_bytes=64,
        timeout_s=timeout_s,
    )


def together(*work: Callable[[], Group]) -> list[Future[Group]]:
    """Run all at once, each in a thread, until all have ended."""
    with ThreadPoolExecutor(len(work)) as pool:
        return [pool.submit(w) for w in work]


@contextmanager
def group_of(plan: GroupPlan) -> Iterator[list[Group]]:
    """Every rank of a group, in this process."""
    groups = [
        f.result() for f in together(*[lambda rank=rank: open_group(plan, rank) for rank in range(plan.world_size)])
    ]
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def on_all(groups: list[Group], work: Callable[[Group], object]) -> None:
    with ThreadPoolExecutor(len(groups)) as pool:
        for future in [pool.submit(work, group) for group in groups]:
            future.result()


def test_ranks_that_never_came_are_named_with_their_worker(place: Rendezvous, clock: StandingClock) -> None:
    """On every rank that did come, after the plan's time."""
    plan = plan_at(place, 4)
    with ThreadPoolExecutor(2) as pool:
        came = [pool.submit(open_group, plan, rank) for rank in (0, 2)]
        clock.until_waiting(2)
        assert not any(future.done() for future in came)
        clock.move(plan.timeout_s + 0.01)
    for future in came:
        with pytest.raises(TransferError) as caught:
            future.result()
        assert str(caught.value) == "join group 1: rank 1 of decode/7, rank 3 of decode/9 never came within 60 s"


def test_a_rank_that_is_taken_is_refused(place: Rendezvous, clock: StandingClock) -> None:
    """Two workers that think they are the same rank don't break the group for the rest: the second is told."""
    plan = plan_at(place, 3)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(open_group, plan, 1)
        clock.until_waiting(1)
        with pytest.raises(
            TransferError, match=r"join group 1: rank 1 of decode/7 is already there, from 127\.0\.0\.1 port"
        ):
            open_group(plan, 1)
        clock.move(plan.timeout_s + 0.01)
    with pytest.raises(TransferError, match="join group 1: rank 0 of the trainer, rank 2 of decode/9 never came"):
        first.result()


def test_a_rank_beyond_the_plan_and_a_strange_backend_are_refused(place: Rendezvous) -> None:
    """Before anybody is asked."""
    with pytest.raises(ConfigError, match=r"rank=2: group 1 has the ranks 0 to 1"):
        open_group(plan_at(place), 2)
    nccl = GroupPlan(
        epoch=1,
        group_id="g",
        backend="nccl",
        num_trainer_ranks=1,
        world_size=2,
        spans=(),
        rendezvous=place,
        bucket_bytes=64,
    )
    with pytest.raises(ConfigError, match="nccl needs a CUDA device"):
        open_group(nccl, 0)
    with pytest.raises(ConfigError, match="this build of torch has no NCCL"):
        open_group(nccl, 0, "cuda:0")


def test_nobody_at_the_rendezvous_is_an_error_in_time() -> None:
    """TCPStore alone would try for twice its time-out and more."""
    with nowhere() as place:
        began = time.monotonic()
        with pytest.raises(TransferError, match=r"can't be reached.*refused"):
            open_group(plan_at(place, timeout_s=0.5), 1)
        assert time.monotonic() - began < SOON_S


def test_a_pause_beyond_the_time_does_not_hide_that_nobody_was_there(clock: StandingClock) -> None:
    """A rank that a busy machine lets look late says what it found, and not only that it is late."""
    with nowhere() as place, ThreadPoolExecutor(1) as pool:
        plan = plan_at(place)
        joining = pool.submit(open_group, plan, 1)
        clock.until_waiting(1)
        clock.move(plan.timeout_s + 1.0)
        with pytest.raises(TransferError, match=r"can't be reached.*refused"):
            joining.result(SOON_S)


@contextmanager
def nowhere() -> Iterator[Rendezvous]:
    """A port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield Rendezvous(host="127.0.0.1", port=taken.getsockname()[1], prefix="p")


def test_a_rendezvous_that_says_nothing_is_left_behind_in_time() -> None:
    """SCENARIOS 23: a stopped trainer still takes connections; TCPStore's constructor then waits for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        plan = plan_at(Rendezvous(host="127.0.0.1", port=silent.getsockname()[1], prefix="p"), timeout_s=2.0)
        began = time.monotonic()
        with pytest.raises(DeadlineError, match="its thread was left behind"):
            open_group(plan, 1)
        assert time.monotonic() - began < SOON_S


def test_a_join_that_is_not_wanted_any_more_ends_at_once(place: Rendezvous) -> None:
    """From another thread, with the reason."""
    give_up = GiveUp()
    timer = threading.Timer(0.2, give_up.set, ["the op was cancelled"])
    timer.start()
    began = time.monotonic()
    with pytest.raises(TransferError, match="given up: the op was cancelled"):
        open_group(plan_at(place), 1, give_up=give_up)
    assert time.monotonic() - began < SOON_S
    timer.join()


def test_a_retry_under_the_next_epoch_sees_nothing_of_the_first(place: Rendezvous, clock: StandingClock) -> None:
    """Same store, same prefix: keys of the failed attempt don't disturb."""
    plan = plan_at(place)
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(open_group, plan, 0)
        clock.until_waiting(1)
        clock.move(plan.timeout_s + 0.01)
    with pytest.raises(TransferError, match="rank 1 of decode/7 never came"):
        alone.result()
    with group_of(plan_at(place, epoch=2)) as groups:
        on_all(groups, prove)
        assert [(g.rank, g.size, g.epoch, g.busy_s()) for g in groups] == [(0, 2, 2, 0.0), (1, 2, 2, 0.0)]


def test_the_interface_can_be_named_as_for_torch(place: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    """By GLOO_SOCKET_IFNAME; one that doesn't exist is an error, not another interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with group_of(plan_at(place, epoch=1)) as groups:
        on_all(groups, prove)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(TransferError, match=r"join group 2: .*nosuch0"):
        open_group(plan_at(place, epoch=2), 0)


def test_an_abort_breaks_its_own_group_only(place: Rendezvous) -> None:
    """Another group of the same processes goes on, and so do sockets that have nothing to do with it."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        far, _ = server.accept()
        with far, group_of(plan_at(place, epoch=1)) as first, group_of(plan_at(place, epoch=2)) as second:
            on_all([*first], prove)
            blocked = threading.Event()
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(first[1].broadcast, torch.zeros(16, dtype=torch.uint8), blocked.set)
                assert blocked.wait(SOON_S)
                first[1].abort("test")
                with pytest.raises(TransferError, match="broadcast in group 1: the group was left: test"):
                    waiting.result(SOON_S)
            with pytest.raises(TransferError, match="the group was left: test"):
                first[1].all_sum(1)
            with pytest.raises(TransferError):
                first[0].all_sum(1)
            on_all(second, prove)
            client.sendall(b"still here")
            assert far.recv(100) == b"still here"


def test_a_collective_ends_at_the_plans_time(place: Rendezvous) -> None:
    """When a member is there and does nothing."""
    limits_s = iter((3.0, 9.0, 27.0))

    def play() -> None:
        limit_s = next(limits_s)
        with ExitStack() as stack:
            began = time.monotonic()
            try:
                groups = stack.enter_context(group_of(plan_at(place, epoch=int(limit_s), timeout_s=limit_s)))
            except TransferError:
                # They are to meet within the same time.
                in_time("the join", time.monotonic() - began, limit_s)
                raise
            began = time.monotonic()
            with pytest.raises(TransferError):
                groups[0].all_sum(1)
            assert limit_s - 0.2 <= time.monotonic() - began < limit_s + SOON_S

    best_of(play, 3)


def test_a_proof_that_does_not_add_up_breaks_the_group(place: Rendezvous) -> None:
    """A member that takes part twice, or as somebody else, is found."""
    with group_of(plan_at(place)) as groups, ThreadPoolExecutor(2) as pool:
        proof = pool.submit(prove, groups[0])
        pool.submit(groups[1].all_sum, 7)
        with pytest.raises(TransferError, match="prove group 1: the ranks sum to 8, not 3"):
            proof.result()


def test_a_member_that_leaves_in_peace_ends_no_process(place: Rendezvous) -> None:
    """Closing is not aborting, and closing twice is nothing; the other finds out when it uses the group."""
    with group_of(plan_at(place)) as groups:
        on_all(groups, prove)
        groups[1].close()
        groups[1].close()
        with pytest.raises(TransferError, match="the group was left: closed"):
            groups[1].all_sum(1)
        with pytest.raises(TransferError):
            groups[0].all_sum(1)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*", ""])
def test_a_wildcard_is_never_advertised(host: str) -> None:
    """SCENARIOS 58: nobody could connect to it by that name."""
    with pytest.raises(ConfigError, match="not a wildcard"):
        asyncio.run(TorchPlane("gloo", host=host).rendezvous())


def test_the_store_listens_on_its_host_only() -> None:
    """SCENARIOS 25: on port 0, kept open by its owner. TCPStore alone would listen on every interface."""
    store = host_store("127.0.0.1")
    with pytest.raises(OSError, match=r"refused"):
        socket.create_connection(("127.0.0.2", store.port), timeout=5).close()
    with pytest.raises(TransferError, match=r"can't bind 192\.0\.2\.1"):
        host_store("192.0.2.1")


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost"])
def test_names_and_ipv6_addresses_are_hosts_too(host: str) -> None:
    """SCENARIOS 58: with or without brackets."""

    async def scenario() -> None:
        plane = TorchPlane("gloo", host=host)
        place = await plane.rendezvous()
        assert place == await plane.rendezvous()
        assert place.host == host.strip("[]")
        plan = plan_at(place)
        member = asyncio.create_task(asyncio.to_thread(join_and_prove, plan))
        await plane.join(plan)
        (await member).close()
        await plane.aclose()

    asyncio.run(scenario())


def join_and_prove(plan: GroupPlan) -> Group:
    group = open_group(plan, 1)
    prove(group)
    return group


def test_a_plane_is_refused_what_it_can_not_do() -> None:
    """Another backend than its own, sending without a group, anything after it was closed."""

    async def scenario() -> None:
        plane = TorchPlane("gloo")
        assert (plane.backend, plane.num_ranks, len(plane.sender_id)) == ("gloo", 1, 32)
        assert plane.sender_id != TorchPlane("auto").sender_id
        place = await plane.rendezvous()
        nccl = GroupPlan(
            epoch=1,
            group_id="g",
            backend="nccl",
            num_trainer_ranks=1,
            world_size=1,
            spans=(),
            rendezvous=place,
            bucket_bytes=64,
        )
        with pytest.raises(ConfigError, match="this trainer's data plane is gloo"):
            await plane.join(nccl)
        source = weight_source({})
        with pytest.raises(TransferError, match="no group was joined"):
            await plane.send(
                source, (), bucket_bytes=64, version=Version(), stream_id="op", on_progress=lambda _done, _total: None
            )
        await plane.aclose()
        await plane.aclose()
        with pytest.raises(ClosedError):
            await plane.rendezvous()
        # Not by connecting: anybody may have been given the port meanwhile.
        async with asyncio.timeout(SOON_S):
            while place.port in listening_ports(os.getpid()):  # noqa: ASYNC110 - a thread of the store's ends
                await asyncio.sleep(0.01)

    asyncio.run(scenario())
    with pytest.raises(ConfigError, match="there is no CUDA device"):
        TorchPlane("nccl")
    with pytest.raises(ConfigError, match='use "gloo"'):
        TorchPlane("mpi")


def test_leaving_ends_a_join_that_waits_for_members() -> None:
    """With the reason, within a moment; the plane can join again."""

    async def scenario() -> None:
        plane = TorchPlane("gloo")
        plan = plan_at(await plane.rendezvous())
        joining = asyncio.create_task(plane.join(plan))
        done, _ = await asyncio.wait({joining}, timeout=0.3)
        assert not done
        began = time.monotonic()
        await plane.leave("the worker is gone")
        assert time.monotonic() - began < SOON_S
        with pytest.raises(TransferError, match="given up: the worker is gone"):
            await joining
        plan = plan_at(await plane.rendezvous(), epoch=2)
        member = asyncio.create_task(asyncio.to_thread(join_and_prove, plan))
        await plane.join(plan)
        (await member).close()
        await plane.aclose()

    asyncio.run(scenario())
