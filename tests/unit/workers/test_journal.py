"""Outcomes by op_id, bounded."""

import pytest

from rlbus.schemas import Command, FlushCache, PauseGeneration, Result, ResultStatus
from rlbus.workers.journal import MAX_REPLIES, Journal, digest_of

pytestmark = pytest.mark.unit


def command(op_id: str) -> Command:
    """A flush."""
    return Command(op_id=op_id, term=1, expires_at=1.0, body=FlushCache())


def result(op_id: str) -> Result:
    """Its result."""
    return Result(op_id=op_id, component="c", instance_id="1", boot_id="b", status=ResultStatus.OK)


def test_oldest_ended_op_is_forgotten_and_a_running_one_never() -> None:
    """The bound is on ended ops alone."""
    journal = Journal(max_ended=2)
    running = journal.begin(command("running"), None, 0.0)
    for op_id in ("a", "b", "c"):
        journal.end(journal.begin(command(op_id), None, 0.0), result(op_id))
    assert journal.find("a") is None
    found = journal.find("c")
    assert found is not None
    assert found.result == result("c")
    assert journal.find("running") is running
    assert journal.running == (running,)


def test_refused_op_leaves_no_record() -> None:
    """It may be tried again under the same op_id."""
    journal = Journal()
    journal.forget(journal.begin(command("a"), None, 0.0))
    assert journal.find("a") is None


def test_reply_addresses_are_kept_once_each_and_bounded() -> None:
    """One more than fit is said to be too many."""
    record = Journal().begin(command("a"), "r0", 0.0)
    assert record.add_reply("r0")
    assert record.add_reply(None)
    assert [record.add_reply(f"r{n}") for n in range(1, MAX_REPLIES + 1)] == [True] * (MAX_REPLIES - 1) + [False]
    assert record.replies == [f"r{n}" for n in range(MAX_REPLIES)]


def test_repeat_is_told_from_another_command_by_its_body() -> None:
    """Equal bodies have one digest in every process, different ones don't."""
    record = Journal().begin(command("a"), None, 0.0)
    assert record.digest == digest_of(FlushCache()) == "ee54941460f2cbad"
    assert record.digest != digest_of(PauseGeneration())
