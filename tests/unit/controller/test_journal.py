"""The journal of a leader: written before an op begins, behind it afterwards, and never over a later leader's."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rlbus.controller.journal import LORAS_KEY, MAX_ENTRIES, VERSION_KEY, Journal
from rlbus.errors import DeadlineError
from rlbus.schemas import (
    FleetLora,
    FlushFleet,
    FolderSource,
    LoraMark,
    OpStatus,
    Outcome,
    Report,
    Version,
    WorkerId,
    WorkerOutcome,
)
from rlbus.testing import Faults, LoopClock, MemoryBroker, MemoryKv, MemoryTransport, run

pytestmark = pytest.mark.unit

WORKERS = (WorkerId("backend/1"), WorkerId("backend/2"))
Scenario = Callable[[MemoryTransport, Journal], Coroutine[Any, Any, None]]


def with_journal(scenario: Scenario) -> None:
    """Run a scenario with the journal of a leader of term 10, which writes."""

    async def main() -> None:
        transport = MemoryBroker().connect()
        journal = await opened(transport, 10)
        running = asyncio.create_task(journal.run())
        try:
            await scenario(transport, journal)
        finally:
            running.cancel()
            await asyncio.wait({running})

    run(main())


async def opened(transport: MemoryTransport, term: int) -> Journal:
    """What a leader of this term reads."""
    journal = Journal(MemoryKv(transport), LoopClock(), term)
    await journal.open()
    return journal


def report(op_id: str, status: OpStatus = OpStatus.OK, **changes: Any) -> Report:
    outcomes = tuple(WorkerOutcome(worker=w, outcome=Outcome.OK, phase="flush") for w in WORKERS)
    return Report(op_id=op_id, op="flush", status=status, outcomes=outcomes, phases_s={}, took_s=1.0, **changes)


def test_a_journal_that_could_be_read_in_part_is_asked_for_the_rest_alone() -> None:
    """While a fifth of the store's calls is lost: to begin anew each time would take a leader for ever."""

    async def scenario(transport: MemoryTransport, journal: Journal) -> None:
        for number in range(40):
            await journal.begin(FlushFleet(op_id=f"f{number}"), "flush", WORKERS)
        await journal.flush()
        transport.faults = Faults(drop=0.1, only="$KV.>")
        successor = Journal(MemoryKv(transport), LoopClock(), 11)
        num_tries = 0
        while not successor.entries:
            num_tries += 1
            with contextlib.suppress(DeadlineError):
                await successor.open()
        assert {entry.item.op_id for entry in successor.left_behind} == {f"f{number}" for number in range(40)}
        assert num_tries < 12

    with_journal(scenario)


def test_an_op_is_there_before_it_begins_and_with_its_report_afterwards() -> None:
    """As the next leader reads it."""

    async def scenario(transport: MemoryTransport, journal: Journal) -> None:
        await journal.begin(FlushFleet(op_id="f"), "flush", WORKERS, held=WORKERS[:1])
        (found,) = (await opened(transport, 11)).left_behind
        assert (found.request, found.members, found.held, found.item.term) == (
            FlushFleet(op_id="f"),
            WORKERS,
            WORKERS[:1],
            10,
        )
        journal.note("f", "commit", epoch=3, verified=WORKERS[1:])
        await journal.flush()
        (found,) = (await opened(transport, 11)).left_behind
        assert (found.item.phase, found.item.epoch, found.verified) == ("commit", 3, WORKERS[1:])
        journal.end(report("f"))
        await journal.flush()
        after = await opened(transport, 11)
        assert after.left_behind == ()
        assert after.entries[0].report == report("f")
        assert [(i.status, i.num_ok, i.settled_by) for i in after.newest(5)] == [(OpStatus.OK, 2, None)]

    with_journal(scenario)


def test_an_op_whose_first_write_isnt_confirmed_isnt_begun_but_its_end_is_written() -> None:
    """It raises for who begins it; what was written all the same is ended by the refusal's report."""

    async def scenario(transport: MemoryTransport, journal: Journal) -> None:
        transport.faults = Faults(delay_s=(0.4, 0.4), only="$KV.>")
        with pytest.raises(DeadlineError):
            await journal.begin(FlushFleet(op_id="f"), "flush", WORKERS)
        transport.faults = Faults()
        assert len((await opened(transport, 11)).left_behind) == 1
        journal.end(report("f", OpStatus.REFUSED))
        await journal.flush()
        assert (await opened(transport, 11)).left_behind == ()

    with_journal(scenario)


def test_writes_that_fail_are_tried_again_and_the_newest_state_wins() -> None:
    """The store is away for 5 s; nobody waited for it."""

    async def scenario(transport: MemoryTransport, journal: Journal) -> None:
        await journal.begin(FlushFleet(op_id="f"), "flush", WORKERS)
        transport.broker.disconnect(transport)
        journal.note("f", "pause")
        await asyncio.sleep(5.0)
        journal.end(report("f"))
        journal.set_version(Version(step=7), None)
        transport.broker.reconnect(transport)
        await journal.flush()
        after = await opened(transport, 11)
        assert (after.entries[0].report, after.mark is not None and after.mark.version) == (
            report("f"),
            Version(step=7),
        )

    with_journal(scenario)


def test_a_later_leaders_write_ends_this_one() -> None:
    """The old leader wakes up and writes what it still knew: it finds that the op was taken over."""

    async def main() -> None:
        transport = MemoryBroker().connect()
        old = await opened(transport, 10)
        await old.begin(FlushFleet(op_id="f"), "flush", WORKERS)
        new = await opened(transport, 11)
        writing = asyncio.create_task(new.run())
        new.take_over("f")
        await new.flush()
        old.end(report("f"))
        assert "somebody else" in await old.run()
        new.end(report("f", OpStatus.FAILED))
        await new.flush()
        (item,) = (await opened(transport, 12)).newest(1)
        assert (item.status, item.term, item.settled_by) == (OpStatus.FAILED, 10, 11)
        writing.cancel()
        await asyncio.wait({writing})

    run(main())


def test_the_oldest_ended_ops_are_dropped() -> None:
    """Bounded, here and in the store; an op that still runs stays."""

    async def scenario(transport: MemoryTransport, journal: Journal) -> None:
        await journal.begin(FlushFleet(op_id="runs"), "flush", WORKERS)
        await asyncio.sleep(0.01)
        for number in range(MAX_ENTRIES + 5):
            await journal.begin(FlushFleet(op_id=f"f{number}"), "flush", WORKERS)
            journal.end(report(f"f{number}"))
            await journal.flush()
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        names = [entry.item.op_id for entry in (await opened(transport, 11)).entries]
        assert len(names) == MAX_ENTRIES
        assert (names[0], names[-1], "f5" in names) == ("runs", f"f{MAX_ENTRIES + 4}", False)

    with_journal(scenario)


def test_a_report_that_fits_no_message_keeps_what_isnt_ok() -> None:
    """The journal is no place for a megabyte; who failed is what counts."""

    async def scenario(transport: MemoryTransport, journal: Journal) -> None:
        many = tuple(
            WorkerOutcome(worker=WorkerId(f"backend/{n}"), outcome=Outcome.OK, phase="x" * 200) for n in range(5000)
        )
        bad = WorkerOutcome(worker=WorkerId("backend/0"), outcome=Outcome.FAILED, phase="load")
        whole = Report(op_id="f", op="flush", status=OpStatus.PARTIAL, outcomes=(bad, *many), phases_s={}, took_s=1.0)
        await journal.begin(FlushFleet(op_id="f"), "flush", WORKERS)
        journal.end(whole)
        await journal.flush()
        kept = (await opened(transport, 11)).entries[0]
        assert kept.report is not None
        assert (kept.report.outcomes, kept.item.num_ok) == ((bad,), 5000)

    with_journal(scenario)


def test_the_version_is_written_once_for_each_change_and_with_what_a_rollback_left() -> None:
    """The next leader must not take a worker that was left at the higher one for the fleet's version."""

    async def scenario(transport: MemoryTransport, journal: Journal) -> None:
        journal.set_version(Version(step=8), None)
        await journal.flush()
        journal.set_version(Version(step=8), None)
        assert journal._unwritten == {}
        journal.set_version(Version(step=5), Version(step=8))
        await journal.flush()
        mark = (await opened(transport, 11)).mark
        assert mark is not None
        assert (mark.version, mark.rolled_back_from, mark.term) == (Version(step=5), Version(step=8), 10)

    with_journal(scenario)


def mark(term: int, *paths: str) -> LoraMark:
    """A fleet with an adapter from each of these folders."""
    loras = tuple(
        FleetLora(
            name=f"n{number}", revision=1, checksum="a" * 64, source=FolderSource(path=path), since=1.0, op_id="op"
        )
        for number, path in enumerate(paths)
    )
    return LoraMark(term=term, op_id="op", loras=loras)


def test_the_fleets_adapters_are_written_behind_and_read_by_the_next_leader() -> None:
    """The newest state; one that fits no message is left out, and the journal goes on."""

    async def scenario(transport: MemoryTransport, journal: Journal) -> None:
        for number in range(3):
            journal.set_loras(mark(10, f"/a{number}"))
        await journal.flush()
        assert (await opened(transport, 11)).lora_mark == mark(10, "/a2")
        journal.set_loras(mark(10, *("/" + "x" * 4000 for _ in range(256))))
        journal.set_version(Version(step=8), None)
        await journal.flush()
        after = await opened(transport, 11)
        assert after.lora_mark == mark(10, "/a2")
        assert after.mark is not None

    with_journal(scenario)


def test_a_later_leaders_adapters_end_this_one() -> None:
    """As with everything else that it wrote."""

    async def main() -> None:
        transport = MemoryBroker().connect()
        old, new = await opened(transport, 10), await opened(transport, 11)
        writing = asyncio.create_task(new.run())
        new.set_loras(mark(11, "/new"))
        await new.flush()
        old.set_loras(mark(10, "/old"))
        assert "somebody else" in await old.run()
        assert (await opened(transport, 12)).lora_mark == mark(11, "/new")
        writing.cancel()
        await asyncio.wait({writing})

    run(main())


def test_marks_that_can_t_be_read_end_no_leader_and_are_written_anew() -> None:
    """As an op that can't be read: the log names it. What the fleet has is learned from its workers and the ops."""

    async def main() -> None:
        transport = MemoryBroker().connect()
        kv = MemoryKv(transport)
        for key in (VERSION_KEY, LORAS_KEY):
            await kv.create(key, b'{"term": "ten"}')
        journal = await opened(transport, 11)
        assert (journal.mark, journal.lora_mark) == (None, None)
        writing = asyncio.create_task(journal.run())
        journal.set_version(Version(step=8), None)
        journal.set_loras(mark(11, "/a"))
        await journal.flush()
        after = await opened(transport, 12)
        assert after.mark is not None
        assert (after.mark.version, after.lora_mark) == (Version(step=8), mark(11, "/a"))
        writing.cancel()
        await asyncio.wait({writing})

    run(main())
