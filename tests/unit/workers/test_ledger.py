"""What a worker knows after its process was started again."""

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from rlbus.schemas import (
    Fault,
    FaultCode,
    FlushCache,
    Generation,
    GetOutcome,
    InitGroup,
    LoadWeights,
    OutcomeData,
    PauseGeneration,
    ReceiveWeights,
    Result,
    ResultStatus,
    ResumeGeneration,
    SleepTag,
    Version,
    WeightsState,
    WeightsView,
    route_of,
)
from rlbus.testing import run
from rlbus.workers import ledger as ledgers
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, failing
from rlbus.workers.journal import Journal, digest_of
from rlbus.workers.ledger import Began, Ledger, Noted
from rlbus.workers.testing import COMPONENT, INSTANCE_ID, NAMESPACE, Rig, code_of, updated, worker_on_bus

pytestmark = pytest.mark.unit

V1 = Version(step=1)
Scene = Callable[[Rig], Coroutine[Any, Any, None]]
CLEAN = WeightsView(state=WeightsState.CLEAN, version=V1, last_good=V1)


def opened(folder: Path) -> Ledger:
    """The worker's ledger."""
    ledger = Ledger.open(folder, NAMESPACE, COMPONENT, INSTANCE_ID)
    assert ledger is not None
    return ledger


def file_of(folder: Path) -> Path:
    """Where it is."""
    return folder / NAMESPACE / COMPONENT / f"{INSTANCE_ID}.jsonl"


def result_of(op_id: str, message: str | None = None) -> Result:
    """Of an op that failed with these words, or went well."""
    fault = None if message is None else Fault(code=FaultCode.INTERNAL, message=message, detail={"more": message})
    status = ResultStatus.OK if fault is None else ResultStatus.FAILED
    return Result(op_id=op_id, component="c", instance_id="1", boot_id="b", status=status, fault=fault)


def lives(folder: Path, *scenes: Scene, script: FakeScript | None = None) -> None:
    """One life of the worker after the other, each with a new engine and what the file says."""

    async def main() -> None:
        for scene in scenes:
            with opened(folder) as ledger:
                async with worker_on_bus(FakeEngine(script), ledger=ledger) as rig:
                    await scene(rig)

    run(main())


async def update(rig: Rig) -> None:
    """To V1, under term 1."""
    await updated(rig, V1)


def test_restarted_worker_has_unknown_weights_and_is_not_paused(tmp_path: Path) -> None:
    """Its engine is a new one, whatever the old one had; nobody holds it."""

    async def again(rig: Rig) -> None:
        status = rig.agent.status()
        assert status.weights == WeightsView(state=WeightsState.UNKNOWN)
        assert (status.pause, status.epoch, status.term) == (None, None, 1)

    lives(tmp_path, update, again)


def test_worker_that_was_never_here_has_the_weights_it_was_started_with(tmp_path: Path) -> None:
    """A new fleet generates before its first update."""

    async def first(rig: Rig) -> None:
        assert rig.agent.status().weights == WeightsView(state=WeightsState.CLEAN)

    lives(tmp_path, first)


def test_restarted_worker_can_be_paused_resumed_and_given_the_same_version_again(tmp_path: Path) -> None:
    """Unknown weights are whole, and no floor for the next version."""

    async def again(rig: Rig) -> None:
        for body in (PauseGeneration(), ResumeGeneration()):
            assert (await rig.send(body, op_id=route_of(body))).status is ResultStatus.OK
        assert (await rig.agent.observe()).generation is Generation.RUNNING
        await updated(rig, V1, "u2", epoch=2)
        assert rig.agent.status().weights == CLEAN

    lives(tmp_path, update, again)


def test_unknown_weights_resume_when_the_lease_ends(tmp_path: Path) -> None:
    """No engine stays paused because somebody else died, a restarted one neither."""

    async def again(rig: Rig) -> None:
        await rig.send(PauseGeneration(lease_s=1.0), op_id="p")
        assert rig.agent.status().pause is not None
        await asyncio.sleep(2.0)
        assert rig.agent.status().pause is None

    lives(tmp_path, update, again)


def test_op_that_had_ended_is_answered_as_recorded_and_not_run_again(tmp_path: Path) -> None:
    """By the boot that ran it; another command under its op_id is refused."""

    boots = []

    async def first(rig: Rig) -> None:
        boots.append((await rig.send(PauseGeneration(), op_id="p")).boot_id)

    async def again(rig: Rig) -> None:
        result = await rig.send(PauseGeneration(), op_id="p", term=2)
        assert (result.status, result.boot_id) == (ResultStatus.OK, boots[0])
        assert "pause" not in rig.engine.calls
        assert code_of(await rig.send(FlushCache(), op_id="p")) is FaultCode.BAD_MESSAGE
        data = (await rig.send(GetOutcome(of_op_id="p"), op_id="o")).data
        assert data == OutcomeData(of_op_id="p", running=False, status=ResultStatus.OK)

    lives(tmp_path, first, again, again)


def test_failed_op_keeps_its_fault(tmp_path: Path) -> None:
    """Its words, too."""

    faults = []

    async def first(rig: Rig) -> None:
        body = ReceiveWeights(update_op_id="u", epoch=9, version=V1, manifest_digest="d", bucket_bytes=1024)
        assert code_of(await rig.send(body, op_id="refused")) is FaultCode.STALE_EPOCH
        faults.append((await rig.send(FlushCache(), op_id="f")).fault)

    async def again(rig: Rig) -> None:
        result = await rig.send(FlushCache(), op_id="f")
        assert (result.status, result.fault) == (ResultStatus.FAILED, faults[0])
        assert code_of(await rig.send(GetOutcome(of_op_id="refused"), op_id="o")) is FaultCode.UNKNOWN_OP

    lives(tmp_path, first, again, script=FakeScript({"flush_cache": {0: failing("no")}}))


def test_op_in_whose_middle_the_process_ended_has_a_fault_and_is_not_run_again(tmp_path: Path) -> None:
    """Whoever asks, by repeating it or by its op_id, is told so; also after one more restart."""
    with opened(tmp_path) as ledger:
        ledger.began("f", "flush_cache", digest_of(FlushCache()))

    async def again(rig: Rig) -> None:
        result = await rig.send(FlushCache(), op_id="f")
        assert (result.status, code_of(result)) == (ResultStatus.FAILED, FaultCode.WORKER_LOST)
        assert "flush_cache" not in rig.engine.calls
        data = (await rig.send(GetOutcome(of_op_id="f"), op_id="o")).data
        assert isinstance(data, OutcomeData)
        assert (data.running, data.status, data.fault) == (False, ResultStatus.FAILED, result.fault)

    lives(tmp_path, again, again)


def test_op_that_was_refused_after_all_is_not_there_after_a_restart(tmp_path: Path) -> None:
    """It changed nothing, and may be tried again under the same op_id."""

    async def first(rig: Rig) -> None:
        await rig.send(PauseGeneration(), op_id="p")
        load = LoadWeights(path="/nowhere", version=V1)
        assert (await rig.send(load, op_id="l")).status is ResultStatus.REFUSED

    async def again(rig: Rig) -> None:
        assert code_of(await rig.send(GetOutcome(of_op_id="l"), op_id="o")) is FaultCode.UNKNOWN_OP

    lives(tmp_path, first, again)


def test_controller_of_an_older_term_is_refused_after_a_restart(tmp_path: Path) -> None:
    """And so is a group that is over."""

    async def first(rig: Rig) -> None:
        await rig.send(InitGroup(plan=rig.plan(5)), term=7)

    async def again(rig: Rig) -> None:
        assert code_of(await rig.send(FlushCache(), term=6, op_id="f")) is FaultCode.STALE_TERM
        assert code_of(await rig.send(InitGroup(plan=rig.plan(4)), term=7, op_id="j4")) is FaultCode.STALE_EPOCH
        assert (await rig.send(InitGroup(plan=rig.plan(6)), term=7, op_id="j6")).status is ResultStatus.OK

    lives(tmp_path, first, again)


def test_torn_last_line_and_rubbish_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What stands before them counts; a log line says how many."""
    with opened(tmp_path) as ledger:
        ledger.note(Noted(term=3, epoch=None, epoch_term=0, weights=CLEAN))
        ledger.began("f", "flush_cache", "d")
    with file_of(tmp_path).open("ab") as file:
        file.write(b'\xff\xfe\n{"type":"none"}\n{"type":"began","op_id":"x"')
    with caplog.at_level(logging.WARNING), opened(tmp_path) as again:
        assert again.past.noted is not None
        assert (again.past.noted.term, list(again.past.running)) == (3, ["f"])
    assert "3 lines can't be read" in caplog.text
    with opened(tmp_path) as clean:
        assert clean.past.num_unread == 0


def test_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ops there are, only the last are kept, and running ones are never dropped."""
    monkeypatch.setattr(ledgers, "MAX_OPS", 4)
    monkeypatch.setattr(ledgers, "MAX_LINES", 16)
    with opened(tmp_path) as ledger:
        ledger.began("runs", "flush_cache", "d")
        for number in range(100):
            ledger.began(f"op-{number}", "flush_cache", "d")
            ledger.over(result_of(f"op-{number}"), "flush_cache", "d")
            assert len(file_of(tmp_path).read_bytes().splitlines()) <= 16
    with opened(tmp_path) as again:
        assert list(again.past.over) == [f"op-{number}" for number in range(96, 100)]
        assert list(again.past.running) == ["runs"]


def test_aborts_push_no_mutation_out_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of them are kept beside, and after a restart the worker knows both."""
    monkeypatch.setattr(ledgers, "MAX_OPS", 4)
    monkeypatch.setattr(ledgers, "MAX_LINES", 16)
    with opened(tmp_path) as ledger:
        ledger.over(result_of("flush"), "flush_cache", "d")
        for number in range(100):
            ledger.began(f"abort-{number}", "abort_request", "d")
            ledger.over(result_of(f"abort-{number}"), "abort_request", "d")
    with opened(tmp_path) as again:
        assert list(again.past.over) == ["flush"]
        assert list(again.past.beside) == [f"abort-{number}" for number in range(96, 100)]
        journal = Journal()
        journal.keep_in(again, "c", "1", "b")
        assert all(journal.find(op_id) is not None for op_id in ("flush", "abort-99"))


def test_words_of_a_long_fault_are_cut(tmp_path: Path) -> None:
    """A line has a bound."""
    with opened(tmp_path) as ledger:
        ledger.over(result_of("op", "x" * 100_000), "flush_cache", "d")
    assert max(map(len, file_of(tmp_path).read_bytes().splitlines())) < ledgers.MAX_LINE_BYTES


def test_file_of_another_day_is_not_read(tmp_path: Path) -> None:
    """Its term must not shut out the controller of now; a worker that lives keeps its file young."""
    with opened(tmp_path) as ledger:
        ledger.note(Noted(term=3, epoch=None, epoch_term=0, weights=CLEAN))
        long_ago = time.time() - ledgers.KEEP_S - 60
        os.utime(file_of(tmp_path), (long_ago, long_ago))
        ledger.touch()
    with opened(tmp_path) as again:
        assert again.past.noted is not None
        os.utime(file_of(tmp_path), (long_ago, long_ago))
    with opened(tmp_path) as late:
        assert late.past.noted is None


def test_sleep_is_known_from_a_file_of_another_day(tmp_path: Path) -> None:
    """It lasts until somebody wakes the worker; nothing else of that file counts but how its engine was."""
    with opened(tmp_path) as ledger:
        asleep = to_wake = (SleepTag.WEIGHTS,)
        ledger.note(Noted(term=3, epoch=5, epoch_term=3, weights=CLEAN, asleep=asleep, to_wake=to_wake))
        ledger.over(result_of("f"), "flush_cache", "d")
    long_ago = time.time() - ledgers.KEEP_S - 60
    os.utime(file_of(tmp_path), (long_ago, long_ago))
    with opened(tmp_path) as late:
        assert late.past.noted == Noted(term=0, epoch=None, epoch_term=0, weights=CLEAN, asleep=asleep, to_wake=to_wake)
        assert not late.past.over


def test_adapters_are_known_from_a_file_of_another_day_until_how_the_worker_is_is_noted_anew(tmp_path: Path) -> None:
    """An engine that outlived its agent reads their files, however long ago; nothing else of the file counts."""
    loras = (("policy", 7, "a" * 64),)
    with opened(tmp_path) as ledger:
        ledger.note(Noted(term=3, epoch=5, epoch_term=3, weights=CLEAN, loras=loras))
        assert ledger.past.loras == ()
    long_ago = time.time() - ledgers.KEEP_S - 60
    os.utime(file_of(tmp_path), (long_ago, long_ago))
    for _ in range(2):  # the first one comes to nothing before it has noted how its worker is
        with opened(tmp_path) as late:
            assert (late.past.noted, late.past.loras) == (None, loras)
    with opened(tmp_path) as late:
        late.note(Noted(term=0, epoch=None, epoch_term=0, weights=CLEAN))
    with opened(tmp_path) as later:
        assert later.past.loras == ()


def test_second_process_of_the_same_worker_keeps_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It says so, and goes on."""
    with opened(tmp_path):
        assert Ledger.open(tmp_path, NAMESPACE, COMPONENT, INSTANCE_ID) is None
    assert "another process" in caplog.text
    opened(tmp_path).close()


def test_folder_that_cannot_be_made_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the worker goes on."""
    (tmp_path / "file").touch()
    assert Ledger.open(tmp_path / "file", NAMESPACE, COMPONENT, INSTANCE_ID) is None
    assert "not kept over a restart" in caplog.text


def test_ledger_that_could_not_be_written_is_whole_again_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No op fails by it; it is said once; and an op that ended meanwhile isn't taken for one that was cut off."""

    def full(fd: int, data: bytes) -> None:
        os.write(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(tmp_path) as ledger:
        ledger.began("a", "flush_cache", "d")
        with monkeypatch.context() as patch:
            patch.setattr(ledgers, "_write", full)
            ledger.over(result_of("a"), "flush_cache", "d")
            ledger.began("b", "flush_cache", "d")
        ledger.over(result_of("b"), "flush_cache", "d")
        ledger.began("c", "flush_cache", "d")
    assert caplog.text.count("No space left") == 1
    with opened(tmp_path) as again:
        assert (list(again.past.over), list(again.past.running), again.past.num_unread) == (["a", "b"], ["c"], 0)


def test_ledger_that_cannot_be_written_at_the_start_still_says_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: what was read counts, and the file is written when there is room."""

    def full(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(tmp_path) as ledger:
        ledger.began("a", "flush_cache", "d")
    with monkeypatch.context() as patch:
        patch.setattr(ledgers, "_write", full)
        second = opened(tmp_path)
    with second:
        assert list(second.past.running) == ["a"]
        second.began("b", "flush_cache", "d")
    with opened(tmp_path) as third:
        assert list(third.past.running) == ["a", "b"]


def test_read_keeps_the_newest_note() -> None:
    """Lines are taken in order."""
    past = ledgers.read(b'{"type":"began","op_id":"a","route":"r","digest":"d"}\n\n')
    assert past.running == {"a": Began("a", "r", "d")}
