"""One command to many workers, on the bus in memory, with scripted workers."""

import asyncio

import pytest

from rlbus._gather import SETTLE_GRACE_S
from rlbus._transport import Message
from rlbus.errors import PayloadTooLargeError
from rlbus.fanout import Gathered, fanout
from rlbus.schemas import (
    ChecksumsData,
    Command,
    FaultCode,
    LoadWeights,
    PauseGeneration,
    Result,
    ResultStatus,
    TensorSum,
    Version,
    WorkerId,
)
from rlbus.testing import run
from tests.unit.rlbus.scripted_workers import LIMITS, NS, Scene, now_s

pytestmark = pytest.mark.unit


def test_one_publish_reaches_every_worker_of_a_component_and_each_outcome_comes_back() -> None:
    """The order of the outcomes is that of the members."""

    async def scenario() -> tuple[list[WorkerId], bool, list[str], list[Command]]:
        scene = Scene()
        await scene.observe()
        await scene.add(3)
        members = [w.id for w in reversed(scene.workers)]
        got = await scene.pause(members=members)
        return (
            list(got),
            all(g.is_ok for g in got.values()),
            [m.subject for m in scene.published],
            scene.workers[0].heard,
        )

    order, all_ok, published, heard = run(scenario())
    assert order == ["backend/3", "backend/2", "backend/1"]
    assert all_ok
    assert published == ["dyn.ns.backend.rl.pause_generation"]
    assert [(c.op_id, c.term, c.members, c.body) for c in heard] == [("op", 1, ("3", "2", "1"), PauseGeneration())]


def test_256_workers_with_large_acks_are_gathered_fully() -> None:
    """SCENARIOS 55: nothing is lost for its size or number; 256 answers of about 40 kB each."""
    sums = tuple(TensorSum(name=f"layers.{i}.weight", checksum="0" * 16) for i in range(1000))

    async def scenario() -> tuple[int, int, int, float]:
        scene = Scene()
        await scene.add(256, data=ChecksumsData(algorithm="x", sums=sums))
        got = await scene.pause()
        data = [g.result.data for g in got.values() if g.result is not None]
        complete = [d for d in data if isinstance(d, ChecksumsData)]
        return len(got), len(complete), sum(len(d.sums) for d in complete), now_s()

    assert run(scenario()) == (256, 256, 256_000, 0.0)


def test_all_of_a_component_are_addressed_without_a_list_and_one_by_its_own_subject() -> None:
    """Each component gets the cheapest form of the same command."""

    async def scenario() -> list[tuple[str, tuple[str, ...] | None]]:
        scene = Scene()
        await scene.observe()
        await scene.add(2, component="backend")
        await scene.add(2, component="decode")
        await scene.add(1, component="prefill")
        got = await scene.pause(everybody={"backend": 2, "decode": 3, "prefill": 1})
        assert all(g.is_ok for g in got.values())
        return [(m.subject, w.heard[0].members) for m, w in zip(scene.published, scene.workers[::2], strict=True)]

    assert run(scenario()) == [
        ("dyn.ns.backend.rl.pause_generation", None),
        ("dyn.ns.decode.rl.pause_generation", ("3", "4")),
        ("dyn.ns.prefill.rl.pause_generation.5", None),
    ]


def test_workers_that_are_not_members_keep_still() -> None:
    """A stranger that answers all the same is dropped."""

    async def scenario() -> tuple[list[WorkerId], list[str]]:
        scene = Scene()
        _, _, third = await scene.add(3)
        stranger = scene.broker.connect("stranger")

        def intrude(message: Message) -> None:
            third.answer(message, Result(**third.base("op"), status=ResultStatus.FAILED))

        stranger.subscribe("dyn.ns.backend.rl.*", intrude)
        await stranger.barrier(1)
        got = await scene.pause(members=["backend/1", "backend/2"])
        return [w for w, g in got.items() if g.is_ok], third.runs

    assert run(scenario()) == (["backend/1", "backend/2"], [])


def test_slow_but_progressing_ends_well_and_stalled_does_not() -> None:
    """Twelve seconds of work with progress pass a stall limit of five; without progress they don't."""

    async def scenario() -> tuple[bool, FaultCode, dict[str, str], float, list[str]]:
        scene = Scene()
        slow, stuck = (await scene.add(1, takes_s=12.0)) + (await scene.add(1, takes_s=12.0, progresses=False))
        seen: list[str] = []
        got = await scene.pause(on_answer=lambda w, a: seen.append(f"{w} {type(a).__name__}"))
        fault = got[stuck.id].fault
        assert fault is not None
        return got[slow.id].is_ok, fault.code, fault.detail, now_s(), seen

    slow_ok, code, detail, ended_s, seen = run(scenario())
    assert slow_ok
    assert (code, detail) == (FaultCode.STALLED, {"settled": "running"})
    assert ended_s == 12.0
    assert seen[:2] == ["backend/1 Accepted", "backend/2 Accepted"]
    assert seen[2:] == ["backend/1 Progress"] * 11 + ["backend/1 Result"]


def test_the_deadline_ends_everything_within_the_grace() -> None:
    """A worker that runs on is reported as running, and its late result is dropped."""

    async def scenario() -> tuple[FaultCode, dict[str, str], float, int]:
        scene = Scene()
        (worker,) = await scene.add(1, takes_s=30.0)
        got = await scene.pause()
        fault = got[worker.id].fault
        assert fault is not None
        ended_s = now_s()
        await asyncio.sleep(20)
        return fault.code, fault.detail, ended_s, scene.bus.num_late_replies

    code, detail, ended_s, num_late = run(scenario())
    assert (code, detail) == (FaultCode.DEADLINE, {"settled": "running"})
    assert 20.0 <= ended_s <= 20.0 + 2 * SETTLE_GRACE_S
    assert num_late > 0


def test_no_members_is_no_work() -> None:
    """An empty fleet needs no special case of the caller."""

    async def scenario() -> tuple[dict[WorkerId, Gathered], list[Message]]:
        scene = Scene()
        await scene.observe()
        return await scene.pause(members=[]), scene.published

    assert run(scenario()) == ({}, [])


def test_a_member_named_twice_is_asked_once() -> None:
    """And has one outcome."""

    async def scenario() -> tuple[list[WorkerId], list[str]]:
        scene = Scene()
        (worker,) = await scene.add(1)
        got = await scene.pause(members=[worker.id, worker.id])
        return list(got), worker.runs

    assert run(scenario()) == (["backend/1"], ["op"])


def test_a_list_of_members_that_does_not_fit_one_message_is_split() -> None:
    """Every message stays below what the server takes; everybody is reached once."""

    async def scenario() -> tuple[int, list[list[str]], int]:
        scene = Scene(max_payload_bytes=400)
        await scene.observe()
        await scene.add(30)
        got = await scene.pause()
        assert all(len(m.data) <= 400 for m in scene.published)
        return sum(g.is_ok for g in got.values()), [w.runs for w in scene.workers], len(scene.published)

    num_ok, runs, num_published = run(scenario())
    assert (num_ok, runs) == (30, [["op"]] * 30)
    assert num_published > 1


def test_a_body_too_large_for_the_server_is_refused_before_anything_is_sent() -> None:
    """Named with its size; no inbox stays."""

    async def scenario() -> tuple[list[Message], int]:
        scene = Scene(max_payload_bytes=1000)
        await scene.observe()
        await scene.add(2)
        with pytest.raises(PayloadTooLargeError):
            await fanout(
                scene.bus,
                NS,
                LoadWeights(path="x" * 1000, version=Version()),
                members=[w.id for w in scene.workers],
                op_id="op",
                term=1,
                limits=LIMITS,
            )
        await asyncio.sleep(1)
        return scene.published, len(scene.bus._inboxes)

    assert run(scenario()) == ([], 0)
